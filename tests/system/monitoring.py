"""Prometheus and Alertmanager of the distribution, as processes of a test."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from tests.house import alerts
from tests.house.reference_pages import ROOT
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import Closing, free_port

PROMETHEUS, ALERTMANAGER = shutil.which("prometheus"), shutil.which("prometheus-alertmanager")


class Receiver:
    """Takes the webhooks of Alertmanager."""

    def __init__(self) -> None:
        """Listen on loopback."""
        self.reported: list[dict[str, Any]] = []
        reported = self.reported

        class Takes(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                reported.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Takes)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def received(self, alert: str, status: str) -> bool:
        """Return whether an alert was reported with this status."""
        return any(
            each["status"] == status and each["labels"]["alertname"] == alert
            for reported in list(self.reported)
            for each in reported["alerts"]
        )

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()


def _over_tls(files: Mapping[str, str]) -> dict[str, Any]:
    """Return what a scrape of nodes with certificates has in addition."""
    tls = {f"{name.removeprefix('tls_')}_file": file for name, file in files.items()}
    return {"scheme": "https", "tls_config": tls}


class Monitoring(Closing):
    """A Prometheus that scrapes nodes twice a second by the rules of deploy, and an Alertmanager.

    The rules' windows and waits are those of a long day; here a minute is a second.
    """

    def __init__(
        self, folder: Path, nodes: Sequence[str], *, tls: Mapping[str, str] | None = None
    ) -> None:
        """Start both, and wait until Prometheus has scraped a node.

        tls: the files of an operator, as settings, where nodes want certificates.
        """
        self.receiver = Receiver()
        self.port = free_port()
        manager, gossip = free_port(), free_port()
        rules = alerts.rules()
        for minutes, seconds in (("5m", "5s"), ("10m", "10s"), ("1h", "30s")):
            rules = rules.replace(f"[{minutes}]", f"[{seconds}]")
        for alert in alerts.ALERTS:
            rules = rules.replace(f"        for: {alert.for_m}m\n", "        for: 1s\n")
        (folder / "rules.yml").write_text(rules)
        (folder / "prometheus.yml").write_text(
            json.dumps(
                {
                    "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms",
                               "scrape_timeout": "500ms"},
                    "rule_files": ["rules.yml"],
                    "alerting": {"alertmanagers": [
                        {"static_configs": [{"targets": [f"127.0.0.1:{manager}"]}]}]},
                    "scrape_configs": [
                        {"job_name": "peercache", "static_configs": [{"targets": list(nodes)}],
                         **(_over_tls(tls) if tls else {})}],
                }
            )
        )  # fmt: skip
        (folder / "alertmanager.yml").write_text(
            json.dumps(
                {
                    "route": {"receiver": "hook", "group_wait": "0s", "group_interval": "1s",
                              "group_by": ["alertname"]},
                    "receivers": [{"name": "hook", "webhook_configs": [
                        {"url": self.receiver.url, "send_resolved": True}]}],
                }
            )
        )  # fmt: skip
        assert PROMETHEUS
        assert ALERTMANAGER
        self._log = (folder / "monitoring.log").open("w")
        self._started = [
            self._start(
                PROMETHEUS, f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ),
            self._start(
                ALERTMANAGER, f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/manager",
                f"--web.listen-address=127.0.0.1:{manager}",
                f"--cluster.listen-address=127.0.0.1:{gossip}",
            ),
        ]  # fmt: skip
        wait_until(self._answers)

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=ROOT)

    def _answers(self) -> bool:
        try:
            return bool(self.query('up{job="peercache"} == 1'))
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the samples of an expression, now; raise OSError where it is no expression."""
        where = urllib.parse.urlencode({"query": expr})
        address = f"http://127.0.0.1:{self.port}/api/v1/query?{where}"
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            result: list[dict[str, Any]] = json.loads(answer.read())["data"]["result"]
        return result

    def close(self) -> None:
        """End both processes."""
        for process in self._started:
            process.terminate()
        for process in self._started:
            process.wait(TIMEOUT_S)
        self.receiver.close()
        self._log.close()
