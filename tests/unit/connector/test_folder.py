"""The folder as a page store: damage, restarts, room, compression, and faults that pass."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from peercache.connector import folder, folder_store
from peercache.connector.folder import WRITING, FolderPages
from peercache.errors import ConfigError
from peercache.model.keys import KEY, Namespace, PageKeys
from peercache.model.runs import PageRuns
from tests.pace import TIMEOUT_S

PAGE = 20_000
KEYS: PageKeys = np.array([f"{i:016}".encode() for i in range(64)], "S16").view(KEY)


def opened(path: Path, size: str | int = "64MiB", **kw: Any) -> FolderPages:
    store = folder_store(path, size, **kw)(Namespace())
    assert isinstance(store, FolderPages)
    return store


def pages_of(count: int, page: int = PAGE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, page), np.uint8)


_buffers: list[np.ndarray] = []


@pytest.fixture(autouse=True)
def buffers() -> Iterator[None]:
    """Keep the memory of all runs until a test has ended: they are addresses alone."""
    yield
    _buffers.clear()


def runs_of(pages: np.ndarray) -> PageRuns:
    """Return each page as two runs."""
    _buffers.append(pages)
    half = pages.shape[1] // 2
    addresses = [[row.ctypes.data, row.ctypes.data + half] for row in pages]
    sizes = [[half, pages.shape[1] - half]] * len(pages)
    return PageRuns.regular(np.array(addresses, np.uint64), np.array(sizes, np.uint64), len(pages))


def got(store: FolderPages, count: int, page: int = PAGE) -> tuple[list[bool], np.ndarray]:
    into = np.zeros((count, page), np.uint8)
    return store.get_into(KEYS[:count], runs_of(into)), into


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("??/*"))


def test_pages_outlive_the_process(tmp_path: Path) -> None:
    """A store that is opened again has them all."""
    pages = pages_of(3)
    first = opened(tmp_path)
    assert first.set_from(KEYS[:3], runs_of(pages)) == [True] * 3
    first.close()

    again = opened(tmp_path)
    hits, into = got(again, 3)
    again.close()

    assert hits == [True] * 3
    assert (into == pages).all()


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("chunk", [8192, folder.CHUNK_BYTES])
def test_every_changed_byte_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, chunk: int
) -> None:
    """A flipped bit anywhere but in the padding is never served, and the file goes."""
    monkeypatch.setattr(folder, "CHUNK_BYTES", chunk)
    pages = pages_of(1) & 15  # So that it compresses.
    store = opened(tmp_path, zstd_level=level, threads=1)
    assert store.set_from(KEYS[:1], runs_of(pages)) == [True]
    (file,) = files_of(tmp_path)
    whole = file.read_bytes()
    chunks = -(-PAGE // chunk)
    fixed = folder.FIXED.size
    stored = [
        folder.CHUNK.unpack_from(whole, fixed + i * folder.CHUNK.size)[0] for i in range(chunks)
    ]
    begins = np.cumsum([4096, *(-(-size // 4096) * 4096 for size in stored)])
    used = [(0, 4096), *zip(begins, stored, strict=False)]
    spots = {begin + at for begin, size in used for at in (0, 1, 5, size // 2, size - 1)}
    spots |= {4, 6, 8, 12, 30, 36, fixed + 2, fixed + 8, 3000, 4090}
    for spot in sorted(spots):
        damaged = bytearray(whole)
        damaged[spot] ^= 0x10
        file.write_bytes(damaged)
        hits, _ = got(store, 1)
        assert hits == [False], spot
        assert not file.exists(), spot
    file.write_bytes(whole)
    hits, into = got(store, 1)
    store.close()

    assert hits == [True]
    assert (into == pages).all()


@pytest.mark.parametrize("length", [0, 100, 4095, 4096, 8192, 20_000])
def test_a_torn_file_is_a_miss_and_goes(tmp_path: Path, length: int) -> None:
    """What a power failure has left of a page is no page."""
    store = opened(tmp_path)
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]
    (file,) = files_of(tmp_path)
    os.truncate(file, length)

    hits, _ = got(store, 1)
    assert (hits, file.exists()) == ([False], False)
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]
    assert got(store, 1)[0] == [True]
    store.close()


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """The key is in the page: a file that was moved or linked is not the page of its name."""
    store = opened(tmp_path)
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]
    (file,) = files_of(tmp_path)
    other = KEYS[1].tobytes().hex()
    file.rename(tmp_path / other[:2] / other)

    assert got(store, 2)[0] == [False, False]
    store.close()


def test_a_page_of_another_length_stays(tmp_path: Path) -> None:
    """A reader of another geometry removes nothing of others."""
    store = opened(tmp_path)
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]

    assert got(store, 1, PAGE - 2)[0] == [False]
    assert got(store, 1)[0] == [True]
    store.close()


def test_only_what_gets_smaller_is_compressed(tmp_path: Path) -> None:
    """Noise is stored as it is, and a store without a codec reads it; each finds the other's."""
    noise, text = pages_of(1), pages_of(1) & 7
    packed = opened(tmp_path, zstd_level=1)
    assert packed.set_from(KEYS[:2], runs_of(np.concatenate([noise, text]))) == [True, True]
    sizes = [file.stat().st_size for file in files_of(tmp_path)]
    assert min(sizes) < PAGE * 0.7
    assert max(sizes) == 4096 + 5 * 4096
    plain = opened(tmp_path)
    for store in (packed, plain):
        hits, into = got(store, 2)
        assert hits == [True, True]
        assert (into == np.concatenate([noise, text])).all()
        store.close()


