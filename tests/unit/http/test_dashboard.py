"""The dashboard and the JSON next to it: what they show, in which colours, and must not do."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from importlib.resources import files

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from peercache.http import history as watching_module
from peercache.http.dashboard import (
    LINES_MAX,
    area_chart,
    decade_chart,
    line_chart,
    memory_chart,
    written_count,
    written_rate,
    written_share,
    written_time,
)
from peercache.http.history import POINTS, SMALL_MEMBERS_MAX, STEP_S, WATCHED_S, Watching
from peercache.model.reuse import MEMORY_NAMES
from peercache.model.status import (
    Copied,
    Detail,
    MemberStatus,
    MovedPages,
    PeerStatus,
    Reuse,
    SlowCall,
    Spilled,
    Status,
    Thread,
    Tier,
    Worker,
)
from tests.unit.http.http_node import ask, served
from tests.unit.http.statuses import (
    cluster,
    dead,
    disk_full,
    draining,
    latencies,
    member,
    name_of_node,
    with_status,
)

HOSTILE = "<script>alert(1)</script>\"'&{{7*7}}\udcff"


def watching(members: Sequence[MemberStatus], *before: Sequence[MemberStatus]) -> Watching:
    """Return what watches members that are always so, after these steps."""

    async def gather(*, detail: bool = False) -> Sequence[MemberStatus]:
        return members

    found = Watching(gather)
    for place, step in enumerate((*before, members)):
        found.history.take(place * STEP_S, step)
    return found


def text_of(page: str) -> str:
    """Return what a person reads of a page."""
    return " ".join(re.sub("<[^>]+>", " ", page).split())


async def page_of(found: Watching, path: str) -> str:
    """Return a page of what is watched."""
    async with served(watching=found) as address:
        status, body = await ask(address, path)
    assert status == 200
    return body


async def page(members: Sequence[MemberStatus], path: str = "/") -> str:
    """Return a page of the cluster after two steps of work."""
    before = [attrs.evolve(each, status=_younger(each.status)) for each in members]
    async with served(watching=watching(members, before)) as address:
        status, body = await ask(address, path)
    assert status == 200
    return body


def _younger(status: Status) -> Status:
    return attrs.evolve(
        status,
        counters={name: value / 2 for name, value in status.counters.items()},
        latency={
            name: attrs.evolve(reported, counts=tuple(count // 2 for count in reported.counts))
            for name, reported in status.latency.items()
        },
    )


async def test_cluster_page_shows_what_an_operator_looks_for() -> None:
    """Nodes, tiers, rates, latencies, engines, fabrics, the ring, namespaces and certificates."""
    shown = text_of(await page(cluster(3)))

    for wanted in (
        "Cluster prod-eu", "ok 3", "10.0.0.1:31998", "gpu-002.rack-0.example", "64 days",
        "Hit rate of reads, 5 min", "Misses by reason", "absent", "peer unreachable",
        "Time of a read",
        "p99", "evicted from memory", "promoted from disk", "of 256.0 GiB", "rdma", "shm",
        "0000000000000001", "41000", "88.0 k", "1.3 s ago", "Qwen3-235B-A22B-Instruct-2507",
        "of the mean", "No peer lags", "600.0 GiB",
        "What more memory would bring", "a page that is set for the first time counts as a miss",
        "Estimated hit rate of reads and sets", "with 0.25, 0.5, 1, 2, 4, 8 times the memory",
        "31.0 %, 42.0 %, 55.0 %, 61.0 %, 64.0 %, 65.0 %",
        "Pages moved between nodes", "given to other nodes", "its own: no room",
        "of others: full 45",
    ):  # fmt: skip
        assert wanted in shown, wanted
    assert "Needs attention" not in shown


async def test_what_needs_attention_comes_first() -> None:
    """Each in one sentence with the node it is about; nodes that are well stand at the end."""
    lagging = PeerStatus(name=name_of_node(0), state="suspect", lagging=True)
    found = await page(
        [
            member(0, 6),
            dead(member(1, 6)),
            draining(member(2, 6)),
            disk_full(member(3, 6)),
            with_status(member(4, 6), certificate_days=3.25, peers=(lagging,)),
            with_status(member(5, 6), insecure=True),
        ]
    )
    shown = text_of(found)

    assert "no answer 1" in shown
    assert "10.0.0.2:31998 gives no answer; the view says dead" in shown
    assert "10.0.0.3:31998 draining" in shown
    assert "handing over 71.0 k of 190.0 k pages" in shown
    assert shown.count("No space left on device") == 1
    assert "10.0.0.5:31998 its certificate expires in 3.2 days" in shown
    assert "1 owners lag behind its commits" in shown
    assert "10.0.0.6:31998 no certificates" in shown
    assert "10.0.0.1:31998 lags behind commits, says 10.0.0.5:31998" in shown
    rows = re.findall(r'<td role="cell" data-label="State">\s*<span class="state ([^"]+)"', found)
    assert rows == ["no-answer", "degraded", "draining", "ok", "ok", "ok"]


async def test_a_mean_states_over_what_it_is() -> None:
    """A card averages over five minutes, and charts end now."""
    busy, idle = member(0, 1, step=400), member(0, 1, step=100)
    found = watching([busy], [with_status(idle, counters={})], *[[idle]] * 4)
    async with served(watching=found) as address:
        shown = text_of((await ask(address, "/"))[1])

    mean = found.history.mean("pages_hit", 300.0)
    assert found.history.last("pages_hit") > 2 * mean
    assert f"Pages read, mean of 5 min {written_rate(mean)} " in shown
    assert f"; now {written_rate(found.history.last('pages_hit'))}" in shown


async def test_what_happened_is_marked_on_each_chart() -> None:
    """Deaths, drains and restarts, with the node and how long ago."""
    first, second = member(0, 2), member(1, 2)
    restarted = with_status(first, incarnation="ff")
    steps = [[first, second], [restarted, second], [restarted, dead(second)]]
    found = await page_of(watching(steps[-1], *steps[:2], *[steps[-1]] * 9), "/")
    of_second = await page_of(watching(steps[-1], *steps[:2]), "/nodes/10.0.0.2:31998")

    shown = text_of(found)
    assert "10.0.0.2:31998 stopped answering 45 s ago" in shown
    assert "10.0.0.1:31998 restarted 50 s ago" in shown
    marks = re.findall(r'<path class="event (\w+)" d="M(\d+\.\d) 0V120">', found)
    charts = found.count('data-unit="')
    assert charts >= 8
    assert marks[:2] == [("note", "566.5"), ("bad", "569.8")]
    assert len(marks) == 2 * charts
    assert "stopped answering" not in text_of(of_second).partition("Over time")[0]
    assert "restarted" not in of_second


async def test_a_disk_without_any_room_is_not_a_missing_disk() -> None:
    """The file system was full before the node started."""
    full = disk_full(member(0, 1))
    no_room = with_status(full, disk=attrs.evolve(full.status.disk, size=0, used=0, pages=0))

    shown = text_of(await page_of(watching([no_room]), "/"))

    assert "no node has a disk tier" not in shown
    assert shown.count("0 bytes of 0 bytes has a problem") == 1
    assert "no node has a disk tier" in text_of(
        await page_of(watching([with_status(full, disk=Tier(), reasons=(), state="ok")]), "/")
    )


async def test_a_member_that_is_well_again_did_not_begin_to_serve() -> None:
    """A full disk and a pause end otherwise than a drain."""
    first, second, third = cluster(3)
    troubled = [disk_full(first), dead(second), draining(third)]
    shown = text_of(await page_of(watching(cluster(3), cluster(3), troubled), "/"))

    assert "10.0.0.1:31998 recovered 0 s ago" in shown
    assert "10.0.0.2:31998 answers again 0 s ago" in shown
    assert "10.0.0.3:31998 began to serve 0 s ago" in shown


async def test_the_time_of_the_charts_is_chosen() -> None:
    """Minutes from the history of short steps, hours from that of long ones."""
    found = watching(cluster(2))
    for step in range(int(10 * 60 / STEP_S)):
        found.take(step * STEP_S, cluster(2, step=100 + step))

    for chosen, since, points in (("", "15 min", 120), ("5m", "5 min", 60), ("3h", "3 h", 10)):
        shown = await page_of(found, f"/?range={chosen}")
        assert f'<span class="from" aria-hidden="true">{since} ago</span>' in shown
        (hits,) = re.findall(
            r'id="chart-by-node-pages".*?<path class="line c0" d="([^"]+)', shown, re.DOTALL
        )
        assert abs(len(re.findall("[ML]", hits)) - points) <= 2
    assert 'href="?range=3h"' in await page_of(found, "/")
    assert 'href="?range=3h&amp;search=gpu"' in await page_of(found, "/?search=gpu&range=nonsense")


async def test_nodes_are_searched_and_sorted() -> None:
    """By a part of the address or host; the figures stay those of all."""
    members = [with_status(member(0, 3), age_s=9.0), member(1, 3), dead(member(2, 3))]
    found = watching(members)

    def rows(shown: str) -> list[str]:
        section = shown.partition('id="h-nodes"')[2].partition("</section>")[0]
        return re.findall(r'href="/nodes/10\.0\.0\.(\d):31998"', section)

    assert rows(await page_of(found, "/")) == ["3", "1", "2"]
    assert rows(await page_of(found, "/?sort=node")) == ["1", "2", "3"]
    assert rows(await page_of(found, "/?sort=up")) == ["1", "2", "3"]
    assert rows(await page_of(found, "/?sort=memory&search=nonsense")) == []
    shown = await page_of(found, "/?search=GPU-001")
    assert rows(shown) == ["2"]
    assert "no answer 1" in text_of(shown)
    nothing = await page_of(found, "/?search=%3Cb%3E")
    assert "No node has <code>&lt;b&gt;</code> in its address or host." in nothing


async def test_alerts_that_fire_are_shown_with_their_names() -> None:
    """Those that follow from what members report."""
    before, now = member(0, 1), member(0, 1)
    wrong = with_status(now, counters={**now.status.counters, "pages_missed/verify_failed": 1.0})
    lost = with_status(now, counters={**now.status.counters, "pages_missed/peer_unreachable": 1e6})

    found = text_of(await page_of(watching([wrong], [before]), "/"))
    assert "reads failed verification: verify failed (PeerCacheWrongBytes)" in found
    found = text_of(await page_of(watching([lost], [before]), "/"))
    assert "of its pages are on peers that do not answer (PeerCachePeersUnreachable)" in found
    assert "Needs attention" not in await page(cluster(2))


async def test_only_what_is_full_is_red() -> None:
    """A disk with another problem is named, and its bar has the colour of any other."""
    disk = attrs.evolve(member(0, 1).status.disk, used=2**39, problem="it is read-only")

    assert 'class="bar full"' not in await page([with_status(member(0, 1), disk=disk)])
    assert 'class="bar full"' in await page([disk_full(member(0, 1))])


async def test_node_page_shows_one_node_and_its_process() -> None:
    """With its details, which the cluster's page leaves out."""
    detail = Detail(
        threads=(Thread(name="tcp-serving", cpu_s=12.5, state="R"),),
        environment={"PEERCACHE_POOL": "1GiB"},
        settings={"http_token_file": "/etc/token", "secret": "(masked)"},
        slow=(SlowCall(operation="get", tier="tcp", seconds=0.34, pages=64, missed={"absent": 9}),),
    )
    members = [with_status(member(0, 2), detail=detail), member(1, 2)]

    shown = text_of(await page(members, "/nodes/10.0.0.1:31998"))
    other = text_of(await page(members, "/nodes/10.0.0.2%3A31998"))
    whole = text_of(await page(members))

    for wanted in (
        "tcp-serving",
        "12 s",
        "PEERCACHE_POOL",
        "(masked)",
        "wire 2–3",
        "with authority",
        "Slowest calls of the last hour",
        "340 ms 0 s get tcp 64 absent 9",
    ):
        assert wanted in shown, wanted
        assert wanted not in whole
    assert "Node 10.0.0.2:31998" in other


