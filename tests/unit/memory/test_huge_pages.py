"""Huge pages: arithmetic and messages everywhere, real ones where the machine lets us have some."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.config.settings import Config
from peercache.errors import ConfigError, Rejected
from peercache.memory import kernel
from peercache.memory.attached import AttachedSegment
from peercache.memory.kernel import Supply, folder_for, missing, mounted, supplies
from peercache.memory.layout import (
    GIB_PAGE_BYTES,
    HUGE_PAGE_BYTES,
    Header,
    Layout,
    pack_header,
    parse_header,
    segment_name,
)
from peercache.memory.published import remove_leftovers
from peercache.model.ids import Incarnation
from peercache.node.memory import publish
from tests.children import in_child

MOUNTS = """\
tmpfs /dev/shm tmpfs rw,size=24G 0 0
hugetlbfs /dev/hugepages hugetlbfs rw,relatime,pagesize=2M 0 0
none /mnt/huge hugetlbfs rw,pagesize=1024M 0 0
none /mnt/default hugetlbfs rw 0 0
"""
NODE = Incarnation(0xAB)
PAGES_MIN = 12
"""Huge pages that the tests below need, at most, at one time."""


def test_layout_in_huge_pages_is_whole_ones_of_them() -> None:
    """Words and page memory are in pages of their own, so that writers cannot touch words."""
    layout = Layout.of(7 * HUGE_PAGE_BYTES + 100, 16384, HUGE_PAGE_BYTES)

    assert layout.page_bytes == 7 * HUGE_PAGE_BYTES
    assert layout.pages_offset == HUGE_PAGE_BYTES
    assert layout.total_bytes == layout.memory_bytes == 8 * HUGE_PAGE_BYTES
    assert Layout.of(3 * GIB_PAGE_BYTES, 16384, GIB_PAGE_BYTES).pages_offset == GIB_PAGE_BYTES


def test_header_carries_the_page_size_and_takes_no_other() -> None:
    """A reader lays the file out as its owner did; older files say 0."""
    header = Header(NODE, 16384, 4 * HUGE_PAGE_BYTES, "0" * 36, HUGE_PAGE_BYTES)

    assert parse_header(pack_header(header)) == header
    for wrong in (4096, 8 * HUGE_PAGE_BYTES, GIB_PAGE_BYTES):
        with pytest.raises(Rejected, match="huge pages"):
            parse_header(pack_header(Header(NODE, 16384, 4 * HUGE_PAGE_BYTES, "0" * 36, wrong)))


def test_segment_is_laid_out_as_its_header_states(tmp_path: Path) -> None:
    """With pages of 1 GiB the page memory begins a gibibyte into the file, not 2 MiB."""
    layout = Layout.of(GIB_PAGE_BYTES, 16384, GIB_PAGE_BYTES)
    path = tmp_path / segment_name(NODE)
    with path.open("wb") as file:
        header = Header(NODE, 16384, GIB_PAGE_BYTES, "0" * 36, GIB_PAGE_BYTES)
        file.write(pack_header(header))
        file.truncate(layout.total_bytes)
        file.seek(GIB_PAGE_BYTES)
        file.write(b"first")

    segment = AttachedSegment.open(path, incarnation=NODE, writable=False)

    with segment.in_use():
        assert ctypes.string_at(segment.pages_address, 5) == b"first"
    assert segment.close(1.0)


def test_mounts_are_reported_by_their_page_size() -> None:
    """The kernel writes a gibibyte as 1024M, and the default not at all."""
    assert mounted(MOUNTS) == (
        ("/dev/hugepages", HUGE_PAGE_BYTES),
        ("/mnt/huge", GIB_PAGE_BYTES),
        ("/mnt/default", HUGE_PAGE_BYTES),
    )
    assert folder_for("1G", "", MOUNTS) == "/mnt/huge"
    assert folder_for("2M", "/mnt/default/peercache", MOUNTS) == "/mnt/default/peercache"


@pytest.mark.parametrize(
    ("name", "configured", "mounts", "why"),
    [
        ("2M", "", "", "mount -t hugetlbfs -o pagesize=2M none /dev/hugepages"),
        ("2M", "/mnt/huge", MOUNTS, "no hugetlbfs of 2M pages"),
        ("1G", "/dev/shm", MOUNTS, "no hugetlbfs of 1G pages"),
    ],
)
def test_folder_that_has_no_such_pages_is_refused(
    name: str, configured: str, mounts: str, why: str
) -> None:
    """A pool would else are in another memory than the one that was asked for."""
    with pytest.raises(ConfigError, match=why):
        folder_for(name, configured, mounts)


def test_missing_pages_are_counted_and_the_fix_is_the_whole_number() -> None:
    """What others use stays theirs: the kernel is given how many there shall be in all."""
    some = Supply(HUGE_PAGE_BYTES, total=100, free=40)

    assert missing("2M", 40, some) == ""
    assert missing("2M", 513, some) == (
        "the pool needs 513 huge pages of 2M, 40 are free: sysctl vm.nr_hugepages=573"
    )
    assert "hugepagesz=1G hugepages=5" in missing("1G", 5, Supply(GIB_PAGE_BYTES, 0, 0))


def test_supply_leaves_out_what_is_reserved(tmp_path: Path) -> None:
    """The kernel counts pages as free that are promised to a mapping."""
    folder = tmp_path / "hugepages-2048kB"
    folder.mkdir()
    for name, count in (("nr_hugepages", 10), ("free_hugepages", 8), ("resv_hugepages", 3)):
        (folder / name).write_text(f"{count}\n")

    assert supplies(tmp_path) == (Supply(HUGE_PAGE_BYTES, 10, 5),)
    assert supplies(tmp_path / "none") == ()


# --- with real ones ---------------------------------------------------------------------------


@pytest.fixture
def hugetlbfs(tmp_path: Path) -> Iterator[Path]:
    """A hugetlbfs with PAGES_MIN free pages of 2 MiB, undone afterwards."""
    count = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages")
    if os.geteuid() != 0 or not count.exists():
        pytest.skip("needs root, and a kernel with huge pages of 2 MiB")
    folder = tmp_path / "huge"
    folder.mkdir()
    # The number is the machine's: a test in another process waits for this one.
    with count.open() as machine_wide:
        fcntl.flock(machine_wide, fcntl.LOCK_EX)
        yield from _with_huge_pages(count, folder)


def _with_huge_pages(count: Path, folder: Path) -> Iterator[Path]:
    before = count.read_text()
    try:
        count.write_text(str(int(before) + PAGES_MIN))
    except OSError as error:
        pytest.skip(f"the number of huge pages cannot be changed here: {error}")
    try:
        supply = next(each for each in supplies() if each.page_bytes == HUGE_PAGE_BYTES)
        if supply.free < PAGES_MIN:
            pytest.skip(f"the kernel finds only {supply.free} huge pages")
        command = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("no hugetlbfs can be mounted here")
        try:
            yield folder
        finally:
            # Lazily: a test that failed may still have its segment mapped.
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
    finally:
        count.write_text(before)


def config_for(folder: Path, pages: int) -> Config:
    """A node's configuration with a pool of so many huge pages."""
    return Config.load(
        {"hugepages": "2M", "hugepages_dir": str(folder), "pool_size": pages * HUGE_PAGE_BYTES}
    )


