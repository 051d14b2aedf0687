"""The RDMA devices that tests use, and pyverbs. A module that imports this one, or what is made with it, skips where
there are no devices. If the interpreter has no pyverbs, the distribution's is taken, and no other of its packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Final

import pytest

RAILS: Final = dict(rail.split("=") for rail in os.environ.get("RAILRELAY_VERBS_RAILS", "").split(",") if rail)
NO_DEVICE: Final = "no RDMA device; tests/vm/run boots a machine with soft-RoCE"
_PYVERBS: Final = Path("/usr/lib/python3/dist-packages/pyverbs")

if not RAILS:
    pytest.skip(NO_DEVICE, allow_module_level=True)

if importlib.util.find_spec("pyverbs") is None and _PYVERBS.exists():
    _spec = importlib.util.spec_from_file_location(
        "pyverbs", _PYVERBS / "__init__.py", submodule_search_locations=[str(_PYVERBS)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["pyverbs"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["pyverbs"])
