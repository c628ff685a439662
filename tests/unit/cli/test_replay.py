"""A replay sends each request to a node at its time, and counts what came of it."""

from __future__ import annotations

import json
import threading
import time
import xml.etree.ElementTree as ET
from ctypes import memmove
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.cli.bench import picture
from peercache.cli.bench.replay import (
    Answer,
    Outcome,
    Plan,
    ReplayEngine,
    WrongBytes,
    ideal_hits,
    ideal_hits_by_node,
    keys_of,
    play,
    speed_for,
)
from peercache.cli.bench.report import print_replays, replay_column
from peercache.cli.main import main
from peercache.cli.traces import Prompt
from peercache.client.report import add_missed
from peercache.model.keys import PageKeys
from peercache.model.runs import PageRuns

BLOCK_BYTES = 4096


def plan_of(requests: list[Prompt], **more: Any) -> Plan:
    """Return a plan for two nodes."""
    given = {
        "nodes": 2, "prefill": 2, "routing": "even", "block_bytes": BLOCK_BYTES, "speed": 1000.0,
        "seed": 1,
    }  # fmt: skip
    return Plan(requests=requests, **{**given, **more})


def outcome_of(requests: list[Prompt], answers: list[Answer], **more: Any) -> Outcome:
    """Return an outcome with room for 10 blocks; idealised caches hit nothing."""
    none = [0] * len(requests)
    given: dict[str, Any] = {"ideal": none, "ideal_by_node": none, "counted": {}, "seconds": 1.0}
    return Outcome(plan_of(requests), 10, answers, **{**given, **more})


# --- routing --------------------------------------------------------------------------------------


def sessions(count: int, requests_each: int) -> list[Prompt]:
    """Return requests of sessions that all begin with the block 0."""
    return [
        Prompt(float(turn), [0, session, *range(10**6, 10**6 + turn)])
        for turn in range(requests_each)
        for session in range(1, count + 1)
    ]


def test_even_routing_uses_every_prefill_node_and_no_other() -> None:
    """A seed gives the same nodes again, another one others."""
    requests = sessions(100, 10)
    routed = plan_of(requests, nodes=4, prefill=2).routed()

    assert set(routed) == {0, 1}
    assert 400 < routed.count(0) < 600
    assert routed == plan_of(requests, nodes=4, prefill=2).routed()
    assert routed != plan_of(requests, nodes=4, prefill=2, seed=2).routed()


def test_zipf_routing_keeps_a_session_at_its_node() -> None:
    """The nodes get sessions as 1 : 1/2 : 1/3 : 1/4, although all prompts begin alike."""
    requests = sessions(2000, 3)
    routed = plan_of(requests, nodes=4, prefill=4, routing="zipf").routed()

    homes = {(request.blocks[1], node) for request, node in zip(requests, routed, strict=True)}
    assert len(homes) == 2000
    shares = [routed.count(node) / len(routed) for node in range(4)]
    assert shares == pytest.approx([0.48, 0.24, 0.16, 0.12], abs=0.03)


def test_room_is_divided_to_the_block() -> None:
    """So that nodes and the one LRU have the same memory."""
    plan = plan_of([], nodes=3)

    assert plan.rooms(11) == [4, 4, 3]
    assert plan.batch(3000) == 128
    assert plan.batch(48) == 4
    assert plan.batch(11) == 0


@pytest.mark.parametrize(
    ("length_s", "speed"), [(0, 1), (30, 1), (1800, 30), (3600, 60), (10_800, 60)]
)
def test_the_default_factor_makes_it_a_minute(length_s: float, speed: float) -> None:
    """At most 60, beyond which the pool's second distorts the order of eviction."""
    assert speed_for([Prompt(0, [1]), Prompt(length_s, [1])]) == speed
    assert speed_for([]) == 1


# --- schedule -------------------------------------------------------------------------------------


