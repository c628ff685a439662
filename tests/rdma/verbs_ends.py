"""Two connected ends in one process, with nothing between the test and pyverbs.

The facts that the fabric relies on are tested here without the fabric, so that a release of
rdma-core which changes one of them is notified from a fault of our own. Import it in the guest
only.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
from pyverbs.wr import SGE, SendWR

try:  # The older generation has its constants elsewhere.
    import pyverbs.libibverbs_enums as e
except ImportError:
    import pyverbs.enums as e

PORT = 1
READS_OUTSTANDING = 16
SEND_DEPTH = 256
# Work completion statuses, by value: one generation answers plain numbers.
SUCCESS, LOCAL_PROTECTION, FLUSHED, REMOTE_ACCESS, RETRIES_EXCEEDED = 0, 4, 5, 10, 12


def gid_index(device: str, prefix: str) -> int:
    """The first RoCE v2 entry of the device's GID table that starts like that."""
    port = Path("/sys/class/infiniband", device, "ports", str(PORT))
    for index in range(32):
        try:
            kind = (port / "gid_attrs" / "types" / str(index)).read_text().strip()
        except OSError:  # That is how an empty entry reads.
            continue
        if kind == "RoCE v2" and (port / "gids" / str(index)).read_text().startswith(prefix):
            return index
    raise AssertionError(f"{device} has no RoCE v2 GID {prefix}…")


def event_descriptors() -> set[int]:
    """The process's open descriptors of verbs' events."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            kind = str(entry.readlink())
        except FileNotFoundError:  # The listing's own.
            continue
        if kind == "anon_inode:[infinibandevent]":
            found.add(int(entry.name))
    return found


IPV4 = "0000:0000:0000:0000:0000:ffff:"
IPV6 = "fd09:"


class End:
    """One device opened, one registered buffer, at most one queue pair at a time."""

    def __init__(self, device: str, size_bytes: int, *, gid_prefix: str = IPV4) -> None:
        self.device = device
        self.context = Context(name=device)
        self.pd = PD(self.context)
        known = event_descriptors()
        self.channel = CompChannel(self.context)
        # The older generation does not report it.
        self.descriptor = getattr(self.channel, "fd", None) or (event_descriptors() - known).pop()
        self.cq = CQ(self.context, 2 * SEND_DEPTH, None, self.channel, 0)
        self.bytes = np.frombuffer(mmap.mmap(-1, size_bytes), dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.mr = self.register()
        self.gid_index = gid_index(device, gid_prefix)
        self.psn = 0x123456
        self.qp: Any = None

    def register(self) -> Any:
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ
        return MR(self.pd, len(self.bytes), access, address=self.address)

    def open_queue_pair(self, *, sge_count: int = 4) -> None:
        capacity = QPCap(
            max_send_wr=SEND_DEPTH, max_recv_wr=1, max_send_sge=sge_count, max_recv_sge=1
        )
        init = QPInitAttrEx(
            qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity, pd=self.pd, sq_sig_all=0,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            send_ops_flags=e.IBV_QP_EX_WITH_RDMA_READ,
        )  # fmt: skip
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = e.IBV_ACCESS_REMOTE_READ
        attributes.pkey_index = 0
        self.qp = QPEx(self.context, init, attributes)

    def ready_to_send_to(self, peer: End, *, timeout: int, retry_count: int) -> None:
        # The two ends' gid_index may differ: each names its own entry, and the other's GID.
        gid = str(peer.context.query_gid(PORT, peer.gid_index)).split()[-1]
        route = GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64)
        attributes = QPAttr(port_num=PORT, path_mtu=e.IBV_MTU_4096)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        attributes.dest_qp_num = peer.qp.qp_num
        attributes.rq_psn, attributes.sq_psn = peer.psn, self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = READS_OUTSTANDING
        attributes.min_rnr_timer, attributes.rnr_retry = 12, 7
        attributes.timeout, attributes.retry_cnt = timeout, retry_count
        self.qp.to_rts(attributes)

    def read(
        self,
        number: int,
        destinations: Sequence[tuple[int, int]],
        source: tuple[int, int],
        flags: int = e.IBV_SEND_SIGNALED,
    ) -> None:
        """Add one READ to the batch: own (offset, length) pairs, the peer's (rkey, address)."""
        pieces = [SGE(self.address + at, length, self.mr.lkey) for at, length in destinations]
        self.qp.wr_id, self.qp.wr_flags = number, flags
        self.qp.wr_rdma_read(*source)
        if len(pieces) == 1:
            self.qp.wr_set_sge(pieces[0])
        else:
            self.qp.wr_set_sge_list(len(pieces), pieces)
        for piece in pieces:
            piece.close()  # Or its 52 bytes leak.

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One doorbell for all the READs of the block."""
        self.qp.wr_start()
        yield
        self.qp.wr_complete()

    def read_now(self, number: int, at: int, length: int, source: tuple[int, int]) -> None:
        with self.batch():
            self.read(number, [(at, length)], source)

    def wait(self, count: int, *, within_s: float = 60.0) -> list[tuple[int, int]]:
        """(number, status) of the next completions; fewer where time runs out."""
        ends_s = time.monotonic() + within_s
        found: list[tuple[int, int]] = []
        while len(found) < count and time.monotonic() < ends_s:
            _, completions = self.cq.poll(min(16, count - len(found)))
            found += [(int(one.wr_id), int(one.status)) for one in completions]
            if not completions:
                time.sleep(0)
        return found

    def state(self) -> int:
        """Asked of the device: the object's own field is what it was last set to."""
        attributes, _ = self.qp.query(e.IBV_QP_STATE)
        return int(attributes.qp_state)

    def close(self) -> None:
        self.context.close()


