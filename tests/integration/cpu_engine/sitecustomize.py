"""Runs at the start of every Python process that has this folder on its PYTHONPATH.

An engine starts its scheduler as a fresh process, so the stand-ins of host_copies.py have to come
in this way. They are put in place when SGLang is first imported, so that other processes (pip,
the resource tracker) do not pay for an import of torch.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from typing import Any


class _BeforeSGLang(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "sglang":
            sys.meta_path.remove(self)
            import host_copies

            host_copies.prepare()


if os.environ.get("PEERCACHE_TEST_CPU_ENGINE"):
    sys.meta_path.insert(0, _BeforeSGLang())
