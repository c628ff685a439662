"""The network: connections over directed links that lose, repeat, reorder, delay and cut messages.

It carries bytes only: senders encode with the real codec, so wire bugs show and no two processes
share an object. A connection ends when one of its ends does, or when a fault breaks it; messages in
flight are then lost, or delivered to the successor at the same address, like in nng.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

import attrs
import trio

from peercache.net.peers import Peer, Transport
from sims.places import Place
from sims.swarm import Options
from sims.trace import Trace

IN_FLIGHT_MAX = 2048
"""Messages in flight on one connection and direction; beyond that a sender loses the newest."""

HEALED_WITHIN_S = 0.5
"""When the faults stop, delayed messages arrive within this time."""

LOCAL_LATENCY_FRACTION = 0.1
"""The fraction of the latency between two processes of one host."""


@attrs.define(eq=False)
class Way:
    """One direction between two hosts."""

    clogged_until: float = -math.inf
    cut_until: float = -math.inf


@attrs.define(eq=False)
class Pipe:
    """A connection: the dialler, the listener, and the callbacks of both ends."""

    number: int
    dialler: Place
    listener: SimListener
    address: str
    on_receive: Callable[[bytes], None]
    on_broken: Callable[[], None]
    is_open: bool = True
    last_at: list[float] = attrs.field(factory=lambda: [0.0, 0.0])
    in_flight: list[int] = attrs.field(factory=lambda: [0, 0])


TO_LISTENER, TO_DIALLER = 0, 1

HOME = "home/"
"""Prefix of the addresses that only processes of the node's own host dial."""

LOCAL_PEER = Peer(Transport.IPC, uid=0)
REMOTE_PEER = Peer(Transport.TCP, local=("192.0.2.1", 1), remote=("192.0.2.2", 2))
"""Every user of a run is root, and every tcp connection comes from another host."""


class SimListener:
    """A node's listener: the part of `net.sockets.Listener` that the switchboard uses."""

    def __init__(
        self, network: Network, place: Place, address: str, on_removed: Callable[[int], None]
    ) -> None:
        """Listen; `network.listen` makes these."""
        self.place = place
        self.address = address
        self.on_removed = on_removed
        self.pipes: dict[int, Pipe] = {}
        self.is_closed = False
        self._network = network
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._wake = trio.Event()

    async def receive(self) -> tuple[int, bytes]:
        """Return the next message and the number of its pipe."""
        while not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._waiting.popleft()

    def receive_now(self) -> tuple[int, bytes] | None:
        """Return a message that has arrived already, or None."""
        return self._waiting.popleft() if self._waiting else None

    def is_open(self, pipe: int) -> bool:
        """Return whether a connection is still open."""
        return pipe in self.pipes

    def peer(self, pipe: int) -> Peer | None:
        """Return the peer of a connection, as a kernel would report it; None once it ended."""
        found = self.pipes.get(pipe)
        if found is None:
            return None
        return LOCAL_PEER if found.address.startswith(HOME) else REMOTE_PEER

    def reply(self, pipe: int, raw: bytes) -> bool:
        """Send on a pipe; False if it is gone."""
        found = self.pipes.get(pipe)
        if found is None:
            return False
        self._network.send(found, TO_DIALLER, raw)
        return True

    def arrived(self, pipe: int, raw: bytes) -> None:
        """Queue a message from the network."""
        self._waiting.append((pipe, raw))
        self._wake.set()

    def removed(self, pipe: int) -> None:
        """Handle the end of a connection."""
        if self.pipes.pop(pipe, None) is not None and not self.is_closed:
            self.on_removed(pipe)


