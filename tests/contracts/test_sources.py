"""One suite for all sources of addresses: what each gives, and what no source may do to a node."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from peercache.discovery import finder, port
from peercache.discovery.finder import Finder
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from tests.contracts.source_fakes import Asked, FakeEtcd, FakeKubernetes, FakeResolver, hosts_of
from tests.pace import ends_within, until

FEW = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]

GARBAGE = [
    b"\x00\xff\xfe garbage",
    b"{}",
    b"[]",
    b"null",
    b'{"ID": "seven", "items": [7], "metadata": {"resourceVersion": 1}}',
    b'{"ID": 7, "header": {"revision": "x"}, "items": {"a": 1}, "metadata": []}',
    b"[" * 100_000,
]


@pytest.fixture(params=["dns", "etcd", "k8s"])
def asked(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Asked]:
    """What one kind of source asks."""
    makers: dict[str, Callable[[], Asked]] = {
        "dns": FakeResolver,
        "etcd": FakeEtcd,
        "k8s": lambda: FakeKubernetes(tmp_path),
    }
    fake = makers[request.param]()
    yield fake
    fake.end()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again at once: what is tested is what happens, and not when."""
    monkeypatch.setattr(finder, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(port, "GAP_MIN_S", 0.02)
    monkeypatch.setattr(port, "GAP_MAX_S", 0.05)
    monkeypatch.setattr(finder, "AGAIN_MIN_S", 0.05)
    monkeypatch.setattr(finder, "AGAIN_MAX_S", 0.1)


class Reported:
    """What a finder has reported to its node."""

    def __init__(self) -> None:
        self.hosts: set[str] | None = None
        self.metrics = Metrics()
        self.text = ""

    def take(self, addresses: tuple[str, ...]) -> None:
        self.hosts = hosts_of(addresses)

    def value(self, name: str) -> float:
        found = self.metrics.registry.get_sample_value(f"peercache_{name}", {"source": self.text})
        return 0.0 if found is None else found


@asynccontextmanager
async def following(asked: Asked) -> AsyncIterator[Reported]:
    """Follow a source as a node does."""
    reported = Reported()
    with ends_within():
        async with trio.open_nursery() as nursery:
            await asked.start(nursery)
            source = asked.source()
            reported.text = source.text
            both = Finder(
                [source], on_addresses=reported.take, rng=random.Random(1),
                metrics=reported.metrics, log=get_logger(),
            )  # fmt: skip
            nursery.start_soon(both.run)
            yield reported
            nursery.cancel_scope.cancel()


async def test_source_gives_its_addresses_and_reports_when_they_change(asked: Asked) -> None:
    """New ones come, old ones go."""
    asked.has(FEW)
    async with following(asked) as reported:
        await until(lambda: reported.hosts == set(FEW))
        asked.has([*FEW[1:], "10.0.0.4"])
        await until(lambda: reported.hosts == {*FEW[1:], "10.0.0.4"})
        assert reported.value("discovery_answering") == 1
        assert reported.value("discovery_addresses") in (3, 4)


async def test_source_that_is_away_at_the_start_is_asked_until_it_comes(asked: Asked) -> None:
    """A node starts whether or not its source is there."""
    asked.has(FEW)
    async with following(asked) as reported, trio.open_nursery() as nursery:
        await asked.kill()
        await until(lambda: reported.value("discovery_failures_total") > 0)
        await asked.start(nursery)
        await until(lambda: reported.hosts == set(FEW))
        nursery.cancel_scope.cancel()


async def test_source_that_dies_takes_no_address_away(asked: Asked) -> None:
    """What it returned last holds until it returns something else."""
    asked.has(FEW)
    async with following(asked) as reported, trio.open_nursery() as nursery:
        await until(lambda: reported.hosts == set(FEW))
        await asked.kill()
        await until(lambda: reported.value("discovery_failures_total") > 2)
        assert reported.hosts == set(FEW)
        assert reported.value("discovery_answering") == 0
        asked.has(FEW[:1])
        await asked.start(nursery)
        await until(lambda: reported.hosts == {FEW[0]})
        nursery.cancel_scope.cancel()


async def test_source_that_hangs_is_a_failure_and_holds_up_no_other_work(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop turns meanwhile, and the last addresses stay."""
    monkeypatch.setattr(port, "REQUEST_S", 0.5)
    monkeypatch.setattr(port, "RESOLVE_S", 0.5)
    asked.has(FEW)
    async with following(asked) as reported:
        await until(lambda: reported.hosts == set(FEW))
        before = reported.value("discovery_failures_total")
        asked.hang()
        asked.has(FEW[:1])
        await until(lambda: reported.value("discovery_failures_total") > before + 1)
        assert reported.hosts == set(FEW)


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_ends_nothing_and_takes_nothing_away(asked: Asked, garbage: bytes) -> None:
    """It fails, or is dropped address by address; what is reported stays addresses."""
    asked.has(FEW)
    async with following(asked) as reported:
        await until(lambda: reported.hosts == set(FEW))
        asked.answer_with(garbage)
        asked.has(FEW[:1])
        await until(
            lambda: (
                reported.value("discovery_failures_total") > 1
                or reported.value("discovery_dropped_total") > 1
                or reported.hosts != set(FEW)
            )
        )
        # `null` is a name like any other: membership finds out that no node is there.
        assert reported.hosts in (set(FEW), set(), {"null"})


async def test_answer_of_ten_thousand_addresses_is_taken_whole(asked: Asked) -> None:
    """The largest cluster fits, page by page."""
    many = {f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in range(10_000)}
    asked.has(sorted(many))
    async with following(asked) as reported:
        await until(lambda: reported.hosts == many)
