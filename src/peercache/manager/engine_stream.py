"""The events of one engine, followed without a gap: the blocks of its GPU, or that they are
unknown.

vLLM and SGLang publish numbered batches of events. A reader that joins late, or misses a batch,
does not know the blocks of the engine until the engine sends the events again or clears its cache.

Takes   connects and disconnects of the publisher; batches with their numbers.
Sends   to `GpuBlocks` which blocks were stored and removed, and when and why an engine is unknown.
Keeps   no batch is applied twice, or before its predecessors. An event that cannot be read makes
        the engine unknown: it may have removed a block.

Needs the extra `events`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from peercache.errors import RemoteProtocolError
from peercache.events.blocks import GPU, AllBlocksCleared, BlockRemoved, BlockStored, decode
from peercache.manager.gpu_blocks import GpuBlocks

Batch: TypeAlias = tuple[int, bytes]
"""The number of a batch, and its bytes."""

Replay: TypeAlias = Callable[[int], Sequence[Batch] | None]
"""Returns the batches from a number on that the engine still keeps; None: no answer."""

AWAY = "it cannot be reached"

JOINED_LATE = (
    "it was followed from after its beginning: known once it clears its cache or starts again; "
    "with its replay endpoint in engine_events, at once"
)


@final
class EngineStream:
    """Follows the events of one engine."""

    def __init__(self, name: str, blocks: GpuBlocks, *, replay: Replay | None = None) -> None:
        """Add the engine to `blocks`."""
        self._name = name
        self._blocks = blocks
        self._replay = replay
        self._next: int | None = None
        """The number of the next batch; None before the first one of a connection."""
        self._replayed = 0
        """Batches before this number came by a replay: they may come again."""

    def connected(self) -> None:
        """Start with a publisher, which may be a new process."""
        self._next, self._replayed = None, 0
        again = self._replay(0) if self._replay is not None else None
        if again is not None and not again:
            # It has published nothing yet: otherwise it would still keep its last batch.
            self._blocks.begin(self._name)
            self._next = 0
        elif again is None or not self._take_again(0, again):
            self._blocks.lose(self._name, JOINED_LATE)
            self._next = None

    def disconnected(self) -> None:
        """Forget the events of a publisher that is gone: its GPU's memory may be gone, too."""
        self._next = None
        self._blocks.lose(self._name, AWAY, is_away=True)

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch; request earlier ones that were missed."""
        if self._next is not None and number < self._next:
            if number < self._replayed:
                return
            # A new process starts its numbers again.
            self._next, self._replayed = None, 0
        if self._next is None:
            if number == 0:
                self._blocks.begin(self._name)
            elif not self._catch_up(0, number):
                self._blocks.lose(self._name, JOINED_LATE)
        elif number > self._next and self._blocks.is_known(self._name):
            first = self._next
            if not self._catch_up(first, number):
                missed = f"its events {first} to {number - 1} were missed"
                self._blocks.lose(self._name, f"{missed}: known once it clears its cache")
        if self._next is None or number >= self._next:
            self._next = number + 1
            self._apply(payload)

    def _catch_up(self, first: int, until: int) -> bool:
        """Have the batches from `first` to before `until` sent again; return whether all
        arrived.
        """
        again = self._replay(first) if self._replay is not None else None
        return again is not None and self._take_again(first, again) and (self._next or 0) >= until

    def _take_again(self, first: int, again: Sequence[Batch]) -> bool:
        """Apply batches that were sent again; return whether the engine's blocks are known
        afterwards.

        They begin with `first`, or one of them clears the cache: publishers that number their
        batches by the clock begin with that.
        """
        if not again:
            return False
        is_whole = again[0][0] == first
        if not is_whole:
            self._blocks.lose(self._name, JOINED_LATE)
        elif first == 0:
            self._blocks.begin(self._name)
        for at, (number, payload) in enumerate(again):
            if number != again[0][0] + at:
                break
            self._apply(payload)
            self._next = self._replayed = number + 1
        return is_whole or self._blocks.is_known(self._name)

    def _apply(self, payload: bytes) -> None:
        try:
            batch = decode(payload)
        except RemoteProtocolError as error:
            self._blocks.lose(self._name, f"a batch of its events cannot be read: {error.what}")
            return
        if batch.skipped:
            # It may have removed a block.
            self._blocks.lose(self._name, f"an event of it cannot be read: {batch.skipped[0]}")
        name, blocks = self._name, self._blocks
        for event in batch.events:
            match event:
                case AllBlocksCleared():
                    blocks.clear(name)
                case BlockStored() | BlockRemoved() if event.medium != GPU:
                    continue
                case BlockStored():
                    blocks.store(name, event)
                case BlockRemoved():
                    blocks.remove(name, event.hashes, event.group)
        blocks.settle(name)
