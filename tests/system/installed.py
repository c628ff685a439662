"""PeerCache as a user has it: the built wheel in an empty environment, outside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.house.reference_pages import ROOT

BUILT = ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE")


def install_wheel(folder: Path) -> Path:
    """Build the wheel, install it with what it depends on; return the environment's bin folder."""
    sources, wheels, environment = (folder / name for name in ("sources", "wheels", "environment"))
    sources.mkdir(parents=True)
    for name in BUILT:
        if (ROOT / name).is_dir():
            compiled = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, sources / name, ignore=compiled)
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, sources)
    pip = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run(sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation",
         "--wheel-dir", str(wheels), str(sources))  # fmt: skip
    [wheel] = wheels.iterdir()
    _run(sys.executable, "-m", "venv", "--without-pip", str(environment))
    _run(sys.executable, *pip, "--python", str(environment / "bin" / "python"),
         "install", str(wheel))  # fmt: skip
    return environment / "bin"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
