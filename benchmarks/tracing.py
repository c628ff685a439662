"""`python -m benchmarks.tracing`: what spans of OpenTelemetry cost a call, on and off.

Clients of one node take turns with the shortest call there is: an `exists` of one page that the
client knows. Two of them have no spans, so the ratio of these two is the error of the measurement.
Then one with spans takes turns with the first; they are exported to nowhere. Of each client the
fastest turn counts: what else runs on the machine only makes turns slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import click
import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from peercache import Client
from peercache.cli.main import run
from peercache.cli.options import json_option
from peercache.cli.processes import LOCAL, NodeProcesses
from peercache.cli.terminal import print_json
from peercache.client.tracing import carried
from peercache.model.keys import page_keys

CALLS = 40
"""Calls of one turn."""

CARRIED = 200_000

IMPORTED = """
import sys
from peercache import Client
with Client.open(cluster="off", embedded=True, listen="127.0.0.1:0", pool_size="1MiB") as client:
    client.batch_exists(["page"])
print(sum(name.split(".")[0] == "opentelemetry" for name in sys.modules))
"""


def call_us(client: Client) -> float:
    """Return the time of one call, of a turn of calls."""
    keys = page_keys(["page"], client.namespace.digest())
    started = time.perf_counter()
    for _ in range(CALLS):
        assert client.batch_exists(keys) == 1
    return (time.perf_counter() - started) / CALLS * 1e6


def carried_ns() -> float:
    """Return what a lane of an adapter does for one transfer, without spans."""
    call: Callable[[], None] = lambda: None  # noqa: E731
    started = time.perf_counter()
    for _ in range(CARRIED):
        carried(call)
    return (time.perf_counter() - started) / CARRIED * 1e9


class Nowhere(SpanExporter):
    """An exporter that drops its spans."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        """Drop them."""
        return SpanExportResult.SUCCESS


def in_turns(one: Client, other: Client, turns: int) -> tuple[float, float]:
    """Return the times of a call of two clients."""
    times: dict[Client, list[float]] = {one: [], other: []}
    for turn in range(turns):
        for client in (one, other) if turn % 2 else (other, one):
            times[client].append(call_us(client))
    return min(times[one]), min(times[other])


def measure(turns: int) -> dict[str, float]:
    """Return the figures."""
    imported = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", IMPORTED], check=True, capture_output=True, text=True
    )
    figures = {"modules_off": float(imported.stdout), "lane_off_ns": carried_ns()}
    with ExitStack() as stack:
        processes = stack.enter_context(NodeProcesses())
        cluster = f"tracing-{os.getpid()}"
        node = processes.launch("n", {**LOCAL, "cluster": cluster, "pool-size": "8MiB"})
        processes.await_ready(node)

        def client(*, is_traced: bool = False) -> Client:
            opened = Client.open(cluster=cluster, home=node.home, otel_traces=is_traced)
            return stack.enter_context(opened)

        off = client()
        assert off.batch_set(["page"], [np.zeros(4096, np.uint8)]) == [True]
        figures["off_us"], figures["off_again_us"] = in_turns(off, client(), turns)
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
        trace.set_tracer_provider(provider)
        figures["next_to_on_us"], figures["on_us"] = in_turns(off, client(is_traced=True), turns)
    figures["ratio_off"] = figures["off_again_us"] / figures["off_us"]
    figures["ratio_on"] = figures["on_us"] / figures["next_to_on_us"]
    return figures


@click.command
@click.option("--turns", type=click.IntRange(min=1), default=1000, show_default=True)
@json_option
def tracing(turns: int, *, as_json: bool) -> None:
    """Measure the shortest call without spans, twice, and with them."""
    figures = measure(turns)
    if as_json:
        print_json(figures)
        return
    print(f"  off        {figures['off_us']:6.1f} µs a call")
    print(f"  off, again {figures['off_again_us']:6.1f} µs, {figures['ratio_off']:.3f} of it")
    print(f"  on         {figures['on_us']:6.1f} µs, {figures['ratio_on']:.3f} of it")
    print(f"  off: {figures['modules_off']:.0f} modules of OpenTelemetry are imported")
    print(f"  off: {figures['lane_off_ns']:.0f} ns for each transfer of a lane")


if __name__ == "__main__":
    sys.exit(run(tracing, "benchmarks.tracing", sys.argv[1:]))
