"""Spans of calls: what they say, whose trace they are in, and that no call depends on them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from peercache import Client
from peercache.client import tracing
from peercache.client.report import add_missed, reporting
from peercache.engines.lanes import CallLane
from peercache.errors import ConfigError
from peercache.observability.log import get_logger

LOG = get_logger(component="test")
PAGES = [bytes([number]) * 4096 for number in range(4)]
KEYS = [f"page-{number}" for number in range(4)]


class Spans:
    """A tracer, and the spans that it has ended."""

    def __init__(self) -> None:
        """Start without spans."""
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("engine")

    def take(self) -> list[ReadableSpan]:
        """Return the spans since the last call."""
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return spans

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the only span since the last call."""
        (span,) = self.take()
        return dict(span.attributes or {})


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def client(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Return a client of a node in this process, whose engine has a tracer."""

    def tracer() -> Any:
        monkeypatch.setattr(tracing._process, "is_traced", True)
        return spans.tracer

    monkeypatch.setattr(tracing, "tracer", tracer)
    with Client.open(
        cluster="traced", namespace="model", embedded=True, listen="127.0.0.1:0", pool_size="1MiB",
        op_timeout_s=10.0, exists_timeout_s=10.0, otel_traces=True,
    ) as client:  # fmt: skip
        spans.take()
        yield client


def test_a_call_is_a_span_with_what_it_served_and_why_not(client: Client, spans: Spans) -> None:
    """Of a set, a get and an exists; calls of operators have none."""
    assert client.batch_set(KEYS[:3], PAGES[:3]) == [True] * 3
    found = spans.attributes()
    assert found.pop("peercache.call") > 0
    assert found == {
        "peercache.namespace": "model",
        "peercache.pages": 3,
        "peercache.hits": 3,
        "peercache.bytes": 3 * 4096,
        "peercache.tier": "home",
    }

    assert client.batch_get(KEYS, [bytearray(4096) for _ in KEYS]) == [True] * 3 + [False]
    found = spans.attributes()
    assert (found["peercache.hits"], found["peercache.misses.absent"]) == (3, 1)
    assert (found["peercache.tier"], found["peercache.bytes"]) == ("home", 3 * 4096)
    assert (found["peercache.fabrics"], found["peercache.pages.shm"]) == (("shm",), 3)

    assert client.batch_exists(KEYS) == 3
    found = spans.attributes()
    assert (found["peercache.pages"], found["peercache.hits"]) == (4, 3)
    assert found["peercache.misses.absent"] == 1
    assert found["peercache.tier"] == "table"

    assert client.remove(KEYS) == 3
    assert [span.name for span in spans.take()] == ["peercache.remove"]
    client.stats()
    assert spans.take() == []


def test_a_span_is_in_the_trace_of_its_caller(client: Client, spans: Spans) -> None:
    """Without a current span it begins a trace of its own."""
    with spans.tracer.start_as_current_span("prefill") as engine:
        client.contains(KEYS)
    client.contains(KEYS)

    joined, prefill, alone = spans.take()
    assert prefill.name == "prefill"
    assert joined.parent is not None
    assert joined.parent.span_id == engine.get_span_context().span_id
    assert joined.get_span_context() is not None
    assert alone.parent is None


def test_work_for_a_lane_keeps_the_trace_of_the_engine_that_gave_it(
    client: Client, spans: Spans
) -> None:
    """As the adapters of vLLM and LMCache have threads make their calls."""
    lane, done = CallLane("traced", LOG, timeout_s=10.0), threading.Event()

    def work() -> None:
        client.contains(KEYS)
        done.set()

    with spans.tracer.start_as_current_span("load") as engine:
        lane.submit(work, done.set)
        assert done.wait(10.0)
    lane.close(10.0)

    call = next(span for span in spans.take() if span.name == "peercache.exists")
    assert call.parent is not None
    assert call.parent.span_id == engine.get_span_context().span_id


def test_a_report_around_a_call_is_the_same_with_a_span(client: Client, spans: Spans) -> None:
    """Reasons of an exists are reported only to those who asked for details."""
    with reporting() as stored:
        client.batch_set(KEYS[:1], PAGES[:1])
        client.contains(KEYS)
        add_missed({"late": 2})
    with reporting(is_detailed=True) as read:
        client.contains(KEYS)
        client.batch_get(KEYS, [bytearray(4096) for _ in KEYS])

    assert (stored.pages, stored.bytes, stored.misses) == (1, 4096, Counter(late=2))
    assert (read.pages, read.bytes, read.misses) == (1, 4096, Counter(absent=6))
    assert read.fabrics == Counter(shm=1)
    assert read.call == stored.call + 2
    assert len(spans.take()) == 4


class Broken:
    """A tracer that fails, or whose spans do."""

    def __init__(self, *, starts: bool) -> None:
        """Fail at once, or at the end of each span."""
        self._starts = starts

    def start_span(self, name: str, **more: Any) -> Any:
        """Return a span, or raise."""
        if not self._starts:
            raise RuntimeError(name)
        return self

    def is_recording(self) -> bool:
        """Return that it is."""
        return True

    def set_attributes(self, attributes: Any) -> None:
        """Raise."""
        raise ValueError(attributes)


@pytest.mark.parametrize("starts", [False, True])
def test_a_tracer_that_fails_costs_no_answer(starts: bool) -> None:
    """Nor does it change the report; the failure is logged."""
    call: Callable[..., Any] = lambda *_, **__: [True, False]  # noqa: E731
    run = tracing.traced(call, Broken(starts=starts), "model", LOG)  # type: ignore[arg-type]

    with reporting() as report:
        assert run("get", 2, [False] * 2, None) == [True, False]
    assert report.misses == Counter()


def test_without_the_setting_nothing_of_it_is_there() -> None:
    """No module, no other `_call`, and work for lanes stays the function that it was."""
    script = """
import sys
from peercache import Client
from peercache.client.tracing import carried
settings = {"embedded": True, "listen": "127.0.0.1:0", "pool_size": "1MiB"}
with Client.open(cluster="untraced", **settings) as client:
    client.batch_exists(["page"])
    assert "_call" not in vars(client)
assert carried(print) is print
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)

    with pytest.raises(ConfigError, match=r"pip install opentelemetry-exporter-otlp"):
        Client.open(
            cluster="traced",
            embedded=True,
            listen="127.0.0.1:0",
            pool_size="1MiB",
            otel_traces=True,
        )
