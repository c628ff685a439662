"""The dashboard: pages on which a person sees the cluster, and one node of it.

From statuses, their history and a time to HTML. It asks nothing itself. Every value is escaped by
the templates: names and reasons are texts of other nodes.

Charts are pure geometry: lines and areas over time, as paths of SVG. Texts are next to a chart in
HTML, so that they are readable at every width.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import attrs
import numpy as np
import numpy.typing as npt
import trio

from peercache.config.quantities import written_size
from peercache.http.history import EVERY_MEMBER, LONG_STEP_S, POINTS, STEP_S, Event, History
from peercache.model.reuse import MEMORY_NAMES
from peercache.model.status import (
    DEGRADED,
    DRAINING,
    LEAVING,
    NO_ANSWER,
    OK,
    UNAVAILABLE,
    MemberStatus,
    Reuse,
    Status,
    Tier,
    namespaces_of,
    reuse_of,
)
from peercache.observability.reasons import MISS_REASONS
from peercache.trust.files import EXPIRY_WARNING_DAYS

WIDTH, HEIGHT = 600, 120
"""Units of the drawing; the page stretches it."""

LINES_MAX = 6
"""As many as there are colours that people distinguish."""

Values = npt.NDArray[np.float64]
Written = Callable[[float], str]


@attrs.frozen
class ChartLine:
    """One line or area. place: of its colour, 0 to LINES_MAX - 1; now: its last value, in words.

    dots: the path of points without neighbours.
    """

    label: str
    path: str
    now: str
    place: int
    dots: str = ""


@attrs.frozen
class Mark:
    """What happened to a member, on the charts. across: 0 to WIDTH; kind: its colour."""

    across: float
    kind: str
    text: str


@attrs.frozen
class Chart:
    """A chart of several lines over the same time.

    name:   of its place in the page.
    top, bottom: the values at the edges, in words; bottom is "" for zero.
    grid:   the path of the lines behind.
    areas:  whether the lines are stacked and filled.
    left, right: what the edges at both sides mean, in words.
    low, high: the values at the edges; low 0 is a linear scale, else it is logarithmic.
    unit:   of the values: share, rate, bytes or time, for those that the script shows.
    """

    name: str
    title: str
    lines: tuple[ChartLine, ...]
    top: str
    bottom: str = ""
    grid: str = "M0 .5H600M0 60H600M0 119.5H600"
    areas: bool = False
    left: str = ""
    right: str = "now"
    low: float = 0.0
    high: float = 1.0
    unit: str = ""

    @property
    def summary(self) -> str:
        """The chart in one sentence, for those who do not see it."""
        values = ", ".join(f"{line.label} {line.now}" for line in self.lines)
        return f"{self.title}: {values or 'nothing yet'}"


def line_chart(
    name: str,
    title: str,
    series: Sequence[tuple[str, Values]],
    written: Written,
    *,
    top: float = 0.0,
    unit: float = 10.0,
) -> Chart:
    """Return a chart of lines. top: the least value at the upper edge; unit: 1024 for bytes."""
    highest = _nice(max([top, *(_highest(values) for _, values in series)]), unit)
    lines = [
        _line(label, values / highest, _last(values, written), place % LINES_MAX)
        for place, (label, values) in enumerate(series)
    ]
    return Chart(
        name, title, tuple(lines), written(highest), high=highest, unit=_UNITS.get(written, "")
    )


def decade_chart(
    name: str, title: str, series: Sequence[tuple[str, Values]], written: Written
) -> Chart:
    """Return a chart of lines on a logarithmic scale, with a line behind for each power of ten.

    Times of one call are between microseconds and seconds: on a straight scale only the slowest
    are seen.
    """
    known = np.concatenate([values[np.isfinite(values) & (values > 0)] for _, values in series])
    low = math.floor(math.log10(known.min())) if len(known) else -4
    high = max(math.ceil(math.log10(known.max())) if len(known) else -1, low + 1)
    lines = [
        _line(
            label,
            (np.log10(np.where(values > 0, values, np.nan)) - low) / (high - low),
            _last(values, written),
            place % LINES_MAX,
        )
        for place, (label, values) in enumerate(series)
    ]
    steps = (HEIGHT - 1) / (high - low)
    grid = "".join(f"M0 {0.5 + step * steps:.1f}H{WIDTH}" for step in range(high - low + 1))
    return Chart(
        name, title, tuple(lines), written(10.0**high), written(10.0**low), grid,
        low=10.0**low, high=10.0**high, unit=_UNITS.get(written, ""),
    )  # fmt: skip


def area_chart(
    name: str, title: str, series: Sequence[tuple[str, Values]], written: Written
) -> Chart:
    """Return a chart of stacked areas, the largest first; the smaller ones become one."""
    known = [(label, values) for label, values in series if _highest(values) > 0]
    known.sort(key=lambda each: -float(np.nansum(each[1])))
    if len(known) > LINES_MAX:
        rest = np.nansum([values for _, values in known[LINES_MAX - 1 :]], axis=0)
        known = [*known[: LINES_MAX - 1], ("others", rest)]
    bottoms: list[Values] = [np.zeros(len(values)) for _, values in known[:1]]
    for _, values in known:
        bottoms.append(bottoms[-1] + np.nan_to_num(values))
    highest = _nice(_highest(bottoms[-1]) if bottoms else 0.0, 10.0)
    lines = [
        ChartLine(
            label,
            _area(bottoms[place] / highest, bottoms[place + 1] / highest, np.isfinite(values)),
            _last(values, written),
            place,
        )
        for place, (label, values) in enumerate(known)
    ]
    unit = _UNITS.get(written, "")
    return Chart(name, title, tuple(lines), written(highest), areas=True, high=highest, unit=unit)


def memory_chart(reuse: Reuse) -> Chart | None:
    """Return the curve of the estimated hit rate, each step twice the memory; None without one."""
    rates = np.array([reuse.hit_rates.get(name, math.nan) for name in MEMORY_NAMES])
    if not np.isfinite(rates).all():
        return None
    label = f"with {', '.join(MEMORY_NAMES)} times the memory"
    now = ", ".join([written_share(rate) for rate in rates.tolist()])
    grid = "M0 .5H600M0 60H600M0 119.5H600M120 0V120M240 0V120M360 0V120M480 0V120"
    return Chart(
        "memory", "Estimated hit rate of reads and sets", (_line(label, rates, now, 0),),
        written_share(1.0), grid=grid, left=f"{MEMORY_NAMES[0]} × memory",
        right=f"{MEMORY_NAMES[-1]} ×",
    )  # fmt: skip


def _highest(values: Values) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if len(known) else 0.0


def _nice(value: float, unit: float) -> float:
    """Return the next number that people like at an edge: 1, 2 or 5 with zeros, of bytes in KiB."""
    if value <= 0:
        return 1.0
    size = unit ** math.floor(math.log(value, unit)) if unit != 10.0 else 1.0
    power = size * 10.0 ** math.floor(math.log10(value / size))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= value * 0.999)


def _last(values: Values, written: Written) -> str:
    known = values[np.isfinite(values)]
    return written(float(known[-1])) if len(known) else "–"


def _runs(known: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.intp]]:
    """Return the places of each run of known points: a line ends where nothing is known."""
    places = np.flatnonzero(known)
    if not len(places):
        return []
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)


def _points(places: npt.NDArray[np.intp], parts: Values) -> list[str]:
    """Return points. parts: 0 at the lower edge, 1 at the upper one."""
    across = places * (WIDTH / max(1, len(parts) - 1))
    down = HEIGHT - np.clip(parts[places], 0.0, 1.0) * HEIGHT
    return [f"{x:.1f} {y:.1f}" for x, y in zip(across.tolist(), down.tolist(), strict=True)]


def _line(label: str, parts: Values, now: str, place: int) -> ChartLine:
    """Return a line; a point without neighbours is a dot, which a round cap makes visible."""
    runs = [_points(run, parts) for run in _runs(np.isfinite(parts))]
    path = "".join(f"M{'L'.join(points)}" for points in runs if len(points) > 1)
    dots = "".join(f"M{points[0]}h0" for points in runs if len(points) == 1)
    return ChartLine(label, path, now, place, dots)


def _area(bottom: Values, top: Values, known: npt.NDArray[np.bool_]) -> str:
    return "".join(
        f"M{'L'.join([*_points(run, top), *_points(run[::-1], bottom)])}Z"
        if len(run) > 1
        else _column(run, bottom, top)
        for run in _runs(known)
    )


def _column(run: npt.NDArray[np.intp], bottom: Values, top: Values) -> str:
    """Return the area of a point without neighbours, as wide as a step."""
    width = WIDTH / max(1, len(top) - 1)
    (above,), (below,) = _points(run, top), _points(run, bottom)
    x, y, base = float(above.split()[0]), above.split()[1], below.split()[1]
    left, right = max(0.0, x - width / 2), min(float(WIDTH), x + width / 2)
    return f"M{left:.1f} {y}L{right:.1f} {y}L{right:.1f} {base}L{left:.1f} {base}Z"


if TYPE_CHECKING:
    from jinja2 import Template

REFRESH_S = 5
RECENT_S = 300.0
"""What "recently" is in figures: five minutes."""
ROWS_MAX = 200
"""Rows of one table; a page that refreshes itself must stay small in a large cluster."""
NAMED_MAX = 3
"""Peers that a row names of those to which a node gave pages, or from which it took them."""
REASONS_MAX = 8
SILENT_WORKER_S = 60.0
FULL = 0.95
"""A bar is red if its tier has a problem and is this full; a full pool alone is as it should be."""
EVENTS_SHOWN = 8
SLOW_SHOWN = 20
SLICE_S = 0.002
"""After this long the page gives the loop back, as the node serves meanwhile."""

_ORDER = (UNAVAILABLE, NO_ANSWER, DEGRADED, DRAINING, LEAVING, OK, "left")
"""What a person looks at first."""

_FABRICS = ("shm", "rdma", "tcp")


RANGES = {"5m": ("5 min", 300.0), "15m": ("15 min", POINTS * STEP_S), "3h": ("3 h", 10_800.0)}
"""The times that charts cover: their names, and seconds."""
DEFAULT_RANGE = "15m"
assert RANGES["3h"][1] == POINTS * LONG_STEP_S

SEARCH_MAX = 100
"""Characters of a search."""


@attrs.frozen
class PageQuery:
    """What the reader has chosen, as the address of the page has it.

    range: the time of the charts; search: a part of the names of the nodes that are listed; sort:
           the column that they are sorted by; "": those with a problem first.
    """

    range: str = DEFAULT_RANGE
    search: str = ""
    sort: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> PageQuery:
        """Return the query of an address; what is invalid in it is left out."""
        chosen, sort = given.get("range", ""), given.get("sort", "")
        return cls(
            chosen if chosen in RANGES else DEFAULT_RANGE,
            given.get("search", "").strip()[:SEARCH_MAX],
            sort if sort in _SORTS else "",
        )

    def link(self, **changes: str) -> str:
        """Return the address of this page with other choices."""
        chosen = attrs.asdict(attrs.evolve(self, **changes))
        default = attrs.asdict(PageQuery())
        return "?" + urlencode(
            {k: v for k, v in chosen.items() if v != default[k]}, errors="replace"
        )


@attrs.frozen
class PageFacts:
    """What a page is made from.

    own: the name of the node that answers; at: the time of day, in words.
    long: the history of RANGES["3h"].
    """

    own: str
    members: Sequence[MemberStatus]
    history: History
    at: str
    long: History = attrs.field(factory=History)
    query: PageQuery = attrs.field(factory=PageQuery)

    @property
    def charted(self) -> History:
        """The history that the charts are of."""
        return self.long if self.query.range == "3h" else self.history

    @property
    def points(self) -> int:
        """How many of its points the charts show."""
        return min(POINTS, round(RANGES[self.query.range][1] / self.charted.step_s))

    @property
    def since(self) -> str:
        """The left edge of the charts, in words."""
        return f"{RANGES[self.query.range][0]} ago"


@attrs.frozen
class Tile:
    """One figure. part: 0 to 1 for a bar below it, or None."""

    label: str
    value: str
    detail: str = ""
    part: float | None = None


async def cluster_page(view: PageFacts) -> str:
    """Return the page of all members."""
    everyone = sorted(view.members, key=_place)
    members = _listed(everyone, view)
    statuses = [member.status for member in everyone if member.answers]
    namespaces = namespaces_of(statuses)
    workers = [(status, worker) for status in statuses for worker in status.workers]
    peers = [
        (status, peer)
        for status in statuses
        for peer in status.peers
        if peer.lagging or peer.state == "suspect"
    ]
    return await _rendered(
        "cluster.html",
        view=view,
        members=members[:ROWS_MAX],
        members_more=max(0, len(members) - ROWS_MAX),
        is_found=bool(members) or not view.query.search,
        problems=await _alerts(view.history) + _problems(everyone),
        states=Counter(member.status.state for member in everyone).items(),
        versions=sorted({status.version for status in statuses if status.version}),
        cluster=next((status.cluster for status in statuses), ""),
        tiles=_tiles(statuses, view.history, EVERY_MEMBER),
        charts=await _charts(view, EVERY_MEMBER),
        marks=_marks(view, None),
        events=_events(view, None),
        memory=memory_chart(reuse_of(statuses)),
        movers=_movers(statuses)[:ROWS_MAX],
        moves=_moves_chart(view, EVERY_MEMBER),
        fabrics=_fabrics(view.history, EVERY_MEMBER),
        workers=workers[:ROWS_MAX],
        workers_more=max(0, len(workers) - ROWS_MAX) + sum(each.workers_more for each in statuses),
        peers=peers[:ROWS_MAX],
        namespaces=namespaces[:ROWS_MAX],
        balance=_balance(statuses),
    )


async def node_page(view: PageFacts, member: MemberStatus) -> str:
    """Return the page of one member."""
    status = member.status
    return await _rendered(
        "node.html",
        view=view,
        member=member,
        status=status,
        problems=_problems([member]),
        tiles=_tiles([status], view.history, status.name) if member.answers else [],
        charts=await _charts(view, status.name) if member.answers else [],
        marks=_marks(view, status.name),
        events=_events(view, status.name),
        memory=memory_chart(status.reuse),
        moves=_moves_chart(view, status.name),
        fabrics=_fabrics(view.history, status.name),
        workers=[(status, worker) for worker in status.workers],
        workers_more=status.workers_more,
        is_one=True,
        namespaces=list(status.namespaces),
        cluster=status.cluster,
    )


async def absent_page(view: PageFacts, name: str) -> str:
    """Return the page of a member that does not exist."""
    return await _rendered("absent.html", view=view, name=name, cluster="")


@cache
def templates() -> dict[str, Template]:
    """Load the templates, once: only nodes with an HTTP port pay for Jinja2."""
    from jinja2 import Environment, PackageLoader  # noqa: PLC0415 - as said above

    found = Environment(
        loader=PackageLoader("peercache.http", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        size=written_size,
        count=written_count,
        share=written_share,
        time=written_time,
        address=lambda name: quote(name, safe="[]:", errors="replace"),
    )
    found.globals.update(
        refresh_s=REFRESH_S,
        certificate_days_min=EXPIRY_WARNING_DAYS,
        silent_worker_s=SILENT_WORKER_S,
        named_max=NAMED_MAX,
        reasons_max=REASONS_MAX,
        slow_max=SLOW_SHOWN,
        ranges={name: label for name, (label, _) in RANGES.items()},
        sorts=_SORTS,
        search_max=SEARCH_MAX,
        is_full=lambda tier: bool(tier.problem) and part_of(tier.used, tier.size) >= FULL,
        part_of=part_of,
        rate=written_rate,
        hits=lambda view, name: written_share(_hit_share(view.history, name)),
    )
    return {name: found.get_template(name) for name in ("cluster.html", "node.html", "absent.html")}


async def _rendered(template: str, /, **facts: Any) -> str:
    """Return a page, and give the loop back while it is made."""
    parts, began = [], time.perf_counter()
    for part in templates()[template].generate(**facts):
        parts.append(part)
        if time.perf_counter() - began > SLICE_S:
            await trio.lowlevel.checkpoint()
            began = time.perf_counter()
    return "".join(parts)


def written_count(value: float) -> str:
    """Return a count as people read it: 950, 12.3 k, 4.1 M."""
    if not math.isfinite(value):
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.99995 * size and value >= 10_000:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def written_rate(value: float) -> str:
    """Return a count a second."""
    return f"{written_count(value)}/s" if math.isfinite(value) else "–"


def written_share(value: float) -> str:
    """Return a part of one, in percent."""
    if not math.isfinite(value):
        return "–"
    # 99.97 % is not all of it, and 0.02 % is not nothing.
    digits = 0 if value in (0.0, 1.0) else 1
    percent = 100 * value if digits == 0 else min(99.9, max(0.1, 100 * value))
    return f"{percent:.{digits}f} %"


def written_time(seconds: float) -> str:
    """Return a time in the unit that fits: 120 µs, 3.4 ms, 12 min, 3 d 4 h."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
            if seconds >= size or unit == "µs" or not seconds:
                amount = seconds / size
                return f"{amount:.{0 if amount >= 10 or amount == int(amount) else 1}f} {unit}"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    return f"{days} d {hours_left} h" if days else f"{hours} h {minutes} min"