def test_a_reader_without_the_library_leaves_compressed_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are misses for it, and stay for those that have it."""
    packed = opened(tmp_path, zstd_level=1)
    assert packed.set_from(KEYS[:1], runs_of(pages_of(1) & 7)) == [True]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        plain = opened(tmp_path)
        assert got(plain, 1)[0] == [False]
        plain.close()
        with pytest.raises(ConfigError, match="pip install zstandard"):
            opened(tmp_path, zstd_level=1)
    assert got(packed, 1)[0] == [True]
    packed.close()


def test_a_frame_of_absurd_length_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame that claims gigabytes allocates nothing."""
    bomb = zstandard.ZstdCompressor().compress(bytes(2**26))
    monkeypatch.setattr(folder.Zstd, "compress", lambda _self, _raw: bomb)
    store = opened(tmp_path, zstd_level=1)
    assert len(bomb) < PAGE
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]

    assert got(store, 1)[0] == [False]
    assert files_of(tmp_path) == []
    store.close()


def test_the_least_recently_used_pages_go(tmp_path: Path) -> None:
    """The cap holds over a restart, and a page that was read goes last."""
    file_bytes = 4096 + 5 * 4096
    cap = 64 * file_bytes  # Twice what is written: a sweep during a set may count it twice.
    store = opened(tmp_path, cap)
    assert store.set_from(KEYS[:30], runs_of(pages_of(30))) == [True] * 30
    for age, key in enumerate(KEYS[:30].tolist()):
        name = key.hex()
        then = time.time() - 10_000 + age
        os.utime(tmp_path / name[:2] / name, (then, then))
    assert got(store, 2)[0] == [True, True]
    store.close()

    again = opened(tmp_path, 20 * file_bytes)
    left = {file.name for file in files_of(tmp_path)}
    assert len(left) <= 20
    assert {key.hex() for key in KEYS[:2].tolist()} <= left
    assert {key.hex() for key in KEYS[14:30].tolist()} <= left
    until = time.monotonic() + TIMEOUT_S
    for i in range(30, 64):
        runs = runs_of(pages_of(1, seed=i))
        # A set that finds no room reports it, and a sweep makes some.
        while again.set_from(KEYS[i : i + 1], runs) != [True]:
            assert time.monotonic() < until
            time.sleep(0.001)
    hits = again.get_into(KEYS[63:], runs_of(np.zeros((1, PAGE), np.uint8)))
    assert hits == [True]
    again.close()
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= 20 * file_bytes


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """Files that are being written stay, those of an hour ago go."""
    opened(tmp_path).close()
    old, new = tmp_path / WRITING / "old", tmp_path / WRITING / "new"
    for file in (old, new):
        file.write_bytes(b"half a page")
    os.utime(old, (time.time() - 4000,) * 2)

    opened(tmp_path).close()

    assert (old.exists(), new.exists()) == (False, True)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is a page that was not stored; its room is free again."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = opened(tmp_path, 8 * (4096 + 5 * 4096))
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        for _ in range(16):
            assert store.set_from(KEYS[:2], runs_of(pages_of(2))) == [False, False]
    assert (files_of(tmp_path), list((tmp_path / WRITING).iterdir())) == ([], [])
    assert store.set_from(KEYS[:2], runs_of(pages_of(2))) == [True, True]
    store.close()


