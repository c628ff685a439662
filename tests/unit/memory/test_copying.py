"""Copies of batches: every byte in its place, a leading run when ended early, no crash."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import platform
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.memory import copying
from peercache.memory.copying import (
    LATE_PORTION_BYTES,
    NEAR_S,
    Pieces,
    Side,
    copy_pages,
    copy_runs,
    scatter,
)
from peercache.model.runs import PageRuns

FOREVER = 1e18


def never() -> float:
    return 0.0


def scattered(rng: np.random.Generator, base: int, pages: list[list[int]]) -> PageRuns:
    """Place runs of these sizes in shuffled order, with gaps of 0 to 3 bytes."""
    sizes = [size for page in pages for size in page]
    places = {}
    at = base
    for index in rng.permutation(len(sizes)).tolist():
        places[index] = at
        at += sizes[index] + int(rng.integers(0, 4))
    numbers = itertools.count()
    return PageRuns.of([[(places[next(numbers)], size) for size in page] for page in pages])


RUN_BYTES = st.integers(0, 40) | st.integers(4050, 4300)
"""Below and above what the compiled copy stores past the cache, in whole lines and what is left."""

PAGES = st.lists(st.lists(RUN_BYTES, min_size=1, max_size=6), max_size=12)


@given(PAGES, st.integers(0, 2**32 - 1), st.booleans(),
       st.integers(1, 200) | st.integers(4000, 20_000), st.booleans())  # fmt: skip
def test_any_batch_is_copied_byte_for_byte_and_nothing_else_is(
    pages: list[list[int]], seed: int, to_slots: bool, portion_bytes: int, by_kernel: bool
) -> None:
    """Gather and scatter equal the oracle, one memoryview slice a run, whatever the cuts."""
    rng = np.random.default_rng(seed)
    room = sum(map(sum, pages)) + 512
    host = rng.integers(0, 256, room, np.uint8)
    slots = rng.integers(0, 256, room, np.uint8)
    runs = scattered(rng, host.ctypes.data, pages)
    slot_runs = scattered(rng, slots.ctypes.data, [[sum(page)] for page in pages])
    expected_host, expected_slots = host.copy(), slots.copy()
    for number in range(len(runs)):
        at = int(slot_runs.addresses[number]) - slots.ctypes.data
        for run in range(int(runs.starts[number]), int(runs.starts[number + 1])):
            size = int(runs.sizes[run])
            mine = int(runs.addresses[run]) - host.ctypes.data
            if to_slots:
                expected_slots[at : at + size] = host[mine : mine + size]
            else:
                expected_host[mine : mine + size] = slots[at : at + size]
            at += size

    copied = copy_runs(
        Side(runs.addresses, runs.sizes),
        Side(slot_runs.addresses, slot_runs.sizes),
        to_segment=to_slots,
        deadline=FOREVER,
        # Hundreds of cuts find what hundreds of thousands would, in milliseconds.
        portion_bytes=max(portion_bytes, sum(map(sum, pages)) // 500),
        clock=never,
        by_kernel=by_kernel,
    )

    assert copied == sum(map(sum, pages))
    assert np.array_equal(host, expected_host)
    assert np.array_equal(slots, expected_slots)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("to_slots", [False, True])
def test_batch_of_thousands_of_runs_is_copied_whole(to_slots: bool, by_kernel: bool) -> None:
    """40 pages of 64 runs are 2,560 pieces: of more than 512 a side, the copy probes a part.

    The kernel takes 1,024 a call, and the pieces of the two sides end at different places.
    """
    pages, layers, piece = 40, 64, 48
    rng = np.random.default_rng(1)
    host = rng.integers(0, 256, (layers, pages, piece), np.uint8)
    slots = rng.integers(0, 256, (pages, layers * piece), np.uint8)
    addresses = (
        host.ctypes.data
        + np.arange(pages)[:, None] * piece
        + np.arange(layers)[None, :] * pages * piece
    )
    runs = PageRuns.regular(addresses, np.full(pages * layers, piece), pages)
    slot_addresses = (slots.ctypes.data + np.arange(pages) * layers * piece).astype(np.uint64)

    copied = copy_pages(
        runs, slot_addresses, to_slots=to_slots, deadline=FOREVER, clock=never, by_kernel=by_kernel
    )

    assert copied == pages
    assert np.array_equal(slots.reshape(pages, layers, piece), host.transpose(1, 0, 2))


def test_batch_costs_one_call_whatever_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 pages are one call of the copy: one hand-off of the GIL, not 128."""
    calls = []

    def counting(ours: Pieces, segment: Pieces, *, to_segment: bool, by_kernel: bool) -> int:
        calls.append(len(ours))
        return scatter(ours, segment, to_segment=to_segment, by_kernel=by_kernel)

    monkeypatch.setattr(copying, "scatter", counting)

    host, slots = np.zeros((128, 2, 4096), np.uint8), np.ones((128, 4096), np.uint8)
    runs = PageRuns.regular(host.ctypes.data + np.arange(128) * 8192, np.full(128, 4096), 128)
    addresses = (slots.ctypes.data + np.arange(128) * 4096).astype(np.uint64)

    copied = copy_pages(runs, addresses, to_slots=False, deadline=FOREVER, clock=never)

    assert (copied, calls) == (128, [128])
    assert (host[:, 0] == 1).all()
    assert (host[:, 1] == 0).all()