def written_bytes_rate(value: float) -> str:
    """Return bytes a second."""
    return f"{written_size(value)}/s" if math.isfinite(value) else "–"


_UNITS: dict[Written, str] = {
    written_rate: "rate",
    written_share: "share",
    written_time: "time",
    written_bytes_rate: "bytes",
}
"""What the script writes values like."""


def part_of(used: float, size: float) -> float:
    """Return which part of a size is used, 0 to 1."""
    return min(1.0, max(0.0, used / size)) if size else 0.0


def _place(member: MemberStatus) -> tuple[object, ...]:
    state, name = member.status.state, member.status.name
    # 10.0.0.2 stands before 10.0.0.10.
    parts = [part.zfill(6) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
    return (_ORDER.index(state) if state in _ORDER else 0, parts)


def _problems(members: Iterable[MemberStatus]) -> list[tuple[str, str, str]]:
    """Return (kind, node, sentence) of all that a person should know of."""
    found: list[tuple[str, str, str]] = []
    for member in members:
        status, name = member.status, member.status.name
        if status.state == NO_ANSWER:
            why = "; ".join(status.reasons) or f"the view says {member.seen}"
            found.append(("bad", name, f"gives no answer; {why}"))
        elif status.state not in (OK, "left"):
            kind = "note" if status.state in (DRAINING, LEAVING) else "bad"
            found.append((kind, name, "; ".join((status.state, *status.reasons))))
        if status.disk.problem and status.disk.problem not in "; ".join(status.reasons):
            found.append(("bad", name, f"disk: {status.disk.problem}"))
        if 0 <= status.certificate_days < EXPIRY_WARNING_DAYS:
            left = f"{status.certificate_days:.1f} days"
            found.append(("warn", name, f"its certificate expires in {left}"))
        if status.insecure:
            found.append(("warn", name, "no certificates: every process that connects may read"))
        lagging = sum(peer.lagging for peer in status.peers)
        if lagging:
            found.append(("warn", name, f"{lagging} owners lag behind its commits"))
    order = ("bad", "warn", "note")
    return sorted(found, key=lambda each: order.index(each[0]))[:ROWS_MAX]


ALERT_S = 600.0
"""The time that alerts of single pages look back; the others look RECENT_S back."""
_WRONG = ("internal", "verify_failed", "wrong_page")
UNREACHABLE_SHARE = 0.05


async def _alerts(history: History) -> list[tuple[str, str, str]]:
    """Return (kind, node, sentence) of alerts that fire by the rates of a member.

    Those of deploy/prometheus for which a status has the series. Most others are problems that a
    member reports itself.
    """
    found: list[tuple[str, str, str]] = []
    for number, name in enumerate(history.members()):
        if number % 32 == 31:
            await trio.lowlevel.checkpoint()
        wrong = [r for r in _WRONG if history.mean(f"pages_missed/{r}", ALERT_S, name) > 0]
        if wrong:
            why = ", ".join(reason.replace("_", " ") for reason in wrong)
            found.append(("bad", name, f"reads failed verification: {why} (PeerCacheWrongBytes)"))
        rates = [history.mean(each, RECENT_S, name) for each in ("pages_hit", "pages_missed")]
        lost = history.mean("pages_missed/peer_unreachable", RECENT_S, name)
        if lost > UNREACHABLE_SHARE * sum(rates):
            part = f"{written_share(lost / sum(rates))} of its pages"
            why = f"{part} are on peers that do not answer (PeerCachePeersUnreachable)"
            found.append(("bad", name, why))
    return found


def _listed(members: Sequence[MemberStatus], view: PageFacts) -> list[MemberStatus]:
    """Return the members that the search finds, in the order that the reader has chosen."""
    wanted = view.query.search.casefold()
    found = [
        each
        for each in members
        if any(wanted in text.casefold() for text in (each.status.name, each.status.host))
    ]
    if view.query.sort:
        key, is_descending = _SORTS[view.query.sort]
        found.sort(key=lambda each: (not each.answers, key(each.status, view.history)))
        if is_descending:
            count = sum(each.answers for each in found)
            found[:count] = found[:count][::-1]
    return found


_SORTS: dict[str, tuple[Callable[[Status, History], Any], bool]] = {
    "node": (lambda status, _: status.name, False),
    "memory": (lambda status, _: part_of(status.pool.used, status.pool.size), True),
    "disk": (lambda status, _: part_of(status.disk.used, status.disk.size), True),
    "hits": (lambda status, history: _or_zero(_hit_share(history, status.name)), False),
    "engines": (lambda status, _: len(status.workers) + status.workers_more, True),
    "ring": (lambda status, _: status.shard.share, True),
    "up": (lambda status, _: status.age_s, False),
}
"""The columns that nodes are sorted by: the key, and whether the highest come first."""


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def _marks(view: PageFacts, member: str | None) -> list[Mark]:
    """Return the marks of what happened in the time of the charts, to one member or to all."""
    history = view.charted
    span_s = max(1, view.points - 1) * history.step_s
    return [
        Mark(WIDTH * (1 - age_s / span_s), _kind(event), _sentence(event, history.now))
        for event in _recent(history, member)
        if (age_s := history.now - event.at) <= span_s
    ]


def _events(view: PageFacts, member: str | None) -> list[tuple[str, str, str]]:
    """Return (kind, node, sentence) of what happened last."""
    history = view.charted
    return [
        (_kind(event), event.name, f"{event.what} {written_time(history.now - event.at)} ago")
        for event in list(reversed(_recent(history, member)))[:EVENTS_SHOWN]
    ]


def _recent(history: History, member: str | None) -> list[Event]:
    return [event for event in history.events if member in (None, event.name)]


def _kind(event: Event) -> str:
    if event.state in (OK, "left"):
        return "note" if event.state == "left" or event.what == "restarted" else "good"
    return "note" if event.state in (DRAINING, LEAVING) else "bad"


def _sentence(event: Event, now: float) -> str:
    return f"{event.name} {event.what} {written_time(now - event.at)} ago"


def _tiles(statuses: Sequence[Status], history: History, member: str) -> list[Tile]:
    """Return the figures at the top; a mean says over what time."""
    share, ever = _hit_share(history, member), _total_share(statuses)
    workers = sum(len(s.workers) + s.workers_more for s in statuses)
    return [
        Tile(
            "Hit rate of reads, 5 min",
            written_share(share),
            f"{written_share(ever)} since the start" if math.isfinite(ever) else "nothing asked",
            share if math.isfinite(share) else None,
        ),
        Tile(
            "Pages read, mean of 5 min",
            written_rate(history.mean("pages_hit", RECENT_S, member)),
            _now_too(history, "pages_hit", "bytes_read", member),
        ),
        Tile(
            "Pages set, mean of 5 min",
            written_rate(history.mean("pages_set", RECENT_S, member)),
            _now_too(history, "pages_set", "bytes_written", member),
        ),
        Tile(
            "Read p99, 5 min",
            written_time(history.quantile("get", 0.99, RECENT_S, member)),
            f"p50 {written_time(history.quantile('get', 0.5, RECENT_S, member))}",
        ),
        _tier_tile("Pool", [s.pool for s in statuses]),
        _tier_tile("Disk", [s.disk for s in statuses])
        if any(s.disk.exists for s in statuses)
        else Tile("Disk", "none", "no node has a disk tier"),
        Tile("Engines", str(workers), "attached workers"),
        Tile(
            "Directory",
            written_count(sum(s.shard.records for s in statuses)),
            "records in the shards",
        ),
    ]


def _now_too(history: History, pages: str, size: str, member: str) -> str:
    mean = written_bytes_rate(history.mean(size, RECENT_S, member))
    return f"{mean}; now {written_rate(history.last(pages, member))}"


def _tier_tile(label: str, tiers: Sequence[Tier]) -> Tile:
    used, size, pages = (sum(getattr(t, f) for t in tiers) for f in ("used", "size", "pages"))
    detail = f"of {written_size(size)}, {written_count(pages)} pages"
    return Tile(label, written_size(used), detail, part_of(used, size))


def _total_share(statuses: Sequence[Status]) -> float:
    hits = sum(status.total("pages_hit") for status in statuses)
    asked = hits + sum(status.total("pages_missed") for status in statuses)
    return hits / asked if asked else math.nan


def _hit_share(history: History, member: str) -> float:
    hits = history.mean("pages_hit", RECENT_S, member)
    misses = history.mean("pages_missed", RECENT_S, member)
    return hits / (hits + misses) if hits + misses > 0 else math.nan


async def _charts(view: PageFacts, member: str) -> list[Chart]:
    """Return the charts; the loop is given back between them."""
    history, points = view.charted, view.points

    def of(column: str) -> Values:
        return history.series(column, member)[-points:]

    def quantiles(operation: str) -> list[tuple[str, Values]]:
        return [
            (f"p{share:.0f}", history.quantiles(operation, share / 100, member)[-points:])
            for share in (50, 90, 99)
        ]

    hits, misses = of("pages_hit"), of("pages_missed")
    asked = hits + misses
    share = hits / _positive(asked)
    makers: tuple[Callable[[], Chart], ...] = (
        lambda: line_chart("hits", "Hit rate of reads", [("hits", share)], written_share, top=1.0),
        lambda: area_chart(
            "misses",
            "Misses by reason",
            [(r.replace("_", " "), of(f"pages_missed/{r}")) for r in sorted(MISS_REASONS)],
            written_rate,
        ),
        lambda: decade_chart("reads", "Time of a read", quantiles("get"), written_time),
        lambda: decade_chart("writes", "Time of a write", quantiles("set"), written_time),
        lambda: line_chart(
            "bytes",
            "Bytes read and written",
            [("read", of("bytes_read")), ("written", of("bytes_written"))],
            written_bytes_rate,
            unit=1024.0,
        ),
        lambda: line_chart(
            "tiers",
            "Pages between the tiers",
            [
                ("evicted from memory", of("evicted")),
                ("written to disk", of("disk_pages_written")),
                ("promoted from disk", of("pages_promoted")),
                ("deleted from disk", of("evicted_disk")),
            ],
            written_rate,
        ),
    )
    if member == EVERY_MEMBER and len(history.members()) > 1:
        makers += (
            lambda: _by_node(view, "by-node-pages", "Pages read, by node", "pages_hit"),
            lambda: _by_node(view, "by-node-misses", "Pages missed, by node", "pages_missed"),
        )
    charts = []
    for make in makers:
        charts.append(attrs.evolve(make(), left=view.since))
        await trio.lowlevel.checkpoint()
    return charts


def _by_node(view: PageFacts, name: str, title: str, column: str) -> Chart:
    """Return a chart with a line for each node, of those with most."""
    history = view.charted
    series = [(node, history.series(column, node)[-view.points :]) for node in history.members()]
    series.sort(key=lambda each: -float(np.nansum(each[1])))
    more = f" (the {LINES_MAX} with most)" if len(series) > LINES_MAX else ""
    return line_chart(name, title + more, sorted(series[:LINES_MAX]), written_rate)


def _movers(statuses: Sequence[Status]) -> list[Status]:
    """Return the nodes that offered pages or were offered some, those that moved most first."""
    used = [status for status in statuses if status.spilled.is_used]
    return sorted(used, key=lambda each: -(each.spilled.given + each.spilled.taken))


def _moves_chart(view: PageFacts, member: str) -> Chart:
    series = {
        "given to other nodes": "pages_given",
        "taken from other nodes": "pages_taken_over",
        "offered and not moved": "pages_not_moved",
    }
    found = [
        (label, view.charted.series(column, member)[-view.points :])
        for label, column in series.items()
    ]
    chart = line_chart("moves", "Pages between nodes", found, written_rate)
    return attrs.evolve(chart, left=view.since)


def _positive(values: Values) -> Values:
    return np.where(values > 0, values, np.nan)


def _fabrics(history: History, member: str) -> list[tuple[str, str, float]]:
    """Return (fabric, pages a second, its part of all) of what was read recently."""
    rates = {f: history.mean(f"pages_hit/{f}", RECENT_S, member) for f in _FABRICS}
    known = {fabric: rate for fabric, rate in rates.items() if rate > 0}
    total = sum(known.values())
    return [(fabric, written_rate(rate), rate / total) for fabric, rate in known.items()]


def _balance(statuses: Sequence[Status]) -> str:
    """Return how evenly the records of the directory are spread, in words."""
    shares = [status.shard.share for status in statuses if status.shard.share > 0]
    if len(shares) < 2:
        return ""
    mean = sum(shares) / len(shares)
    return f"The largest share of the ring is {max(shares) / mean:.2f} of the mean."
