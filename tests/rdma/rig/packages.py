"""The distribution's packages, of which there are two kinds of use.

What the guest needs is downloaded and unpacked into the cache: nothing on this machine changes,
and no rights are needed. What a build needs (a compiler, flex, bison) is installed, which takes
root; without it, the message names what to install.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from tests.rdma.rig.cache import RigError, digest, made_once, say

# Everything the guest needs beyond what any machine has: libibverbs with its providers, the older
# pyverbs, `ip`, `tc` and `rdma`, and perftest to compare with.
GUEST_PACKAGES = (
    "ibverbs-providers",
    "ibverbs-utils",
    "iproute2",
    "libibverbs1",
    "librdmacm1",
    "perftest",
    "python3-pyverbs",
)
STATUS = Path("/var/lib/dpkg/status")


def run(*command: str, cwd: Path | None = None, **variables: str) -> str:
    """A command's output; where it fails, its last lines are the reason."""
    try:
        ended = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise RigError(f"there is no {command[0]} on this machine") from None
    if ended.returncode != 0:
        tail = "\n".join(ended.stdout.splitlines()[-15:])
        raise RigError(f"{' '.join(command)} failed ({ended.returncode}):\n{tail}")
    return ended.stdout


def ensure_installed(tools: dict[str, str]) -> None:
    """`tools` names, for each file or command that a build needs, the package that has it."""
    missing = sorted({package for what, package in tools.items() if not _is_there(what)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise RigError(f"needs {', '.join(missing)} (there is no apt-get to install them with)")
    if os.geteuid() != 0:
        line = f"apt-get install --no-install-recommends {' '.join(missing)}"
        raise RigError(f"needs packages that only root can install: {line}")
    say(f"installing {' '.join(missing)}")
    refresh_index("libc6")
    # Another installation may be under way: its lock is waited for, not run into.
    wait = ("-o", "DPkg::Lock::Timeout=300")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", *wait, "install", "-y", "-q", "--no-install-recommends", *missing)
    try:
        run(*install, **quiet)
    except RigError:
        # The index named a version that its server no longer has.
        run("apt-get", *wait, "update", "-q")
        run(*install, **quiet)


def refresh_index(package: str) -> None:
    """Make sure the index knows `package`: in a fresh container it is empty."""
    if not shutil.which("apt-cache"):
        raise RigError("the rig is made of Debian's or Ubuntu's packages: there is no apt-cache")
    # "policy" also lists what is merely installed: a source line shows that it can be fetched.
    if re.search(r"^ +\d+ \S+:/", run("apt-cache", "policy", package), re.MULTILINE):
        return
    if os.geteuid() != 0:
        raise RigError(f"the package index has no {package}: run apt-get update as root")
    run("apt-get", "-o", "DPkg::Lock::Timeout=300", "update", "-q")


def download(folder: Path, *packages: str) -> list[Path]:
    """Fetch packages, without their dependencies, into `folder`."""
    folder.mkdir(exist_ok=True)
    # As root, apt would like to become another user, who may not write here.
    run("apt-get", "-o", "APT::Sandbox::User=root", "download", "-q", *packages, cwd=folder)
    return sorted(folder.glob("*.deb"))


def unpack(package: Path, target: Path) -> None:
    run("dpkg-deb", "-x", str(package), str(target))


def guest_files() -> Path:
    """A folder laid over the host's files in the guest: what it needs and the host lacks."""
    status = STATUS.read_bytes() if STATUS.exists() else b""
    stamp = digest("\n".join(GUEST_PACKAGES), Path(__file__).read_bytes(), status)
    return made_once(f"packages-{stamp}", lambda scratch: _unpack_missing(scratch, stamp))


def _unpack_missing(scratch: Path, stamp: str) -> str:
    for package in GUEST_PACKAGES:
        refresh_index(package)
    result = scratch / "result"
    result.mkdir()
    missing = _missing_with_dependencies()
    for package in download(scratch / "downloads", *missing) if missing else []:
        unpack(package, result)
    # Where /lib is a link into /usr, a folder of that name laid over it would hide the link.
    for name in ("bin", "lib", "lib64", "sbin"):
        if (result / name).is_dir() and Path("/", name).is_symlink():
            shutil.copytree(result / name, result / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(result / name)
    for name in ("usr/share/doc", "usr/share/man", "etc/modprobe.d"):
        shutil.rmtree(result / name, ignore_errors=True)
    return f"packages-{stamp}"


def _missing_with_dependencies() -> list[str]:
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    closure = run(
        "apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in kinds), *GUEST_PACKAGES
    )
    # Real packages start a line; indented lines are relations, <names> are virtual.
    wanted = {line for line in closure.splitlines() if re.fullmatch(r"[a-z0-9][a-z0-9+.-]*", line)}
    installed = run("dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n")
    present = {line.split()[1] for line in installed.splitlines() if line.startswith("installed ")}
    return sorted(wanted - present)


def _is_there(what: str) -> bool:
    return Path(what).exists() if what.startswith("/") else shutil.which(what) is not None
