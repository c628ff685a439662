"""Where a node listens for the clients of its host by default, and where these look for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peercache.config import home
from peercache.config.home import default_home, nearest_home
from peercache.config.settings import Config
from peercache.errors import ConfigError

UID = 4242


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of root and of services, which is missing; this user is another one."""
    folder = tmp_path / "run"
    monkeypatch.setattr(home, "SYSTEM_FOLDER", folder)
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user"))
    return folder


def test_root_and_who_may_write_there_use_the_folder_of_the_system(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user of a service has it from systemd or the image."""
    assert default_home() != f"ipc://{system}/home.ipc"
    with monkeypatch.context() as changed:
        changed.setattr(os, "access", lambda *_: True)
        assert default_home() == nearest_home() == f"ipc://{system}/home.ipc"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_home() == nearest_home() == f"ipc://{system}/home.ipc"


def test_other_users_have_a_folder_of_their_own(
    system: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the system gives them, or one that only they may enter."""
    assert not system.exists()
    assert default_home() == nearest_home() == f"ipc://{tmp_path}/user/peercache/home.ipc"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_home() == nearest_home() == f"ipc:///tmp/peercache-{UID}/home.ipc"


def test_a_client_without_a_node_of_its_user_looks_in_the_folder_of_the_system(
    system: Path, tmp_path: Path
) -> None:
    """An engine of another user than the service's shares its node; an own node comes first."""
    system.mkdir()
    assert nearest_home() == f"ipc://{system}/home.ipc"

    own = tmp_path / "user" / "peercache" / "home.ipc"
    own.parent.mkdir(parents=True)
    own.touch()
    assert nearest_home() == f"ipc://{own}"


def test_a_node_in_this_process_and_the_address_of_another_contradict() -> None:
    """One of them is a mistake."""
    with pytest.raises(ConfigError, match="embedded"):
        Config.load({"embedded": True, "home": "ipc:///n.ipc"})
    assert Config.load({"embedded": "true"}).embedded


def test_a_folder_that_cannot_be_examined_is_no_error(
    system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that another user has made in /tmp; what opens it reports why it cannot be used."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"/{'x' * 300}")
    assert nearest_home() == f"ipc:///{'x' * 300}/peercache/home.ipc"
    system.mkdir()
    assert nearest_home() == f"ipc://{system}/home.ipc"
