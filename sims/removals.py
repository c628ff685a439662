"""The guarantee of a removal: afterwards no get finds pages that it has removed at every member."""

from __future__ import annotations

import math

import attrs

from peercache.actors.origin import Origin
from peercache.actors.removal.actor import Removal
from peercache.model.keys import split_keys
from peercache.wire.messages.pool import Clear, Remove, Removed
from sims.trace import Violation


@attrs.define(eq=False)
class Stay:
    """The life of one page in one node's memory.

    is_given: it ended because another node had taken the page.
    """

    incarnation: int
    version: int
    since: float
    until: float = math.inf
    is_given: bool = False


@attrs.define(eq=False)
class Seen:
    """One removal. keys: None for all; answered: the members that have reported their removal."""

    started: float
    keys: frozenset[bytes] | None
    answered: set[int] = attrs.field(factory=set)
    ended: float = math.inf


@attrs.define(eq=False)
class Removals:
    """Every completed removal of a run, and those in progress."""

    complete: list[Seen] = attrs.field(factory=list)
    _under_way: dict[Removal, Seen] = attrs.field(factory=dict)

    def look(
        self,
        sender: Origin,
        message: object,
        before: dict[int, Removal],
        after: dict[int, Removal],
        now: float,
    ) -> None:
        """Record how a node's removal actor has handled a message; its removals by number."""
        for number, removal in after.items():
            # A Retain removes nothing.
            if number not in before and removal.states is None:
                assert isinstance(message, (Remove, Clear)), message
                keys = frozenset(split_keys(message.keys)) if isinstance(message, Remove) else None
                self._under_way[removal] = Seen(now, keys)
        if isinstance(message, Removed) and message.request in before:
            seen = self._under_way.get(before[message.request])
            if seen is not None:
                seen.answered.add(sender.identity)
        for number, removal in before.items():
            if number not in after:
                seen = self._under_way.pop(removal, None)
                if seen is not None and not removal.waiting:
                    seen.ended = now
                    self.complete.append(seen)

    def judge(self, key: bytes, stays: list[Stay], now: float) -> None:
        """Fail if the last of these stays, of one version, began after the version was removed.

        Only if every node that had the version has answered: others may still have it.
        """
        came = stays[-1]
        for seen in self.complete:
            if seen.ended > now or (seen.keys is not None and key not in seen.keys):
                continue
            had = [stay for stay in stays[:-1] if stay.until > seen.started]
            if (
                had
                and stays[0].since < seen.started
                and came.incarnation in seen.answered
                and all(stay.incarnation in seen.answered for stay in had)
            ):
                detail = f"version {came.version} of {key.hex()}, removed at {seen.started:.6f}"
                raise Violation("came-back", f"{detail}, is at {came.incarnation:016x} again")
