"""Environments of the stores that PeerCache is compared with, each with pinned versions.

They are in the user's cache folder, outside the checkout, and are created once. Missing shared
libraries come from Debian's packages, unpacked next to the environment and not installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

INSTALL_TIMEOUT_S = 600.0

STAMP = ".installed"
"""The file with the versions of a complete environment."""


@attrs.frozen
class Recipe:
    """The requirements of a store: packages of PyPI, and files of Debian's packages if missing.

    needs: a library or command, and the packages to unpack if the machine does not have it. shown:
           the package of PyPI or Debian with the version to show.
    """

    wheels: tuple[str, ...]
    shown: str
    needs: dict[str, tuple[str, ...]] = attrs.Factory(dict)


RECIPES = {
    "mooncake": Recipe(
        # The wheel links CUDA's runtime, and calls none of it over tcp.
        wheels=(
            "mooncake-transfer-engine-non-cuda==0.3.13",
            "nvidia-cuda-runtime-cu12==12.9.79",
            "numpy==2.2.6",
        ),
        shown="mooncake-transfer-engine-non-cuda",
        needs={"libibverbs.so.1": ("libibverbs1", "libnl-3-200", "libnl-route-3-200")},
    ),
    "peercache-0.8.4": Recipe(wheels=("peercache==0.8.4", "numpy==2.2.6"), shown="peercache"),
    "redis": Recipe(
        wheels=("redis==8.1.0", "hiredis==3.5.0", "numpy==2.2.6"),
        shown="redis-server",
        needs={
            "redis-server": (
                "redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libhiredis0.14",
                "liblua5.1-0", "lua-cjson", "lua-bitop", "libatomic1",
            )
        },
    ),
}  # fmt: skip
"""The other stores that install without a GPU and that get, set and look up pages by key."""

LEFT_OUT = {
    "LMCache": "its server moves the chunks of an engine and offers no get, set and exists of "
    "pages by key; stores plug in below it, as PeerCache does",
    "NIXL": "it moves bytes between addresses that the caller knows, and has no keys",
    "InfiniStore": "the server of its wheel (0.2.35) does not start without an RDMA device",
}
"""Stores and libraries that are not measured, and why."""


class NotInstalled(Exception):
    """A store cannot be installed here."""


@attrs.frozen
class Environment:
    """A complete environment. environ: the variables of its programs."""

    name: str
    folder: Path
    version: str
    environ: dict[str, str]

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.folder / "bin" / "python")

    def command(self, name: str) -> str:
        """Return the path of a command that its packages bring, or that the machine has."""
        for folder in (self.folder / "bin", self.folder / "root" / "usr" / "bin"):
            if (folder / name).exists():
                return str(folder / name)
        found = shutil.which(name)
        if found is None:
            raise NotInstalled(f"there is no command {name}")
        return found


def environment(name: str) -> Environment:
    """Return the environment of one of RECIPES, created first if it is missing.

    Raises NotInstalled with the installer's last line.
    """
    recipe = RECIPES[name]
    digest = hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peercache"
    folder = cache / f"peers-{name}-{digest}"
    stamp = folder / STAMP
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not stamp.exists():
            shutil.rmtree(folder, ignore_errors=True)
            try:
                version = _make(folder, recipe)
            except (OSError, subprocess.SubprocessError) as error:
                shutil.rmtree(folder, ignore_errors=True)
                raise NotInstalled(_last_line(error)) from error
            stamp.write_text(version)
    return Environment(name, folder, stamp.read_text(), _environ(folder))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let only one process at a time create an environment."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, recipe: Recipe) -> str:
    """Create an environment; return the version to show."""
    venv.create(folder, with_pip=True)
    pip = (str(folder / "bin" / "python"), "-m", "pip")
    _run(*pip, "install", "-q", "--disable-pip-version-check", *recipe.wheels)
    missing = [
        package
        for need, packages in recipe.needs.items()
        if not (shutil.which(need) or _has_library(need))
        for package in packages
    ]
    if missing:
        _unpack(folder, missing)
    for wheel in recipe.wheels:
        package, _, version = wheel.partition("==")
        if package == recipe.shown:
            return version
    server = Environment("", folder, "", _environ(folder)).command(recipe.shown)
    shown = _run(server, "--version", environ=_environ(folder))
    found = re.search(r"\bv=(\S+)", shown)
    return found[1] if found else shown.strip()


def _has_library(name: str) -> bool:
    return name in _run("/sbin/ldconfig", "-p")


def _unpack(folder: Path, packages: list[str]) -> None:
    if not shutil.which("apt-get"):
        raise OSError(f"the machine lacks {' '.join(packages)}, and has no apt-get to fetch them")
    fetched = folder / "packages"
    fetched.mkdir()
    download = ("apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", *packages)
    try:
        _run(*download, cwd=fetched)
    except subprocess.CalledProcessError:  # Without an index, or with an old one.
        _run("apt-get", "update", "-q")
        _run(*download, cwd=fetched)
    for package in sorted(fetched.glob("*.deb")):
        _run("dpkg", "-x", str(package), str(folder / "root"))


def _environ(folder: Path) -> dict[str, str]:
    """Return the variables of the environment's programs: nothing of this one's Python."""
    libraries = [
        *folder.glob("root/usr/lib/*-linux-gnu"),
        *folder.glob("root/lib/*-linux-gnu"),
        *folder.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib"),
    ]
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PEERCACHE", "LD_", "MC_"))
    }
    kept["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))
    return kept


def _run(*command: str, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    return subprocess.run(  # noqa: S603 - installers, and what they installed
        command, cwd=cwd, env=environ, capture_output=True, text=True, check=True,
        timeout=INSTALL_TIMEOUT_S,
    ).stdout  # fmt: skip


def _last_line(error: Exception) -> str:
    output = getattr(error, "stderr", None) or getattr(error, "stdout", None) or str(error)
    text = output.decode(errors="replace") if isinstance(output, bytes) else str(output)
    return next(
        (line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__
    )
