"""What a router is notified of the pages of a real SGLang cache, as its home node has them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from peercache import Client
from peercache.errors import ConfigError
from peercache.sglang import PeerCacheStore, object_events
from tests.integration.sglang_pools import PAGE_TOKENS
from tests.integration.sglang_rig import Rig, Shape, get_storage_hash_str, prompt
from tests.pace import TIMEOUT_S, timeout, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, free_port, keys_of, pages_of

__all__ = ["timeout"]

PAGES = 4
PATIENT = {"exists_timeout_s": TIMEOUT_S, "op_timeout_s": TIMEOUT_S}


@pytest.fixture
def node() -> Iterator[NodeProcess]:
    """A node that publishes nothing itself."""
    with LocalCluster() as cluster:
        yield cluster.start(pool="64MiB")


class Engines:
    """Engines at a node, each with an endpoint for its object events."""

    def __init__(self, node: NodeProcess, stack: ExitStack) -> None:
        """Close them with the stack."""
        self._node, self._stack = node, stack

    def open(self, shape: Shape | None = None, **extra: Any) -> tuple[Rig, str]:
        """Open one; return it, and its endpoint."""
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        at = {"home": self._node.ready["home"], "cluster": self._node.cluster, **PATIENT}
        rig = Rig(shape or Shape(), {**at, "object_events": endpoint, **extra}, PeerCacheStore)
        self._stack.enter_context(closing(rig))
        return rig, endpoint


@pytest.fixture
def engines(node: NodeProcess) -> Iterator[Engines]:
    """What opens engines at the node."""
    with ExitStack() as stack:
        yield Engines(node, stack)


@contextmanager
def stored_at(endpoint: str) -> Iterator[Callable[[], set[str]]]:
    """Yield what returns the objects that a router would take for stored by now."""
    known: set[str] = set()
    following = -1
    with zmq.Context() as context, context.socket(zmq.SUB) as reader:
        reader.subscribe(b"")
        reader.connect(endpoint)

        def now() -> set[str]:
            nonlocal following
            while reader.poll(50):
                _, sequence, payload = reader.recv_multipart()
                number = int.from_bytes(sequence, "big")
                if number != following:
                    known.clear()
                following = number + 1
                for event in msgspec.msgpack.decode(payload)[1]:
                    is_stored = event["event_type"] == "stored"
                    (known.add if is_stored else known.discard)(event["object_key"])
            return known

        yield now


def objects_of(tokens: list[int], *suffixes: str) -> set[str]:
    """Return the names that SGLang's Mooncake store would give to the pages of a prompt."""
    names, prior = set(), None
    for begin in range(0, len(tokens), PAGE_TOKENS):
        prior = get_storage_hash_str(tokens[begin : begin + PAGE_TOKENS], prior)
        names |= {f"tiny-model_{prior}_{suffix}" for suffix in suffixes}
    return names


@pytest.mark.parametrize(
    ("kind", "suffixes"), [("mha", ("0_k", "0_v")), ("mla", ("_k",))], ids=["mha", "mla"]
)
def test_a_router_is_notified_of_what_the_home_node_has_of_an_engine(
    engines: Engines, kind: str, suffixes: tuple[str, ...]
) -> None:
    """From the first set on, for a reader that comes late, and after another client's removal."""
    rig, endpoint = engines.open(Shape(kind=kind))
    first, second = prompt(PAGES, 1), prompt(PAGES, 2)
    with stored_at(endpoint) as stored:
        assert rig.back_up(first, 1) == PAGES
        wait_until(lambda: stored() == objects_of(first, *suffixes))

        assert rig.back_up(second, 2) == PAGES
        both = objects_of(first, *suffixes) | objects_of(second, *suffixes)
        wait_until(lambda: stored() == both)
        with stored_at(endpoint) as late:
            wait_until(lambda: late() == both)

        rig.store.clear()
        wait_until(lambda: stored() == set())


def test_an_engine_that_comes_later_reports_pages_that_it_asks_for(
    engines: Engines, node: NodeProcess
) -> None:
    """Its node has held them since before; only a call can show it what they are called."""
    tokens = prompt(PAGES, 3)
    rig, _ = engines.open()
    assert rig.back_up(tokens, 3) == PAGES
    rig.store.close()

    again, endpoint = engines.open()
    with stored_at(endpoint) as stored:
        others = keys_of("other", 2)
        with Client.open(cluster=node.cluster, home=node.ready["home"]) as other:
            wait_until(lambda: all(other.batch_set(others, pages_of(others))))
        assert stored() == set()

        assert again.prefetch(tokens, 3) == (PAGES, True)
        wait_until(lambda: stored() == objects_of(tokens, "0_k", "0_v"))

        # A node that ends holds nothing.
        node.kill()
        wait_until(lambda: stored() == set())


