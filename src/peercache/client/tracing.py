"""Spans of calls, by OpenTelemetry: the setting `otel_traces`, the extra `otel`.

A client that makes spans replaces its own `_call` by one with a span around it, so every engine's
adapter has them. A client without the setting has no code for it, and OpenTelemetry is not
imported.

Owns    the tracer provider of a process whose engine has none: it sends spans by OTLP over HTTP.
Keeps   a call returns the same with a span as without one: no exception of a tracer reaches it. A
        span begins in the caller's thread, in the caller's context, so it is part of the trace that
        is current there; work for another thread takes its context along (`carried`).
Limits  the queue of OpenTelemetry's batch processor; spans beyond it are dropped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextvars import copy_context
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import attrs

from peercache.client.report import CallReport
from peercache.client.report import current as current_call
from peercache.errors import ConfigError
from peercache.observability.latency import PLACES, SERIES
from peercache.observability.log import WarnOnce, current
from peercache.observability.reasons import INTERNAL

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

OPERATIONS = frozenset({"get", "set", "exists", "remove", "clear"})
"""The calls of engines; others are of operators and routers."""

EXPORT_TIMEOUT_S = 2.0
"""Of one export to the collector, unless a variable of OpenTelemetry sets it: a collector that does
not answer holds up the end of the process for as long."""

EXPORT_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@attrs.define
class _Process:
    """What the clients of a process share. provider: its own one, if it has made it."""

    is_traced: bool = False
    provider: TracerProvider | None = None
    lock: Lock = attrs.field(factory=Lock)


_process = _Process()


def carried(call: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Return a call that is made in the present context, whichever thread makes it.

    Without tracing it is the call itself.
    """
    return partial(copy_context().run, call) if _process.is_traced else call


def tracer() -> Tracer:
    """Return the engine's tracer, or one of a provider that sends spans by OTLP.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    try:
        # Of the extra `otel`: a process without the setting does not load it.
        from opentelemetry import trace  # noqa: PLC0415

        provider = trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):
            provider = _own_provider()
    except ImportError as error:
        raise ConfigError(
            "otel_traces",
            f"requires {error.name}: pip install opentelemetry-exporter-otlp-proto-http",
        ) from error
    _process.is_traced = True
    return provider.get_tracer("peercache")


def _own_provider() -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    with _process.lock:
        if _process.provider is None:
            is_set = any(name in os.environ for name in EXPORT_TIMEOUTS)
            exporter = OTLPSpanExporter(timeout=None if is_set else EXPORT_TIMEOUT_S)
            resource = Resource.create()
            if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
                # OpenTelemetry's name where no variable names the service.
                resource = resource.merge(Resource({SERVICE_NAME: "peercache"}))
            _process.provider = TracerProvider(resource=resource)
            _process.provider.add_span_processor(BatchSpanProcessor(exporter))
        return _process.provider


def traced(
    call: Callable[..., Any], tracer: Tracer, namespace: str, log: Any
) -> Callable[..., Any]:
    """Return a client's `_call` with a span around it."""
    spans = _Spans(tracer, namespace, WarnOnce(log))

    def run(operation: str, pages: int, miss: Any, *more: Any, **named: Any) -> Any:
        span = spans.begin(operation, pages) if operation in OPERATIONS else None
        if span is None:
            return call(operation, pages, miss, *more, **named)
        outer, report = current_call.report, CallReport(is_detailed=True)
        current_call.report, current.series = report, PLACES[operation, "", ""]
        answer = miss
        try:
            answer = call(operation, pages, miss, *more, **named)
        finally:
            current_call.report = outer
            if outer is not None:
                outer.add(report, with_misses=outer.is_detailed or operation != "exists")
            spans.end(span, report, answer, SERIES[current.series][1])
        return answer

    return run


@attrs.frozen
class _Spans:
    """Begins and ends the spans of one client; no exception leaves it."""

    _tracer: Tracer
    _namespace: str
    _warn_once: WarnOnce

    def begin(self, operation: str, pages: int) -> Span | None:
        try:
            return self._tracer.start_span(
                f"peercache.{operation}",
                attributes={"peercache.namespace": self._namespace, "peercache.pages": pages},
            )
        except Exception as error:
            self._failed(error)
            return None

    def end(self, span: Span, report: CallReport, answer: Any, tier: str) -> None:
        try:
            if span.is_recording():
                span.set_attributes(attributes_of(report, answer, tier))
                if INTERNAL in report.misses:
                    span.set_attribute("error.type", INTERNAL)
            span.end()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._warn_once("client.span_failed", type(error).__name__, problem=repr(error))


def attributes_of(report: CallReport, answer: Any, tier: str) -> dict[str, Any]:
    """Return the attributes of a call that has ended."""
    found: dict[str, Any] = {
        "peercache.call": report.call,
        "peercache.hits": _served(answer),
        "peercache.bytes": report.bytes,
    }
    if tier:
        found["peercache.tier"] = tier
    if report.fabrics:
        found["peercache.fabrics"] = sorted(report.fabrics)
    for fabric, pages in report.fabrics.items():
        found[f"peercache.pages.{fabric}"] = pages
    for reason, pages in report.misses.items():
        found[f"peercache.misses.{reason}"] = pages
    return found


def _served(answer: Any) -> int:
    """Return how many pages a call has served, from its result: a number, or one for each page."""
    return sum(map(bool, answer)) if isinstance(answer, Iterable) else int(answer)
