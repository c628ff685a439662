"""Every actor runs behind an nng socket of its own, and does there what it does in one loop.

Each actor has a thread, an inproc socket, and nothing else: a message comes in as bytes, effects go
out as bytes. So actors say nothing to each other but values, and share nothing that counts.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import pynng
import pytest

from peercache.actors.channels.actor import (
    IDLE_S,
    ChannelPool,
    ChannelsOutput,
    CloseChannel,
    CloseChannels,
    DestroyChannel,
    ForgetPeer,
    LeaseChannel,
    RetireIdle,
    ReturnChannel,
)
from peercache.actors.effects import Effect, Send, SendTo, StoreWords
from peercache.actors.mailboxes import PeerAnswered, PoolGrew
from peercache.actors.origin import Origin
from peercache.actors.ports import (
    DISK_DONE,
    DISK_ENTRY,
    DiskEffect,
    DiskOpened,
    Forget,
    ForgetDone,
    Load,
    LoadDone,
    RdmaAbsent,
    RdmaEffect,
    Write,
    WriteDone,
)
from peercache.actors.runtime import SELF, Mailbox, NamedActor
from peercache.config.settings import Config
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY_BYTES
from peercache.model.member import ALIVE, Member
from peercache.model.records import ON_DISK, from_bytes
from peercache.node.actors import NodeActors
from peercache.observability.metrics import Metrics
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Acknowledged, Located, Lookup, Put
from peercache.wire.messages.membership import (
    CompareView,
    Heartbeat,
    HeartbeatSeen,
    Join,
    RequestView,
    ShareView,
)
from peercache.wire.messages.pool import (
    PROMOTED,
    Commit,
    Committed,
    Granted,
    Promote,
    Promoted,
    Remove,
    Removed,
    Reserve,
)
from peercache.wire.messages.session import OpenChannel, Refused
from tests.contracts.actor_codec import ActorCodec

ME, PEER, CLIENT = 0x11, 0x22, Origin(0x77, 5)
GRANULE, GRANULES = 16384, 4
SLAB_BYTES = 1 << 20
TIMEOUT_MS = 20_000

Handle = Callable[[NamedActor[Any], Origin, Any, float], list[Effect]]
"""How an actor takes a message, or a tick where the message is None."""


def key(name: str) -> bytes:
    return name.encode().ljust(KEY_BYTES, b".")


def member(incarnation: int) -> Member:
    control = f"h{incarnation}:1"
    return Member(incarnation, 1, ALIVE, 255, "h", control, control, "boot", "/segment")


def in_one_loop(named: NamedActor[Any], sender: Origin, message: Any, now: float) -> list[Effect]:
    """Hand a message over as a node does."""
    if message is None:
        effects = named.actor.on_tick(now)
    else:
        effects = named.actor.on_message(sender, message, now)
    named.actor.check()
    return effects


class Sockets:
    """Each actor behind an inproc socket: what it takes and what it emits crosses as bytes."""

    def __init__(self, codec: ActorCodec) -> None:
        """Start with no actor; one begins to listen when its first message comes."""
        self.codec = codec
        self.crossed: dict[str, int] = {}
        self._ends: dict[str, pynng.Req0] = {}
        self._listening: list[pynng.Rep0] = []
        self._threads: list[threading.Thread] = []

    def __call__(
        self, named: NamedActor[Any], sender: Origin, message: Any, now: float
    ) -> list[Effect]:
        """Send a message to the actor's socket; return the effects that came back."""
        end = self._ends.get(named.name) or self._listen(named)
        self.crossed[named.name] = self.crossed.get(named.name, 0) + 1
        end.send(self.codec.encode((sender, message, now)))
        return list(self.codec.decode(end.recv()))

    def _listen(self, named: NamedActor[Any]) -> pynng.Req0:
        address = f"inproc://actor-{id(self)}-{named.name}"
        listening = pynng.Rep0(listen=address)
        thread = threading.Thread(target=self._run, args=(named, listening), daemon=True)
        thread.start()
        self._threads.append(thread)
        self._listening.append(listening)
        end = self._ends[named.name] = pynng.Req0(
            dial=address, send_timeout=TIMEOUT_MS, recv_timeout=TIMEOUT_MS
        )
        return end

    def _run(self, named: NamedActor[Any], listening: pynng.Rep0) -> None:
        """The loop of one actor: bytes in, bytes out."""
        with suppress(pynng.Closed):
            while True:
                sender, message, now = self.codec.decode(listening.recv())
                listening.send(self.codec.encode(in_one_loop(named, sender, message, now)))

    def close(self) -> None:
        """End every loop."""
        for socket in (*self._ends.values(), *self._listening):
            socket.close()
        for thread in self._threads:
            thread.join(TIMEOUT_MS / 1000)
            assert not thread.is_alive()


