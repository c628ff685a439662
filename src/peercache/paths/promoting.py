"""Promoting: the questions to holders that have pages on disk, and the meaning of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import attrs
import numpy as np
import numpy.typing as npt

from peercache.model.keys import PageKeys
from peercache.model.records import RECORD, RESIDENT, Records
from peercache.paths.searching import Mask, Whereabouts
from peercache.wire.messages.declared import Message
from peercache.wire.messages.pool import LOST, PROMOTED, Promote, Promoted

PROMOTE_KEYS_MAX = 2048
"""Keys of one question; the answer has as many records at most: 114 KiB."""

WISHES_MAX = 1024
"""Keys that one `exists` has one holder load ahead: a prompt of that many pages."""

Places = npt.NDArray[np.intp]


@attrs.define(eq=False)
class Found:
    """Pages of a batch with their records; fresh: whether the record came in this call."""

    places: Places
    records: Records
    fresh: Mask

    def of(self, chosen: Places | Mask) -> Found:
        """Return the chosen ones."""
        return Found(self.places[chosen], self.records[chosen], self.fresh[chosen])


@final
class Awaited:
    """The pages of a batch that wait for their holders' disks."""

    def __init__(self, places: Places, records: Records, fresh: Mask) -> None:
        """Await the pages at these places of a batch, by records that say "on disk"."""
        self._found = Found(places, records, fresh)
        self._asked: list[Places] = []

    @property
    def places(self) -> Places:
        """Where pages are missing still."""
        return self._found.places

    def holders(self) -> list[int]:
        """Return the holders of the missing pages, in the order of their first pages."""
        return list(dict.fromkeys(self._found.records["holder"].tolist()))

    def give_up(self, holder: int) -> Places:
        """Await nothing more of a holder; return the places of its pages."""
        of_holder = self._found.records["holder"] == holder
        left: Places = self._found.places[of_holder]
        self._found = self._found.of(~of_holder)
        return left

    def questions(self, timeout_s: float) -> tuple[tuple[int, Promote], ...]:
        """Return one question for each holder, the first pages first."""
        records = self._found.records
        self._asked = [
            np.flatnonzero(records["holder"] == holder)[:PROMOTE_KEYS_MAX]
            for holder in self.holders()
        ]
        return tuple(
            (int(records["holder"][group[0]]), Promote(0, _packed(records, group), timeout_s))
            for group in self._asked
        )

    def take(self, answers: Sequence[Message | None]) -> tuple[Found, Found]:
        """Take the answers; return the pages that can be read now, and those that are lost.

        All others stay awaited.
        """
        done: Mask = np.zeros(len(self.places), np.bool_)
        lost: Mask = np.zeros(len(self.places), np.bool_)
        records = self._found.records.copy()
        for group, answer in zip(self._asked, answers, strict=True):
            if answer is None:
                continue
            if not isinstance(answer, Promoted) or len(answer.states) != len(group):
                # Refused, or nonsense: asking again would not end.
                lost[group] = True
                continue
            states = np.frombuffer(answer.states, np.uint8)
            lost[group[states == LOST]] = True
            told = np.frombuffer(answer.records, RECORD)
            by_key = dict(zip(told["key"].tolist(), told, strict=True))
            for at in group[states == PROMOTED].tolist():
                record = by_key.get(records["key"][at].tobytes())
                if record is not None and _is_same(record, records[at]):
                    records[at] = record
                    done[at] = True
                else:
                    lost[at] = True
        fresh = np.ones(len(done), np.bool_)
        arrived = Found(self._found.places, records, fresh).of(done)
        gone = self._found.of(lost)
        self._found = self._found.of(~done & ~lost)
        return arrived, gone


def wishes(keys: PageKeys, where: Whereabouts) -> tuple[tuple[int, Promote], ...]:
    """Return the questions that have holders load the known leading pages from their disks."""
    known = where.known
    lead = len(known) if known.all() else int(np.argmin(known))
    records = where.records[:lead]
    on_disk = np.flatnonzero((records["flags"] & RESIDENT) == 0)
    holders = records["holder"][on_disk]
    return tuple(
        (holder, Promote(0, keys[on_disk[holders == holder][:WISHES_MAX]].tobytes(), 0.0))
        for holder in dict.fromkeys(holders.tolist())
    )


def _packed(records: Records, group: Places) -> bytes:
    return records["key"][group].tobytes()


def _is_same(told: np.void, believed: np.void) -> bool:
    """Return whether a record is of the page asked for: that holder, that length, in memory."""
    return bool(
        told["holder"] == believed["holder"]
        and told["length"] == believed["length"]
        and told["flags"] & RESIDENT
    )
