"""Overlaps: which members hold the pages of a prompt, asked of the owners of their records.

Owns    no record: each answer is read from directory shards when it is asked for.
Hears   RequestOverlap, from clients, operators and nodes.
Says    RequestOverlap, to owners; ReportOverlap or Refused.
Keeps   an answer says whether an absent page is absent for certain. Nodes ask each other about
        their shards only, so that no question goes round.
Limits  OVERLAP_KEYS_MAX keys, ASKERS_MAX questions at once, ROUNDS owners of a key and ANSWER_S
        for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import final

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.actors.directory.actor import DirectoryShard
from peercache.actors.origin import Origin
from peercache.model.hash_ring import HashRing
from peercache.model.keys import KEY_BYTES, PageKeys, from_bytes
from peercache.model.member import ALIVE, Member
from peercache.model.prefix import ANYWHERE, HOLDERS_MAX, Overlap
from peercache.node.broker import MemberBroker
from peercache.wire.messages.declared import Message
from peercache.wire.messages.directory import (
    OVERLAP_KEYS_MAX,
    ReportOverlap,
    RequestOverlap,
    overlap_of,
)
from peercache.wire.messages.session import Refused

TURN_KEYS = 512
"""Keys of one look into the table, between two turns of the loop: 0.2 ms where each page has 16
holders, and a millisecond where it has HOLDERS_MAX."""

ASKERS_MAX = 16
"""Questions of others that are answered at the same time; further ones are refused."""

ROUNDS = 2
"""Owners of a key that are asked one after the other: the first may have died, or be behind."""

ANSWER_S = 0.25
"""How long an owner may take; one that serves answers in milliseconds."""

Places = npt.NDArray[np.intp]


@final
class Overlaps:
    """Answers which members hold which pages, on the node's loop."""

    def __init__(
        self,
        *,
        shard: DirectoryShard,
        ring: Callable[[], HashRing],
        member_of: Callable[[int], Member | None],
        broker: MemberBroker,
    ) -> None:
        """Read `shard`, and ask other owners on the ring."""
        self._shard = shard
        self._ring = ring
        self._member_of = member_of
        self._broker = broker

    def ask(self, sender: Origin, asked: RequestOverlap) -> Message | None:
        """Take a question, which is answered when it is known; or refuse it."""
        count = len(asked.keys) // KEY_BYTES
        if count > OVERLAP_KEYS_MAX:
            detail = f"{count} keys in one RequestOverlap, {OVERLAP_KEYS_MAX} at most"
            return Refused(asked.request, "malformed", detail)

        async def answer() -> ReportOverlap:
            keys = from_bytes(asked.keys)
            told = await (self.of_shard(keys) if asked.shard_only else self.overlap(keys))
            return ReportOverlap(asked.request, told.holders, told.flags.tobytes(), told.whole)

        return self._broker.answer_later(
            sender, asked, answer, at_once_max=ASKERS_MAX, what="which nodes hold pages"
        )

    async def overlap(self, keys: PageKeys) -> Overlap:
        """Return which members hold these pages; ask what this node's shard cannot know.

        keys: (n,) V16. Each OVERLAP_KEYS_MAX of them take ROUNDS × ANSWER_S at most.
        """
        step = OVERLAP_KEYS_MAX
        if len(keys) <= step:
            return await self._part(keys)
        parts = [await self._part(keys[at : at + step]) for at in range(0, len(keys), step)]
        return Overlap.joined(parts)

    async def _part(self, keys: PageKeys) -> Overlap:
        own = await self.of_shard(keys)
        everything: Places = np.arange(len(keys))
        parts: list[tuple[Places, Overlap]] = [(everything, own)]
        ring = self._ring()
        certain, tried = np.zeros(len(keys), np.bool_), np.zeros((len(keys), len(ring)), np.bool_)
        if len(ring) and len(keys):
            owners = ring.table[:, : ring.replicas][ring.arcs(keys)]
            me = self._shard.incarnation
            if me in ring.members:
                at = ring.members.index(me)
                tried[:, at] = True
                if own.whole:
                    certain = (owners == at).any(axis=1)
            for _ in range(ROUNDS):
                left = (~certain).nonzero()[0]
                targets = self._targets(ring, owners, left, tried)
                if not targets:
                    break
                found: dict[int, Overlap] = {}
                async with trio.open_nursery() as nursery:
                    for owner, places in targets.items():
                        nursery.start_soon(self._look, owner, keys[places], found)
                for owner, told in found.items():
                    parts.append((targets[owner], told))
                    if told.whole:
                        certain[targets[owner]] = True
        merged = own if len(parts) == 1 else Overlap.merged(len(keys), parts)
        return attrs.evolve(merged, whole=merged.whole and bool(certain.all()))

    async def of_shard(self, keys: PageKeys) -> Overlap:
        """Return which members hold these pages as far as this node's shard knows."""
        parts = []
        table, asker = self._shard.table, self._shard.incarnation
        whole = not self._shard.authority.is_behind(trio.current_time())
        for begin in range(0, max(1, len(keys)), TURN_KEYS):
            if begin:
                await trio.lowlevel.checkpoint()
            some = keys[begin : begin + TURN_KEYS].tobytes()
            holders, flags = table.overlap(some, asker, HOLDERS_MAX)
            parts.append(Overlap(holders, flags & np.uint8(ANYWHERE), whole))
        return Overlap.joined(parts)

    def _targets(
        self, ring: HashRing, owners: Places, left: Places, tried: npt.NDArray[np.bool_]
    ) -> Mapping[int, Places]:
        """Return which of the pages that are left to ask each owner about, and note them as tried.

        The owners that own the most of them, so that few are asked.
        """
        targets: dict[int, Places] = {}
        live = [self._is_alive(node) for node in ring.members]
        while len(left):
            open_to = np.take_along_axis(~tried[left], owners[left], axis=1)
            open_to &= np.array(live)[owners[left]]
            counts = np.bincount(owners[left][open_to], minlength=len(ring))
            if not counts.any():
                break
            best = int(counts.argmax())
            its = ((owners[left] == best) & open_to).any(axis=1)
            targets[ring.members[best]] = left[its]
            tried[left[its], best] = True
            left = left[~its]
        return targets

    def _is_alive(self, node: int) -> bool:
        member = self._member_of(node)
        return member is not None and member.state == ALIVE

    async def _look(self, owner: int, keys: PageKeys, found: dict[int, Overlap]) -> None:
        """Ask one owner, which may not answer."""
        question = RequestOverlap(0, keys.tobytes(), shard_only=True)
        told = await self._broker.ask(owner, question, ANSWER_S)
        if told is not None:
            found[owner] = overlap_of(told, len(keys))
