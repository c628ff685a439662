"""The installation: the distribution's name and version, and the compiled libraries.

No other project may share the distribution's folder, and a library that does not fit this package
is refused.

`libpeercache.so` is a required part: a wheel carries it, and an installation from source compiles
it. `libpeercache_tls.so` is linked with OpenSSL and needed for TLS only: an installation from
source has it if OpenSSL's headers were present. Both are plain C behind ctypes, so they fit every
version of Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from peercache.errors import BrokenInstallation
from peercache.installation.sources import SOURCES, TLS_SOURCES, digest_of

PACKAGE = Path(__file__).parents[1]

NAME = "peercache-kv"
"""Our name on PyPI, where `peercache` belongs to another project."""

OTHER_NAME = "peercache"
"""A distribution of this name installs a package that is called `peercache`, too."""


@functools.cache
def version() -> str:
    """Return the distribution's version; "unknown" if a source tree is only on the path.

    It is read once: a node that needs it later may have no descriptor left.
    """
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def refuse_other_project() -> None:
    """Raise BrokenInstallation if the other project is installed here: its files mix with ours."""
    for found in importlib.metadata.distributions(name=OTHER_NAME):
        if found.metadata["Name"].lower() != OTHER_NAME:
            continue  # The search matches the beginning of a folder's name.
        # pip records what it installs. An egg-info folder without a record was left by a build of
        # our own sources while the distribution still had the other name.
        if found.read_text("RECORD") is None:
            continue
        raise BrokenInstallation(
            f"the distribution {OTHER_NAME} {found.version} is installed in "
            f"{found.locate_file('')}, and its package has the same import name",
            f"pip uninstall {OTHER_NAME}, then {how_to_install(PACKAGE)}",
        )


def how_to_install(package: Path) -> str:
    """Return the command that installs a package again: in place if it is in a checkout."""
    checkout = package.parents[1]
    if (checkout / "setup.py").exists():
        return f"pip install --editable {checkout}"
    return f"pip install --force-reinstall --no-deps {NAME}"


LIBRARY = "installation/libpeercache.so"
TLS_LIBRARY = "installation/libpeercache_tls.so"

Begin: Any = ctypes.c_char * 0
"""`addressof(Begin.from_buffer(memory))` is the address of writable memory, such as that of a
contiguous array, which may be empty: for functions that write to it. An array's
`__array_interface__` also describes its dtype: that takes twice as long, and five times with
fields."""


def checked_library(
    package: Path, library: str = LIBRARY, sources: tuple[str, ...] = SOURCES
) -> str:
    """Return the path of a package's library; raise BrokenInstallation if it cannot be used."""
    path = package / library
    if not path.exists():
        raise BrokenInstallation(f"the compiled library {path} is missing", how_to_install(package))
    try:
        expected = digest_of(package, sources)
    except OSError as error:
        problem = f"the C source {error.filename} is missing"
        raise BrokenInstallation(problem, how_to_install(package)) from error
    try:
        identity = ctypes.CDLL(os.fspath(path)).peercache_sources
    except (OSError, AttributeError) as error:
        problem = f"the compiled library {path} cannot be loaded ({error})"
        raise BrokenInstallation(problem, how_to_install(package)) from error
    identity.restype = ctypes.c_char_p
    if identity().decode() != expected:
        # If the two sides see a structure differently, that causes a crash, or wrong bytes.
        problem = f"the compiled library {path} is stale: its C sources have changed since"
        raise BrokenInstallation(problem, how_to_install(package))
    return os.fspath(path)


@functools.cache
def load() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the library twice: calls through the second handle keep Python's global lock.

    Raises BrokenInstallation. The client, the node and the command line load it before they do
    anything else.
    """
    refuse_other_project()
    path = checked_library(PACKAGE)
    return ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path, use_errno=True)


@functools.cache
def load_tls() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return the library with OpenSSL twice, as `load` does; raise BrokenInstallation."""
    if not (PACKAGE / TLS_LIBRARY).exists():
        raise BrokenInstallation(
            "TLS is configured, and this installation was compiled without OpenSSL",
            "install OpenSSL's headers (Debian, Ubuntu: apt-get install libssl-dev; Red Hat: dnf "
            f"install openssl-devel), then {how_to_install(PACKAGE)}",
        )
    path = checked_library(PACKAGE, TLS_LIBRARY, TLS_SOURCES)
    return ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path, use_errno=True)


def tls_function(name: str, result: Any, *arguments: Any, keeps_gil: bool = False) -> Any:
    """Return a function of the library with OpenSSL, as `function` does."""
    found = getattr(load_tls()[keeps_gil], name)
    found.restype, found.argtypes = result, arguments
    return found


def function(name: str, result: Any, *arguments: Any, keeps_gil: bool = False) -> Any:
    """Return a function of the library with its ctypes signature.

    keeps_gil: for calls of microseconds, which would wait longer to get the GIL back.
    """
    found = getattr(load()[keeps_gil], name)
    found.restype, found.argtypes = result, arguments
    return found
