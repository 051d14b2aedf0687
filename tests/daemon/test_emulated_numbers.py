"""Numbers under which helpers of emulated NICs know memory."""

import pytest

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import emulated
from railrelay.daemon.emulated import Helpers, made_up_base


def test_made_up_addresses_of_all_numbers_are_64_bits() -> None:
    assert made_up_base(emulated.MAX_MEMORIES) < 1 << 64
    assert made_up_base(emulated.MAX_MEMORIES + 1) == made_up_base(0)


def test_a_number_comes_again_when_all_others_had_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "MAX_MEMORIES", 4)
    helpers = Helpers()
    assert [helpers.new_memory() for _ in range(3)] == [1, 2, 3]
    helpers.free_memory(1)
    assert [helpers.new_memory() for _ in range(2)] == [4, 1]
    with pytest.raises(RelayError, match="4 pieces of memory") as failure:
        helpers.new_memory()
    assert failure.value.code is ErrorCode.LIMIT
    helpers.free_memory(3)
    assert helpers.new_memory() == 3
