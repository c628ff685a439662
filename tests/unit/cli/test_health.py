"""`peercache health`: what it reports of a node that serves, one that does not, and none."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from peercache.cli.main import main


@contextmanager
def node_that_answers(status: int, body: bytes) -> Iterator[int]:
    """Serve one answer to /healthz on loopback; give its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_asked = self.path == "/healthz"
            self.send_response(status if is_asked else 404)
            self.end_headers()
            self.wfile.write(body if is_asked else b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "reported", "exit_status", "said"),
    [
        (200, {"status": "ok", "pool_bytes": 1}, 0, "ok"),
        (200, {"status": "degraded", "reason": "disk full"}, 0, "degraded: disk full"),
        (503, {"status": "unavailable", "reason": "alone"}, 1, "unavailable: alone"),
        (403, {"error": "wants a certificate"}, 1, "unavailable: wants a certificate"),
        (200, ["not", "a", "node"], 1, "is no node"),
    ],
)
def test_answer_of_the_node_is_said(
    status: int, reported: object, exit_status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node whose disk fails still serves its memory, so a probe must not restart it."""
    with node_that_answers(status, json.dumps(reported).encode()) as port:
        assert main(["health", "--metrics-port", str(port)]) == exit_status

    assert said in capsys.readouterr().out


def test_wildcard_is_asked_over_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a container, whose node listens on every interface."""
    with node_that_answers(200, b'{"status": "ok"}') as port:
        flags = ["--http-listen", f"0.0.0.0:{port}", "--http-open", "true", "--json"]
        assert main(["health", *flags]) == 0

    assert json.loads(capsys.readouterr().out) == {"status": "ok"}


def test_no_node_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """With the address, and 1 as for a node that does not serve; HTTP that is off is an error."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert main(["health", "--metrics-port", str(port)]) == 1
    assert capsys.readouterr().out == (
        f"unavailable: no answer from 127.0.0.1:{port}: Connection refused\n"
    )

    with node_that_answers(200, b"garbage") as port:
        assert main(["health", "--metrics-port", str(port)]) == 1
    assert "no answer from" in capsys.readouterr().out

    assert main(["health", "--metrics-port", "0"]) == 2
    assert "metrics_port" in capsys.readouterr().err
