"""Hints that engines pass on: read as routers write them, bounded, and never an error."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peercache.engines import hints as hinting
from peercache.engines.hints import Naming, RequestHints
from peercache.model.keys import PageKeys
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics, totals_of
from tests.examples import examples
from tests.pace import wait_until

BIG = 2**63 + 5


class Client:
    """Records what it is asked."""

    def __init__(self) -> None:
        """Be asked nothing."""
        self.metrics = Metrics()
        self.calls: list[tuple[Any, ...]] = []

    def retain(self, keys: PageKeys, seconds: float) -> int:
        """Record it."""
        return self._record("retain", keys, seconds)

    def demote(self, keys: PageKeys) -> int:
        """Record it."""
        return self._record("demote", keys)

    def prefetch(self, keys: PageKeys) -> int:
        """Record it."""
        return self._record("prefetch", keys)

    def share(self, keys: PageKeys) -> int:
        """Record it."""
        return self._record("share", keys)

    def _record(self, hint: str, keys: PageKeys, *more: float) -> int:
        self.calls.append((hint, [int.from_bytes(key.tobytes(), "big") for key in keys], *more))
        return len(keys)


def keys_of(names: list[int]) -> PageKeys:
    return np.frombuffer(b"".join(name.to_bytes(16, "big") for name in names), "V16")


NAMING = Naming(
    number=lambda name: name % 2**64,
    named=lambda text: int(text, 16) if isinstance(text, str) and text.isalnum() else None,
    keys=keys_of,
)


class Rig:
    """Hints over a client, and what came of them."""

    def __init__(self, client: Client | None) -> None:
        """Start."""
        self.client = client
        self.now = 0.0
        self.hints = RequestHints(
            "test", NAMING, lambda: self.client, get_logger(), lambda: self.now
        )
        self.hints.begin("first", {})

    def begin(self, *actions: Any, request: str = "r") -> None:
        envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=list(actions))
        self.hints.begin(request, envelope)

    def calls(self, count: int) -> list[tuple[Any, ...]]:
        assert self.client is not None
        client = self.client
        wait_until(lambda: len(client.calls) >= count)
        assert len(client.calls) == count
        return client.calls

    def refused(self) -> dict[str, int]:
        return {reason: count for reason, count in self.hints.refused.items() if count}


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Client())
    yield rig
    assert rig.hints.close(5.0)


def action(kind: str, version: str = "1.0", **payload: Any) -> SimpleNamespace:
    return SimpleNamespace(action_id="a", action_type=kind, action_version=version, payload=payload)


def test_blocks_are_named_by_64_bits_in_decimals_and_by_whole_hashes(rig: Rig) -> None:
    """As Dynamo's policies write them; a signed number is that of SGLang's events."""
    rig.hints.saw([1, 2, BIG])

    rig.begin(action("kv.prefetch", block_hashes=["1", 2, str(BIG), BIG - 2**64, "ff", 77]))

    assert rig.calls(1) == [("prefetch", [1, 2, BIG, 255])]


def test_a_retain_waits_for_the_end_of_its_request(rig: Rig) -> None:
    """It concerns the pages that the request has named by then, and earlier ones."""
    rig.hints.saw([9])
    rig.begin(
        action(
            "kv.retain", block_hashes=["9"], include_current_request=True, priority=3,
            ttl_seconds=2.5, execute_at="request_completion",
        )
    )  # fmt: skip
    rig.hints.saw([1, 2], "r")
    rig.hints.saw([3], "another")
    rig.hints.saw([2, 4], "r")
    assert rig.client is not None
    assert rig.client.calls == []

    rig.hints.end("r")

    assert rig.calls(1) == [("retain", [1, 2, 4, 9], 2.5)]


def test_pages_that_are_stored_after_their_request_are_retained_then(rig: Rig) -> None:
    """Once, and not when that is long after."""
    rig.begin(action("kv.retain", ttl_seconds=60))
    rig.hints.saw([1, 2, 3], "r")
    rig.hints.end("r")
    rig.calls(1)

    rig.hints.stored([7, 2])
    rig.hints.stored([2])
    assert rig.calls(2)[1] == ("retain", [2], 60.0)
    rig.now += hinting.CLAIM_S + 1
    rig.hints.stored([3])
    time.sleep(0.05)
    rig.calls(2)


def test_parts_of_a_prompt_are_retained_for_their_times(rig: Rig) -> None:
    """By the directives of vLLM's proposal: ranges of tokens, a priority of 0 lets them go."""
    rig.begin(
        action(
            "kv.retain",
            scope="session",
            directives=[
                {"start": 0, "end": 32, "priority": 80, "duration": 60},
                {"start": 32, "end": 48, "priority": 0},
                {"covers_output": True, "priority": 40},
            ],
        )
    )
    rig.hints.saw([16, 32, 48, 64], "r")

    rig.hints.end("r", position=lambda name: name)

    assert rig.calls(3) == [
        ("retain", [16, 32], 60.0),
        ("retain", [48], 0.0),
        ("retain", [16, 32, 48, 64], math.inf),
    ]


