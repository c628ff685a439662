"""The view: the members of the cluster, as one node knows them. Pure, immutable, mergeable.

A view maps incarnation → Member. Of two entries for one incarnation the newer stays: the higher
counter, then the worse state (alive < suspect < dead < left). That is a join of a semilattice, so
views may be merged in any order, any number of times, and nodes that have merged the same entries
hold equal views. Only a member itself raises its counter, so it can refute every entry about it,
and no other member can. (Das, Gupta, Motivala: SWIM, 2002, §4.2.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import final

import attrs

from peercache.model.member import SUSPECT, Member

MEMBERS_MAX = 16_384
"""Most entries of a view: at 350 bytes each it still fits one message (8 MiB, 65,536 entries)."""

COUNTER_MAX = 2**63
"""Counters from here on are ignored: no member could refute them in the 64 bits of the wire."""

NOT_A_HEAD = 255
"""Head rank of a member that no `discovery_addr` names; also the lowest rank there is."""

DIGEST_BYTES = 16

STATE_NAMES = ("alive", "suspect", "dead", "left")
"""Words for a member's state, by its number."""


def is_live(member: Member) -> bool:
    """Return whether a member counts as there: alive, or only suspected."""
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
    """What one node knows of the cluster. `merge` and `without` return another one."""

    _entries: Mapping[int, Member]
    _digest: int

    @classmethod
    def of(cls, members: Iterable[Member] = ()) -> View:
        """Build from entries; of several for one incarnation the newest stays."""
        return cls({}, 0).merge(members)[0]

    def __len__(self) -> int:
        """Return the number of entries, dead and left ones included."""
        return len(self._entries)

    def __contains__(self, incarnation: int) -> bool:
        """Return whether there is an entry, in whatever state."""
        return incarnation in self._entries

    def get(self, incarnation: int) -> Member | None:
        """Return the entry of an incarnation, or None."""
        return self._entries.get(incarnation)

    def members(self) -> tuple[Member, ...]:
        """Return every entry, by incarnation, so that equal views list equally."""
        return tuple([self._entries[incarnation] for incarnation in sorted(self._entries)])

    def live(self) -> tuple[Member, ...]:
        """Return the members that are alive or suspect, by incarnation."""
        return tuple([member for member in self.members() if is_live(member)])

    def digest(self) -> bytes:
        """Return 16 bytes that are equal for views that agree about the living.

        The dead and the left do not count: each node forgets them by its own clock, and that must
        not make views differ. A member that is dead in one view and alive in
        another makes the views differ.
        """
        return self._digest.to_bytes(DIGEST_BYTES, "little")

    def masters(self, max_masters: int) -> tuple[Member, ...]:
        """Return the active masters: configured heads by rank, then the rest by host name.

        A pure function of the view, so equal views name equal masters, a dead one is replaced by
        itself, and a head that comes back is first again.
        """
        return tuple(sorted(self.live(), key=_master_order)[:max_masters])

    def merge(self, others: Iterable[Member]) -> tuple[View, bool]:
        """Return the view with the newer entry of each incarnation, and whether it changed.

        An entry that does not change stays the same object. A full view takes no new members.
        """
        entries: dict[int, Member] | None = None
        digest = self._digest
        for member in others:
            mine = (self._entries if entries is None else entries).get(member.incarnation)
            if member.counter >= COUNTER_MAX or (mine is not None and not is_newer(member, mine)):
                continue
            if entries is None:
                entries = dict(self._entries)
            if mine is None and len(entries) >= MEMBERS_MAX:
                continue
            digest ^= _fingerprint(member) ^ (0 if mine is None else _fingerprint(mine))
            entries[member.incarnation] = member
        if entries is None or entries == self._entries:
            return self, False
        return View(entries, digest), True

    def without(self, incarnations: Iterable[int]) -> View:
        """Return the view without these entries."""
        entries = dict(self._entries)
        digest = self._digest
        for incarnation in incarnations:
            gone = entries.pop(incarnation, None)
            digest ^= 0 if gone is None else _fingerprint(gone)
        return View(entries, digest)

    def adds_to(self, theirs: Mapping[int, Member]) -> bool:
        """Return whether this view has a live member that theirs lacks, or a newer entry."""
        for incarnation, mine in self._entries.items():
            named = theirs.get(incarnation)
            if is_live(mine) if named is None else is_newer(mine, named):
                return True
        return False


def _fingerprint(member: Member) -> int:
    """Return what a member adds (XOR) to a digest: nothing once it is dead or has left."""
    if not is_live(member):
        return 0
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


def _master_order(member: Member) -> tuple[int, str, int, str, int]:
    # Ports as numbers: 9000 comes before 31998. The incarnation only parts two processes that
    # claim one address, which a correct cluster does not have for long.
    rank = min(member.head_rank, NOT_A_HEAD)
    return (rank, member.host_name, _port(member), member.control, member.incarnation)


def _port(member: Member) -> int:
    port = member.control.rpartition(":")[2]
    return int(port) if len(port) <= 5 and port.isascii() and port.isdigit() else 0
