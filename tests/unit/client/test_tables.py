"""The tables that a client opens: whose, where, how many, and what becomes of those that fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from peercache.actors.directory.table import DirectoryTable
from peercache.client.bridge import NOT_OPENED, TABLES_MAX, Tables
from peercache.memory.layout import table_name
from peercache.memory.published import TableFile
from peercache.memory.table_reading import TORN, AttachedTable
from peercache.model.ids import Incarnation
from peercache.model.member import ALIVE, Member
from peercache.observability.metrics import Metrics
from peercache.paths.steps import ReadTable
from peercache.trust.sharing import Sharing
from sims.tables import header_of
from tests.descriptors import open_files
from tests.unit.actors.record_cluster import key_of, records_of

HERE, ELSEWHERE = "this host", "another host"
NODE = 0xC11E
NOW_S = 1000.0
RING = bytes(range(1, 9))


class Said(list[tuple[str, str]]):
    """A log: the events that are reported, and the problem that each names."""

    def warning(self, event: str, *, node: str, at: str, problem: str) -> None:
        """Take one."""
        assert at == "h:1"
        assert node == f"{NODE:016x}"
        self.append((event, problem))


@attrs.define
class Host:
    """A host's nodes with tables, and one client's view of them."""

    shm_dir: Path
    segments: Path
    metrics: Metrics
    tables: Tables
    said: Said
    made: list[tuple[TableFile, DirectoryTable]] = attrs.field(factory=list)

    def start(self, node: int, folder: Path | None = None) -> Member:
        """Start a node that has one page, key 1; its table is next to its segment."""
        folder = folder or self.segments
        file = TableFile.create(folder, Incarnation(node), None)
        table = DirectoryTable(
            bytes(16), answer_max=8, rows_max=1000, file=file.file, incarnation=node
        )
        table.begin(node, is_served=True)
        table.put(0, records_of(node, [1], [10]).tobytes())
        table.grant(RING)
        table.tick(NOW_S)
        self.made.append((file, table))
        return self.member(node)

    def member(self, node: int, boot_id: str = HERE) -> Member:
        return Member(
            node, 1, ALIVE, 255, "h", "h:1", "h:2", boot_id, str(self.segments / f"{node}")
        )

    def look(self, node: int, *names: int) -> tuple[int, bool] | None:
        """Return how many records are found, and whether the rest is absent for certain."""
        keys = b"".join(map(key_of, names))
        looked = self.tables.look(ReadTable(node, keys, RING))
        return None if looked is None else (len(looked.places), looked.is_final)

    def unusable(self) -> dict[str, float]:
        """Return how often a table was not used, by reason."""
        return {
            sample.labels["reason"]: sample.value
            for metric in self.metrics.tables_unusable.collect()
            for sample in metric.samples
            if sample.name.endswith("_total")
        }


@pytest.fixture
def host() -> Iterator[Host]:
    folders = [Path(tempfile.mkdtemp(dir="/dev/shm")) for _ in range(2)]
    metrics, said = Metrics(), Said()
    tables = Tables(
        boot_id=HERE,
        shm_dir=str(folders[0]),
        folders={str(folders[1])},
        sharing=Sharing.of(),
        asker=0,
        clock=lambda: NOW_S,
        metrics=metrics,
        log=said,
    )
    made = Host(folders[0], folders[1], metrics, tables, said)
    yield made
    tables.close()
    for file, _ in made.made:
        file.close()
    for folder in folders:
        shutil.rmtree(folder)


def descriptors() -> int:
    return str(open_files()).count(table_name(NODE)[:-4])


def test_tables_of_this_hosts_live_members_are_read(host: Host) -> None:
    """Next to a segment, in a folder that nodes of this host are known to use, or in shm_dir."""
    members = [host.start(NODE), host.start(NODE + 1, host.shm_dir)]

    host.tables.follow(members)

    assert sorted(host.tables.nodes()) == [NODE, NODE + 1]
    assert [host.look(node, 1, 2) for node in (NODE, NODE + 1, 7)] == [(1, True), (1, True), None]
    assert host.unusable() == {}


def test_a_table_on_another_host_is_not_looked_for(host: Host) -> None:
    """A file of its name here would be another node's."""
    host.tables.follow([attrs.evolve(host.start(NODE), boot_id=ELSEWHERE)])

    assert list(host.tables.nodes()) == []


def test_a_folder_that_no_node_of_this_host_is_known_to_use_is_not_looked_into(
    host: Host, tmp_path: Path
) -> None:
    """A view must not make a client open files anywhere."""
    host.start(NODE, tmp_path)
    member = attrs.evolve(host.member(NODE), segment=str(tmp_path / "segment"))

    host.tables.follow([member])

    assert list(host.tables.nodes()) == []
    assert host.unusable() == {}


