"""What the fabric relies on, asked of pyverbs and the kernel themselves.

A release of rdma-core, or a kernel, that changes one of these facts fails here and not in some
test of the fabric. They run with both generations of pyverbs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from tests.pace import ends_within
from tests.rdma import links

if TYPE_CHECKING:
    from tests.rdma.verbs_ends import Cable

pytestmark = pytest.mark.rdma

DEVICES = ("rxe0", "rxe1", "rxe2", "rxe3", "rxe4")
STATE_RTS, STATE_ERROR = 3, 6
PAGE_BYTES = 1 << 20
MakeCable = Callable[..., "Cable"]


@pytest.fixture
def make_cable() -> Iterator[MakeCable]:
    """Cables between two devices, rxe1 and rxe2 where nothing is said; all closed at the end."""
    from tests.rdma.verbs_ends import Cable

    made: list[Cable] = []

    def make(reader: str = "rxe1", owner: str = "rxe2", **options: object) -> Cable:
        made.append(Cable(reader, owner, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for cable in made:
        cable.close()


@pytest.fixture
def cable(make_cable: MakeCable) -> Cable:
    """A connected cable from rxe1 to rxe2."""
    made = make_cable()
    made.connect()
    return made


def packets_received(interface: str) -> int:
    counters = Path("/sys/class/net", interface, "statistics/rx_packets")
    return int(counters.read_text())


def test_the_guest_has_its_devices() -> None:
    """Five devices, their ports active."""
    from pyverbs.device import get_device_list

    names = [device.name.decode() for device in get_device_list()]

    ports = [Path("/sys/class/infiniband", name, "ports/1/state").read_text() for name in names]
    assert sorted(names) == list(DEVICES)
    assert all("ACTIVE" in port for port in ports)


@pytest.mark.parametrize("prefix", ["0000:0000:0000:0000:0000:ffff:", "fd09:"])
def test_one_read_is_bit_exact_and_crosses_the_cable(make_cable: MakeCable, prefix: str) -> None:
    """A megabyte, by IPv4 and by IPv6, in packets that the peer's interface counts."""
    cable = make_cable(gid_prefix=prefix)
    cable.connect()
    before = packets_received("rd1")

    cable.reader.read_now(1, 0, PAGE_BYTES, cable.source(3 * PAGE_BYTES))
    done = cable.reader.wait(1)

    assert done == [(1, 0)]
    assert np.array_equal(cable.reader.bytes[:PAGE_BYTES], cable.owner.bytes[3 * PAGE_BYTES :])
    # A path MTU of 4096 makes 256 packets of a megabyte.
    assert packets_received("rd1") - before >= 256


def test_one_read_fills_several_places_of_one_size(cable: Cable) -> None:
    """The scattered destination of a page: one READ, four SGEs."""
    places = [(0, 8192), (100_000, 8192), (200_001, 8192), (300_000, 8192)]

    with cable.reader.batch():
        cable.reader.read(1, places, cable.source(5))
    done = cable.reader.wait(1)

    got = b"".join(cable.reader.bytes[at : at + length].tobytes() for at, length in places)
    assert done == [(1, 0)]
    assert got == cable.owner.bytes[5 : 5 + len(got)].tobytes()


def test_soft_roce_counts_a_list_of_places_by_the_first(cable: Cable) -> None:
    """Its `wr_set_sge_list` takes every entry for as long as the first, and reports success.

    rdma-core 44 and 59 have it (providers/rxe/rxe.c adds up `sg_list->length` without going on to
    the next). Places of several sizes need READs of their own there. Remove when this fails.
    """
    with cable.reader.batch():
        cable.reader.read(1, [(0, 4096), (100_000, 8192)], cable.source())
    done = cable.reader.wait(1)

    assert done == [(1, 0)]
    assert np.array_equal(cable.reader.bytes[:4096], cable.owner.bytes[:4096])
    filled = cable.reader.bytes[100_000 : 100_000 + 8192]
    assert np.array_equal(filled[:4096], cable.owner.bytes[4096:8192])
    assert not np.any(filled[4096:]), "Soft-RoCE's fault is gone: lists may be of any sizes"