def test_requests_begin_in_order_at_their_times() -> None:
    """Divided by the factor; a node that is busy makes its own next request late, and no other."""
    requests = [Prompt(0.0, [1]), Prompt(60.0, [2]), Prompt(120.0, [3])]
    plan = plan_of(requests, speed=600.0, nodes=1, prefill=1)
    began: list[tuple[float, list[int]]] = []

    def serve(request: Prompt) -> Answer:
        began.append((time.monotonic(), request.blocks))
        if request.blocks == [2]:
            time.sleep(0.3)
        return Answer(request.blocks[0])

    steps: list[int] = []
    answers = play(plan, [serve], lambda: steps.append(1))

    assert [blocks for _, blocks in began] == [[1], [2], [3]]
    assert began[1][0] - began[0][0] > 0.05
    assert [answer.hits for answer in answers] == [1, 2, 3]
    assert answers[2].late_s > 0.1
    assert len(steps) == 3


def test_nodes_serve_at_the_same_time() -> None:
    """A prompt at one node does not wait for that of another one."""
    requests = [Prompt(0.0, [number]) for number in range(20)]
    both = threading.Barrier(2, timeout=30)
    firsts = [False, False]

    def server(node: int) -> Any:
        def serve(_: Prompt) -> Answer:
            if not firsts[node]:
                firsts[node] = True
                both.wait()
            return Answer(0)

        return serve

    assert len(play(plan_of(requests), [server(0), server(1)], lambda: None)) == 20


def test_an_error_ends_the_replay_before_the_next_request() -> None:
    """Not an hour later."""
    requests = [Prompt(0.0, [1]), Prompt(3600.0, [2])]

    def serve(request: Prompt) -> Answer:
        raise WrongBytes(f"{request.blocks} are wrong")

    with pytest.raises(WrongBytes, match=r"\[1\] are wrong"):
        play(plan_of(requests, speed=1.0, prefill=1), [serve], lambda: None)


# --- one request ----------------------------------------------------------------------------------


class FakeCluster:
    """A client of a cluster that stores everything, and loses what it is asked to."""

    def __init__(self) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.lost: dict[bytes, str] = {}
        self.sizes: list[int] = []

    def batch_touch(self, keys: PageKeys) -> int:
        known = [key.tobytes() in self.pages for key in keys]
        add_missed({"absent": known.count(False)})
        return known.index(False) if False in known else len(known)

    def batch_get_into(self, keys: PageKeys, segments: PageRuns) -> list[bool]:
        hits = []
        for key, address in zip(keys, segments.addresses.tolist(), strict=True):
            why = self.lost.get(key.tobytes(), "")
            add_missed({why: 1})
            hits.append(not why)
            if not why:
                memmove(address, self.pages[key.tobytes()], BLOCK_BYTES)
        return hits

    def batch_set_from(self, keys: PageKeys, segments: PageRuns) -> list[bool]:
        self.sizes.append(len(keys))
        for key, address in zip(keys, segments.addresses.tolist(), strict=True):
            page = np.zeros(BLOCK_BYTES, np.uint8)
            memmove(page.ctypes.data, address, BLOCK_BYTES)
            self.pages[key.tobytes()] = page.tobytes()
        return [True] * len(keys)


def test_an_engine_reads_the_leading_run_and_stores_the_rest_in_batches() -> None:
    """What follows the first block that is not there is stored again."""
    cluster = FakeCluster()
    engine = ReplayEngine(cluster, BLOCK_BYTES, 4)

    assert engine.serve(Prompt(0, list(range(10)))).hits == 0
    assert cluster.sizes == [4, 4, 2]
    again = engine.serve(Prompt(0, list(range(12))))
    assert (again.hits, again.reason) == (10, "absent")
    assert engine.serve(Prompt(0, list(range(12)))).reason == ""
    del cluster.pages[keys_of([5]).tobytes()]
    assert engine.serve(Prompt(0, list(range(12)))).hits == 5
    assert engine.serve(Prompt(0, [])) == Answer(0)
    assert len(set(cluster.pages.values())) == 12


