"""The overview: one page for a person who wants to see how a node and its cluster are.

A pure function from what `/healthz` and `/metrics` tell, and the view, to HTML. It has no script,
loads nothing, and every text in it is escaped: host names are what other nodes say of themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TypeAlias

from prometheus_client import CollectorRegistry

from peercache.config.quantities import written_size
from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.model.view import STATE_NAMES, is_live

MEMBERS_SHOWN_MAX = 200
"""Rows of members; a page that refreshes itself must stay small in a large cluster."""

REFRESH_S = 2

Facts: TypeAlias = Mapping[str, int | float | str]
Row: TypeAlias = tuple[str, ...]

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --good: #2a8a4a; --bad: #c0392b; --held: #3b78c2 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.35rem } h2 { font-size: 1.05rem; margin-top: 2rem }
code, td.n { font-family: ui-monospace, monospace; font-variant-numeric: tabular-nums }
.state { color: #fff; border-radius: 1rem; padding: .15rem .7rem; font-size: .85rem }
.good { background: var(--good) } .bad { background: var(--bad) }
meter { width: 100%; height: 1.2rem } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
.n { text-align: right } th { font-weight: 600 } footer { margin-top: 2rem; opacity: .7 }
"""


def overview(
    *, problem: str, facts: Facts, members: Sequence[Member], registry: CollectorRegistry
) -> str:
    """Return the page. problem: why the node does not serve, "" while it does."""
    node = str(facts.get("node", ""))
    word, look = ("not serving: " + problem, "bad") if problem else ("serving", "good")
    counted = _counted(registry)
    state = f'<span class="state {look}">{escape(word)}</span>'
    links = '<a href="metrics">metrics</a> · <a href="healthz">health</a>'
    parts = [
        f"<h1>PeerCache node <code>{escape(node)}</code> {state}</h1>",
        _memory(facts),
        _disk(facts),
        "<h2>What the engines of this host asked</h2>",
        _table(("call", "outcome", "pages", "bytes"), _calls(counted)),
        f"<h2>Members: {sum(map(is_live, members))} live</h2>",
        _members(members, node),
        f"<p>{facts.get('directory_records', 0)} records in this node's directory shard.</p>",
        f"<footer>{links} · refreshed every {REFRESH_S} s</footer>",
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{REFRESH_S}">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width">'
        f"<title>PeerCache {escape(node)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _memory(facts: Facts) -> str:
    usable, all_bytes = int(facts.get("pool_bytes_usable", 0)), int(facts.get("pool_bytes", 0))
    growing = "" if usable == all_bytes else f" (of {written_size(all_bytes)}, being populated)"
    return _level(
        "Pool",
        int(facts.get("pool_bytes_used", 0)),
        usable,
        f"{facts.get('pool_pages', 0)} pages{growing}",
    )


def _disk(facts: Facts) -> str:
    """Show the disk tier of a node that has one."""
    if "disk_problem" not in facts:
        return ""
    if facts["disk_problem"]:
        return f"<h2>Disk</h2><p>off: {escape(str(facts['disk_problem']))}</p>"
    return _level(
        "Disk",
        int(facts.get("disk_bytes_used", 0)),
        int(facts.get("disk_bytes", 0)),
        f"{facts.get('disk_pages', 0)} pages",
    )


def _level(title: str, used: int, of: int, beside: str) -> str:
    text = f"{written_size(used)} of {written_size(of)}, {beside}"
    return (
        f'<h2>{title}</h2><meter min="0" max="{max(1, of)}" value="{used}" '
        f'title="{escape(text)}"></meter><p>{escape(text)}</p>'
    )


def _counted(registry: CollectorRegistry) -> dict[str, dict[str, float]]:
    """Return every sample that is not zero, by name and by the value of its label."""
    found: dict[str, dict[str, float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.value:
                found.setdefault(sample.name, {})["".join(sample.labels.values())] = sample.value
    return found


def _calls(counted: Mapping[str, Mapping[str, float]]) -> list[Row]:
    def of(name: str) -> Mapping[str, float]:
        return counted.get(f"peercache_{name}_total", {})

    read = of("bytes_read")
    return [
        *(
            ("get", f"hit over {fabric}", _count(pages), written_size(read.get(fabric, 0)))
            for fabric, pages in sorted(of("pages_hit").items())
        ),
        *(("get", f"miss: {reason}", _count(n), "") for reason, n in _most(of("pages_missed"))),
        *(
            (
                "set",
                outcome,
                _count(n),
                written_size(sum(of("bytes_written").values())) if outcome == "copied" else "",
            )
            for outcome, n in _most(of("pages_set"))
        ),
        *(("set", f"refused: {reason}", _count(n), "") for reason, n in _most(of("sets_refused"))),
        *(("exists", "asked", _count(n), "") for n in of("exists_asked").values()),
        *(("exists", "found", _count(n), "") for n in of("exists_found").values()),
    ] or [("", "nothing yet", "", "")]


def _members(members: Sequence[Member], node: str) -> str:
    shown = sorted(members, key=lambda m: (m.state, m.host_name, m.control))[:MEMBERS_SHOWN_MAX]
    rows = [
        (
            name_of(m.incarnation) + (" (this node)" if name_of(m.incarnation) == node else ""),
            STATE_NAMES[m.state] if m.state < len(STATE_NAMES) else str(m.state),
            m.host_name,
            m.control,
            m.data,
        )
        for m in shown
    ]
    more = len(members) - len(shown)
    table = _table(("node", "state", "host", "control", "data"), rows)
    return table + (f"<p>and {more} more</p>" if more else "")


def _table(names: Row, rows: Sequence[Row]) -> str:
    looks = [" class=n" if name in ("pages", "bytes") else "" for name in names]
    head = "".join(
        f"<th{look}>{escape(name)}</th>" for look, name in zip(looks, names, strict=True)
    )
    lines = [
        "".join(f"<td{look}>{escape(text)}</td>" for look, text in zip(looks, row, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _most(counts: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(counts.items(), key=lambda item: -item[1])


def _count(number: float) -> str:
    return f"{number:,.0f}"