async def test_page_of_a_dead_and_of_an_unknown_node() -> None:
    """The one is a member all the same; the other is not."""
    members = [member(0, 2), dead(member(1, 2))]

    assert "This node does not answer" in await page(members, "/nodes/10.0.0.2:31998")
    async with served(watching=watching(members)) as address:
        status, body = await ask(address, "/nodes/%3Cb%3E")
    assert status == 404
    assert "No member is called <code>&lt;b&gt;</code>" in body


class _Hearer(HTMLParser):
    """Collects the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep it."""
        self.tags.append((tag, dict(attrs)))


async def test_texts_of_peers_are_shown_and_never_run() -> None:
    """Names, hosts, reasons, namespaces, keys of counters: all are strangers' texts."""
    worker = Worker(name=HOSTILE, namespace=HOSTILE)
    evil = with_status(
        member(0, 1), name=HOSTILE, host=HOSTILE, cluster=HOSTILE, version=HOSTILE, state=HOSTILE,
        reasons=(HOSTILE,), incarnation=HOSTILE, workers=(worker,), rdma=HOSTILE,
        peers=(PeerStatus(name="javascript:alert(1)//", state="suspect", fabric=HOSTILE),),
        namespaces=(attrs.evolve(member(0, 1).status.namespaces[0], name=HOSTILE),),
        spilled=Spilled(
            not_moved={HOSTILE: 1.0}, peers=(MovedPages(name="javascript:alert(1)//", given=1),)
        ),
        counters={HOSTILE: 5.0, f"pages_missed/{HOSTILE}": 9.0},
        latency={HOSTILE: latencies(9, 0.1)},
        detail=Detail(
            slow=(SlowCall(operation=HOSTILE, client=HOSTILE, missed={HOSTILE: 1.0}),),
            threads=(Thread(name=HOSTILE),), settings={HOSTILE: HOSTILE}, environment={"A": HOSTILE}
        ),
    )  # fmt: skip
    pages = [await page([evil, member(1, 2)])]
    async with served(watching=watching([evil])) as address:
        pages.append((await ask(address, "/nodes/x"))[1])
        status, body = await ask(address, "/api/v1/status")
    assert (status, json.loads(body)["members"][0]["status"]["host"]) == (200, HOSTILE)
    one = with_status(evil, name="x:1")
    pages.append(await page([one], "/nodes/x:1"))

    for found in pages:
        assert "alert(1)</script>" not in found
        hearer = _Hearer()
        hearer.feed(found)
        scripts = [attributes for tag, attributes in hearer.tags if tag == "script"]
        assert scripts == [{"src": "/files/dashboard.js", "defer": None}]
        for tag, attributes in hearer.tags:
            assert not any(name.startswith("on") or name == "style" for name in attributes), tag
            for name in ("href", "src"):
                assert (attributes.get(name) or "/").startswith(("/", "#", "?")), attributes


