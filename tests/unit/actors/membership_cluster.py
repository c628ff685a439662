"""A simulated cluster of Membership actors: virtual time, an event heap, a lossy network.

It obeys the contract of the real wiring: a message names the incarnation it is meant for and is
dropped by any other; an answer goes back on the pipe that the question came on; what is queued for
a paused process reaches it when it goes on, after the tick that is overdue. Every message crosses
the network as bytes of the real codec.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from peercache.actors.effects import (
    Effect,
    NotifyDirectory,
    NotifyPlacement,
    NotifyPool,
    NotifyPublisher,
    NotifyRemoval,
    NotifyRing,
    Send,
    SendTo,
)
from peercache.actors.mailboxes import PeerAnswered, Republish, ViewChanged
from peercache.actors.membership.actor import Membership
from peercache.actors.origin import Origin
from peercache.model.member import ALIVE, Member
from peercache.wire.codec import decode, encode
from peercache.wire.envelope import Envelope
from peercache.wire.messages.declared import Message

HEARTBEAT_S = 1.0
SUSPECT_S = 3.0
DEAD_S = 6.0
HEAL_S = 10.0
"""Within this time of a healed partition all views are equal."""

TO_OTHERS = (NotifyDirectory, NotifyPool, NotifyPublisher, NotifyRemoval, NotifyPlacement)
"""What other actors of the same node are notified of."""


def member(incarnation: int, control: str = "", **fields: Any) -> Member:
    """Return a plausible member; any field can be named."""
    control = control or f"host-{incarnation:03d}:31998"
    values: dict[str, Any] = {
        "incarnation": incarnation,
        "counter": 0,
        "state": ALIVE,
        "head_rank": 255,
        "host_name": control.rpartition(":")[0],
        "control": control,
        "data": control.rpartition(":")[0] + ":40000",
        "boot_id": "boot",
        "segment": f"/dev/shm/peercache-{incarnation:016x}",
    }
    return Member(**(values | fields))


@attrs.define(eq=False)
class Process:
    """One process: an actor at an address, and what happened to it."""

    actor: Membership
    address: str
    is_paused: bool = False
    is_gone: bool = False
    waiting: list[tuple[Origin, Message | PeerAnswered]] = attrs.field(factory=list)
    views: list[ViewChanged] = attrs.field(factory=list)
    republished: int = 0
    wakes_at: float = -1.0

    @property
    def incarnation(self) -> int:
        return self.actor.me.incarnation


class Cluster:
    """Processes by address, and the network between them."""

    def __init__(self, seed: int, *, loss: float = 0.0, max_masters: int = 3) -> None:
        self.rng = random.Random(seed)
        self.loss = loss
        self.max_masters = max_masters
        self.now = 100.0
        self.processes: dict[str, Process] = {}
        self.all_started: list[Process] = []
        self.sent: Counter[tuple[str, int]] = Counter()
        self.is_cut: Callable[[str, str], bool] = lambda source, target: False
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._pipes: dict[int, str] = {}

    # --- what a story does ------------------------------------------------------------------------

    def start(self, address: str, *, discovery: Iterable[str] = (), **fields: Any) -> Process:
        """Start a new process at an address; whatever ran there is gone."""
        if address in self.processes:
            self.kill(address)
        heads = tuple(discovery)
        rank = heads.index(address) if address in heads else 255
        incarnation = self.rng.randrange(1, 2**64)
        actor = Membership(
            me=member(incarnation, **({"control": address, "head_rank": rank} | fields)),
            discovery_addr=heads,
            max_masters=self.max_masters,
            heartbeat_s=HEARTBEAT_S,
            suspect_s=SUSPECT_S,
            dead_s=DEAD_S,
            rng=random.Random(incarnation),
        )
        process = Process(actor, address)
        self.processes[address] = process
        self.all_started.append(process)
        self.perform(process, actor.start(self.now))
        self._wake(process)
        return process

    def kill(self, address: str) -> Process:
        """End a process without a goodbye."""
        process = self.processes.pop(address)
        process.is_gone = True
        return process

    def leave(self, address: str) -> Process:
        """End a process with a goodbye."""
        process = self.processes[address]
        self.perform(process, process.actor.leave(self.now))
        return self.kill(address)

    def pause(self, address: str) -> None:
        """Stop a process as SIGSTOP does."""
        self.processes[address].is_paused = True

    def go_on(self, address: str) -> None:
        """Let it go on: the overdue tick comes first, then what waited."""
        process = self.processes[address]
        process.is_paused = False
        self._tick(process)
        waiting, process.waiting = process.waiting, []
        for sender, message in waiting:
            self.hand_over(process, sender, message)

    def partition(self, *sides: Iterable[str]) -> None:
        """Cut every link between sides; an address on no side reaches all."""
        side_of = {address: number for number, side in enumerate(sides) for address in side}

        def is_cut(source: str, target: str) -> bool:
            both = source in side_of and target in side_of
            return both and side_of[source] != side_of[target]

        self.is_cut = is_cut

    def cut(self, *links: tuple[str, str]) -> None:
        """Cut single directed links."""
        self.is_cut = lambda source, target: (source, target) in links

    def heal(self) -> None:
        """Let every link carry messages again."""
        self.is_cut = lambda source, target: False

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def seconds_until(self, condition: Callable[[], bool], *, at_most: float) -> float:
        """Run until a condition holds, in steps of 0.1 s; fail if it takes too long."""
        started = self.now
        while not condition():
            assert self.now - started < at_most, f"not within {at_most} s\n{self.report()}"
            self.run(0.1)
        return self.now - started

    # --- what a check asks ------------------------------------------------------------------------

    def agrees(self) -> bool:
        """Whether all views are equal about the living, and name exactly those that run."""
        running = {process.incarnation for process in self.processes.values()}
        first = next(iter(self.processes.values())).actor.view
        return all(
            {m.incarnation for m in process.actor.view.live()} == running
            and all(m.state == ALIVE for m in process.actor.view.live())
            and process.actor.view.digest() == first.digest()
            and process.actor.masters() == self.processes[first_address].actor.masters()
            for first_address in [next(iter(self.processes))]
            for process in self.processes.values()
        )

    def states(self, address: str, of: Process) -> int | None:
        """The state in which the process at an address holds another."""
        entry = self.processes[address].actor.member(of.incarnation)
        return None if entry is None else entry.state

    def forget_views(self) -> None:
        """Forget what was announced so far."""
        for process in self.processes.values():
            process.views.clear()

    def announced(self, *, but: str = "") -> list[ViewChanged]:
        """All views that were announced since, but for those of the process at an address."""
        running = [process for address, process in self.processes.items() if address != but]
        return [view for process in running for view in process.views]

    def busiest_second(self, *, since: float) -> int:
        """Most messages that one node sent in one whole second."""
        counts = [count for (_, at), count in self.sent.items() if at >= int(since)]
        return max(counts, default=0)

    def report(self) -> str:
        """The view of each process, for a failed test."""
        names = {process.incarnation: process.address for process in self.all_started}
        return "\n".join(
            f"{address}: "
            + " ".join(
                f"{names[m.incarnation]}={'ASDL'[m.state]}{m.counter}"
                for m in process.actor.view.members()
            )
            for address, process in self.processes.items()
        )

    # --- the world --------------------------------------------------------------------------------

    def _at(self, when: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, event))

    def _wake(self, process: Process) -> None:
        when = process.actor.deadline()
        if process.is_gone or when == process.wakes_at or when == float("inf"):
            return
        process.wakes_at = when

        def event() -> None:
            if not process.is_gone and not process.is_paused and process.wakes_at == when:
                self._tick(process)

        self._at(max(when, self.now), event)

    def _tick(self, process: Process) -> None:
        effects = process.actor.on_tick(self.now)
        assert process.actor.deadline() > self.now, "time would are paused"
        self._after(process, effects)

    def hand_over(self, process: Process, sender: Origin, message: Message | PeerAnswered) -> None:
        self._after(process, process.actor.on_message(sender, message, self.now))

    def _after(self, process: Process, effects: list[Effect]) -> None:
        process.actor.check()
        self.perform(process, effects)
        self._wake(process)

    def perform(self, process: Process, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, NotifyRing):
                process.views.append(effect.fact)
                continue
            if isinstance(
                effect,
                (NotifyDirectory, NotifyPool, NotifyPublisher, NotifyRemoval, NotifyPlacement),
            ):
                process.republished += isinstance(effect.fact, Republish)
                continue
            self.sent[process.address, int(self.now)] += 1
            if isinstance(effect, SendTo):
                self._carry(process, effect.address, 0, effect.message, is_new=True)
            else:
                assert isinstance(effect, Send)
                self._send(process, effect)

    def _send(self, process: Process, effect: Send) -> None:
        if isinstance(effect.to, Origin):
            address, target = self._pipes[effect.to.pipe], effect.to.identity
        else:
            entry = process.actor.member(effect.to)
            assert entry is not None, "a message to an unknown member"
            address, target = entry.control, effect.to
        self._carry(process, address, target, effect.message, is_new=False)

    def _carry(
        self, source: Process, address: str, target: int, message: Message, *, is_new: bool
    ) -> None:
        raw = encode(Envelope(source.incarnation, target, message), cluster="story")
        if self.is_cut(source.address, address) or self.rng.random() < self.loss:
            return
        pipe = 0
        if is_new:
            self._number += 1
            pipe = self._number
            self._pipes[pipe] = source.address

        def arrive() -> None:
            process = self.processes.get(address)
            if process is None or target not in (0, process.incarnation):
                return
            envelope = decode(raw, cluster="story")
            origin = Origin(envelope.sender, pipe)
            if process.is_paused:
                process.waiting.append((origin, envelope.message))
            else:
                self.hand_over(process, origin, envelope.message)
            if is_new and not process.is_paused:
                self._welcome(process, source, address)

        self._at(self.now + 0.001 + self.rng.expovariate(200.0), arrive)

    def _welcome(self, process: Process, source: Process, address: str) -> None:
        """Carry the answer to the greeting that comes with every first message to an address."""
        answer = PeerAnswered(address, process.actor.me)
        if self.is_cut(process.address, source.address) or self.rng.random() < self.loss:
            return

        def arrive() -> None:
            if source.is_paused:
                source.waiting.append((Origin(0), answer))
            elif not source.is_gone:
                self.hand_over(source, Origin(0), answer)

        self._at(self.now + 0.001 + self.rng.expovariate(200.0), arrive)


def cluster_of(count: int, *, seed: int = 1, heads: int = 1, loss: float = 0.0) -> Cluster:
    """Return a settled cluster: n0 … are its addresses, the first ones its heads."""
    cluster = Cluster(seed, loss=loss)
    addresses = [f"n{number:03d}:31998" for number in range(count)]
    for address in addresses:
        cluster.start(address, discovery=addresses[:heads])
    cluster.seconds_until(cluster.agrees, at_most=HEAL_S)
    return cluster
