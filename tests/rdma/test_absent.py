"""Where there is no rdma: said, survived, and an error only where it was asked for.

No host has a device of this name, so it is the same on a host with RDMA as on one without.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest

from peercache import Client
from peercache.errors import ConfigError
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, empty, keys_of, page_of, pages_of

NOWHERE = "no-such-device0"


def test_client_that_must_have_rdma_does_not_open_without(tmp_path: object) -> None:
    """The error names the setting, and what is missing."""
    with pytest.raises(ConfigError, match=r"fabric.*rdma is required, but not available") as error:
        Client.open(home=f"ipc://{tmp_path}/n.ipc", fabric="rdma", rdma_device_names=NOWHERE)

    assert "pyverbs" in str(error.value) or NOWHERE in str(error.value)


def test_node_that_must_have_rdma_does_not_start_without() -> None:
    """It ends with an exit status, and a sentence instead of a trace."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as folder:
        ended = subprocess.run(
            [
                sys.executable, "-m", "peercache.node", "--fabric", "rdma",
                "--rdma-device-names", NOWHERE, "--home", f"ipc://{folder}/n.ipc",
                "--listen", "127.0.0.1:0", "--pool-size", "1MiB", "--metrics-port", "0",
            ],
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip

    assert ended.returncode != 0
    assert "rdma is required, but not available" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_everything_works_without_rdma_and_reports_it() -> None:
    """Pages come over the other fabrics; the node's figures and log show why."""
    with LocalCluster() as cluster:
        first = cluster.start(flags=["--rdma-device-names", NOWHERE])
        second = cluster.start(flags=["--fabric", "tcp"])
        cluster.wait_for_members(first, 2)
        writer = cluster.client(first, rdma_device_names=NOWHERE)
        reader = cluster.client(second, fabric="auto", rdma_device_names=NOWHERE)
        keys = keys_of("absent", 4)
        writer.batch_set(keys, pages_of(keys))
        buffers = empty(4)

        wait_until(lambda: all(reader.batch_get(keys, buffers)))
        figures = [client.stats()["home_rdma"] for client in (writer, reader)]
        reported = [json.loads(line) for line in first.said().splitlines()]

    assert all((buffer == page_of(key)).all() for key, buffer in zip(keys, buffers, strict=True))
    assert figures[0] != "serves"
    assert figures[1] == "this node has fabric = tcp"
    assert [line["reason"] for line in reported if line["event"] == "rdma.devices_missing"] == [
        figures[0]
    ]
