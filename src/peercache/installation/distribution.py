"""The distribution's name and version, and the check that no other project shares its folder."""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path

from peercache.errors import BrokenInstallation

PACKAGE = Path(__file__).parents[1]

NAME = "peercache-kv"
"""Ours on PyPI. The name `peercache` belongs to another project there."""

OTHER_NAME = "peercache"
"""A distribution of this name installs a package that is called `peercache`, too."""


@functools.cache
def version() -> str:
    """Return the distribution's version; "unknown" where a source tree is only on the path.

    It is read once: a node that answers with it may have no descriptor left.
    """
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def refuse_other_project() -> None:
    """Raise BrokenInstallation if the other project is installed here: its files mix with ours."""
    for found in importlib.metadata.distributions(name=OTHER_NAME):
        if found.metadata["Name"].lower() != OTHER_NAME:
            continue  # The search goes by the beginning of a folder's name.
        # pip records what it installs. An egg-info folder without a record is what a build of our
        # own sources left there while the distribution still had the other name.
        if found.read_text("RECORD") is None:
            continue
        raise BrokenInstallation(
            f"the distribution {OTHER_NAME} {found.version} is installed in "
            f"{found.locate_file('')}, and its package has the same import name",
            f"pip uninstall {OTHER_NAME}, then {how_to_install(PACKAGE)}",
        )


def how_to_install(package: Path) -> str:
    """Return the command that installs a package anew: in place where it lies in a checkout."""
    checkout = package.parents[1]
    if (checkout / "setup.py").exists():
        return f"pip install --editable {checkout}"
    return f"pip install --force-reinstall --no-deps {NAME}"
