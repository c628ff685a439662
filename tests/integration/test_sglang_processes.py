"""Between two processes over real nodes: what one engine backs up, the other prefetches.

The writer is another process (store_process.py) whose home is node A; the reader is this process,
at home with node B. Both run SGLang's own controllers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peercache.sglang import PeerCacheStore
from tests.integration.processes import HERE, Child, StandaloneNode
from tests.integration.sglang_pools import EVERY_POOL
from tests.integration.sglang_rig import Rig, Shape, prompt
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within, no_peer_is_taken_for_hung, wait_until
from tests.system.nodes import free_port

PAGES = 9

PATIENT = {"exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S}
"""Deadlines for a machine that does other things as well: time is not what these tests state."""

Nodes = tuple[StandaloneNode, StandaloneNode]


@pytest.fixture(autouse=True)
def timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process wait for nodes that are slow because the machine is."""
    no_peer_is_taken_for_hung(monkeypatch)


@pytest.fixture(scope="module")
def writer() -> Iterator[Child]:
    """Return the process that writes; it takes a while to import SGLang."""
    with Child(str(HERE / "store_process.py")) as child:
        assert child.receive()["ready"]
        yield child


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Return two nodes of one cluster."""
    with (
        StandaloneNode(tmp_path_factory.mktemp("a")) as first,
        StandaloneNode(tmp_path_factory.mktemp("b"), discovery=first.control) as second,
    ):
        yield first, second


def travel(
    writer: Child,
    *,
    write: dict[str, Any],
    read: dict[str, Any],
    homes: tuple[dict[str, Any], dict[str, Any]],
    seed: int,
) -> tuple[int, tuple[int, bool]]:
    """Back up in the other process, prefetch in this one; return pages stored, pages and truth."""
    tokens = prompt(PAGES, seed)
    request = {"shape": write, "extra": {**PATIENT, **homes[0]}, "back_up": tokens, "seed": seed}
    stored = writer.ask(request)["stored"]
    reader = Rig(Shape(**read), {**PATIENT, **homes[1]}, PeerCacheStore)
    try:
        return stored, reader.prefetch(tokens, seed)
    finally:
        reader.close()


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
@pytest.mark.parametrize(("kind", "layout"), EVERY_POOL)
def test_pages_travel_between_processes_bit_for_bit(
    writer: Child, nodes: Nodes, kind: str, layout: str, fabric: str
) -> None:
    """Every pool and layout, over each fabric.

    Each interface and controller, and ranks, are in test_sglang_controllers.py: what they make of a
    page reaches a client in the same way.
    """
    shape = {"kind": kind, "layout": layout, "model": f"{kind}-{layout}"}
    homes = {"home": nodes[0].home}, {"home": nodes[1].home, "fabric": fabric}
    seed = hash_of(kind, layout, fabric)

    stored, loaded = travel(writer, write=shape, read=shape, homes=homes, seed=seed)

    assert (stored, loaded) == (PAGES, (PAGES, True))


def test_engines_that_embed_their_nodes_find_each_other(writer: Child) -> None:
    """With `embedded` each process runs one, and discovery_addr joins them."""
    port = free_port()
    common = {"embedded": True, "pool_size": "64MiB", "metrics_port": 0}
    homes = (
        {**common, "listen": f"127.0.0.1:{port}"},
        {**common, "listen": "127.0.0.1:0", "discovery_addr": f"127.0.0.1:{port}"},
    )
    shape = {"model": "embedded"}

    stored, loaded = travel(writer, write=shape, read=shape, homes=homes, seed=2)

    assert (stored, loaded) == (PAGES, (PAGES, True))


def test_a_killed_node_is_a_clean_miss_and_its_pages_can_be_set_again(
    writer: Child, tmp_path: Path
) -> None:
    """After SIGKILL of the holder no answer is wrong or late, and the cluster goes on.

    Over tcp, because over shm the reader's mapping keeps the dead node's memory, whose words still
    say that the bytes are right: those hits are true ones.
    """
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tokens = prompt(PAGES, seed=3)
    shape = {"model": "killed"}
    with (
        StandaloneNode(tmp_path / "b") as survivor,
        StandaloneNode(tmp_path / "a", discovery=survivor.control) as holder,
    ):
        reader = Rig(
            Shape(**shape), {**PATIENT, "home": survivor.home, "fabric": "tcp"}, PeerCacheStore
        )
        request = {
            "shape": shape,
            "extra": {**PATIENT, "home": holder.home},
            "back_up": tokens,
            "seed": 3,
        }
        stored = writer.ask(request)["stored"]
        before = reader.prefetch(tokens, seed=3)

        holder.kill()
        begun = time.monotonic()
        after = reader.prefetch(tokens, seed=3)
        took_s = time.monotonic() - begun
        wait_until(lambda: reader.back_up(tokens, seed=4) == PAGES, "the pages are set again")
        again = reader.prefetch(tokens, seed=4)
        reader.close()

    assert (stored, before) == (PAGES, (PAGES, True))
    assert after == (0, True)
    assert_within(took_s, PROMPT_S)
    assert again == (PAGES, True)


def hash_of(*words: str) -> int:
    """Return a seed that is the same in every process."""
    return sum(ord(letter) * 31**place for place, letter in enumerate("-".join(words))) % 2**31
