"""The directory tables of this host's nodes, opened and read by a client.

Owns    one opened table a node of this host: opened when a view names the node, closed when no
        view does any more.
Keeps   a table that cannot be read costs a call nothing twice: it stays closed until the next view.
        What is wrong with it is counted, and the client asks the node instead.
Limits  TABLES_MAX tables.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, final

from peercache.errors import PeerCacheError, PeerUnreachable
from peercache.memory.table_reading import TORN, AttachedTable, Unusable
from peercache.model.ids import Incarnation, name_of
from peercache.model.member import Member
from peercache.model.reads import Looked
from peercache.observability.metrics import Metrics
from peercache.paths.steps import ReadTable
from peercache.trust.sharing import Sharing

TABLES_MAX = 64
"""A host runs a handful of nodes; each table has a descriptor and address space of its own."""

NOT_OPENED = "not_opened"
"""The reason for a table that is there, and cannot be opened."""


@final
class Tables:
    """The tables that a client can read. `look` may be called from any thread."""

    def __init__(
        self,
        *,
        boot_id: str,
        shm_dir: str,
        folders: Container[str],
        sharing: Sharing,
        asker: int,
        clock: Callable[[], float],
        metrics: Metrics,
        log: Any,
    ) -> None:
        """Open none yet.

        shm_dir: where nodes of this host keep their tables, as far as this client's own settings
                 say; elsewhere a table lies beside its segment, in one of `folders`.
        asker:   a number of this client's own.
        clock:   CLOCK_MONOTONIC.
        """
        self._boot_id = boot_id
        self._shm_dir = shm_dir
        self._folders = folders
        self._sharing = sharing
        self._asker = asker
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._opened: dict[int, AttachedTable] = {}
        self._addresses: dict[int, str] = {}
        """HOST:PORT of the nodes of this host, for the log."""

    def nodes(self) -> Iterable[int]:
        """Return the nodes whose tables can be read now."""
        return self._opened

    def follow(self, members: Iterable[Member]) -> None:
        """Open the tables of the live members of this host, close those of others. One thread."""
        here = {member.incarnation: member for member in members if member.boot_id == self._boot_id}
        self._addresses = {node: member.control for node, member in here.items()}
        kept = {node: table for node, table in self._opened.items() if node in here}
        gone = [table for node, table in self._opened.items() if node not in here]
        for node, member in here.items():
            if node not in kept and len(kept) < TABLES_MAX:
                table = self._open(member)
                if table is not None:
                    kept[node] = table
        # Replaced, never changed: calls are under way.
        self._opened = kept
        for table in gone:
            table.close()

    def look(self, step: ReadTable) -> Looked | None:
        """Perform a step; None where the table cannot be read now."""
        table = self._opened.get(step.peer)
        if table is None:
            return None
        ring = int.from_bytes(step.ring, "little")
        try:
            return table.look(step.keys, ring, self._clock(), self._asker)
        except Unusable as unusable:
            self._metrics.tables_unusable.labels(unusable.reason).inc()
            if unusable.reason != TORN:
                self._opened = {node: t for node, t in self._opened.items() if node != step.peer}
                table.close()
                self._tell(step.peer, unusable.reason)
            return None

    def removals(self, node: int) -> int:
        """Return how often pages were removed, as a node of this host says; 0 without its table."""
        table = self._opened.get(node)
        return 0 if table is None else table.removals()

    def close(self) -> None:
        """Close every table."""
        self.follow(())

    def _open(self, member: Member) -> AttachedTable | None:
        beside = str(Path(member.segment).parent)
        for folder in dict.fromkeys([beside, self._shm_dir]):
            if folder != self._shm_dir and folder not in self._folders:
                continue
            try:
                return AttachedTable.open(
                    folder, incarnation=Incarnation(member.incarnation), sharing=self._sharing
                )
            except PeerUnreachable:
                continue  # A node of an older version has none.
            except PeerCacheError as error:
                self._metrics.tables_unusable.labels(NOT_OPENED).inc()
                self._tell(member.incarnation, str(error))
                return None
        return None

    def _tell(self, node: int, problem: str) -> None:
        at = self._addresses.get(node, "")
        self._log.warning("client.table_unusable", node=name_of(node), at=at, problem=problem)
