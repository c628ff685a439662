"""An engine whose client makes spans, as a process: it stores and reads pages, and ends.

    traced_engine.py HOME CLUSTER own|engine

own:    it has no tracer provider, so the client makes one.
engine: it has one, which sends spans of the service `engine`, and a span around its calls.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from peercache import Client

KEYS = [f"page-{os.getpid()}-{number}" for number in range(4)]
PAGE_BYTES = 4096


def main(home: str, cluster: str, provider: str) -> None:
    """Call, within a span if the engine has a tracer."""
    around: Any = nullcontext()
    if provider == "engine":
        made = TracerProvider(resource=Resource.create({"service.name": "engine"}))
        made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=2.0)))
        trace.set_tracer_provider(made)
        around = trace.get_tracer("engine").start_as_current_span("request")
    with (
        Client.open(
            home=home, cluster=cluster, namespace="model", otel_traces=True,
            op_timeout_s=10.0, exists_timeout_s=10.0,
        ) as client,
        around,
    ):  # fmt: skip
        pages = [bytes([number]) * PAGE_BYTES for number in range(3)]
        assert client.batch_exists(KEYS) == 0
        assert all(client.batch_set(KEYS[:3], pages))
        buffers = [bytearray(PAGE_BYTES) for _ in KEYS]
        assert client.batch_get(KEYS, buffers) == [True, True, True, False]
        assert [bytes(each) for each in buffers[:3]] == pages


if __name__ == "__main__":
    main(*sys.argv[1:])
    # What follows is the end of the process: the spans that are left are sent.
    print(time.monotonic())
