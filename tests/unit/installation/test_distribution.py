"""Another project under our import name is refused in one sentence; our own leftovers are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peercache.errors import BrokenInstallation
from peercache.installation import library
from peercache.installation.library import refuse_other_project

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
    """A checkout from before the new name keeps an egg-info folder beside the sources."""
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
    """Nothing works half: the first thing that a process says is what is wrong."""
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
