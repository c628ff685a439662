"""What an operator sees: of 3 members and of 64, on a terminal and without one, of a drain."""

from __future__ import annotations

import io
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from rich.console import Console

from peercache.cli import main as cli
from peercache.cli.operate import drain
from peercache.cli.operate.screen import MOVERS_MAX, NAMESPACES_MAX, age, is_fine, whole
from peercache.cli.operate.top import frame
from peercache.cli.terminal import duration
from peercache.client import operator
from peercache.client.operator import Operator, Target
from peercache.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerCacheError,
    PeerUnreachable,
    Rejected,
)
from peercache.model.member import DEAD, Member
from peercache.model.status import (
    Copied,
    Draining,
    Latencies,
    MemberStatus,
    MovedPages,
    NamespaceUse,
    PeerStatus,
    Spilled,
    Status,
    Tier,
    Worker,
    unanswered,
)
from peercache.wire.messages.declared import Message
from peercache.wire.messages.membership import ReportStatus, RequestStatus
from peercache.wire.messages.session import Hello, HelloRequired, Refused, ReportStats, RequestStats
from tests.pace import TIMEOUT_S
from tests.unit.net.peers import CLUSTER, Peer

NODE = Status(
    name="10.0.0.7:31998",
    incarnation="00000000000000aa",
    state="ok",
    age_s=93_784,
    version="0.1.0",
    pool=Tier(size=2**34, used=2**33, pages=8192, evicted=7),
    disk=Tier(size=2**40, used=2**38, pages=262_144),
    workers=(Worker(name="w", pid=7),),
    workers_more=2,
    counters={
        "pages_hit/shm": 900.0,
        "pages_missed/absent": 90.0,
        "pages_missed/full": 10.0,
        "exists_declined/slow_fabric": 3.0,
    },
    latency={"get": Latencies(bounds=(0.001, 0.01), counts=(99, 100, 100))},
    certificate_days=300,
)


def member(**fields: Any) -> MemberStatus:
    return MemberStatus(seen="alive", answers=True, status=attrs.evolve(NODE, **fields))


def drawn(*members: MemberStatus, width: int = 140) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(whole(members, "prod", "here:1", width))
    return output.getvalue()


def test_a_line_shows_how_a_member_is() -> None:
    """Memory, disk, hits, engines and certificate, in units that a person reads."""
    line = next(line for line in drawn(member()).splitlines() if line.strip().startswith(NODE.name))

    for part in ("ok", "1d 2h", "50 % of 16.0 GiB", "8,192", "25 % of 1.0 TiB", "90.0 %", " 3 "):
        assert part in line
    assert "300 d" in line


def test_hosts_are_shown_where_there_are_several() -> None:
    """An address seldom names the machine; on one host the column would say nothing."""
    one, other = member(host="gpu-1"), member(name="10.0.0.8:31998", host="gpu-2")

    assert all(host in drawn(one, other, width=160) for host in ("gpu-1", "gpu-2"))
    assert "gpu-1" not in drawn(one, member(name="10.0.0.8:31998", host="gpu-1"), width=160)
    assert "gpu-1" not in drawn(one, other, width=140)


def test_the_sums_are_of_the_cluster() -> None:
    """Two members have twice as much of everything but the rate."""
    text = drawn(member(), member(name="10.0.0.8:31998"))

    assert "cluster prod: 2 members: 2 ok (asked here:1)" in text
    assert "16.0 GiB of 32.0 GiB, 16,384 pages" in text
    assert "90.0 % of 2,000 pages (shm 1,800)" in text
    assert "absent 180, full 20" in text
    assert "declined slow_fabric 6" in text
    assert "get      99 % of the calls take up to 1 ms" in text


def test_a_line_shows_what_a_namespace_takes_in_all_of_the_cluster() -> None:
    """Summed over the members, the largest first; no table where no node has quotas."""
    chat = NamespaceUse(
        name="chat", bytes=2**30, pages=256, disk_bytes=2**34, quota=2**32, priority=2,
        retained=2**29,
    )  # fmt: skip
    rest = NamespaceUse(name="(others)", bytes=2**20, pages=7)
    text = drawn(member(namespaces=(rest, chat)), member(name="b:1", namespaces=(chat,)))

    line, last = text.rstrip().splitlines()[-2:]
    assert " ".join(line.split()) == "chat 2.0 GiB 25 % of 8.0 GiB 1.0 GiB 32.0 GiB 512 2"
    assert " ".join(last.split()) == "(others) 1.0 MiB - 0 bytes 0 bytes 7 0"
    assert "namespace" not in drawn(member())
    many = tuple(attrs.evolve(chat, name=f"n{number}") for number in range(NAMESPACES_MAX + 3))
    assert "3 more: --json has all" in drawn(member(namespaces=many))


