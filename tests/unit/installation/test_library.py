"""The compiled library is there and fits its sources, or the package says what is wrong."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from peercache.errors import BrokenInstallation
from peercache.installation.distribution import PACKAGE
from peercache.installation.library import LIBRARY, checked_library, load
from peercache.installation.sources import SOURCES

ROOT = Path(__file__).parents[3]


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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, nothing of it compiled."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.so"))
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel as pip does, without an environment of its own."""
    return subprocess.run(
        [sys.executable, "setup.py", "bdist_wheel"],
        cwd=checkout,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_missing_compiler_is_one_sentence(checkout: Path) -> None:
    """From source, the build ends with what to install, and without a traceback."""
    done = build(checkout, PATH="/nowhere")

    assert done.returncode == 1
    assert "is not installed here.\nInstall a C compiler" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(checkout.rglob("*.whl"))


def test_source_that_does_not_compile_is_told_after_the_compilers_messages(checkout: Path) -> None:
    """The compiler says where, and the last lines say what it means."""
    (checkout / "src" / "peercache" / SOURCES[0]).write_text("#include <no/such/header.h>\n")

    done = build(checkout)

    assert done.returncode == 1
    assert "no/such/header.h" in done.stderr
    assert "could not compile it; its messages are above." in done.stderr
    assert "Traceback" not in done.stderr


def test_wheel_is_one_for_every_python_and_carries_the_library(checkout: Path) -> None:
    """Its tag names no version of Python, and the library names no folder of the build machine."""
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    [wheel] = (checkout / "dist").glob("*.whl")

    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        library = content.read(f"peercache/{LIBRARY}")

    assert fnmatch.fnmatch(wheel.name, "peercache_kv-*-py3-none-linux_*.whl")
    assert {f"peercache/{name}" for name in (*SOURCES, LIBRARY)} <= names
    assert sys.base_prefix.encode() not in library
