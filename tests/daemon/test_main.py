"""The command line of railrelayd."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.nodes import SMALL, config_text, new_instance
from helpers.processes import LIMIT_S

from railrelay.shm_layout import segment

DAEMON = [sys.executable, "-m", "railrelay.daemon.main"]


@pytest.mark.parametrize("number", ["-1", "999", "0", "9" * 30, "one"])
def test_a_descriptor_that_cannot_be_written_to_is_a_wrong_option(number: str) -> None:
    """0 is open for reading."""
    command = [*DAEMON, "--ready-fd", number]
    done = subprocess.run(command, input="", stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith(f"railrelayd: error: argument --ready-fd: {number}: expected the number of an open")


def test_a_reader_that_has_gone_is_named_and_nothing_stays_behind(tmp_path: Path) -> None:
    instance, path = new_instance(), tmp_path / "railrelayd.toml"
    path.write_text(config_text(instance, tmp_path / "socket", 1, SMALL))
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [*DAEMON, "--config", str(path), "--ready-fd", str(write_end)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, pass_fds=[write_end])
    os.close(write_end)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"--ready-fd {write_end}: Broken pipe; its reader has gone")
    assert segment.objects(f"/railrelay.{instance}.") == []