def test_pages_that_moved_are_shown_with_whose_they_are() -> None:
    """In `status` and in `top`: to and from which nodes most went, and why others stayed."""
    peers = tuple(
        MovedPages(name=f"[::{n}]:1", given=n * 1000, given_bytes=2**20) for n in range(1, 5)
    )
    giver = member(
        spilled=Spilled(peers=peers, not_moved={"no_room": 30, "no_answer": 2}, refused=30)
    )
    taker = member(name="b:1", spilled=Spilled(
        peers=(MovedPages(name="c:1", taken=7, taken_bytes=2**30), MovedPages(taken=8)),
        taken=15, taken_bytes=2**30, not_taken={"full": 9},
    ))  # fmt: skip
    output = io.StringIO()
    Console(file=output, width=100).print(frame([taker, giver], {}, 1.0, "prod", "here:1"))

    for text in (drawn(taker, giver), output.getvalue()):
        shown = " ".join(text.partition("moved pages")[2].split())
        assert "offered in vain" in shown
        assert f"{NODE.name} 10,000 [::4]:1 4,000 - its own: no_room 30, no_answer 2" in shown
        assert "4.0 MiB [::3]:1 3,000 [::2]:1 2,000" in shown
        assert "[::1]" not in shown
        assert "b:1 - 15 others 8 of others: full 9 1.0 GiB c:1 7" in shown
    copier = attrs.evolve(giver.status, copied=Copied(copies=2, single=1234))
    with_copies = " ".join(drawn(attrs.evolve(giver, status=copier), taker).split())
    assert "without a copy" in with_copies
    assert "no_answer 2 1,234" in with_copies
    assert "without a copy" not in drawn(giver, taker)
    narrow = "".join(drawn(giver, width=70).partition("moved pages")[2].split())
    assert "…" not in narrow
    assert "moved pages" not in drawn(member())
    many = [member(name=f"n{n}:1", spilled=Spilled(taken=1)) for n in range(MOVERS_MAX + 3)]
    assert "3 more: --json has all" in drawn(*many)


def test_a_disk_without_any_room_is_not_a_missing_disk() -> None:
    """The file system was full before the node started."""
    full = "the file system is full"
    without = member(state="degraded", reasons=(full,), disk=Tier(problem=full))
    text = drawn(without, member(name="b:1"))

    assert "not usable" in text
    assert "disk     256.0 GiB of 1.0 TiB" in text
    assert "disk" not in drawn(member(disk=Tier()))


def test_what_is_wrong_has_a_line_of_its_own() -> None:
    """Whatever the trouble is, the member that has it is named, and the exit status is not 0."""
    dead = unanswered(Member(1, 1, DEAD, 255, "h", "10.0.0.9:31998", "d", "", ""))
    members = (
        member(state="degraded", reasons=("the disk is full",)),
        member(name="b:1", certificate_days=3.25),
        member(name="c:1", peers=(PeerStatus(name="d:1", lagging=True),)),
        member(name="d:1", draining=Draining(active=True, phase="handing over", pages=9)),
        dead,
        unanswered(
            Member(2, 1, DEAD, 255, "h", "10.0.0.8:31998", "d", "", ""),
            "its certificate is revoked",
        ),
    )

    text = drawn(*members, width=200)

    assert f"! {NODE.name}: the disk is full" in text
    assert "! b:1: its certificate expires in 3.2 days" in text
    assert "! c:1: sets do not wait for d:1" in text
    assert "! d:1: draining: handing over 0 of 9 pages" in text
    assert "! 10.0.0.9:31998: no answer; the others have it as dead" in text
    assert "! 10.0.0.8:31998: its certificate is revoked" in text
    assert "10.0.0.8:31998: no answer" not in text
    assert not is_fine(members)
    assert is_fine((member(), member(state="draining")))
    assert not is_fine((dead,))


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_64_members_have_64_lines(width: int) -> None:
    """Each on one line, with its name and state whole, however narrow the terminal is."""
    members = [member(name=f"10.0.0.{n}:31998") for n in range(64)]

    lines = drawn(*members, width=width).splitlines()

    assert all(len(line) <= width for line in lines)
    shown = [line.split()[:2] for line in lines]
    assert all(shown.count([member.status.name, "ok"]) == 1 for member in members)


