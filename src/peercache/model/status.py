"""Status: the state of a node, as plain values that are sent to other nodes and to operators.

Every field has a default. A reader uses the fields that it knows, if they have the expected type,
and ignores the others: so nodes of different versions understand each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import attrs

from peercache.model.ids import name_of
from peercache.model.member import Member
from peercache.model.reuse import MEMORY_NAMES
from peercache.model.view import STATE_NAMES

OK = "ok"
DEGRADED = "degraded"
DRAINING = "draining"
LEAVING = "leaving"
UNAVAILABLE = "unavailable"

NO_ANSWER = "no answer"
"""State of a member that did not report its status."""

LISTED_MAX = 256
"""Most workers, peers and namespaces in one status: it must fit into a control message."""

TEXT_MAX = 1024
"""Characters kept of a text in a status."""

Kind = TypeVar("Kind")


def _added(one: Kind, other: Kind, *names: str) -> Kind:
    """Return a value with the sums of two in these fields; the others are those of the first."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in names}
    return cast("Kind", attrs.evolve(cast("Any", one), **sums))


@attrs.frozen(kw_only=True)
class Tier:
    """Memory or disk of a node, in bytes and pages.

    size:    bytes that it may take; 0 if the node does not have this tier, or no room for it.
    free:    bytes that a set can use without eviction.
    evicted: pages evicted (memory) or deleted (disk) since the start.
    problem: why it does not accept pages; "" while it does.
    """

    size: int = 0
    used: int = 0
    free: int = 0
    pages: int = 0
    evicted: int = 0
    problem: str = ""

    @property
    def exists(self) -> bool:
        """Whether the node has this tier: one without any room has a problem."""
        return bool(self.size or self.problem)


@attrs.frozen(kw_only=True)
class Worker:
    """A client that writes to this node: an attached engine.

    name:    its identity, in hexadecimal digits.
    pid:     that of its process; 0 if the kernel does not report it.
    keys:    pages that it has stored since it attached.
    hits, misses, sets: pages a second between its last two reports.
    report_age_s: seconds since its last report.
    """

    name: str = ""
    pid: int = 0
    namespace: str = ""
    keys: int = 0
    hits: float = 0.0
    misses: float = 0.0
    sets: float = 0.0
    report_age_s: float = 0.0