def test_one_completion_behind_a_fence_covers_the_whole_batch(cable: Cable) -> None:
    """One doorbell, 64 unsignalled READs, then a fenced word: when it is there, they all are."""
    from tests.rdma.verbs_ends import e

    count, length = 64, 32768
    word_at = count * length

    with cable.reader.batch():
        for number in range(count):
            at = number * length
            cable.reader.read(number, [(at, length)], cable.source(at), 0)
        fenced = e.IBV_SEND_SIGNALED | e.IBV_SEND_FENCE
        cable.reader.read(count, [(word_at, 8)], cable.source(word_at), fenced)
    done = cable.reader.wait(1)

    assert done == [(count, 0)]
    assert cable.reader.wait(1, within_s=0.1) == []
    assert np.array_equal(cable.reader.bytes[: word_at + 8], cable.owner.bytes[: word_at + 8])


def test_a_fenced_word_is_no_older_than_the_bytes_before_it(cable: Cable) -> None:
    """An owner raises all bytes of a page and then its word, over and over.

    A page read before its word may hold newer bytes than the word states, never older ones: that
    the word has not changed would otherwise say nothing about the bytes.
    """
    from tests.rdma.verbs_ends import e

    length, word_at, stopped = 65536, 1 << 20, threading.Event()
    page = cable.owner.bytes[:length].view(np.uint64)
    word = cable.owner.bytes[word_at : word_at + 8].view(np.uint64)
    page[:] = word[:] = 0

    def rewrite() -> None:
        for number in range(1, 1 << 30):
            if stopped.is_set():
                return
            # In this order: a word seen before the bytes would run ahead of them by more than 1.
            word[0] = number
            page[:] = number

    writer = threading.Thread(target=rewrite)
    writer.start()
    ahead: list[int] = []
    try:
        for number in range(200):
            with cable.reader.batch():
                cable.reader.read(number, [(0, length)], cable.source(), 0)
                fenced = e.IBV_SEND_SIGNALED | e.IBV_SEND_FENCE
                cable.reader.read(number, [(word_at, 8)], cable.source(word_at), fenced)
            assert cable.reader.wait(1) == [(number, 0)]
            got = cable.reader.bytes[:length].view(np.uint64)
            seen = int(cable.reader.bytes[word_at : word_at + 8].view(np.uint64)[0])
            ahead.append(int(got.max()) - seen)
    finally:
        stopped.set()
        writer.join()

    assert max(ahead) <= 0
    assert int(word[0]) > 1


@pytest.mark.parametrize("fault", ["bad rkey", "out of range", "deregistered"])
def test_a_refused_read_is_a_completion_and_kills_both_ends(cable: Cable, fault: str) -> None:
    """Remote access error; what was posted behind it is flushed; later posts are flushed too."""
    rkey, address = cable.source()
    match fault:
        case "bad rkey":
            rkey ^= 0x5500
        case "out of range":
            address += len(cable.owner.bytes) - 4096
        case "deregistered":
            cable.owner.mr.close()

    with cable.reader.batch():
        cable.reader.read(1, [(0, 8192)], (rkey, address))
        cable.reader.read(2, [(0, 8)], cable.source() if fault != "deregistered" else (0, 0))
    done = cable.reader.wait(2)
    stale = int(cable.reader.qp.qp_state)
    cable.reader.read_now(3, 0, 8, (rkey, address))

    assert done == [(1, 10), (2, 5)]
    assert cable.reader.wait(1) == [(3, 5)]
    assert stale == STATE_RTS, "the object's own state has become true: querying may be spared"
    assert cable.reader.state() == STATE_ERROR
    assert cable.owner.state() == STATE_ERROR


def test_a_local_region_that_is_closed_is_a_completion(cable: Cable) -> None:
    """A destination whose lkey is gone: local protection error, nothing written."""
    before = bytes(cable.reader.bytes[:4096])
    number = cable.reader.mr.lkey
    cable.reader.mr.close()
    assert number

    from tests.rdma.verbs_ends import SGE

    piece = SGE(cable.reader.address, 4096, number)
    with cable.reader.batch():
        cable.reader.qp.wr_id, cable.reader.qp.wr_flags = 1, 2
        cable.reader.qp.wr_rdma_read(*cable.source())
        cable.reader.qp.wr_set_sge(piece)
    piece.close()

    assert cable.reader.wait(1) == [(1, 4)]
    assert bytes(cable.reader.bytes[:4096]) == before


