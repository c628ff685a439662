"""Hints that engines pass on with a request: read, bounded, and obeyed through the client.

Owns    the hints of each request until it ends, with the pages that it has named; what is still to
        be done with pages that are stored after that; the blocks that were seen lately.
Takes   the envelopes of vLLM (`v1/kv_hints/protocol.py`, since 0.32) and SGLang
        (`srt/managers/kv_hints.py`, since 0.5.23): `actions`, each with `action_type`,
        `action_version` and `payload`, as objects or as JSON. From any thread.
Keeps   no method raises or waits. An action is obeyed, or counted as refused under a reason; what
        is refused is logged once for each type.
Limits  ACTIONS_MAX actions of an envelope, PAGES_MAX pages of an action, REQUESTS_MAX requests,
        CLAIMS_MAX pages to be stored, within CLAIM_S; BLOCKS_MAX blocks.

The engines define the envelope, and no action. The actions here are those that routers send and
that the engines' proposals name: `kv.retain` and `kv.pin`; `kv.prefetch`; `kv.demote`, `kv.evict`,
`kv.deref` and `kv.release`, which all let pages go early: others may share them, so none is
removed; `kv.share` and `kv.fetch`, which ask that this engine can read what another one has.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, final

import attrs

from peercache.engines.lanes import CallLane, harmless
from peercache.model.keys import PageKeys
from peercache.observability.log import WarnOnce
from peercache.observability.metrics import Metrics
from peercache.observability.reasons import (
    DEMOTE,
    LATE,
    MALFORMED,
    NO_TARGET,
    PREFETCH,
    RETAIN,
    SHARE,
    TOO_MANY,
    UNKNOWN,
)

ACTIONS_MAX: Final = 64
"""Actions of one envelope: SGLang's proposal has the same limit."""

PAGES_MAX: Final = 8192
"""Pages of one action, and pages of a request that are remembered for its hints."""

REQUESTS_MAX: Final = 4096
"""Requests with hints at once: more than engines run."""

CLAIMS_MAX: Final = 65536
CLAIM_S: Final = 60.0
"""How long a page that a hint has named may be stored after its request has ended."""

BLOCKS_MAX: Final = 65536
"""Blocks that a router may name by 64 bits of their hash: the last ones that were seen, since the
first hint."""

WAITING_MAX: Final = 256
"""Actions that wait for the client."""

TIMEOUT_S: Final = 10.0
"""How long an action may wait for its turn: pages that are needed have been read by then."""

MAJOR: Final = "1"
AT_END: Final = "request_completion"

TYPES: Final = {
    "kv.retain": RETAIN,
    "kv.pin": RETAIN,
    "kv.prefetch": PREFETCH,
    "kv.demote": DEMOTE,
    "kv.evict": DEMOTE,
    "kv.deref": DEMOTE,
    "kv.release": DEMOTE,
    "kv.share": SHARE,
    "kv.fetch": SHARE,
    "kv.source_locations": SHARE,
}
"""What is done for each type of action; the last one is an older name of `kv.fetch`."""

Block: TypeAlias = int | str | bytes
"""A block as routers name it: 64 bits of its hash, in decimals too, or the whole hash."""

Name: TypeAlias = Any
"""A page as the engine's adapter names it: hashable."""


class HintProblem(ValueError):
    """An action that is not obeyed. reason: one of `HINT_REFUSALS`."""

    def __init__(self, reason: str, why: str) -> None:
        """Say why."""
        super().__init__(why)
        self.reason = reason


@attrs.frozen
class Hint:
    """One thing to do with pages.

    seconds: of a retain; 0 ends it. blocks: the pages, by their blocks. of_request: also those of
    the request. at_end: not before the request has ended. tokens: only pages that end in this part
    of the request's tokens; None: in any.
    """

    kind: str
    seconds: float = 0.0
    blocks: tuple[Block, ...] = ()
    of_request: bool = False
    at_end: bool = False
    tokens: tuple[int, float] | None = None


def hints_of(action: Any) -> list[Hint]:
    """Return what an action asks for; raise HintProblem."""
    kind = TYPES.get(str(_field(action, "action_type")))
    if kind is None:
        raise HintProblem(UNKNOWN, "no action of this type is known")
    if str(_field(action, "action_version")).partition(".")[0] != MAJOR:
        raise HintProblem(UNKNOWN, f"only version {MAJOR} of this action is known")
    payload = _field(action, "payload") or {}
    if not isinstance(payload, Mapping):
        raise HintProblem(MALFORMED, "payload is no object")
    if kind == RETAIN and "directives" in payload:
        return [_directive(each) for each in _items(payload, "directives")]
    blocks = tuple(_items(payload, "block_hashes"))
    if not all(isinstance(one, int | str | bytes) and not isinstance(one, bool) for one in blocks):
        raise HintProblem(MALFORMED, "block_hashes are numbers or texts")
    of_request = payload.get("include_current_request", not blocks and "session_id" not in payload)
    if not isinstance(of_request, bool):
        raise HintProblem(MALFORMED, "include_current_request is true or false")
    if not blocks and not of_request:
        raise HintProblem(NO_TARGET, "pages are named by block_hashes, not by a session")
    at_end = payload.get("execute_at") == AT_END or (of_request and kind in {RETAIN, DEMOTE})
    seconds = 0.0
    if kind == RETAIN:
        seconds = _seconds(payload.get("ttl_seconds", payload.get("duration")))
    return [Hint(kind, seconds, blocks, of_request, at_end)]


