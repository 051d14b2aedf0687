"""pyverbs, wherever it is: in the interpreter's own path, or in the folder of the distribution's packages, from which
nothing else is taken. Its modules have moved between versions; callers see one shape."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

from railrelay.client.errors import ErrorCode, RelayError

PACKAGE: Final = "python3-pyverbs"
DISTRIBUTION: Final = Path("/usr/lib/python3/dist-packages")
_ENUMS: Final = ("pyverbs.libibverbs_enums", "pyverbs.enums")  # since 55 or so, and before


@dataclass(frozen=True)
class Pyverbs:
    device: ModuleType
    enums: ModuleType
    folder: Path
    version: str  # of rdma-core, "" if it does not say


@cache
def load(distribution: Path = DISTRIBUTION) -> Pyverbs:
    """RelayError NOT_SUPPORTED says what to install."""
    reasons = []
    if importlib.util.find_spec("pyverbs") is not None:
        try:
            return _modules()
        except ImportError as failure:  # such as a wheel that was built for another rdma-core
            reasons.append(f"the installed pyverbs does not load ({failure})")
            _forget()
    why = _unfit(distribution / "pyverbs")
    if not why:
        try:
            _bring_in(distribution)
            return _modules()
        except ImportError as failure:
            why = f"{distribution / 'pyverbs'} does not load ({failure})"
            _forget()
    reasons.append(why)
    raise RelayError(
        ErrorCode.NOT_SUPPORTED,
        f"discovery of RDMA NICs needs pyverbs: {'; '.join(reasons)}; install {PACKAGE} and run railrelayd with the"
        " distribution's Python, or name device and gid_index of each rail",
    )


def _unfit(package: Path) -> str:
    """Why this folder's modules are not for this interpreter; "" if they are."""
    built = sorted(package.glob("device.*.so"))
    if not built:
        return f"there is no {package}"
    if any((package / f"device{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        return ""
    tag = sys.implementation.cache_tag
    return f"{package} has {built[0].name}, which is not for this interpreter ({tag}, {sys.executable})"


def _bring_in(distribution: Path) -> None:
    """The package object with its __path__ is enough for its modules to be found; sys.path stays as it is."""
    spec = importlib.machinery.PathFinder.find_spec("pyverbs", [str(distribution)])
    if spec is None or spec.loader is None:
        raise ImportError(f"no package pyverbs in {distribution}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["pyverbs"] = module
    spec.loader.exec_module(module)


def _modules() -> Pyverbs:
    device = importlib.import_module("pyverbs.device")
    for name in _ENUMS:
        try:
            enums = importlib.import_module(name)
            break
        except ModuleNotFoundError:
            continue
    else:
        raise ImportError(f"neither {' nor '.join(_ENUMS)}")
    return Pyverbs(device, enums, Path(str(device.__file__)).parent, library_version())


def _forget() -> None:
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        del sys.modules[name]


def library_version(maps: Path = Path("/proc/self/maps")) -> str:
    """Of the libibverbs that this process has loaded, such as 44.0; "" if none or if its file name does not say."""
    match = re.search(r"/\S*libibverbs\.so\.\d+\.\d+\.(\d+\.\d+)$", maps.read_text(), re.MULTILINE)
    return match[1] if match else ""