async def test_pages_between_nodes_are_shown_with_whose_they_are() -> None:
    """Of each node the peers with most pages; a node that moved none has no row, and no section."""
    peers = tuple(
        MovedPages(name=f"h:{number}", given=number, given_bytes=number * 2**20, taken=1)
        for number in range(1, 6)
    )
    more = MovedPages(given=2, given_bytes=2**21)
    moved = Spilled(
        peers=(*peers, more), taken=5, taken_bytes=2**20, not_moved={"no_answer": 7.0}
    )  # fmt: skip
    idle = with_status(member(1, 2), spilled=Spilled())
    members = [with_status(member(0, 2), spilled=moved), idle]

    _, _, section = (await page(members)).partition('id="h-moves"')
    rows = text_of(section.partition("</section>")[0])

    assert "10.0.0.1:31998 17 17.0 MiB h:5 5 h:4 4 h:3 3 and 3 more 5 1.0 MiB" in rows
    assert "its own: no answer 7" in rows
    assert "of others:" not in rows
    assert "10.0.0.2:31998" not in rows
    assert "Without a copy" not in section
    copiers = [with_status(member(0, 2), spilled=moved, copied=Copied(copies=2, single=1234)), idle]
    assert "its own: no answer 7 1,234" in text_of(await page(copiers))
    assert "Without a copy 1,234 pages" in text_of(await page(copiers, "/nodes/10.0.0.1:31998"))
    of_node = text_of(await page(members, "/nodes/10.0.0.1:31998"))
    assert "Given 17 pages, 17.0 MiB Taken 5 pages, 1.0 MiB" in of_node
    assert "others 2 2.0 MiB none" in of_node
    assert "Pages moved" not in await page(members, "/nodes/10.0.0.2:31998")
    assert "Pages moved" not in await page([idle])


