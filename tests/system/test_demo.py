"""The demo's own promises: it notices a wrong byte, an empty result, and leaves nothing behind."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

from peercache.cli.demo import story
from peercache.cli.demo.pages import (
    BATCH_PAGES,
    PAGE_BYTES,
    Reading,
    content_of,
    key_of,
    read,
)
from peercache.cli.demo.report import Report, Screen
from peercache.cli.processes import NodeFailed, NodeProcess, NodeProcesses
from peercache.errors import DeadlineExceeded, PeerCacheError
from tests.pace import TIMEOUT_S

KEYS = [key_of(page, run="test") for page in range(5)]
SIZE = 4096

Page = np.ndarray


@attrs.define
class FakeCache:
    """Answers every key with its own content, unless `spoil` changes what is written."""

    spoil: Callable[[int, Page], Page | None] = lambda _, page: page
    answers: Callable[[list[bool]], list[bool]] = lambda answers: answers
    pages: int = 0

    def batch_get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Fill the buffers."""
        for key, buffer in zip(keys, buffers, strict=True):
            page = self.spoil(self.pages, content_of(key))
            self.pages += 1
            if page is not None:
                buffer[:] = page
        return self.answers([True] * len(keys))


def read_with(
    cache: FakeCache, pages: Sequence[int] = range(40), *, again_s: float = 0.0
) -> Reading:
    """Read pages from a cache as the demo does."""
    reading = Reading("step", "shm", hits_expected=len(pages), misses_expected=0)
    keys = [key_of(page, run="x") for page in pages]
    read(cache.batch_get, keys, reading, check=lambda _: None, again_s=again_s)
    return reading


def flipped(*places: tuple[int, int]) -> Callable[[int, Page], Page]:
    """Return a spoiler that flips one bit of these pages, at these bytes."""

    def spoil(page: int, content: Page) -> Page:
        for at_page, at_byte in places:
            if page == at_page:
                content[at_byte] ^= 1
        return content

    return spoil


def test_page_that_is_missed_at_first_is_asked_for_again() -> None:
    """A busy machine makes a miss of a page that is there; it costs time and is reported."""
    calls: list[int] = []

    def miss_some_once(answers: list[bool]) -> list[bool]:
        calls.append(len(answers))
        return [False, *answers[1:-1], False] if len(calls) == 1 else answers

    # Every byte of a late hit is checked like those of the others: it is the 33rd that is given.
    cache = FakeCache(answers=miss_some_once, spoil=flipped((32, 99)))
    reading = read_with(cache, again_s=TIMEOUT_S)

    assert calls == [32, 2, 8]
    assert (reading.hits, reading.misses, reading.again) == (40, 0, 2)
    assert (reading.wrong_pages, reading.wrong_bytes) == (1, 1)


def test_page_that_is_missed_forever_is_a_problem() -> None:
    """The time in which it is asked for again ends."""
    reading = read_with(FakeCache(answers=lambda answers: [False] * len(answers)), again_s=0.1)

    assert (reading.hits, reading.misses) == (0, 40)
    assert reading.problems(op_timeout_s=60)


def test_content_follows_from_the_key_alone() -> None:
    """The same key gives the same bytes in any process; another key gives others."""
    assert content_of(KEYS[0], 16).tobytes() == content_of(KEYS[0], SIZE)[:16].tobytes()
    assert len({content_of(key, SIZE).tobytes() for key in KEYS}) == len(KEYS)
    assert key_of(0, run="a") != key_of(0, run="b")


@pytest.mark.parametrize(
    ("places", "wrong_pages"),
    [((), 0), (((39, PAGE_BYTES - 1),), 1), (((0, 0), (4, 1000), (4, PAGE_BYTES - 1)), 2)],
)
def test_every_wrong_byte_is_counted_and_a_problem(
    places: tuple[tuple[int, int], ...], wrong_pages: int
) -> None:
    """One bit of forty mebibytes is found, in the last byte of the last page, too."""
    reading = read_with(FakeCache(spoil=flipped(*places)))

    assert (reading.hits, reading.verified_bytes) == (40, 40 * PAGE_BYTES)
    assert (reading.wrong_bytes, reading.wrong_pages) == (len(places), wrong_pages)
    reported = [f"{len(places)} wrong bytes" in each for each in reading.problems(op_timeout_s=60)]
    assert any(reported) == bool(places)


def test_page_that_is_not_written_is_a_problem_even_if_it_was_right_before() -> None:
    """Destinations are poisoned before each batch, so an old page does not pass for a new one."""
    batch = range(BATCH_PAGES)
    writes_once = FakeCache(spoil=lambda page, content: content if page in batch else None)

    reading = read_with(writes_once, [*batch, *batch])

    assert (reading.hits, reading.wrong_pages) == (2 * len(batch), len(batch))