@attrs.define(eq=False)
class World:
    """One node's actors with their real mailboxes, and a world that answers at once."""

    handle: Handle
    crew: NodeActors
    said: list[tuple[str, Any, list[Effect]]] = attrs.field(factory=list)
    """Every step of an actor: its name, what it took, its effects."""
    sent: list[Message] = attrs.field(factory=list)
    """What left the node and was not taken yet by `takes`."""
    words: dict[int, int] = attrs.field(factory=dict)
    now: float = 10.0

    def deliver(self, sender: Origin, message: Message) -> None:
        """Let a message come from the network."""
        assert self.crew.mailboxes.offer(sender, message, 100)
        self.drain()

    def tick(self, seconds: float) -> None:
        """Let time pass; tick every actor that is due, in the order of the crew."""
        until = self.now + seconds
        while (soonest := min(named.actor.deadline() for named in self.crew.actors)) <= until:
            self.now = max(self.now, soonest)
            for named in self.crew.actors:
                if named.actor.deadline() <= self.now:
                    self._step(named, SELF, None)
            self.drain()
        self.now = until

    def drain(self) -> None:
        """Hand out what waits, mailbox by mailbox, until nothing does."""
        while any(named.mailbox.waiting for named in self.crew.actors):
            for named in self.crew.actors:
                if (taken := named.mailbox.take()) is not None:
                    self._step(named, *taken)

    def takes(self, kind: type[Any]) -> Any:
        """Return the only message of a kind that left the node, and forget all that left."""
        (found,) = [message for message in self.sent if isinstance(message, kind)]
        self.sent.clear()
        return found

    def perform(self, effect: Effect) -> None:
        """Do what an actor emits."""
        if isinstance(effect, (Send, SendTo)):
            self.sent.append(effect.message)
        elif isinstance(effect, StoreWords):
            self.words.update(zip(effect.indices.tolist(), effect.values.tolist(), strict=True))
        elif isinstance(effect, DiskEffect):
            self._store(effect)
        elif isinstance(effect, RdmaEffect):
            pass  # There is no device.
        else:
            self.crew.mailboxes.deliver(effect)

    def _step(self, named: NamedActor[Any], sender: Origin, message: Any) -> None:
        effects = self.handle(named, sender, message, self.now)
        self.said.append((named.name, message, effects))
        for effect in effects:
            self.perform(effect)

    def _store(self, effect: DiskEffect) -> None:
        disk = self.crew.mailboxes.disk
        if isinstance(effect, Write):
            disk.put(SELF, WriteDone(effect.job, bytes([DISK_DONE]) * len(effect.places)))
        elif isinstance(effect, Load):
            count = len(effect.places)
            sums = np.zeros(count, np.uint64)
            disk.put(SELF, LoadDone(effect.job, bytes([DISK_DONE]) * count, sums))
        elif isinstance(effect, Forget) and effect.job:
            disk.put(SELF, ForgetDone(effect.job))


def world_of(handle: Handle) -> World:
    """Return a node in which nothing is random, with a disk and without rdma."""
    config = Config(
        cluster="contract",
        granule=GRANULE,
        disk_enabled=True,
        virtual_nodes=16,
        directory_replicas=2,
        client_uncommitted_max=GRANULES * GRANULE,
    )
    crew = NodeActors(
        config, member(ME), page_bytes=GRANULES * GRANULE, rng=random.Random(7), metrics=Metrics()
    )
    return World(handle, crew)


