"""Housekeeping: what a node does once a second."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peercache.actors.effects import Tell, TellRdma
from peercache.actors.mailboxes import ClientsConnected
from peercache.config.settings import Config
from peercache.node import housekeeping as housekeeping_module
from peercache.node.housekeeping import HOUSEKEEPING_S, Housekeeping
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from tests.pace import TIMEOUT_S


def _alone(monkeypatch: pytest.MonkeyPatch, alone_s: float) -> tuple[Housekeeping, list[str]]:
    monkeypatch.setattr(housekeeping_module, "ALONE_S", alone_s)
    said: list[str] = []
    log: Any = SimpleNamespace(info=lambda event, **_: said.append(event))
    parts: Any = SimpleNamespace()
    housekeeping = Housekeeping(
        Config.load({"discovery_addr": "127.0.0.1:5"}), own_address=str, admission=parts,
        listener=parts, links=parts, tell=parts, members=list, metrics=Metrics(), log=log,
        dialled=frozenset, looks=(),
    )  # fmt: skip
    return housekeeping, said


def test_node_says_once_that_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the nodes to join had their time to answer, and not at every look."""
    housekeeping, said = _alone(monkeypatch, 0.0)
    me: Any = object()

    housekeeping._tell_alone([me])
    housekeeping._tell_alone([me])

    assert said == ["node.started_alone"]


def test_node_that_joins_does_not_say_that_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node knows itself only in its first moments; nor is one alone that others left."""
    housekeeping, said = _alone(monkeypatch, TIMEOUT_S)
    me: Any = object()
    housekeeping._tell_alone([me])
    assert said == []

    housekeeping, said = _alone(monkeypatch, 0.0)
    housekeeping._tell_alone([me, me])
    housekeeping._tell_alone([me])
    assert said == []


@pytest.mark.trio
async def test_rdma_actor_hears_each_second_which_clients_are_connected(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A client whose last session ended is missing in the next round: its queue pairs end."""
    told: list[Tell] = []
    sessions = {1: SimpleNamespace(identity=71), 2: SimpleNamespace(identity=72)}
    admission: Any = SimpleNamespace(
        sessions=sessions, exited=list, overstaying=lambda *_, **__: []
    )
    listener: Any = SimpleNamespace(pipes=dict)
    links: Any = SimpleNamespace(keep=lambda _, **__: None)
    housekeeping = Housekeeping(
        Config(), own_address="", admission=admission, listener=listener, links=links,
        tell=told.append, members=list, metrics=Metrics(), log=get_logger(),
        dialled=frozenset, looks=(),
    )  # fmt: skip

    async with trio.open_nursery() as nursery:
        nursery.start_soon(housekeeping.run)
        await trio.sleep(HOUSEKEEPING_S / 2)
        del sessions[1]
        await trio.sleep(HOUSEKEEPING_S)
        nursery.cancel_scope.cancel()

    assert told == [
        TellRdma(ClientsConnected(frozenset({71, 72}))),
        TellRdma(ClientsConnected(frozenset({72}))),
    ]
