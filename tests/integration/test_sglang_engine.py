"""Three whole SGLang engines; two answer from what the first computed, or what they did before."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache import Client
from peercache.sglang import plugin
from tests.integration.engine_process import LINKER, PAGE_TOKENS
from tests.integration.engines import (
    DYNAMIC,
    a_prompt,
    from_linker,
    from_storage,
    installed,
    start_engine,
    wait_for,
)
from tests.integration.processes import Child, StandaloneNode
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import paced, wait_until

# Each engine is three processes that import SGLang: as long as all other SGLang tests together.
pytestmark = pytest.mark.slow

PROMPT_TOKENS = 1000
STORED_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS

Engines = tuple[Child, Child, Child]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Return three engines on two nodes of one cluster; they start at the same time.

    The writer's SGLang knows the backend by its name, and uses host buffers in place; the reader's
    loads it dynamically, with the older interface. The last one has no host tier: its linker, too,
    has a name.
    """
    folder = tmp_path_factory.mktemp("engines")
    model = write_tiny_llama(folder / "tiny-llama")
    named = {"PYTHONPATH_FIRST": str(installed(folder / "installed"))}
    with (
        StandaloneNode(tmp_path_factory.mktemp("a")) as first,
        StandaloneNode(tmp_path_factory.mktemp("b"), discovery=first.control) as second,
        start_engine(model, first, {}, backend="peercache", **named) as writer,
        start_engine(model, second, {**DYNAMIC, "interface_v1": 0}) as reader,
        start_engine(model, second, {}, backend=f"{LINKER}peercache", **named) as linked,
    ):
        wait_for(writer, reader, linked)
        yield writer, reader, linked


def test_an_engine_answers_its_first_prompt_from_pages_of_another_engine(engines: Engines) -> None:
    """All whole pages come from storage; tokens and log probabilities are those of the writer."""
    writer, reader, _ = engines
    seeds = iter((1, 11, 21))

    def story(_: float) -> tuple[dict[str, Any], dict[str, Any]]:
        ids = a_prompt(next(seeds), PROMPT_TOKENS)
        computed = writer.ask({"input_ids": ids})
        # SGLang stores in the background: the pages are there once the writer itself reads them
        # back.
        wait_until(
            lambda: from_storage(writer.ask({"input_ids": ids, "flush": True})) == STORED_TOKENS,
            "the writer's pages are stored",
        )
        return computed, reader.ask({"input_ids": ids})

    # A machine that is paused for a moment makes misses of a prompt's pages: then the next one.
    computed, answered = paced(story, lambda reported: from_storage(reported[1]) == STORED_TOKENS)

    assert from_storage(computed) == 0
    assert answered["cached"]["storage"] == STORED_TOKENS
    assert answered["cached"]["device"] == answered["cached"]["host"] == 0
    assert answered["tokens"] == computed["tokens"]
    assert answered["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-5)


def test_another_prompt_is_computed_and_answered_differently(engines: Engines) -> None:
    """The model's answers do depend on the prompt, so equal answers above mean something."""
    _, reader, _ = engines

    prompts = [a_prompt(seed, PROMPT_TOKENS) for seed in (2, 3)]
    replies = [reader.ask({"input_ids": ids}) for ids in prompts]

    assert [from_storage(reply) for reply in replies] == [0, 0]
    assert replies[0]["tokens"] != replies[1]["tokens"]


def test_an_engine_without_a_host_tier_answers_from_what_it_stored(engines: Engines) -> None:
    """All whole pages come back to a device that has forgotten them; the answer is the same one."""
    writer, _, linked = engines
    seeds = iter((4, 14, 24))

    def story(_: float) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
        ids = a_prompt(next(seeds), PROMPT_TOKENS)
        computed = linked.ask({"input_ids": ids})
        wait_until(
            lambda: from_linker(linked.ask({"input_ids": ids, "flush": True})) == STORED_TOKENS,
            "the pages come back",
        )
        return ids, computed, linked.ask({"input_ids": ids, "flush": True})

    ids, computed, answered = paced(
        story, lambda reported: from_linker(reported[2]) == STORED_TOKENS
    )
    elsewhere = writer.ask({"input_ids": ids})

    assert from_linker(computed) == 0
    assert from_linker(answered) == STORED_TOKENS
    assert answered["cached"]["device"] == 0
    for reply in (answered, elsewhere):
        assert reply["tokens"] == computed["tokens"]
        assert reply["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec(plugin.HINTS) is None, reason="has no kv_hints")
@pytest.mark.parametrize("backend", ["peercache", f"{LINKER}peercache"])
def test_pages_of_a_hinted_request_are_retained(backend: str, tmp_path: Path) -> None:
    """By an engine with and one without a host tier; the answer is the one without hints."""
    model = write_tiny_llama(tmp_path / "tiny-llama")
    named = {"PYTHONPATH_FIRST": str(installed(tmp_path / "installed"))}
    ids = a_prompt(7, PROMPT_TOKENS)
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    payload = {"include_current_request": True, "execute_at": "request_completion"}
    hints = {
        "protocol_version": "0.1",
        "message_id": "m",
        "actions": [{**action, "payload": {**payload, "ttl_seconds": 600}}],
    }
    with (
        StandaloneNode(tmp_path) as node,
        start_engine(model, node, {}, backend=backend, **named) as engine,
        Client.open(home=node.home) as client,
    ):
        wait_for(engine)
        hinted = engine.ask({"input_ids": ids, "more": {"kv_hints": hints}})
        wait_until(lambda: int(client.stats()["home_pool_bytes_retained"]) > 0)
        wait_until(
            lambda: (
                client.stats()["home_pool_bytes_retained"] == client.stats()["home_pool_bytes_used"]
            )
        )
        plain = engine.ask({"input_ids": ids, "flush": True})

    assert plain["tokens"] == hinted["tokens"]
    assert plain["logprobs"] == pytest.approx(hinted["logprobs"], abs=1e-5)