def _directive(item: Any) -> Hint:
    """Return a directive of `kv.retain`: a part of the request's tokens, and for how long."""
    if not isinstance(item, Mapping):
        raise HintProblem(MALFORMED, "a directive is an object")
    begin, end = item.get("start", 0), item.get("end")
    if not _is_number(begin) or not (end is None or _is_number(end)):
        raise HintProblem(MALFORMED, "start and end are numbers of tokens")
    seconds = 0.0
    if item.get("priority") != 0:
        duration = item.get("duration")
        seconds = math.inf if duration is None else _seconds(duration)
    is_all = bool(item.get("covers_output")) or (begin == 0 and end is None)
    tokens = None if is_all else (int(begin), math.inf if end is None else float(end))
    return Hint(RETAIN, seconds, of_request=True, at_end=True, tokens=tokens)


def _items(payload: Mapping[str, Any], name: str) -> list[Any]:
    items = payload.get(name, [])
    if not isinstance(items, list | tuple):
        raise HintProblem(MALFORMED, f"{name} is a list")
    if len(items) > PAGES_MAX:
        raise HintProblem(TOO_MANY, f"{name} has at most {PAGES_MAX} items")
    return list(items)


def _seconds(value: Any) -> float:
    """Return a time; it may be longer than the client allows."""
    if not _is_number(value) or not value > 0 or value == math.inf:
        raise HintProblem(MALFORMED, "a time is a positive number of seconds")
    # No float is as large as some integers.
    return float(min(value, 1e9))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


@attrs.frozen
class Naming:
    """How an adapter names pages.

    number: the 64 bits by which routers name the block of a page.
    named:  the page of a whole hash; None if it is not one.
    keys:   the page keys of names.
    """

    number: Callable[[Name], int]
    named: Callable[[str | bytes], Name | None]
    keys: Callable[[list[Name]], PageKeys]


@attrs.define(eq=False)
class _Request:
    hints: list[Hint]
    pages: dict[Name, None] = attrs.field(factory=dict)


Position: TypeAlias = Callable[[Name], int | None]
"""Returns the number of the request's tokens up to the end of a page; None if that is unknown."""


