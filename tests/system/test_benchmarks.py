"""The benchmarks of developers: they measure what they say, from a checkout."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import chains, eviction, peers, peers_engine, peers_report, set_pages
from benchmarks.null_device import instant_fabric
from benchmarks.own_time import BATCH, GRANULE, PAGE_BYTES, Batch, own_time_us
from peercache.cli.bench.engine import WorkingSet
from peercache.model.seal import SEAL
from peercache.paths.write import PORTION_BYTES

ROOT = Path(__file__).parents[2]


def benchmark(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end, from the checkout."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *words],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def test_own_time_a_page_is_a_few_microseconds() -> None:
    """On a quiet machine it is 4 to 5; several times that is a bug."""
    for _ in range(20):  # Other processes make single runs slow.
        figures = own_time_us()
        slowest_us = max(figures.values())
        if slowest_us < 30 and figures["cpu_us_page_fabric"] < figures["cpu_us_page"]:
            break

    assert min(figures.values()) > 0
    assert slowest_us < 30, figures
    assert figures["cpu_us_page_fabric"] < figures["cpu_us_page"]


@pytest.mark.parametrize("apart", [1, 2])
def test_what_is_timed_is_a_get_whose_every_page_is_a_hit(apart: int) -> None:
    """Seals arrive and are judged; a path that ended early would be quick, and worth nothing."""
    target = np.zeros(2 * BATCH * PAGE_BYTES, np.uint8)
    seals = np.zeros(target.nbytes // GRANULE, SEAL)
    fabric = instant_fabric(page_bytes=target.nbytes, granule=GRANULE, seals=seals)
    fabric.register("bench", int(target.ctypes.data), target.nbytes, target)
    places = np.arange(BATCH, dtype=np.uint64) * np.uint64(apart)

    batch = Batch(fabric, target, seals, places)
    batch.commit()
    outcome = batch.get()
    fabric.close()

    assert outcome.hits.all()
    assert outcome.pages_by_fabric == {"rdma": BATCH}


@pytest.mark.slow
def test_set_pages_measures_every_row_and_reads_back_what_it_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One batch of two portions: both clusters, one node stopped, and no wrong byte."""
    work = WorkingSet(2**20, 128, 128)
    assert work.total_bytes == 2 * PORTION_BYTES
    for name, value in {
        "SIZES": (work,),
        "FRESH_BYTES": 2 * work.total_bytes,
        "FULL_BYTES": work.total_bytes * 5 // 4,
        "SETTLED_S": 0.5,
    }.items():
        monkeypatch.setattr(set_pages, name, value)

    rows = set_pages.measure_all(2, "", 4, lambda _: None, set_pages.VARIANTS)

    kinds = [
        f"{nodes} nodes, {pool}{variant}"
        for nodes in (3, 4)
        for variant in ("", ", one portion", ", no slots ahead")
        for pool in ("fresh", "full")
    ]
    stopped = ["4 nodes, one stopped, first set", "4 nodes, one stopped, fresh"]
    assert list(rows) == [f"128 x 1024 KiB, {kind}" for kind in kinds + stopped]
    for name, row in rows.items():
        steps = sum(row[step] for step in set_pages.STEPS)
        assert 0 < row["copy_step_ms"] < steps, name
        assert row["ratio"] > 0
        assert row.get("wrong_bytes", 0) == row["missed"] == 0
    assert "128 x 1024 KiB" in set_pages.table(rows)


WALK_MAX = {
    "get, warm, tcp": (13, 42),
    "get, cold, tcp": (15, 64),
    "get, warm, shm": (13, 44),
    "set": (14, 52),
}
"""Files that a call enters, and its moves between them: what a reader has to follow."""

WALK_MAX_ALL = {"set, 128 MiB": 44, "get, cold, all": 32, "join": 29}
"""Files in all processes together; a slow join also has what is done once a second."""


@pytest.mark.slow  # it traces calls of three processes
def test_a_call_walks_through_few_files() -> None:
    """A step more is seen here, and is worth a thought."""
    done = benchmark("walk", "--json")

    walks = json.loads(done.stdout)
    together = walks.pop("all processes")
    assert walks.keys() == WALK_MAX.keys()
    assert together.keys() == WALK_MAX_ALL.keys()
    for call, files in WALK_MAX_ALL.items():
        assert together[call]["files"] <= files, (call, together[call])
    for call, (files, moves) in WALK_MAX.items():
        assert walks[call]["files"] <= files, (call, walks[call])
        assert walks[call]["moves"] <= moves, (call, walks[call])


