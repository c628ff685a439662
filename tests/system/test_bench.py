"""The benchmark measures what it claims, and verifies what it reads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import local, secured
from benchmarks.engine import EngineProcess
from benchmarks.rdma import RdmaPlan, perftest, perftest_gb_s, rdma_table
from peercache.cli.bench.command import DISK_SET_BYTES, WORKING_SET_BYTES
from peercache.cli.bench.engine import Engine, WorkingSet
from peercache.cli.main import main, run
from peercache.config.settings import Config
from peercache.errors import PeerCacheError
from tests.pace import TIMEOUT_S, paced
from tests.system.nodes import free_port

KEYS = {
    "get_gb_s", "set_gb_s", "set_full_gb_s", "get_busy_gb_s", "set_busy_gb_s", "exists_hot_us",
    "exists_cold_us", "limit_copy_gb_s", "limit_tcp_gb_s", "limit_rtt_us", "get_ratio", "set_ratio",
    "set_full_ratio", "control_p99_ms", "wrong_bytes",
}  # fmt: skip


ROOT = Path(__file__).parents[2]

RUNS_MAX = 5
"""A machine that is paused for a moment makes a miss; a bug makes one in every run."""


def bench(*words: str, misses: str = "misses") -> dict[str, Any]:
    """Run a benchmark; return its figures, of a run without misses if there is one in a few."""
    command = [sys.executable, "-m", *words, "--json"]
    for _ in range(RUNS_MAX):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
        )
        assert done.stdout, done.stderr
        figures: dict[str, Any] = json.loads(done.stdout)
        assert not figures.get("wrong_bytes")
        if not figures.get(misses):
            break
    assert done.returncode == 0, done.stderr
    return figures


@pytest.mark.slow
def test_local_prints_every_figure() -> None:
    """A small run through real processes: all the keys, nothing wrong, nothing missed."""
    figures = bench(
        "benchmarks.local", "--fabric", "tcp",
        "--page-bytes", "64KiB", "--pages", "64", "--batch", "16", "--seconds", "0.05",
    )  # fmt: skip

    assert figures.keys() >= KEYS
    assert figures["wrong_bytes"] == figures["misses"] == 0
    assert all(value > 0 for name, value in figures.items() if name.endswith(("_gb_s", "_us")))


@pytest.mark.slow
def test_bench_disk_prints_every_figure(tmp_path: Path) -> None:
    """A small run: every byte is right, and nothing is left behind."""
    figures = bench(
        "peercache", "bench", "disk", "--folder", str(tmp_path),
        "--page-bytes", "64KiB", "--pages", "64", "--batch", "16",
    )  # fmt: skip

    wanted = {
        "raw_write_gb_s", "raw_read_gb_s", "write_gb_s", "load_gb_s", "write_ratio", "load_ratio",
        "load_one_ms", "scattered_1_ratio", "scattered_8_ratio", "scattered_64_ratio",
    }  # fmt: skip
    assert all(figures[name] > 0 for name in wanted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_disk_measures_nodes_and_the_index(tmp_path: Path) -> None:
    """A small run: nodes with and without a disk, an index; nothing is left behind."""
    figures = bench(
        "benchmarks.disk", "--folder", str(tmp_path), "--page-bytes", "64KiB", "--entries", "5000",
        misses="promote_misses",
    )  # fmt: skip

    assert figures["promote_misses"] == 0
    assert all(figures[name] > 0 for name in ("promote_ms", "set_disk_ratio", "index_load_s"))
    assert figures["index_bytes_a_page"] < 150
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_bench_drive_reads_what_bench_serve_holds() -> None:
    """Two commands, as on two hosts: every page arrives and is right."""
    address = f"127.0.0.1:{free_port()}"
    sizes = ["--page-bytes", "64KiB", "--pages", "32", "--batch", "8"]
    serve = [sys.executable, "-m", "peercache", "bench", "serve", "--listen", address, *sizes]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("32 of 32 pages")
            figures = bench(
                "peercache", "bench", "drive", "--discovery", address, "--fabric", "tcp",
                "--seconds", "0.1", *sizes,
            )  # fmt: skip
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(TIMEOUT_S)

    assert figures["misses"] == figures["wrong_bytes"] == 0
    assert figures["get_gb_s"] > 0


@pytest.mark.slow
def test_replay_hits_exactly_what_a_trace_that_fits_must_hit(tmp_path: Path) -> None:
    """Two nodes, each of which reads what came to the other; every block is counted once."""
    first, second = list(range(1, 61)), list(range(100, 131))
    prompts = [first[:40], first[:50], second[:11], first, second, first]
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "replay.svg"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": 1000 * number, "hash_ids": prompt})
            for number, prompt in enumerate(prompts)
        )
    )
    asked = sum(map(len, prompts))
    hits = 40 + 50 + 11 + 60
    speeds = []

    def replay(pace_s: float) -> dict[str, Any]:
        speeds.append(1 / pace_s)
        return bench(
            "peercache", "bench", "replay", "--trace", str(trace), "--nodes", "2",
            "--blocks", "512", "--block-size", "4KiB", "--speed", str(1 / pace_s),
            "--set", "verify=full", "--picture", str(picture),
        )  # fmt: skip

    # Where the machine is slow, a prompt is asked for before the one before it is stored.
    figures = paced(replay, lambda figures: figures["replays"][0]["of_lru"] == 1)

    (replayed,) = figures["replays"]
    assert figures["blocks"] == asked
    min_age_s = float(figures["settings"].pop("placement_min_age"))
    assert min_age_s == pytest.approx(Config().placement_min_age / speeds[-1], rel=1e-4)
    assert figures["settings"] == {"verify": "full"}
    assert replayed["hit_rate"] == replayed["lru_hit_rate"] == round(hits / asked, 4)
    assert replayed["node_lru_hit_rate"] == replayed["hit_rate"]
    assert replayed["bytes_read"] == {"shm": hits * 4096}
    assert replayed["bytes_written"] == (asked - hits) * 4096
    assert replayed["misses"] == {"absent": asked - hits}
    assert replayed["sets_refused"] == {}
    assert 0 < replayed["wait_p50_ms"] <= replayed["wait_p99_ms"]
    assert picture.read_text().startswith("<svg ")


def test_the_engine_counts_the_bytes_that_are_wrong() -> None:
    """One flipped byte in a hit is one wrong byte; in a miss it is not."""
    engine = Engine(WorkingSet(page_bytes=1024, pages=4, batch=2))
    engine.target[:] = engine.source
    engine.target[1500] ^= 1

    assert engine.wrong_bytes([True, True, True, True]) == 1
    assert engine.wrong_bytes([True, False, True, True]) == 0


def test_the_bare_encrypted_stream_carries_every_byte(tmp_path: Path) -> None:
    """The limit that a get over TLS is compared with is a stream that works."""
    sender, receiver = secured.Secured(tmp_path, "bench").pair()
    source = WorkingSet(page_bytes=2**20 + 8, pages=2, batch=2).content()
    target = np.zeros_like(source)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sending = threading.Thread(
            target=secured.send_stream, args=(listener.getsockname()[1], source, sender)
        )
        sending.start()
        rate = secured.receive_stream(listener, target, receiver)
        sending.join(TIMEOUT_S)

    assert rate > 0
    assert np.array_equal(target, source)


def test_both_hosts_compute_the_same_pages() -> None:
    """Keys and content follow from the sizes alone, and no two pages are equal."""
    work = WorkingSet(page_bytes=1024, pages=8, batch=3)

    pages = {bytes(page) for page in work.content().reshape(8, 1024)}
    assert len(pages) == 8
    assert len(set(work.keys(1))) == 8
    assert work.keys(1) != WorkingSet(page_bytes=2048, pages=8, batch=3).keys(1)
    assert [len(work.runs(work.content(), some)) for some in work.batches()] == [3, 3, 2]


@pytest.mark.parametrize(
    "flags",
    [["--page-bytes", "100"], ["--batch", "0"], ["--pages", "0"], ["--threads", "many"]],
)
def test_what_cannot_be_measured_is_a_clear_error(
    flags: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any process starts."""
    monkeypatch.chdir(tmp_path)

    assert main(["bench", "disk", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("peercache: Invalid value for")
    assert flags[0] in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        ("serve", f"as many as make {WORKING_SET_BYTES // 2**20} MiB"),
        ("drive", f"as many as make {WORKING_SET_BYTES // 2**20} MiB"),
        ("disk", f"as many as make {DISK_SET_BYTES // 2**20} MiB"),
    ],
)
def test_help_of_each_kind_names_its_own_default(
    kind: str, default: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench disk` has another working set than the rest, and people look into --help."""
    assert main(["bench", kind, "--help"]) == 0

    assert f"Pages of the working set; default: {default}" in joined(capsys.readouterr().out)


@pytest.mark.parametrize("words", [["disk", "--seconds", "1"], ["serve", "--json"]])
def test_flag_that_would_change_nothing_is_refused(words: list[str]) -> None:
    """A person who gives it expects an effect."""
    assert main(["bench", *words]) == 2


def test_tls_over_shared_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Shared memory is not encrypted, so there is nothing to measure."""
    assert run(local.local, "benchmarks.local", ["--tls"]) == 2
    assert "--fabric tcp" in capsys.readouterr().err


def test_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plot takes minutes to measure, and the sentence names what to install."""
    monkeypatch.setattr(local, "find_spec", lambda _: None)
    monkeypatch.setattr(local, "run_local", lambda *_: pytest.fail("it was measured"))

    assert run(local.local, "benchmarks.local", ["--plot", "picture.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_plot_into_another_kind_of_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The name decides the format, and only PNG is written."""
    assert run(local.local, "benchmarks.local", ["--plot", "picture.gif"]) == 2
    assert "picture.gif: must be a name that ends in .png" in capsys.readouterr().err


def test_engine_that_dies_is_an_error_with_its_status() -> None:
    """The driver does not wait for an answer of a process that has ended."""
    with (
        EngineProcess(WorkingSet(page_bytes=1024, pages=4, batch=2)) as engine,
        pytest.raises(PeerCacheError, match="the engine ended with status 1"),
    ):
        engine.do("get", client="never opened", seconds=0.1)


def joined(text: str) -> str:
    """Return a text on one line, as it was before click broke it."""
    return " ".join(text.split()) + " "


# --- rdma -----------------------------------------------------------------------------------------

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


def test_command_without_rdma_reports_why() -> None:
    """The exit status shows that no READ was measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rdma", "--json", "--near", "no_such_device"],
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
