"""SGLang's two roles, prefill and decode, as whole engines on two hosts of one cluster.

Both are SGLang's own on a CPU, with its transfer backend `mooncake_tcp`; Mooncake's transfer engine
has a stand-in (cpu_engine/mooncake). The decode engine has a radix cache with storage: it takes
what it finds of a prompt from there, and has prefill send the rest. The other decode cache of
SGLang, the offload manager, is in test_sglang_prefill_decode.py.
"""

from __future__ import annotations

import itertools
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.integration.engine_process import NEW_TOKENS, PAGE_TOKENS
from tests.integration.engines import a_prompt, from_storage, start_engine, wait_for
from tests.integration.processes import Child, StandaloneNode
from tests.integration.tiny_llama import write_tiny_llama
from tests.pace import PROMPT_S, assert_within, wait_until
from tests.system.nodes import free_port

# Two engines: as long as all other SGLang tests together.
pytestmark = pytest.mark.slow

PROMPT_TOKENS = 1020
PROMPT_PAGES = PROMPT_TOKENS // PAGE_TOKENS
OUTPUT_PAGES = (PROMPT_TOKENS + NEW_TOKENS - 1) // PAGE_TOKENS
"""Pages of prompt and output: the output fills the prompt's last one."""

ROUNDING = 0.1
"""Of log probabilities: decode sums bfloat16 in another order than prefill does."""

ATTEMPTS = 20


@attrs.define
class Pair:
    """A prefill and a decode engine, each at home with a node."""

    prefill: Child
    decode: Child
    prefill_folder: Path
    prefill_node: StandaloneNode
    decode_node: StandaloneNode
    metrics: str
    bootstrap_port: int
    rooms: Iterator[int] = attrs.field(factory=lambda: itertools.count(1))

    def ask(self, ids: list[int], **first: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what prefill and decode answer to a prompt.

        first: `flush` empties the caches of both before, `clear` the storage.
        """
        room = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self.rooms),
        }
        for engine in (self.prefill, self.decode):
            engine.send({"input_ids": ids, **first, "more": room})
        decoded = self.decode.receive()
        return self.prefill.receive(), decoded

    def hits(self) -> int:
        """Return how many pages the decode engine has read from storage."""
        with urllib.request.urlopen(self.metrics, timeout=PROMPT_S) as response:
            lines = response.read().decode().splitlines()
        counts = [
            line.split()[-1] for line in lines if line.startswith("peercache_pages_hit_total")
        ]
        return int(sum(map(float, counts)))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return the two engines; they start at the same time."""
    folder = tmp_path_factory.mktemp("roles")
    model = write_tiny_llama(folder / "tiny-llama")
    homes = [tmp_path_factory.mktemp(role) for role in ("prefill", "decode")]
    bootstrap_port, metrics_port = int(free_port()), int(free_port())
    with (
        StandaloneNode(homes[1], metrics_port=metrics_port) as decode_node,
        StandaloneNode(homes[0], discovery=decode_node.control) as prefill_node,
        start("prefill", model, prefill_node, bootstrap_port) as prefill,
        start(
            "decode",
            model,
            decode_node,
            bootstrap_port,
            disaggregation_decode_enable_radix_cache=True,
        ) as decode,
    ):
        wait_for(prefill, decode)
        metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        pair = Pair(prefill, decode, homes[0], prefill_node, decode_node, metrics, bootstrap_port)
        yield pair
        pair.prefill_node.close()


def start(
    role: str, model: Path, node: StandaloneNode, bootstrap_port: int, **options: Any
) -> Child:
    """Start an engine in a role."""
    options |= {
        "disaggregation_mode": role,
        "disaggregation_transfer_backend": "mooncake_tcp",
        "disaggregation_bootstrap_port": bootstrap_port,
    }
    return start_engine(model, node, options=options, SGLANG_HOST_IP="127.0.0.1")


def shared(pair: Pair, ids: list[int], tokens: list[int]) -> None:
    """Wait until both roles read a prompt from storage; the answer is the same each time.

    SGLang stores in the background, and a machine that is paused makes misses of a prompt's
    pages.
    """
    before = pair.hits()

    def is_shared() -> bool:
        prefilled, decoded = pair.ask(ids, flush=True)
        if "failed" in decoded:
            return False
        assert decoded["tokens"] == tokens
        return (
            from_storage(prefilled) == PROMPT_PAGES * PAGE_TOKENS
            and pair.hits() - before >= PROMPT_PAGES
        )

    wait_until(is_shared, "both roles read the prompt from storage")


def test_both_roles_take_a_prompt_from_storage(pair: Pair) -> None:
    """Decode reads the pages that prefill has set, and has prefill send what is left."""
    ids = a_prompt(1, PROMPT_TOKENS)

    _, computed = pair.ask(ids)

    shared(pair, ids, computed["tokens"])
    assert len(computed["tokens"]) == NEW_TOKENS


def test_the_next_prefill_finds_the_output_of_decode(pair: Pair) -> None:
    """The page that decode filled is prefill's prefix; tokens are those of a cold start."""
    ids = a_prompt(2, PROMPT_TOKENS)
    _, computed = pair.ask(ids)
    longer = [*ids, *computed["tokens"], *a_prompt(3, PROMPT_TOKENS)[:20]]
    replies: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def is_found() -> bool:
        prefilled, decoded = pair.ask(longer, flush=True)
        replies.append((prefilled, decoded))
        return "failed" not in decoded and from_storage(prefilled) == OUTPUT_PAGES * PAGE_TOKENS

    wait_until(is_found, "prefill finds the page of decode's output")
    cold, reference = pair.ask(longer, flush=True, clear=True)

    assert OUTPUT_PAGES == PROMPT_PAGES + 1
    assert from_storage(cold) == 0
    assert replies[-1][1]["tokens"] == reference["tokens"]
    assert replies[-1][1]["logprobs"] == pytest.approx(reference["logprobs"], abs=ROUNDING)


def test_tokens_stay_right_when_the_host_of_prefills_pages_hangs_dies_and_returns(
    pair: Pair,
) -> None:
    """Requests end; each is answered right or given up by SGLang, and answered when repeated."""
    ids = a_prompt(4, PROMPT_TOKENS)
    _, computed = pair.ask(ids)
    shared(pair, ids, computed["tokens"])

    pair.prefill_node.send_signal(signal.SIGSTOP)
    while_it_hangs = answered(pair, ids)
    pair.prefill_node.send_signal(signal.SIGCONT)
    pair.prefill_node.kill()
    while_it_is_gone = answered(pair, ids)
    pair.prefill_node = StandaloneNode(pair.prefill_folder, discovery=pair.decode_node.control)
    others = a_prompt(5, PROMPT_TOKENS)
    _, fresh = pair.ask(others)

    shared(pair, others, fresh["tokens"])
    assert while_it_hangs == while_it_is_gone == computed["tokens"]


def answered(pair: Pair, ids: list[int]) -> list[int]:
    """Return the tokens of a prompt, repeated as a router does it until decode answers."""
    for _ in range(ATTEMPTS):
        begun = time.monotonic()
        _, decoded = pair.ask(ids, flush=True)
        assert_within(time.monotonic() - begun, 2 * PROMPT_S)
        if "failed" not in decoded:
            return list(decoded["tokens"])
        assert "HiCache local restore failed" in decoded["failed"]
    raise AssertionError(f"decode gave a request up {ATTEMPTS} times")