def test_pool_in_huge_pages_is_attached_read_and_written_by_path(hugetlbfs: Path) -> None:
    """Local clients map the very same memory, and what they see are its words and bytes."""
    segment = publish(config_for(hugetlbfs, 4), NODE)
    assert segment.populate(4 * HUGE_PAGE_BYTES) == 4 * HUGE_PAGE_BYTES
    segment.store_words(np.array([3], np.int64), np.array([42], np.uint64))
    reader = AttachedSegment.open(segment.path, incarnation=NODE, writable=False)
    writer = AttachedSegment.open(segment.path, incarnation=NODE, writable=True)

    ctypes.memmove(writer.pages_address + HUGE_PAGE_BYTES, b"bytes", 5)
    with reader.in_use():
        words = reader.words(np.array([3 * 16384, 0], np.uint64))
        read = ctypes.string_at(reader.pages_address + HUGE_PAGE_BYTES, 5)

    assert segment.path.parent == hugetlbfs
    assert words.tolist() == [42, 0]
    assert read == bytes(segment.pages[HUGE_PAGE_BYTES : HUGE_PAGE_BYTES + 5]) == b"bytes"
    assert reader.populate() == reader.page_bytes == 4 * HUGE_PAGE_BYTES
    maps = Path("/proc/self/smaps").read_text().split(str(segment.path))[1]
    assert "KernelPageSize:     2048 kB" in maps.partition("VmFlags")[0]
    del words
    for each in (reader, writer):
        assert each.close(1.0)
    segment.close()
    assert not list(hugetlbfs.iterdir())


def test_reader_takes_no_huge_page_that_the_owner_has_not_populated(hugetlbfs: Path) -> None:
    """It would be charged to the reader's container, though the owner has been promised it."""
    untaken = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    segment = publish(config_for(hugetlbfs, 4), NODE)
    reader = AttachedSegment.open(segment.path, incarnation=NODE, writable=True)
    before = int(untaken.read_text())

    reader.populate()

    assert int(untaken.read_text()) == before
    assert reader.close(1.0)
    segment.close()


def test_pool_larger_than_the_free_huge_pages_is_refused_at_the_start(hugetlbfs: Path) -> None:
    """A bus error in the middle of the night is what the kernel would give instead."""
    with pytest.raises(ConfigError, match=r"needs 10040 huge pages of 2M.*sysctl vm\.nr_hugepages"):
        publish(config_for(hugetlbfs, 10_000), NODE)

    assert not list(hugetlbfs.iterdir())


def test_huge_pages_of_a_dead_node_are_free_again(hugetlbfs: Path) -> None:
    """A killed node leaves its file, and with it the pages that its successor needs."""
    in_child(lambda: publish(config_for(hugetlbfs, 8), NODE).populate(8 * HUGE_PAGE_BYTES))
    left = [path.name for path in hugetlbfs.iterdir()]

    segment = publish(config_for(hugetlbfs, 8), Incarnation(0xAC))

    assert len(left) == 1
    assert [path.name for path in hugetlbfs.iterdir()] == [segment.path.name]
    segment.close()
    assert remove_leftovers(hugetlbfs) == []


def test_promise_of_huge_pages_is_kept_against_others(hugetlbfs: Path) -> None:
    """From its start a pool has its pages, populated or not: a second one is refused."""
    first = publish(config_for(hugetlbfs, 8), NODE)

    with pytest.raises(ConfigError, match="huge pages"):
        publish(config_for(hugetlbfs, 8), Incarnation(0xAC))

    assert first.populate(8 * HUGE_PAGE_BYTES) == 8 * HUGE_PAGE_BYTES
    first.close()
    assert kernel.supplies()
