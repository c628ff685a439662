"""Directory tables between processes: written at full speed, spoilt, and of another user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.memory.layout import table_name
from peercache.memory.table_reading import TORN, AttachedTable, Unusable
from peercache.model.ids import Incarnation
from peercache.model.records import from_bytes
from peercache.trust.sharing import Sharing
from tests.pace import TIMEOUT_S
from tests.unit.memory.table_writer import ALWAYS, NEVER, SOMETIMES, STEADY, keys_of, reported_of

ROOT = Path(__file__).parents[3]
NODE = Incarnation(0x7AB1E)
OTHER_UID = 65_533
RING, NOW_S = 77, 1000.0
ROUNDS = 600
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_writer(shm_dir: Path) -> Iterator[Start]:
    """Start a writer as some user; it has ended after the test."""
    writers: list[subprocess.Popen[str]] = []

    def start(user: str = "") -> subprocess.Popen[str]:
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.memory.table_writer", str(shm_dir), str(NODE), "1",
             user],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        writers.append(writer)
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        return writer

    yield start
    for writer in writers:
        writer.kill()
        writer.communicate()


def epochs_of(writer: subprocess.Popen[str]) -> int:
    """End a writer; return how many epochs its table had."""
    return int(writer.communicate(timeout=TIMEOUT_S)[0])


def look_again_and_again(reader: AttachedTable, rounds: int) -> tuple[int, int]:
    """Check many looks; return how many were torn, and how often a page that goes was found."""
    rng = np.random.default_rng(2)
    generations = dict.fromkeys(ALWAYS, 10)
    torn = coming = 0
    for _ in range(rounds):
        always = rng.choice(np.array(ALWAYS), 40, replace=False)
        others = rng.choice(np.array(SOMETIMES), 20), rng.choice(np.array(NEVER), 20)
        asked = np.concatenate([always, *others])
        try:
            looked = reader.look(keys_of(asked).tobytes(), RING, NOW_S, 0)
        except Unusable as unusable:
            if unusable.reason != TORN:
                raise
            torn += 1
            continue
        records = from_bytes(looked.records)
        numbers = asked[looked.places]
        assert set(always.tolist()) <= set(numbers.tolist()), "what is always there was not found"
        assert not set(numbers.tolist()) & set(NEVER), "what never was there was found"
        for number, record in zip(numbers.tolist(), records, strict=True):
            holder, generation = int(record["holder"]), int(record["generation"])
            assert record.tobytes() == reported_of(number, holder, generation).tobytes(), (
                "a mixture"
            )
            if number in generations:
                assert holder == STEADY
                assert generation >= generations[number], "an older record than before"
                generations[number] = generation
            else:
                assert holder != STEADY
                coming += 1
    return torn, coming


@pytest.mark.slow
@pytest.mark.parametrize("by_kernel", [False, True], ids=["mapped", "by pread"])
def test_what_is_there_is_found_while_another_process_writes(
    shm_dir: Path, start_writer: Start, by_kernel: bool
) -> None:
    """It puts, removes, grows and sweeps. What is always there is found, what never was is not."""
    writer = start_writer()
    descriptor = os.open(shm_dir / table_name(NODE), os.O_RDONLY)
    reader = AttachedTable(descriptor, NODE, by_kernel=by_kernel)

    torn, coming = look_again_and_again(reader, ROUNDS)

    reader.close()
    assert torn < ROUNDS / 2
    assert coming > 20
    assert epochs_of(writer) > 20


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_another_users_table_is_read_by_the_kernel_and_may_be_cut_short(
    shm_dir: Path, start_writer: Start
) -> None:
    """A mapped file that its owner truncates would end the reader's process."""
    os.chown(shm_dir, OTHER_UID, OTHER_UID)
    writer = start_writer(str(OTHER_UID))
    sharing = Sharing.of(share_uids=[str(OTHER_UID)])
    reader = AttachedTable.open(shm_dir, incarnation=NODE, sharing=sharing)
    assert reader.by_kernel
    descriptor = os.open(shm_dir / table_name(NODE), os.O_RDWR)

    _, coming = look_again_and_again(reader, 300)
    assert epochs_of(writer) > 1
    os.ftruncate(descriptor, 4096)
    os.close(descriptor)

    assert coming > 10
    with pytest.raises(Unusable, match="cut_short"):
        reader.look(keys_of([1]).tobytes(), RING, NOW_S, 0)
    reader.close()


def fuzzed(folder: Path, first: int, rounds: int) -> dict[str, int]:
    """Return what was met in so many spoilt tables, the same by both ways of reading."""
    met = []
    for way in ("mapped", "pread"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.memory.table_fuzzer", str(folder), str(first),
             str(rounds), way],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{way}: {done.returncode} {done.stderr}"
        met.append(json.loads(done.stdout))
    assert met[0] == met[1]
    found: dict[str, int] = met[0]
    assert sum(found.values()) == rounds
    return found


@pytest.mark.slow
def test_no_spoilt_table_ends_its_readers_process(shm_dir: Path) -> None:
    """Bits, words, truncations, other beginnings: a reason, or records of the keys asked for."""
    met = fuzzed(shm_dir, 1, 2500)

    assert set(met) == {"read", "cut_short", "foreign", TORN, "other_version", "malformed"}
    assert min(met.values()) > 10
