"""An SGLang with the files of `integrations/sglang`: the installed one, copied as links."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import sglang

from tests.integration.processes import ROOT

FILES = ROOT / "integrations/sglang"
PATCH = FILES / "sglang-0.5.23.patch"
PACKAGE = Path(sglang.__file__).parent


def apply(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script that makes `peercache` a storage backend of SGLang's own."""
    command = ["sh", str(FILES / "apply.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def patched_files() -> list[str]:
    """Return the files that the patch edits, relative to the package."""
    prefix = "+++ b/python/sglang/"
    lines = PATCH.read_text().splitlines()
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def patched_sglang(folder: Path) -> Path:
    """Return a folder that holds the package `sglang` with the backend."""
    copy = folder / "sglang"
    shutil.copytree(PACKAGE, copy, copy_function=os.symlink)
    for name in patched_files():
        (copy / name).unlink()
        shutil.copy(PACKAGE / name, copy / name)
    done = apply("--installed", folder)
    assert done.returncode == 0, done.stderr
    return folder