def play(world: World) -> None:
    """One life of a node: it joins, stores, is asked, evicts, promotes, refuses, removes."""
    boxes = world.crew.mailboxes
    for effect in world.crew.membership.start(world.now):
        world.perform(effect)
    boxes.pool.put(SELF, PoolGrew(GRANULES * GRANULE))
    boxes.rdma.put(SELF, RdmaAbsent("this host has no device"))
    nothing = np.empty(0, DISK_ENTRY)
    boxes.disk.put(SELF, DiskOpened(4 * SLAB_BYTES, SLAB_BYTES, nothing, 1_000))
    world.drain()

    world.deliver(Origin(PEER, 3), Join(member(PEER)))
    assert [m.incarnation for m in world.takes(ShareView).view] == [ME]
    boxes.membership.put(SELF, PeerAnswered(member(PEER).control, member(PEER)))
    world.drain()
    digest = world.crew.membership.view.digest()
    assert world.takes(HeartbeatSeen).view == digest
    world.deliver(Origin(PEER), CompareView(bytes(8)))
    assert {m.incarnation for m in world.takes(ShareView).view} == {ME, PEER}
    world.deliver(Origin(PEER), Heartbeat(member(PEER), digest))
    assert world.takes(HeartbeatSeen).view == digest
    world.deliver(CLIENT, RequestView(4, digest))
    assert world.takes(ShareView).view == ()

    assert store(world, 1, key("a"), key("b")).published == 2
    assert [record["key"] for record in located(world, key("b"))] == [np.void(key("b"))]

    world.tick(0.5)  # Both pages are written to disk; then others push them out of memory.
    store(world, 2, key("c"), key("d"), key("e"), key("f"))
    world.tick(0.5)
    assert [bool(record["flags"] & ON_DISK) for record in located(world, key("a"))] == [True]
    world.sent.clear()
    world.deliver(CLIENT, Promote(9, key("a"), 1.0))
    world.tick(0.5)
    promoted = world.takes(Promoted)
    assert promoted.states == bytes([PROMOTED])
    assert not from_bytes(promoted.records)["flags"][0] & ON_DISK

    world.deliver(CLIENT, OpenChannel(6, 1, 0, "Ethernet", 1, 1, 0, bytes(16), 5, 16))
    assert world.takes(Refused) == Refused(6, "no_rdma", "this host has no device")
    world.deliver(CLIENT, Remove(8, 1, key("a"), 1.0))
    forwarded = [message for message in world.sent if isinstance(message, Remove)]
    assert len(forwarded) == 2
    world.deliver(Origin(ME), forwarded[0])
    world.tick(0.5)
    world.deliver(Origin(ME), world.takes(Removed))
    world.deliver(Origin(PEER), Removed(forwarded[1].request, 3))
    # The other member acknowledges no record here: it may still name the page.
    assert world.takes(Removed) == Removed(8, 4, (PEER,))
    assert not len(located(world, key("a")))


def store(world: World, sequence: int, *keys: bytes) -> Committed:
    """Reserve and commit pages as a client does; the peer acknowledges what is published to it."""
    lengths = np.full(len(keys), 8192, "<u8").tobytes()
    world.deliver(CLIENT, Reserve(1, sequence, 1, b"".join(keys), lengths))
    granted: Granted = world.takes(Granted)
    written = bytes([1]) * len(granted.states)
    world.deliver(CLIENT, Commit(2, sequence, written, bytes(8 * len(keys)), 1.0))
    for message in [message for message in world.sent if isinstance(message, Put)]:
        world.deliver(Origin(PEER), Acknowledged(message.number))
    answer: Committed = world.takes(Committed)
    return answer


def located(world: World, packed: bytes) -> Any:
    """Ask the directory shard."""
    world.sent.clear()
    world.deliver(CLIENT, Lookup(3, packed))
    return from_bytes(world.takes(Located).records)


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets(ActorCodec(virtual_nodes=16, replicas=2))
    yield made
    made.close()


