"""Engines without a host tier that die in mid-layer, over real nodes.

They load or store through their linker and kill themselves (linked_process.py). What they leave is
whole or missing for another engine, at home with another node, and can be stored again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from peercache.client.client import Client
from tests.integration.processes import HERE, Child, StandaloneNode
from tests.integration.sglang_cache import SIDE
from tests.integration.sglang_linked import Linked
from tests.integration.sglang_rig import prompt
from tests.pace import TIMEOUT_S, no_peer_is_taken_for_hung

# Another process imports SGLang.
pytestmark = pytest.mark.slow

PAGES = 7
KINDS = ("mha", *SIDE)
_seeds = itertools.count(1)
Nodes = tuple[StandaloneNode, StandaloneNode]


@pytest.fixture(scope="module")
def dying() -> Iterator[Child]:
    """Return the process whose forks die."""
    with Child(str(HERE / "linked_process.py")) as child:
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


@pytest.fixture
def open_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that builds an engine's cache, at home with a node."""
    no_peer_is_taken_for_hung(monkeypatch)
    opened: list[Linked] = []

    def build(kind: str, node: StandaloneNode, **more: Any) -> Linked:
        settings = {"home": node.home, "op_timeout_s": TIMEOUT_S, "exists_timeout_s": TIMEOUT_S}
        opened.append(Linked(Client.open, kind, {**settings, **more}))
        return opened[-1]

    yield build
    for each in reversed(opened):
        each.close()


def die(dying: Child, node: StandaloneNode, kind: str, at: str, seed: int) -> list[int]:
    """Have an engine die at a point; return its prompt."""
    tokens = prompt(PAGES, seed)
    request = {"home": node.home, "kind": kind, "at": at, "tokens": tokens, "seed": seed}
    assert dying.ask(request) == {"died": True}
    return tokens


@pytest.mark.parametrize("fabric", ["shm", "tcp"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_dies_while_it_loads_takes_nothing_along(
    dying: Child, nodes: Nodes, open_engine: Any, kind: str, fabric: str
) -> None:
    """Some layers were on its device. All pages are there for the next engine."""
    seed = next(_seeds)
    writer = open_engine(kind, nodes[0])
    writer.compute(prompt(PAGES, seed), seed)

    tokens = die(dying, nodes[1], kind, "load", seed)

    assert open_engine(kind, nodes[1], fabric=fabric).restore(tokens, seed) == (PAGES, True)


@pytest.mark.parametrize("at", ["gather", "commit"])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_an_engine_that_died_while_it_stored_are_computed_and_stored_again(
    dying: Child, nodes: Nodes, open_engine: Any, kind: str, at: str
) -> None:
    """It had written a part of a page, or all bytes and no Commit: another engine finds none."""
    seed = next(_seeds)

    tokens = die(dying, nodes[0], kind, at, seed)

    reader, writer = open_engine(kind, nodes[1]), open_engine(kind, nodes[0])
    assert reader.restore(tokens, seed) == (0, True)
    writer.compute(tokens, seed)
    assert reader.restore(tokens, seed) == (PAGES, True)
