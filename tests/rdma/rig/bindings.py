"""Two generations of pyverbs: the distribution's own, and a recent one from PyPI.

PyPI's is a source distribution that does not work with an older libibverbs as it is; two things
are changed when it is built, and docs/how-to/enable-rdma.md describes both:

  * newer Cython rejects one of its files or loses its enum constants: Cython stays below 3.1;
  * it asks for libibverbs' private symbols under the number of its own release: here under the
    number that releases 34 to 56 share, of which it uses one symbol, present in all of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.rdma.rig.cache import RigError, digest, folder, made_once, say
from tests.rdma.rig.packages import ensure_installed, run

VERSION = "59.0"
PRIVATE_NUMBER = "34"
CYTHON = "cython<3.1"
# Where Debian and Ubuntu keep the packaged one, for their own interpreter.
PACKAGED = Path("/usr/lib/python3/dist-packages/pyverbs")
TOOLS = {
    "/usr/include/libnl3/netlink/netlink.h": "libnl-3-dev",
    "/usr/include/libnl3/netlink/route/link.h": "libnl-route-3-dev",
    "/usr/include/libudev.h": "libudev-dev",
    "cmake": "cmake",
    "gcc": "gcc",
    "ninja": "ninja-build",
    "pkg-config": "pkg-config",
}


def built(python: Path) -> Path:
    """A folder for PYTHONPATH with the recent pyverbs, made for the interpreter `python`."""
    tag = run(str(python), "-c", "import sys; print(sys.implementation.cache_tag)").strip()
    stamp = digest(VERSION, PRIVATE_NUMBER, CYTHON, tag)
    name = f"pyverbs-{VERSION}-{tag}-{stamp}"
    return made_once(name, lambda scratch: _build(scratch, python, name))


def packaged() -> Path:
    """A folder for PYTHONPATH with the distribution's pyverbs and nothing else of it."""
    path = folder() / "pyverbs-packaged"
    path.mkdir(exist_ok=True)
    link = path / "pyverbs"
    # The guest has the package even where the host has not: there the link leads nowhere.
    if not link.is_symlink():
        link.symlink_to(PACKAGED)
    return path


def packaged_fits(python: Path, files: Path) -> bool:
    """Whether the distribution's pyverbs was compiled for the version of `python`."""
    tag = run(str(python), "-c", "import sys; print(sys.implementation.cache_tag)").strip()
    places = (files / PACKAGED.relative_to("/"), PACKAGED)
    return any(list(place.glob(f"device.{tag}-*.so")) for place in places)


def _build(scratch: Path, python: Path, name: str) -> str:
    ensure_installed(TOOLS)
    say(f"building pyverbs {VERSION} (five CPU minutes, once)")
    constraints = scratch / "constraints.txt"
    constraints.write_text(f"{CYTHON}\n")
    pip = (str(python), "-m", "pip", "--disable-pip-version-check")
    pinned = {"PIP_CONSTRAINT": str(constraints), "PIP_BUILD_CONSTRAINT": str(constraints)}
    run(
        *pip, "download", "--no-deps", "--no-binary=pyverbs", f"pyverbs=={VERSION}",
        cwd=scratch, **pinned,
    )  # fmt: skip
    run("tar", "-xf", str(next(scratch.glob("pyverbs-*.tar.gz"))), cwd=scratch)
    source = scratch / f"pyverbs-{VERSION}"
    recipe = source / "rdma-core" / "CMakeLists.txt"
    text, changed_count = re.subn(
        r'(set\(IBVERBS_PABI_VERSION) "\d+"\)', rf'\1 "{PRIVATE_NUMBER}")', recipe.read_text()
    )
    if changed_count != 1:
        raise RigError("pyverbs' build names the private symbols' number in another way")
    recipe.write_text(text)
    run(*pip, "wheel", "--no-deps", "-w", str(scratch), str(source), cwd=scratch, **pinned)
    wheel = next(scratch.glob("pyverbs-*.whl"))
    target = scratch / "result"
    run(*pip, "install", "--no-deps", "--target", str(target), str(wheel), cwd=scratch)
    return name
