"""Loads of many pages at once: exactly what is right is loaded, with io_uring and without."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import pytest

from peercache.actors.disk.slabs import BLOCK_BYTES, slot_blocks_of
from peercache.actors.ports import (
    DISK_DAMAGED,
    DISK_DONE,
    DISK_FAILED,
    DISK_LATE,
    DISK_REPLACED,
    Load,
)
from peercache.model.keys import tags_of
from peercache.storage import ring
from peercache.storage.folder import Folder, open_folder
from peercache.storage.jobs import Job, Unit
from peercache.storage.layout import SlotHeader, checksum_of, pack_slot, slab_name
from peercache.storage.mover import PageMover, PoolMemory
from peercache.storage.ring import READS_AT_ONCE
from peercache.storage.slab_files import SlabFiles, aligned
from tests.descriptors import open_files
from tests.pace import TIMEOUT_S
from tests.unit.storage.rig import MIB, Log, content, key_of

SLABS: Final = 3
TAG: Final = (9 << 64) | 5
LENGTHS: Final = [1, 8, 16, 17, 128, 129, 240, 241, 4095, 4096, 4097, 9000]
"""One for each way in which xxh3 takes its input, and around a block."""


def has_io_uring() -> bool:
    ctypes.CDLL(None, use_errno=True).syscall(425, 0, None)  # io_uring_setup
    return ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)


needs_io_uring = pytest.mark.skipif(
    not has_io_uring(), reason="the kernel has no io_uring for this process"
)


STARTED: Final = "CachedSqHead:"


def figures_of(ring: int | str) -> str:
    return Path(f"/proc/self/fdinfo/{ring}").read_text()


def shows_started() -> bool:
    made = ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120))
    if made < 0:
        return False
    figures = figures_of(made)
    os.close(made)
    return STARTED in figures


needs_started = pytest.mark.skipif(
    not shows_started(), reason="the kernel does not show which reads of a ring have started"
)


class Disk:
    """Slabs with pages at places that a test chooses, a pool, and a mover between them."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.log = Log()
        self.files = SlabFiles(folder, free_floor=0.0, log=self.log, read_only=False)
        self.memory = np.frombuffer(mmap.mmap(-1, 4 * MIB), np.uint8)
        self.mover = PageMover(
            self.files,
            pool=PoolMemory(self.memory, np.ones(MIB // BLOCK_BYTES, np.uint64), BLOCK_BYTES),
            ended=lambda _: None,
            log=self.log,
        )

    def put(self, headers: list[SlotHeader], at: list[int]) -> None:
        """Write slots with the content of their keys, of any size, at these places."""
        for slab in range(SLABS):
            self.files.prepare(slab, 4)
        for header, place in zip(headers, at, strict=True):
            with aligned(slot_blocks_of(header.length)) as memory:
                packed = pack_slot(header)
                memory[: len(packed)] = packed
                page = content(header.key, header.length)
                memory[BLOCK_BYTES:][: header.length] = page.tobytes()
                self.files.write(place, [memory])

    def load(self, headers: list[SlotHeader]) -> Unit:
        """Begin a unit that loads these pages; slots follow each other in the pool."""
        count = len(headers)
        self.sizes = [slot_blocks_of(header.length) * BLOCK_BYTES for header in headers]
        self.offsets = (np.cumsum(self.sizes) - self.sizes).astype(np.uint64)
        effect = Load(
            1,
            b"".join(header.key for header in headers),
            tags_of([header.namespace for header in headers]),
            np.array([header.length for header in headers], np.uint64),
            np.array([header.place for header in headers], np.uint64),
            self.offsets,
            time.monotonic() + TIMEOUT_S,
        )
        unit = Unit(Job.of(effect, count), range(count), effect.until)
        unit.outcomes[:] = bytes((DISK_LATE,)) * count
        return unit

    def page(self, index: int) -> np.ndarray:
        return self.memory[int(self.offsets[index]) :][: self.sizes[index]]


def header_of(number: int, length: int, place: int) -> SlotHeader:
    key = key_of(number + 1)
    return SlotHeader(key, TAG, length, place, 1, checksum_of(content(key, length).tobytes()), 1)


def spread(folder: Folder, lengths: list[int]) -> list[SlotHeader]:
    """Return headers of pages in all slabs, most in consecutive slots."""
    ends = [slab * folder.slab_bytes + BLOCK_BYTES for slab in range(SLABS)]
    headers = []
    for number, length in enumerate(lengths):
        slab = number // 5 % SLABS
        headers.append(header_of(number, length, ends[slab]))
        ends[slab] += (slot_blocks_of(length) + number % 5 // 4) * BLOCK_BYTES
    return headers


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = open_folder(tmp_path, 16 * MIB)
    yield Disk(folder)
    folder.close()


@pytest.fixture(params=[pytest.param(True, marks=needs_io_uring), False], ids=["ring", "calls"])
def has_ring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(ring, "_open", lambda _setting: None)
    return bool(request.param)


def test_pages_of_all_lengths_are_loaded(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, *, has_ring: bool
) -> None:
    """More pages than reads in flight, in several slabs; a ring needs no other call."""
    headers = spread(disk.folder, LENGTHS * 5)
    disk.put(headers, [header.place for header in headers])
    calls: list[object] = []
    real = os.preadv

    def preadv(*given: Any) -> int:
        calls.append(given[2])
        return real(*given)

    monkeypatch.setattr(os, "preadv", preadv)
    unit = disk.load(headers)
    disk.mover.perform(unit)

    assert set(unit.outcomes) == {DISK_DONE}
    assert not calls or not has_ring
    for index, header in enumerate(headers):
        there = disk.page(index)[: header.length]
        assert np.array_equal(there, content(header.key, header.length))
        assert unit.job.checksums[index] == header.checksum


FORGED: Final = {
    "key": {"key": bytes(16)},
    "space": {"namespace": TAG + 1},
    "variant": {"namespace": TAG + (1 << 64)},
    "length": {"length": 9001},
    "place": {"place": 6 * BLOCK_BYTES},
    "checksum": {"checksum": 7},
}


@pytest.mark.parametrize("field", FORGED)
def test_a_slot_of_another_page_is_not_loaded(disk: Disk, field: str, *, has_ring: bool) -> None:
    """Its header is valid, and differs from what is wanted in one field; its neighbours load."""
    del has_ring
    wanted = spread(disk.folder, [9000] * 3)
    there = [wanted[0], attrs.evolve(wanted[1], **FORGED[field]), wanted[2]]
    disk.put(there, [header.place for header in wanted])
    unit = disk.load(wanted)
    disk.mover.perform(unit)

    wrong = DISK_DAMAGED if field in ("place", "checksum") else DISK_REPLACED
    assert list(unit.outcomes) == [DISK_DONE, wrong, DISK_DONE]
    assert list(unit.job.checksums) == [wanted[0].checksum, 0, wanted[2].checksum]


def test_nothing_is_written_outside_the_pool(disk: Disk, *, has_ring: bool) -> None:
    """A page whose slot would end behind the pool is not loaded."""
    del has_ring
    headers = spread(disk.folder, [9000] * 3)
    disk.put(headers, [header.place for header in headers])
    unit = disk.load(headers)
    disk.offsets[1], disk.offsets[2] = 4 * MIB - BLOCK_BYTES, 2**64 - 4 * BLOCK_BYTES
    disk.mover.perform(unit)

    assert unit.outcomes[0] == DISK_DONE
    assert DISK_DONE not in unit.outcomes[1:]


def _replace(target: str, file: int) -> int:
    """Let this process's descriptors of a file or ring be others; return how many there were."""
    names = [each.name for each in Path("/proc/self/fd").iterdir()
             if os.path.realpath(each).endswith(target)]  # fmt: skip
    for name in names:
        os.dup2(file, int(name))
    return len(names)


def test_a_slab_that_cannot_be_read_fails_its_pages_only(disk: Disk, *, has_ring: bool) -> None:
    """One slab is missing, and the descriptor of one becomes one that cannot be read."""
    del has_ring
    headers = spread(disk.folder, [9000] * 15)
    disk.put(headers, [header.place for header in headers])
    path = disk.folder.path / slab_name(0)
    _replace(str(path), os.open(path, os.O_WRONLY))
    disk.files.forget(2)
    (disk.folder.path / slab_name(2)).unlink()
    unit = disk.load(headers)
    disk.mover.perform(unit)

    assert list(unit.outcomes) == [DISK_FAILED] * 5 + [DISK_DONE] * 5 + [DISK_DAMAGED] * 5
    errors = {facts["error"] for _, event, facts in disk.log.lines if event == "disk.call_failed"}
    assert errors == {"[Errno 9] Bad file descriptor"}


def started_reads() -> int:
    """Return how many reads the kernel has taken from this process's only ring; -1: no ring yet."""
    for each in Path("/proc/self/fd").iterdir():
        if os.path.realpath(each).endswith("[io_uring]"):
            return int(figures_of(each.name).partition(STARTED)[2].split()[0])
    return -1


class Slow:
    """A load on a thread, of pages in a slab that became a pipe, and of one in the next slab."""

    def __init__(self, disk: Disk) -> None:
        first = [header_of(n, 1, (1 + 4 * n) * BLOCK_BYTES) for n in range(READS_AT_ONCE)]
        last = header_of(READS_AT_ONCE, 1, disk.folder.slab_bytes + BLOCK_BYTES)
        disk.put([last], [last.place])
        source, self.sink = os.pipe()
        _replace(str(disk.folder.path / slab_name(0)), source)
        os.close(source)
        self.unit = disk.load([*first, last])
        self.cpu_s = 0.0

        def load() -> None:
            disk.mover.perform(self.unit)
            self.cpu_s = time.thread_time()

        self.thread = threading.Thread(target=load)
        self.thread.start()
        until = time.monotonic() + TIMEOUT_S
        while started_reads() < READS_AT_ONCE:
            assert time.monotonic() < until

    def finish(self) -> None:
        """Let the reads in flight end, one by one."""
        for _ in range(READS_AT_ONCE):
            assert self.thread.is_alive()
            os.write(self.sink, b"p" * 2 * BLOCK_BYTES)
            time.sleep(0.01)
        os.close(self.sink)
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()


@needs_started
def test_no_read_is_started_after_the_deadline(disk: Disk) -> None:
    """Those in flight are waited for: until then they write to their slots."""
    slow = Slow(disk)
    slow.unit.over[0] = True
    slow.finish()

    assert set(slow.unit.outcomes) == {DISK_LATE}
    assert not disk.page(READS_AT_ONCE).any()
    assert all(disk.page(index)[0] == ord("p") for index in range(READS_AT_ONCE))
    disk.files.forget(0)
    assert disk.folder.path / slab_name(0) not in open_files()


@needs_started
def test_a_kernel_that_refuses_to_wait_keeps_no_thread_busy(disk: Disk) -> None:
    """The reads in flight are waited for, and further pages are read by calls.

    The ring's descriptor becomes a pipe, for which the kernel refuses every call.
    """
    slow = Slow(disk)
    source, sink = os.pipe()
    assert _replace("/anon_inode:[io_uring]", source)
    wait_s = 0.5
    time.sleep(wait_s)
    slow.finish()
    os.close(source)
    os.close(sink)

    assert list(slow.unit.outcomes) == [DISK_FAILED] * READS_AT_ONCE + [DISK_DONE]
    assert slow.cpu_s < wait_s / 10
