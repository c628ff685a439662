"""The shared-memory fabric with an owner in a process of its own, which rewrites or is killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from peercache.fabric.shm import ShmFabric
from peercache.memory.layout import segment_name
from peercache.model.member import Member
from tests.unit.fabric.test_shm import FOREVER, NODE, Bytes, asking, fabric, member

OWNER = """
import sys
import numpy as np
from peercache.memory.published import PublishedSegment
segment = PublishedSegment.create(sys.argv[1], incarnation=9, page_bytes=1 << 20, granule=16384)
segment.populate(1 << 20)
print("ready", flush=True)
sequence, elsewhere = 0, np.empty(4 << 20, np.uint8)
for line in sys.stdin:
    for _ in range(int(line)):
        # What a pool does with a slot: odd, new bytes, the next even number.
        sequence += 1
        segment.store_words(np.array([0]), np.array([2 * sequence - 1], np.uint64))
        segment.pages[:] = sequence % 251
        segment.store_words(np.array([0]), np.array([2 * sequence], np.uint64))
        if sequence == 1:
            print("written", flush=True)
        # The page rests for longer than its rewrite takes, so that some reads fit in between.
        elsewhere[:] = 1
"""


@pytest.fixture
def other_process(shm_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """Publish in another process, which rewrites its one page as often as it is asked to."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(shm_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def rewrite(process: subprocess.Popen[str], rounds: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{rounds}\n")
    process.stdin.flush()


def test_no_page_with_an_unchanged_word_has_another_byte_while_its_owner_rewrites(
    other_process: subprocess.Popen[str], shm_dir: Path
) -> None:
    """A whole megabyte is read while another process rewrites it: an even word fits its bytes.

    A word that was even and the same before the read is the generation of a record that a reader
    could have had.
    """
    shm, host = fabric(), np.zeros((1, 1 << 20), np.uint8)
    peer = member(shm_dir / segment_name(NODE))
    rewrite(other_process, 1_000_000)
    assert other_process.stdout is not None
    other_process.stdout.readline()
    verified, refused = verdicts(shm, peer, host, until=20)

    # How often each comes is up to the scheduler; that both came is what makes this a test.
    assert verified >= 20
    assert refused >= 20
    shm.close()


def verdicts(shm: ShmFabric, peer: Member, host: Bytes, *, until: int) -> tuple[int, int]:
    """Read until both verdicts came `until` times; return how often each of them did."""
    tiny = np.zeros((1, 2), np.uint8)
    verified = refused = 0
    for _ in range(200_000):
        if verified >= until and refused >= until:
            break
        record = shm.read(asking(peer, tiny, [0]), FOREVER).seals["word"][0]
        word = shm.read(asking(peer, host, [0], word=record), FOREVER).seals["word"][0]
        if record % 2 == 0 and word == record:
            verified += 1
            assert set(np.unique(host).tolist()) == {(int(record) // 2) % 251}
        else:
            refused += 1
    return verified, refused


def test_pages_of_a_killed_owner_stay_readable_where_they_are_mapped(
    other_process: subprocess.Popen[str], shm_dir: Path
) -> None:
    """SIGKILL, then the file disappears: the mapping keeps bytes and words, until forgotten."""
    shm, host = fabric(), np.zeros((1, 1 << 20), np.uint8)
    path = shm_dir / segment_name(NODE)
    peer = member(path)
    rewrite(other_process, 1)
    assert other_process.stdout is not None
    other_process.stdout.readline()
    words = [2]
    while words != [2, 2]:
        words = [2, int(shm.read(asking(peer, host, [0]), FOREVER).seals["word"][0])]
    other_process.kill()
    other_process.wait()
    path.unlink()
    host[:] = 0

    fetched = shm.read(asking(peer, host, [0], word=np.uint64(2)), FOREVER)
    shm.forget(NODE)

    assert fetched.seals["word"].tolist() == [2]
    assert (host == 1).all()
    assert not shm.reaches(peer)
    shm.close()