class Cable:
    """A reader and an owner, each with its own device, and a queue pair between them."""

    def __init__(
        self, reader: str, owner: str, *, size_bytes: int = 4 << 20, gid_prefix: str = IPV4
    ) -> None:
        self.reader = End(reader, size_bytes, gid_prefix=gid_prefix)
        self.owner = End(owner, size_bytes, gid_prefix=gid_prefix)
        self.owner.bytes[:] = np.random.default_rng(7).integers(0, 256, size_bytes, dtype=np.uint8)

    def connect(self, *, timeout: int = 14, retry_count: int = 6) -> None:
        """New queue pairs at both ends; earlier ones are destroyed."""
        for end in (self.reader, self.owner):
            if end.qp is not None:
                end.qp.close()
            end.open_queue_pair()
        self.reader.ready_to_send_to(self.owner, timeout=timeout, retry_count=retry_count)
        self.owner.ready_to_send_to(self.reader, timeout=timeout, retry_count=retry_count)

    def source(self, at: int = 0) -> tuple[int, int]:
        return self.owner.mr.rkey, self.owner.address + at

    def close(self) -> None:
        self.reader.close()
        self.owner.close()


def bare_loop(cable: Cable, *, page_bytes: int, count: int) -> None:
    """Read `count` pages the way that a first program would, and check nothing but success."""
    reader, (rkey, address) = cable.reader, cable.source()
    posted = done = 0
    while done < count:
        while posted < count and posted - done < READS_OUTSTANDING:
            at = posted * page_bytes
            piece = SGE(reader.address + at, page_bytes, reader.mr.lkey)
            request = SendWR(
                wr_id=posted, opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[piece],
                send_flags=e.IBV_SEND_SIGNALED,
            )  # fmt: skip
            request.set_wr_rdma(rkey, address + at)
            reader.qp.post_send(request)
            request.close()
            piece.close()
            posted += 1
        number, completions = reader.cq.poll(READS_OUTSTANDING)
        assert all(one.status == SUCCESS for one in completions)
        done += number
