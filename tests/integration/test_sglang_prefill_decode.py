"""Prefill and decode hosts share pages; a prefill host that dies costs misses, no more.

Prefill is SGLang's HybridCacheController in a process of its own; decode is SGLang's controller, or
its DecodeKVCacheOffloadManager, in this one. Each has a node of its own, and a third node owns part
of the directory. Whole engines in these roles are in test_sglang_disaggregation.py.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from peercache.fabric.shm import ShmFabric
from peercache.fabric.tcp import client
from peercache.model.reads import Fetched
from peercache.sglang import PeerCacheStore
from tests.integration import sglang_rig
from tests.integration.processes import HERE, Child, StandaloneNode
from tests.integration.sglang_decode import Decoder
from tests.integration.sglang_pools import DTYPE, LAYERS, PAGE_TOKENS
from tests.integration.sglang_rig import Rig, Shape, prompt
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, no_peer_is_taken_for_hung, wait_until

# Processes, and pages large enough to be caught on their way.
pytestmark = pytest.mark.slow

PAGES = 9
PROMPTS = 20
NAME = {"namespace": "roles"}
"""Both roles name it: the controllers of a test know no model."""

PATIENT = {**NAME, "exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S}

LONG_PAGES = 2048
"""A prompt of 128 Ki tokens in pages of 64."""

WIDE_PAGES = 128
"""The most that SGLang reads in one call."""
DEADLINE_S = 2.0
LATE_S = DEADLINE_S + PROMPT_S / 2


@attrs.define
class Hosts:
    """The nodes of a prefill host, a decode host and one more."""

    folder: Path
    decode: StandaloneNode
    other: StandaloneNode
    prefill: StandaloneNode

    def revive_prefill(self, number: int) -> None:
        """Undo a signal that the prefill host's node was sent.

        A killed node is started again where its clients expect it.
        """
        if number == signal.SIGSTOP:
            self.prefill.send_signal(signal.SIGCONT)
            return
        self.prefill.kill()
        self.prefill = StandaloneNode(
            self.folder, discovery=self.decode.control, pool_size="256MiB"
        )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Return three nodes of one cluster."""
    folder = tmp_path_factory.mktemp("prefill")
    with (
        StandaloneNode(tmp_path_factory.mktemp("decode"), pool_size="256MiB") as decode,
        StandaloneNode(tmp_path_factory.mktemp("other"), discovery=decode.control) as other,
    ):
        prefill = StandaloneNode(folder, discovery=decode.control, pool_size="256MiB")
        hosts = Hosts(folder, decode, other, prefill)
        yield hosts
        hosts.prefill.close()


@pytest.fixture(scope="module")
def prefill() -> Iterator[Child]:
    """Return the prefill process; it takes a while to import SGLang."""
    with Child(str(HERE / "store_process.py")) as child:
        assert child.receive()["ready"]
        yield child


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process wait for nodes that are slow because the machine is."""
    no_peer_is_taken_for_hung(monkeypatch)


def promised(rig: Rig, tokens: list[int]) -> int:
    """Return how many pages SGLang's scheduler thread would promise a decode request.

    It is SGLang's own function, which catches nothing, over a tree that knows no pages yet.
    """
    tree = SimpleNamespace(
        enable_storage=True,
        cache_controller=rig.controller,
        tree_core=SimpleNamespace(is_eagle=False),
        page_size=PAGE_TOKENS,
        prefetch_threshold=PAGE_TOKENS,
        _all_reduce_attn_groups=lambda *_: None,
    )
    return int(UnifiedRadixCache.query_storage_hit_length(tree, 0, tokens)) // PAGE_TOKENS


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
def test_decode_finds_at_once_what_prefill_has_stored(hosts: Hosts, fabric: str) -> None:
    """No prompt is asked for twice, though decode knows each as missing from before.

    Both are in this process: the way to another would give the directory time.
    """
    prefill = Rig(Shape(), {**PATIENT, "home": hosts.prefill.home}, PeerCacheStore)
    decode = Rig(Shape(), {**PATIENT, "home": hosts.decode.home, "fabric": fabric}, PeerCacheStore)
    first = 1000 if fabric == "tcp" else 2000
    seen = []

    for seed in range(first, first + PROMPTS):
        tokens = prompt(PAGES, seed)
        before = promised(decode, tokens)
        stored = prefill.back_up(tokens, seed)
        seen.append((before, stored, promised(decode, tokens), decode.prefetch(tokens, seed)))
    decode.close()
    prefill.close()

    assert seen == [(0, PAGES, PAGES, (PAGES, True))] * PROMPTS


def test_the_next_prefill_finds_the_output_that_decode_offloaded(
    hosts: Hosts, prefill: Child
) -> None:
    """SGLang's offload manager continues the hash chain of the prompt with the pages it fills."""
    seed, tokens = 3000, prompt(PAGES, 3000)
    given, output = tokens[: 4 * PAGE_TOKENS + 7], tokens[4 * PAGE_TOKENS + 7 :]
    facts = {"shape": {}, "extra": {**PATIENT, "home": hosts.prefill.home}, "seed": seed}
    prefill.ask({**facts, "back_up": tokens[: 4 * PAGE_TOKENS]})
    before = prefill.ask({**facts, "prefetch": tokens})

    with Decoder({**PATIENT, "home": hosts.decode.home}) as decode:
        left = decode.generate(given, output, seed)
    after = prefill.ask({**facts, "prefetch": tokens})

    assert before == {"loaded": 4, "right": True}
    assert left == 0
    # The last output token has no KV yet, so the last page is not full.
    assert after == {"loaded": PAGES - 1, "right": True}


