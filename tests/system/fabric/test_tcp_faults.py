"""The tcp fabric when the owner's process is paused or killed in the middle of a read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import attrs
import numpy as np
import pytest

from peercache.model.member import Member
from peercache.model.reads import Fetched, PeerRead
from peercache.model.seal import ODD
from peercache.observability.reasons import PEER_UNREACHABLE
from tests.contracts.fabric_suite import GRANULE, INCARNATION, UNTOUCHED, Destination, member_of
from tests.house.reference_pages import ROOT
from tests.pace import PACES_S, PROMPT_S, TIMEOUT_S, assert_within, paced
from tests.system.fabric.owner_process import PAGE_BYTES, PAGES
from tests.unit.fabric.serving import fabric_for

WORDS = [2 * page * (PAGE_BYTES // GRANULE) + 2 for page in range(PAGES)]


@attrs.define
class Process:
    """An owner's process, and how its member looks."""

    process: subprocess.Popen[str]
    member: Member

    def line(self) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def continue_once_it_stopped(self) -> None:
        """Wait until the owner has stopped itself, and continue it."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def owner(action: str, at: int) -> Iterator[Process]:
    """Run an owner that does `action` to itself after portion `at`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.system.fabric.owner_process", action, str(at)],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    with process:
        try:
            running = Process(process, member_of(INCARNATION))
            running.member = member_of(INCARNATION, data=f"127.0.0.1:{running.line()}")
            yield running
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture
def into() -> Destination:
    """Room for all pages, two runs each."""
    return Destination.of([[PAGE_BYTES - 100, 100]] * PAGES)


def read_all(fabric: object, member: Member, into: Destination) -> tuple[Fetched, float]:
    """Read every page of the owner; return the answer, and the seconds it took."""
    offsets = np.arange(PAGES, dtype=np.uint64) * np.uint64(PAGE_BYTES)
    begun = time.monotonic()
    read = PeerRead(member, offsets, into.lengths, into.runs, np.array(WORDS, np.uint64))
    got = fabric.read(read, begun + TIMEOUT_S)  # type: ignore[attr-defined]
    return got, time.monotonic() - begun


def test_nothing_is_written_after_a_read_from_a_paused_owner(into: Destination) -> None:
    """The owner is stopped in mid-read, goes on after the read has returned, and reaches nothing.

    1. The owner stops after the bytes of portion 2 and before its words.
    2. The read returns when nothing has come for stall_s: pages 0 and 1 are whole.
    3. The caller uses the destination for something else; the owner is continued.
    4. The owner serves another read, so it is past what it had in hand: the destination is as the
       caller left it.
    """

    def story(stall_s: float) -> tuple[Fetched, float, list[bool], str, Fetched]:
        patient = closing(fabric_for(GRANULE))
        fabric = closing(fabric_for(GRANULE, stall_s=stall_s))
        with owner("SIGSTOP", 2) as running, fabric as hasty, patient as other:
            got, seconds = read_all(hasty, running.member, into)
            whole = [into.page(index) == bytes([index + 1]) * PAGE_BYTES for index in range(2)]
            into.memory[:] = UNTOUCHED
            running.continue_once_it_stopped()
            went_on = running.line()
            elsewhere = Destination.of([[PAGE_BYTES]] * PAGES)
            again, _ = read_all(other, running.member, elsewhere)
        return got, seconds, whole, went_on, again

    got, seconds, whole, went_on, again = paced(
        story, lambda reported: reported[0].seals["word"][1] != ODD
    )

    assert got.failure == PEER_UNREACHABLE
    assert got.seals["word"].tolist() == [*WORDS[:2], *[int(ODD)] * 4]
    assert whole == [True, True]
    assert PACES_S[0] <= seconds < PROMPT_S
    assert went_on == "went on"
    assert again.seals["word"].tolist() == WORDS
    assert (into.memory == UNTOUCHED).all()


def test_owner_killed_in_mid_read_leaves_a_leading_run(into: Destination) -> None:
    """What had arrived with its words counts; the rest is odd, and the answer comes at once."""
    with owner("SIGKILL", 2) as running, closing(fabric_for(GRANULE)) as fabric:
        got, seconds = read_all(fabric, running.member, into)
        again, _ = read_all(fabric, running.member, into)

    complete = int((got.seals["word"] != ODD).sum())
    assert got.failure == PEER_UNREACHABLE
    # The kernel of a dead process may still deliver what it had taken, or reset the connection.
    assert complete <= 2
    assert got.seals["word"].tolist() == WORDS[:complete] + [int(ODD)] * (PAGES - complete)
    assert all(into.page(page) == bytes([page + 1]) * PAGE_BYTES for page in range(complete))
    assert_within(seconds, PROMPT_S)
    assert again.failure == PEER_UNREACHABLE