async def test_page_loads_only_what_the_node_has() -> None:
    """Each file that a page names is there, with its type."""
    async with served() as address:
        _, body = await ask(address, "/")
        named = set(re.findall(r'(?:src|href)="(/files/[^"]+)"', body))
        assert named == {"/files/dashboard.css", "/files/dashboard.js", "/files/icon.svg"}
        for name in named:
            assert (await ask(address, name))[0] == 200
        assert (await ask(address, "/files/../pages.py"))[0] == 404


async def test_json_has_all_members_and_one() -> None:
    """What the dashboard shows, for programs: numbers as numbers."""
    members = [member(0, 2), dead(member(1, 2))]
    async with served(watching=watching(members)) as address:
        whole = await ask(address, "/api/v1/status")
        one = await ask(address, f"/api/v1/status/{name_of_node(0)}")
        none = await ask(address, "/api/v1/status/x")

    reported = json.loads(whole[1])
    assert [each["status"]["state"] for each in reported["members"]] == ["ok", "no answer"]
    assert reported["members"][0]["status"]["pool"]["size"] == 256 * 2**30
    assert (one[0], json.loads(one[1])["status"]["name"]) == (200, name_of_node(0))
    assert none[0] == 404
    assert "/api/v1/status lists all" in json.loads(none[1])["error"]


