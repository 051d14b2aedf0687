"""Runs a Python target: with inputs named, those and no more; else under atheris, whose options (those of libFuzzer)
come after the target's name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Final

TARGETS: Final = {"control": "fuzz.control", "peers": "fuzz.peers", "config": "fuzz.config_file"}


def main() -> int:
    name, *arguments = sys.argv[1:]
    if arguments[:1] == ["--replay"]:
        target = importlib.import_module(TARGETS[name])
        for path in map(Path, arguments[1:]):
            print(path, flush=True)  # the last one is at fault if the process dies
            target.run(path.read_bytes())
        if "fuzz.scene" in sys.modules:
            sys.modules["fuzz.scene"].close()
        return 0
    import atheris

    with atheris.instrument_imports(include=["railrelay"]):
        target = importlib.import_module(TARGETS[name])
    itself = f"{sys.executable} -m fuzz.python_target {name}"  # libFuzzer calls it again in order to merge
    atheris.Setup([itself, *arguments], target.run)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
