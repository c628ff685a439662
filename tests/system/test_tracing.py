"""Spans of a client reach a collector by OTLP over HTTP; without a collector nothing waits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.pace import TIMEOUT_S, assert_within
from tests.system.nodes import LocalCluster, NodeProcess

ENGINE = Path(__file__).parent / "traced_engine.py"

END_S = 6.0
"""More than the end of a process takes whose collector is silent: 2 s for an export, and its own
threads. OpenTelemetry's default is 10 s."""


class Collector:
    """An OTLP receiver: POST /v1/traces, protobuf."""

    def __init__(self) -> None:
        """Listen on a free port of loopback."""
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                """Take spans."""
                assert self.path == "/v1/traces", self.path
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self) -> dict[str, tuple[str, Any, dict[str, Any]]]:
        """Return the service, the span and its attributes, by the span's name."""
        found = {}
        for request in self.requests:
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        found[span.name] = (service, span, _values(span.attributes))
        return found


def _values(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    values = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        if kind == "array_value":
            value = [item.string_value for item in value.values]
        values[each.key] = value
    return values


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    with LocalCluster() as cluster:
        yield cluster.start()


def run_engine(node: NodeProcess, provider: str, url: str, **more: str) -> float:
    """Run an engine; return the seconds from its last call to the end of its process."""
    ran = subprocess.run(
        [sys.executable, str(ENGINE), node.ready["home"], node.cluster, provider],
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, **more},
        check=True,
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
    )
    return time.monotonic() - float(ran.stdout)


def test_a_collector_receives_a_span_of_each_call(node: NodeProcess, collector: Collector) -> None:
    """An engine without a tracer: the client sends its spans, each a trace of its own."""
    run_engine(node, "own", collector.url, OTEL_SERVICE_NAME="sglang-0")

    spans = collector.spans()
    assert set(spans) == {"peercache.exists", "peercache.set", "peercache.get"}
    assert {service for service, _, _ in spans.values()} == {"sglang-0"}
    _, get, found = spans["peercache.get"]
    assert get.parent_span_id == b""
    assert get.end_time_unix_nano > get.start_time_unix_nano
    assert found.pop("peercache.call") == 3
    assert found == {
        "peercache.namespace": "model",
        "peercache.pages": 4,
        "peercache.hits": 3,
        "peercache.bytes": 3 * 4096,
        "peercache.tier": "home",
        "peercache.fabrics": ["shm"],
        "peercache.pages.shm": 3,
        "peercache.misses.absent": 1,
    }
    _, _, found = spans["peercache.exists"]
    assert (found["peercache.hits"], found["peercache.misses.absent"]) == (0, 4)


def test_spans_are_part_of_the_trace_of_an_engine_that_has_one(
    node: NodeProcess, collector: Collector
) -> None:
    """The engine's own provider sends them, with its spans, under its name."""
    run_engine(node, "engine", collector.url, OTEL_SERVICE_NAME="ignored")

    spans = collector.spans()
    _, request, _ = spans.pop("request")
    assert {service for service, _, _ in spans.values()} == {"engine"}
    for _, span, _ in spans.values():
        assert span.trace_id == request.trace_id
        assert span.parent_span_id == request.span_id


def test_a_collector_that_is_away_or_silent_costs_no_call_and_holds_up_no_end(
    node: NodeProcess,
) -> None:
    """The calls have their answers, and the process ends."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert_within(run_engine(node, "own", url), END_S)
    # Now nothing listens there.
    assert_within(run_engine(node, "own", url), END_S)
