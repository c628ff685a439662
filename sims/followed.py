"""Followers must be sent what a node holds: records the state at each last sent change.

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


def note_changes(publisher: Publisher, effects: Sequence[Effect], truth: Truth) -> None:
    """Record what a node holds at the last change that it sends; a number identifies one state."""
    for effect in effects:
        reported = effect.message if isinstance(effect, Send) else None
        if isinstance(reported, ReportChanges) and reported.after == publisher._following._last:
            held = _held(publisher)
            if truth.followed.setdefault((reported.incarnation, reported.after), held) != held:
                raise Violation("followed", f"change {reported.after} stands for two states")


def _held(publisher: Publisher) -> dict[bytes, int]:
    """Return the tier of each page that is reported to the directory."""
    table = publisher._table
    changes = changes_of(table.records[: len(table.live)][table.live])
    return dict(zip(changes["key"].tolist(), changes["tier"].tolist(), strict=True))
