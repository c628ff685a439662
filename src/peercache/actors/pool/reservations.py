"""Reservations: which client may be writing where, and how each reservation ended.

A reservation is named by its client and the client's own sequence number. It ends once: by commit,
abort, the client's word that it is over, or the exit of the client's process. There is no clock
here, because a client that was paused for an hour may still be writing.

Messages come twice and late, so what has ended is remembered: the last outcomes of each client with
what they said, everything older by one number below which nothing new begins.
"""

from __future__ import annotations

from typing import Final, final

import attrs

from peercache.actors.pool.size_classes import Slot
from peercache.model.keys import KEY_BYTES
from peercache.wire.messages.pool import ABORTED, COMMITTED, REFUSED_FULL, RESERVED

ENDED_MAX: Final = 64
"""Outcomes remembered per client: far more than the calls it can have waiting for an answer."""

GONE_MAX: Final = 4096
"""Exited clients remembered, so that what they had sent before cannot reserve anything."""

_RESERVED = bytes((RESERVED,))
_ABORT_THE_REST = bytes.maketrans(bytes((RESERVED,)), bytes((ABORTED,)))
_NO_SLOT_AGAIN = bytes.maketrans(bytes((COMMITTED, ABORTED)), bytes((REFUSED_FULL, REFUSED_FULL)))


@final
@attrs.frozen(eq=False)
class Reservation:
    """What one Reserve was granted.

    keys, lengths: as asked, packed (n × 16 and n × 8 bytes); no keys for slots ahead.
    states:        as granted, n bytes; offsets: n × u64, 0 where not reserved.
    slots:         n, None where not reserved; granules: their sum.
    mirrored_at:   when slots for mirrored pages were asked for; None: the pages are the client's.
    """

    namespace: int
    keys: bytes
    lengths: bytes
    states: bytes
    offsets: bytes
    slots: tuple[Slot | None, ...]
    granules: int
    mirrored_at: float | None = None

    @property
    def is_ahead(self) -> bool:
        """Return whether its pages have no names yet."""
        return not self.keys

    def fits(self, count: int, keys: bytes) -> bool:
        """Return whether a Commit of `count` pages speaks of each, and names what has no name."""
        if self.is_ahead:
            return 0 < count <= len(self.slots) and len(keys) == count * KEY_BYTES
        return count == len(self.slots) and not keys


@final
@attrs.frozen
class Ended:
    """How a reservation ended: the state of each page of `keys`."""

    keys: bytes
    states: bytes

    def states_if_asked_again(self, count: int) -> bytes:
        """Return what a late duplicate of the Reserve is told: never a slot."""
        if len(self.states) != count:
            return bytes((REFUSED_FULL,)) * count
        return self.states.translate(_NO_SLOT_AGAIN)


@final
@attrs.define(eq=False)
class _Client:
    open: dict[int, Reservation] = attrs.field(factory=dict)
    ended: dict[int, Ended] = attrs.field(factory=dict)
    closed_up_to: int = 0
    """Up to here every sequence that is not open, ended or awaited is over and forgotten."""
    awaited: dict[int, None] = attrs.field(factory=dict)
    """Sequences that the client has listed and we have not seen: their Reserve may yet arrive."""
    granules: int = 0
    ahead_granules: int = 0
    untold: dict[int, None] = attrs.field(factory=dict)
    """Reservations made ahead that the answer to its next Commit tells of."""


