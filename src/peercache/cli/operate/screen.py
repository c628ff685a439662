"""How the status of a cluster is shown: a line for each member, the problems, and the totals."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from peercache.cli.terminal import duration, table
from peercache.config.quantities import written_size
from peercache.model.status import (
    DRAINING,
    LEAVING,
    NO_ANSWER,
    OK,
    MemberStatus,
    Status,
    Tier,
    namespaces_of,
)
from peercache.trust.files import EXPIRY_WARNING_DAYS

COLOURS = {OK: "green", DRAINING: "cyan", LEAVING: "cyan", "left": "dim", NO_ANSWER: "bold red"}
"""By state; other states are shown as a warning."""

FINE = frozenset({OK, DRAINING, LEAVING, "left"})
"""States that an operator requested, or need not act on."""

NAMESPACES_MAX = 16
MOVERS_MAX = 16
NAMED_MAX = 3
"""The most fabrics, peers and reasons that are named."""


def is_fine(members: Iterable[MemberStatus]) -> bool:
    """Return whether no member has a problem."""
    return all(member.status.state in FINE for member in members)


def headline(members: Sequence[MemberStatus], cluster: str, at: str) -> Text:
    """Return one line: the number of members, and their states."""
    states = Counter(member.status.state for member in members)
    parts = [f"{count} {state}" for state, count in states.most_common()]
    word = "member" if len(members) == 1 else "members"
    return Text(
        f"cluster {cluster}: {len(members)} {word}: {', '.join(parts)} (asked {at})", "bold"
    )


def rows(members: Sequence[MemberStatus], width: int) -> Table:
    """Return a table with a line per member, and the columns that fit into `width` characters."""
    statuses = [member.status for member in members]
    left_out = {name for at_least, names in _NEEDS_WIDTH if width < at_least for name in names}
    if not any(status.disk.exists for status in statuses):
        left_out.add("disk")
    # On one host it would be the same in every line.
    if len({status.host for status in statuses}) < 2:
        left_out.add("host")
    if not any(status.certificate_days >= 0 for status in statuses):
        left_out.add("cert")
    columns = {name: cell for name, cell in _COLUMNS.items() if name not in left_out}
    shown = table("node", "state", *columns)
    for column in shown.columns:
        column.no_wrap = True
    for column in shown.columns[2:]:
        column.justify = "right"
    # A narrow terminal cuts off figures, but never the name of the member.
    shown.columns[0].min_width = max((len(m.status.name) for m in members), default=0)
    shown.columns[1].min_width = max((len(m.status.state) for m in members), default=0)
    for member in members:
        status = member.status
        cells = [Text(status.name), Text(status.state, COLOURS.get(status.state, "yellow"))]
        if member.answers:
            cells += [cell(status) for cell in columns.values()]
        shown.add_row(*cells)
    return shown


def problems(members: Sequence[MemberStatus]) -> list[Text]:
    """Return a line for each problem, with what to do if that is known."""
    found: list[Text] = []
    for member in members:
        status = member.status
        found += [_problem(status.name, reason) for reason in status.reasons]
        if status.disk.problem and not any(status.disk.problem in r for r in status.reasons):
            found.append(_problem(status.name, status.disk.problem))
        if status.state == NO_ANSWER and not status.reasons:
            why = f"no answer; the others have it as {member.seen}: see whether its process runs"
            found.append(_problem(status.name, why))
        if 0 <= status.certificate_days < EXPIRY_WARNING_DAYS:
            days = f"its certificate expires in {status.certificate_days:.1f} days"
            found.append(_problem(status.name, f"{days}: peercache certs issue DIR --renew …"))
        slow = [peer.name for peer in status.peers if peer.lagging]
        if slow:
            found.append(_problem(status.name, f"sets do not wait for {', '.join(slow)}"))
        if status.draining.active:
            drain = status.draining
            done = f"{drain.pages_done:,} of {drain.pages:,} pages"
            found.append(_problem(status.name, f"draining: {drain.phase} {done}"))
    return found


def sums(members: Sequence[MemberStatus]) -> list[Text]:
    """Return lines about the whole cluster."""
    statuses = [member.status for member in members if member.answers]
    if not statuses:
        return []
    hit, missed = _by_label(statuses, "pages_hit"), _by_label(statuses, "pages_missed")
    hits = sum(hit.values())
    asked = hits + sum(missed.values())
    lines = [_tier("memory", [status.pool for status in statuses])]
    if any(status.disk.exists for status in statuses):
        lines.append(_tier("disk", [status.disk for status in statuses]))
    fabrics = f" ({_counts(hit, ' ')})" if hit else ""
    lines.append(
        f"hits     {percent(hits / asked if asked else math.nan)} of {asked:,.0f} pages{fabrics}"
    )
    if missed:
        lines.append(f"misses   {_counts(missed, ', ')}")
    if declined := _by_label(statuses, "exists_declined"):
        lines.append(f"declined {_counts(declined, ', ')}")
    for operation in ("get", "set", "exists"):
        slowest = max(
            (s.latency[operation].quantile(0.99) for s in statuses if operation in s.latency),
            key=lambda value: -1.0 if math.isnan(value) else value,
            default=math.nan,
        )
        if not math.isnan(slowest):
            lines.append(f"{operation:<8} 99 % of the calls take up to {duration(slowest)}")
    return [Text(line) for line in lines]


def namespaces(members: Sequence[MemberStatus]) -> list[Table]:
    """Return a table of each namespace's use at all members; none if no node has quotas."""
    uses = namespaces_of([member.status for member in members if member.answers])
    if not uses:
        return []
    shown = table("namespace", "memory", "quota", "retained", "disk", "pages", "priority")
    for column in shown.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for use in uses[:NAMESPACES_MAX]:
        shown.add_row(
            use.name,
            written_size(use.bytes),
            _used(use.bytes, use.quota),
            written_size(use.retained),
            written_size(use.disk_bytes),
            f"{use.pages:,}",
            str(use.priority),
        )
    if len(uses) > NAMESPACES_MAX:
        shown.add_row(f"{len(uses) - NAMESPACES_MAX} more: --json has all")
    return [shown]