def test_nothing_but_text_goes_into_a_pipe() -> None:
    """No colour, no cursor."""
    assert "\x1b" not in drawn(member())


def test_the_rates_are_of_the_time_between_two_looks() -> None:
    """The first look has none; a node that restarted counts from its own start."""

    def screen(before: dict[str, Any], **fields: Any) -> str:
        output = io.StringIO()
        Console(file=output, width=140).print(
            frame([member(**fields)], before, 12.0, "prod", "here:1")
        )
        return output.getvalue()

    more = {"counters": {"pages_hit/shm": 1900.0, "pages_missed/absent": 600.0}}
    before = {NODE.incarnation: (10.0, NODE)}

    assert "500" in screen(before, **more).replace(" 250 ", "")
    assert "250" in screen(before, **more)
    assert "500" not in screen({}, **more)
    assert "-" not in screen(before, counters={}).splitlines()[3].replace(NODE.name, "")[2:30]


def test_durations_are_short() -> None:
    """Two units at most."""
    assert [age(s) for s in (0, 59, 60, 3_700, 90_000)] == ["0s", "59s", "1m", "1h 1m", "1d 1h"]
    assert [duration(s) for s in (1.5, 0.0123, 2e-5)] == ["1.5 s", "12.3 ms", "20 µs"]


@pytest.mark.parametrize(
    ("at", "written"),
    [
        ("node-a", "node-a:31998"),
        ("node-a:7", "node-a:7"),
        ("[::1]:7", "[::1]:7"),
        (":7", "127.0.0.1:7"),
        ("ipc:///run/a.ipc", "ipc:///run/a.ipc"),
    ],
)
def test_an_address_needs_no_port(at: str, written: str) -> None:
    """The default port is that of nodes."""
    assert Target.of(at=at, environment={}).at == written


@pytest.mark.parametrize("at", ["node:port", "node:99999", "a b:1:2"])
def test_a_wrong_address_is_said_once(at: str) -> None:
    """The address, and what one looks like, before anything is dialled."""
    with pytest.raises(ConfigError) as wrong:
        Target.of(at=at, environment={})

    assert str(wrong.value).count(at) == 1
    assert str(wrong.value).startswith(f"configuration 'at': {at!r}")


def test_a_node_of_this_host_is_asked_at_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --at: this user's, else that of root or a service, or the default port."""
    homes = ["ipc:///run/user/7/peercache/home.ipc", "ipc:///run/peercache/home.ipc"]
    monkeypatch.setattr(operator, "homes_here", lambda: homes)

    def at(**settings: str) -> str:
        given = {"at": None, "timeout_s": 1.0, "config": None, "environment": {}}
        return Target.of(**given, **settings).at  # type: ignore[arg-type]

    assert at(cluster="prod") == at() == homes[0]
    del homes[0]
    assert at() == "ipc:///run/peercache/home.ipc"
    homes.clear()
    assert at() == "127.0.0.1:31998"
    assert at(home="ipc:///run/mine.ipc") == "ipc:///run/mine.ipc"


def test_an_address_where_nothing_listens_is_one_sentence() -> None:
    """At once, and with what to do."""
    target = Target.of(at="127.0.0.1:1", timeout_s=5.0, config=None, environment={})

    with pytest.raises(PeerCacheError, match=r"127\.0\.0\.1:1: nothing listens there; start"):
        Operator(target).__enter__()


def test_questions_go_over_one_connection_and_follow_a_node_that_restarts(tmp_path: Path) -> None:
    """The next incarnation is greeted, and asked; where none comes, it reports it."""

    def stats(message: Message) -> Message | None:
        return ReportStats(message.request, {}) if isinstance(message, RequestStats) else None

    first = Peer("ipc", tmp_path, answer=stats)
    target = Target.of(at=first.url, cluster=CLUSTER, environment={})
    with Operator(target) as asking:
        for _ in range(2):
            assert isinstance(asking.ask(RequestStats(0), ReportStats), ReportStats)
        assert len(first.of(Hello)) == 1
        first.end()
        with Peer("ipc", tmp_path, url=first.url, incarnation=8) as second:
            # As a node does with what is meant for the incarnation before it.
            second.answer = lambda message: (
                stats(message) if len(second.of(Hello)) > 1 else HelloRequired(8)
            )
            assert isinstance(asking.ask(RequestStats(0), ReportStats), ReportStats)
            assert asking.welcome is not None
            assert asking.welcome.member.incarnation == 8
            assert second.of(RequestStats)
        with pytest.raises(PeerUnreachable, match="nothing listens there any more"):
            asking.ask(RequestStats(0), ReportStats)


