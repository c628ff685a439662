"""Each checker accepts a history of a correct store, and finds the violation planted into it."""

from __future__ import annotations

import random
import re
from math import inf
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.faults.checkers import CHECKERS, check, sure_removals
from tests.faults.history import (
    Call,
    History,
    Life,
    Sight,
    Span,
    read_calls,
    read_json,
    write_edn,
    write_json,
)
from tests.faults.recorder import EXISTS, GET, REMOVE, SET, Recorder
from tests.faults.register import FOUND, REMOVED, STORED, Operation, is_linearizable

HOSTS = ("a", "b")


def call(kind: str, began: float, ended: float, key: str, value: str = "", *, process: int = 0,
         answer: bool = True, **more: Any) -> Call:  # fmt: skip
    """Return a call about one page."""
    return Call(
        process=process, host=HOSTS[process % 2], kind=kind, began=began, ended=ended, keys=(key,),
        values=(value,) if kind in {SET, GET} else (), answers=(answer,), **more,
    )  # fmt: skip


def around(*calls: Call, **more: Any) -> History:
    """Return a history with these calls, in which both clients see both nodes all the time."""
    lives = [Life(host=host, incarnation=host, began=-10) for host in HOSTS]
    sights = [
        Sight(
            process=process,
            host=HOSTS[process],
            at=at / 2,
            home=HOSTS[process],
            members=HOSTS,
            alive=2,
        )
        for at in range(-2, 220)
        for process in range(2)
    ]
    made = History(calls=sorted(calls, key=lambda one: one.began), sights=sights, lives=lives)
    return attrs.evolve(made, **more)


def of_a_store(seed: int, calls: int = 400) -> History:
    """Return what two clients may record of a store that loses nothing."""
    rng = random.Random(seed)
    stored: dict[str, str] = {}
    made, free_at, moment = [], [1.0, 1.0], 0.0
    for _ in range(calls):
        process = free_at.index(min(free_at))
        began = free_at[process] + rng.random() * 0.1
        moment = max(began, moment)  # At which it takes effect.
        key, kind = f"k{rng.randrange(6)}", rng.choice((SET, GET, GET, EXISTS, REMOVE))
        value = f"{key}/{rng.randrange(3)}" if kind == SET else stored.get(key, "")
        if kind == SET:
            stored.setdefault(key, value)
        elif kind == REMOVE:
            stored.pop(key, None)
        is_hit = kind in {SET, REMOVE} or key in stored
        ended = moment + 0.001 + rng.random() * 0.05
        free_at[process] = ended
        made.append(call(kind, began, ended, key, value, process=process, answer=is_hit,
                         misses={} if is_hit else {"absent": 1}))  # fmt: skip
    return around(*made)


@pytest.mark.parametrize("seed", range(5))
def test_a_store_that_loses_nothing_violates_nothing(seed: int) -> None:
    """Among its calls are removals that are sure."""
    history = of_a_store(seed)

    assert check(history) == []
    assert len(list(sure_removals(history))) > 20


STORED_AND_REMOVED = (
    call(SET, 2.0, 2.1, "k", "v"),
    call(REMOVE, 10.0, 10.1, "k"),
)

PLANTED = {
    "wrong-bytes": around(call(SET, 2, 2.1, "k", "v"), call(GET, 3, 3.1, "k", "torn")),
    "register": around(*STORED_AND_REMOVED, call(GET, 11.0, 11.1, "k", "v", process=1)),
    "removed-is-found": around(*STORED_AND_REMOVED, call(EXISTS, 10.2, 10.3, "k")),
    "stored-is-found": around(
        call(SET, 2, 2.1, "k", "v"),
        call(GET, 3, 3.1, "k", process=1, answer=False, misses={"absent": 1}),
    ),
    "views": around(
        sights=[
            Sight(process=0, host="a", at=at, home="a", members=members)
            for at, members in ((1, HOSTS), (5, ("a",)), (6, HOSTS))
        ],
        lives=[Life(host="a", incarnation="a", began=0), Life(host="b", incarnation="b", began=0,
                                                               ended=2)],
    ),
    "calls": around(call(GET, 2, 9, "k", answer=False, excess_s=4.0)),
}  # fmt: skip