def checked(answers: list[bool]) -> Reading:
    """Return the reading of KEYS that came to this, of which the third page is wrong."""
    found = np.stack([content_of(key, SIZE) for key in KEYS])
    found[2] = 0
    reading = Reading("step", "shm", None, None)
    reading.check(KEYS, answers, found)
    return reading


def test_check_ignores_what_a_miss_left_behind() -> None:
    """After a miss the destination is undefined, so it is neither right nor wrong."""
    found_out = checked([True, True, False, True, True])

    assert (found_out.wrong_bytes, found_out.hits) == (0, 4)


@pytest.mark.parametrize("answers", [[], [True] * 4, [True] * 6])
def test_check_refuses_answers_that_are_not_one_a_key(answers: list[bool]) -> None:
    """A short list must not pass for misses."""
    with pytest.raises(ValueError, match="5 keys"):
        checked(answers)


@pytest.mark.parametrize(
    ("hits", "misses", "problem"),
    [(0, 0, "nothing was read"), (39, 1, "40 were expected"), (40, 1, "1 misses")],
)
def test_reading_that_came_to_something_else_is_a_problem(
    hits: int, misses: int, problem: str
) -> None:
    """Too few hits, unexpected misses and an empty result each fail the demo."""
    reading = Reading("step", "tcp", 40, 0, hits=hits, misses=misses, verified_bytes=1, read_s=1)

    assert any(problem in each for each in reading.problems(op_timeout_s=60))


def test_call_that_outlives_its_deadline_is_a_problem() -> None:
    """A right answer that came too late is not as promised."""
    reading = Reading("step", "tcp", 1, 0, hits=1, longest_call_s=2.5)

    assert "2.50 s" in " ".join(reading.problems(op_timeout_s=2.0))


def test_budget_ends_a_reading_that_hangs() -> None:
    """The demo ends in time even where every call takes its whole deadline."""
    reading = Reading("step", "tcp", 40, 0)
    clock = story.Clock(until=-math.inf)

    with pytest.raises(DeadlineExceeded):
        read(FakeCache().batch_get, KEYS, reading, check=clock.check)