@pytest.mark.slow  # it measures time, which tests in parallel would spoil
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="requires two processors")
def test_tax_prints_the_loss_of_each_shape() -> None:
    """A small run through real processes; the reader verifies every byte that it is served."""
    done = benchmark(
        "tax", "--json", "--pages", "8", "--batch", "4", "--page-bytes", "64KiB",
        "--seconds", "0.1",
    )  # fmt: skip

    figures = json.loads(done.stdout)
    for shape in ("embedded", "standalone"):
        assert figures[f"tax_{shape}"] < 1
        assert figures[f"tax_{shape}_floor"] < 1
        assert figures[f"tax_{shape}_served_gb_s"] > 0


class KeptPages:
    """A store in memory; `spoil` is what it does to a page that it returns.

    is_stale: it has under each key what was set first under another one, in the same order.
    """

    def __init__(self, settings: dict[str, Any], memory: list[Any]) -> None:
        self.pages: dict[str, Any] = {}
        self.limit = settings.get("limit", 10**9)
        self.spoil = settings["spoil"]
        self.is_stale = settings.get("is_stale", False)

    def places(self, addresses: list[int], page_bytes: int) -> list[Any]:
        kind = ctypes.c_ubyte * page_bytes
        return [np.frombuffer(kind.from_address(address), np.uint8) for address in addresses]

    def set(self, keys: list[str], places: list[Any]) -> list[bool]:
        stored = [len(self.pages) + number < self.limit for number in range(len(keys))]
        kept = zip(keys, places, stored, strict=True)
        self.pages.update({key: place.copy() for key, place, ok in kept if ok})
        return stored

    def get(self, keys: list[str], places: list[Any], fabric: str) -> list[bool]:
        for key, place in zip(keys, places, strict=True):
            if self.is_stale:
                self.pages[key] = self.pages.pop(next(iter(self.pages)))
            if key in self.pages:
                place[:] = self.pages[key]
                self.spoil(place)
        return [key in self.pages for key in keys]

    def exists(self, keys: list[str], fabric: str = "") -> int:
        return sum(key in self.pages for key in keys)


def kept_pages(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> peers_engine.Engine:
    """Return an engine of `benchmarks.peers` with 512 pages in such a store."""
    monkeypatch.setitem(peers_engine.STORES, "kept", KeptPages)
    engine = peers_engine.Engine()
    settings = {"spoil": lambda page: None, **settings}
    engine.open("kept", settings, page_bytes=64, batch=128, total_bytes=512 * 64)
    return engine


@pytest.mark.parametrize("byte", [0, 30, 63])
def test_peers_count_a_hit_with_one_wrong_byte(monkeypatch: pytest.MonkeyPatch, byte: int) -> None:
    """Another store's bytes are judged as ours are: every byte of every page."""

    def spoil(page: Any) -> None:
        page[byte] ^= 1

    sound, broken = kept_pages(monkeypatch), kept_pages(monkeypatch, spoil=spoil)
    for engine, wrong in ((sound, 0), (broken, 512)):
        assert engine.set(1)["done"] == 512
        answer = engine.get(1)
        assert (answer["done"], answer["pages"], answer["wrong"]) == (512, 512, wrong)


def test_peers_count_a_page_of_another_generation_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that serves last round's page under this round's key has wrong bytes."""
    engine = kept_pages(monkeypatch, is_stale=True)
    engine.set(1)

    assert engine.get(2)["wrong"] == 512


def test_peers_count_pages_that_were_refused_and_keys_that_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that stores nothing is not fast, and one that knows nothing answers wrongly."""
    engine = kept_pages(monkeypatch, limit=128)

    assert engine.set(1)["done"] == 128
    assert engine.get(1)["done"] == 128
    known = engine.exists_known(1, calls=2)
    assert (known["done"], known["pages"]) == (128, 256)
    unknown = engine.exists_unknown(calls=2)
    assert (unknown["done"], unknown["pages"]) == (256, 256)


def shown(**medians: Any) -> dict[str, Any]:
    """Return figures of one row of rates: a median, or a median and a share, for each store."""
    cells = {}
    for name, value in medians.items():
        median, share = value if isinstance(value, tuple) else (value, 1.0)
        cells[name] = {"median": median, "least": median, "greatest": median, "share": share}
    return {"rows": {"row": cells}, "versions": dict.fromkeys(peers_report.TITLES, "1")}


def test_peers_best_other_is_one_that_did_what_it_was_asked() -> None:
    """More is better for rates, less for times; half of the pages stored is no rate to beat."""
    rates = peers_report.Row("set", "row")
    times = peers_report.Row("exists", "row", less=True)

    assert peers_report.ratio(rates, shown(ours=6.0, mooncake=2.0, redis=3.0)) == 2.0
    assert peers_report.ratio(times, shown(ours=6.0, mooncake=2.0, redis=3.0)) == 3.0
    assert peers_report.ratio(rates, shown(ours=6.0, mooncake=2.0, redis=(3.0, 0.5))) == 3.0
    assert peers_report.ratio(rates, shown(ours=6.0)) is None


def test_the_picture_of_failures_shows_what_hung_and_what_missed() -> None:
    """A store that was given up, or answered for a part of the pages, has no short bar."""
    row = "killed get longest"
    figures = shown(ours=2.0, mooncake=15_000.0, redis=(4.0, 0.5))
    figures = {**figures, "rows": {row: figures["rows"]["row"]}, "hung_ms": 15_000.0}

    picture = peers_report.failures_picture(figures)
    assert all(
        f">{text}<" in picture
        for text in ("2.00 ms", "over 15,000 ms", "4.00 ms, 50% of the pages")
    )


@pytest.mark.parametrize(
    "fault", [{"problems": ["ours, set: it hung"]}, {"wrong_pages": {"ours tcp": 1}}]
)
def test_peers_keeps_no_figures_of_a_run_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: dict[str, Any]
) -> None:
    """`make peers` then leaves the old ones; what another store does wrong is a figure."""
    file = tmp_path / "peers.json"
    figures = peers_report.measured() | {
        "problems": ["redis: it hung"],
        "wrong_pages": {"redis": 1},
    }
    for shown, is_kept in ((figures | fault, False), (figures, True)):
        monkeypatch.setattr(peers, "measure", lambda *_, shown=shown: shown)
        done = CliRunner().invoke(peers.peers, ["--json", str(file)])
        assert (done.exit_code == 0) == is_kept, done.output
        assert file.exists() == is_kept


