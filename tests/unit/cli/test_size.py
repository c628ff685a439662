"""`peercache size`: what more memory would bring, from a cluster, from a trace, and in GiB."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from peercache.cli.main import main
from peercache.cli.operate import size
from peercache.model.reuse import MEMORY_NAMES
from peercache.model.status import MemberStatus, Reuse, Status, Tier

LLAMA_8B = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")


RATES = dict(zip(MEMORY_NAMES, (0.1, 0.2, 0.4, 0.55, 0.6, 0.6), strict=True))


class Cluster:
    """Two nodes, one of which no client has used."""

    cluster = "prod"
    reuse = Reuse(uses=5_000.0, hit_rates=RATES)

    def __init__(self, *_: Any) -> None:
        """Answer any question."""

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Keep nothing."""

    def statuses(self) -> list[MemberStatus]:
        pool = Tier(size=2**35)
        return [
            MemberStatus(answers=True, status=Status(host="a", pool=pool, reuse=self.reuse)),
            MemberStatus(answers=True, status=Status(host="b", pool=pool)),
            MemberStatus(status=Status(host="c", state="no answer")),
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> type[Cluster]:
    monkeypatch.setattr(size, "Operator", Cluster)
    return Cluster


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Return a trace in which every prompt comes back after 999 others, of two blocks each."""
    path = tmp_path / "trace.jsonl"
    prompts = [[2 * number, 2 * number + 1] for number in range(1_000)]
    lines = [
        json.dumps({"timestamp": number, "hash_ids": prompt})
        for number, prompt in enumerate(prompts + prompts)
    ]
    random.Random(1).shuffle(lines)
    path.write_text("\n".join(lines))
    return path


def reported(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    """Return what the command prints as JSON."""
    assert main(["size", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def problem(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the command complains of."""
    assert main(["size", *arguments]) == 2
    return capsys.readouterr().err


@pytest.mark.usefixtures("cluster")
def test_curve_of_a_cluster_is_of_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """In bytes of all nodes and of each host, and in tokens of a model."""
    found = reported(capsys, *LLAMA_8B)

    assert (found["source"], found["uses"], found["hosts"]) == ("cluster prod", 5_000, 2)
    assert found["bytes_a_token"] == 2 * 32 * 8 * 128 * 2
    assert [each["times"] for each in found["sizes"]] == [0.25, 0.5, 1, 2, 4, 8]
    twice = found["sizes"][3]
    assert (twice["hit_rate"], twice["bytes"], twice["bytes_a_host"]) == (0.55, 2**37, 2**36)
    assert twice["tokens"] == 2**37 // found["bytes_a_token"]
    assert twice["blocks"] is None
    assert reported(capsys, "--hosts", "8")["sizes"][2]["bytes_a_host"] == 2**33


@pytest.mark.usefixtures("cluster")
def test_table_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    """With a bar for each hit rate."""
    assert main(["size", *LLAMA_8B]) == 0

    text = capsys.readouterr().out
    assert "cluster prod, 2 hosts, 5,000 uses of pages" in text
    assert "a token takes 128.0 KiB" in text
    assert next(line.split() for line in text.splitlines() if "2 ×" in line) == [
        "2", "×", "1,048,576", "128.0", "GiB", "64.0", "GiB", "55.0", "%", 14 * "█"
    ]  # fmt: skip


def test_cluster_that_was_not_used_has_no_curve(
    cluster: type[Cluster], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ends with 1."""
    monkeypatch.setattr(cluster, "reuse", Reuse())

    assert reported(capsys, status=1)["sizes"] == []
    assert main(["size"]) == 1
    assert capsys.readouterr().out == "cluster prod: no page was used yet\n"


def test_curve_of_a_trace_ends_where_all_of_it_fits(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then every prompt is a hit when it comes back."""
    found = reported(capsys, "--trace", str(trace), *LLAMA_8B, "--hosts", "2")

    sizes = found["sizes"]
    assert [each["blocks"] for each in sizes] == [250, 500, 1_000, 2_000]
    assert sizes[-1]["hit_rate"] == pytest.approx(0.5, abs=0.02)
    assert [each["hit_rate"] for each in sizes] == sorted(each["hit_rate"] for each in sizes)
    assert sizes[0]["times"] == 0.125
    assert sizes[0]["tokens"] == 250 * 512
    assert sizes[0]["bytes"] == 2 * sizes[0]["bytes_a_host"] == 250 * 512 * found["bytes_a_token"]
    small = reported(capsys, "--trace", str(trace), "--page-size", "64")
    assert (small["sizes"][0]["tokens"], small["sizes"][0]["bytes"]) == (250 * 64, None)


def test_small_trace_has_one_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Less memory than SHORT_USES blocks is not estimated."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [1, 2, 3]}\n')
    assert [each["blocks"] for each in reported(capsys, "--trace", str(path))["sizes"]] == [3]
    path.write_text("")
    assert reported(capsys, "--trace", str(path), status=1)["sizes"] == []


@pytest.mark.parametrize(
    ("flags", "token_bytes"),
    [
        (LLAMA_8B, 131_072),
        ((*LLAMA_8B, "--tp", "8"), 131_072),
        ((*LLAMA_8B, "--tp", "16"), 2 * 131_072),
        ((*LLAMA_8B, "--dtype", "fp8"), 65_536),
        (("--layers", "61", "--mla-dim", "576", "--tp", "16"), 61 * 576 * 2),
    ],
    ids=["heads", "divided among ranks", "repeated at ranks", "fp8", "mla"],
)
@pytest.mark.usefixtures("cluster")
def test_bytes_of_a_token(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], token_bytes: int
) -> None:
    """Ranks divide the heads; more ranks than heads repeat them; with MLA one rank stores all."""
    assert reported(capsys, *flags)["bytes_a_token"] == token_bytes


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ("--layers", "32"),
            "A model requires --layers, and --kv-heads with --head-dim or --mla-dim",
        ),
        (("--layers", "32", "--kv-heads", "8"), "A model requires --layers"),
        (("--mla-dim", "576"), "A model requires --layers"),
        ((*LLAMA_8B, "--mla-dim", "576"), "A model requires --layers"),
        ((*LLAMA_8B, "--tp", "3"), "--kv-heads 8 cannot be divided among --tp 3"),
        (("--layers", "0"), "0 is not in the range"),
        (("--dtype", "int3"), "'int3' is not one of"),
        (("--page-size", "64"), "--page-size requires --trace"),
        (("--trace", "/nowhere/trace.jsonl"), "/nowhere/trace.jsonl cannot be read"),
        (("--at", "127.0.0.1:1"), "nothing listens there"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], expected: str
) -> None:
    """With exit status 2."""
    assert expected in problem(capsys, *flags)


def test_a_line_that_is_no_request_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its number."""
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    assert "trace.jsonl, line 1: a request has" in problem(capsys, "--trace", str(path))
