"""The actors of a node run next to each other: a bug in one must not end all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
import trio.testing

from peercache.actors.effects import Effect, NotifyDirectory
from peercache.actors.mailboxes import PoolGrew, RecordsChanged
from peercache.actors.origin import Origin
from peercache.actors.pool.actor import Pool
from peercache.actors.runtime import SELF, TICK_AGAIN_S
from peercache.config.settings import Config
from peercache.model.member import ALIVE, Member
from peercache.node.actors import NodeActors
from peercache.observability.metrics import Metrics, totals_of
from peercache.wire.messages.pool import Commit, Reserve

GRANULE = 4096
CLIENT = Origin(1, 3)


class ErrorLog:
    """A log that keeps its errors."""

    def __init__(self) -> None:
        self.errors: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **facts: Any) -> None:
        self.errors.append((event, facts))


async def test_an_actor_that_asks_for_ticks_in_the_past_does_not_end_the_node(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node logs and counts this bug, and still stores pages."""
    metrics, log, performed = Metrics(), ErrorLog(), list[Effect]()
    me = Member(
        incarnation=9, counter=1, state=ALIVE, head_rank=0, host_name="h", control="127.0.0.1:1",
        data="127.0.0.1:2", boot_id="boot", segment="/seg", nonce=bytes(16),
    )  # fmt: skip
    crew = NodeActors(
        Config(cluster="test", granule=GRANULE),
        me,
        page_bytes=8 * GRANULE,
        rng=random.Random(1),
        metrics=metrics,
    )
    monkeypatch.setattr(Pool, "deadline", lambda _: trio.current_time() - 0.5)
    async with trio.open_nursery() as nursery:
        crew.start(nursery, performed.append, log)
        await trio.sleep(0.5 * TICK_AGAIN_S)
        pool = crew.mailboxes.pool
        pool.put(SELF, PoolGrew(8 * GRANULE))
        pool.put(CLIENT, Reserve(1, 1, 1, bytes(16), GRANULE.to_bytes(8, "little")))
        pool.put(CLIENT, Commit(2, 1, b"\1", bytes(8), 0.1))
        await trio.sleep(2 * TICK_AGAIN_S)
        nursery.cancel_scope.cancel()

    assert log.errors == [("node.tick_in_past", {"actor": "pool", "by_s": 0.5})] * 3
    assert totals_of(metrics.ticks_in_past) == {"pool": 3.0}
    published = [one.fact for one in performed if isinstance(one, NotifyDirectory)]
    stored = [fact for fact in published if isinstance(fact, RecordsChanged) and len(fact.records)]
    assert [fact.records["length"].tolist() for fact in stored] == [[GRANULE]]