def wide_pool(*_: Any) -> MHATokenToKVPool:
    """Return a device pool whose pages take a while on their way: 384 KiB each."""
    return MHATokenToKVPool(
        size=WIDE_PAGES * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=DTYPE,
        head_num=16,
        head_dim=128,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


class Strike:
    """Strikes the holder of a read once, from within the read, which cannot have ended before.

    Over tcp that is when a sixth of the pages has come: the rest is more than the kernel holds of
    one connection. Over shm it is when the pages are located and none is copied.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, fabric: str, strike: Callable[[], None]
    ) -> None:
        """Wait for the next read over this fabric in this process."""
        self.at_s: float | None = None
        self._strike = strike
        if fabric == "tcp":
            receive = client._receive

            def receive_in_two(descriptor: int, places: int, count: int, *arguments: int) -> int:
                # Fewer are the answer to a greeting.
                if self.at_s is not None or count < WIDE_PAGES:
                    return int(receive(descriptor, places, count, *arguments))
                taken = receive(descriptor, places, count // 6, *arguments)
                self._once()
                return int(taken)

            monkeypatch.setattr(client, "_receive", receive_in_two)
        else:
            read = ShmFabric.read

            def strike_then_read(fabric: ShmFabric, *arguments: Any) -> Fetched:
                self._once()
                return read(fabric, *arguments)

            monkeypatch.setattr(ShmFabric, "read", strike_then_read)

    def _once(self) -> None:
        if self.at_s is None:
            self._strike()
            self.at_s = time.monotonic()


@pytest.mark.parametrize("fabric", ["tcp", "shm"])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_prefill_host_that_dies_in_mid_read_costs_misses(
    hosts: Hosts, fabric: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends by its deadline, the pages before the end are right, decode recomputes.

    Over shm decode has the dead host's memory mapped, whose seals still say what is right: all of
    them are true hits. When the host is back, pages are shared again.
    """
    monkeypatch.setattr(sglang_rig, "device_pool", wide_pool)
    seed = 4000 + 100 * number + len(fabric)
    tokens, others = prompt(WIDE_PAGES, seed), prompt(WIDE_PAGES, seed + 1)
    common = {**PATIENT, "namespace": f"wide-{fabric}-{number}"}
    writer = Rig(Shape(), {**common, "home": hosts.prefill.home}, PeerCacheStore)
    reader = Rig(
        Shape(),
        {**common, "home": hosts.decode.home, "fabric": fabric, "op_timeout_s": DEADLINE_S},
        PeerCacheStore,
    )

    wait_until(lambda: writer.back_up(tokens, seed) == WIDE_PAGES, "prefill stores")
    wait_until(lambda: promised(reader, tokens) == WIDE_PAGES, "decode finds")
    with monkeypatch.context() as patches:
        strike = Strike(patches, fabric, lambda: hosts.prefill.send_signal(number))
        loaded, right = reader.prefetch(tokens, seed)
    ended_s = time.monotonic()

    assert strike.at_s is not None
    assert_within(ended_s - strike.at_s, LATE_S)
    assert right
    assert loaded == WIDE_PAGES if fabric == "shm" else 0 < loaded < WIDE_PAGES

    wait_until(lambda: reader.back_up(tokens, seed) == WIDE_PAGES, "decode stores what it computes")
    wait_until(lambda: reader.prefetch(tokens, seed) == (WIDE_PAGES, True), "decode reads that")
    hosts.revive_prefill(number)
    wait_until(lambda: writer.back_up(others, seed) == WIDE_PAGES, "prefill stores again")
    wait_until(lambda: promised(reader, others) == WIDE_PAGES, "pages are shared again")
    again = reader.prefetch(others, seed)
    writer.close()
    reader.close()

    assert again == (WIDE_PAGES, True)


def test_the_query_on_the_scheduler_thread_ends_within_its_deadline(tmp_path: Path) -> None:
    """SGLang asks there before it admits a decode request, and catches nothing."""
    folders = [tmp_path / name for name in ("home", "peer")]
    for folder in folders:
        folder.mkdir()
    chain = prompt(LONG_PAGES, seed=5000)
    steps = ("all is well", "peer stopped", "peer gone", "home stopped", "home gone", "closed")
    prompts = {step: prompt(PAGES, seed) for seed, step in enumerate(steps, 5001)}
    found: dict[str, list[int]] = {}

    with (
        StandaloneNode(folders[0]) as home,
        StandaloneNode(folders[1], discovery=home.control) as peer,
    ):
        writer = Rig(Shape(), {**PATIENT, "home": peer.home}, PeerCacheStore)
        assert all(writer.back_up(tokens, seed=1) == PAGES for tokens in prompts.values())
        writer.close()
        patient = {**PATIENT, "home": home.home, "exists_timeout_s": DEADLINE_S}
        decode = Rig(Shape(), patient, PeerCacheStore)
        strikes = {
            "all is well": lambda: None,
            "peer stopped": lambda: peer.send_signal(signal.SIGSTOP),
            "peer gone": peer.kill,
            "home stopped": lambda: home.send_signal(signal.SIGSTOP),
            "home gone": home.kill,
            "closed": decode.store.close,
        }
        for step in steps:
            strikes[step]()
            for tokens in (prompts["all is well"], prompts[step], chain):
                begun_s = time.monotonic()
                found.setdefault(step, []).append(promised(decode, tokens))
                took_s = time.monotonic() - begun_s
                assert_within(took_s, LATE_S, step)
        decode.close()

    assert found["all is well"] == [PAGES, PAGES, 0]
    assert found["closed"] == [0, 0, 0]
    assert all(pages in range(PAGES + 1) for each in found.values() for pages in each)
