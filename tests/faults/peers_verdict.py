"""What a history of any store shows: what was answered, and what the checkers find."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from math import inf
from typing import Any

from tests.faults.checkers import check, hits
from tests.faults.history import Call, History, Life, Sight
from tests.faults.recorder import EXISTS, GET, REMOVE, SET
from tests.faults.worker import LATE_S, OTHER, TORN

Figures = dict[str, Any]

PROBLEMS_MAX = 3
"""Sentences of each checker that are kept."""


def figures_of(
    history: History,
    over: float,
    killed: Collection[int] = (),
    limit_s: float = 2.0,
) -> Figures:
    """Return the figures of a run that was over at a moment.

    killed: processes of clients that the run has killed: their last call ended with them.
    """
    calls = history.calls
    took = {id(call): _seconds(call, over, killed) for call in calls}
    longest = max(calls, key=lambda call: took[id(call)])
    wrong = Counter(value.partition(" ")[0] for value in _wrong(history))
    problems = check(history)
    pages = Counter[str]()
    for call in calls:
        if call.is_answered and not call.error:
            pages.update((call.kind, answer) for answer in call.answers)
    return {
        "calls": len(calls),
        "by_kind": dict(Counter(call.kind for call in calls)),
        "hits": pages[GET, True],
        "misses": pages[GET, False],
        "refused_sets": pages[SET, False],
        "errors": sum(bool(call.error) for call in calls),
        "error_kinds": dict(Counter(call.error.partition("(")[0] for call in calls if call.error)),
        "reasons": _reasons(calls),
        "torn": wrong[TORN],
        "wrong": sum(wrong.values()) - wrong[TORN],
        "wrong_kinds": dict(wrong),
        "removals": pages[REMOVE, True],
        "found_removed": sum(1 for _ in found_removed(history)),
        "longest_s": round(took[id(longest)], 3),
        "longest_kind": longest.kind,
        "late": sum(
            call.excess_s > 0
            or (not call.is_answered and took[id(call)] > limit_s + LATE_S)
            for call in calls
        ),
        "unanswered": sum(
            not call.is_answered and call.process not in killed
            and took[id(call)] > limit_s + LATE_S
            for call in calls
        ),
        "mid_read": sum(
            any(call.kind == GET and call.began <= span.began <= call.ended for call in calls)
            for span in history.spans
        ),
        "faults": len(history.spans),
        "violations": dict(Counter(problem.partition(":")[0] for problem in problems)),
        "problems": list(_first_of_each(problems)),
    }  # fmt: skip


def sights_of(
    lives: Sequence[Life], seen: Sequence[tuple[float, int]], processes: Collection[int]
) -> list[Sight]:
    """Return sights for clients without views: what the driver saw is what they could see.

    seen: moments, and how many pages the owner had evicted by then; -1 where that is unknown, so
    that no page is required to be kept.
    """
    made = []
    for number, (at, evicted) in enumerate(seen):
        members = tuple(life.incarnation for life in lives if life.began <= at <= life.ended)
        made += [
            Sight(
                process=process, host="owner", at=at, home="", members=members,
                alive=len(members), evicted=evicted if evicted >= 0 else -2 - number,
            )
            for process in processes
        ]  # fmt: skip
    return made


def _first_of_each(problems: Sequence[str]) -> Iterator[str]:
    seen = Counter[str]()
    for problem in problems:
        checker = problem.partition(":")[0]
        seen[checker] += 1
        if seen[checker] <= PROBLEMS_MAX:
            yield problem


def _seconds(call: Call, over: float, killed: Collection[int]) -> float:
    if call.is_answered:
        return call.ended - call.began
    return 0.0 if call.process in killed else over - call.began


def _reasons(calls: Sequence[Call]) -> dict[str, int]:
    reasons = Counter[str]()
    for call in calls:
        reasons.update({f"{call.kind} {why}": count for why, count in call.misses.items()})
    return dict(reasons)


def _wrong(history: History) -> Iterator[str]:
    """Yield what was read of each hit that no set of its key was given."""
    given = {
        (key, value)
        for call in history.calls
        if call.kind == SET
        for key, value in zip(call.keys, call.values, strict=True)
    }
    for _, key, value in hits(history):
        if (key, value) not in given:
            yield value if " " in value else OTHER


def found_removed(history: History) -> Iterator[str]:
    """Yield each page that was found after its removal had been answered.

    One rule for every store, without the exceptions that ours documents: no set that may have
    stored the page ended after the removal began. A hit shows which set that was by its bytes.
    """
    sets: dict[str, list[tuple[float, str]]] = defaultdict(list)
    removals: dict[str, list[Call]] = defaultdict(list)
    for call in history.calls:
        for index, key in enumerate(call.keys):
            if call.kind == SET:
                is_over = call.is_answered and not call.error
                sets[key].append((call.ended if is_over else inf, call.values[index]))
            elif call.kind == REMOVE and call.is_answered and call.answers[index]:
                removals[key].append(call)
    for call in history.calls:
        if call.kind not in {GET, EXISTS} or not call.is_answered:
            continue
        for index, key in enumerate(call.keys):
            if not call.answers[index] or (
                call.kind == GET and all(value != call.values[index] for _, value in sets[key])
            ):
                continue  # A miss, or wrong bytes, which are counted as such.
            last = max((each.began for each in removals[key] if each.ended < call.began),
                       default=None)  # fmt: skip
            if last is not None and not any(
                ended > last and (call.kind == EXISTS or value == call.values[index])
                for ended, value in sets[key]
            ):
                yield f"{call.began:.3f} s: {call.kind} finds {key}"
