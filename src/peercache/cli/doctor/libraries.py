"""The libibverbs and pyverbs of this host, and whether they fit: read from their files.

pyverbs uses one symbol of libibverbs' private interface, whose number changes with releases of
rdma-core; a pyverbs built for another number does not load, with an error that names neither. Both
numbers stand in the files, so that doctor can compare them without loading anything.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.metadata
import re
from importlib.util import find_spec
from pathlib import Path

from peercache.cli.doctor.facts import Libraries
from peercache.rdma.verbs import load

_PRIVATE = re.compile(rb"IBVERBS_PRIVATE_(\d+)")
_RELEASE = re.compile(r"libibverbs\.so\.1\.\d+\.(\d+\.\d+)$")


def find_libraries() -> Libraries:
    """Look at this process's libraries."""
    library = _mapped_libibverbs()
    package = _package()
    wants = private_numbers(_device_module(package)) if package else ()
    problem = load()
    return Libraries(
        libibverbs=str(library or ""),
        libibverbs_release=release_of(library.name) if library else "",
        offers=private_numbers(library),
        pyverbs=str(package or ""),
        pyverbs_release=_pyverbs_release(),
        wants=wants[0] if wants else 0,
        problem=problem if isinstance(problem, str) else "",
    )


def private_numbers(file: Path | None) -> tuple[int, ...]:
    """Return the private interfaces of libibverbs that a shared library names, in order."""
    if file is None:
        return ()
    try:
        found = set(_PRIVATE.findall(file.read_bytes()))
    except OSError:
        return ()
    return tuple(sorted(int(number) for number in found))


def release_of(name: str) -> str:
    """Return rdma-core's release from the name of libibverbs' file: libibverbs.so.1.14.44.0."""
    match = _RELEASE.search(name)
    return match[1] if match else ""


def _mapped_libibverbs() -> Path | None:
    """Return the file that the loader has mapped for libibverbs."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in maps.splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libibverbs.so" in path:
            return Path(path).resolve()
    return None


def _package() -> Path | None:
    spec = find_spec("pyverbs")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def _device_module(package: Path) -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (package / f"device{suffix}").exists():
            return package / f"device{suffix}"
    # Built for another Python: it names its interface of libibverbs all the same.
    return next(iter(sorted(package.glob("device*.so"))), None)


def _pyverbs_release() -> str:
    try:
        return importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return ""  # A package of the distribution has no metadata.
