"""What followers are notified is what a node holds: notes it at each change that is told last.

An actor knows nothing of it. `sims.following` compares an index with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from peercache.actors.effects import Effect, Send
from peercache.actors.publisher.actor import Publisher
from peercache.actors.publisher.waiters import changes_of
from peercache.wire.messages.directory import ReportChanges
from sims.memory import Truth
from sims.trace import Violation


def note_told(publisher: Publisher, effects: Sequence[Effect], truth: Truth) -> None:
    """Note what a node holds at the change that it tells last; a number stands for one state."""
    for effect in effects:
        told = effect.message if isinstance(effect, Send) else None
        if isinstance(told, ReportChanges) and told.after == publisher._following._last:
            held = _held(publisher)
            if truth.followed.setdefault((told.incarnation, told.after), held) != held:
                raise Violation("followed", f"change {told.after} stands for two states")


def _held(publisher: Publisher) -> dict[bytes, int]:
    """Return the tier of each page that the directory is told of."""
    table = publisher._table
    changes = changes_of(table.records[: len(table.live)][table.live])
    return dict(zip(changes["key"].tolist(), changes["tier"].tolist(), strict=True))