def test_an_operator_reports_why_it_gets_no_answer(tmp_path: Path) -> None:
    """A refusal names its reason; a silence lasts as long as it may."""

    def refuse(message: Message) -> Message | None:
        return Refused(message.request, "role", "no") if isinstance(message, RequestStats) else None

    with Peer("ipc", tmp_path, answer=refuse) as peer:
        target = Target.of(at=peer.url, cluster=CLUSTER, environment={})
        with Operator(target) as asking:
            with pytest.raises(Rejected, match="no; ask as the user of the node"):
                asking.ask(RequestStats(0), ReportStats)
            with pytest.raises(DeadlineExceeded):
                asking.ask(RequestStatus(0, detail=False), ReportStatus, within_s=0.05)


def test_a_node_of_another_cluster_is_an_error_that_names_both(tmp_path: Path) -> None:
    """Where the user has named one."""
    with Peer("ipc", tmp_path, cluster="theirs") as peer:
        target = Target.of(at=peer.url, cluster=CLUSTER, environment={})
        with pytest.raises(Rejected, match=f"of the cluster 'theirs', and not of '{CLUSTER}'"):
            Operator(target).__enter__()


def test_an_address_that_was_not_typed_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the default: the sentence explains what was tried, and what to type."""
    monkeypatch.setattr("peercache.config.home.SYSTEM_FOLDER", tmp_path)
    monkeypatch.setattr(operator, "DEFAULT_CONTROL_PORT", 9)
    with pytest.raises(PeerUnreachable) as wrong:
        Operator(Target.of(environment={})).__enter__()

    assert f"a node of this host: nothing listens at ipc://{tmp_path}/home.ipc" in str(wrong.value)
    assert "start one (peercache node)" in str(wrong.value)


def test_a_port_of_another_protocol_is_perhaps_no_control_address() -> None:
    """Such as the one of /metrics, which is next to it in the ready line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT_S)
        closing = threading.Thread(
            target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True
        )
        closing.start()
        target = Target.of(at=f"127.0.0.1:{server.getsockname()[1]}", environment={})

        with pytest.raises(PeerCacheError, match="or this is no control address, such as"):
            Operator(target).__enter__()
        closing.join(TIMEOUT_S)


def test_top_without_a_terminal_names_the_other_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One sentence, and status 2."""
    assert cli.main(["top", "--at", "127.0.0.1:1"]) == 2
    assert "use `peercache status`" in capsys.readouterr().err


def test_a_page_does_not_go_to_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes would be commands to the terminal."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    assert cli.main(["get", "key"]) == 2

    assert "name a file with -o" in capsys.readouterr().err


def test_a_program_that_names_a_node_keeps_its_own_log() -> None:
    """Only commands write the log to stderr: a library leaves that to its program."""
    logger = logging.getLogger("peercache")
    before = list(logger.handlers), logger.level, logger.propagate

    Target.of(at="127.0.0.1:1", environment={})

    assert (logger.handlers, logger.level, logger.propagate) == before


@attrs.frozen
class Figures:
    """An answer."""

    figures: dict[str, int | float | str]


def drained(state: str, given: int) -> Figures:
    """Return the answer of a node that has handed over so many pages of two."""
    figures = {"given": given, "given_bytes": given, "there": 0, "left": 2 - given, "lost": 0}
    return Figures({"state": state, "problem": "", **figures})


def test_progress_is_printed_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each change, and none for an answer that shows the same."""
    answers = [drained("handing_over", 0), drained("handing_over", 0), drained("handing_over", 1)]
    answers += 3 * [drained("leaving", 2)]

    class Node:
        def __init__(self, *_: Any) -> None:
            """Answer any question."""

        def __enter__(self) -> Node:
            return self

        def __exit__(self, *_: object) -> None:
            """Keep nothing."""

        def ask(self, *_: Any) -> Figures:
            if not answers:
                raise PeerUnreachable("a:1")
            return answers.pop(0)

    monkeypatch.setattr(drain, "Operator", Node)
    monkeypatch.setattr(drain, "LOOK_S", 0.0)

    done = CliRunner().invoke(drain.drain, ["a:1"], standalone_mode=False)

    assert done.exception is None, done.exception
    assert [line.partition(":")[0] for line in done.output.splitlines()] == [
        "handing over", "handing over", "leaving", "left",
    ]  # fmt: skip
    assert "0 pages" in done.output
    assert done.return_value == 0
