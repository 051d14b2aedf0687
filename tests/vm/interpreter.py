"""The interpreter of the tests: a virtual environment with the railrelay of this working tree. The machine sees it
where it is here."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from vm.packages import NotPrepared, said

ROOT: Final = Path(__file__).resolve().parents[2]
_LAYERS: Final = ("shm_layout", "client", "daemon")
_FILES: Final = ("pyproject.toml", "README.md", "LICENSE")


def built(cache: Path) -> Path:
    """Built anew only after a change of the package. One for each working tree and version of Python."""
    tree = hashlib.sha256(f"{ROOT} {sys.version}".encode()).hexdigest()[:8]
    folder = cache / f"venv-{tree}"
    python, stamp = folder / "bin" / "python", folder / "built-from"
    digest = _digest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(f"vm: building railrelay for {python}", flush=True)
        stamp.unlink(missing_ok=True)
        if not python.exists():
            said([sys.executable, "-m", "venv", "--clear", str(folder)])
        with tempfile.TemporaryDirectory(dir=cache) as copy:  # a build leaves files beside the sources
            for layer in _LAYERS:
                shutil.copytree(ROOT / layer, Path(copy) / layer, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            for name in _FILES:
                shutil.copy(ROOT / name, copy)
            said([str(python), "-m", "pip", "install", "-q", f"{copy}[test]"])
        stamp.write_text(digest)
    return python


def checked(python: Path) -> Path:
    """Whether it can run the tests, here as well as in the machine."""
    said([str(python), "-c", "import pytest, railrelay.daemon"])
    loads = [str(python), "-c", "import helpers.verbs_rails, pyverbs.device"]
    try:
        said(loads, cwd=ROOT / "tests", RAILRELAY_VERBS_RAILS="none=none")
    except NotPrepared as failure:
        reason = f"{python} does not load python3-pyverbs, which is built for /usr/bin/python3"
        raise NotPrepared(f"{reason}: {failure}") from None
    return python


def _digest() -> str:
    digest = hashlib.sha256()
    paths = [path for layer in _LAYERS for path in sorted((ROOT / layer).rglob("*"))]
    for path in [*paths, ROOT / "pyproject.toml"]:
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
