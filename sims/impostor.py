"""An impostor: a process that knows a member's nonce, and sends messages in that member's name.

Without certificates any process can do that. With them it acts as a Byzantine member: it forges
entries of other members, and its own records. That may change for a while which pages are found,
but must not break a guarantee.
"""

from __future__ import annotations

import random
from typing import TypeAlias

import attrs
import trio
from typing_extensions import Unpack

from peercache.model.ids import incarnation_of, new_nonce
from peercache.model.member import ALIVE, DEAD, LEFT, SUSPECT, Member
from peercache.model.records import BUCKETS
from peercache.wire.codec import encode
from peercache.wire.envelope import WIRE_VERSION, WIRE_VERSION_OLDEST, Envelope
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import Repair, StreamSummary
from peercache.wire.messages.membership import Join, ShareView
from peercache.wire.messages.session import Hello
from sims.network import TO_LISTENER
from sims.node import CLUSTER, SimNode
from sims.places import Place
from sims.swarm import GRANULE
from sims.world import World

DIAL_S = 1.0
STAYS_S = 1.0
"""How long the impostor keeps its connection: its messages take that long."""

INVENTED_MAX = 12
"""Members invented at a time: more than a node tries at a time."""

COUNTERS_AHEAD = (0, 1, 2**20, 2**64 - 1)
"""How far the entries of a slander are ahead of the truth; the last one is the end of the range."""

NUMBERS_AHEAD = (1000, 2**20, 2**64 - 1)
"""How far the number of a forged repair is ahead of its stream; likewise."""

Lie: TypeAlias = "tuple[Member, Unpack[tuple[Message, ...]]]"
"""The member in whose name the messages are sent, and the messages."""


class Impostor:
    """Sends one forged message at a time to one node."""

    def __init__(self, world: World, rng: random.Random) -> None:
        """Send forged messages to the nodes of this world."""
        self._world = world
        self._rng = rng
        self._lies = 0

    async def lie(self) -> None:
        """Connect to a node as another or an invented member, and send a forged message."""
        rng = self._rng
        nodes = [node for _, node in sorted(self._world.nodes.items()) if node.place.alive]
        if len(nodes) < 2:
            return
        receiver, named = rng.sample(nodes, 2)
        make = rng.choice([self._number, self._slander, self._inventions, self._join])
        speaker, *messages = make(receiver, named)
        self._lies += 1
        sent = [type(message).__name__ for message in messages]
        self._world.trace.line(
            "fault", "lie", f"{speaker.incarnation:016x}", receiver.place.name, *sent
        )
        place = Place(f"impostor-{self._lies}", rng.choice(self._world.hosts))
        self._world.nursery.start_soon(self._send_lies, place, receiver.address, speaker, messages)

    async def _send_lies(
        self, place: Place, address: str, speaker: Member, messages: list[Message]
    ) -> None:
        network = self._world.network
        pipe = await network.connect(place, address, DIAL_S, _ignore_bytes, _ignore)
        if pipe is None:
            return
        hello = Hello(
            0, WIRE_VERSION_OLDEST, WIRE_VERSION, CLUSTER, is_node=True, granule=GRANULE, name="",
            nonce=speaker.nonce, namespace="", geometry="", lock="", secret=b"",
        )  # fmt: skip
        for message in (hello, *messages):
            envelope = Envelope(speaker.incarnation, 0, message)
            network.send(pipe, TO_LISTENER, encode(envelope, cluster=CLUSTER))
        await trio.sleep(STAYS_S)
        network.hang_up(pipe)

    # --- forged messages --------------------------------------------------------------------------

    def _number(self, receiver: SimNode, named: SimNode) -> Lie:
        """End the stream of a holder at an owner with a number that the holder never reaches."""
        held = receiver.crew.directory._held.get(named.incarnation)
        number = (held.number if held is not None else 0) + self._rng.choice(NUMBERS_AHEAD)
        number = min(number, 2**64 - 1)
        me, forged = named.crew.membership.me, Repair(number, bytes(range(BUCKETS)), b"")
        if self._rng.random() < 0.5:
            return me, forged
        # The owner assumes that it lacks a record, and answers that it is behind.
        return me, forged, StreamSummary(number, 1, 1)

    def _slander(self, receiver: SimNode, named: SimNode) -> Lie:
        """Report that other members have ended."""
        rng, me = self._rng, named.crew.membership.me
        ahead, state = rng.choice(COUNTERS_AHEAD), rng.choice([SUSPECT, DEAD, LEFT])
        others = [
            attrs.evolve(other, state=state, counter=min(other.counter + ahead, 2**64 - 1))
            for other in receiver.crew.membership.view.live()
            if other.incarnation != me.incarnation and rng.random() < 0.5
        ]
        return me, ShareView(0, (me, *others))

    def _inventions(self, receiver: SimNode, named: SimNode) -> Lie:
        """Report invented members."""
        del receiver
        me = named.crew.membership.me
        return me, ShareView(0, (me, *(self._invented() for _ in range(INVENTED_MAX))))

    def _join(self, receiver: SimNode, named: SimNode) -> Lie:
        """Join as an invented member, at an address where no such process answers."""
        del receiver
        member = self._invented()
        if self._rng.random() < 0.5:
            member = attrs.evolve(member, control=named.address)
        return member, Join(member)

    def _invented(self) -> Member:
        nonce, number = new_nonce(self._rng), self._rng.getrandbits(16)
        address = f"nowhere-{number}:1"
        return Member(
            incarnation=incarnation_of(CLUSTER, "", nonce), counter=1, state=ALIVE, head_rank=255,
            host_name="nowhere", control=address, data=address, boot_id="nowhere", segment="",
            nonce=nonce,
        )  # fmt: skip


def _ignore_bytes(_: bytes) -> None:
    return


def _ignore() -> None:
    return