def test_a_run_that_ends_at_a_failed_read_has_its_reason() -> None:
    """Not that of blocks behind it that no node has."""
    cluster = FakeCluster()
    engine = ReplayEngine(cluster, BLOCK_BYTES, 8)
    engine.serve(Prompt(0, [1, 2, 3]))
    cluster.lost = {keys_of([2]).tobytes(): "evicted"}

    answer = engine.serve(Prompt(0, [1, 2, 3, 4, 5]))

    assert (answer.hits, answer.reason) == (1, "evicted")


@pytest.mark.parametrize("kind", ["another block", "one bit", "nothing written"])
def test_wrong_bytes_end_the_replay(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of other content, one wrong bit, and a hit that left the memory as it was."""
    cluster = FakeCluster()
    engine = ReplayEngine(cluster, BLOCK_BYTES, 4)
    engine.serve(Prompt(0, [1, 2, 3]))
    assert engine.serve(Prompt(0, [1, 2, 3])).hits == 3
    third = keys_of([3]).tobytes()
    page = bytearray(cluster.pages[third])
    page[2000] ^= 1
    if kind == "another block":
        cluster.pages[third] = cluster.pages[keys_of([2]).tobytes()]
    elif kind == "one bit":
        cluster.pages[third] = bytes(page)
    else:
        monkeypatch.setattr(cluster, "batch_get_into", lambda keys, _: [True] * len(keys))

    with pytest.raises(WrongBytes, match="not read as they were set"):
        engine.serve(Prompt(0, [1, 2, 3]))


# --- counting -------------------------------------------------------------------------------------


def test_idealised_caches_have_the_same_memory_and_routing() -> None:
    """Each node reads what any node has; memory of a node without requests stays empty."""
    prompts = [[1, 2], [3, 4], [1, 2, 5]]
    requests = [Prompt(number, blocks) for number, blocks in enumerate(prompts)]

    assert ideal_hits(requests, 4) == [0, 0, 2]
    assert ideal_hits_by_node(requests, [0, 1, 1], [2, 2]) == [0, 0, 2]
    assert ideal_hits_by_node(requests, [0, 0, 0], [2, 2]) == [0, 0, 0]
    assert ideal_hits_by_node(requests, [0, 0, 0], [4]) == [0, 0, 2]


def test_a_block_that_another_node_read_is_not_the_next_to_go() -> None:
    """It is touched where it is."""
    requests = [Prompt(0, [1]), Prompt(1, [2]), Prompt(2, [1]), Prompt(3, [3]), Prompt(4, [1])]

    assert ideal_hits_by_node(requests, [0, 0, 1, 0, 1], [2, 2]) == [0, 0, 1, 0, 1]


def test_figures_count_blocks() -> None:
    """Every block is a hit, or has the reason for which the run before it ended."""
    requests = [Prompt(0, [1, 2, 3, 4]), Prompt(1, [1, 2, 3, 4]), Prompt(2, [1, 2])]
    answers = [
        Answer(0, 0.001, "absent"), Answer(3, 0.002, "evicted"), Answer(2, 0.5, late_s=0.25),
    ]  # fmt: skip
    counted = {"bytes_read_shm": 5.0, "bytes_written": 7.0, "sets_refused_pool_full": 2.0}
    outcome = outcome_of(requests, answers, ideal=[0, 4, 2], counted=counted)

    figures = outcome.figures()

    assert figures["hit_rate"] == 0.5
    assert figures["lru_hit_rate"] == 0.6
    assert figures["of_lru"] == pytest.approx(5 / 6, abs=1e-4)
    assert figures["misses"] == {"absent": 4, "evicted": 1}
    assert sum(figures["misses"].values()) + sum(outcome.hits) == outcome.plan.asked
    assert (figures["bytes_read"], figures["bytes_written"]) == ({"shm": 5}, 7)
    assert figures["sets_refused"] == {"pool_full": 2}
    assert (figures["wait_p99_ms"], figures["late_max_s"]) == (500.0, 0.25)
    json.dumps({**outcome.plan.figures(), **figures})
    column = replay_column(figures)
    assert column["compared with it"] == "0.83"
    assert column["not hit: evicted"] == "1"


def test_the_table_has_a_column_for_each_number_of_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a reason that only one of them has."""
    requests = [Prompt(0, [1, 2])]
    outcomes = [outcome_of(requests, [Answer(0, 0, why)]) for why in ("absent", "evicted")]

    print_replays("trace.jsonl", outcomes[0].plan, outcomes)

    shown = capsys.readouterr().out
    assert "trace.jsonl: 1 requests for 2 blocks of 4.0 KiB, 1,000 times as fast" in shown
    assert [line.split() for line in shown.splitlines() if "not hit" in line] == [
        ["not", "hit:", "absent", "2", "-"],
        ["not", "hit:", "evicted", "-", "2"],
    ]


def test_a_cache_that_hits_nothing_has_no_ratio() -> None:
    """Instead of a division by zero."""
    outcome = outcome_of([Prompt(0, [1])], [Answer(0, 0.0, "absent")])

    assert outcome.figures()["of_lru"] is None
    assert "compared with it" not in replay_column(outcome.figures())


def test_the_rate_over_time_is_that_of_each_part() -> None:
    """A part without requests is left out."""
    requests = [Prompt(0, [1, 2]), Prompt(60, [1, 2]), Prompt(120, [1, 2, 3, 4])]
    outcome = outcome_of(requests, [])

    assert outcome.over_time([0, 2, 1], parts=4) == [(0.25, 0.0), (1.25, 1.0), (1.75, 0.25)]


def test_the_picture_has_a_line_for_each_rate() -> None:
    """Over time, and by the number of blocks where several were replayed."""
    requests = [Prompt(0, [1, 2]), Prompt(60, [1, 2])]
    outcome = outcome_of(requests, [Answer(0), Answer(2)], ideal=[0, 2])

    one = ET.fromstring(picture.of_replays("a & b.jsonl", [outcome]))
    two = ET.fromstring(picture.of_replays("a & b.jsonl", [outcome, outcome]))

    lines = "{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}polyline"
    assert len(one.findall(lines)) == 2
    assert len(two.findall(lines)) == 4 + 2


@pytest.mark.parametrize(
    ("longest", "step"), [(0.05, 0.005), (1, 0.1), (12, 2), (60, 10), (4000, 500), (16_000, 2000)]
)
def test_an_axis_has_round_marks(longest: float, step: float) -> None:
    """At most ten of them."""
    assert picture.tick_step(longest) == pytest.approx(step)


# --- what people give -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--prefill", "3", "--nodes", "2"], "'--prefill': 3 are more than all 2 nodes"),
        (["--blocks", "7", "--nodes", "2"], "'--blocks': 7 are too few"),
        (["--block-size", "12KiB"], "'--block-size': 12288 must be a power of two"),
        (["--block-size", "1KiB"], "'--block-size'"),
        (["--set", "spill"], "'--set': 'spill' must be NAME=VALUE"),
        (["--set", "pool-size=1GiB"], "'--set': pool_size is given by the replay itself"),
        (["--set", "op_timeout=3"], "op_timeout"),
        (["--picture", "none/here.svg"], "must be a name that ends in .svg"),
        (["--picture", "here.png"], "must be a name that ends in .svg"),
        (["--speed", "0"], "'--speed'"),
        (["--blocks", "4000000000"], "take fewer --blocks"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(
    flags: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any node starts."""
    monkeypatch.chdir(tmp_path)
    Path("trace.jsonl").write_text('{"timestamp": 1, "hash_ids": [1, 2]}\n')

    assert main(["bench", "replay", "--trace", "trace.jsonl", *flags]) == 2

    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}\n", '{"timestamp": 1, "hash_ids": []}\n'])
def test_a_file_that_is_no_trace_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is wrong with it."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    assert main(["bench", "replay", "--trace", str(path)]) == 2

    error = capsys.readouterr().err
    assert error.startswith("peercache: Invalid value for '--trace': ")
    assert str(path) in error
