"""`peercache doctor` where there are devices."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.system.nodes import command

pytestmark = pytest.mark.rdma

LIMIT_S = 600


def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the real command, with a small pool."""
    return command("doctor", "--pool-size", "16MiB", *flags, limit_s=LIMIT_S)


def test_doctor_reads_over_the_device_that_would_be_used() -> None:
    """Libraries, ports and limits are found, and a READ that truly came back is the proof."""
    done = doctor("--json", "--fabric", "rdma")

    report = json.loads(done.stdout)
    facts = report["facts"]
    assert done.returncode == 0, done.stdout
    assert {port["name"] for port in facts["ports"]} >= {"rxe0", "rxe1", "rxe2"}
    assert all(port["uverbs"].startswith("/dev/infiniband/uverbs") for port in facts["ports"])
    assert facts["libraries"]["libibverbs_release"] == "44.0"
    assert facts["libraries"]["wants"] in facts["libraries"]["offers"]
    assert facts["speed"]["read_gb_s"] > 0
    assert facts["speed"]["read_us"] > 0
    assert facts["ports"][0]["mtu"] == 9000


def test_doctor_names_a_device_that_is_not_there() -> None:
    """A typo in a name is a problem with a fix, not a stack trace."""
    done = doctor("--quick", "--rdma-device-names", "mlx5_9")

    assert done.returncode == 1
    assert "there is no RDMA device mlx5_9" in done.stdout
    assert "fix: --rdma-device-names" in done.stdout


def test_doctor_names_what_a_pyverbs_for_another_rdma_core_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader's own message names a symbol version and no remedy."""
    folder = tmp_path / "pyverbs"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('IBVERBS_PRIVATE_59 not found')\n")
    (folder / "device.so").write_bytes(b"\x7fELF\0IBVERBS_PRIVATE_59\0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    done = doctor("--quick")

    assert done.returncode == 1
    assert "was built for IBVERBS_PRIVATE_59, rdma-core 44.0 here has 34" in done.stdout