def test_all_types_of_actions_do_what_they_say(rig: Rig) -> None:
    """Those that allow an eviction are obeyed by a demote: others may share the pages."""
    rig.hints.saw([1])
    rig.begin(
        action("kv.pin", ttl_seconds=5, block_hashes=[1]),
        *(action(kind, block_hashes=[1]) for kind in ("kv.demote", "kv.evict", "kv.release")),
        *(action(kind, block_hashes=[1]) for kind in ("kv.share", "kv.fetch")),
        action("kv.source_locations", "1.7", block_hashes=[1], source_control_endpoint="tcp://x:1"),
    )

    assert [call[0] for call in rig.calls(7)] == ["retain", *["demote"] * 3, *["share"] * 3]


def test_the_pages_of_a_request_are_prefetched_as_it_names_them(rig: Rig) -> None:
    """SGLang's proposal has no payload: the request's own prompt is meant."""
    rig.begin(action("kv.prefetch"), action("kv.deref"))
    rig.hints.saw([1, 2], "r")
    rig.hints.saw([2, 3], "r")
    rig.hints.end("r")
    rig.hints.end("r")

    assert rig.calls(3) == [("prefetch", [1, 2]), ("prefetch", [3]), ("demote", [1, 2, 3])]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (action("kv.teleport"), "unknown"),
        (action("vllm.set_priority", target="request_cached"), "unknown"),
        (action("kv.retain", "2.0", ttl_seconds=1), "unknown"),
        (SimpleNamespace(), "unknown"),
        (None, "unknown"),
        ({"action_type": "kv.retain", "action_version": "1.0", "payload": []}, "malformed"),
        ({"action_type": "kv.retain", "action_version": "1.0", "payload": "x"}, "malformed"),
        (action("kv.retain"), "malformed"),
        (action("kv.retain", ttl_seconds=math.nan), "malformed"),
        (action("kv.retain", ttl_seconds=math.inf), "malformed"),
        (action("kv.retain", ttl_seconds=-1), "malformed"),
        (action("kv.retain", ttl_seconds=True), "malformed"),
        (action("kv.retain", ttl_seconds="soon"), "malformed"),
        (action("kv.retain", directives="all"), "malformed"),
        (action("kv.retain", directives=[1]), "malformed"),
        (action("kv.retain", directives=[{"start": "a"}]), "malformed"),
        (action("kv.demote", block_hashes="all"), "malformed"),
        (action("kv.demote", block_hashes=[True]), "malformed"),
        (action("kv.demote", block_hashes=[1], include_current_request="yes"), "malformed"),
        (action("kv.demote", block_hashes=list(range(10_000))), "too_many"),
        (action("kv.demote", session_id="agent-42"), "no_target"),
        (action("kv.demote", block_hashes=["12345", "no hash"]), "no_target"),
        (action("kv.demote", block_hashes=["--5", "-", "+5", ""]), "no_target"),
    ],
)  # fmt: skip
def test_what_is_not_obeyed_is_a_counted_reason_and_does_not_stop_the_others(
    rig: Rig, given: Any, reason: str
) -> None:
    rig.hints.saw([1])

    rig.begin(given, action("kv.demote", block_hashes=[1]), {**vars(action("kv.share"))})
    rig.hints.saw([1], "r")
    rig.hints.end("r")

    assert rig.refused() == {reason: 1}
    assert [call[0] for call in rig.calls(2)] == ["demote", "share"]
    assert rig.client is not None
    shown = totals_of(rig.client.metrics.hints_refused)
    assert {name: value for name, value in shown.items() if value} == {reason: 1}


