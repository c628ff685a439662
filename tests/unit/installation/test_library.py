"""The compiled library is there and fits its sources, or the package says what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from peercache.errors import BrokenInstallation
from peercache.installation.distribution import PACKAGE
from peercache.installation.library import LIBRARY, checked_library, load
from peercache.installation.sources import SOURCES


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's compiled parts, as pip installs them."""
    package = tmp_path / "site-packages" / "peercache"
    for name in (*SOURCES, LIBRARY):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, package / name)
    return package


def test_every_c_source_of_the_package_is_compiled() -> None:
    """A source that the list lacks would be neither compiled nor covered by the digest."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.c")}

    assert found == set(SOURCES)


def test_library_that_fits_its_sources_is_used(package: Path) -> None:
    """Its path is returned; the package itself loads its own."""
    assert checked_library(package) == str(package / LIBRARY)
    assert load()[0].peercache_scatter is not None


def test_missing_library_is_told_with_its_remedy(package: Path) -> None:
    """An installed package is installed again."""
    (package / LIBRARY).unlink()

    with pytest.raises(BrokenInstallation, match=r"libpeercache\.so is missing") as told:
        checked_library(package)

    assert told.value.remedy == "pip install --force-reinstall --no-deps peercache-kv"


def test_missing_library_of_a_checkout_is_compiled_there(package: Path) -> None:
    """A checkout builds in place."""
    (package / LIBRARY).unlink()
    (package.parents[1] / "setup.py").touch()

    with pytest.raises(BrokenInstallation) as told:
        checked_library(package)

    assert told.value.remedy == f"pip install --editable {package.parents[1]}"


@pytest.mark.parametrize("name", SOURCES)
def test_library_of_other_sources_is_stale(package: Path, name: str) -> None:
    """A structure that C and Python see differently would be a crash: one byte is enough."""
    with (package / name).open("a") as source:
        source.write("\n")

    with pytest.raises(BrokenInstallation, match="is stale"):
        checked_library(package)


@pytest.mark.parametrize("name", SOURCES)
def test_missing_source_is_told(package: Path, name: str) -> None:
    """An installation that lost files is not whole."""
    (package / name).unlink()

    with pytest.raises(BrokenInstallation, match=f"{name} is missing"):
        checked_library(package)


@pytest.mark.parametrize("content", [b"", b"\x7fELF of another machine"])
def test_file_that_is_no_library_cannot_be_loaded(package: Path, content: bytes) -> None:
    """What the loader of the system says comes along."""
    (package / LIBRARY).write_bytes(content)

    with pytest.raises(BrokenInstallation, match="cannot be loaded"):
        checked_library(package)
