"""The compiled shim of the C headers."""

from __future__ import annotations

import ctypes

import pytest

from helpers import shim as shims


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return shims.build(tmp_path_factory.mktemp("shim"))
