"""What campaigns refuse, and what they need to judge."""

from __future__ import annotations

import pytest
from soak import levels, main


@pytest.mark.parametrize("minutes", ["0.3", "0", "nan", "one"])
def test_a_soak_too_short_to_judge_is_refused_with_the_shortest_time(
    minutes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["--minutes", minutes])
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"argument --minutes: {minutes}: expected 1 to 100000")


def test_levels_are_judged_as_soon_as_there_are_enough_looks() -> None:
    for looks in range(20):
        series = levels.Series("a process", {"fds": 4})
        for at in range(looks):
            series.add(float(at), {"fds": 10})
        assert [row["flat"] for row in series.judged()] == [levels.enough(looks)]