@attrs.frozen(kw_only=True)
class Latencies:
    """How long calls took: a histogram, cumulative since the start.

    bounds: upper bounds in seconds, ascending; the last bucket has none.
    counts: calls in each bucket, one more than bounds.
    seconds: the sum of all.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    seconds: float = 0.0

    def quantile(self, share: float) -> float:
        """Return the seconds that this share of the calls did not exceed; NaN without calls.

        Interpolated within a bucket, as Prometheus does; the last bound for values beyond it.
        """
        total = self.counts[-1] if self.counts else 0
        if not total or len(self.counts) != len(self.bounds) + 1 or not self.bounds:
            return math.nan
        rank = share * total
        place = next((i for i, count in enumerate(self.counts) if count >= rank), -1)
        if not 0 <= place < len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[place - 1] if place else 0.0
        before = self.counts[place - 1] if place else 0
        within = self.counts[place] - before
        return low + (self.bounds[place] - low) * ((rank - before) / within if within else 1.0)


@attrs.frozen(kw_only=True)
class PeerStatus:
    """Another member, as this node sees it.

    fabric:  how clients of this node last read from it: shm, rdma or tcp, several with a plus;
             before any has read, shm on one host and "" on two.
    state:   alive or suspect.
    lagging: it delayed a commit of this node for a whole timeout, and sets no longer wait for it.
    """

    name: str = ""
    fabric: str = ""
    state: str = ""
    lagging: bool = False


@attrs.frozen(kw_only=True)
class NamespaceUse:
    """The room that a namespace uses at this node.

    quota:    bytes of the pool that it is guaranteed; 0 for none.
    retained: bytes of the pool that its retained pages take.
    """

    name: str = ""
    bytes: int = 0
    pages: int = 0
    disk_bytes: int = 0
    quota: int = 0
    priority: int = 0
    retained: int = 0


@attrs.frozen(kw_only=True)
class Shard:
    """The directory shard of a node.

    share:     its part of the ring; those of all members add up to 1.
    authority: whether a key without a record is absent.
    """

    records: int = 0
    share: float = 0.0
    authority: bool = False


@attrs.frozen(kw_only=True)
class Draining:
    """How far a node has handed its pages over. active: whether it is draining at all.

    pages, bytes: all that must be handed over; done: those that other nodes have.
    """

    active: bool = False
    phase: str = ""
    pages: int = 0
    pages_done: int = 0
    bytes: int = 0
    bytes_done: int = 0


@attrs.frozen(kw_only=True)
class MovedPages:
    """Pages that a node gave to a peer, and that it took from it; spilled ones and those of drains.

    name: HOST:PORT of the peer; "" for all peers without a row of their own.
    """

    name: str = ""
    given: int = 0
    given_bytes: int = 0
    taken: int = 0
    taken_bytes: int = 0

    @property
    def pages(self) -> int:
        """Return how many pages moved."""
        return self.given + self.taken

    def plus(self, more: MovedPages) -> MovedPages:
        """Return the sum of two rows, under the name of this one."""
        return _added(self, more, "given", "given_bytes", "taken", "taken_bytes")


@attrs.frozen(kw_only=True)
class Spilled:
    """Pages that a node offered to others ahead of their eviction, since it began.

    moved, moved_bytes: another node took them. there: one had them. refused: no node that was asked
    had room or colder pages. failed: no answer, or the page changed meanwhile.
    not_moved: those that were refused or failed, by reason, also for a second copy; a page counts
    each time.
    taken, taken_bytes: pages of other nodes that this one took, drained nodes included.
    not_taken: those that it did not take, by reason.
    peers: what moved between it and which node.
    """

    moved: int = 0
    there: int = 0
    refused: int = 0
    failed: int = 0
    moved_bytes: int = 0
    not_moved: dict[str, float] = attrs.field(factory=dict)
    taken: int = 0
    taken_bytes: int = 0
    not_taken: dict[str, float] = attrs.field(factory=dict)
    peers: tuple[MovedPages, ...] = ()

    @property
    def is_used(self) -> bool:
        """Return whether a page was offered, by this node or to it."""
        return self != Spilled()

    @property
    def given(self) -> int:
        """Return how many pages other nodes took, those of drains included."""
        return sum(peer.given for peer in self.peers)

    @property
    def given_bytes(self) -> int:
        """Return the bytes of these pages."""
        return sum(peer.given_bytes for peer in self.peers)


@attrs.frozen(kw_only=True)
class Copied:
    """Pages that a node offered to others for a second copy, since it began.

    copies: how many of each page it keeps in the cluster. copied, copied_bytes: another node took
            them. there: one had them. refused, failed: as above.
    single: pages that it has now, and of which no other node has a copy; 0 if copies is 1.
    """

    copies: int = 1
    copied: int = 0
    there: int = 0
    refused: int = 0
    failed: int = 0
    copied_bytes: int = 0
    single: int = 0


@attrs.frozen(kw_only=True)
class Reuse:
    """Which part of the pages used would be in other amounts of memory, as a node estimates it.

    uses:      pages read and set that it is estimated from; those of earlier hours count less.
    hit_rates: 0 to 1, by how many times the memory of today; empty before any use.
    """

    uses: float = 0.0
    hit_rates: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Thread:
    """A thread of the process. cpu_s: processor time; state: as in /proc."""

    name: str = ""
    cpu_s: float = 0.0
    state: str = ""


@attrs.frozen(kw_only=True)
class SlowCall:
    """A call that was among the slowest of the last hour.

    operation, tier, outcome: as in the labels of `peercache_latency_seconds`.
    age_s:  seconds since its client has reported it, at most a second after its end.
    call:   its number, as in the log lines of its client.
    namespace, pid: of its client; "" and 0 once that has gone.
    missed: pages that it did not serve, by reason.
    """

    operation: str = ""
    tier: str = ""
    outcome: str = ""
    seconds: float = 0.0
    pages: int = 0
    call: int = 0
    age_s: float = 0.0
    client: str = ""
    namespace: str = ""
    pid: int = 0
    missed: dict[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Detail:
    """Details for an operator who inspects one node. Secrets are masked.

    slow: the slowest calls of its clients, the slowest first.
    """

    slow: tuple[SlowCall, ...] = ()
    threads: tuple[Thread, ...] = ()
    environment: dict[str, str] = attrs.field(factory=dict)
    settings: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Status:
    """The status of one node.

    name:     HOST:PORT of its control plane.
    wire:     the oldest and the newest version of the wire that it speaks.
    state:    ok, degraded, draining, leaving or unavailable; reasons explain why it is not ok.
    age_s:    seconds since its start.
    pool, disk: its memory and its disk, as `Tier`.
    workers, peers, namespaces: attached engines, other members, and who uses how much room.
    counters: totals since the start, by the metric's name without `peercache_`, with the value of
              its label after a slash: `pages_hit/shm`.
    latency:  by operation: get, set, exists …
    objectives: by name of an objective, the times of the calls that count for it; limits_s: what it
              allows at this node.
    certificate_days: until its certificate expires; -1 without TLS.
    workers_more: the number of workers that are not listed.
    """

    name: str = ""
    incarnation: str = ""
    host: str = ""
    cluster: str = ""
    version: str = ""
    wire: tuple[int, ...] = ()
    state: str = ""
    reasons: tuple[str, ...] = ()
    insecure: bool = False
    age_s: float = 0.0
    pool: Tier = attrs.field(factory=Tier)
    disk: Tier = attrs.field(factory=Tier)
    workers: tuple[Worker, ...] = ()
    workers_more: int = 0
    counters: dict[str, float] = attrs.field(factory=dict)
    latency: dict[str, Latencies] = attrs.field(factory=dict)
    objectives: dict[str, Latencies] = attrs.field(factory=dict)
    limits_s: dict[str, float] = attrs.field(factory=dict)
    peers: tuple[PeerStatus, ...] = ()
    shard: Shard = attrs.field(factory=Shard)
    namespaces: tuple[NamespaceUse, ...] = ()
    draining: Draining = attrs.field(factory=Draining)
    spilled: Spilled = attrs.field(factory=Spilled)
    copied: Copied = attrs.field(factory=Copied)
    reuse: Reuse = attrs.field(factory=Reuse)
    certificate_days: float = -1.0
    rdma: str = ""
    detail: Detail = attrs.field(factory=Detail)

    def total(self, counter: str) -> float:
        """Return a counter's total, over all values of its label."""
        within = f"{counter}/"
        return sum(v for k, v in self.counters.items() if k == counter or k.startswith(within))

    def hints(self) -> dict[str, float]:
        """Return the pages of hints, by hint and outcome."""
        within = "hint_pages/"
        return {
            name.removeprefix(within).replace("/", " "): pages
            for name, pages in sorted(self.counters.items())
            if name.startswith(within)
        }

    def hit_share(self) -> float:
        """Return the fraction of requested pages that get returned; NaN if none was requested."""
        hits = self.total("pages_hit")
        asked = hits + self.total("pages_missed")
        return hits / asked if asked else math.nan


