"""One rule says where the control socket is, for daemon and client."""

import os
import stat
from pathlib import Path

import pytest

from railrelay.client import paths
from railrelay.client.errors import ConnectError


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An ordinary user's view: no system directory, a runtime directory of the session."""
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", tmp_path / "absent")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def as_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_is_root", lambda: False)


def test_an_instance_name_cannot_leave_the_directory() -> None:
    for name in ("", "../x", "a/b", "a" * 33, "a.b"):
        with pytest.raises(ConnectError, match="expected 1 to 32 letters"):
            paths.default_socket(name)


def test_a_user_gets_the_private_runtime_directory(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ordinary(monkeypatch)
    assert paths.default_socket("lab") == user / "railrelay" / "lab.sock"
    assert not (user / "railrelay").exists()
    assert paths.default_socket("lab", create=True) == user / "railrelay" / "lab.sock"
    assert stat.S_IMODE((user / "railrelay").stat().st_mode) == 0o700


def test_a_directory_that_others_can_enter_is_refused(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ordinary(monkeypatch)
    (user / "railrelay").mkdir(mode=0o755)
    with pytest.raises(ConnectError, match="mode 0700"):
        paths.default_socket("lab", create=True)


def test_a_link_in_place_of_the_directory_is_refused(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ordinary(monkeypatch)
    (user / "elsewhere").mkdir(mode=0o700)
    (user / "railrelay").symlink_to(user / "elsewhere")
    with pytest.raises(ConnectError, match="must be a directory"):
        paths.default_socket("lab")


def test_a_client_takes_the_socket_of_the_system_daemon(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_ordinary(monkeypatch)
    system = user / "system"
    system.mkdir()
    (system / "lab.sock").touch()
    monkeypatch.setattr(paths, "SYSTEM_DIRECTORY", system)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert paths.default_socket("lab") == system / "lab.sock"
    assert paths.default_socket("other").parent == user / "railrelay"


def test_root_uses_and_makes_the_system_directory(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_is_root", lambda: True)
    assert paths.default_socket("lab", create=True) == user / "absent" / "lab.sock"
    assert (user / "absent").is_dir()