@pytest.mark.slow  # it starts three nodes and three engines, five times
def test_peers_measures_ours_alone(tmp_path: Path) -> None:
    """Every row has a figure, every page came, and every byte was right."""
    file = tmp_path / "peers.json"
    done = benchmark("peers", "--quick", "--compare", "none", "--json", str(file))

    figures = json.loads(file.read_text())
    assert not figures["problems"]
    assert not any(figures["wrong_pages"].values())
    rows = [
        *peers_report.moving_rows(figures), *peers_report.ASKING_ROWS,
        *peers_report.FAULT_RATES, *peers_report.FAULT_TIMES,
    ]  # fmt: skip
    assert rows
    for row in rows:
        assert figures["rows"][row.name][row.ours]["median"] > 0, row
    assert all(row.label in done.stdout for row in rows)
    for name in ("get", "set", "set full"):
        cells = figures["rows"][f"{name} {figures['sizes'][0]['name']}"]
        assert {cell["share"] for cell in cells.values()} == {1.0}, (name, cells)


def test_chains_finds_every_stored_page_by_key_and_by_chain() -> None:
    """Both routes end at an owner with the record, and the one by chain asks fewer nodes."""
    keys = chains.keys_of(np.random.default_rng(9), 300)
    stored = frozenset(keys[:200].tolist())
    asked = {
        scheme: chains.asked_for(chains.directory_of(scheme, [keys], stored), keys, 7, 128)
        for scheme in chains.SCHEMES
    }

    assert {each.found for each in asked.values()} == {200}
    assert asked["chain"].requests.total() < asked["cover"].requests.total() / 4
    assert asked["cover"].requests.total() < asked["key"].requests.total()


def test_eviction_replays_a_trace_through_the_pool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two long prompts in turns, in a pool that has room for one: LRU keeps nothing of use."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 10_000 * turn,
            "hash_ids": list(range(1000 * (turn % 2), 1000 * (turn % 2) + 300)),
        }
        for turn in range(8)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))

    assert eviction.main([str(trace), "--blocks", "320", "700"]) == 0

    titles, small, large = (line.split() for line in capsys.readouterr().out.splitlines())
    assert titles == ["blocks", "pool", "LRU", "deepest", "pool/LRU"]
    assert small[0] == "320"
    assert float(small[1]) > 0.05
    assert float(small[2]) == 0
    assert large[:4] == ["700", "0.750", "0.750", "0.750"], "six of eight find all"
