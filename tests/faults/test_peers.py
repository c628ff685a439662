"""The recorder and the checkers judge any store; a store with a planted bug does not pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import peers_engine, peers_faults_report
from tests.faults import peers, peers_clusters, peers_stores
from tests.faults.history import Call, History, Life, read_calls
from tests.faults.peers_verdict import figures_of, sights_of
from tests.faults.recorder import EXISTS, GET, REMOVE, SET, Recorder
from tests.faults.worker import FOREIGN, OTHER, TORN, Page, Plan, Worker, arrays, page_of, value_of

STEPS, PAGE_BYTES = 300, 4096
LIMITS_S = dict.fromkeys((SET, GET, EXISTS, REMOVE), 2.0)


class Sound:
    """A store in a dictionary, in which the last set wins."""

    can_remove = True

    def __init__(self, pages: dict[str, Page]) -> None:
        """Share pages with other clients."""
        self.misses: dict[str, int] = {}
        self._pages = pages

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store copies."""
        self._pages.update({key: page.copy() for key, page in zip(keys, pages, strict=True)})
        return [True] * len(keys)

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Copy pages to buffers."""
        for key, buffer in zip(keys, buffers, strict=True):
            if key in self._pages:
                buffer[:] = self._pages[key]
        return self.exists(keys)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return which are stored."""
        found = [key in self._pages for key in keys]
        self.misses = {"absent": found.count(False)}
        return found

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove keys."""
        for key in keys:
            self._pages.pop(key, None)
        return [True] * len(keys)

    def clear(self) -> bool:
        """Remove everything."""
        self._pages.clear()
        return True

    def buffers(self, size: int) -> tuple[list[Page], list[Page]]:
        """Return memory of a batch to set from, and of one to read into."""
        return arrays(size), arrays(size)

    def look(self) -> dict[str, Any]:
        """Return nothing: there are no members."""
        return {}


class Torn(Sound):
    """Now and then a page ends with another version of it, or with another page."""

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Mix every other page."""
        hits = super().get(keys, buffers)
        for key, buffer in list(zip(keys, buffers, strict=True))[::2]:
            buffer[PAGE_BYTES // 2 :] = page_of(key, 99, PAGE_BYTES)[PAGE_BYTES // 2 :]
        return hits


class OfOthers(Sound):
    """A page has the bytes that were stored under another key."""

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Take any page."""
        hits = super().get(keys, buffers)
        for buffer in buffers[::3]:
            buffer[:] = page_of("k-of-others", 1, PAGE_BYTES)
        return hits


class NeverWritten(Sound):
    """A hit leaves the destination as it was."""

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Write nothing."""
        return self.exists(keys)


class KeepsRemoved(Sound):
    """A removal answers, and removes every other key only."""

    def remove(self, keys: Sequence[str]) -> list[bool]:
        """Remove some."""
        super().remove(keys[1:])
        return [True] * len(keys)


class Loses(Sound):
    """A set answers that it has stored a page, and has not."""

    def set(self, keys: Sequence[str], pages: Sequence[Page]) -> list[bool]:
        """Store all pages but the last one."""
        super().set(keys[:-1], pages[:-1])
        super().remove(keys[-1:])
        return [True] * len(keys)


class Raises(Sound):
    """Each look-up fails."""

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Fail."""
        raise OSError("unreachable")

    def get(self, keys: Sequence[str], buffers: Sequence[Page]) -> list[bool]:
        """Miss."""
        return [False] * len(keys)


FOUND_BY = {
    Sound: (set(), set()),
    Torn: ({"wrong-bytes"}, {TORN}),
    OfOthers: ({"wrong-bytes"}, {OTHER}),
    NeverWritten: ({"wrong-bytes"}, {FOREIGN}),
    KeepsRemoved: ({"register", "removed-is-found"}, set()),
    Loses: ({"stored-is-found"}, set()),
    Raises: ({"calls"}, set()),
}
"""Checkers that find each, and the kinds of wrong bytes that are counted."""


def ticks() -> Iterator[float]:
    """Yield moments 10 ms apart: a run of some seconds takes no time."""
    return (1000 + number / 100 for number in itertools.count())


def of_a_run(kind: type[Sound], folder: Path) -> tuple[History, float]:
    """Return the history of two clients that take turns, and when it was over."""
    plan = Plan(
        count=24, hot=8, page_bytes=PAGE_BYTES, weights=(40, 30, 20, 10), limits_s=LIMITS_S,
    )  # fmt: skip
    pages: dict[str, Page] = {}
    clock = ticks()
    with ExitStack() as stack:
        files = [stack.enter_context((folder / str(number)).open("w")) for number in range(2)]
        workers = [
            Worker(kind(pages), Recorder(file, number, "owner"), plan, number, lambda: next(clock))
            for number, file in enumerate(files)
        ]
        for _ in range(STEPS):
            for worker in workers:
                worker.step()
    over = next(clock)
    calls, _ = read_calls([folder / "0", folder / "1"])
    lives = [Life(host="owner", incarnation="owner-0", began=0)]
    seen = [(1000 + number / 2, 0) for number in range(-4, 2 * int(over - 1000) + 8)]
    return History(calls=calls, sights=sights_of(lives, seen, {0, 1}), lives=lives), over


@pytest.mark.parametrize("kind", FOUND_BY)
def test_a_planted_bug_of_any_store_is_found(kind: type[Sound], tmp_path: Path) -> None:
    """By its checker; a sound store violates nothing."""
    figures = figures_of(*of_a_run(kind, tmp_path))

    checkers, wrong = FOUND_BY[kind]
    assert set(figures["violations"]) == checkers, figures["problems"]
    assert set(figures["wrong_kinds"]) == wrong
    assert (figures["torn"] > 100) == (kind is Torn)
    assert (figures["wrong"] > 100) == (kind in {OfOthers, NeverWritten})
    assert figures["calls"] == 2 * STEPS
    assert (figures["errors"] > 0) == (kind is Raises)
    assert (figures["found_removed"] > 0) == (kind is KeepsRemoved)


def test_a_page_that_was_not_set_is_named_by_its_kind() -> None:
    """Two versions of one key are a torn page, too."""
    page = page_of("k", 1, PAGE_BYTES)
    assert " " not in value_of(page, "k")
    assert value_of(page, "other").startswith(OTHER)
    torn = page.copy()
    torn[PAGE_BYTES - 64 :] = page_of("k", 2, PAGE_BYTES)[PAGE_BYTES - 64 :]
    assert value_of(torn, "k").startswith(TORN)
    for byte in (0, 1000, PAGE_BYTES - 1):
        spoilt = page.copy()
        spoilt[byte] ^= 1
        assert not value_of(spoilt, "k").startswith(TORN)
        assert " " in value_of(spoilt, "k")
    page[:] = 0
    assert value_of(page, "k").startswith(FOREIGN)


def test_calls_that_never_return_are_counted(tmp_path: Path) -> None:
    """Those of a client that was killed are not: they ended with it."""
    with (tmp_path / "0").open("w") as file:
        recorder = Recorder(file, 0, "owner")
        recorder.invoked(GET, 10.0, ["k"], [])
    calls, _ = read_calls([tmp_path / "0"])

    hung, killed = (figures_of(History(calls=calls), 30.0, gone) for gone in ((), (0,)))

    assert (hung["unanswered"], hung["late"], hung["longest_s"]) == (1, 1, 20.0)
    assert (killed["unanswered"], killed["late"], killed["longest_s"]) == (0, 0, 0.0)


class Coded:
    """The client of Mooncake, with answers that are given."""

    def __init__(self, codes: list[int]) -> None:
        """Answer every call with these codes."""
        self._codes = codes

    def __getattr__(self, _: str) -> Callable[..., list[int]]:
        """Return any call."""
        return lambda *_: self._codes


@pytest.mark.parametrize(
    ("call", "codes", "answers", "misses"),
    [
        ("set", [0, -200, -800], [True, False, False], {"error -200": 1, "error -800": 1}),
        ("get", [PAGE_BYTES, -704, -707], [True, False, False], {"absent": 1, "error -707": 1}),
        ("exists", [1, 0, -1], [True, False, False], {"absent": 1, "error -1": 1}),
        ("remove", [0, -706, -704], [True, False, True], {"error -706": 1}),
    ],
)
def test_codes_of_mooncake_are_answers_and_reasons(
    call: str, codes: list[int], answers: list[bool], misses: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A code that is an error is no miss like another: reasons are kept with the history."""
    joined = SimpleNamespace(store=Coded(codes))
    monkeypatch.setattr(peers_engine, "Mooncake", lambda *_: joined)
    store = peers_stores.Mooncake({}, peers_stores.Memory(PAGE_BYTES))
    pages = store.buffers(PAGE_BYTES)[0][:3]

    made = getattr(store, call)(["a", "b", "c"], *([pages] if call in {"set", "get"} else []))

    assert (made, store.misses) == (answers, misses)


def test_tables_show_what_did_not_run() -> None:
    """A store that is missing, one that failed, a page that was not found, a call that hung."""
    figures = figures_of(History(calls=[Call(
        process=0, host="owner", kind=GET, began=1.0, keys=("k",)
    )]), 20.0)  # fmt: skip
    figures |= {"starts_s": [1.0, 2.0], "recoveries_s": [3.0, None]}
    text = peers_faults_report.markdown({
        "seed": 7, "date": "2026-11-26", "processors": 2, "load_averages": [0.5, 3],
        "versions": {"ours": "", "mooncake": "0.3"},
        "missing": {"redis": "cannot be installed here: no network"},
        "runs": {"ours": {"killed": figures}, "mooncake": {"killed": {"failed": "no master"}}},
    })  # fmt: skip

    assert "Seed 7, 2026-11-26; 2 processors" in text
    assert "19.0 (get), 1 without an answer | 1 | not in 60 (start: 1.0 to 2.0) |" in text
    assert "| Mooncake | no master |" in text
    assert "* Redis: cannot be installed here: no network." in text


@pytest.mark.slow
@pytest.mark.parametrize("scenario", peers_clusters.SCENARIOS)
def test_ours_passes(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run of each; what is written is what the tables show."""
    for name, value in {
        "WARM_S": 3.0, "DOWN_S": 1.0, "AFTER_S": 0.5, "KILLS": 1, "PAUSES_S": (1.0,),
        "EVICTS_S": 5.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(peers, name, value)

    figures = peers.measured(["ours tcp"], [scenario], seed=1, keep=None)

    assert list(peers.ours_violated(figures)) == []
    run = figures["runs"]["ours tcp"][scenario]
    assert run["hits"] > 0
    assert None not in run["recoveries_s"]
    assert "PeerCache, reads over tcp" in peers_faults_report.markdown(figures)