@pytest.mark.parametrize(("began", "is_sure"), [(60.0, False), (None, True)])
def test_a_removal_is_sure_unless_a_node_was_down_that_came_back(
    began: float | None, is_sure: bool
) -> None:
    """The disk of a node that is down keeps what is removed meanwhile, and has it afterwards."""
    removal = call(REMOVE, 50.0, 50.1, "k")
    lives = [Life(host="a", incarnation="a", began=-10), Life(host="b", incarnation="b", began=-10),
             Life(host="c", incarnation="c", began=-10, ended=40)]  # fmt: skip
    if began is not None:
        lives.append(Life(host="c", incarnation="d", began=began))

    assert list(sure_removals(around(removal, lives=lives))) == [removal] * is_sure


@pytest.mark.parametrize("name", CHECKERS)
def test_planted_violation_is_found_by_its_checker(name: str) -> None:
    """And by no other one."""
    assert [problem.split(":")[0] for problem in check(PLANTED[name])] == [name]


@pytest.mark.parametrize("name", CHECKERS)
def test_mutated_history_is_found(name: str) -> None:
    """In the middle of 400 correct calls."""
    planted, good = PLANTED[name], of_a_store(7)
    merged = attrs.evolve(
        good, calls=sorted([*good.calls, *planted.calls], key=lambda one: one.began)
    )
    if name == "views":
        merged = attrs.evolve(merged, sights=planted.sights, lives=planted.lives)

    assert name in {problem.split(":")[0] for problem in check(merged)}


@pytest.mark.parametrize(
    "history",
    [
        # What a fault may have caused is not asked.
        around(*STORED_AND_REMOVED, call(GET, 11, 11.1, "k", "v"),
               spans=[Span(kind="one_way", targets=("a", "b"), began=3, ended=7),
                      Span(kind="silence", targets=("b",), began=6, ended=9.5)]),
        around(*STORED_AND_REMOVED, call(GET, 11, 11.1, "k", "v"),
               lives=[Life(host="a", incarnation="a", began=-10, ended=10.5),
                      Life(host="b", incarnation="b", began=-10)]),
        around(call(SET, 2, 2.1, "k", "v"), call(REMOVE, 10, 10.1, "k", answer=False),
               call(GET, 11, 11.1, "k", "v")),
        # Stored again, or perhaps.
        around(*STORED_AND_REMOVED, call(SET, 10.05, 10.3, "k", "v"),
               call(GET, 11, 11.1, "k", "v")),
        around(*STORED_AND_REMOVED, call(SET, 10.2, inf, "k", "v"),
               call(GET, 11, 11.1, "k", "v")),
        # Another host's `exists` may answer from records that are a second old.
        around(*STORED_AND_REMOVED, call(EXISTS, 10.2, 10.3, "k", process=1)),
        # Misses with another reason, and of pages that were removed.
        around(call(SET, 2, 2.1, "k", "v"),
               call(GET, 3, 3.1, "k", answer=False, misses={"deadline": 1})),
        around(*STORED_AND_REMOVED, call(GET, 11, 11.1, "k", answer=False, misses={"absent": 1})),
    ],
)  # fmt: skip
def test_what_is_promised_with_exceptions_has_them(history: History) -> None:
    """Docs/explanation/consistency.md has them all."""
    assert check(history) == []


@pytest.mark.parametrize(("at", "is_violated"), [(11.0, False), (12.0, True)])
def test_page_that_was_stored_during_a_fault_is_found_after_it(
    at: float, *, is_violated: bool
) -> None:
    """The fault ended at 3 s, and has an effect until 6 s; five seconds later it is repaired."""
    history = around(
        call(SET, 2, 2.1, "k", "v"),
        call(GET, at, at + 0.1, "k", process=1, answer=False, misses={"absent": 1}),
        spans=[Span(kind="partition", targets=("a",), began=1, ended=3)],
    )

    assert bool(check(history)) == is_violated


def test_view_of_a_client_without_a_home_node_may_go_back() -> None:
    """It asks members in turn, one of which learns of an end later than another."""
    history = PLANTED["views"]
    sights = [attrs.evolve(one, home="") for one in history.sights]

    assert check(attrs.evolve(history, sights=sights)) == []


def test_evicted_page_may_be_absent() -> None:
    """Its holder has counted an eviction."""
    history = PLANTED["stored-is-found"]
    sights = [attrs.evolve(one, evicted=int(one.at > 2.5)) for one in history.sights]

    assert check(attrs.evolve(history, sights=sights)) == []


