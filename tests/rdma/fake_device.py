"""A device that moves real bytes within this process, and has the habits of the real ones.

It obeys what was found out about verbs (test_verbs.py): completions come in order, only the last
of a chain is signaled, an error completes everything behind it as flushed and kills both ends, an
entry of a list is as long as the first, and touching a closed object ends the process.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs

from peercache.config.settings import Config
from peercache.rdma.device import ETHERNET, ROCE_V2, Chosen, Gid, Port
from peercache.rdma.memory import Regions
from peercache.rdma.queue_pair import QpEnd, QpPath, QueuePair, Sizes
from peercache.rdma.rail import Abilities
from peercache.rdma.registrar import Registered
from peercache.rdma.verbs import Verbs
from tests.pace import TIMEOUT_S

SUCCESS, FLUSHED, ACCESS, RETRY = 0, 5, 10, 12
SIGNALED, FENCE = 2, 1


class VerbsError(Exception):
    """What pyverbs raises."""

    error_code = 11


@attrs.define
class World:
    """The network, and what happens on it.

    forgets:  nothing ever happens of so many of the next chains.
    holds:    READs are posted, and nothing of them happens until `go_on`.
    posted:   notified of a queue pair when it is given a chain that it holds.
    before:   called before each READ with its remote address.
    fails:    a status for each READ by its remote address, or 0.
    loses:    whether a READ by its remote address succeeds and brings nothing.
    """

    pairs: dict[int, Pair] = attrs.field(factory=dict)
    memory: dict[int, tuple[int, int]] = attrs.field(factory=dict)
    holds: bool = False
    forgets: int = 0
    posted: Callable[[Pair], None] = attrs.field(default=lambda pair: None)
    before: Callable[[int], None] = attrs.field(default=lambda address: None)
    fails: Callable[[int], int] = attrs.field(default=lambda address: 0)
    loses: Callable[[int], bool] = attrs.field(default=lambda address: False)
    entries_alive: int = 0
    doorbells: int = 0
    newest_pair: int = 100
    reads: list[tuple[int, int, int]] = attrs.field(factory=list)
    """(remote address, bytes, flags) of each READ, as posted."""

    written: list[int] = attrs.field(factory=list)
    """Our own address of each piece that a READ has filled."""

    def open_pairs(self) -> int:
        """Return how many queue pairs are not destroyed."""
        return len(self.pairs)

    def pairs_over(self, rail: str) -> list[Pair]:
        """Return the queue pairs of a rail that are not destroyed."""
        return [pair for pair in self.pairs.values() if pair.rail == rail]


class Closable:
    """An object of pyverbs: to touch it after it was closed is the end."""

    _closed = False

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert not object.__getattribute__(self, "_closed"), f"{name} after close"
        return object.__getattribute__(self, name)

    def close(self) -> None:
        self._closed = True


class CompChannel(Closable):
    def __init__(self, context: Any) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE)
        self.taken = 0

    def get_cq_event(self, queue: Queue) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError as error:
            raise VerbsError from error
        self.taken += 1

    def close(self) -> None:
        os.close(self.fd)
        super().close()


class Queue(Closable):
    def __init__(
        self, context: Any, entries: int, owner: Any = None, channel: Any = None, vector: int = 0
    ) -> None:
        self.room = entries
        self.done: deque[SimpleNamespace] = deque()
        self.channel = channel
        self.is_armed = False
        self.users = 0

    def poll(self, count: int) -> tuple[int, list[Any]]:
        found = [self.done.popleft() for _ in range(min(count, len(self.done)))]
        return len(found), found

    def req_notify(self) -> None:
        self.is_armed = True

    def ack_events(self, count: int) -> None:
        self.channel.taken -= count

    def put(self, number: int, status: int) -> None:
        # An overrun is silent.
        if len(self.done) < self.room:
            self.done.append(SimpleNamespace(wr_id=number, status=status))
        if self.is_armed:
            self.is_armed = False
            os.eventfd_write(self.channel.fd, 1)

    def close(self) -> None:
        assert not self.users, "a queue pair is left"
        assert self.channel is None or not self.channel.taken, "an event was not acknowledged"
        super().close()


class Pair(Closable):
    def __init__(self, world: World, rail: str, wanted: Any, first: Any) -> None:
        self.rail = rail
        self.world, self.queue, self.room = world, wanted.scq, wanted.cap.max_send_wr
        self.pieces_max = wanted.cap.max_send_sge
        world.newest_pair += 1
        self.qp_num = world.newest_pair
        world.pairs[self.qp_num] = self
        self.queue.users += 1
        self.wr_id = self.wr_flags = 0
        self.peer = 0
        self.is_dead = False
        self.waiting: deque[list[Any]] = deque()
        self.unsignaled = 0

    def to_rtr(self, attributes: Any) -> None:
        assert attributes.retry_cnt <= 6, "7 means forever"
        self.peer = attributes.dest_qp_num

    def to_rts(self, attributes: Any) -> None: ...

    def modify(self, attributes: Any, mask: int) -> None:
        self.is_dead = True

    def wr_start(self) -> None:
        self._chain: list[list[Any]] = []

    def wr_rdma_read(self, key: int, address: int) -> None:
        self._chain.append([self.wr_id, self.wr_flags, key, address, []])

    def wr_set_sge(self, entry: Entry) -> None:
        self._chain[-1][4] = [(entry.addr, entry.length, entry.lkey)]

    def wr_set_sge_list(self, count: int, entries: list[Entry]) -> None:
        assert count <= self.pieces_max
        assert len({entry.length for entry in entries[:count]}) == 1, "Soft-RoCE takes the first's"
        self._chain[-1][4] = [(each.addr, each.length, each.lkey) for each in entries[:count]]

    def wr_abort(self) -> None:
        self._chain = []

    def wr_complete(self) -> None:
        assert len(self.waiting) + len(self._chain) <= self.room, "the send queue is full"
        self.world.doorbells += 1
        self.world.reads += [
            (address, sum(size for _, size, _ in pieces), flags)
            for _, flags, _, address, pieces in self._chain
        ]
        if self.world.forgets:
            self.world.forgets -= 1
            return
        self.waiting.extend(self._chain)
        if not self.world.holds:
            self.go_on()
        else:
            self.world.posted(self)

    def go_on(self, chains: int | None = None) -> None:
        """Do what was posted, or so many chains of it."""
        while self.waiting and chains != 0:
            number, flags, key, address, pieces = self.waiting.popleft()
            status = FLUSHED if self.is_dead else self._read(key, address, pieces)
            if status not in (SUCCESS, FLUSHED):
                self.is_dead = True
                if self.peer in self.world.pairs:
                    self.world.pairs[self.peer].is_dead = True
            if status or flags & SIGNALED:
                self.queue.put(number, status)
                chains = None if chains is None else chains - 1

    def _read(self, key: int, address: int, pieces: list[tuple[int, int, int]]) -> int:
        world = self.world
        world.before(address)
        other = world.pairs.get(self.peer)
        if other is None or other.is_dead:
            return RETRY
        if status := world.fails(address):
            return status
        length = sum(size for _, size, _ in pieces)
        begin, end = world.memory.get(key, (0, 0))
        if not begin <= address <= address + length <= end:
            return ACCESS
        for ours, size, local_key in [] if world.loses(address) else pieces:
            low, high = world.memory[local_key]
            assert low <= ours <= ours + size <= high, "outside of what its key opens"
            ctypes.memmove(ours, address, size)
            world.written.append(ours)
            address += size
        return SUCCESS

    def close(self) -> None:
        del self.world.pairs[self.qp_num]
        self.queue.users -= 1
        super().close()


class Entry:
    """A scatter entry: memory of C that is freed once."""

    def __init__(self, world: World, address: int, length: int, key: int) -> None:
        self._world, self.addr, self.length, self.lkey = world, address, length, key
        self._closed = False
        world.entries_alive += 1

    def close(self) -> None:
        assert not self._closed, "freed twice"
        self._closed = True
        self._world.entries_alive -= 1


class FakeRegistrar:
    """Gives out keys of a world, while its gate is open."""

    chunk_bytes = 64 * 2**20

    def __init__(self, world: World) -> None:
        self._world = world
        self.gate = threading.Event()
        self.gate.set()

    def register(self, address: int, length: int, access: int) -> Registered:
        assert self.gate.wait(TIMEOUT_S)
        key = len(self._world.memory) + 1
        self._world.memory[key] = (address, address + length)
        return Registered(lkey=key, rkey=key, handle=key)

    def deregister(self, piece: Registered) -> str:
        self._world.memory[piece.lkey] = (0, 0)
        return ""


class FakeRail:
    """A rail of that device: what `Rail` is to its users."""

    def __init__(self, world: World, name: str = "fake0", *, work: int = 4096) -> None:
        self.verbs = fake_verbs(world, name)
        gid = Gid(0, bytes(10) + b"\xff\xff\x0a\0\0\1", ROCE_V2)
        self.chosen = Chosen(Port(name, 1, "ACTIVE", ETHERNET, "CA", 0, 100.0, (gid,)), gid)
        self.name, self.link_layer = name, ETHERNET
        self.context = None
        self.abilities = Abilities(work=work, pieces=30, reads_started=16, reads_served=8, mtu=5)
        self.reads_started = 16
        self.registrar = FakeRegistrar(world)
        self.regions = Regions(device=name, registrar=self.registrar)
        self.link_is_up = True
        self.finds_others = True
        self.is_closed = False
        self.gives_up_s = TIMEOUT_S

    def is_ours(self) -> bool:
        return True

    def is_up(self) -> bool:
        return self.link_is_up

    def finds(self, gid: bytes, until: float) -> bool:
        assert len(gid) == 16
        return self.finds_others

    def queue_pair(self, cq: Any, sizes: Sizes) -> QueuePair:
        return QueuePair(self.verbs, context=None, pd=None, cq=cq, port=1, sizes=sizes)

    def end(self, pair: QueuePair, psn: int) -> QpEnd:
        return QpEnd(pair.number, psn, 0, self.chosen.gid.raw)

    def path(self, *, mtu: int, reads_at_once: int) -> QpPath:
        return QpPath(
            port=1, gid_index=0, is_global=True, mtu=mtu, reads_at_once=reads_at_once,
            config=Config(),
        )  # fmt: skip

    def reads_served(self, wanted: int) -> int:
        return min(wanted, self.abilities.reads_served)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.regions.close()


class _Enums:
    IBV_SEND_SIGNALED, IBV_SEND_FENCE = SIGNALED, FENCE

    def __getattr__(self, name: str) -> int:
        return 0


def fake_verbs(world: World, rail: str = "") -> Verbs:
    """Return the names of pyverbs, over a world."""

    def plain(*unused: Any, **attributes: Any) -> SimpleNamespace:
        return SimpleNamespace(**attributes)

    return Verbs(
        enums=_Enums(), Context=plain, PD=plain, CompChannel=CompChannel, CQ=Queue,
        QPEx=lambda context, wanted, first: Pair(world, rail, wanted, first),
        QPCap=plain, QPInitAttrEx=plain, QPAttr=plain, AHAttr=plain, GlobalRoute=plain,
        GID=plain, SGE=lambda *facts: Entry(world, *facts), Error=VerbsError, device_list=list,
    )  # fmt: skip


def rng() -> random.Random:
    """Return numbers that are the same each time."""
    return random.Random(1)
