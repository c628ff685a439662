"""The kernel encrypts what the data port sends (kTLS), where it can. The guest's kernel can."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.fabric.tcp import tls
from tests.contracts.fabric_suite import GRANULE, Owner
from tests.contracts.fakes import PlainMemory
from tests.pace import TIMEOUT_S
from tests.unit.fabric import test_tcp_tls
from tests.unit.fabric.secured import Cluster, fabric_with, one_page, serve

pytestmark = pytest.mark.rdma  # few machines but the guest have such a kernel

STATISTICS = Path("/proc/net/tls_stat")
PAGE_BYTES = 12 * 2**20
"""More than a socket takes at once."""


def encrypted_connections() -> int:
    """Return on how many connections the kernel has begun to encrypt since it started."""
    figures = dict(line.split() for line in STATISTICS.read_text().splitlines())
    return int(figures["TlsTxSw"])


def test_the_kernel_encrypts_a_response_of_many_sends(tmp_path: Path) -> None:
    """The page arrives as it is, and the kernel counts the connection."""
    memory = PlainMemory.of(test_tcp_tls.MEMORY_BYTES, GRANULE)
    page = np.random.default_rng(0).bytes(PAGE_BYTES)
    Owner(memory).store(0, page, 2)
    cluster = Cluster.of(tmp_path)
    before = encrypted_connections()
    server = serve(memory, cluster.node())
    try:
        got, read = test_tcp_tls.read(server, cluster.client(), size=PAGE_BYTES)
    finally:
        server.close()

    assert got.failure == ""
    assert read == page
    assert int(got.seals["word"][0]) == 2
    assert encrypted_connections() == before + 1


def test_connection_ends_between_responses_when_its_key_is_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel cannot replace the key; the next read opens another connection."""
    monkeypatch.setattr(tls, "KEY_RECORDS_MAX", 4)
    memory = PlainMemory.of(test_tcp_tls.MEMORY_BYTES, GRANULE)
    Owner(memory).store(0, b"page", 2)
    cluster = Cluster.of(tmp_path)
    before = encrypted_connections()
    with (
        contextlib.closing(serve(memory, cluster.node())) as server,
        contextlib.closing(fabric_with(cluster.client())) as fabric,
    ):
        page, _ = one_page(server)
        got = [fabric.read(page, time.monotonic() + TIMEOUT_S).failure for _ in range(20)]

    assert got == [""] * 20
    assert encrypted_connections() > before + 1


def test_every_test_of_tls_passes_where_the_kernel_encrypts() -> None:
    """Refusals, revocation, clear text on the wire: the same promises."""
    before = encrypted_connections()

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test_tcp_tls.__file__],
        env={**os.environ, "PYTEST_ADDOPTS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-5000:]
    assert encrypted_connections() > before + 20
