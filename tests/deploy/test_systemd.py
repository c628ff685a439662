"""The systemd unit: systemd finds no mistake in it, and the node does what it specifies."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from peercache.cli.main import EXIT_WRONG_USAGE
from peercache.config.home import SYSTEM_FOLDER
from peercache.config.settings import Config
from peercache.node.runner import READY, STOPPING, notify
from tests.pace import TIMEOUT_S

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
UNIT = SYSTEMD / "peercache.service"
INSTALLED = "/opt/peercache/bin/peercache"


def section(name: str) -> dict[str, str]:
    """Return the settings of a section of the unit; a repeated one keeps its last value."""
    text = UNIT.read_text().partition(f"[{name}]\n")[2].partition("\n[")[0]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="there is no systemd-analyze here")
def test_systemd_finds_no_mistake(tmp_path: Path) -> None:
    """It ends with 0 for an unknown key, too: only silence is agreement."""
    program = shutil.which("true")
    said = []
    for name, text in (
        ("peercache", UNIT.read_text()),
        ("wrong", UNIT.read_text().replace("LimitMEMLOCK=", "LimitMEMLOK=")),
    ):
        file = tmp_path / f"{name}.service"
        file.write_text(text.replace(INSTALLED, str(program)))
        command = ["systemd-analyze", "verify", "--man=no", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said.append(done.stderr + done.stdout)

    assert said[0] == ""
    assert "LimitMEMLOK" in said[1]


def test_settings_next_to_the_unit_are_right(tmp_path: Path) -> None:
    """Both files as they are installed, with the folders that the unit makes."""
    lines = (SYSTEMD / "node.env").read_text().splitlines()
    reported = [line.lstrip("#").split("=", 1) for line in lines if "=" in line]
    environment = {name: value for name, value in reported if " " not in name}
    config = Config.load({}, file=str(SYSTEMD / "node.toml"), environment=environment)
    service = section("Service")

    assert len(environment) == 3
    # The node's user may write to this folder, so the default is in it.
    assert not config.home
    assert str(SYSTEM_FOLDER) == f"/run/{service['RuntimeDirectory']}"
    assert config.disk_enabled
    assert config.disk_path == f"/var/lib/{service['StateDirectory']}"
    assert config.share_group == service["Group"]
    assert str(config.shm_dir) in service["ReadWritePaths"].split()


def test_unit_waits_longer_than_the_node_needs() -> None:
    """A kill in the middle of a flush loses what the wait was for."""
    service = section("Service")

    assert float(service["TimeoutStopSec"]) >= Config().disk_flush_s + 15
    assert service["RestartPreventExitStatus"] == str(EXIT_WRONG_USAGE)
    assert service["KillSignal"] == "SIGTERM"


@pytest.mark.slow
def test_unit_starts_a_node_that_sends_ready_and_stopping() -> None:
    """Its command line, as systemd runs it: READY=1 when it serves, STOPPING=1 at SIGTERM."""
    service = section("Service")
    assert service["Type"] == "notify"
    words = shlex.split(service["ExecStart"])
    assert words[:2] == [INSTALLED, "node"]
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        file = Path(folder) / "node.toml"
        file.write_text(
            f'listen = "127.0.0.1:0"\npool_size = "16MiB"\nmetrics_port = 0\n'
            f'home = "ipc://{folder}/run/home.ipc"\n'
        )
        flags = [str(file) if word == "/etc/peercache/node.toml" else word for word in words[1:]]
        assert str(file) in flags
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(f"{folder}/notify")
            manager.settimeout(TIMEOUT_S)
            process = subprocess.Popen(
                [sys.executable, "-m", "peercache", *flags],
                env={**os.environ, "NOTIFY_SOCKET": f"{folder}/notify"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            try:
                assert manager.recv(100).decode() == READY
                assert Path(folder, "run", "home.ipc").is_socket()
                process.send_signal(signal.SIGTERM)
                assert manager.recv(100).decode() == STOPPING
                assert process.wait(TIMEOUT_S) == 0
            finally:
                process.kill()
                process.communicate()


def test_notify_finds_abstract_addresses() -> None:
    """In the variable, systemd writes the zero byte as @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0peercache-test-{os.getpid()}")
        manager.settimeout(TIMEOUT_S)
        where = {"NOTIFY_SOCKET": f"@peercache-test-{os.getpid()}"}
        notify(READY, structlog.get_logger(), where)

        assert manager.recv(100).decode() == READY


def test_notify_without_a_manager_does_nothing(tmp_path: Path) -> None:
    """No socket: silence. One that is gone: a line in the log, and no error."""
    log = structlog.get_logger()
    with capture_logs() as lines:
        notify(READY, log, {})
        notify(READY, log, {"NOTIFY_SOCKET": "vsock:2:1234"})
        notify(STOPPING, log, {"NOTIFY_SOCKET": str(tmp_path / "gone")})

    assert [line["event"] for line in lines] == ["node.notify_failed"]
    assert lines[0]["problem"] == "No such file or directory"
