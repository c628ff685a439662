"""The hints of vLLM's requests: obeyed by the tier, and nothing of it waits or raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peercache.engines.hints import WAITING_MAX
from tests.pace import wait_until
from tests.unit.engines.fake_client import FakeClient
from tests.unit.vllm import fake_vllm
from tests.unit.vllm.fake_vllm import LookupResult, job
from tests.unit.vllm.test_tier import KEYS, ROW_BYTES, make, results, verdicts

BLOCKS = [str(int.from_bytes(key[:-4][-8:], "big")) for key in KEYS]
"""The names that vLLM's events give them."""


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient()


@pytest.fixture
def tier(fake: FakeClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    fake_vllm.install(monkeypatch)
    tier = make(fake, np.zeros((8, ROW_BYTES), np.int8))
    yield tier
    fake.may_answer.set()
    tier.shutdown()
    fake_vllm.forget()


class Context(SimpleNamespace):
    """A ReqContext of vLLM 0.32."""

    def get_offload_key_position(self, key: bytes) -> int | None:
        """Return the tokens up to the end of a chunk."""
        return 16 * (KEYS.index(key) + 1)


def request(name: str, kind: str = "", **payload: Any) -> Any:
    actions = [
        SimpleNamespace(action_id="a", action_type=kind, action_version="1.0", payload=payload)
    ]
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=actions)
    return Context(req_id=name, kv_hints=envelope if kind else None)


def test_the_chunks_of_a_request_are_retained_when_they_are_stored(
    tier: Any, fake: FakeClient
) -> None:
    """Those that it found, and those that it stores; by the end of the request."""
    tier.submit_store(job(1, KEYS[:1], [0]))
    results(tier, 1)
    asks = request("r", "kv.retain", include_current_request=True, ttl_seconds=120)
    tier.on_new_request(asks)
    assert verdicts(tier, KEYS[:2], asks) == [LookupResult.HIT, LookupResult.MISS]
    tier.submit_store(job(2, KEYS[1:3], [1, 2]))
    assert fake.hints == []

    tier.on_request_finished(asks)

    results(tier, 2)
    wait_until(lambda: sum(len(held) for _, _, held in fake.hints) >= 3)
    assert {(hint, seconds) for hint, seconds, _ in fake.hints} == {("retain", 120.0)}
    assert {key for _, _, held in fake.hints for key in held} == set(fake.pages)


def test_other_chunks_are_demoted_and_prefetched_by_their_blocks(
    tier: Any, fake: FakeClient
) -> None:
    """By 64 bits of a hash that was seen here, or by a whole one."""
    tier.on_new_request(request("first", "kv.prefetch"))
    tier.submit_store(job(1, KEYS[:3], [0, 1, 2]))
    results(tier, 1)

    tier.on_new_request(request("r", "kv.evict", block_hashes=[BLOCKS[0], BLOCKS[1]]))
    wait_until(lambda: len(fake.hints) == 1)
    whole = "hex:" + KEYS[2][:-4].hex()
    tier.on_new_request(request("q", "kv.prefetch", block_hashes=[whole, "hex:zz"]))

    wait_until(lambda: len(fake.hints) == 2)
    assert [(hint, len(held)) for hint, _, held in fake.hints] == [("demote", 2), ("prefetch", 1)]


def test_a_part_of_a_prompt_is_retained(tier: Any, fake: FakeClient) -> None:
    asks = request("r", "kv.retain", directives=[{"start": 0, "end": 32, "priority": 9}])
    tier.on_new_request(asks)
    tier.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    results(tier, 1)
    tier.on_request_finished(asks)

    wait_until(lambda: len(fake.hints) >= 1)
    assert len(fake.hints[-1][2]) == 2


def test_a_request_without_hints_and_an_older_vllm_cost_nothing(
    tier: Any, fake: FakeClient
) -> None:
    for asks in (request("r"), SimpleNamespace(req_id="older")):
        tier.on_new_request(asks)
        assert verdicts(tier, KEYS[:1], asks) == [LookupResult.MISS]
        tier.on_request_finished(asks)

    assert fake.hints == []
    assert not [thread for thread in threading.enumerate() if "vllm-hints" in thread.name]


def test_hints_do_not_wait_for_a_client_that_hangs(tier: Any, fake: FakeClient) -> None:
    """The scheduler goes on; of the hints that wait some are dropped."""
    tier.on_new_request(request("first", "kv.prefetch"))
    fake.may_answer.clear()
    tier.submit_store(job(1, KEYS, [0, 1, 2, 3]))
    for number in range(400):
        tier.on_new_request(request(str(number), "kv.share", block_hashes=BLOCKS))

    assert fake.hints == []
    fake.may_answer.set()
    results(tier, 1)
    wait_until(lambda: len(fake.hints) >= WAITING_MAX)
    assert len(fake.hints) <= WAITING_MAX + 1