def test_seven_retries_mean_forever(cable: Cable) -> None:
    """The default of many examples: no completion in eight times what six retries take."""
    cable.connect(timeout=10, retry_count=7)  # 4 ms

    with links.impaired("rd2", loss_percent=100):
        cable.reader.read_now(1, 0, 4096, cable.source())
        endless = cable.reader.wait(1, within_s=1.0)
        cable.connect(timeout=10, retry_count=6)
        cable.reader.read_now(2, 0, 4096, cable.source())
        bounded = cable.reader.wait(1, within_s=60)

    assert endless == []
    assert bounded == [(2, 12)]


@pytest.mark.parametrize("end", ["error state", "destroyed"])
def test_after_its_end_a_queue_pair_writes_nothing(cable: Cable, end: str) -> None:
    """Answers are under way on a slow cable when the pair is in error and drained, or destroyed."""
    from tests.rdma.verbs_ends import QPAttr, e

    count, length = 16, 65536
    with links.impaired("rd2", delay_ms=100):
        with cable.reader.batch():
            for number in range(count):
                at = number * length
                cable.reader.read(number, [(at, length)], cable.source(at))
        if end == "destroyed":
            cable.reader.qp.close()
            done = []
        else:
            cable.reader.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)
            done = cable.reader.wait(count, within_s=60)
        cable.reader.bytes[:] = 0x55
        # Longer than the answers are under way: what could still come has come.
        late = cable.reader.wait(1, within_s=0.5)

    assert [status for _, status in done] == ([] if end == "destroyed" else [5] * count)
    assert late == []
    assert np.all(cable.reader.bytes == 0x55)


def test_a_full_completion_queue_loses_completions_without_a_word(make_cable: MakeCable) -> None:
    """Why a completion queue has room for everything that can be posted: nothing would show it."""
    from tests.rdma.verbs_ends import CQ

    cable = make_cable()
    cable.reader.cq = CQ(cable.reader.context, 8, None, None, 0)
    cable.connect()
    room = int(cable.reader.cq.cqe)

    for number in range(room + 49):
        cable.reader.read_now(number, 0, 8, cable.source())
    cable.reader.read_now(room + 49, 64, 8, cable.source())
    # The wire keeps the order: when the last READ's bytes are there, all have completed.
    ends_s = time.monotonic() + 60
    while not np.any(cable.reader.bytes[64:72]) and time.monotonic() < ends_s:
        time.sleep(0)
    done = cable.reader.wait(room + 50, within_s=3.0)

    assert 8 <= room < 100
    assert len(done) == room
    assert all(status == 0 for _, status in done)


async def test_a_channel_wakes_a_trio_task_and_never_blocks(cable: Cable) -> None:
    """The channel's descriptor is waited for by trio; an empty channel raises EAGAIN at once."""
    from pyverbs.pyverbs_error import PyverbsRDMAError

    reader = cable.reader
    os.set_blocking(reader.descriptor, False)
    reader.cq.req_notify()
    with pytest.raises(PyverbsRDMAError) as empty:
        reader.channel.get_cq_event(reader.cq)

    reader.read_now(1, 0, PAGE_BYTES, cable.source())
    with ends_within():
        await trio.lowlevel.wait_readable(reader.descriptor)
    reader.channel.get_cq_event(reader.cq)
    reader.cq.ack_events(1)

    assert empty.value.error_code == 11
    assert reader.wait(1) == [(1, 0)]


def test_importing_pyverbs_takes_over_the_root_logger() -> None:
    """Why it is undone after the import: the engine's own logging is not ours to set up."""
    program = "import logging, pyverbs.device; print(len(logging.getLogger().handlers))"

    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, text=True, capture_output=True
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "1"


def test_a_cable_plugged_in_again_keeps_its_addresses(make_cable: MakeCable) -> None:
    """The GID that a device was chosen by has its index still after the port was down."""
    from tests.rdma.verbs_ends import IPV4, IPV6, gid_index

    before = [gid_index("rxe1", prefix) for prefix in (IPV4, IPV6)]

    with links.pulled("rd1"):
        pass

    assert [gid_index("rxe1", prefix) for prefix in (IPV4, IPV6)] == before
