"""Two whole SGLang engines: the second answers its first prompt from what the first computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.engine_process import PAGE_TOKENS
from tests.integration.engines import DYNAMIC, a_prompt, from_storage, start_engine, wait_for
from tests.integration.patched import patched_sglang
from tests.integration.processes import Child, StandaloneNode
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import paced, wait_until

# Each engine is three processes that import SGLang: as long as all other SGLang tests together.
pytestmark = pytest.mark.slow

PROMPT_TOKENS = 1000
STORED_TOKENS = PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS

Engines = tuple[Child, Child]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Return two engines on two nodes of one cluster; they start at the same time.

    The writer's SGLang has the backend built in, and uses host buffers in place; the reader's loads
    it dynamically, with the older interface.
    """
    folder = tmp_path_factory.mktemp("engines")
    model = write_tiny_llama(folder / "tiny-llama")
    patched = patched_sglang(folder)
    with (
        StandaloneNode(tmp_path_factory.mktemp("a")) as first,
        StandaloneNode(tmp_path_factory.mktemp("b"), discovery=first.control) as second,
        start_engine(
            model, first, {}, backend="peercache", PYTHONPATH_FIRST=str(patched)
        ) as writer,
        start_engine(model, second, {**DYNAMIC, "interface_v1": 0}) as reader,
    ):
        wait_for(writer, reader)
        yield writer, reader


def test_an_engine_answers_its_first_prompt_from_pages_of_another_engine(engines: Engines) -> None:
    """All whole pages come from storage; tokens and log probabilities are those of the writer."""
    writer, reader = engines
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
    computed, answered = paced(story, lambda told: from_storage(told[1]) == STORED_TOKENS)

    assert from_storage(computed) == 0
    assert answered["cached"]["storage"] == STORED_TOKENS
    assert answered["cached"]["device"] == answered["cached"]["host"] == 0
    assert answered["tokens"] == computed["tokens"]
    assert answered["logprobs"] == pytest.approx(computed["logprobs"], abs=1e-5)


def test_another_prompt_is_computed_and_answered_differently(engines: Engines) -> None:
    """The model's answers do depend on the prompt, so equal answers above mean something."""
    _, reader = engines

    replies = [reader.ask({"input_ids": a_prompt(seed, PROMPT_TOKENS)}) for seed in (2, 3)]

    assert [from_storage(reply) for reply in replies] == [0, 0]
    assert replies[0]["tokens"] != replies[1]["tokens"]
