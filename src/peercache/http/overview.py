"""The overview: one page on which a person sees the state of a node and its cluster.

A pure function from the facts of `/healthz`, the samples of `/metrics` and the view to HTML. The
page has no script, loads nothing, and its template escapes every text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import CollectorRegistry

from peercache.config.quantities import written_size
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.model.view import STATE_NAMES, is_live

if TYPE_CHECKING:
    from jinja2 import Template

MEMBERS_SHOWN_MAX = 200
"""Rows of members; a page that refreshes itself must stay small in a large cluster."""

REFRESH_S = 2

Row: TypeAlias = tuple[str, ...]

_NOTHING = {
    "pool_bytes": 0,
    "pool_bytes_usable": 0,
    "pool_bytes_used": 0,
    "pool_pages": 0,
    "disk_bytes": 0,
    "disk_bytes_used": 0,
    "disk_pages": 0,
    "directory_records": 0,
}
"""Facts that a node which does not serve yet may lack."""


@cache
def template() -> Template:
    """Load the template, once: only nodes with an HTTP port pay for Jinja2."""
    from jinja2 import Environment, PackageLoader  # noqa: PLC0415 - as said above

    templates = Environment(loader=PackageLoader("peercache.http", "."), autoescape=True)
    templates.filters["size"] = written_size
    return templates.get_template("overview.html")


def overview(
    *,
    problem: str,
    degraded: str = "",
    facts: Mapping[str, int | float | str],
    members: Sequence[Member],
    registry: CollectorRegistry,
) -> str:
    """Return the page.

    problem: why the node does not serve, "" while it does.
    degraded: what does not work although it serves.
    """
    node = str(facts.get("node", ""))
    shown = sorted(members, key=lambda m: (m.state, m.host_name, m.control))[:MEMBERS_SHOWN_MAX]
    return template().render(
        problem=problem,
        degraded=degraded,
        facts={**_NOTHING, **facts},
        node=node,
        calls=list(_calls(registry)) or [("", "nothing yet", "", "")],
        members=[_member(member, node) for member in shown],
        more=len(members) - len(shown),
        live=sum(map(is_live, members)),
        refresh_s=REFRESH_S,
    )


def _calls(registry: CollectorRegistry) -> Iterator[Row]:
    """Yield (call, outcome, pages, bytes) of every count that is not zero."""
    counted: dict[str, dict[str, float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.value:
                label = "".join(sample.labels.values())
                counted.setdefault(sample.name, {})[label] = sample.value

    def most(name: str) -> list[tuple[str, float]]:
        counts = counted.get(f"peercache_{name}_total", {})
        return sorted(counts.items(), key=lambda item: -item[1])

    read, written = dict(most("bytes_read")), sum(dict(most("bytes_written")).values())
    for fabric, count in sorted(most("pages_hit")):
        yield "get", f"hit over {fabric}", f"{count:,.0f}", written_size(read.get(fabric, 0))
    for reason, count in most("pages_missed"):
        yield "get", f"miss: {reason}", f"{count:,.0f}", ""
    for outcome, count in most("pages_set"):
        size = written_size(written) if outcome == "copied" else ""
        yield "set", outcome, f"{count:,.0f}", size
    for reason, count in most("sets_refused"):
        yield "set", f"refused: {reason}", f"{count:,.0f}", ""
    for word in ("asked", "found"):
        for _, count in most(f"exists_{word}"):
            yield "exists", word, f"{count:,.0f}", ""


def _member(member: Member, node: str) -> Row:
    name, state = name_of(member.incarnation), member.state
    # By its address: host names may be one for all, and the incarnation says nothing to a person.
    return (
        f"{member.control} (this node)" if name == node else member.control,
        STATE_NAMES[state] if state < len(STATE_NAMES) else str(state),
        member.host_name,
        member.data,
        name,
    )
