"""`python -m benchmarks.rdma` where there is no RDMA: its table, its error, and ib_read_bw."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rdma import RdmaPlan, perftest, perftest_gb_s, rdma_table

ROOT = Path(__file__).parents[2]

PERFTEST = """\
---------------------------------------------------------------------------------------
                    RDMA_Read BW Test
 Dual-port       : OFF\t\tDevice         : rxe1
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 1048576    500              81.20              78.91              0.000079
---------------------------------------------------------------------------------------
"""


def test_average_is_read_out_of_perftests_table() -> None:
    """Its MB are mebibytes; where it prints no table there is no figure."""
    assert perftest_gb_s(PERFTEST, 2**20) == pytest.approx(78.91 * 2**20 / 1e9)
    assert perftest_gb_s(PERFTEST, 4096) == 0.0
    assert perftest_gb_s("Can't produce a report", 2**20) == 0.0


def test_table_shows_what_was_measured_and_leaves_out_the_rest() -> None:
    """A line for each page size that was read, with the ratio to the bare loop."""
    figures = {
        "get_gb_s_1024k": 0.6,
        "bare_gb_s_1024k": 0.62,
        "get_ratio_1024k": 0.97,
        "wrong_pages_1024k": 0,
    }

    text = rdma_table(figures, (2**20, 128 * 2**10))

    assert "ratio 0.97" in text
    assert "0 wrong pages" in text
    assert "128 KiB" not in text


def test_command_without_rdma_says_why() -> None:
    """The exit status says that no READ was measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rdma", "--json", "--near", "no_such_device"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert done.returncode == 1, done.stderr
    assert done.stderr.strip()
    assert "Traceback" not in done.stderr


TOOL = """#!{python}
import pathlib, socket, sys, time
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[-1] == "127.0.0.1":
    tries = pathlib.Path(__file__).with_name("tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    socket.create_connection(("127.0.0.1", port)).close()
    if len(tries.read_text()) < 2:
        sys.exit("Can't produce a report")
    print(" 1048576    500              80.00              78.91   0.000075")
else:
    time.sleep(1.5)
    with socket.create_server(("", port)) as listener:
        listener.accept()
"""


@pytest.mark.slow
def test_perftest_that_is_slow_or_unsure_is_waited_for_and_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server takes its time to listen, answers one call only, and the first gives no figure."""
    tool = tmp_path / "ib_read_bw"
    tool.write_text(TOOL.replace("{python}", sys.executable))
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    plan = RdmaPlan(
        near=("a",), far=("b",), gid_index=-1, page_bytes=(2**20,),
        total_bytes=2**20, seconds=0.1, shm_dir=str(tmp_path),
    )  # fmt: skip

    rate, problem = perftest(plan, 2**20)

    assert (rate, problem) == (pytest.approx(78.91 * 2**20 / 1e9), "")
    assert (tmp_path / "tries").read_text() == "xx"
