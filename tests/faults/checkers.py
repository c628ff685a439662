"""What a history must fulfil, one function a promise; each yields a sentence for each violation.

The promises are those of docs/explanation/consistency.md. Where a promise has exceptions that a
history cannot show (a member that was unreachable, a page that was evicted), the checker asks only
about times at which no fault had an effect and every client saw every member: `Calm`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf

import attrs

from tests.faults.history import Call, History, Life, Sight, Span
from tests.faults.recorder import EXISTS, GET, REMOVE, SET
from tests.faults.register import FOUND, REMOVED, STORED, Operation, is_linearizable
from tests.faults.schedule import HOST_KINDS, PAIR_KINDS

SETTLES_S = 3.0
"""How long after a fault a cluster may still be busy with it, although every view is whole."""

SIGHT_S = 2.5
"""How old the last sight of a client may be: clients look every half second."""

TRUSTS_S = 1.0
"""How long `exists` may answer from records that a client has (EXISTS_TRUSTS_S)."""

REPAIRS_S = 5.0
"""How long before a look-up it must be calm for pages that were stored during faults."""

CRASH_S = 2.5
"""A page that was removed so long before its holder was killed may return with it."""

DEAD_S = 4.5
"""A node that is silent for `dead_s` = 6 s is taken for dead, and keeps what is removed meanwhile;
silence of less than this cannot come to it."""

SILENT = frozenset({"pause_node", "clock_jump", *PAIR_KINDS, *HOST_KINDS})
"""Faults in which a node that runs may be silent. Clocks: its certificate may not be valid yet."""

YOUNG_S = 15.0
"""So long after its process began a node may copy a page that is being removed: it may take ten
seconds to serve, and is young for 2.5 s."""

Checker = Callable[[History], Iterator[str]]


@attrs.define
class Calm:
    """When no fault had an effect, and every client saw exactly the members that lived."""

    history: History
    _sights: dict[int, list[Sight]] = attrs.field(init=False)
    _lasted: dict[int, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Sort what clients saw."""
        self._sights, self._lasted = defaultdict(list), {}
        for sight in self.history.sights:
            self._sights[sight.process].append(sight)
        for call in self.history.calls:
            last = call.ended if call.is_answered else call.began
            self._lasted[call.process] = max(last, self._lasted.get(call.process, 0.0))

    def lasted(self, began: float, ended: float) -> bool:
        """Return whether it was calm all the time between two moments."""
        if any(span.began <= ended and began <= span.ended + SETTLES_S
               for span in self.history.spans):  # fmt: skip
            return False
        living = {
            life.incarnation
            for life in self.history.lives
            if life.began <= began and ended <= life.ended
        }
        return all(self._saw(process, living, began, ended) for process in self._sights)

    def may_be_dead(self, began: float, ended: float) -> bool:
        """Return whether a fault may have lasted so long that a node was taken for dead."""
        silent = [span for span in self.history.spans if span.kind in SILENT]
        return any(
            span.ended - span.began > DEAD_S
            and span.began + DEAD_S <= ended
            and began <= span.ended + SETTLES_S
            for span in _joined(silent)
        )

    def saw_all(self, process: int, began: float, ended: float) -> bool:
        """Return whether a client saw exactly the nodes that ran, right before and right after."""
        running = {
            life.incarnation
            for life in self.history.lives
            if life.began <= ended and began <= life.ended
        }
        sights = self._sights[process]
        before = bisect_right(sights, began, key=lambda sight: sight.at) - 1
        after = bisect_right(sights, ended, key=lambda sight: sight.at)
        return (
            before >= 0
            and after < len(sights)
            and sights[before].at > began - SIGHT_S
            and sights[after].at < ended + SIGHT_S
            and all(
                set(sight.members) == running and sight.alive == len(running)
                for sight in sights[before : after + 1]
            )
        )

    def _saw(self, process: int, living: set[str], began: float, ended: float) -> bool:
        """Return whether a client saw these members, if it ran."""
        sights = self._sights[process]
        first = bisect_right(sights, began, key=lambda sight: sight.at) - 1
        last = bisect_right(sights, ended, key=lambda sight: sight.at)
        if first < 0:
            return sights[0].at > ended
        if sights[first].at < began - SIGHT_S:
            # It has ended, or it did not look.
            return first == len(sights) - 1 and self._lasted.get(process, 0.0) < began
        return all(set(sight.members) == living for sight in sights[first:last])


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Join spans that overlap."""
    joined: Span | None = None
    for span in sorted(spans, key=lambda each: each.began):
        if joined is not None and span.began <= joined.ended:
            joined = attrs.evolve(joined, ended=max(span.ended, joined.ended))
            continue
        if joined is not None:
            yield joined
        joined = span
    if joined is not None:
        yield joined


def wrong_bytes(history: History) -> Iterator[str]:
    """A hit has exactly the bytes that a set of that key was given before the hit returned."""
    given: dict[tuple[str, str], float] = {}
    for call in history.calls:
        if call.kind == SET:
            for key, value in zip(call.keys, call.values, strict=True):
                given.setdefault((key, value), call.began)
    for call, key, value in hits(history):
        if given.get((key, value), inf) >= call.ended:
            yield f"{_at(call)}: the bytes {value} under {key}, which no set has given"


def hits(history: History) -> Iterator[tuple[Call, str, str]]:
    """Yield each page that a get has answered."""
    for call in history.calls:
        if call.kind == GET and call.is_answered:
            for key, value, hit in zip(call.keys, call.values, call.answers, strict=True):
                if hit:
                    yield call, key, value


def sure_removals(history: History) -> Iterator[Call]:
    """Yield the removals that must have reached every page, whatever the faults.

    Every member answered, no node was taken for dead, none was young, none was killed right
    afterwards, and none was down that came back later, with what its disk had.
    """
    calm = Calm(history)
    for call in history.calls:
        if (
            call.kind == REMOVE
            and call.is_answered
            and all(call.answers)
            and calm.saw_all(call.process, call.began, call.ended)
            and not calm.may_be_dead(call.began, call.ended)
            and not any(
                call.began - YOUNG_S <= life.began <= call.ended
                or call.began <= life.ended < call.ended + CRASH_S
                or _was_down(life, call, history)
                for life in history.lives
            )
        ):
            yield call


def _was_down(life: Life, call: Call, history: History) -> bool:
    """Return whether a node that began its life after a call was down while the call lasted."""
    return life.began > call.began and not any(
        other.host == life.host and other.began <= call.began and call.ended <= other.ended
        for other in history.lives
    )


def register(history: History) -> Iterator[str]:
    """Each page (key and bytes) is a linearizable register, of which a miss is always allowed.

    Several hosts may hold different bytes of one key, so each of them is a register of its own: a
    set stores, a removal of the key removes, and a hit finds it stored.
    """
    pages: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    values: dict[str, set[str]] = defaultdict(set)
    for call in history.calls:
        if call.kind == SET:
            for index, (key, value) in enumerate(zip(call.keys, call.values, strict=True)):
                is_sure = call.is_answered and call.answers[index]
                ended = call.ended if is_sure else inf
                pages[key, value].append(Operation(STORED, call.began, ended))
                values[key].add(value)
    for call in sure_removals(history):
        for key in call.keys:
            for value in values[key]:
                pages[key, value].append(Operation(REMOVED, call.began, call.ended))
    for call, key, value in hits(history):
        if (key, value) in pages:  # Else `wrong_bytes` reports it.
            pages[key, value].append(Operation(FOUND, call.began, call.ended))
    for (key, value), operations in pages.items():
        problem = is_linearizable(operations)
        if problem is not None:
            yield f"{problem.began:.3f} s: {key} was found with {value} after it was removed"


def removed_is_found(history: History) -> Iterator[str]:
    """After a removal `exists` does not find a page, of its client at once, of others in a second.

    Pages that a set may have stored again meanwhile do not count.
    """
    sets: dict[str, list[tuple[float, float]]] = defaultdict(list)
    looks: dict[str, list[tuple[Call, bool]]] = defaultdict(list)
    for call in history.calls:
        for index, key in enumerate(call.keys):
            if call.kind == SET:
                is_sure = call.is_answered and call.answers[index]
                sets[key].append((call.began, call.ended if is_sure else inf))
            elif call.kind == EXISTS and call.is_answered:
                looks[key].append((call, call.answers[index]))
    for removal in sure_removals(history):
        for key in removal.keys:
            again = min((began for began, ended in sets[key] if ended >= removal.began),
                        default=inf)  # fmt: skip
            for call, found in looks[key]:
                is_own = call.process == removal.process
                since = removal.ended + (0.0 if is_own else TRUSTS_S)
                if found and since < call.began and call.ended < again:
                    yield f"{_at(call)}: exists finds {key}, removed at {removal.ended:.3f} s"
                    break


def stored_is_found(history: History) -> Iterator[str]:
    """A stored page is not absent while its holder lives and evicts nothing.

    Either the whole time since the set was calm, and all owners had acknowledged the page; or it
    was stored before, perhaps during faults, and the last REPAIRS_S were calm. Misses with another
    reason than "absent" are not questions of the directory: each may excuse a page of its call.
    """
    calm = Calm(history)
    evicted, unpublished = _counters(history, "evicted"), _counters(history, "unpublished")

    def must_be_found(last: Call, call: Call) -> bool:
        is_kept = evicted.is_same(last.host, last.began, call.ended) and any(
            life.host == last.host and life.began <= last.began and call.ended <= life.ended
            for life in history.lives
        )
        is_published = unpublished.is_same(last.process, last.began, last.ended)
        repaired = call.began - REPAIRS_S
        return is_kept and (
            (is_published and calm.lasted(last.began, call.ended))
            or (last.ended < repaired and calm.lasted(repaired, call.ended))
        )

    stored: dict[str, list[Call]] = defaultdict(list)
    removed: dict[str, list[float]] = defaultdict(list)
    for call in history.calls:
        for index, key in enumerate(call.keys):
            if call.kind == SET and call.is_answered and call.answers[index]:
                stored[key].append(call)
            elif call.kind == REMOVE:
                removed[key].append(call.ended)
    for call in history.calls:
        if call.kind not in {GET, EXISTS} or not call.is_answered or not call.misses.get("absent"):
            continue
        missing = []
        for key, found in zip(call.keys, call.answers, strict=True):
            last = _last_before(stored[key], call.began)
            if (
                not found
                and last is not None
                and not any(ended > last.began for ended in removed[key])
                and must_be_found(last, call)
            ):
                missing.append((key, last))
        excused = sum(pages for why, pages in call.misses.items() if why != "absent")
        for key, last in missing[excused:]:
            yield f"{_at(call)}: no {key}, stored at {last.host} from {last.ended:.3f} s on"


def _last_before(calls: list[Call], moment: float) -> Call | None:
    """Return the last call that had ended at a moment."""
    return max((call for call in calls if call.ended < moment), key=lambda call: call.ended,
               default=None)  # fmt: skip


@attrs.frozen
class Counters:
    """A counter that clients saw, by whose it is: moments and figures."""

    seen: Mapping[object, list[tuple[float, int]]]

    def is_same(self, whose: object, began: float, ended: float) -> bool:
        """Return whether it was seen before and after a time, and did not change."""
        seen = self.seen.get(whose, [])
        first = bisect_right(seen, began, key=lambda one: one[0]) - 1
        last = bisect_left(seen, ended, key=lambda one: one[0])
        return first >= 0 and last < len(seen) and seen[first][1] == seen[last][1]


def _counters(history: History, name: str) -> Counters:
    seen: dict[object, list[tuple[float, int]]] = defaultdict(list)
    for sight in history.sights:
        whose = sight.host if name == "evicted" else sight.process
        seen[whose].append((sight.at, getattr(sight, name)))
    return Counters(seen)


def views(history: History) -> Iterator[str]:
    """A view has only nodes that were started, and one that has ended does not return to a view.

    A client that attaches to another incarnation of its home node begins with that one's view.
    Without a home node, and until the next beat, it has the view of any member, which may not know
    of an end yet.
    """
    lives = {life.incarnation: life for life in history.lives}
    left: dict[tuple[int, str], set[str]] = defaultdict(set)
    before: dict[tuple[int, str], set[str]] = {}
    homes: dict[int, str] = {}
    for sight in history.sights:
        seen, whose = set(sight.members), (sight.process, sight.home)
        for member in sorted(seen):
            life = lives.get(member)
            if life is None or life.began > sight.at:
                yield f"{sight.at:.3f} s: client {sight.process} sees {member}, never started"
            elif sight.home and sight.home == homes.get(sight.process) and member in left[whose]:
                yield f"{sight.at:.3f} s: client {sight.process} sees {member} again, which ended"
        left[whose] |= {
            member
            for member in before.get(whose, set()) - seen
            if member in lives and lives[member].ended < sight.at
        }
        before[whose] = seen
        homes[sight.process] = sight.home


def calls_in_time(history: History) -> Iterator[str]:
    """Every call returns by its deadline, with an answer for each key, and raises nothing."""
    for call in history.calls:
        if call.error:
            yield f"{_at(call)}: raised {call.error}"
        elif call.is_answered and call.excess_s > 0:
            yield f"{_at(call)}: {call.excess_s:.2f} s after its deadline"
        elif call.is_answered and len(call.answers) != len(call.keys):
            yield f"{_at(call)}: {len(call.answers)} answers for {len(call.keys)} keys"
        elif bad := sorted({"internal", "verify_failed"} & set(call.misses)):
            yield f"{_at(call)}: {bad[0]}, which is never expected"


def _at(call: Call) -> str:
    return f"{call.began:.3f} s: {call.kind} of client {call.process} at {call.host}"


CHECKERS: Mapping[str, Checker] = {
    "wrong-bytes": wrong_bytes,
    "register": register,
    "removed-is-found": removed_is_found,
    "stored-is-found": stored_is_found,
    "views": views,
    "calls": calls_in_time,
}


def check(history: History) -> list[str]:
    """Return what a history violates, with the checkers' names."""
    return [
        f"{name}: {problem}" for name, checker in CHECKERS.items() for problem in checker(history)
    ]