def namespaces_of(statuses: Sequence[Status]) -> list[NamespaceUse]:
    """Return the use of each namespace in the whole cluster, the largest first."""
    found: dict[str, NamespaceUse] = {}
    for status in statuses:
        for use in status.namespaces:
            known = found.get(use.name)
            summed = ("bytes", "pages", "disk_bytes", "quota", "retained")
            found[use.name] = use if known is None else _added(known, use, *summed)
    return sorted(found.values(), key=lambda use: -use.bytes)


def reuse_of(statuses: Sequence[Status]) -> Reuse:
    """Return the estimate for all of the cluster: the mean of its nodes, by their uses."""
    known = [each.reuse for each in statuses if set(MEMORY_NAMES) <= each.reuse.hit_rates.keys()]
    uses = sum(each.uses for each in known)
    if uses <= 0:
        return Reuse()
    rates = {
        memory: sum(each.uses * each.hit_rates[memory] for each in known) / uses
        for memory in MEMORY_NAMES
    }
    return Reuse(uses=uses, hit_rates=rates)


@attrs.frozen(kw_only=True)
class MemberStatus:
    """A member of a view, and its status, if it reported one.

    seen:   its state in the view of the node that collected this: alive, suspect, dead, left.
    answers: whether it reported its status; if not, `status` has only its name, its state and, if
             it is known, the reason.
    """

    seen: str = ""
    answers: bool = False
    status: Status = attrs.field(factory=Status)


def unanswered(member: Member, reason: str = "") -> MemberStatus:
    """Return a member that did not report its status, with the reason if that is known."""
    seen = STATE_NAMES[member.state] if member.state < len(STATE_NAMES) else str(member.state)
    state = "left" if seen == "left" else NO_ANSWER
    statuses = Status(
        name=member.control,
        incarnation=name_of(member.incarnation),
        host=member.host_name,
        state=state,
        reasons=(reason,) if reason else (),
    )
    return MemberStatus(seen=seen, status=statuses)


