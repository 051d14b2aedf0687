"""A segment's life: every half-ready state has a name, only a published one opens, and nothing stays behind."""

import os
import resource
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import AreaPlan, NoSharedMemory, Segment, SegmentError, SegmentState


@pytest.fixture
def name() -> Iterator[str]:
    """A name of shared memory that is gone after the test."""
    text = f"/railrelay.test-{os.getpid()}.node"
    yield text
    segment.unlink(text)


def create(name: str, owner_pid: int | None = None) -> Segment:
    constants = abi.CONSTANTS
    areas = [
        AreaPlan(constants["AREA_CLIENTS"], "client_state", 3),
        AreaPlan(constants["AREA_SLOT_TABLES"], "block", 2, 5),
    ]
    header = {"instance": 7, "rails": 1}
    return segment.create(
        name, constants["SEGMENT_NODE"], areas, header, mode=0o600, owner_pid=owner_pid or os.getpid()
    )


def poke(name: str, field: str, value: int) -> None:
    facts = abi.FIELDS["segment_header"][field]
    with open(f"/dev/shm{name}", "r+b") as raw:
        raw.seek(facts.offset)
        raw.write(struct.pack({4: "I", 8: "Q"}[facts.size], value))


def test_states_from_absent_to_ready(name: str) -> None:
    assert segment.look(name) is SegmentState.ABSENT
    os.close(segment.open_lock(name))
    assert segment.look(name) is SegmentState.UNSIZED
    segment.unlink(name)
    with create(name) as made:
        assert segment.look(name) is SegmentState.UNPUBLISHED
        made.publish()
        assert segment.look(name) is SegmentState.READY
    assert segment.look(name) is SegmentState.ABSENT


def test_segment_that_is_not_published_does_not_open(name: str) -> None:
    with create(name), pytest.raises(SegmentError, match="not published") as failure:
        segment.open_segment(name, timeout_s=0)
    assert failure.value.state is SegmentState.UNPUBLISHED


def test_other_major_version_is_named_with_ours(name: str) -> None:
    with create(name) as made:
        made.publish()
        poke(name, "version", 99 << 16)
        with pytest.raises(SegmentError, match=r"99, this program reads 1") as failure:
            segment.open_segment(name)
    assert failure.value.state is SegmentState.INCOMPATIBLE


def test_other_minor_version_opens(name: str) -> None:
    with create(name) as made:
        made.publish()
        poke(name, "version", abi.CONSTANTS["ABI_VERSION"] + 1)
        with segment.open_segment(name) as opened:
            assert opened.header.get(0, "instance") == 7


def test_foreign_and_truncated_objects_are_named(name: str) -> None:
    with create(name) as made:
        made.publish()
        poke(name, "magic", 1)
        assert segment.look(name) is SegmentState.FOREIGN
        poke(name, "magic", abi.CONSTANTS["MAGIC"])
        os.truncate(f"/dev/shm{name}", made.nbytes - 1)
        assert segment.look(name) is SegmentState.TRUNCATED


def test_second_creator_of_a_name_fails_and_leaves_the_first_alone(name: str) -> None:
    with create(name) as made:
        made.publish()
        with pytest.raises(FileExistsError):
            create(name)
        assert segment.look(name) is SegmentState.READY


def test_reader_cannot_write(name: str) -> None:
    with create(name) as made:
        made.publish()
        with segment.open_segment(name) as opened, pytest.raises(TypeError):
            opened.header.set(0, "rails", 2)


def test_areas_are_found_through_the_table(name: str) -> None:
    with create(name) as made:
        clients = made.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state")
        clients.write(2, pid=4711, attached_ns=1 << 63, name="é" * 40)
        tables = made.area(abi.CONSTANTS["AREA_SLOT_TABLES"], "block")
        made.publish()
        with segment.open_segment(name) as opened:
            record = opened.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state").record(2)
            with pytest.raises(KeyError):
                opened.area(abi.CONSTANTS["AREA_PEERS"], "peer_state")
        assert (record["pid"], record["attached_ns"], record["name"]) == (4711, 1 << 63, "é" * 31)
        assert "reserved" not in record
        assert (clients.count, tables.count) == (3, 2)
        with pytest.raises(IndexError):
            clients.get(3, "pid")


def test_areas_start_on_lines_of_their_own(name: str) -> None:
    with create(name) as made:
        size = abi.SIZES["area"]
        table = segment.Area(made.buffer, "area", abi.CONSTANTS["AREA_TABLE_OFFSET"], size, 2)
        offsets = [table.get(row, "offset") for row in range(2)]
        assert all(offset % abi.CONSTANTS["LINE_BYTES"] == 0 for offset in offsets)
        assert offsets[1] >= offsets[0] + 3 * abi.SIZES["client_state"]
        assert table.get(1, "stride") == 5 * abi.SIZES["block"]


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much(name: str) -> None:
    with pytest.raises(NoSharedMemory, match=r"\d+ bytes of shared memory wanted, \d+ free"):
        segment.create_object(name, 1 << 50, 0o600)
    assert segment.look(name) is SegmentState.ABSENT


def test_owner_is_dead_once_its_process_has_exited(name: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with create(name, owner_pid=child.pid) as made:
        assert segment.owner_alive(made)
        child.communicate(timeout=10)
        assert not segment.owner_alive(made)


def test_close_is_idempotent_and_unlinks_only_what_was_created(name: str) -> None:
    made = create(name)
    made.publish()
    opened = segment.open_segment(name)
    opened.close()
    opened.close()
    assert segment.look(name) is SegmentState.READY
    made.close()
    made.close()
    assert segment.look(name) is SegmentState.ABSENT


@pytest.mark.parametrize("spare", [0, 1])
def test_without_descriptors_nothing_is_left(name: str, spare: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            create(name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert segment.look(name) is SegmentState.ABSENT
    assert os.listdir("/proc/self/fd") == before
