"""Exchange: how much is said to each peer about the view, and which peer is asked next. Pure."""

from __future__ import annotations

from typing import Final, final

from peercache.model.view import MEMBERS_MAX, View

SHARES_PER_BEAT: Final = 4
"""Answers with entries to one peer in one heartbeat: an exchange takes two, a heal three."""

DIFFERING_MAX: Final = 64
"""Peers remembered whose views differ: each is asked in a turn of its own, and says so again."""

BUSY_BEATS: Final = 3
"""Heartbeats between two questions while there are addresses to try: their answers come first."""


@final
class ViewExchange:
    """The bounds of what is said, and the peers whose views are other ones."""

    def __init__(self, *, turn_s: float, heartbeat_s: float) -> None:
        """Ask one peer in `turn_s`."""
        self._turn_s = turn_s
        self._busy_s = BUSY_BEATS * heartbeat_s
        self._shares: dict[int, int] = {}
        self._differing: dict[int, bytes] = {}  # the next to be asked first
        self._asked_at = float("-inf")

    def __len__(self) -> int:
        """Return with how many peers something was shared in this heartbeat."""
        return len(self._shares)

    def may_share(self, peer: int) -> bool:
        """Count an answer to a peer; False if it has had enough in this heartbeat."""
        sent = self._shares.get(peer, 0)
        if sent >= SHARES_PER_BEAT or len(self._shares) >= MEMBERS_MAX:
            return False
        self._shares[peer] = sent + 1
        return True

    def next_beat(self) -> None:
        """Begin to count anew."""
        self._shares.clear()

    def differs(self, peer: int, digest: bytes) -> None:
        """Note that a peer's view is another one, as of its last message."""
        self._differing.pop(peer, None)
        if len(self._differing) < DIFFERING_MAX:
            self._differing[peer] = digest

    def next_peer(self, now: float, *, own: bytes, members: View, is_busy: bool) -> int | None:
        """Return the peer to ask in what its view differs, or None in this turn.

        own: this view's digest: what the last answer brought may be all.
        """
        if now - self._asked_at < (self._busy_s if is_busy else self._turn_s):
            return None
        while self._differing:
            peer = next(iter(self._differing))
            if self._differing.pop(peer) != own and peer in members:
                self._asked_at = now
                return peer
        return None
