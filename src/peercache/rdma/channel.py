"""A channel of a client: one queue pair with its own completion queue, connected to one node.

Keeps   it is used by one thread at a time. After an error it is destroyed, never used again.
        What pyverbs allocates for scatter entries is freed exactly once: it never does so itself,
        and a second time would corrupt memory.
"""

from __future__ import annotations

from typing import Any, final

from peercache.rdma.completions import Completions
from peercache.rdma.plan import PORTION_WORK_MAX, Limits, Portion, Published
from peercache.rdma.queue_pair import End, Sizes
from peercache.rdma.rail import Rail

PORTIONS_AT_ONCE = 2
"""One is under way while the next waits behind it, so that the pipe never runs dry."""

PIECES_MAX = 16
"""Scatter entries of a READ: every entry is room in each work request of the queue."""


@final
class Channel:
    """One connection over one rail. `number` is ours, and unique for the client."""

    def __init__(self, rail: Rail, number: int, *, psn: int) -> None:
        """Make its parts. Raises verbs.Error or OSError."""
        abilities = rail.abilities
        self.rail = rail
        self.number = number
        self.published: Published | None = None
        self.asked_at = float("-inf")
        self._psn = psn
        work = min(PORTIONS_AT_ONCE * PORTION_WORK_MAX, abilities.work)
        sizes = Sizes(work=work, pieces=min(PIECES_MAX, abilities.pieces))
        self.limits = Limits(pieces=sizes.pieces, work=work // PORTIONS_AT_ONCE)
        self._completions = Completions(rail.verbs, rail.context, work + 1)
        try:
            self._pair = rail.queue_pair(self._completions.queue, sizes)
        except BaseException:
            self._completions.close()
            raise
        self._entries: list[Any] = [rail.verbs.SGE(0, 0, 0) for _ in range(sizes.pieces)]
        self._signaled = int(rail.verbs.enums.IBV_SEND_SIGNALED)
        self._fence = int(rail.verbs.enums.IBV_SEND_FENCE)
        self.descriptor = self._completions.descriptor
        self.take = self._completions.take
        self.arm = self._completions.arm
        self.acknowledge = self._completions.acknowledge

    def end(self) -> End:
        """Return what the node needs to know of this end."""
        return self.rail.end(self._pair, self._psn)

    def connect(self, other: End, *, mtu: int, reads_at_once: int, published: Published) -> None:
        """Connect to the node's end. Raises verbs.Error."""
        path = self.rail.path(mtu=mtu, reads_at_once=reads_at_once)
        self._pair.connect(path, other, psn=self._psn)
        self.published = published

    def post(self, portion: Portion, number: int, *, shift: int, words_at: int, key: int) -> None:
        """Post a whole portion with one doorbell: its READs, then its words behind a fence.

        number:  what its completion will be called.
        shift:   added to every destination address.
        words_at, key: where its words go, and what opens that memory.
        """
        self._chain(number, portion, shift, words_at=words_at, key=key)

    def post_bytes(self, portion: Portion, number: int, *, shift: int) -> None:
        """Post only the READs of a portion."""
        self._chain(number, portion, shift)

    def post_words(self, portion: Portion, number: int, *, words_at: int, key: int) -> None:
        """Post only the words of a portion, whose READs have completed."""
        self._chain(number, portion, 0, words_at=words_at, key=key, with_bytes=False)

    def close(self) -> None:
        """Destroy everything; when this returns, nothing of it writes to memory any more."""
        if not self.rail.is_ours():
            return
        entries, self._entries = self._entries, []
        try:
            self._pair.destroy()
        finally:
            self._completions.close()
            for entry in entries:
                entry.close()

    def _chain(
        self,
        number: int,
        portion: Portion,
        shift: int,
        *,
        words_at: int | None = None,
        key: int = 0,
        with_bytes: bool = True,
    ) -> None:
        pair = self._pair.posting
        words = portion.words if words_at is not None else None
        has_words = words is not None and bool(words.remote)
        pair.wr_start()
        try:
            pair.wr_id = number
            pair.wr_flags = 0
            if with_bytes:
                self._add_reads(pair, portion, shift, is_last=not has_words)
            if words is not None and has_words:
                self._add_words(pair, words, words_at or 0, key)
        except BaseException:
            pair.wr_abort()
            raise
        pair.wr_complete()

    def _add_reads(self, pair: Any, portion: Portion, shift: int, *, is_last: bool) -> None:
        entry, read, set_entry = self._entries[0], pair.wr_rdma_read, pair.wr_set_sge
        pieces = zip(portion.addresses, portion.sizes, portion.local_keys, strict=True)
        left = len(portion.remote)
        known_key = -1
        for remote, key, count in zip(portion.remote, portion.keys, portion.pieces, strict=True):
            left -= 1
            if is_last and not left:
                pair.wr_flags = self._signaled
            read(key, remote)
            if count == 1:
                address, size, local_key = next(pieces)
                entry.addr, entry.length = address + shift, size
                if local_key != known_key:
                    entry.lkey = known_key = local_key
                set_entry(entry)
                continue
            for other in self._entries[:count]:
                address, size, local_key = next(pieces)
                other.addr, other.length, other.lkey = address + shift, size, local_key
            known_key = int(entry.lkey)
            pair.wr_set_sge_list(count, self._entries)

    def _add_words(self, pair: Any, words: Any, words_at: int, key: int) -> None:
        entry, left = self._entries[0], len(words.remote)
        entry.lkey = key
        # Only the first waits for the READs before it; what follows is begun after it.
        flags = self._fence
        rows = zip(words.remote, words.keys, words.at, words.lengths, strict=True)
        for remote, remote_key, at, length in rows:
            left -= 1
            pair.wr_flags = flags if left else flags | self._signaled
            flags = 0
            pair.wr_rdma_read(remote_key, remote)
            entry.addr, entry.length = words_at + at, length
            pair.wr_set_sge(entry)
