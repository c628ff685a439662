"""The compiled parts of the tcp fabric, where they are there: `_serving.c` and `_receiving.c`.

Everything works without them, and is slower.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

LAYOUT = 1
"""What structures and signatures look like: a file of another build is as good as none."""


def _load() -> Path | None:
    """Return the compiled file, or None where nothing was compiled, or another machine's file."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_tcp{suffix}")
        if path.exists():
            try:
                if ctypes.CDLL(os.fspath(path)).peercache_tcp_layout() == LAYOUT:
                    return path
            except (OSError, AttributeError):
                continue
    return None


_path = _load()

HAS_COMPILED = _path is not None


def compiled(name: str, result: Any, *arguments: Any, keeps_gil: bool) -> Any:
    """Return a function of the compiled file; None without one.

    keeps_gil: for calls of microseconds, which would wait longer to get the GIL back.
    """
    if _path is None:
        return None
    library = ctypes.PyDLL if keeps_gil else ctypes.CDLL
    function = getattr(library(os.fspath(_path), use_errno=True), name)
    function.restype, function.argtypes = result, arguments
    return function
