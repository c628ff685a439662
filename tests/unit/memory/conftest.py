"""A folder of shared memory for each test, and a segment's owner in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tmpfs import mounted_tmpfs
from tests.unit.memory.watched import (
    WatchedReader,
    WatchedWriter,
    compiled_reader,
    compiled_writer,
    put_in_place,
)

OWNER = Path(__file__).with_name("owner_process.py")


class Owner:
    """A process that publishes a segment and obeys lines."""

    def __init__(self, shm_dir: Path, incarnation: int, page_bytes: int, granule: int) -> None:
        """Start it and wait until it has published."""
        self.process = subprocess.Popen(
            [sys.executable, str(OWNER), str(shm_dir), str(incarnation), str(page_bytes),
             str(granule)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.path = Path(self._line())

    def send(self, command: str) -> None:
        """Have one command done."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self._line() == "done"

    def kill(self) -> None:
        """SIGKILL it, and wait until the kernel has cleaned up."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Leave nothing open."""
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def start_owner(shm_dir: Path) -> Iterator[Callable[..., Owner]]:
    """Give what starts owners; all of them are gone after the test."""
    owners: list[Owner] = []

    def start(incarnation: int, page_bytes: int = 64 * 16384, granule: int = 16384) -> Owner:
        owners.append(Owner(shm_dir, incarnation, page_bytes, granule))
        return owners[-1]

    yield start
    for owner in owners:
        owner.end()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 4 MiB, where we may."""
    with mounted_tmpfs(tmp_path / "small", "4m") as folder:
        yield folder


@pytest.fixture(scope="session")
def reader_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the reader of directory tables with a look before each load."""
    return compiled_reader(tmp_path_factory.mktemp("reader"))


@pytest.fixture(scope="session")
def writer_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the writer of directory tables with a look after each store."""
    return compiled_writer(tmp_path_factory.mktemp("writer"))


@pytest.fixture
def watched_reader(reader_library: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedReader:
    """Give the reader that every TableReader uses."""
    made = WatchedReader(reader_library)
    put_in_place(made, monkeypatch)
    return made


@pytest.fixture
def watched_writer(writer_library: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedWriter:
    """Give the writer that every DirectoryTable uses."""
    made = WatchedWriter(writer_library)
    put_in_place(made, monkeypatch)
    return made
