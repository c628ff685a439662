"""A wheel is built from the sources, or the build names in one sentence what is missing."""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from peercache.installation.library import LIBRARY, TLS_LIBRARY
from peercache.installation.sources import HEADERS, SOURCES, TLS_SOURCES

ROOT = Path(__file__).parents[2]


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


def test_source_that_does_not_compile_is_reported_after_the_compilers_messages(
    checkout: Path,
) -> None:
    """The compiler reports where, and the last lines explain what it means."""
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
    expected = (*SOURCES, *TLS_SOURCES, *HEADERS, LIBRARY, TLS_LIBRARY)
    assert {f"peercache/{name}" for name in expected} <= names
    assert sys.base_prefix.encode() not in library


def test_without_openssl_the_wheel_is_built_without_tls(checkout: Path) -> None:
    """The rest needs none; the build names what is missing, and what to install."""
    (checkout / "src" / "peercache" / "fabric" / "tcp" / "_tls_context.c").write_text(
        "#include <no/such/openssl/ssl.h>\n"
    )

    done = build(checkout)
    [wheel] = (checkout / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())

    assert done.returncode == 0, done.stderr
    assert "PeerCache is installed without TLS" in done.stderr
    assert "apt-get install libssl-dev" in done.stderr
    assert f"peercache/{LIBRARY}" in names
    assert f"peercache/{TLS_LIBRARY}" not in names


def test_release_without_openssl_is_no_release(checkout: Path) -> None:
    """A release's wheel carries OpenSSL, so that no host needs its headers."""
    (checkout / "src" / "peercache" / "fabric" / "tcp" / "_tls_context.c").write_text(
        "#include <no/such/openssl/ssl.h>\n"
    )

    done = build(checkout, PEERCACHE_STATIC_OPENSSL="1")

    assert done.returncode == 1
    assert not list(checkout.rglob("*.whl"))