@pytest.mark.parametrize(
    ("operations", "is_explained"),
    [
        # A hit while a removal is pending may be before or after it.
        ([(STORED, 0, 1), (REMOVED, 2, 9), (FOUND, 3, 4), (FOUND, 8, 10)], True),
        ([(STORED, 0, 1), (REMOVED, 2, 9), (FOUND, 10, 11)], False),
        # A set that overlaps the removal may come after it, also when a hit has seen it before.
        ([(STORED, 0, 8), (REMOVED, 2, 9), (FOUND, 10, 11)], True),
        ([(STORED, 0, 8), (FOUND, 1, 3), (REMOVED, 4, 5), (FOUND, 10, 11)], False),
        ([(STORED, 0, 8), (FOUND, 1, 3), (REMOVED, 2, 5), (STORED, 6, 7), (FOUND, 10, 11)], True),
        ([(REMOVED, 0, 1), (FOUND, 2, 3), (STORED, 2.5, 4)], True),
        ([(FOUND, 2, 3), (STORED, 3.5, 4)], False),
        # Two removals, one of which is between the sets.
        ([(STORED, 0, 1), (REMOVED, 2, 9), (REMOVED, 3, 4), (STORED, 5, 6), (FOUND, 10, 11)], True),
        (
            [(STORED, 0, 1), (REMOVED, 2, 5), (REMOVED, 6, 9), (STORED, 3, 4), (FOUND, 10, 11)],
            False,
        ),
    ],
)
def test_register_is_checked_as_one(
    operations: list[tuple[str, float, float]], *, is_explained: bool
) -> None:
    """Hits are explained by one order of all operations that overlap."""
    found = is_linearizable([Operation(*one) for one in operations])

    assert (found is None) == is_explained


def test_history_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    """A client that was killed leaves a call without an answer, and a part of a line."""
    file = tmp_path / "client-3.jsonl"
    with file.open("w") as out:
        recorder = Recorder(out, 3, "a")
        number = recorder.invoked(SET, 1.0, ["k"], ["v"])
        recorder.answered(number, ended=1.5, values=["v"], answers=[True])
        recorder.saw(at=1.6, home="1", members=["1", "2"])
        recorder.invoked(GET, 2.0, ["k"], [])
        out.write('{"type": "ok", "num')

    calls, sights = read_calls([file])

    assert [(one.kind, one.ended, one.answers) for one in calls] == [
        (SET, 1.5, (True,)),
        (GET, inf, ()),
    ]
    assert sights == [Sight(process=3, host="a", at=1.6, home="1", members=("1", "2"))]
    spans, lives = (
        [Span(kind="cut", targets=("a",), began=1)],
        [Life(host="a", incarnation="1", began=0)],
    )
    history = History(calls=calls, sights=sights, spans=spans, lives=lives)
    write_json(history, tmp_path / "all")
    assert read_json(tmp_path / "all") == history


def test_edn_has_the_operations_of_jepsen(tmp_path: Path) -> None:
    """Invocations before answers, nil for a miss, and `:info` where the effect is unknown."""
    calls = [
        call(SET, 1, 2, "k", "v"),
        call(SET, 1, 2, "l", "w", process=1, answer=False),
        call(GET, 2, 3, "k", "v"),
        call(GET, 4, 5, "m", answer=False),
        call(REMOVE, 6, inf, "k"),
        call(EXISTS, 7, 8, "k"),
        call(REMOVE, 9, 10, "l", process=1),
    ]

    write_edn(calls, tmp_path / "edn", calls[-1:])

    lines = (tmp_path / "edn").read_text().splitlines()
    shape = (
        r'{:process (\d), :f :(\w+), :key "(\w)", :type :(\w+), :value (?:nil|"(\w+)"), :time \d+}'
    )
    said = [" ".join(it or "nil" for it in re.fullmatch(shape, line).groups()) for line in lines]  # type: ignore[union-attr]
    assert said == [
        "0 write k invoke v",
        "1 write l invoke w",
        "0 write k ok v",
        "1 write l info w",
        "0 read k invoke nil",
        "0 read k ok v",
        "0 read m invoke nil",
        "0 read m ok nil",
        "0 remove k invoke nil",
        "1 remove l invoke nil",
        "1 remove l ok nil",
        "0 remove k info nil",
    ]
