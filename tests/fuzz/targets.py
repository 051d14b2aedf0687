"""The targets, how they are built, and their corpora: a file of lines for each target, each an input in hexadecimal,
those that have found a fault with what it was behind a "#"."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CORPORA: Final = HERE / "corpus"
C_TARGETS: Final = ("words", "frames", "messages")
PYTHON_TARGETS: Final = ("control", "peers", "config")
TARGETS: Final = (*C_TARGETS, *PYTHON_TARGETS)
BUILD_LIMIT_S: Final = 300
_SANITIZERS: Final = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# SIGBUS is the daemon's own (guard.c).
ENVIRONMENT: Final = {"ASAN_OPTIONS": "handle_sigbus=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def build(directory: Path, compiler: str, *, fuzzer: bool) -> dict[str, Path]:
    """The C targets: with libFuzzer, or to run inputs again. CalledProcessError."""
    flags = [
        compiler,
        "-std=gnu11",
        "-g",
        "-O1",
        "-pthread",
        *_SANITIZERS,
        "-I",
        str(ROOT / "shm_layout"),
        "-I",
        str(ROOT / "daemon"),
    ]
    compiled = [*flags, "-fsanitize=fuzzer-no-link"] if fuzzer else flags
    left_out = ("daemon/rail.c", "daemon/verbs_api.c")  # world.c and device.c have them
    common = [ROOT / name for name in _plane_sources() if not name.startswith(left_out)]
    shared = [*common, HERE / "world.c", HERE / "device.c"]
    sources = [*shared, HERE / "replay.c", *(HERE / f"{target}.c" for target in C_TARGETS)]

    def compile_one(source: Path) -> Path:
        made = directory / f"{source.stem}.o"
        _run([*compiled, "-c", "-o", str(made), str(source)])
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = {source: str(made) for source, made in zip(sources, pool.map(compile_one, sources), strict=True)}
    binaries: dict[str, Path] = {}
    for target in C_TARGETS:
        binaries[target] = directory / target
        parts = [objects[source] for source in (*shared, HERE / f"{target}.c")]
        link = [*flags, "-fsanitize=fuzzer", *parts] if fuzzer else [*flags, *parts, objects[HERE / "replay.c"]]
        _run([*link, "-o", str(binaries[target])])
    return binaries


def builds(compiler: str, flags: str, text: str) -> bool:
    """Whether a program is made of this text."""
    if shutil.which(compiler) is None:
        return False
    command = [compiler, *flags.split(), "-x", "c", "-o", os.devnull, "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False).returncode == 0


def has_verbs(compiler: str) -> bool:
    return builds(compiler, "-c", "#include <infiniband/verbs.h>\n")


def _plane_sources() -> list[str]:
    """The C of the data plane, as the package is built of it."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    [sources] = [module["sources"] for module in modules if module["name"] == "railrelay.daemon.plane"]
    return [source for source in sources if source.endswith(".c")]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, timeout=BUILD_LIMIT_S)


def python_target(target: str) -> list[str]:
    return [sys.executable, "-m", "fuzz.python_target", target]


def corpus(target: str) -> dict[bytes, str]:
    """Inputs, and the faults that they have found."""
    path, inputs = CORPORA / f"{target}.hex", dict[bytes, str]()
    for line in path.read_text().splitlines() if path.exists() else ():
        data, _, fault = line.partition("#")
        inputs[bytes.fromhex(data)] = fault.strip()
    return inputs


def keep(target: str, inputs: Mapping[bytes, str]) -> None:
    CORPORA.mkdir(exist_ok=True)
    ordered = sorted(inputs, key=lambda data: (len(data), data))
    lines = [data.hex() + f"  # {inputs[data]}" * bool(inputs[data]) + "\n" for data in ordered]
    (CORPORA / f"{target}.hex").write_text("".join(lines))


def unpack(inputs: Iterable[bytes], directory: Path) -> list[Path]:
    """A file for each input; the directory is made."""
    directory.mkdir()
    paths: list[Path] = []
    for number, data in enumerate(inputs):
        paths.append(directory / f"{number:04}")
        paths[-1].write_bytes(data)
    return paths