async def test_page_of_a_large_cluster_stays_small_and_gives_the_loop_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are counted beyond a bound; the node serves while the page is made."""
    monkeypatch.setattr("peercache.http.dashboard.SLICE_S", 0.0)
    members = cluster(1000)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with served(watching=watching(members)) as address, trio.open_nursery() as nursery:
        nursery.start_soon(count)
        _, body = await ask(address, "/")
        nursery.cancel_scope.cancel()

    assert "and 800 more" in body
    assert "and 1800 more" in body
    assert len(body) < 800_000
    assert turns > 100


async def test_start_of_a_node_hides_its_former_one() -> None:
    """A node that is back is not dead, although the view remembers both."""
    former = attrs.evolve(dead(member(0, 1)), seen="dead")
    shown = text_of(await page([former, member(0, 1)]))

    assert "no answer" not in shown
    assert "ok 1" in shown


async def test_gathering_that_fails_is_an_error_and_ends_nothing() -> None:
    """A bug in a page must not take the node with it."""

    async def broken(*, detail: bool = False) -> Sequence[MemberStatus]:
        raise RuntimeError("no view")

    async with served(watching=Watching(broken)) as address:
        failed = await ask(address, "/")
        following = await ask(address, "/healthz")

    assert (failed[0], json.loads(failed[1])) == (500, {"error": "RuntimeError: no view"})
    assert following[0] == 200


@pytest.mark.parametrize("is_broken", [False, True])
async def test_small_cluster_is_always_watched(
    autojump_clock: trio.testing.MockClock, is_broken: bool
) -> None:
    """So the first look shows what led to it; a failure of one step does not end it."""
    asked = 0

    async def gather(*, detail: bool = False) -> Sequence[MemberStatus]:
        nonlocal asked
        asked += 1
        if is_broken and asked == 1:
            raise RuntimeError("no view")
        return cluster(SMALL_MEMBERS_MAX)

    found = Watching(gather)
    with trio.move_on_after(10 * STEP_S + 1):
        await found.run()

    assert asked == 11
    assert found.history.seconds >= 9 * STEP_S


async def test_large_cluster_is_watched_while_something_looks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A thousand nodes do not ask each other for nothing."""
    asked = 0

    async def gather(*, detail: bool = False) -> Sequence[MemberStatus]:
        nonlocal asked
        asked += 1
        return cluster(SMALL_MEMBERS_MAX + 1)

    found = Watching(gather)
    with trio.move_on_after(4 * WATCHED_S):
        await found.run()
    assert asked == 1

    await found.members()
    with trio.move_on_after(4 * WATCHED_S):
        await found.run()
    assert POINTS <= asked <= POINTS + 4
    assert watching_module.WATCHED_S == POINTS * STEP_S


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0 s"), (0.00012, "120 µs"), (0.0034, "3.4 ms"), (0.25, "250 ms"), (2.0, "2 s"),
        (59.9, "60 s"), (61, "1 min"), (3_700, "1 h 1 min"), (100_000, "1 d 3 h"),
        (float("nan"), "–"), (float("inf"), "–"),
    ],
)  # fmt: skip
def test_times_are_written_in_the_unit_that_fits(value: float, written: str) -> None:
    """For people, who read three digits."""
    assert written_time(value) == written


def test_counts_and_shares_are_written_for_people() -> None:
    """What is not all is not called 100 %, and what is not nothing not 0 %."""
    assert [written_count(v) for v in (0, 0.5, 12.4, 9_999, 12_345, 4.1e6, 2e10)] == [
        "0", "0.5", "12", "9,999", "12.3 k", "4.1 M", "20.0 G"
    ]  # fmt: skip
    reported = [written_share(v) for v in (0.0, 0.0001, 0.5, 0.9999, 1.0, float("nan"))]
    assert reported == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %", "–"]


