"""The home address of a host's node, and where its clients look for it if `home` is not set.

Root and services use /run/peercache: systemd's RuntimeDirectory and the image make it for the user
of the node. Other users have their own runtime folder. A client of a user without a node of its own
looks in /run/peercache, too.
"""

from __future__ import annotations

import os
from pathlib import Path

SYSTEM_FOLDER = Path("/run/peercache")
"""The folder of root's nodes, and of users who may write to it."""

SOCKET = "home.ipc"


def default_folder() -> Path:
    """Return the folder in which a node of this user listens by default."""
    if os.geteuid() == 0 or os.access(SYSTEM_FOLDER, os.W_OK):
        return SYSTEM_FOLDER
    run_time = os.environ.get("XDG_RUNTIME_DIR")
    if run_time:
        return Path(run_time) / "peercache"
    return Path(f"/tmp/peercache-{os.geteuid()}")  # noqa: S108 - checked before it is used


def default_home() -> str:
    """Return the address at which a node of this user listens by default."""
    return f"ipc://{default_folder() / SOCKET}"


def nearest_home() -> str:
    """Return the address at which a client of this user looks for the node of its host."""
    own = default_folder()
    # Also False for a folder of another user, which the client then refuses with the reason.
    has_own = os.path.exists(own / SOCKET)  # noqa: PTH110 - Path.exists may raise PermissionError
    has_other = not has_own and os.path.isdir(SYSTEM_FOLDER)  # noqa: PTH112 - likewise
    return f"ipc://{(SYSTEM_FOLDER if has_other else own) / SOCKET}"
