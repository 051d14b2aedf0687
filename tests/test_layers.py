"""Rules of the whole package: who imports whom, codes that C and Python share, and documentation of what is public."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from helpers.processes import TESTS

from railrelay.client import errors

ROOT: Final = TESTS.parent
LAYERS: Final = ("shm_layout", "client", "daemon")  # each may import itself and what is before it
PREFIX: Final = "railrelay."


def sources(layer: str, *suffixes: str) -> list[Path]:
    return sorted(path for suffix in suffixes for path in (ROOT / layer).rglob(f"*{suffix}"))


def imported(path: Path) -> Iterator[str]:
    """Modules of railrelay that a Python or Cython file imports."""
    if path.suffix == ".pyx":
        yield from re.findall(rf"^\s*c?(?:from|import)\s+({re.escape(PREFIX)}[\w.]+)", path.read_text(), re.MULTILINE)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "railrelay":
                yield from (PREFIX + name.name for name in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_itself_and_the_layers_below(layer: str) -> None:
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    found = sources(layer, ".py", ".pyi", ".pyx")
    assert found
    for path in found:
        for module in imported(path):
            if module.startswith(PREFIX):
                assert module.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_the_daemon_loads_nothing_of_numpy_and_cuda_before_a_gpu_is_configured() -> None:
    code = "import sys, railrelay.daemon.main as _; print(*{'numpy', 'cuda', 'railrelay.client.cuda'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("layer", LAYERS)
def test_c_files_include_headers_of_their_own_layer_and_of_those_below_only(layer: str) -> None:
    own = {path.name for folder in LAYERS[: LAYERS.index(layer) + 1] for path in (ROOT / folder).glob("*.h")}
    for path in sources(layer, ".c", ".h"):
        for header in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            assert header in own, f"{path.relative_to(ROOT)} includes {header}"


def test_the_memory_orders_have_one_home() -> None:
    for layer in LAYERS:
        for path in sources(layer, ".c", ".h", ".pyx"):
            if path.name != "atomics.h":
                assert "__atomic_" not in path.read_text(), f"{path.relative_to(ROOT)} has atomics of its own"


def test_each_sync_label_is_at_a_release_and_at_an_acquire() -> None:
    text = {path: path.read_text() for layer in LAYERS for path in sources(layer, ".c", ".h", ".py")}
    labels = set(re.findall(r"^ \*   (\w+) +.*->", (ROOT / "shm_layout" / "abi.h").read_text(), re.MULTILINE))
    assert len(labels) > 5
    for label in labels:
        lines = [line for content in text.values() for line in content.splitlines() if f"SYNC {label}" in line]
        assert len(lines) >= 2, f"label {label} is at {lines}"
        if label != "version":  # its release is a Python store
            assert any("_store_release_" in line for line in lines), label
            assert any("_load_acquire_" in line for line in lines), label


def test_every_code_that_the_c_part_raises_is_an_error_code() -> None:
    known = {code.value for code in errors.ErrorCode}
    found = {
        (path.name, code)
        for path in sources("client", ".c", ".pyx")
        for code in re.findall(r'(?:\b\w*fail\(error, |SubmitError\()"(\w+)"', path.read_text())
    }
    assert len(found) > 8
    assert {code for _, code in found} <= known, sorted(found)


@pytest.mark.parametrize("name", importlib.import_module("railrelay.client").__all__)
def test_what_is_public_says_what_it_is(name: str) -> None:
    thing = getattr(importlib.import_module("railrelay.client"), name)
    if thing.__module__ == "railrelay.client.core":
        return  # compiled; its stub says it
    assert inspect.getdoc(thing), f"{name} has no docstring"
    if inspect.isclass(thing) and not issubclass(thing, (Exception, int, str)):
        for member, function in vars(thing).items():
            if not member.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                assert function.__doc__, f"{name}.{member} has no docstring"


def test_every_folder_of_the_package_is_typed() -> None:
    assert all((ROOT / layer / "py.typed").exists() for layer in LAYERS)
