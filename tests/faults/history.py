"""Histories: every call of every client, as it was made and answered, and what clients saw.

A client appends one JSON object a line, flushed, before and after each call, so that a `kill -9`
loses nothing but the answer. `write_edn` writes the same calls as the operation maps of Jepsen, one
a line, which Knossos reads, and Porcupine in the manner of its own test data.

Of the existing checkers Porcupine was chosen: it splits a history by key, and its model is a
function of ours, so that "a miss is always allowed" can be said. Elle checks transactions, and
Knossos has no split by key of its own. Porcupine is a Go module (tests/faults/porcupine), so the
checkers in checkers.py do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

import attrs

from tests.faults.recorder import GET, REMOVE, SET


@attrs.frozen(kw_only=True)
class Call:
    """One call of a client.

    process:  one run of a client; a client that was started again has another number.
    host:     where it runs: the name of its home node, too.
    began, ended: seconds of the machine's monotonic clock; `ended` is infinite without an answer.
    values:   by key the digest of the bytes that were stored or read; "" for what is none.
    answers:  by key what the call answered: stored, hit, or found; of a removal whether it reached
              every member.
    misses:   why pages were misses, by reason.
    excess_s: how long after its deadline the call returned, pauses of its process left out.
    """

    process: int
    host: str
    kind: str
    began: float
    ended: float = inf
    keys: tuple[str, ...]
    values: tuple[str, ...] = ()
    answers: tuple[bool, ...] = ()
    misses: Mapping[str, int] = attrs.field(factory=dict)
    excess_s: float = 0.0
    error: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether it returned."""
        return self.ended < inf


@attrs.frozen(kw_only=True)
class Sight:
    """What a client saw of the cluster at a moment.

    home: the incarnation of its home node. members: the incarnations in its view, which is up to
    a second old. alive: how many the home node counts now.
    evicted: pages that its home node has evicted. unpublished: pages of this client's sets.
    """

    process: int
    host: str
    at: float
    home: str
    members: tuple[str, ...]
    alive: int = -1
    evicted: int = 0
    unpublished: int = 0


@attrs.frozen(kw_only=True)
class Span:
    """A fault: what was done, to whom, and from when to when it had an effect."""

    kind: str
    targets: tuple[str, ...]
    began: float
    ended: float = inf
    effect: str = ""


@attrs.frozen(kw_only=True)
class Life:
    """One start of a node. ended: when its process ended."""

    host: str
    incarnation: str
    began: float
    ended: float = inf


@attrs.frozen(kw_only=True)
class History:
    """Everything about one run that checkers look at, each list by time."""

    calls: Sequence[Call] = ()
    sights: Sequence[Sight] = ()
    spans: Sequence[Span] = ()
    lives: Sequence[Life] = ()


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines(keepends=True):
        if line.endswith("\n"):  # The last one of a killed client may be a part of one.
            yield json.loads(line)


def _frozen(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(it) if isinstance(it, list) else it for name, it in line.items()}


def read_calls(files: Iterable[Path]) -> tuple[list[Call], list[Sight]]:
    """Read the files of clients."""
    calls: dict[tuple[int, int], Call] = {}
    sights = []
    for file in files:
        for line in map(_frozen, _lines(file)):
            kind = line.pop("type")
            if kind == "saw":
                sights.append(Sight(**line))
                continue
            number = line["process"], line.pop("number")
            if kind == "invoke":
                calls[number] = Call(**line)
            else:
                calls[number] = attrs.evolve(calls[number], **line)
    return (
        sorted(calls.values(), key=lambda call: call.began),
        sorted(sights, key=lambda sight: sight.at),
    )


def write_json(history: History, file: Path) -> None:
    """Write a whole history to one file."""
    with file.open("w") as out:
        for kind in (history.calls, history.sights, history.spans, history.lives):
            for each in kind:
                out.write(json.dumps({"is": type(each).__name__, **attrs.asdict(each)}) + "\n")


def read_json(file: Path) -> History:
    """Read what `write_json` has written."""
    kinds: dict[str, tuple[type[Any], list[Any]]] = {
        kind.__name__: (kind, []) for kind in (Call, Sight, Span, Life)
    }
    for line in map(_frozen, _lines(file)):
        kind, found = kinds[line.pop("is")]
        found.append(kind(**line))
    calls, sights, spans, lives = (found for _, found in kinds.values())
    return History(calls=calls, sights=sights, spans=spans, lives=lives)


_OF_JEPSEN = {SET: "write", GET: "read", REMOVE: "remove"}


def write_edn(calls: Iterable[Call], file: Path, removals: Iterable[Call] = ()) -> None:
    """Write sets, gets and removals as operation maps of Jepsen, one a page and line, by time.

    The pages of one call are operations of one process at the same time, which are of different
    keys. `:value` is the digest of the bytes, nil for a miss; `:info` ends what may have happened:
    without an answer, or answered "not stored", or a removal that is not one of `removals`, those
    that must have reached every page.
    """
    sure = {id(call) for call in removals}
    events: list[tuple[float, int, str]] = []
    for call in calls:
        if call.kind not in _OF_JEPSEN:
            continue
        for index, key in enumerate(call.keys):
            stored = call.values[index] if call.values else ""
            is_sure = id(call) in sure or (
                call.is_answered
                and (call.kind == GET or (call.kind == SET and call.answers[index]))
            )
            asked = stored if call.kind == SET else ""
            got = stored if call.kind != GET or (is_sure and call.answers[index]) else ""
            op = f"{{:process {call.process}, :f :{_OF_JEPSEN[call.kind]}, :key {json.dumps(key)}"
            events.append((call.began, 1, f"{op}, :type :invoke, {_timed(asked, call.began)}}}"))
            kind = ":ok" if is_sure else ":info"
            ended = call.ended if call.is_answered else inf
            events.append((ended, 0, f"{op}, :type {kind}, {_timed(got, ended)}}}"))
    file.write_text("".join(f"{line}\n" for _, _, line in sorted(events)))


def _timed(value: str, at: float) -> str:
    nanoseconds = int(at * 1e9) if at < inf else 2**62
    return f":value {json.dumps(value) if value else 'nil'}, :time {nanoseconds}"
