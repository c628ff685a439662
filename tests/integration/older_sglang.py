"""Older versions of SGLang, in the environment of the newest, and SGLang's router.

    older_sglang.py     fetches those that are missing into the user's cache, 300 MB

Each version is in a folder of its own, which comes first on PYTHONPATH. So the version's own
interface, host pools and controllers run, over the environment's torch and transformers, which are
newer than the version's own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

VERSIONS = ("0.5.12", "0.5.16", "0.5.20")
ROUTER = "router-0.3.2"
WANTED = os.environ.get("PEERCACHE_TEST_SGLANG_VERSION")
"""The version that this process must have; None: that of the environment."""

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = Path(os.environ.get("PEERCACHE_OLDER_SGLANG") or _CACHE / "peercache/sglang-older")


def place(wanted: str) -> Path:
    """Return the folder of a version, or of the router; it may not be there."""
    return FOLDER / wanted


def variables(wanted: str) -> dict[str, str]:
    """Return what a child's environment needs to be of a version.

    What SGLang compiles is kept apart: versions give their extensions the same names.
    """
    return {
        "PYTHONPATH_FIRST": str(place(wanted)),
        "PEERCACHE_TEST_SGLANG_VERSION": wanted,
        "TORCH_EXTENSIONS_DIR": str(FOLDER / f"{wanted}-compiled"),
    }


def fetch(wanted: str) -> None:
    """Put a version, or the router, into its folder, unless it is there.

    CalledProcessError: it cannot be fetched.
    """
    if place(wanted).exists():
        return
    requirement = f"sglang-{wanted.replace('-', '==')}" if wanted == ROUTER else f"sglang=={wanted}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as work:
        whole = Path(work, "whole")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet")
        # None of its dependencies: the environment has newer ones.
        options = ("--no-deps", "--no-compile", "--only-binary=:all:", "--target", str(whole))
        subprocess.run([*pip, *options, requirement], check=True)
        shutil.rmtree(whole / "bin", ignore_errors=True)
        try:
            whole.rename(place(wanted))
        except OSError:
            # Another process was faster.
            if not place(wanted).exists():
                raise


def prepare() -> None:
    """Let the wanted version start in this process; raise RuntimeError if it is another one."""
    found = version("sglang")
    if found != WANTED:
        raise RuntimeError(f"this is SGLang {found}, and {WANTED} is wanted")
    from transformers import AutoConfig

    register = AutoConfig.register
    # The environment's transformers knows models that this SGLang brings along.
    AutoConfig.register = lambda name, config, exist_ok=False: register(name, config, exist_ok=True)


if __name__ == "__main__":
    for each in (*VERSIONS, ROUTER):
        fetch(each)
