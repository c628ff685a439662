"""An RDMA device that completes at once and only moves generation words, to measure our own time.

It has the names of pyverbs that the fabric uses, so that the fabric runs unchanged over it, on a
machine without RDMA too.
"""

from __future__ import annotations

import ctypes
import os
import random
from types import SimpleNamespace
from typing import Any, final

import attrs
import numpy as np

from peercache.config.settings import Config
from peercache.model.seal import Seals
from peercache.observability.metrics import Metrics
from peercache.rdma.device import ETHERNET, ROCE_V2, Chosen, Gid, Port
from peercache.rdma.fabric import RdmaFabric
from peercache.rdma.memory import Regions
from peercache.rdma.queue_pair import QpEnd, QpPath, QueuePair, Sizes
from peercache.rdma.rail import Abilities
from peercache.rdma.registrar import DIRECT_CHUNK_BYTES, Registered
from peercache.rdma.verbs import Verbs
from peercache.wire.messages.declared import Message
from peercache.wire.messages.session import ChannelOpened, OpenChannel

READS_AT_ONCE = 16
SEALS_ADDRESS = 2**50
"""Address of a peer's words; its pages are below."""

_PORT = Port(
    "instant", 1, "ACTIVE", ETHERNET, "CA", 0, 100.0, (Gid(0, bytes(10) + b"\xff" * 6, ROCE_V2),)
)


def instant_fabric(*, page_bytes: int, granule: int, seals: Seals) -> RdmaFabric:
    """Return a fabric on which every peer publishes `page_bytes` of pages, and answers at once.

    seals: of every granule.
    """
    words_bytes = seals.nbytes
    rail: Any = InstantRail(seals)

    def exchange(peer: int, message: Message, until: float) -> Message | None:
        assert isinstance(message, OpenChannel)
        regions = np.array([(0, page_bytes, 7), (SEALS_ADDRESS, words_bytes, 8)], "<u8")
        return ChannelOpened(
            request=message.request, channel=message.channel, qp_num=1, psn=0, lid=0,
            gid=message.gid, mtu=5, reads_at_once=READS_AT_ONCE, pages_address=0,
            page_bytes=page_bytes, seals_address=SEALS_ADDRESS, granule=granule,
            regions=regions.tobytes(),
        )  # fmt: skip

    return RdmaFabric(
        rails=(rail,), exchange=exchange, max_channels_per_peer=1,
        rng=random.Random(1), metrics=Metrics(),  # noqa: S311 - a number of a packet
    )  # fmt: skip


@final
class InstantRail:
    """A rail without a device."""

    def __init__(self, seals: Seals) -> None:
        """Open nothing; a READ of words returns these seals."""
        self.verbs = _verbs(seals)
        self.chosen = Chosen(_PORT, _PORT.gids[0])
        self.name = _PORT.name
        self.context = None
        self.link_layer = ETHERNET
        self.abilities = Abilities(
            work=32768, pieces=32, reads_started=READS_AT_ONCE,
            reads_served=READS_AT_ONCE, mtu=5,
        )  # fmt: skip
        self.reads_started = READS_AT_ONCE
        self.regions = Regions(device=self.name, registrar=_Registrar())

    def is_ours(self) -> bool:
        """Return True: there is nothing to protect."""
        return True

    def is_up(self) -> bool:
        """Return True."""
        return True

    def finds(self, gid: bytes, until: float) -> bool:
        """Return True."""
        return True

    def queue_pair(self, cq: Any, sizes: Sizes) -> QueuePair:
        """Return a queue pair that completes what it is given."""
        return QueuePair(self.verbs, context=None, pd=None, cq=cq, port=1, sizes=sizes)

    def end(self, pair: QueuePair, psn: int) -> QpEnd:
        """Return an end."""
        return QpEnd(pair.number, psn, 0, self.chosen.gid.raw)

    def path(self, *, mtu: int, reads_at_once: int) -> QpPath:
        """Return a way."""
        return QpPath(
            port=1, gid_index=0, is_global=True, mtu=mtu, reads_at_once=reads_at_once,
            config=Config(),
        )  # fmt: skip

    def close(self) -> None:
        """End the registrations."""
        self.regions.close()


class _Registrar:
    """Registers without locking anything."""

    chunk_bytes = DIRECT_CHUNK_BYTES

    def register(self, address: int, length: int, access: int) -> Registered:
        """Return some keys."""
        return Registered(lkey=5, rkey=6, handle=None)

    def deregister(self, piece: Registered) -> str:
        """Return that it ended."""
        return ""


class _Queue:
    """A completion queue."""

    def __init__(self, context: Any, entries: int, *unused: Any) -> None:
        self.done: list[Any] = []

    def poll(self, count: int) -> tuple[int, list[Any]]:
        done, self.done = self.done, []
        return len(done), done

    def req_notify(self) -> None:
        """Do nothing: what is posted is complete before a caller waits."""

    def close(self) -> None:
        """Close nothing."""


class _Channel:
    """A completion channel with a descriptor that never becomes readable."""

    def __init__(self, context: Any) -> None:
        self.fd = os.eventfd(0)

    def close(self) -> None:
        os.close(self.fd)


class _Pair:
    """An extended queue pair. seals: what a READ at SEALS_ADDRESS brings."""

    seals: Seals

    def __init__(self, context: Any, wanted: Any, first: Any) -> None:
        self.qp_num = 1
        self.wr_id = 0
        self.wr_flags = 0
        self._queue = wanted.scq
        self._remote = 0

    def wr_start(self) -> None: ...

    def wr_rdma_read(self, key: int, address: int) -> None:
        self._remote = address

    def wr_set_sge(self, entry: Any) -> None:
        if self._remote >= SEALS_ADDRESS:
            source = self.seals.ctypes.data + self._remote - SEALS_ADDRESS
            ctypes.memmove(entry.addr, source, entry.length)

    def wr_set_sge_list(self, count: int, entries: Any) -> None: ...

    def wr_complete(self) -> None:
        self._queue.done.append(SimpleNamespace(wr_id=self.wr_id, status=0))

    def to_rtr(self, attributes: Any) -> None: ...

    def to_rts(self, attributes: Any) -> None: ...

    def close(self) -> None: ...


@attrs.define
class _Entry:
    addr: int
    length: int
    lkey: int

    def close(self) -> None: ...


class _Enums:
    """The constants of verbs, all of which are 1 here."""

    def __getattr__(self, name: str) -> int:
        return 1


def _verbs(brought: Seals) -> Verbs:
    class Pair(_Pair):
        seals = brought

    def plain(*unused: Any, **attributes: Any) -> SimpleNamespace:
        return SimpleNamespace(**attributes)

    return Verbs(
        enums=_Enums(), Context=plain, PD=plain, CompChannel=_Channel, CQ=_Queue, QPEx=Pair,
        QPCap=plain, QPInitAttrEx=plain, QPAttr=plain, AHAttr=plain, GlobalRoute=plain, GID=plain,
        SGE=_Entry, Error=RuntimeError, device_list=list,
    )  # fmt: skip
