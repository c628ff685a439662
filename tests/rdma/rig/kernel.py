"""The guest's kernel: User-Mode-Linux with Soft-RoCE, from the distribution's kernel source.

An ordinary executable of 9 MB. It takes seven CPU minutes to compile, once for each user and set
of options; a newer source does not replace a kernel that is there (remove the cache for that).
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.rdma.rig.cache import RigError, digest, made_once, say
from tests.rdma.rig.packages import download, ensure_installed, refresh_index, run, unpack

OPTIONS = Path(__file__).with_name("kernel.config")
# What the options were written for and tried with; the distribution's default source otherwise.
SOURCE_PREFERRED = "linux-source-6.1"
TOOLS = {
    "/usr/include/stdio.h": "libc6-dev",
    "bc": "bc",
    "bison": "bison",
    "flex": "flex",
    "gcc": "gcc",
    "make": "make",
    "perl": "perl",
    "xz": "xz-utils",
}


def kernel() -> Path:
    """The kernel's executable; compiled if this user has none with these options."""
    stamp = digest(OPTIONS.read_bytes())
    return made_once(f"linux-*-{stamp}", lambda scratch: _compile(scratch, stamp))


def _compile(scratch: Path, stamp: str) -> str:
    if os.uname().machine != "x86_64":
        raise RigError("User-Mode-Linux runs on x86-64 only")
    ensure_installed(TOOLS)
    package = _source_package()
    archive = download(scratch / "downloads", package)[0]
    # Its name is package_version_architecture.deb; an epoch's colon is written %3a.
    version = archive.name.split("_")[1].replace("%3a", ".")
    say(f"compiling {package} {version} as User-Mode-Linux (seven CPU minutes, once)")
    unpack(archive, scratch / "unpacked")
    source = _unpacked_source(scratch)

    make = ("make", "-s", "ARCH=um")
    run(*make, "alldefconfig", cwd=source, KCONFIG_ALLCONFIG=str(OPTIONS))
    held = set((source / ".config").read_text().splitlines())
    asked = OPTIONS.read_text().splitlines()
    # Comments hold no option; "# CONFIG_X is not set" is one.
    lost = [line for line in asked if "CONFIG_" in line and line not in held]
    if lost:
        raise RigError(f"{package} {version} does not know {', '.join(lost)}")
    run(*make, f"-j{len(os.sched_getaffinity(0))}", "linux", cwd=source)
    run("strip", "--strip-debug", "-o", str(scratch / "result"), "linux", cwd=source)
    return f"linux-{version}-{stamp}"


def _source_package() -> str:
    try:
        refresh_index(SOURCE_PREFERRED)
        if re.search(r"Candidate: \d", run("apt-cache", "policy", SOURCE_PREFERRED)):
            return SOURCE_PREFERRED
    except RigError as error:
        say(str(error))
    depends = re.search(r"Depends: (linux-source-\S+)", run("apt-cache", "depends", "linux-source"))
    if depends is None:
        raise RigError("the package index names no kernel source (linux-source)")
    return depends[1]


def _unpacked_source(scratch: Path) -> Path:
    for archive in sorted((scratch / "unpacked" / "usr" / "src").rglob("linux-source-*.tar.*")):
        if archive.is_file() and not archive.is_symlink():
            run("tar", "-xf", str(archive), "-C", str(scratch))
            archive.unlink()
    found = [path.parent for path in scratch.glob("linux-source-*/Kconfig")]
    if len(found) != 1:
        raise RigError("the kernel source package holds no archive of the kernel")
    shutil.rmtree(scratch / "downloads")
    return found[0]
