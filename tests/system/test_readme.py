"""README's node, as a new user starts it, and the commands that this user types next.

The host has a network of its own: the node listens at the default ports of every address.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pace import wait_until
from tests.system.separate_hosts import PYTHON, Host, separate_hosts, skip_reason

README = (Path(__file__).parents[2] / "README.md").read_text()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "hosts can be made"),
]


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """Yield a host on which README's node runs, with a small pool and without an engine."""
    section = README.split("## Run a node")[1]
    found = re.search(r"```sh\n(python -m peercache.node .*)\n```", section)
    assert found, "README shows how to run a node"
    command = found[1].replace("HOST-A", "host-a").replace("64GiB", "64MiB")
    with separate_hosts("host-a") as ((host,), _):
        node = host.start(command.replace("python", PYTHON, 1))
        assert node.stdout is not None
        assert node.stdout.readline(), host.said()
        yield host


def output(host: Host, command: str, status: int = 0) -> str:
    """Return what a command of this user prints; it must exit with this status."""
    done = host.run(f"{PYTHON} -m {command}")
    assert done.returncode == status, (command, done.stdout, done.stderr)
    return str(done.stdout)


@pytest.mark.parametrize("command", ["status", "members", "health", "slo"])
def test_the_bare_commands_reach_the_node(host: Host, command: str) -> None:
    """Without an address, a cluster or a certificate: it is the node of this host and user."""
    wait_until(lambda: json.loads(output(host, "peercache health --json"))["status"] == "ok")

    output(host, f"peercache {command}")


def test_no_command_without_the_cluster_is_refused_first(host: Host) -> None:
    """The cluster is asked for, and neither counted nor logged as a peer's wrong setting."""
    assert "cluster trial" in output(host, "peercache status")

    read = "from urllib.request import urlopen as o; print(o('http://127.0.0.1:31997/metrics').read().decode())"
    counted = host.run(f'{PYTHON} -c "{read}"').stdout.splitlines()
    assert any('dropped_total{reason="unknown_cluster"}' in line for line in counted)
    assert 'peercache_messages_dropped_total{reason="cluster"} 0.0' in counted
    assert "node.peer_refused" not in host.said()
