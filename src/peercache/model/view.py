"""The view: the members of the cluster, as one node knows them. Pure, immutable, mergeable.

A view maps incarnation → Member. Of two entries for one incarnation, the newer one wins: the higher
counter, then the worse state (alive < suspect < dead < left). This is a join of a semilattice, so
views may be merged in any order, any number of times, and nodes that have merged the same entries
hold equal views. Only a member itself raises its counter, so it can refute every entry about it,
and no other member can. (Das, Gupta, Motivala: SWIM, 2002, §4.2.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, final

import attrs
import numpy as np

from peercache.model.member import SUSPECT, Member

MEMBERS_MAX = 16_384
"""Most entries of a view: at 350 bytes each it still fits one message (8 MiB, 65,536 entries)."""

COUNTER_MAX = 2**63
"""Counters from here on are ignored: no member could refute them in 64 bits."""

NOT_A_HEAD = 255
"""Head rank of a member that no `discovery_addr` names; also the lowest rank."""

DIGEST_BYTES = 16

BUCKETS_MAX = 4096
"""Most buckets of a view's digests: 32 KiB, and four members each in the largest view."""

PRINTS_KEPT = 2 * MEMBERS_MAX
"""Cached fingerprints: a client gets the whole view again for each change."""

_LOW_64: Final = 2**64 - 1

STATE_NAMES = ("alive", "suspect", "dead", "left")
"""Words for a member's state, by its number."""


def is_live(member: Member) -> bool:
    """Return whether a member counts as live: alive or suspect."""
    return member.state <= SUSPECT


def is_newer(one: Member, other: Member) -> bool:
    """Return whether `one` replaces `other`, of the same incarnation.

    After counter and state the rest of the entry decides, so that any two different entries have
    an order and merging stays commutative even if a member describes itself in two ways.
    """
    if (one.counter, one.state) != (other.counter, other.state):
        return (one.counter, one.state) > (other.counter, other.state)
    return _description(one) > _description(other)


