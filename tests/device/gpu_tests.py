"""The tests of tests/gpu, as a section."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from device.report import Options, Report, Skipped

_TESTS: Final = Path(__file__).resolve().parents[1]


def run(report: Report, options: Options) -> None:
    if not (_TESTS / "gpu").is_dir():
        raise Skipped("there is no tests/gpu")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(_TESTS / "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_TESTS.parent)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    summary = next(
        (line for line in reversed(done.stdout.splitlines()) if re.search(r" in [0-9.]+s", line)), "no result"
    )
    report.row(f"pytest tests/gpu, {options.gpus} GPUs", summary.strip("= "), "all pass", done.returncode == 0)