def test_pages_cost_nothing_before_the_first_hint() -> None:
    """Engines that pass on no hints look up thousands of pages a second."""

    def fail(_: Any) -> int:
        raise AssertionError

    naming = Naming(number=fail, named=fail, keys=fail)
    hints = RequestHints("test", naming, lambda: None, get_logger())
    hints.begin("r", None)

    hints.saw(map(fail, [1]), "r")
    hints.stored(map(fail, [1]))
    hints.end("r")


def test_a_longer_time_than_any_is_left_to_the_client(rig: Rig) -> None:
    rig.hints.saw([1])
    rig.begin(action("kv.retain", block_hashes=[1], ttl_seconds=10**400))

    assert rig.calls(1) == [("retain", [1], 1e9)]


def test_an_envelope_is_bounded(rig: Rig) -> None:
    rig.hints.saw([1])
    rig.begin(*[action("kv.share", block_hashes=[1])] * (hinting.ACTIONS_MAX + 10))

    rig.calls(hinting.ACTIONS_MAX)
    assert rig.refused() == {"too_many": 10}
    for envelope in (5, "text", {"actions": 5}, {"actions": "kv.share"}, {}):
        rig.hints.begin("r", envelope)
    assert rig.refused() == {"too_many": 10, "malformed": 2}


def test_what_is_remembered_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that never end, blocks, pages of a request, and pages that are never stored."""
    for name in ("REQUESTS_MAX", "BLOCKS_MAX", "PAGES_MAX", "CLAIMS_MAX"):
        monkeypatch.setattr(hinting, name, 8)
    for number in range(20):
        rig.begin(action("kv.retain", ttl_seconds=1), request=f"r{number}")
        rig.hints.saw(range(20), f"r{number}")
    rig.hints.end("r0")
    rig.hints.end("r19")
    assert rig.calls(1) == [("retain", list(range(8)), 1.0)]

    rig.begin(action("kv.share", block_hashes=[1, 2]))
    assert rig.refused() == {"no_target": 1}
    rig.hints.saw(range(20), "r18")
    rig.hints.end("r18")
    rig.hints.stored(range(100, 120))
    rig.calls(2)


def test_without_a_client_hints_are_late(rig: Rig) -> None:
    rig.hints.saw([1])
    rig.client = None
    rig.begin(action("kv.share", block_hashes=[1]))

    wait_until(lambda: rig.refused() == {"late": 1})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda some: st.lists(some, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["actions", "action_type", "action_version", "payload", "block_hashes", "directives",
             "ttl_seconds", "start", "end", "include_current_request", "execute_at"]
        ),
        some, max_size=5,
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=examples(100), deadline=None)
@given(payload=JSON, kind=st.sampled_from([*hinting.TYPES, "other"]), whole=JSON)
def test_no_envelope_raises(payload: Any, kind: str, whole: Any) -> None:
    """Not even within the guard, which would drop the other hints of the request."""
    methods: Any = RequestHints
    begin, saw, end = (method.__wrapped__ for method in (methods.begin, methods.saw, methods.end))
    rig = Rig(None)
    rig.hints.saw([1, 2], "r")
    given = {"action_type": kind, "action_version": "1", "payload": payload}

    begin(rig.hints, "r", {"actions": [given]})
    begin(rig.hints, "q", whole)
    for request in "rq":
        saw(rig.hints, [1, 2], request)
        end(rig.hints, request, lambda name: name)
    assert rig.hints.close(5.0)