def to_plain(value: Any) -> Any:
    """Return a status as dicts, lists, texts and numbers, for JSON and CBOR."""
    if attrs.has(type(value)):
        return {f.name: to_plain(getattr(value, f.name)) for f in attrs.fields(type(value))}
    if isinstance(value, dict):
        return {str(name): to_plain(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(each) for each in value]
    if isinstance(value, float):
        # JSON has no NaN, and a status needs no more digits than these.
        return round(value, 6) if math.isfinite(value) else None
    return value


def from_plain(kind: type[Kind], plain: Any) -> Kind:
    """Return a value of a class of this file; invalid fields keep their defaults."""
    if not isinstance(plain, dict):
        return kind()
    fields: tuple[attrs.Attribute[Any], ...] = attrs.fields(cast("Any", kind))
    found = {field.name: _fitting(field, plain.get(field.name)) for field in fields}
    return kind(**{name: value for name, value in found.items() if value is not None})


def _fitting(field: attrs.Attribute[Any], plain: Any) -> Any:
    """Return the value for a field; None if it has another type."""
    kind = str(field.type)
    if kind in _PLAIN:
        return _PLAIN[kind](plain)
    if kind in _ITEMS:
        if not isinstance(plain, list):
            return None
        return tuple([from_plain(_ITEMS[kind], each) for each in plain[:LISTED_MAX]])
    if kind in _NAMED:
        if not isinstance(plain, dict):
            return None
        return {_text(name): from_plain(_NAMED[kind], each) for name, each in plain.items()}
    return from_plain(_CLASSES[kind], plain)


def _text(value: Any) -> str:
    return str(value)[:TEXT_MAX]


def _texts(plain: Any) -> tuple[str, ...] | None:
    return tuple([_text(each) for each in plain]) if isinstance(plain, list) else None


def _is_number(value: Any) -> bool:
    # NaN and values out of range are not valid.
    return type(value) in (int, float) and -(2**64) < value < 2**64


def _numbers(plain: Any) -> tuple[Any, ...] | None:
    is_fitting = isinstance(plain, list) and all(_is_number(each) for each in plain)
    return tuple(plain) if is_fitting else None


def _by_name(plain: Any, fits: Any) -> dict[str, Any] | None:
    if not isinstance(plain, dict):
        return None
    return {_text(name): value for name, value in plain.items() if fits(value)}


_PLAIN: dict[str, Any] = {
    "bool": lambda value: value if isinstance(value, bool) else None,
    "int": lambda value: int(value) if _is_number(value) else None,
    "float": lambda value: float(value) if _is_number(value) else None,
    "str": lambda value: _text(value) if isinstance(value, str) else None,
    "tuple[str, ...]": _texts,
    "tuple[int, ...]": _numbers,
    "tuple[float, ...]": _numbers,
    "dict[str, float]": lambda value: _by_name(value, _is_number),
    "dict[str, str]": lambda value: _by_name(value, lambda text: isinstance(text, str)),
}
"""Converters for fields of plain types; a result of None rejects the value."""


_CLASSES: dict[str, type[Any]] = {
    name: kind for name, kind in globals().items() if isinstance(kind, type) and attrs.has(kind)
}
"""The classes above, and those that they are made of."""

_ITEMS = {f"tuple[{name}, ...]": kind for name, kind in _CLASSES.items()}
_NAMED = {f"dict[str, {name}]": kind for name, kind in _CLASSES.items()}


def encoded(value: Status | Sequence[MemberStatus]) -> bytes:
    """Return the encoded bytes of a status, or of several."""
    return json.dumps(to_plain(value), separators=(",", ":")).encode()


def decoded_status(raw: bytes) -> Status:
    """Return a status from its bytes; raise ValueError for invalid ones."""
    plain = _parsed(raw)
    if not isinstance(plain, dict):
        raise ValueError("no status")
    return from_plain(Status, plain)


def decoded_statuses(raw: bytes) -> tuple[MemberStatus, ...]:
    """Return several statuses from their bytes; raise ValueError for invalid ones."""
    plain = _parsed(raw)
    if not isinstance(plain, list):
        raise ValueError("no list of statuses")
    return tuple([from_plain(MemberStatus, each) for each in plain])


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