@pytest.mark.parametrize("name", ["preadv", "pwrite", "rename"])
def test_errors_that_pass_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A stale or busy share costs a moment; one that stays away costs one try a page."""
    real: Callable[..., Any] = getattr(os, name)
    calls: list[int] = []
    bad = [2]

    def flaky(*args: Any) -> Any:
        calls.append(1)
        if len(calls) <= bad[0]:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args)

    store = opened(tmp_path, threads=1)
    monkeypatch.setattr(os, name, flaky)
    assert store.set_from(KEYS[:1], runs_of(pages_of(1))) == [True]
    assert got(store, 1)[0] == [True]
    calls.clear()
    bad[0] = 10**6

    if name == "preadv":
        assert store.set_from(KEYS[1:9], runs_of(pages_of(8))) == [True] * 8
        assert got(store, 9)[0] == [False] * 9
    else:
        assert store.set_from(KEYS[1:10], runs_of(pages_of(9))) == [False] * 9
    assert len(calls) == 4 + 8
    assert len(list((tmp_path / WRITING).iterdir())) == 0
    store.close()


@pytest.mark.parametrize("fault", ["no thread", "bug"])
def test_a_call_does_not_return_while_a_thread_uses_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """One page is being read when another one ends the call: its memory is the engine's again."""
    opened(tmp_path).set_from(KEYS[:2], runs_of(pages_of(2)))
    store = opened(tmp_path, threads=2)
    begun, failed, returned, may_end = (threading.Event() for _ in range(4))
    waited: list[bool] = []
    slow = KEYS[0 if fault == "no thread" else 1].tobytes()
    read, start = folder.read_page, threading.Thread.start

    def slow_read(fd: int, key: bytes, *rest: Any) -> None:
        if key == slow:
            begun.set()
            assert may_end.wait(TIMEOUT_S)
        else:
            assert begun.wait(TIMEOUT_S)
            failed.set()
            raise RuntimeError("a bug")
        read(fd, key, *rest)

    def one_thread(thread: threading.Thread) -> None:
        if begun.is_set() or (thread.name.endswith("_1") and begun.wait(TIMEOUT_S)):
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def release() -> None:
        assert failed.wait(TIMEOUT_S)
        waited.append(not returned.wait(0.2))
        may_end.set()

    monkeypatch.setattr(folder, "read_page", slow_read)
    releasing = threading.Thread(target=release)
    releasing.start()
    if fault == "no thread":
        monkeypatch.setattr(threading.Thread, "start", one_thread)
    found, _ = got(store, 2)
    returned.set()
    releasing.join()

    assert (found, waited) == ([False, False], [True])


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Files go from a store's folder, so it is one of its own."""
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(ConfigError, match="holds other files"):
        opened(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "thesis.txt")
    for wrong in ({"size": "many"}, {"zstd_level": 20}, {"zstd_level": -1}, {"threads": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            folder_store(tmp_path, **{"size": "1MiB", **wrong})  # type: ignore[arg-type]


WRITER = """
import sys
from pathlib import Path
from tests.unit.connector.test_folder import KEYS, opened, pages_of, runs_of
store = opened(Path(sys.argv[1]))
pages = pages_of(64)
print("ready", flush=True)
sys.stdin.readline()
for begin in range(0, 64, 8):
    part = slice(begin, begin + 8)
    assert store.set_from(KEYS[part], runs_of(pages[part])) == [True] * 8
store.close()
"""


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Both write the same pages at once while this one reads: every hit has right bytes."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        store, pages = opened(tmp_path), pages_of(64)
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        until, hits = time.monotonic() + TIMEOUT_S, [False]
        while not all(hits):
            assert time.monotonic() < until
            hits, into = got(store, 64)
            assert (into[hits] == pages[hits]).all()
        assert [writer.wait(TIMEOUT_S) for writer in writers] == [0, 0]
        store.close()
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert len(files_of(tmp_path)) == 64
