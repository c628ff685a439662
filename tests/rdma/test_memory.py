"""Registration in the background, with a device that does what it is asked to."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from peercache.memory.kernel import populate_range
from peercache.rdma import memory
from peercache.rdma.memory import Regions
from peercache.rdma.registrar import ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, explanation
from tests.pace import TIMEOUT_S
from tests.rdma.gated_device import CHUNK, Device


class Memory:
    """Some pages of ours, which can be looked after like an engine's tensor."""

    def __init__(self, chunks: int) -> None:
        self.bytes = np.zeros(chunks * CHUNK, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.length = self.bytes.size


@pytest.fixture
def device() -> Device:
    """A device that lets everything through at once."""
    device = Device()
    device.gate.set()
    return device


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is logged meanwhile."""
    reported: list[tuple[str, dict[str, Any]]] = []

    class Log:
        def __getattr__(self, level: str) -> Any:
            return lambda event, **facts: reported.append((event, {"level": level, **facts}))

    monkeypatch.setattr(memory, "get_logger", lambda **_: Log())
    return reported


def test_memory_is_registered_in_chunks_with_keys_of_their_own(device: Device) -> None:
    """Two and a half chunks make three pieces, found by address and reported to peers by offset."""
    ours = Memory(3)
    regions = Regions(registrar=device)
    length = 2 * CHUNK + CHUNK // 2

    region = regions.add("engine", ours.address, length, remote=False)
    assert regions.wait(region, TIMEOUT_S)

    assert region.registered_bytes == length
    assert [(offset, size) for offset, size, _ in region.remote()] == [
        (0, CHUNK),
        (CHUNK, CHUNK),
        (2 * CHUNK, CHUNK // 2),
    ]
    assert [size for _, size, _ in regions.find(ours.address + 10, CHUNK)] == [CHUNK - 10, 10]
    assert regions.find(ours.address, length + 1) == []
    assert {access for _, _, access in device.live.values()} == {ACCESS_LOCAL_WRITE}
    regions.close()


def test_chunks_are_registered_by_several_threads_at_once_and_not_by_more_than_allowed() -> None:
    """Pinning is the kernel's work, and takes several threads to be quick."""
    device, ours = Device(), Memory(8)
    regions = Regions(registrar=device, threads_max=3)

    region = regions.add("engine", ours.address, ours.length, remote=False)
    for _ in range(3):
        assert device.began.acquire(timeout=TIMEOUT_S)
    assert device.at_once == 3
    device.gate.set()

    assert regions.wait(region, TIMEOUT_S)
    assert device.at_once_max == 3
    regions.close()


def test_urgent_memory_goes_ahead_of_what_waits() -> None:
    """A read waits for a block, and no read yet for the last gigabyte of an engine."""
    device, engine, block = Device(), Memory(4), Memory(1)
    regions = Regions(registrar=device, threads_max=1)
    first = regions.add("engine", engine.address, engine.length, remote=False)
    assert device.began.acquire(timeout=TIMEOUT_S)

    second = regions.add("bounce", block.address, block.length, remote=False, is_urgent=True)
    device.gate.set()
    assert regions.wait(first, TIMEOUT_S)
    assert regions.wait(second, TIMEOUT_S)

    begun = [address for address, _, _ in device.live.values()]
    assert begun[:2] == [engine.address, block.address]
    regions.close()


def test_what_is_ready_is_usable_while_the_rest_waits() -> None:
    """A chunk opens as soon as it is registered, although the next one is stuck."""
    device, ours = Device(), Memory(2)
    regions = Regions(registrar=device, threads_max=1)

    region = regions.add("engine", ours.address, ours.length, remote=False)
    assert device.began.acquire(timeout=TIMEOUT_S)
    assert regions.find(ours.address, 1) == []
    device.gate.set()
    until = time.monotonic() + TIMEOUT_S
    while not (first := regions.find(ours.address, 1)) and time.monotonic() < until:
        time.sleep(0.001)

    assert first
    assert regions.wait(region, TIMEOUT_S)
    assert regions.find(ours.address, ours.length)
    regions.close()


def test_growing_pool_registers_whole_chunks_and_its_end_with_the_last(device: Device) -> None:
    """What is not populated yet is not registered: that would populate it, with a lock held."""
    ours = Memory(3)
    regions = Regions(registrar=device)
    region = regions.add("pool", ours.address, ours.length - 100, remote=True, ready_bytes=0)
    reached = []

    for ready in (CHUNK - 1, CHUNK, 2 * CHUNK + 5, ours.length):
        regions.grow(region, ready)
        assert regions.wait(region, TIMEOUT_S)
        reached.append(region.registered_bytes)

    assert reached == [0, CHUNK, 2 * CHUNK, ours.length - 100]
    assert {access for _, _, access in device.live.values()} == {ACCESS_REMOTE_READ}
    assert regions.find(ours.address, 1) == [], "a peer's key opens nothing for READs of ours"
    regions.close()


def test_pool_that_was_cut_short_is_registered_as_far_as_it_goes(device: Device) -> None:
    """Another process took the rest of the memory: an unfinished chunk is still used."""
    ours = Memory(2)
    regions = Regions(registrar=device)
    region = regions.add("pool", ours.address, ours.length, remote=True, ready_bytes=0)

    regions.grow(region, CHUNK + 100, is_final=True)
    assert regions.wait(region, TIMEOUT_S)

    assert region.registered_bytes == CHUNK + 100
    regions.close()


def test_same_memory_is_registered_once_and_stays_until_its_last_user_left(device: Device) -> None:
    """SGLang names a pool through two interfaces; two registrations would lock it twice."""
    ours = Memory(1)
    regions = Regions(registrar=device)
    first = regions.add("engine", ours.address, ours.length, remote=False)
    second = regions.add("engine", ours.address, ours.length, remote=False)
    assert regions.wait(first, TIMEOUT_S)

    regions.remove(first)
    assert second is first
    assert regions.find(ours.address, 1)
    regions.remove(second)

    assert regions.find(ours.address, 1) == []
    assert device.live == {}
    regions.close()


def test_registered_memory_is_kept_alive_until_it_is_removed(device: Device) -> None:
    """Freed memory mapped again at its address would be missed by the device, silently."""
    ours = Memory(1)
    regions = Regions(registrar=device)
    region = regions.add("engine", ours.address, ours.length, remote=False, owner=ours)
    watched = weakref.ref(ours)
    assert regions.wait(region, TIMEOUT_S)

    del ours
    gc.collect()
    assert watched() is not None
    regions.remove(region)
    gc.collect()

    assert watched() is None
    regions.close()


def test_refusal_is_reported_once_and_what_is_registered_stays(
    events: list[tuple[str, dict[str, Any]]],
) -> None:
    """A limit that is reached half-way costs the other half only, and is not asked again."""
    device, ours = Device(room_bytes=2 * CHUNK), Memory(6)
    device.gate.set()
    regions = Regions(registrar=device, threads_max=1)

    region = regions.add("pool", ours.address, ours.length, remote=True, ready_bytes=4 * CHUNK)
    assert regions.wait(region, TIMEOUT_S)
    regions.grow(region, ours.length, is_final=True)
    assert regions.wait(region, TIMEOUT_S)

    assert region.failure == "no room"
    assert region.registered_bytes == 2 * CHUNK
    assert device.calls == 3
    regions.close()
    assert [(name, facts["level"]) for name, facts in events] == [
        ("rdma.register_failed", "warning")
    ]
    assert events[0][1]["problem"] == "no room"


def test_finished_registration_is_reported_with_its_time(
    device: Device, events: list[tuple[str, dict[str, Any]]]
) -> None:
    """People see that, and when, all of the pool can be read over RDMA."""
    ours = Memory(2)
    regions = Regions(registrar=device)

    region = regions.add("pool", ours.address, ours.length, remote=True)
    assert regions.wait(region, TIMEOUT_S)
    regions.close()

    name, facts = events[-1]
    assert (name, facts["level"], facts["region"]) == ("rdma.memory_registered", "info", "pool")
    assert facts["ready_bytes"] == facts["of_bytes"] == ours.length


def test_close_ends_every_registration_exactly_once(device: Device) -> None:
    """Two ends of one registration crash libibverbs; the device of this test counts them."""
    ours = Memory(4)
    regions = Regions(registrar=device)
    region = regions.add("engine", ours.address, ours.length, remote=False)
    assert regions.wait(region, TIMEOUT_S)

    regions.close()
    regions.close()
    regions.remove(region)

    assert device.live == {}
    assert regions.find(ours.address, 1) == []
    assert regions.add("engine", ours.address, 1, remote=False).registered_bytes == 0
    assert device.calls == 4


def test_close_waits_for_the_chunk_in_progress_and_drops_the_rest() -> None:
    """A registration that ends after its protection domain is gone would be a crash."""
    device, ours = Device(), Memory(4)
    regions = Regions(registrar=device, threads_max=1)
    regions.add("engine", ours.address, ours.length, remote=False)
    assert device.began.acquire(timeout=TIMEOUT_S)
    closing = threading.Thread(target=regions.close)

    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    device.gate.set()
    closing.join(TIMEOUT_S)

    assert not closing.is_alive()
    assert device.calls == 1
    assert device.live == {}


def test_region_removed_while_it_is_registered_leaves_nothing_behind() -> None:
    """The thread that has the chunk in hand ends it itself."""
    device, ours = Device(), Memory(2)
    regions = Regions(registrar=device, threads_max=1)
    region = regions.add("engine", ours.address, ours.length, remote=False)
    assert device.began.acquire(timeout=TIMEOUT_S)

    regions.remove(region)
    device.gate.set()
    assert regions.wait(region, TIMEOUT_S)
    regions.close()

    assert device.live == {}
    assert device.calls == 1


def test_forked_child_neither_ends_nor_makes_registrations(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the parent's descriptor of the device: what it ends is gone for both."""
    ours = Memory(1)
    regions = Regions(registrar=device)
    region = regions.add("engine", ours.address, ours.length, remote=False)
    assert regions.wait(region, TIMEOUT_S)

    with monkeypatch.context() as child:
        parent = os.getpid()
        child.setattr(os, "getpid", lambda: parent + 1)
        regions.remove(region)
        other = regions.add("engine", ours.address + 4096, 4096, remote=False)
        regions.grow(region, ours.length)
        regions.close()

    assert len(device.live) == 1
    assert (device.calls, other.pending) == (1, 0)
    regions.close()


def test_populating_changes_no_byte_and_refuses_read_only_memory(tmp_path: Any) -> None:
    """Memory is populated by writes that change nothing; what cannot be written reports it."""
    anonymous = mmap.mmap(-1, 64 * 2**10)
    anonymous[5:8] = b"abc"
    view = np.frombuffer(anonymous, np.uint8)
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    with path.open("rb") as file:
        read_only = mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ)
    closed = np.frombuffer(read_only, np.uint8)

    populated = populate_range(int(view.ctypes.data) + 100, 50_000)
    refused = populate_range(int(closed.ctypes.data), 8192)

    assert populated
    assert anonymous[5:8] == b"abc"
    assert not refused


@pytest.mark.parametrize(
    ("number", "memlock_bytes", "fix"),
    [
        (errno.ENOMEM, 8 * 2**20, "ulimit -l unlimited"),
        (errno.ENOMEM, 8 * 2**20, "LimitMEMLOCK=infinity"),
        (errno.ENOMEM, 8 * 2**20, "--ulimit memlock=-1"),
        (errno.ENOMEM, -1, "no room"),
        (errno.EFAULT, -1, "read-only"),
        (errno.EPERM, -1, "--device /dev/infiniband"),
        (errno.EINVAL, -1, "Invalid argument"),
        (0, -1, "no reason"),
    ],
)
def test_refusal_names_its_fix(number: int, memlock_bytes: int, fix: str) -> None:
    """A reader of the log need not know what ENOMEM of ibv_reg_mr means."""
    assert fix in explanation(number, 2**30, memlock_bytes=memlock_bytes)