def test_signal_is_remembered_and_the_second_raises_at_once() -> None:
    """The first ends the demo at its next step, wherever it came; the next one is imtimeout."""
    clock = story.Clock(until=math.inf)

    clock.check("anything")
    clock.interrupt(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        clock.check("anything")
    with pytest.raises(KeyboardInterrupt):
        clock.interrupt(signal.SIGTERM, None)


def test_report_of_nothing_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """A demo that neither published nor read anything has not shown anything."""
    report = Report(2.0, page_bytes=4096, nodes=3)

    Screen(as_json=True).show(report)
    shown = json.loads(capsys.readouterr().out)

    assert report.problems()
    assert shown["ok"] is False


def test_machines_get_the_figures_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """--json has the figures that a check of the demo reads, and nothing else on stdout."""
    report = Report(2.0, page_bytes=10, nodes=3, pages_published=4, publish_s=1)
    for fabric, read_s in (("shm", 1e-8), ("tcp", 2e-8)):
        report.readings.append(Reading("s", fabric, 4, 0, hits=4, verified_bytes=40, read_s=read_s))
    # Slow, but not a measurement: its pages were to be misses.
    report.readings.append(Reading("t", "shm", 0, 2, misses=2, read_s=1))

    screen = Screen(as_json=True)
    with screen.step("not for machines", "nor this"):
        pass
    screen.show(report)
    shown = json.loads(capsys.readouterr().out)

    assert {
        name: shown[name] for name in ("ok", "pages_read", "bytes_verified", "wrong_bytes")
    } == {
        "ok": True,
        "pages_read": 8,
        "bytes_verified": 80,
        "wrong_bytes": 0,
    }
    assert (shown["misses"], shown["gb_s"]) == (2, {"shm": 4.0, "tcp": 2.0})


def test_people_get_the_problem_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """The table is followed by what is wrong, and by the verdict."""
    report = Report(2.0, page_bytes=10, nodes=3, pages_published=4)
    report.readings.append(
        Reading("three nodes", "shm", 4, 0, hits=4, wrong_bytes=7, wrong_pages=1)
    )

    Screen(as_json=False).show(report)
    shown = capsys.readouterr().out

    assert "7 wrong bytes in 1 hits" in shown
    assert "NOT as promised" in shown


@pytest.mark.parametrize(
    ("free_mib", "pool_mib"), [(24_000, 512), (1_700, 512), (1_600, 192), (640, 192)]
)
def test_pools_fit_into_the_shared_memory(free_mib: int, pool_mib: int) -> None:
    """A machine with little shared memory gets smaller pools, which hold half of the pages."""
    assert story.pool_size_for(free_mib * 2**20) == pool_mib * 2**20
    assert pool_mib > story.PAGES // 2


def test_too_little_shared_memory_is_said_before_anything_starts() -> None:
    """A container's default of 64 MiB is named, with the flag that changes it."""
    with pytest.raises(PeerCacheError, match=r"64 MiB free.*--shm-size"):
        story.pool_size_for(64 * 2**20)


# --- processes ------------------------------------------------------------------------------------

STUBBORN = """
import json, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready = [flag.split("=", 1)[1] for flag in sys.argv if flag.startswith("--ready-file=")][0]
home = [flag.split("=", 1)[1] for flag in sys.argv if flag.startswith("--home=")][0]
open(ready + ".part", "w").write(json.dumps({"event": "node.ready", "home": home}))
import os; os.replace(ready + ".part", ready)
time.sleep(600)
"""
BROKEN = "import sys; print('no memory today', file=sys.stderr); sys.exit(3)"


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_processes_end_with_the_block_even_if_they_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that ignores SIGTERM is killed, also when the demo itself failed."""
    monkeypatch.setattr("peercache.cli.processes.LEAVE_TIMEOUT_S", 0.2)
    started: list[NodeProcess] = []

    def fail_with_running_nodes(nodes: NodeProcesses) -> None:
        with nodes:
            started.extend([nodes.launch(name, {}) for name in "AB"])
            for node in started:
                nodes.await_ready(node)
            assert all(is_running(node.process.pid) for node in started)
            raise RuntimeError("the demo failed")

    nodes = NodeProcesses([sys.executable, "-c", STUBBORN], log_folder=None)
    with pytest.raises(RuntimeError, match="the demo failed"):
        fail_with_running_nodes(nodes)

    assert not any(is_running(node.process.pid) for node in started)
    assert not nodes.folder.exists()


def test_node_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    """The reason is on the screen, and in the folder that was asked for."""
    command = [sys.executable, "-c", BROKEN]
    with NodeProcesses(command, log_folder=str(tmp_path)) as nodes:
        node = nodes.launch("A", {})
        with pytest.raises(NodeFailed, match=r"(?s)node A ended with status 3.*no memory today"):
            nodes.await_ready(node)

    assert "no memory today" in (tmp_path / "A.log").read_text()


def test_restarted_node_keeps_its_home_address(tmp_path: Path) -> None:
    """Clients find a restarted node again because its address is the same."""
    with NodeProcesses([sys.executable, "-c", STUBBORN], log_folder=str(tmp_path)) as nodes:
        first = nodes.launch("B", {})
        nodes.await_ready(first)
        first.kill()
        second = nodes.launch("B", {})
        nodes.await_ready(second)
        assert not first.is_running
        assert first.ready["home"] == second.ready["home"] == second.home
        second.kill()


def test_nodes_die_with_a_demo_that_is_killed() -> None:
    """Even SIGKILL of the demo leaves no node behind: the kernel ends them."""
    program = (
        "import sys, time\n"
        "from peercache.cli.processes import NodeProcesses\n"
        f"nodes = NodeProcesses([sys.executable, '-c', {STUBBORN!r}], log_folder=None)\n"
        "node = nodes.launch('A', {}); nodes.await_ready(node)\n"
        "print(node.process.pid, nodes.folder, flush=True); time.sleep(600)\n"
    )
    demo = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    pid, _, folder = demo.stdout.readline().strip().partition(" ")
    assert is_running(int(pid))

    demo.kill()
    demo.communicate()

    until = time.monotonic() + TIMEOUT_S
    while is_running(int(pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(int(pid))
    for left in Path(folder).iterdir():
        left.unlink()
    Path(folder).rmdir()


# --- the demo itself ------------------------------------------------------------------------------


@pytest.mark.slow
def test_demo_runs_and_every_byte_is_right() -> None:
    """What `make demo` runs: three real nodes, one killed, and not one wrong byte."""
    done = subprocess.run(
        [sys.executable, "-m", "peercache", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    shown = json.loads(done.stdout)
    assert done.returncode == 0, (shown["problems"], done.stderr)
    assert shown["wrong_bytes"] == 0
    assert shown["pages_read"] >= 4 * story.PAGES
    assert shown["misses"] >= story.PAGES
    from_disk = [s for s in shown["steps"] if s["step"] == "restarted, from disk"]
    assert [s["hits"] for s in from_disk] == [2 * sum(map(len, story.OF_DISKS.values()))] * 2
    assert set(shown["gb_s"]) == {"shm", "tcp"}
    assert shown["seconds"] < story.BUDGET_S


@pytest.mark.slow
def test_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    """Ctrl-C in the middle ends the demo and its nodes, quickly."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "peercache", "demo", "--keep-logs", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    assert "three nodes serve" in demo.stdout.readline()
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    assert len(children) == 3

    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=TIMEOUT_S)

    assert demo.returncode == 130
    assert not any(is_running(int(child)) for child in children)