def test_a_member_that_is_gone_leaves_no_descriptor(host: Host) -> None:
    """One view after the other, and the end."""
    members = [host.start(NODE), host.start(NODE + 1)]
    before = descriptors()
    host.tables.follow(members)
    both = descriptors()
    host.tables.follow(members[1:])
    one = descriptors()
    kept = host.look(NODE, 1), host.look(NODE + 1, 1)
    host.tables.close()

    assert both > one > descriptors() == before
    assert kept == (None, (1, True))
    assert host.look(NODE + 1, 1) is None


def test_as_many_tables_are_open_as_there_may_be(host: Host) -> None:
    """Each has a descriptor and address space."""
    host.tables.follow([host.start(NODE + number) for number in range(TABLES_MAX + 2)])

    assert len(list(host.tables.nodes())) == TABLES_MAX


def test_a_node_without_a_table_is_nothing_to_be_counted(host: Host) -> None:
    """It is of an older version, or its table is in private memory."""
    host.tables.follow([host.member(NODE)])

    assert (host.unusable(), host.said) == ({}, [])


def test_a_table_that_may_not_be_opened_is_counted_and_reported(host: Host) -> None:
    """Once a view, with the file and what is wrong with it."""
    (host.segments / table_name(Incarnation(NODE))).touch()
    (host.segments / table_name(Incarnation(NODE))).chmod(0o666)

    host.tables.follow([host.member(NODE)])

    assert host.unusable() == {NOT_OPENED: 1}
    ((event, problem),) = host.said
    assert event == "client.table_unusable"
    assert str(host.segments) in problem
    assert "chmod o-w" in problem
    assert host.look(NODE, 1) is None


def test_a_spoilt_table_is_closed_counted_and_opened_with_the_next_view(host: Host) -> None:
    """It costs a call nothing twice."""
    member = host.start(NODE)
    before = descriptors()
    host.tables.follow([member])
    header_of(host.made[0][1]).version += 1

    spoilt = [host.look(NODE, 1), host.look(NODE, 1)]
    header_of(host.made[0][1]).version -= 1

    assert spoilt == [None, None]
    assert host.unusable() == {"other_version": 1}
    assert host.said == [("client.table_unusable", "other_version")]
    assert descriptors() == before
    assert list(host.tables.nodes()) == []
    host.tables.follow([member])
    assert host.look(NODE, 1) == (1, True)


def test_calls_under_way_keep_the_tables_that_they_began_with(host: Host) -> None:
    """Another thread's call may find a table spoilt meanwhile."""
    host.tables.follow([host.start(NODE), host.start(NODE + 1)])
    header_of(host.made[0][1]).version += 1
    seen = iter(host.tables.nodes())
    first = next(seen)

    assert host.look(NODE, 1) is None
    header_of(host.made[0][1]).version -= 1

    assert [first, *seen] == [NODE, NODE + 1]
    assert list(host.tables.nodes()) == [NODE + 1]


def test_a_table_that_changes_too_fast_stays_open(host: Host) -> None:
    """It can be read in a moment; its owner is busy, not gone."""
    host.tables.follow([host.start(NODE)])
    table = host.made[0][1]
    header = header_of(table)
    slots = (ctypes.c_uint64 * header.index[1]).from_address(table.place[0] + header.index[0])
    saved = bytes(slots)
    slots[:] = [1 << 32 | 1] * len(slots)  # A search has no end in them.

    torn = host.look(NODE, *range(2000))
    ctypes.memmove(ctypes.addressof(slots), saved, len(saved))

    assert torn is None
    assert (host.unusable(), host.said) == ({TORN: 1}, [])
    assert host.look(NODE, 1) == (1, True)


def test_a_ring_that_is_invalid_makes_nothing_final(host: Host) -> None:
    """A client without a view knows no owners; a table without authority has the same word."""
    host.tables.follow([host.start(NODE)])
    host.made[0][1].revoke()

    looked = host.tables.look(ReadTable(NODE, key_of(5), b""))

    assert looked is not None
    assert (looked.is_final, looked.is_at_work) == (False, True)


def test_removals_that_a_node_counts_are_seen_by_clients_of_its_host(host: Host) -> None:
    """By a mapping, and by the kernel; without a table there are none."""
    host.tables.follow([host.start(NODE)])
    _, table = host.made[0]
    seen = [host.tables.removals(NODE)]
    for _ in range(2):
        table.count_removal()
        seen.append(host.tables.removals(NODE))
    by_kernel = AttachedTable(os.dup(host.made[0][0].file), Incarnation(NODE), by_kernel=True)
    counted = by_kernel.removals()
    by_kernel.close()

    assert seen == [0, 1, 2]
    assert (counted, by_kernel.removals(), host.tables.removals(NODE + 1)) == (2, 0, 0)