@pytest.mark.parametrize(
    ("other", "first", "suffixes"),
    [
        (Shape(tp_rank=1, tp_size=2), Shape(tp_size=2), ("0_k", "0_v", "1_k", "1_v")),
        (Shape(pp_rank=1, pp_size=2), Shape(pp_size=2), ("0_0_k", "0_0_v", "0_1_k", "0_1_v")),
        (
            Shape(kind="mla", pp_rank=2, pp_size=3), Shape(kind="mla", pp_size=3),
            ("0_k", "1_k", "2_k"),
        ),
    ],
    ids=["ranks", "stages", "stages of mla"],
)  # fmt: skip
def test_only_the_first_rank_of_the_first_stage_publishes(
    engines: Engines, other: Shape, first: Shape, suffixes: tuple[str, ...]
) -> None:
    """Of the objects of all ranks and stages: a router takes one endpoint of an engine."""
    _, silent = engines.open(other)
    port = int(silent.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    tokens = prompt(1, 4)
    rig, endpoint = engines.open(first)
    with stored_at(endpoint) as stored:
        assert rig.back_up(tokens, 4) == 1
        wait_until(lambda: stored() == objects_of(tokens, *suffixes))


def test_an_endpoint_that_is_taken_is_named(engines: Engines) -> None:
    """At the start, and the client that was opened is closed."""
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")

        with pytest.raises(ConfigError, match=r"object_events.*Address already in use"):
            engines.open(object_events=f"tcp://127.0.0.1:{port}")


def test_an_endpoint_beyond_loopback_wants_readers(engines: Engines) -> None:
    """The error names the setting; with it the engine starts."""
    beyond = {"object_events": "tcp://0.0.0.0:*"}

    with pytest.raises(ConfigError, match=r"event_readers.*open to other hosts"):
        engines.open(**beyond)
    engines.open(**beyond, event_readers="203.0.113.9")


def test_a_router_gets_no_object_above_the_limit_of_its_index(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its index would clear itself: pages used longest ago are left out, and the log has it."""
    monkeypatch.setattr(object_events, "OBJECTS_MAX", 2 * PAGES + 2)
    rig, endpoint = engines.open()
    with stored_at(endpoint) as stored:
        assert rig.back_up(prompt(PAGES, 6), 6) == PAGES
        wait_until(lambda: stored() == objects_of(prompt(PAGES, 6), "0_k", "0_v"))
        assert rig.store.stats()["object_events"]["pages_left_out"] == 0
        assert "router_index_nearly_full" not in caplog.text

        assert rig.back_up(prompt(PAGES, 7), 7) == PAGES
        wait_until(lambda: stored() >= objects_of(prompt(PAGES, 7), "0_k", "0_v"))
        wait_until(lambda: len(stored()) == 2 * PAGES + 2)
        assert rig.store.stats()["object_events"] == {
            "objects": 2 * PAGES + 2, "objects_max": 2 * PAGES + 2, "pages_left_out": PAGES - 1,
        }  # fmt: skip
        assert "router_index_nearly_full" in caplog.text


def test_pages_of_other_weights_count_no_longer(engines: Engines) -> None:
    """Their keys are of another namespace, though SGLang's hashes are the same."""
    rig, endpoint = engines.open()
    tokens = prompt(PAGES, 5)
    with stored_at(endpoint) as stored:
        assert rig.back_up(tokens, 5) == PAGES
        wait_until(lambda: stored() == objects_of(tokens, "0_k", "0_v"))

        rig.store._objects.name(["ab" * 32], bytes(16))
        wait_until(lambda: stored() == set())


def test_a_call_that_outlasts_the_close_reports_nothing(engines: Engines) -> None:
    """SGLang's threads may be within a call when the storage is detached."""
    rig, _ = engines.open()
    events = rig.store._objects
    assert rig.back_up(prompt(1, 6), 6) == 1
    wait_until(lambda: events.status()["objects"] == 2)
    rig.store.close()

    events.name([get_storage_hash_str(prompt(1, 7), None)], bytes(16))
    assert events.status()["objects"] == 2
