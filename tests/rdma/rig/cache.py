"""What is made once and kept: each thing under a name that shows what it was made from."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


class RigError(Exception):
    """The rig cannot be had on this machine; the message names what is missing."""


def say(text: str) -> None:
    print(f"rdma rig: {text}", file=sys.stderr, flush=True)


def folder() -> Path:
    """Where all checkouts of one user share what was made."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(root).resolve() / "peercache" / "rdma"
    path.mkdir(parents=True, exist_ok=True)
    return path


def digest(*parts: str | bytes) -> str:
    """Twelve hex digits of everything a thing is made from."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:12]


def made_once(pattern: str, make: Callable[[Path], str]) -> Path:
    """The newest thing that matches `pattern`, made if there is none.

    `make` fills the scratch folder it is given with a `result` and answers that result's name.
    Two checkouts that start at once make it once: the second waits. What is half made never
    stands under its name.
    """
    found = _newest(pattern)
    if found is not None:
        return found
    lock = folder() / (pattern.replace("*", "any") + ".lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found = _newest(pattern)
        if found is not None:
            return found
        started_s = time.monotonic()
        scratch = Path(tempfile.mkdtemp(prefix="making-", dir=folder()))
        try:
            target = folder() / make(scratch)
            (scratch / "result").rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        say(f"made {target.name} in {time.monotonic() - started_s:.0f} s")
        return target


def _newest(pattern: str) -> Path | None:
    found = [path for path in folder().glob(pattern) if path.suffix != ".lock"]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