@final
@attrs.frozen
class View:
    """What one node knows of the cluster. `merge` and `without` return a new one."""

    _entries: Mapping[int, Member]
    _prints: Mapping[int, int]
    """By incarnation, only of live members."""
    _digest: int

    @classmethod
    def of(cls, members: Iterable[Member] = ()) -> View:
        """Build from entries; of several for one incarnation the newest wins."""
        return cls({}, {}, 0).merge(members)[0]

    def __len__(self) -> int:
        """Return the number of entries, dead and left ones included."""
        return len(self._entries)

    def __contains__(self, incarnation: int) -> bool:
        """Return whether there is an entry, in any state."""
        return incarnation in self._entries

    def get(self, incarnation: int) -> Member | None:
        """Return the entry of an incarnation, or None."""
        return self._entries.get(incarnation)

    def members(self) -> tuple[Member, ...]:
        """Return every entry, by incarnation, so that equal views have equal lists."""
        return tuple([self._entries[incarnation] for incarnation in sorted(self._entries)])

    def live(self) -> tuple[Member, ...]:
        """Return the members that are alive or suspect, by incarnation."""
        return tuple([member for member in self.members() if is_live(member)])

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for views that agree about the live members.

        Dead members and those that have left do not count: each node forgets them by its own clock,
        and that must not make views differ. A member that is dead in one view and alive in another
        makes the views differ.
        """
        return self._digest.to_bytes(DIGEST_BYTES, "little")

    def masters(self, max_masters: int) -> tuple[Member, ...]:
        """Return the active masters: configured heads by rank, then the rest by host name.

        A pure function of the view, so equal views have equal masters, a dead master is replaced
        automatically, and a head that comes back is first again.
        """
        return tuple(sorted(self.live(), key=master_order)[:max_masters])

    def merge(self, others: Iterable[Member]) -> tuple[View, bool]:
        """Return the view with the newer entry of each incarnation, and whether it changed.

        An entry that does not change stays the same object. A full view accepts no new members.
        """
        entries: dict[int, Member] | None = None
        prints: dict[int, int] = {}
        digest = self._digest
        for member in others:
            incarnation = member.incarnation
            mine = (self._entries if entries is None else entries).get(incarnation)
            if member.counter >= COUNTER_MAX or (mine is not None and not is_newer(member, mine)):
                continue
            if mine is None and len(self if entries is None else entries) >= MEMBERS_MAX:
                continue
            if entries is None:
                entries, prints = dict(self._entries), dict(self._prints)
            digest ^= prints.pop(incarnation, 0)
            if is_live(member):
                prints[incarnation] = print_of = _fingerprint(member)
                digest ^= print_of
            entries[incarnation] = member
        return (self, False) if entries is None else (View(entries, prints, digest), True)

    def without(self, incarnations: Iterable[int]) -> View:
        """Return the view without these entries."""
        entries, prints = dict(self._entries), dict(self._prints)
        digest = self._digest
        for incarnation in incarnations:
            entries.pop(incarnation, None)
            digest ^= prints.pop(incarnation, 0)
        return View(entries, prints, digest)

    def bucket_digests(self, count: int = 0) -> bytes:
        """Return digests of live members by bucket, 8 bytes each, to find where two views differ.

        count: a power of two; by default about one bucket per member.
        """
        count = count or min(BUCKETS_MAX, 1 << max(0, len(self._prints) - 1).bit_length())
        buckets = np.fromiter(self._prints, np.uint64, len(self._prints)) & np.uint64(count - 1)
        prints = [value & _LOW_64 for value in self._prints.values()]
        digests = np.zeros(count, "<u8")
        np.bitwise_xor.at(digests, buckets.astype(np.intp), np.array(prints, np.uint64))
        return digests.tobytes()

    def differing(self, theirs: bytes) -> list[Member]:
        """Return the entries, ended ones included, in the buckets with different digests.

        theirs: the `bucket_digests` of another view; [] for invalid bytes.
        """
        count = len(theirs) // 8
        if not 0 < count <= BUCKETS_MAX or count & (count - 1) or len(theirs) % 8:
            return []
        mine = np.frombuffer(self.bucket_digests(count), "<u8")
        differs = (mine != np.frombuffer(theirs, "<u8")).tolist()
        return [member for key, member in self._entries.items() if differs[key & (count - 1)]]


@lru_cache(maxsize=PRINTS_KEPT)
def _fingerprint(member: Member) -> int:
    """Return what a live member adds (XOR) to a digest."""
    text = repr((member.incarnation, member.counter, member.state, _description(member)))
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest(), "little"
    )


def _description(member: Member) -> tuple[int, str, str, str, str, str, str, bytes]:
    return (
        member.head_rank,
        member.host_name,
        member.control,
        member.data,
        member.boot_id,
        member.segment,
        member.name,
        member.nonce,
    )


def master_order(member: Member) -> tuple[int, str, int, str, int]:
    """Return the sort key of live members: the first ones are the masters."""
    # Ports as numbers: 9000 comes before 31998. The incarnation only distinguishes two processes
    # that claim one address, which a correct cluster does not have for long.
    rank = min(member.head_rank, NOT_A_HEAD)
    return (rank, member.host_name, _port(member), member.control, member.incarnation)


def may_replace(masters: Sequence[Member], changed: Iterable[Member | None]) -> bool:
    """Return whether one of these entries is a master, or sorts before the last master."""
    names = {master.incarnation for master in masters}
    last = master_order(masters[-1])
    return any(
        entry.incarnation in names or (is_live(entry) and master_order(entry) < last)
        for entry in changed
        if entry is not None
    )


def _port(member: Member) -> int:
    port = member.control.rpartition(":")[2]
    return int(port) if len(port) <= 5 and port.isascii() and port.isdigit() else 0