def test_line_ends_where_nothing_is_known() -> None:
    """A gap is no straight line, and a single point is seen."""
    nan = float("nan")
    values = np.array([0.0, 5.0, nan, 10.0, nan, nan])

    chart = line_chart("x", "X", [("a", values)], written_count)

    assert chart.top == "10"
    assert chart.lines[0].path == "M0.0 120.0L120.0 60.0"
    assert chart.lines[0].dots == "M360.0 0.0h0"
    assert chart.summary == "X: a 10"
    empty = line_chart("x", "X", [("a", values * nan)], written_count)
    assert (empty.lines[0].path, empty.lines[0].now) == ("", "–")


def test_estimate_is_a_curve_over_the_memory() -> None:
    """Each step is twice the memory; without an estimate there is no chart."""
    rates = dict(zip(MEMORY_NAMES, (0.0, 0.25, 0.5, 0.75, 1.0, 1.0), strict=True))

    chart = memory_chart(Reuse(uses=9.0, hit_rates=rates))

    assert chart is not None
    assert chart.lines[0].path.startswith("M0.0 120.0L120.0 90.0L240.0 60.0L")
    assert (chart.left, chart.right) == ("0.25 × memory", "8 ×")
    assert memory_chart(Reuse()) is None


def test_areas_are_stacked_and_the_smaller_become_one() -> None:
    """More colours than that are not distinguished."""
    series = [(f"r{place}", np.full(3, float(place))) for place in range(10)]

    chart = area_chart("x", "X", series, written_count)

    assert [line.label for line in chart.lines] == ["r9", "r8", "r7", "r6", "r5", "others"]
    assert chart.lines[-1].now == "10"
    assert len(chart.lines) == LINES_MAX
    assert chart.top == "50"
    assert chart.lines[0].path.endswith("L600.0 120.0L300.0 120.0L0.0 120.0Z")


def test_area_of_a_single_point_is_seen() -> None:
    """It is as wide as a step: an area without a width would be nothing."""
    nan = float("nan")
    values = np.array([nan, 10.0, nan])

    (line,) = area_chart("x", "X", [("a", values)], written_count).lines

    assert line.path == "M150.0 0.0L450.0 0.0L450.0 120.0L150.0 120.0Z"


def test_times_have_a_line_for_each_power_of_ten() -> None:
    """Microseconds and seconds are both seen."""
    chart = decade_chart("x", "X", [("a", np.array([0.0001, 0.001, 0.1]))], written_time)

    assert (chart.bottom, chart.top) == ("100 µs", "100 ms")
    assert chart.lines[0].path == "M0.0 120.0L300.0 80.0L600.0 0.0"
    assert chart.grid.count("M") == 4
    assert decade_chart("x", "X", [("a", np.array([np.nan]))], written_time).bottom == "100 µs"


CSS = files("peercache.http").joinpath("files").joinpath("dashboard.css").read_text()

TEXTS = [
    *((text, back) for text in ("text", "faint", "accent", "warn") for back in ("back", "card")),
    ("bad", "back"),
    *((kind, f"{kind}-back") for kind in ("good", "bad", "warn", "note")),
]
LINES = [f"c{place}" for place in range(6)]


def _palettes() -> dict[str, dict[str, str]]:
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", block))
        for block in re.findall(r":root \{([^}]+)\}", CSS)
    )
    return {"light": light, "dark": light | dark}


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", ["light", "dark"])
def test_colours_have_the_contrast_of_wcag_aa(name: str) -> None:
    """4.5 to 1 for texts, 3 to 1 for lines and marks."""
    palette = _palettes()[name]
    for text, back in TEXTS:
        assert _contrast(palette[text], palette[back]) >= 4.5, (text, back)
    for line in LINES:
        assert _contrast(palette[line], palette["card"]) >= 3.0, line


def test_contrast_is_computed_as_wcag_does() -> None:
    """Black on white is 21, and a grey that designers like too much is not enough."""
    assert _contrast("#000", "#fff") == pytest.approx(21.0)
    assert _contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_every_colour_is_of_the_palette() -> None:
    """A colour outside the palette is the same in the dark."""
    rest = re.sub(r":root \{[^}]+\}", "", CSS)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b", rest) == []