def test_actors_do_over_sockets_what_they_do_in_one_loop(sockets: Sockets) -> None:
    """Step by step the same effects, to the byte; every actor took part."""
    here, there = world_of(in_one_loop), world_of(sockets)

    play(here)
    play(there)

    encode = sockets.codec.encode
    assert [name for name, _, _ in here.said] == [name for name, _, _ in there.said]
    for (name, cause, mine), (_, _, theirs) in zip(here.said, there.said, strict=True):
        assert encode(mine) == encode(theirs), f"{name} does another thing after {cause}"
    assert here.words == there.words
    assert set(sockets.crossed) == {named.name for named in there.crew.actors}
    assert sum(sockets.crossed.values()) == len(there.said) > 30


@attrs.define(eq=False)
class SenderlessPool:
    """The channel pool with the interface of the other actors: its one driver is no sender."""

    pool: ChannelPool

    def on_message(self, _sender: Origin, message: Any, now: float) -> list[ChannelsOutput]:
        return self.pool.on_message(message, now)

    def on_tick(self, now: float) -> list[ChannelsOutput]:
        return self.pool.on_tick(now)

    def deadline(self) -> float:
        return self.pool.deadline()

    def check(self) -> None:
        self.pool.check()


def channels_say(handle: Handle) -> list[list[Any]]:
    """Play the life of three channels to two peers; return what the pool emits at each step."""
    actor: Any = SenderlessPool(ChannelPool(max_channels_per_peer=2))
    named: NamedActor[Any] = NamedActor("channels", actor, Mailbox())
    said: list[list[Any]] = []

    def hear(message: Any, now: float) -> list[Any]:
        effects: list[Any] = handle(named, SELF, message, now)
        said.append(list(effects))
        return said[-1]

    (first,) = hear(LeaseChannel(1), 0.0)
    (second,) = hear(LeaseChannel(1), 0.0)
    assert hear(LeaseChannel(1), 0.0) == []
    (far,) = hear(LeaseChannel(2, 1), 0.0)
    hear(ReturnChannel(first), 1.0)
    hear(DestroyChannel(second), 1.0)
    assert hear(LeaseChannel(1), 2.0) == [attrs.evolve(first, is_new=False)]
    hear(ReturnChannel(first), 3.0)
    hear(RetireIdle(1), 4.0)
    hear(ForgetPeer(2), 5.0)
    assert hear(ReturnChannel(far), 6.0) == [CloseChannel(far.channel)]
    (third,) = hear(LeaseChannel(1), 7.0)
    hear(ReturnChannel(third), 8.0)
    assert hear(None, 8.0 + IDLE_S) == [CloseChannel(third.channel)]
    hear(CloseChannels(), 100.0)
    assert hear(LeaseChannel(1), 101.0) == []
    return said


def test_channel_pool_emits_over_a_socket_what_it_emits_to_its_driver(sockets: Sockets) -> None:
    """The actor that the bridge drives in the caller's thread takes and emits values, too."""
    said = channels_say(sockets)

    assert said == channels_say(in_one_loop)
    assert sockets.crossed == {"channels": len(said)}


def test_the_codec_refuses_what_is_no_value(sockets: Sockets) -> None:
    """An actor that handed over a part of itself would be found here."""
    crew = world_of(in_one_loop).crew

    with pytest.raises(AssertionError, match="no value that actors may say"):
        sockets.codec.encode(("x", crew.pool))


def test_a_ring_and_an_array_come_back_equal(sockets: Sockets) -> None:
    """And they are copies: nothing that one side changes later reaches the other."""
    ring = HashRing([1, 2, 3], virtual_nodes=16, replicas=2)
    array = np.zeros(3, DISK_ENTRY)
    array["place"] = [1, 2, 3]

    other_ring, other_array = sockets.codec.decode(sockets.codec.encode((ring, array)))
    keys = np.frombuffer(key("a") + key("b"), "V16")

    assert (other_ring.owners(keys) == ring.owners(keys)).all()
    assert other_array.dtype == array.dtype
    assert other_array.tobytes() == array.tobytes()
    assert not np.shares_memory(other_array, array)