@final
class RequestHints:
    """Obeys the hints of an engine's requests. Thread-safe."""

    def __init__(
        self,
        engine: str,
        naming: Naming,
        client: Callable[[], Any | None],
        log: Any,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no hint. client: returns the client; None while there is none."""
        self._naming = naming
        self._client = client
        self._clock = clock
        self._warn_once = WarnOnce(log)
        self._lane_of = partial(
            CallLane, f"{engine}-hints", log, timeout_s=TIMEOUT_S, work_max=WAITING_MAX
        )
        self._lane: CallLane | None = None
        """From the first hint on."""
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        self._blocks: OrderedDict[int, Name] = OrderedDict()
        self._has_hints = False
        """Whether a request had hints: until then nothing is remembered of pages."""
        self._claims: OrderedDict[Name, tuple[Hint, float]] = OrderedDict()
        self.refused: Counter[str] = Counter()
        """Actions that were not obeyed, by reason."""

    @harmless(lambda: None)
    def begin(self, request: str, envelope: Any) -> None:
        """Take the hints of a request; None: it has none."""
        if envelope is None:
            return
        self._has_hints = True
        hints: list[Hint] = []
        actions = _field(envelope, "actions") or []
        if not isinstance(actions, Sequence) or isinstance(actions, str | bytes):
            self._refuse(MALFORMED, "", "actions is no list")
            return
        if len(actions) > ACTIONS_MAX:
            why = f"an envelope has at most {ACTIONS_MAX} actions"
            self._refuse(TOO_MANY, "", why, len(actions) - ACTIONS_MAX)
        for action in actions[:ACTIONS_MAX]:
            hints += self._read(action)
        for hint in [hint for hint in hints if hint.blocks and not hint.at_end]:
            self._do(hint, self._found(hint))
        if later := [hint for hint in hints if hint.at_end or hint.of_request]:
            with self._lock:
                self._requests[request] = _Request(later)
                while len(self._requests) > REQUESTS_MAX:
                    self._requests.popitem(last=False)

    @harmless(lambda: None)
    def saw(self, names: Iterable[Name], request: str | None = None) -> None:
        """Note pages that were looked up, loaded or stored, perhaps for a request."""
        if not self._has_hints:
            return
        names = list(names)
        with self._lock:
            for name in names:
                number = self._naming.number(name)
                self._blocks.pop(number, None)
                self._blocks[number] = name
            while len(self._blocks) > BLOCKS_MAX:
                self._blocks.popitem(last=False)
            known = self._requests.get(request) if request is not None else None
            if known is None:
                return
            room = PAGES_MAX - len(known.pages)
            new = [name for name in names if name not in known.pages][: max(room, 0)]
            known.pages.update(dict.fromkeys(new))
            now = [hint for hint in known.hints if not hint.at_end]
        for hint in now if new else []:
            self._do(hint, new)

    @harmless(lambda: None)
    def end(self, request: str, position: Position | None = None) -> None:
        """Obey what was to wait for the end of a request."""
        with self._lock:
            known = self._requests.pop(request, None)
        if known is None:
            return
        for hint in [hint for hint in known.hints if hint.at_end]:
            own = list(known.pages) if hint.of_request else []
            if hint.tokens is not None:
                if position is None:
                    self._refuse(NO_TARGET, hint.kind, "this engine names no positions of pages")
                    continue
                begin, end = hint.tokens
                own = [name for name in own if begin < (position(name) or 0) <= end]
            pages = list(dict.fromkeys([*own, *self._found(hint)]))
            if hint.kind in {RETAIN, DEMOTE}:
                self._claim(hint, pages)
            self._do(hint, pages)

    @harmless(lambda: None)
    def stored(self, names: Iterable[Name]) -> None:
        """Obey what was to be done with pages once they are stored."""
        if not self._claims:
            return
        due: dict[Hint, list[Name]] = {}
        with self._lock:
            now = self._clock()
            for name in names:
                hint, until = self._claims.pop(name, (None, 0.0))
                if hint is not None and until >= now:
                    due.setdefault(hint, []).append(name)
        for hint, pages in due.items():
            self._do(hint, pages)

    def close(self, timeout_s: float) -> bool:
        """End the thread; return whether it has ended."""
        return self._lane is None or self._lane.close(timeout_s)

    def _read(self, action: Any) -> list[Hint]:
        kind = str(_field(action, "action_type"))[:64]
        try:
            return hints_of(action)
        except HintProblem as problem:
            self._refuse(problem.reason, kind, str(problem))
        except (ValueError, OverflowError) as error:
            self._refuse(MALFORMED, kind, str(error))
        return []

    def _found(self, hint: Hint) -> list[Name]:
        """Return the pages of the blocks that are known."""
        found: dict[Name, None] = {}
        with self._lock:
            for block in hint.blocks:
                name = None
                if (
                    isinstance(block, str)
                    and block.removeprefix("-").isdecimal()
                    and len(block) <= 20
                ):
                    block = int(block)  # noqa: PLW2901 - the same block
                if isinstance(block, int):
                    name = self._blocks.get(block % 2**64)
                else:
                    name = self._naming.named(block)
                if name is not None:
                    found[name] = None
        if hint.blocks and not found:
            self._refuse(NO_TARGET, hint.kind, "none of its blocks was seen here")
        return list(found)

    def _claim(self, hint: Hint, pages: list[Name]) -> None:
        until = self._clock() + CLAIM_S
        with self._lock:
            for name in pages:
                self._claims[name] = (hint, until)
            while len(self._claims) > CLAIMS_MAX:
                self._claims.popitem(last=False)

    def _do(self, hint: Hint, pages: list[Name]) -> None:
        if not pages:
            return

        def obey() -> None:
            client = self._client()
            if client is None:
                self._refuse(LATE, hint.kind, "there is no client yet")
                return
            keys = self._naming.keys(pages)
            if hint.kind == RETAIN:
                client.retain(keys, hint.seconds)
            else:
                getattr(client, hint.kind)(keys)

        with self._lock:
            if self._lane is None:
                self._lane = self._lane_of()
            lane = self._lane
        lane.submit(obey, lambda: self._refuse(LATE, hint.kind, "it waited too long"))

    def _refuse(self, reason: str, action: str, why: str, count: int = 1) -> None:
        self.refused[reason] += count
        metrics = getattr(self._client(), "metrics", None)
        if isinstance(metrics, Metrics):
            metrics.hints_refused.labels(reason).inc(count)
        key: Hashable = (reason, action)
        self._warn_once("engines.hint_refused", key, reason=reason, action=action, why=why)
