"""An impostor: a process that has heard a member's nonce, and speaks in that member's name.

Without certificates any process can. With them it plays a member that lies: about other members,
and about its own records. It changes what is found for a while, and no promise.
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
"""How long the impostor keeps its connection: its messages are under way for so long."""

INVENTED_MAX = 12
"""Members invented in one lie: more than a node tries at one time."""

COUNTERS_AHEAD = (0, 1, 2**20, 2**64 - 1)
"""How far the entries of a slander are ahead of the truth; the last one is the end of the range."""

NUMBERS_AHEAD = (1000, 2**20, 2**64 - 1)
"""How far the number of a forged repair is ahead of its stream; likewise."""

Lie: TypeAlias = "tuple[Member, Unpack[tuple[Message, ...]]]"
"""The member in whose name it is told, and the messages."""


class Impostor:
    """Tells one are at a time to one node."""

    def __init__(self, world: World, rng: random.Random) -> None:
        """Lie to the nodes of this world."""
        self._world = world
        self._rng = rng
        self._lies = 0

    async def lie(self) -> None:
        """Connect to a node as another member, or as one that there is not, and lie."""
        rng = self._rng
        nodes = [node for _, node in sorted(self._world.nodes.items()) if node.place.alive]
        if len(nodes) < 2:
            return
        heard_by, named = rng.sample(nodes, 2)
        tell = rng.choice([self._number, self._slander, self._inventions, self._join])
        speaker, *messages = tell(heard_by, named)
        self._lies += 1
        said = [type(message).__name__ for message in messages]
        self._world.trace.line(
            "fault", "lie", f"{speaker.incarnation:016x}", heard_by.place.name, *said
        )
        place = Place(f"impostor-{self._lies}", rng.choice(self._world.hosts))
        self._world.nursery.start_soon(self._say, place, heard_by.address, speaker, messages)

    async def _say(
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
        for said in (hello, *messages):
            envelope = Envelope(speaker.incarnation, 0, said)
            network.send(pipe, TO_LISTENER, encode(envelope, cluster=CLUSTER))
        await trio.sleep(STAYS_S)
        network.hang_up(pipe)

    # --- lies -------------------------------------------------------------------------------------

    def _number(self, heard_by: SimNode, named: SimNode) -> Lie:
        """End the stream of a holder at an owner by a number that its holder never reaches."""
        held = heard_by.crew.directory._held.get(named.incarnation)
        number = (held.number if held is not None else 0) + self._rng.choice(NUMBERS_AHEAD)
        number = min(number, 2**64 - 1)
        me, forged = named.crew.membership.me, Repair(number, bytes(range(BUCKETS)), b"")
        if self._rng.random() < 0.5:
            return me, forged
        # The owner believes that it lacks a record, and answers as one that is behind.
        return me, forged, StreamSummary(number, 1, 1)

    def _slander(self, heard_by: SimNode, named: SimNode) -> Lie:
        """Say that other members have ended."""
        rng, me = self._rng, named.crew.membership.me
        ahead, state = rng.choice(COUNTERS_AHEAD), rng.choice([SUSPECT, DEAD, LEFT])
        others = [
            attrs.evolve(other, state=state, counter=min(other.counter + ahead, 2**64 - 1))
            for other in heard_by.crew.membership.view.live()
            if other.incarnation != me.incarnation and rng.random() < 0.5
        ]
        return me, ShareView(0, (me, *others))

    def _inventions(self, heard_by: SimNode, named: SimNode) -> Lie:
        """Tell of members that there are not."""
        del heard_by
        me = named.crew.membership.me
        return me, ShareView(0, (me, *(self._invented() for _ in range(INVENTED_MAX))))

    def _join(self, heard_by: SimNode, named: SimNode) -> Lie:
        """Join as a member that there is not, at an address where no such process answers."""
        del heard_by
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
