"""The ABI's golden table, and the rules that every structure of it keeps."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import pytest
from helpers.abi_table import table
from helpers.processes import TESTS

from railrelay.shm_layout import abi

WRITERS = {"creator", "daemon", "rail", "client", "stream", "any"}


def test_the_layout_of_this_major_version_has_not_changed() -> None:
    major = abi.CONSTANTS["ABI_MAJOR"]
    golden = TESTS / "golden" / f"abi-{major}.txt"
    difference = list(difflib.unified_diff(golden.read_text().splitlines(), table().splitlines(), lineterm="", n=1))
    assert not difference, (
        "\n".join(difference)
        + "\nProcesses of older builds read these words. Raise RR_ABI_MAJOR, or, if no release has this layout yet:"
        f" PYTHONPATH=tests python -m helpers.abi_table > tests/golden/abi-{major}.txt"
    )


@pytest.mark.parametrize("structure", abi.FIELDS)
def test_fields_follow_each_other_without_holes_and_aligned(structure: str) -> None:
    end = 0
    for name, facts in abi.FIELDS[structure].items():
        assert facts.offset == end, f"{structure}.{name} is at {facts.offset}, the field before it ends at {end}"
        assert facts.offset % min(8, facts.size // facts.count) == 0, f"{structure}.{name} is not aligned"
        assert facts.writer in WRITERS, f"{structure}.{name} is written by {facts.writer}"
        end += facts.size
    assert end == abi.SIZES[structure]


def lines(structure: str) -> Iterator[tuple[int, set[str]]]:
    """(line, writers of what is written after publication)"""
    line_bytes = abi.CONSTANTS["LINE_BYTES"]
    for line in range(-(-abi.SIZES[structure] // line_bytes)):
        first, last = line * line_bytes, (line + 1) * line_bytes
        yield (
            line,
            {
                facts.writer
                for name, facts in abi.FIELDS[structure].items()
                if facts.writer != "creator"
                and not name.startswith("reserved")
                and facts.offset < last
                and first < facts.offset + facts.size
            },
        )


@pytest.mark.parametrize("structure", abi.FIELDS)
def test_a_line_has_one_writer(structure: str) -> None:
    for line, writers in lines(structure):
        assert len(writers) <= 1, f"line {line} of {structure} is written by {sorted(writers)}"


@pytest.mark.parametrize("structure", [name for name in abi.FIELDS if len(list(lines(name))) > 1])
def test_structures_with_several_lines_fill_them(structure: str) -> None:
    assert abi.SIZES[structure] % abi.CONSTANTS["LINE_BYTES"] == 0


def test_versions_are_packed_as_major_and_minor() -> None:
    constants = abi.CONSTANTS
    assert constants["ABI_VERSION"] == constants["ABI_MAJOR"] << 16 | constants["ABI_MINOR"]
    assert constants["MAGIC"].to_bytes(8, "little") == b"RLAYREL1"


def test_every_rail_counter_has_a_label_of_its_own_and_a_place() -> None:
    assert len(set(abi.RAIL_COUNTERS)) == len(abi.RAIL_COUNTERS) <= abi.FIELDS["rail_state"]["counters"].count
