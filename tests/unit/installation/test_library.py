"""The compiled library is there and fits its sources, or the package says what is wrong."""

from __future__ import annotations

import shutil
from ctypes import addressof
from pathlib import Path

import numpy as np
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.errors import BrokenInstallation
from peercache.installation import library
from peercache.installation.library import (
    LIBRARY,
    PACKAGE,
    TLS_LIBRARY,
    Begin,
    checked_library,
    load,
    load_tls,
)
from peercache.installation.sources import HEADERS, SOURCES, TLS_SOURCES

LIBRARIES = [(LIBRARY, SOURCES), (TLS_LIBRARY, TLS_SOURCES)]
PARTS = [(path, sources, name) for path, sources in LIBRARIES for name in (*sources, *HEADERS)]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package's compiled parts, as pip installs them."""
    package = tmp_path / "site-packages" / "peercache"
    for name in (*SOURCES, *TLS_SOURCES, *HEADERS, LIBRARY, TLS_LIBRARY):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, package / name)
    return package


def test_memory_of_any_shape_has_an_address() -> None:
    """Of no bytes too; memory that may not be written to is refused."""
    fields = np.zeros(3, [("key", "V16"), ("offset", "<u8")])

    assert addressof(Begin.from_buffer(fields)) == fields.ctypes.data
    assert addressof(Begin.from_buffer(np.zeros(0, np.uint8)))
    with pytest.raises(TypeError):
        Begin.from_buffer(np.frombuffer(bytes(8), np.uint8))


def test_every_c_source_of_the_package_is_compiled() -> None:
    """A source that the list lacks would be neither compiled nor covered by the digest."""
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.[ch]")}

    assert found == {*SOURCES, *TLS_SOURCES, *HEADERS}


@pytest.mark.parametrize(("path", "sources"), LIBRARIES)
def test_library_that_fits_its_sources_is_used(
    package: Path, path: str, sources: tuple[str, ...]
) -> None:
    """Its path is returned; the package itself loads its own."""
    assert checked_library(package, path, sources) == str(package / path)
    assert load()[0].peercache_scatter is not None
    assert load_tls()[0].peercache_tls_open is not None


def test_installation_without_openssl_says_what_to_install(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else works without it, so the sentence comes with the first use of TLS."""
    (package / TLS_LIBRARY).unlink()
    monkeypatch.setattr(library, "PACKAGE", package)
    load_tls.cache_clear()

    with pytest.raises(BrokenInstallation, match="compiled without OpenSSL") as told:
        load_tls()

    assert "apt-get install libssl-dev" in told.value.remedy


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


@pytest.mark.parametrize(("path", "sources", "name"), PARTS)
def test_library_of_other_sources_is_stale(
    package: Path, path: str, sources: tuple[str, ...], name: str
) -> None:
    """A structure that C and Python see differently would be a crash: one byte is enough."""
    with (package / name).open("a") as source:
        source.write("\n")

    with pytest.raises(BrokenInstallation, match="is stale"):
        checked_library(package, path, sources)


@pytest.mark.parametrize(("path", "sources", "name"), PARTS)
def test_missing_source_is_told(
    package: Path, path: str, sources: tuple[str, ...], name: str
) -> None:
    """An installation that lost files is not whole."""
    (package / name).unlink()

    with pytest.raises(BrokenInstallation, match=f"{name} is missing"):
        checked_library(package, path, sources)


@pytest.mark.parametrize("content", [b"", b"\x7fELF of another machine"])
def test_file_that_is_no_library_cannot_be_loaded(package: Path, content: bytes) -> None:
    """What the loader of the system says comes along."""
    (package / LIBRARY).write_bytes(content)

    with pytest.raises(BrokenInstallation, match="cannot be loaded"):
        checked_library(package)
