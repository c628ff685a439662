"""Housekeeping: what a node does once a second, what it watches, and what it logs of that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peercache.actors.effects import Notify, NotifyRdma
from peercache.actors.mailboxes import ClientsConnected
from peercache.config.settings import Config
from peercache.model.ids import name_of
from peercache.model.member import ALIVE, Member
from peercache.model.process import DescriptorShares
from peercache.node import housekeeping as housekeeping_module
from peercache.node.disk import DiskTroubles
from peercache.node.housekeeping import HOUSEKEEPING_S, Housekeeping, OwnersWatch, keep
from peercache.observability.metrics import Metrics
from tests.pace import TIMEOUT_S


def member(incarnation: int) -> Member:
    return Member(incarnation, 1, ALIVE, 255, "h", f"n{incarnation}:1", "d:1", "", "")


class House:
    """What housekeeping looks after, and what it logs and reports."""

    def __init__(self, **settings: str) -> None:
        self.said: list[str] = []
        self.reported: list[Notify] = []
        self.members: list[Member] = []
        self.sessions = {1: SimpleNamespace(identity=71), 2: SimpleNamespace(identity=72)}
        self.descriptors = 1600.0
        self.admission: Any = SimpleNamespace(
            sessions=self.sessions, exited=list, overstaying=lambda *_: []
        )
        listener: Any = SimpleNamespace(pipes=dict)
        links: Any = SimpleNamespace(keep=lambda _, **__: None)
        log: Any = SimpleNamespace(info=lambda event, **_: self.said.append(event))
        self.housekeeping = Housekeeping(
            Config.load(settings), own_address=str, admission=self.admission, listener=listener,
            links=links, notify=self.reported.append, members=lambda: self.members,
            metrics=Metrics(), log=log, dialled=frozenset, looks=(),
            shares=lambda: DescriptorShares.of(self.descriptors),
        )  # fmt: skip

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Look once a second."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.housekeeping.run)
            nursery.start_soon(self.housekeeping.bound_connections)
            await trio.sleep(HOUSEKEEPING_S / 2)
            yield
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("alone_s", "count", "is_said"), [(0.0, 1, True), (TIMEOUT_S, 1, False), (0.0, 2, False)]
)
async def test_node_logs_once_that_it_is_alone(
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    alone_s: float,
    count: int,
    *,
    is_said: bool,
) -> None:
    """When the nodes to join had their time to answer; nor is one alone that others left."""
    del autojump_clock
    monkeypatch.setattr(housekeeping_module, "ALONE_S", alone_s)
    house = House(discovery_addr="127.0.0.1:5")
    house.members = [member(number + 1) for number in range(count)]

    async with house.kept():
        house.members = house.members[:1]
        await trio.sleep(3 * HOUSEKEEPING_S)

    assert house.said.count("node.started_alone") == is_said


async def test_rdma_actor_receives_each_second_which_clients_are_connected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A client whose last session ended is missing in the next round: its queue pairs end."""
    del autojump_clock
    house = House()

    async with house.kept():
        del house.sessions[1]
        await trio.sleep(HOUSEKEEPING_S)

    assert house.reported == [
        NotifyRdma(ClientsConnected(frozenset({71, 72}))),
        NotifyRdma(ClientsConnected(frozenset({72}))),
    ]


async def test_admission_follows_the_limit_of_open_files(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An engine in the same process may raise or lower it while the node runs."""
    del autojump_clock
    house = House()

    async with house.kept():
        before = house.admission.connections_max
        house.descriptors = 3200.0
        await trio.sleep(HOUSEKEEPING_S)

    assert (before, house.admission.connections_max) == (400.0, 800.0)


class Said:
    """A log that keeps its events."""

    def __init__(self) -> None:
        """Begin empty."""
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, **fields: Any) -> None:
        """Keep a warning."""
        self.events.append(("warning", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        """Keep what is reported."""
        self.events.append(("info", event, fields))


def test_a_disk_that_fills_up_is_reported_once_and_its_recovery_too() -> None:
    """One line when it begins and one when it ends, however often housekeeping looks.

    A status shows the trouble until then: a full disk accepts a page now and again.
    """
    log = Said()
    seen = {0.0: "", 1.0: "full", 2.0: "full", 3.0: "", 4.0: "full", 5.0: "", 14.0: "", 15.0: "old"}
    now = [0.0]
    troubles = DiskTroubles(lambda: seen[now[0]], path="/data", log=log, clock=lambda: now[0])

    shown = []
    for now[0] in seen:
        troubles.look()
        shown.append(troubles.current())

    assert shown == ["", "full", "full", "full", "full", "full", "", "old"]
    assert log.events == [
        ("warning", "disk.writes_failed", {"path": "/data", "why": "full"}),
        ("info", "disk.writes_recovered", {"path": "/data"}),
        ("warning", "disk.writes_failed", {"path": "/data", "why": "old"}),
    ]


async def test_a_watcher_that_fails_begins_again_and_logs_why(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Also where tasks of its own have failed; the node's other tasks notice nothing."""
    said: list[tuple[str, str]] = []
    log: Any = SimpleNamespace(
        error=lambda _, watcher, problem, **__: said.append((watcher, problem))
    )
    began: list[float] = []

    async def fail() -> None:
        raise OSError(24, "Too many open files")

    async def watch() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail)
        await trio.sleep_forever()

    with trio.move_on_after(60.0) as waited:
        await keep("certificates", watch, log)

    assert waited.cancelled_caught
    assert len(began) == 3
    assert [watcher for watcher, _ in said] == ["certificates"] * 2
    assert all("Too many open files" in problem for _, problem in said)


def test_an_owner_that_lags_is_named_by_its_address_and_counted() -> None:
    """An operator looks for the node, not for its number."""
    said: list[tuple[str, str]] = []
    log: Any = SimpleNamespace(
        warning=lambda event, owner, **_: said.append((event, owner)),
        info=lambda event, owner: said.append((event, owner)),
    )
    lagging: set[int] = set()
    authority: Any = SimpleNamespace(ring=b"", doubted=2)
    metrics, members = Metrics(), {7: SimpleNamespace(control="10.0.0.7:31999")}
    publisher: Any = SimpleNamespace(lagging=lambda: frozenset(lagging), followers=3)
    watch = OwnersWatch(publisher, authority, members.get, metrics, log)

    def gauge(name: str) -> float | None:
        return metrics.registry.get_sample_value(f"peercache_directory_{name}")

    watch.look()
    assert said == []
    assert (gauge("authority"), gauge("holders_doubted")) == (0.0, 2.0)
    assert metrics.registry.get_sample_value("peercache_followers") == 3.0

    lagging |= {7, 9}
    watch.look()
    watch.look()
    assert said == [
        ("directory.owner_lagged", "10.0.0.7:31999"),
        ("directory.owner_lagged", name_of(9)),
    ]
    assert gauge("owners_lagging") == 2.0

    lagging.remove(7)
    authority.ring, authority.doubted = b"ring", 0
    watch.look()
    assert said[2:] == [("directory.owner_recovered", "10.0.0.7:31999")]
    assert (gauge("authority"), gauge("holders_doubted"), gauge("owners_lagging")) == (1, 0, 1)