class Network:
    """All links of a run."""

    def __init__(self, *, options: Options, rng: random.Random, trace: Trace) -> None:
        """Carry messages according to `options`."""
        self._options = options
        self._rng = rng
        self._trace = trace
        self._ways: dict[tuple[str, str], Way] = {}
        self._listeners: dict[str, SimListener] = {}
        self._pipes: dict[int, Pipe] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count(1)
        self._wake = trio.Event()
        self.delivered_count = 0
        self.faults_on = True

    # --- ends -------------------------------------------------------------------------------------

    def listen(
        self, place: Place, addresses: tuple[str, ...], on_removed: Callable[[int], None]
    ) -> SimListener:
        """Listen at some addresses as one."""
        listener = SimListener(self, place, addresses[0], on_removed)
        for address in addresses:
            assert address not in self._listeners, f"{address} is taken"
            self._listeners[address] = listener
        return listener

    def close(self, listener: SimListener) -> None:
        """Close a listener and its pipes, like the end of its process does."""
        for address in [a for a, other in self._listeners.items() if other is listener]:
            del self._listeners[address]
        listener.is_closed = True
        for pipe in list(listener.pipes.values()):
            self.break_pipe(pipe)

    async def connect(
        self,
        place: Place,
        address: str,
        timeout_s: float,
        on_receive: Callable[[bytes], None],
        on_broken: Callable[[], None],
    ) -> Pipe | None:
        """Dial; None if refused, or without an answer in time."""
        listener = self._listeners.get(address)
        now = trio.current_time()
        if listener is None:
            await trio.sleep(min(timeout_s, self._latency(local=False)))
            return None
        host = listener.place.host
        ways = (self._way(place.host, host), self._way(host, place.host))
        if any(max(way.cut_until, way.clogged_until) > now for way in ways):
            await trio.sleep(timeout_s)
            return None
        delay_s = 2 * self._latency(local=host == place.host)
        await trio.sleep(min(timeout_s, delay_s))
        if listener.is_closed or delay_s > timeout_s or not place.alive:
            return None
        pipe = Pipe(next(self._numbers), place, listener, address, on_receive, on_broken)
        self._pipes[pipe.number] = listener.pipes[pipe.number] = pipe
        return pipe

    def is_refused(self, address: str) -> bool:
        """Return whether no process listens at an address, like the kernel of its host."""
        return address not in self._listeners

    def hang_up(self, pipe: Pipe) -> None:
        """Close from the dialler's side."""
        pipe.on_receive, pipe.on_broken = _ignore_bytes, _ignore
        self.break_pipe(pipe)

    def break_pipe(self, pipe: Pipe) -> None:
        """End a connection: both ends are notified a latency later, if possible."""
        if not pipe.is_open:
            return
        pipe.is_open = False
        self._pipes.pop(pipe.number, None)
        listener = pipe.listener
        here, there = pipe.dialler.host, listener.place.host
        self._at(self._arrival(here, there), lambda: listener.removed(pipe.number))
        self._at(self._arrival(there, here), lambda: pipe.on_broken())  # noqa: PLW0108 - looked up when it runs

    def process_ended(self, place: Place) -> None:
        """Break all connections that a process has dialled."""
        for pipe in [pipe for pipe in self._pipes.values() if pipe.dialler is place]:
            self.hang_up(pipe)

    # --- messages ---------------------------------------------------------------------------------

    def send(self, pipe: Pipe, direction: int, raw: bytes) -> None:
        """Send a message; never blocks, may lose it."""
        options, rng = self._options, self._rng
        ends = (pipe.dialler.host, pipe.listener.place.host)
        source, target = ends if direction == TO_LISTENER else ends[::-1]
        now = trio.current_time()
        cut_until = self._way(source, target).cut_until
        if cut_until > now and not (options.partition_holds and cut_until < math.inf):
            return
        if pipe.in_flight[direction] >= IN_FLIGHT_MAX:
            return
        if self.faults_on and rng.random() < options.loss:
            return
        copies = 2 if self.faults_on and rng.random() < options.duplication else 1
        for _ in range(copies):
            at = self._arrival(source, target)
            if self.faults_on and rng.random() < options.reordering:
                at += rng.expovariate(1 / (10 * options.latency_mean_s))
            else:
                at = pipe.last_at[direction] = max(at, pipe.last_at[direction])
            pipe.in_flight[direction] += 1
            self._at(at, lambda: self._deliver(pipe, direction, raw))

    def _deliver(self, pipe: Pipe, direction: int, raw: bytes) -> None:
        place = pipe.listener.place if direction == TO_LISTENER else pipe.dialler
        now = trio.current_time()
        if place.alive and place.is_paused(now):
            # It stays in the buffers of the kernel until the process continues.
            self._at(place.paused_until, lambda: self._deliver(pipe, direction, raw))
            return
        pipe.in_flight[direction] -= 1
        if direction == TO_DIALLER:
            if pipe.is_open and place.alive:
                self._note(pipe, "<", raw)
                pipe.on_receive(raw)
            return
        target: Pipe | None = pipe
        if not pipe.is_open or pipe.listener.is_closed:
            target = self._successor_of(pipe)
        if target is not None:
            self._note(target, ">", raw)
            target.listener.arrived(target.number, raw)

    def _successor_of(self, pipe: Pipe) -> Pipe | None:
        """Return the dialler's newer connection to the address: nng delivers late messages to
        it.
        """
        if self._rng.random() >= self._options.successor_delivery or not pipe.dialler.alive:
            return None
        newer = [
            other
            for other in self._pipes.values()
            if other.dialler is pipe.dialler and other.listener.address == pipe.listener.address
        ]
        return newer[-1] if newer else None

    def _note(self, pipe: Pipe, arrow: str, raw: bytes) -> None:
        self.delivered_count += 1
        crc = zlib.crc32(raw)
        self._trace.line(
            "msg", pipe.dialler.name, arrow, pipe.listener.place.name, len(raw), f"{crc:08x}"
        )

    # --- faults -----------------------------------------------------------------------------------

    def pipes(self) -> list[Pipe]:
        """Return the open connections, oldest first."""
        return list(self._pipes.values())

    def cut(self, source: str, target: str, until: float) -> None:
        """Drop everything from one host to another."""
        way = self._way(source, target)
        way.cut_until = max(way.cut_until, until)

    def restore(self, source: str, target: str) -> None:
        """End every cut between two hosts."""
        for way in (self._way(source, target), self._way(target, source)):
            way.cut_until = -math.inf

    def clog(self, source: str, target: str, until: float) -> None:
        """Delay everything from one host to another."""
        self._way(source, target).clogged_until = until

    def is_cut(self, source: str, target: str) -> bool:
        """Return whether the direction is cut now."""
        return source != target and self._way(source, target).cut_until > trio.current_time()

    def heal(self) -> None:
        """End every fault of every link, except the permanent cuts."""
        self.faults_on = False
        for way in self._ways.values():
            way.clogged_until = -math.inf
            if way.cut_until < math.inf:
                way.cut_until = -math.inf
        # Delayed messages are no longer delayed, and keep their order.
        latest = trio.current_time() + HEALED_WITHIN_S
        self._due = sorted((min(at, latest), order, act) for at, order, act in self._due)
        for pipe in self._pipes.values():
            pipe.last_at = [min(at, latest) for at in pipe.last_at]
        self._wake.set()

    # --- time -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Deliver what is due, forever."""
        while True:
            until = self._due[0][0] if self._due else math.inf
            self._wake = trio.Event()
            with trio.move_on_at(until):
                await self._wake.wait()
            now = trio.current_time()
            while self._due and self._due[0][0] <= now:
                heappop(self._due)[2]()

    def _at(self, at: float, action: Callable[[], None]) -> None:
        heappush(self._due, (at, next(self._order), action))
        if self._due[0][0] == at:
            self._wake.set()

    def _arrival(self, source: str, target: str) -> float:
        now = trio.current_time()
        at = now + self._latency(local=source == target)
        way = self._way(source, target)
        held_until = max(way.clogged_until, way.cut_until)
        if math.inf > held_until > now:
            at += held_until - now
        return at

    def _latency(self, *, local: bool) -> float:
        options = self._options
        drawn = options.latency_min_s + self._rng.expovariate(1 / options.latency_mean_s)
        return drawn * LOCAL_LATENCY_FRACTION if local else drawn

    def _way(self, source: str, target: str) -> Way:
        way = self._ways.get((source, target))
        if way is None:
            way = self._ways[source, target] = Way()
        return way


def _ignore() -> None:
    return


def _ignore_bytes(_: bytes) -> None:
    return