def moves(members: Sequence[MemberStatus]) -> list[Table]:
    """Return a table of pages that moved between nodes; none where none was offered."""
    used = [m.status for m in members if m.answers and m.status.spilled.is_used]
    if not used:
        return []
    used.sort(key=lambda status: -(status.spilled.given + status.spilled.taken))
    heads = ["moved pages", "given", "to", "taken", "from", "offered in vain"]
    copies = [status for status in used if status.copied.copies > 1]
    shown = table(*heads, *(["without a copy"] if copies else []))
    for column in shown.columns:
        # A narrow terminal cuts off no name: it is what one looks for here.
        column.overflow = "fold"
    for column in (shown.columns[1], shown.columns[3]):
        column.justify = "right"
    for status in used[:MOVERS_MAX]:
        spilled = status.spilled
        reasons = {"its own": spilled.not_moved, "of others": spilled.not_taken}
        cells = (
            status.name,
            _pages(spilled.given, spilled.given_bytes),
            _counts({peer.name or "others": peer.given for peer in spilled.peers}, "\n"),
            _pages(spilled.taken, spilled.taken_bytes),
            _counts({peer.name or "others": peer.taken for peer in spilled.peers}, "\n"),
            "\n".join(f"{whose}: {_counts(why, ', ')}" for whose, why in reasons.items() if why),
        )
        single = f"{status.copied.single:,}" if status.copied.copies > 1 else "–"
        shown.add_row(*map(Text, cells), *([Text(single)] if copies else []))
    if len(used) > MOVERS_MAX:
        shown.add_row(f"{len(used) - MOVERS_MAX} more: --json has all")
    return [shown]


def whole(members: Sequence[MemberStatus], cluster: str, at: str, width: int) -> Group:
    """Return all of it, for one screen."""
    parts: list[RenderableType] = [headline(members, cluster, at), rows(members, width)]
    return Group(*parts, *problems(members), *sums(members), *namespaces(members), *moves(members))


def age(seconds: float) -> str:
    """Return a duration in its two largest units: 3d 4h."""
    parts: list[str] = []
    left = int(seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size}{unit}")
            left %= size
    return " ".join(parts[:2])


def percent(share: float) -> str:
    """Return a share as a percentage; "-" for an unknown one."""
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


_COLUMNS: dict[str, Callable[[Status], Text]] = {
    "host": lambda status: Text(status.host),
    "up": lambda status: Text(age(status.age_s)),
    "memory": lambda status: _used(status.pool.used, status.pool.size),
    "pages": lambda status: Text(f"{status.pool.pages:,}"),
    "evicted": lambda status: Text(f"{status.pool.evicted:,}"),
    "disk": lambda status: _disk(status.disk),
    "hits": lambda status: Text(percent(status.hit_share())),
    "workers": lambda status: Text(str(len(status.workers) + status.workers_more)),
    "records": lambda status: Text(f"{status.shard.records:,}"),
    "cert": lambda status: _days(status.certificate_days),
    "version": lambda status: Text(status.version),
}
_NEEDS_WIDTH = (
    (150, ("host",)),
    (130, ("version", "records")),
    (115, ("evicted", "up")),
    (90, ("workers", "pages", "cert")),
    (75, ("disk",)),
)
"""The width that each column needs: a narrower terminal leaves it out."""


def _by_label(statuses: Sequence[Status], counter: str) -> dict[str, float]:
    """Return a counter's totals over all members, by the value of its label."""
    found: dict[str, float] = {}
    for status in statuses:
        for path, value in status.counters.items():
            name, _, label = path.partition("/")
            if name == counter:
                found[label] = found.get(label, 0.0) + value
    return found


def _pages(pages: int, size: int) -> str:
    return f"{pages:,}\n{written_size(size)}" if pages else "-"


def _counts(counted: Mapping[str, float], between: str) -> str:
    found = [item for item in counted.items() if item[1]]
    most = sorted(found, key=lambda item: -item[1])[:NAMED_MAX]
    return between.join(f"{name} {count:,.0f}" for name, count in most)


def _tier(name: str, tiers: Sequence[Tier]) -> str:
    used, size = (written_size(sum(getattr(t, f) for t in tiers)) for f in ("used", "size"))
    return f"{name:<8} {used} of {size}, {sum(tier.pages for tier in tiers):,} pages"


def _disk(tier: Tier) -> Text:
    if tier.exists and not tier.size:
        return Text("not usable", "bold red")
    return _used(tier.used, tier.size)


def _used(used: int, size: int) -> Text:
    if not size:
        return Text("-")
    return Text(f"{100 * used / size:.0f} % of {written_size(size)}")


def _days(days: float) -> Text:
    if days < 0:
        return Text("-")
    return Text(f"{days:.0f} d", "" if days >= EXPIRY_WARNING_DAYS else "bold red")


def _problem(name: str, what: str) -> Text:
    return Text.assemble((f"! {name}: ", "yellow"), what)
