"""The command tests/device/run: what it refuses, and what its exit status says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from device import main as run

FACTS = {"date": "2026-11-29 10:00 UTC", "text": "2 x H200", "gpus": 2}


def rows(path: Path, *figures: tuple[str, bool | None]) -> str:
    of_rows = [{"section": "fill", "case": "batch", "figure": figure, "good": good} for figure, good in figures]
    path.write_text(json.dumps({**FACTS, "rows": of_rows}))
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus -1", "--gpus: -1: expected 1 to 64"),
        ("--gpus 0", "--gpus: 0: expected 1 to 64"),
        ("--seconds -4", "--seconds: -4: expected 1 to 86400"),
        ("--seconds nan", "--seconds: nan: expected 1 to 86400"),
        ("--limit 3", "--limit: 3: expected 10 to 86400"),
        ("--section fill --seconds 5", "--seconds: is for the section stress only"),
        ("--host --gpus 1", "--host uses no GPU"),
        (
            "--results /none/such/RESULTS.md",
            "--results: /none/such/RESULTS.md: expected a file in a folder",
        ),
        ("--results /tmp", "--results: /tmp: expected a file"),
        ("--from /none/such.json", "--from: /none/such.json: No such file or directory"),
        (f"--from {__file__}", "not the rows.json of a run"),
    ],
)
def test_wrong_usage_is_named_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("figures", "status", "said"),
    [
        ([("90 GB/s", True), ("not measured: no time left", None)], 0, "not all was measured of: fill"),
        ([("90 GB/s", None)], 0, "0 of 0 figures"),
        ([("9 GB/s", False), ("90 GB/s", True)], 1, "1 of 2 figures"),
        ([("not measured: no time left", None)], 1, "nothing was measured"),
        ([], 1, "nothing was measured"),
    ],
)
def test_the_exit_status_says_whether_something_was_measured_and_nothing_missed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    figures: list[tuple[str, bool | None]],
    status: int,
    said: str,
) -> None:
    assert run.main(["--from", rows(tmp_path / "rows.json", *figures)]) == status
    shown = capsys.readouterr()
    assert said in shown.out + shown.err


def test_a_section_that_needs_a_gpu_is_refused_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--host", "--section", "doorbell", "fill"]) == 2
    assert "--section fill: needs a GPU" in capsys.readouterr().err


def test_the_list_of_sections_is_in_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.index(run.SECTIONS[line.split()[0]].text) for line in lines} == {len("kill-engine ")}
