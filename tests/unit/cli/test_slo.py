"""`peercache slo`: what it reads, what it prints, and how it ends."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trustme
from prometheus_client import generate_latest

from peercache.cli.main import main
from peercache.observability.metrics import Metrics
from tests.unit.observability.test_latency import exposition

Served = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Served]:
    """Return what serves one text after the other as /metrics, and returns its address."""
    servers: list[HTTPServer] = []

    def start(*texts: str, token: str = "", tls: ssl.SSLContext | None = None) -> str:
        left = list(texts)

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_allowed = not token or self.headers.get("Authorization") == f"Bearer {token}"
                if not is_allowed or self.path != "/metrics":
                    self.send_error(401)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write((left.pop(0) if len(left) > 1 else left[0]).encode())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        server = HTTPServer(("127.0.0.1", 0), Answers)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_objectives_that_are_met_end_with_0(
    serve: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several nodes are judged together."""
    status = main(["slo", serve(exposition(100, 0)), serve(exposition(100, 1)), "--json"])

    reported = json.loads(capsys.readouterr().out)
    memory = next(each for each in reported["objectives"] if each["name"] == "memory")
    assert status == 0
    assert (reported["ok"], reported["nodes"]) == (True, 2)
    assert (memory["calls"], memory["met"]) == (201, True)
    assert memory["share"] == pytest.approx(200 / 201, abs=1e-6)
    assert next(each for each in reported["objectives"] if each["name"] == "disk")["share"] is None


def test_an_objective_that_is_missed_ends_with_1(
    serve: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the table shows which."""
    assert main(["slo", serve(exposition(50, 50))]) == 1

    (line,) = [line for line in capsys.readouterr().out.splitlines() if "memory" in line]
    assert "MISSED" in line
    assert "50.00%" in line


def test_the_limit_is_the_nodes_setting(serve: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Of nodes with several limits the longest; one between two buckets is the next one."""
    metrics = Metrics()
    metrics.describe_objectives({"exists": 0.001, "memory": 0.003, "disk": 0.01})
    limits = generate_latest(metrics.registry).decode()
    calls = exposition(50, 50)
    node = calls + "\n".join(line for line in limits.splitlines() if "objective" in line) + "\n"

    assert main(["slo", serve(calls), "--json"]) == 1
    capsys.readouterr()
    assert main(["slo", serve(node), serve(calls), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["objectives"]
    assert [each["within_s"] for each in reported] == [0.001, 0.005, 0.01]


def test_over_judges_the_calls_in_between(
    serve: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old slow hour is forgotten."""
    node = serve(exposition(0, 100), exposition(100, 100))

    assert main(["slo", node, "--over", "0.01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["objectives"][1]["calls"] == 100


def test_a_token_is_shown_and_its_lack_is_reported(
    serve: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the node wants it answers; without, one sentence explains what to give."""
    node = serve(exposition(1, 0), token="sesame-sesame-sesame")
    file = tmp_path / "token"
    file.write_text("sesame-sesame-sesame\n")

    assert main(["slo", f"http://{node}/metrics", "--token-file", str(file)]) == 0
    assert main(["slo", node]) == 2
    assert "--token-file" in capsys.readouterr().err


def test_an_https_node_of_an_authority_that_is_not_named(
    serve: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is missing is the authority, and not the port."""
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    node = f"https://{serve(exposition(1, 0), tls=tls)}"

    assert main(["slo", node]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("name the certificate of the cluster's authority with --ca")
    assert main(["slo", node, "--ca", str(tmp_path / "ca.crt")]) == 0


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["127.0.0.1:1"], "name the HTTP port of a node"),
        (["ftp://host-a"], "is no HOST:PORT"),
        (["--ca", "/no/such.crt"], "/no/such.crt"),
        (["--token-file", "/no/such"], "/no/such"),
        (["--key", "x"], "--cert"),
        (["--at", "127.0.0.1:1", "127.0.0.1:2"], "and not both"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    arguments: list[str], reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the node or the flag."""
    assert main(["slo", *arguments]) == 2

    (line,) = capsys.readouterr().err.splitlines()
    assert reported in line
