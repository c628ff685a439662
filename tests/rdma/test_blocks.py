"""Blocks to borrow, while a device takes its time to register them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from peercache.rdma import memory
from peercache.rdma.memory import Block, Blocks, Regions
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, wait_until
from tests.rdma.gated_device import CHUNK, Device

LONG_S = 2 * TIMEOUT_S


def lender(device: Device, **facts: Any) -> tuple[Regions, Blocks]:
    """Return blocks of a device with one thread to register them."""
    regions = Regions(registrar=device, threads_max=1)
    facts = {"blocks_max": 4, "has_fallback": True, "clock": time.monotonic, **facts}
    return regions, Blocks(regions, "bounce", block_bytes=CHUNK, **facts)


def lent_soon(lent: Blocks) -> Block:
    """Ask until the block that is late is there."""
    got: list[Block | None] = []

    def is_lent() -> bool:
        got.append(lent.lend(until()))
        return got[-1] is not None

    wait_until(is_lent)
    block = got[-1]
    assert block is not None
    return block


def until() -> float:
    """A deadline that is not near."""
    return time.monotonic() + LONG_S


def test_no_read_waits_long_for_a_block_behind_a_registration_and_the_next_one_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hundred gigabytes are being registered; reads go over tcp until the block is there."""
    device = Device()
    regions, lent = lender(device)
    started_s = time.monotonic()
    monkeypatch.setattr(memory, "REGISTER_S", 0.01)

    assert lent.lend(until()) is None
    # While that one is late, others do not even wait for a moment, nor ask for more memory.
    monkeypatch.setattr(memory, "REGISTER_S", LONG_S)
    assert [lent.lend(until()) for _ in range(2)] == [None] * 2
    assert_within(time.monotonic() - started_s, PROMPT_S)
    device.gate.set()
    lent_soon(lent)

    assert (device.calls, len(device.live)) == (1, 1)
    regions.close()


def test_who_waits_for_a_block_to_come_back_leaves_when_one_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fifth of five readers must not have to wait for each of the four in turn."""
    device = Device()
    regions, lent = lender(device, blocks_max=1)
    monkeypatch.setattr(memory, "REGISTER_S", 0.05)
    got: list[object] = []
    readers = [threading.Thread(target=lambda: got.append(lent.lend(until()))) for _ in range(3)]

    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(TIMEOUT_S)

    assert got == [None] * 3
    device.gate.set()
    regions.close()
    assert device.calls == 1


@pytest.mark.parametrize(
    ("has_fallback", "left_s", "timeout_s"),
    [(True, 0.2, 0.1), (True, 1.0, 0.25), (False, 0.2, 0.2), (False, 10.0, 10.0)],
)
def test_half_of_the_time_left_is_the_other_fabrics(
    monkeypatch: pytest.MonkeyPatch, *, has_fallback: bool, left_s: float, timeout_s: float
) -> None:
    """Where there is one; otherwise a block that comes late is better than none."""
    device = Device()
    regions, lent = lender(device, has_fallback=has_fallback, clock=lambda: 100.0)
    monkeypatch.setattr(memory, "REGISTER_S", 0.25)
    waited: list[float] = []
    monkeypatch.setattr(regions, "wait", lambda _, timeout_s: bool(waited.append(timeout_s)))

    assert lent.lend(100.0 + left_s) is None

    assert waited[0] == pytest.approx(timeout_s)
    device.gate.set()
    regions.close()


def test_without_another_fabric_a_late_block_lets_reads_wait_for_the_next() -> None:
    """One read's deadline was near; that predicts nothing about the next one's."""
    device = Device()
    regions, lent = lender(device, has_fallback=False)
    assert lent.lend(time.monotonic()) is None
    opening = threading.Timer(0.05, device.gate.set)

    opening.start()
    block = lent.lend(until())

    opening.join()
    assert block is not None
    regions.close()


def test_who_waits_without_another_fabric_takes_the_late_block_when_it_is_there() -> None:
    """All blocks there may be are late: nothing comes back that would wake a waiting read."""
    device = Device()
    regions, lent = lender(device, has_fallback=False, blocks_max=1)
    assert lent.lend(time.monotonic()) is None
    opening = threading.Timer(0.1, device.gate.set)
    started_s = time.monotonic()

    opening.start()
    block = lent.lend(until())

    opening.join()
    assert block is not None
    assert_within(time.monotonic() - started_s, PROMPT_S)
    assert device.calls == 1
    regions.close()


def test_block_for_which_no_thread_was_to_be_had_is_made_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would be late forever, and nothing would be read through it again."""
    device = Device()
    device.gate.set()
    regions, lent = lender(device)
    monkeypatch.setattr(memory, "REGISTER_S", 0.01)

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        assert lent.lend(until()) is None
    block = lent_soon(lent)

    assert device.calls == 1
    assert block.key == 1
    regions.close()


@pytest.mark.parametrize("at", ["mmap", "wait"])
def test_block_whose_making_was_cut_short_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """No memory for a while, or a Ctrl-C, must not mean no block forever."""
    device = Device()
    device.gate.set()
    regions, lent = lender(device, blocks_max=1)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(*((memory.mmap, at) if at == "mmap" else (regions, at)), fails)
        with pytest.raises(KeyboardInterrupt):
            lent.lend(until())
    lent_soon(lent)

    assert device.calls == 1
    regions.close()


def test_block_that_was_refused_is_tried_again() -> None:
    """The limit of locked memory was raised meanwhile, or some was given back."""
    device = Device(room_bytes=0)
    device.gate.set()
    regions, lent = lender(device, blocks_max=1)

    refused = lent.lend(until())
    device.room_bytes = CHUNK

    assert refused is None
    assert lent.lend(until()) is not None
    regions.close()
