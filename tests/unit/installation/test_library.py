"""The compiled library fits its sources, and no other project has our import name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    refuse_other_project,
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


def test_installation_without_openssl_names_what_to_install(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else works without it, so the sentence comes with the first use of TLS."""
    (package / TLS_LIBRARY).unlink()
    monkeypatch.setattr(library, "PACKAGE", package)
    load_tls.cache_clear()

    with pytest.raises(BrokenInstallation, match="compiled without OpenSSL") as reported:
        load_tls()

    assert "apt-get install libssl-dev" in reported.value.remedy


def test_missing_library_is_reported_with_its_remedy(package: Path) -> None:
    """An installed package is installed again."""
    (package / LIBRARY).unlink()

    with pytest.raises(BrokenInstallation, match=r"libpeercache\.so is missing") as reported:
        checked_library(package)

    assert reported.value.remedy == "pip install --force-reinstall --no-deps peercache-kv"


def test_missing_library_of_a_checkout_is_compiled_there(package: Path) -> None:
    """A checkout builds in place."""
    (package / LIBRARY).unlink()
    (package.parents[1] / "setup.py").touch()

    with pytest.raises(BrokenInstallation) as reported:
        checked_library(package)

    assert reported.value.remedy == f"pip install --editable {package.parents[1]}"


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
def test_missing_source_is_reported(
    package: Path, path: str, sources: tuple[str, ...], name: str
) -> None:
    """An installation that lost files is not whole."""
    (package / name).unlink()

    with pytest.raises(BrokenInstallation, match=f"{name} is missing"):
        checked_library(package, path, sources)


@pytest.mark.parametrize("content", [b"", b"\x7fELF of another machine"])
def test_file_that_is_no_library_cannot_be_loaded(package: Path, content: bytes) -> None:
    """What the loader of the system reports comes along."""
    (package / LIBRARY).write_bytes(content)

    with pytest.raises(BrokenInstallation, match="cannot be loaded"):
        checked_library(package)


METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 0.8.4\n"


def installed(folder: Path, name: str, *, record: bool = True, kind: str = "dist-info") -> None:
    """Write what pip leaves of an installed distribution."""
    info = folder / f"{name}-0.8.4.{kind}"
    info.mkdir()
    (info / ("METADATA" if kind == "dist-info" else "PKG-INFO")).write_text(
        METADATA.format(name=name)
    )
    if record:
        (info / "RECORD").write_text("peercache/__init__.py,,\n")


@pytest.mark.parametrize("name", ["peercache", "PeerCache"])
def test_other_project_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The sentence names the version, the folder and both commands."""
    installed(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(BrokenInstallation) as refused:
        refuse_other_project()

    assert "peercache 0.8.4 is installed in" in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert refused.value.remedy == (
        f"pip uninstall peercache, then pip install --editable {Path(__file__).parents[3]}"
    )


@pytest.mark.parametrize("name", ["peercache-kv", "peercache_kv", "peercache-other"])
def test_distribution_of_another_name_is_none_of_our_business(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Only the one that installs files into our package's folder is refused."""
    installed(tmp_path, name)
    monkeypatch.syspath_prepend(tmp_path)

    refuse_other_project()


def test_metadata_of_our_own_old_build_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout from before the new name keeps an egg-info folder next to the sources."""
    installed(tmp_path, "peercache", record=False, kind="egg-info")
    monkeypatch.syspath_prepend(tmp_path)

    refuse_other_project()


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["-m", "peercache", "version"], id="command line"),
        pytest.param(["-m", "peercache", "node"], id="node"),
        pytest.param(["-c", "from peercache import Client"], id="client"),
    ],
)
def test_command_line_node_and_client_refuse_to_start(tmp_path: Path, start: list[str]) -> None:
    """Nothing works half: the first thing that a process prints is what is wrong."""
    installed(tmp_path, "peercache")

    done = subprocess.run(
        [sys.executable, *start],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    last = done.stderr.splitlines()[-1]
    assert done.returncode != 0
    assert "the distribution peercache 0.8.4 is installed in" in last
    if "peercache" in start:
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)


def test_version_is_that_of_our_own_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from the metadata; a source tree that is only on the path has none."""
    installed(tmp_path, "peercache_kv")
    monkeypatch.syspath_prepend(tmp_path)

    read_now = library.version.__wrapped__

    found = read_now()
    monkeypatch.setattr(library, "NAME", "peercache-of-no-such-name")

    assert found == "0.8.4"
    assert read_now() == "unknown"
