"""What a router is told of the pages of a real SGLang cache, as its home node has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from peercache.errors import ConfigError
from peercache.sglang import PeerCacheStore
from tests.integration.sglang_pools import PAGE_TOKENS
from tests.integration.sglang_rig import Rig, Shape, get_storage_hash_str, prompt
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, keys_of, pages_of

PAGES = 4
ANY = "tcp://127.0.0.1:*"


@contextmanager
def told_by(store: Any) -> Iterator[Callable[[], set[str]]]:
    """Yield what returns the objects that a router would take for stored by now."""
    known: set[str] = set()
    following = -1
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(store._objects.endpoint)

        def now() -> set[str]:
            nonlocal following
            while socket.poll(50):
                _, sequence, payload = socket.recv_multipart()
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
def test_a_router_is_told_what_the_home_node_has_of_an_engine(
    kind: str, suffixes: tuple[str, ...]
) -> None:
    """From the first set on, for a reader that comes late, and after another client's removal."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {"home": node.ready["home"], "cluster": cluster.name, "object_events": ANY}
        rig = Rig(Shape(kind=kind), extra, PeerCacheStore)
        try:
            first, second = prompt(PAGES, 1), prompt(PAGES, 2)
            with told_by(rig.store) as told:
                assert rig.back_up(first, 1) == PAGES
                wait_until(lambda: told() == objects_of(first, *suffixes))

                assert rig.back_up(second, 2) == PAGES
                both = objects_of(first, *suffixes) | objects_of(second, *suffixes)
                wait_until(lambda: told() == both)
                with told_by(rig.store) as late:
                    wait_until(lambda: late() == both)

                rig.store.clear()
                wait_until(lambda: told() == set())
        finally:
            rig.close()


def test_an_engine_that_comes_later_tells_of_pages_that_it_asks_for() -> None:
    """Its node has held them since before; only a call can tell it what they are called."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {"home": node.ready["home"], "cluster": cluster.name, "object_events": ANY}
        tokens = prompt(PAGES, 3)
        rig = Rig(Shape(), extra, PeerCacheStore)
        assert rig.back_up(tokens, 3) == PAGES
        rig.close()

        again = Rig(Shape(), extra, PeerCacheStore)
        try:
            with told_by(again.store) as told:
                other = cluster.client(node)
                others = keys_of("other", 2)
                assert all(other.batch_set(others, pages_of(others)))
                assert told() == set()

                assert again.prefetch(tokens, 3) == (PAGES, True)
                wait_until(lambda: told() == objects_of(tokens, "0_k", "0_v"))

                # A node that ends holds nothing.
                node.kill()
                wait_until(lambda: told() == set())
        finally:
            again.close()


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
    other: Shape, first: Shape, suffixes: tuple[str, ...]
) -> None:
    """Of the objects of all ranks and stages: a router takes one endpoint of an engine."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {"home": node.ready["home"], "cluster": cluster.name, "object_events": ANY}
        with closing(Rig(other, extra, PeerCacheStore)) as silent:
            assert silent.store._objects is None
            tokens = prompt(1, 4)
            with closing(Rig(first, extra, PeerCacheStore)) as rig, told_by(rig.store) as told:
                assert rig.back_up(tokens, 4) == 1
                wait_until(lambda: told() == objects_of(tokens, *suffixes))


def test_an_endpoint_that_is_taken_is_named() -> None:
    """At the start, and the client that was opened is closed."""
    with LocalCluster() as cluster, zmq.Context() as context, context.socket(zmq.PUB) as taken:
        node = cluster.start(pool="64MiB")
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        extra = {
            "home": node.ready["home"], "cluster": cluster.name,
            "object_events": f"tcp://127.0.0.1:{port}",
        }  # fmt: skip

        with pytest.raises(ConfigError, match=r"object_events.*Address already in use"):
            Rig(Shape(), extra, PeerCacheStore)


def test_an_endpoint_beyond_loopback_wants_readers() -> None:
    """The error names the setting; with it the engine starts."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {
            "home": node.ready["home"], "cluster": cluster.name, "object_events": "tcp://0.0.0.0:*",
        }  # fmt: skip

        with pytest.raises(ConfigError, match=r"event_readers.*open to other hosts"):
            Rig(Shape(), extra, PeerCacheStore)
        Rig(Shape(), {**extra, "event_readers": "203.0.113.9"}, PeerCacheStore).close()


def test_pages_of_other_weights_count_no_longer() -> None:
    """Their keys are of another namespace, though SGLang's hashes are the same."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {"home": node.ready["home"], "cluster": cluster.name, "object_events": ANY}
        rig = Rig(Shape(), extra, PeerCacheStore)
        try:
            tokens = prompt(PAGES, 5)
            with told_by(rig.store) as told:
                assert rig.back_up(tokens, 5) == PAGES
                wait_until(lambda: told() == objects_of(tokens, "0_k", "0_v"))

                rig.store._objects.name(["ab" * 32], bytes(16))
                wait_until(lambda: told() == set())
        finally:
            rig.close()


def test_a_call_that_outlasts_the_close_says_nothing() -> None:
    """SGLang's threads may be within a call when the storage is detached."""
    with LocalCluster() as cluster:
        node = cluster.start(pool="64MiB")
        extra = {"home": node.ready["home"], "cluster": cluster.name}
        rig = Rig(Shape(), {**extra, "object_events": ANY}, PeerCacheStore)
        events = rig.store._objects
        with closing(rig), closing(Rig(Shape(), extra, PeerCacheStore)) as other:
            assert rig.back_up(prompt(1, 6), 6) == 1
            tokens = prompt(1, 7)
            assert other.back_up(tokens, 7) == 1
            wait_until(lambda: len(events._index.pages("home")) == 2)
        events.name([get_storage_hash_str(tokens, None)], events._digest)