@final
@attrs.define(eq=False)
class Reservations:
    """The reservations of all clients of one pool."""

    open_count: int = 0
    granules: int = 0
    """Granules reserved by all clients."""
    ahead_granules: int = 0
    """Those of them that are reserved ahead."""
    ahead_count: int = 0
    """Open reservations made ahead."""
    _clients: dict[int, _Client] = attrs.field(factory=dict)
    _gone: dict[int, None] = attrs.field(factory=dict)

    @property
    def client_count(self) -> int:
        """Return the number of clients that have reserved something and have not exited."""
        return len(self._clients)

    def granules_of(self, client: int) -> int:
        """Return the granules a client has reserved and neither committed nor given back.

        Slots ahead have a bound of their own: else they would take room from pages that need it.
        """
        known = self._clients.get(client)
        return known.granules - known.ahead_granules if known else 0

    def is_gone(self, client: int) -> bool:
        """Return whether the client's process has exited (a client id never comes back)."""
        return client in self._gone

    def find(self, client: int, sequence: int) -> Reservation | Ended | None:
        """Return the reservation, or how it ended; None if it never was or is forgotten."""
        known = self._clients.get(client)
        if known is None:
            return None
        return known.open.get(sequence) or known.ended.get(sequence)

    def is_over(self, client: int, sequence: int) -> bool:
        """Return whether a Reserve with this unknown sequence can only be a late duplicate."""
        known = self._clients.get(client)
        return known is not None and (
            sequence <= known.closed_up_to and sequence not in known.awaited
        )

    def open_of(self, client: int) -> list[tuple[int, Reservation]]:
        """Return a client's open reservations, by sequence."""
        known = self._clients.get(client)
        return list(known.open.items()) if known is not None else []

    def begin(self, client: int, sequence: int, reservation: Reservation) -> None:
        """Keep a new reservation; one that holds no slot has ended at once."""
        assert client not in self._gone, f"client {client:016x} is gone"
        known = self._clients.setdefault(client, _Client())
        if not reservation.granules:
            self._remember(known, sequence, _outcome(reservation, reservation.states))
            return
        known.open[sequence] = reservation
        known.awaited.pop(sequence, None)
        known.granules += reservation.granules
        self.granules += reservation.granules
        if reservation.is_ahead:
            known.ahead_granules += reservation.granules
            self.ahead_granules += reservation.granules
            self.ahead_count += 1
        self.open_count += 1

    def name(
        self, client: int, sequence: int, keys: bytes, granules: int
    ) -> tuple[Reservation, list[Slot]]:
        """Name the first pages of an open reservation made ahead, of so many granules.

        Return it with those pages alone, and the slots of the others, which are to be released.
        """
        known = self._clients[client]
        ahead = known.open[sequence]
        assert ahead.is_ahead, f"reservation {sequence} has its names"
        count = len(keys) // KEY_BYTES
        known.untold.pop(sequence, None)
        named = known.open[sequence] = Reservation(
            ahead.namespace,
            keys,
            ahead.lengths[: 8 * count],
            ahead.states[:count],
            ahead.offsets[: 8 * count],
            ahead.slots[:count],
            granules,
        )
        known.ahead_granules -= ahead.granules
        self.ahead_granules -= ahead.granules
        self.ahead_count -= 1
        known.granules -= ahead.granules - granules
        self.granules -= ahead.granules - granules
        return named, [slot for slot in ahead.slots[count:] if slot is not None]

    def hold_back(self, client: int, sequence: int) -> bool:
        """Return whether a client that has other slots ahead is told of these with its next Commit.

        One message less: it needs them only after the others. The answer to a Commit names no
        states, so only what has a slot for every page is told with it: the offset of a page without
        one would be that of another page.
        """
        known = self._clients[client]
        others = [s for s, r in known.open.items() if r.is_ahead and s not in known.untold]
        is_whole = sequence in others and not known.open[sequence].states.strip(_RESERVED)
        is_needed_later = is_whole and len(others) > 1
        if is_needed_later:
            known.untold[sequence] = None
        return is_needed_later

    def tell(self, client: int) -> tuple[int, bytes]:
        """Return a reservation that was held back, and its offsets; 0 and b"" without one."""
        known = self._clients[client]
        if not known.untold:
            return 0, b""
        sequence = next(iter(known.untold))
        del known.untold[sequence]
        return sequence, known.open[sequence].offsets

    def end(self, client: int, sequence: int, states: bytes | None = None) -> Reservation | None:
        """End a reservation and return it, if it is open; without `states` nothing came of it.

        Ending one that never was is remembered too: its Reserve may come later than its end.
        """
        known = self._clients.get(client)
        if known is None:
            return None
        reservation = known.open.pop(sequence, None)
        if reservation is not None:
            known.granules -= reservation.granules
            self.granules -= reservation.granules
            if reservation.is_ahead:
                known.ahead_granules -= reservation.granules
                self.ahead_granules -= reservation.granules
                self.ahead_count -= 1
            self.open_count -= 1
            known.untold.pop(sequence, None)
            outcome = states or reservation.states.translate(_ABORT_THE_REST)
            self._remember(known, sequence, _outcome(reservation, outcome))
        elif sequence not in known.ended and not self.is_over(client, sequence):
            self._remember(known, sequence, Ended(b"", b""))
        return reservation

    def end_unlisted(
        self, client: int, newest: int, sequences: tuple[int, ...]
    ) -> list[Reservation]:
        """End what the client, at its sequence `newest`, did not list; return it."""
        known = self._clients.get(client)
        if known is None:
            return []
        listed = dict.fromkeys(sequences)
        over = [s for s in known.open if s <= newest and s not in listed]
        ended = [self.end(client, sequence) for sequence in over]
        # A list that was overtaken by a newer one says nothing new about what is awaited.
        if newest >= known.closed_up_to:
            known.closed_up_to = newest
            known.awaited = {
                s: None for s in listed if s not in known.open and s not in known.ended
            }
        return [reservation for reservation in ended if reservation is not None]

    def forget(self, client: int) -> list[Reservation]:
        """Forget a client whose process has exited; return what it had open."""
        self._gone[client] = None
        if len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        known = self._clients.pop(client, None)
        if known is None:
            return []
        self.granules -= known.granules
        self.ahead_granules -= known.ahead_granules
        self.ahead_count -= sum(reservation.is_ahead for reservation in known.open.values())
        self.open_count -= len(known.open)
        return list(known.open.values())

    def check(self) -> None:
        """Assert the sums, in time that does not grow with the reservations."""
        assert self.granules >= self.open_count >= 0, (
            f"{self.open_count} reservations of {self.granules} granules"
        )
        assert 0 <= self.ahead_granules <= self.granules, f"{self.ahead_granules} granules ahead"
        assert 0 <= self.ahead_count <= self.open_count, f"{self.ahead_count} made ahead"

    def _remember(self, known: _Client, sequence: int, outcome: Ended) -> None:
        known.awaited.pop(sequence, None)
        known.ended[sequence] = outcome
        if len(known.ended) > ENDED_MAX:
            oldest = next(iter(known.ended))
            del known.ended[oldest]
            known.closed_up_to = max(known.closed_up_to, oldest)


def _outcome(reservation: Reservation, states: bytes) -> Ended:
    """Return how a reservation ended: of pages without names there is nothing to tell."""
    return Ended(b"", b"") if reservation.is_ahead else Ended(reservation.keys, states)