def test_nothing_is_copied_after_the_deadline() -> None:
    """A batch that comes too late touches no destination."""
    host, slots = np.zeros(64, np.uint8), np.ones(64, np.uint8)

    copied = copy_one(host, slots, deadline=0.0)

    assert copied == 0
    assert not host.any()


def test_deadline_in_the_middle_leaves_a_leading_run() -> None:
    """The clock is looked at between portions: what is counted is whole, and later ones stay."""
    size = LATE_PORTION_BYTES // 2
    host, slots = np.zeros((8, size), np.uint8), np.ones((8, size), np.uint8)
    looks = itertools.count()

    copied = copy_pages(
        PageRuns.of([[(host[page].ctypes.data, size)] for page in reversed(range(8))]),
        slots.ctypes.data + np.arange(8, dtype=np.uint64) * np.uint64(size),
        to_slots=False,
        deadline=NEAR_S * 0.9,
        clock=lambda: next(looks) * NEAR_S * 0.3,
    )

    assert 2 <= copied < 8
    # The pages went from the last row of the host upwards.
    assert host[8 - copied :].all()
    assert not host[0].any()


@pytest.mark.parametrize("to_slots", [False, True])
@pytest.mark.parametrize("bad", ["host", "slot"])
@pytest.mark.parametrize("offset", [2048, 4096], ids=["its end", "whole page"])
def test_address_that_is_not_there_ends_the_copy_before_its_page(
    to_slots: bool, bad: str, offset: int
) -> None:
    """A fault on either side, in either direction: the pages before it count, no crash."""
    hole = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 4096), 4096, 0) == 0
    host, slots = np.zeros((4, 4096), np.uint8), np.zeros((4, 4096), np.uint8)
    (host if to_slots else slots)[:] = 7
    mine = [host[page].ctypes.data for page in range(4)]
    theirs = [slots[page].ctypes.data for page in range(4)]
    # Of a page that faults in its second half a part is copied.
    (mine if bad == "host" else theirs)[2] = address + offset

    copied = copy_pages(
        PageRuns.of([[(place, 4096)] for place in mine]),
        np.array(theirs, np.uint64),
        to_slots=to_slots,
        deadline=FOREVER,
        clock=never,
    )

    assert copied == 2
    written = slots if to_slots else host
    assert (written[:2] == 7).all()
    assert not written[3].any()


