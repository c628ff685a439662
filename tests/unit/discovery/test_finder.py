"""The finder: several sources, what it reports, and what it writes into the log."""

from __future__ import annotations

import random
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import attrs
import pytest
import structlog
import trio

from peercache.config.entries import parse_source
from peercache.discovery.etcd import EtcdSource
from peercache.discovery.finder import AGAIN_MAX_S, DnsSource, Finder, source_of
from peercache.discovery.kubernetes import KubernetesSource
from peercache.discovery.port import ADDRESSES_MAX, OnAddresses, SourceFailed, cleaned, printable
from peercache.observability.metrics import Metrics


@attrs.define(eq=False)
class Script:
    """A source that does one thing after the other, each at its time."""

    text: str
    steps: Iterator[Callable[[OnAddresses], None]]
    every_s: float = 1.0
    begun: list[float] = attrs.field(factory=list)

    async def follow(self, on_addresses: OnAddresses) -> None:
        self.begun.append(trio.current_time())
        for step in self.steps:
            step(on_addresses)
            await trio.sleep(self.every_s)
        await trio.sleep_forever()


def gives(*addresses: str) -> Callable[[OnAddresses], None]:
    return lambda on_addresses: on_addresses(addresses)


def fails(error: Exception) -> Callable[[OnAddresses], None]:
    def step(on_addresses: OnAddresses) -> None:
        raise error

    return step


@contextmanager
def events() -> Iterator[list[dict[str, object]]]:
    with structlog.testing.capture_logs() as found:
        yield found


async def story(*scripts: Script, seconds: float = 100.0) -> tuple[list[tuple[str, ...]], Metrics]:
    """Return what is reported in some seconds."""
    reported: list[tuple[str, ...]] = []
    metrics = Metrics()
    finder = Finder(
        scripts,
        on_addresses=reported.append,
        rng=random.Random(1),
        metrics=metrics,
        log=structlog.get_logger(),
    )
    with trio.move_on_after(seconds):
        await finder.run()
    return reported, metrics


async def test_addresses_of_all_sources_are_reported_together(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Once for each change, in one order, whatever the order of an answer."""
    one = Script("one", iter([gives("b:1", "a:1"), gives("a:1", "b:1"), gives("a:1")]))
    two = Script("two", iter([gives("c:1", "a:1")]), every_s=0.5)

    reported, _ = await story(one, two)

    assert reported[-3:][1:] == [("a:1", "b:1", "c:1"), ("a:1", "c:1")]
    assert len(reported) == 3


async def test_source_that_fails_in_any_way_is_asked_again_and_reported_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its last addresses stay; no error of it reaches the node."""
    errors = [SourceFailed("no"), ValueError("bug"), RuntimeError("bug")]
    script = Script("s", iter([gives("a:1"), *map(fails, errors), gives("a:1"), gives("b:1")]))

    with events() as written:
        reported, metrics = await story(script)

    assert reported == [("a:1",), ("b:1",)]
    assert [row["event"] for row in written] == [
        "discovery.addresses_changed",
        "discovery.source_failed",
        "discovery.source_answers_again",
        "discovery.addresses_changed",
    ]
    assert written[1]["problem"] == "discovery_addr: s: no"
    value = metrics.registry.get_sample_value
    assert value("peercache_discovery_failures_total", {"source": "s"}) == 3
    assert value("peercache_discovery_answering", {"source": "s"}) == 1
    assert value("peercache_discovery_addresses", {"source": "s"}) == 1


async def test_source_that_stays_away_is_asked_ever_less_often(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A thousand nodes do not keep a server from its start; one that has worked is asked soon."""

    def for_ever() -> Iterable[Callable[[OnAddresses], None]]:
        while True:
            yield fails(SourceFailed("no"))

    script = Script("s", iter(for_ever()))

    await story(script, seconds=1000.0)

    gaps = [after - before for before, after in zip(script.begun, script.begun[1:], strict=False)]
    assert gaps[0] <= 1
    assert max(gaps) <= AGAIN_MAX_S
    assert min(gaps[8:]) >= AGAIN_MAX_S / 2


async def test_source_that_had_worked_for_long_is_asked_soon(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Its next failure begins a new back-off."""
    no = fails(SourceFailed("no"))
    script = Script("s", iter([*[no] * 9, gives("a:1"), gives("a:1"), no]), every_s=40.0)

    await story(script, seconds=1000.0)

    # The tenth attempt works until the twelfth step, eighty seconds later.
    assert script.begun[10] - script.begun[9] - 80.0 <= AGAIN_MAX_S
    assert len(script.begun) == 11


@pytest.mark.parametrize(
    ("text", "kind"),
    [("dns://a", DnsSource), ("etcd://a/pc", EtcdSource), ("k8s://a", KubernetesSource)],
)
def test_each_kind_of_entry_has_its_source(
    text: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It bears the entry's text."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    address = parse_source(text)

    found = source_of(
        address,
        name="n",
        own_address=lambda: "a:1",
        rng=random.Random(1),
        etcd_tls=ssl.create_default_context,
    )

    assert isinstance(found, kind)
    assert found.text == address.text


def test_addresses_are_kept_as_every_node_writes_them() -> None:
    """Doubles count once, and what cannot be dialled not at all."""
    good = ["10.0.0.1:1", "[::1]:2", "gpu-7.cluster.local:3", "10.0.0.1:1"]
    bad = [
        "10.0.0.1", "10.0.0.1:0", "10.0.0.1:65536", ":5", "a b:5", "tcp://a:5", "a/b:5", "é:5",
        "x" * 300 + ":5", "", "a\nb:5", "[::1", 7, None, b"a:5",
    ]  # fmt: skip

    found = cleaned([*good, *bad])  # type: ignore[list-item]

    assert found.addresses == {"10.0.0.1:1", "[::1]:2", "gpu-7.cluster.local:3"}
    assert found.dropped == len(bad)


def test_a_source_cannot_fill_the_memory() -> None:
    """What is beyond the largest cluster is dropped, and counted."""
    found = cleaned(f"host-{number}:1" for number in range(ADDRESSES_MAX + 5))

    assert len(found.addresses) == ADDRESSES_MAX
    assert found.dropped == 5


def test_foreign_text_is_a_short_line() -> None:
    """No line break and no control character reaches the log."""
    assert printable("a\n\x1b[31mb" + "x" * 9999) == ("a [31mb" + "x" * 9999)[:200]
    assert printable(KeyError()) == "KeyError"