def test_empty_batch_and_empty_pages_are_copied() -> None:
    """Nothing to copy is done at once, and pages of no bytes count."""
    nothing = PageRuns.of([])
    empty = PageRuns.of([[(0, 0)], [(4096, 0), (8192, 0)]])

    copied = [
        copy_pages(nothing, np.empty(0, np.uint64), to_slots=True, deadline=FOREVER),
        copy_pages(empty, np.array([4096, 8192], np.uint64), to_slots=False, deadline=FOREVER),
    ]

    assert copied == [0, 2]


def test_neighbours_in_memory_are_one_entry() -> None:
    """A page of adjacent runs costs the copy one piece; gaps and zero sizes are kept apart."""
    side = Side(
        np.array([100, 110, 120, 200, 300, 5], np.uint64),
        np.array([10, 10, 5, 0, 7, 1], np.uint64),
    )

    cut = side.cut(0, side.total)

    assert cut.tolist() == [[100, 25], [300, 7], [5, 1]]
    assert side.cut(3, 30).tolist() == [[103, 22], [300, 5]]


def copy_one(host: np.ndarray[Any, Any], slots: np.ndarray[Any, Any], *, deadline: float) -> int:
    """Copy one page from a slot."""
    return copy_pages(
        PageRuns.of([[(host.ctypes.data, host.nbytes)]]),
        np.array([slots.ctypes.data], np.uint64),
        to_slots=False,
        deadline=deadline,
        clock=never,
    )


@pytest.mark.parametrize("to_slots", [False, True])
def test_the_kernels_copy_ends_where_memory_does(to_slots: bool) -> None:
    """Of five pages the fourth has no memory in its middle, where no probe looks."""
    size = 4 * mmap.PAGESIZE
    slots = mmap.mmap(-1, 5 * size)
    base = ctypes.addressof(ctypes.c_char.from_buffer(slots))
    hole = base + 3 * size + mmap.PAGESIZE
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(hole), mmap.PAGESIZE) == 0
    host = np.ones((5, size), np.uint8)

    copied = copy_pages(
        PageRuns.of([[(row.ctypes.data, size)] for row in host]),
        (base + np.arange(5) * size).astype(np.uint64),
        to_slots=to_slots,
        deadline=FOREVER,
        clock=never,
        by_kernel=True,
    )

    assert copied == 3
    if not to_slots:
        assert (host[:3] == 0).all()
        assert (host[4] == 1).all()


SCRIPT = """
import ctypes, errno, os, struct
import numpy as np
from peercache.model.runs import PageRuns
from peercache.memory.copying import copy_pages, kernel_copies

# Load the call's number; 310 and 311 are process_vm_readv and process_vm_writev; else allow.
program = b"".join(struct.pack("<HBBI", *line) for line in [
    (0x20, 0, 0, 0), (0x15, 1, 0, 310), (0x15, 0, 1, 311),
    (0x06, 0, 0, 0x0005_0000 | errno.{error}), (0x06, 0, 0, 0x7FFF_0000),
])
instructions = ctypes.create_string_buffer(program, len(program))
filter_ = struct.pack("<HxxxxxxQ", 5, ctypes.addressof(instructions))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, filter_, 0, 0) != 0:
    raise SystemExit(77)

assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1
assert ctypes.get_errno() == errno.{error}
host, slots = np.zeros((4, 64), np.uint8), np.ones((4, 64), np.uint8)
runs = PageRuns.of([[(row.ctypes.data, 32), (row.ctypes.data + 32, 32)] for row in host])
addresses = np.array([row.ctypes.data for row in slots], np.uint64)
assert copy_pages(runs, addresses, to_slots=False, deadline=1e18) == 4
assert host.all()
slots[:] = 0
assert copy_pages(runs, addresses, to_slots=True, deadline=1e18) == 4
assert slots.all()
assert not kernel_copies()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of calls are x86-64's")
@pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
def test_batch_is_copied_where_the_probe_is_forbidden(error: str) -> None:
    """The refused call reports nothing about the addresses, and every byte still arrives."""
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{error}", error)],
        check=False,
        capture_output=True,
        text=True,
    )

    if finished.returncode == 77:
        pytest.skip("may not install a seccomp filter")
    assert finished.returncode == 0, finished.stderr
