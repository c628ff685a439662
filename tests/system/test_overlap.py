"""Where a prompt is: real nodes, asked by a client and over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import Request, urlopen

import attrs
import msgspec
import numpy as np
import pytest
import schemathesis
import zmq
from hypothesis import HealthCheck, assume, given, settings

from peercache import Client
from peercache.client.following import follow_cluster
from peercache.client.operator import Target
from peercache.connector import ConnectorMetadata, RemoteKVConnector, cluster_store
from peercache.content.chain import Chain, in_namespace
from peercache.events.following import ClusterFollower, Index
from peercache.manager.remote import RemoteKVManager
from peercache.model.records import ON_DISK, RESIDENT
from tests.pace import wait_until
from tests.system.nodes import CALL_S, LocalCluster, free_port, keys_of, page_of, pages_of

PAGES = 24
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "ask-where-a-prefix-lies.md"


@pytest.mark.slow
def test_a_client_learns_which_nodes_hold_a_prompt() -> None:
    """Of three nodes two hold parts of it, and one of those dies."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(3)
        keys = keys_of("overlap", PAGES)
        clients = [cluster.client(node) for node in nodes]
        assert all(clients[0].batch_set(keys[:16], pages_of(keys[:16])))
        assert all(clients[1].batch_set(keys[8:20], pages_of(keys[8:20])))
        holders = [int(node.ready["node"], 16) for node in nodes]

        wait_until(lambda: clients[2].overlap(keys).whole)
        for client in clients:
            reported = client.overlap(keys)
            runs = dict(zip(reported.holders, reported.run().tolist(), strict=True))
            pages = dict(zip(reported.holders, reported.pages(RESIDENT).tolist(), strict=True))
            assert runs == {holders[0]: 16, holders[1]: 0}
            assert pages == {holders[0]: 16, holders[1]: 12}
            assert (reported.stored(), reported.stored(ON_DISK)) == (20, 0)

        nodes[0].kill()
        wait_until(lambda: clients[2].overlap(keys).holders == (holders[1],))
        assert clients[2].overlap(keys).stored() == 0


@pytest.mark.slow
def test_any_node_answers_over_http_as_its_description_specifies() -> None:
    """Two real nodes and an engine's events: right answers; then generated questions of all kinds.

    The pages are stored under the keys that a prompt's tokens have in the client's namespace.
    """
    tokens, chain = list(range(1000, 1000 + 64 * 8)), Chain("llama", "bfloat16", 64)
    with publishing() as (engine, publish), LocalCluster() as cluster:
        flags = ["--engine-events", f"gpu={engine}", "--metrics-port"]
        nodes = [cluster.start(name, flags=[*flags, free_port()]) for name in ("one", "two")]
        client = cluster.client(nodes[0])
        named = in_namespace(chain.keys(tokens), client.namespace.digest())
        pages = [page_of(f"{at}") for at in range(len(named))]
        assert all(client.batch_set_from(named[:6], _segments(pages[:6])))

        question = {"tokens": tokens, "model": "llama", "dtype": "bf16", "page_tokens": 64}
        roots = [f"http://{node.ready['http']}" for node in nodes]
        for root in roots:
            wait_until(lambda root=root: _post(root, question)["whole"])
            reported = _post(root, question)
            assert (reported["pages"], reported["stored_tokens"], reported["memory_pages"]) == (
                8,
                6 * 64,
                6,
            )
            assert [node["node"] for node in reported["nodes"]] == [nodes[0].ready["control"]]
        publish(tokens[:128], 16)
        for root in roots:
            wait_until(
                lambda root=root: _post(root, question)["engines"][0]["prefix_tokens"] == 128
            )

        with RemoteKVManager(client) as manager:
            found = manager.find_tokens(np.array(tokens), chain)
        assert (found.stored_tokens, found.nodes[0].node) == (6 * 64, nodes[0].ready["control"])
        _check_generated(roots[1])


def test_what_a_connector_has_stored_is_found_in_its_namespace() -> None:
    """As the page for routers shows: over HTTP, in Python, and in an index of what nodes hold."""
    tokens = list(range(1000, 1000 + 64 * 3))
    pages = np.ones((3, 4096), np.uint8)
    with LocalCluster() as cluster:
        node = cluster.start("one", flags=["--metrics-port", free_port()])
        settings = {"home": node.ready["home"], "cluster": cluster.name}
        metadata = ConnectorMetadata(
            model="llama-3-8b", dtype="bfloat16", page_tokens=64, namespace="team-a",
            store=cluster_store(**settings),
        )  # fmt: skip
        connector = RemoteKVConnector(metadata)
        buffers = {
            "data_ptrs": [pages.ctypes.data],
            "data_lens": [pages.nbytes],
            "item_lens": [4096],
        }
        connector.register_kv_buffers(SimpleNamespace(**{f"kv_{k}": v for k, v in buffers.items()}))
        mapping = [(at, slice(64 * at, 64 * at + 64)) for at in range(3)]
        assert connector.store_kv_async("r", mapping, tokens)[0].result(CALL_S) == 192

        question = {
            "tokens": tokens, "model": "llama-3-8b", "dtype": "bfloat16", "page_tokens": 64,
            "namespace": attrs.asdict(metadata.space()),
        }  # fmt: skip
        shown = re.search(r'"namespace": (\{.*?\})', PAGE.read_text(), re.DOTALL)
        assert shown is not None
        for namespace in (question["namespace"], json.loads(shown[1])):
            reported = _post(f"http://{node.ready['http']}", {**question, "namespace": namespace})
            assert (reported["stored_tokens"], reported["nodes"][0]["prefix_tokens"]) == (192, 192)

        with (
            Client.open(namespace=metadata.space(), **settings) as client,
            RemoteKVManager(client) as manager,
        ):
            assert manager.find_tokens(tokens, metadata.chain()).stored_tokens == 192

        index = Index()
        keys = in_namespace(metadata.chain().keys(tokens), metadata.space().digest())
        with follow_cluster(Target.of(at=node.ready["control"], cluster=cluster.name)) as follower:
            wait_until(lambda: _taken(index, follower) == 3)
        assert index.prefix(index.nodes()[0], keys) == 3
        connector.close()


def _taken(index: Index, follower: ClusterFollower) -> int:
    if (batch := follower.next(0.2)) is not None:
        index.apply(batch)
    return len(index)


def _on_gpu(reported: dict[str, Any]) -> int:
    tokens: int = reported["engines"][0]["prefix_tokens"]
    return tokens


def _segments(pages: list[Any]) -> list[list[tuple[int, int]]]:
    return [[(page.__array_interface__["data"][0], page.nbytes)] for page in pages]


def _check_generated(root: str) -> None:
    """Send what the description allows, and what it forbids; judge each answer by it."""
    schema = schemathesis.openapi.from_url(f"{root}/api/v1/prefix/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode is schemathesis.GenerationMode.NEGATIVE and operation.method == "get":
                continue  # It has nothing that could be wrong.

            @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                # For JSON Schema 1.0 is an integer. No client writes a token so, and the node
                # refuses it.
                assume(not _has_float(case.body))
                case.call_and_validate()

            check()


def _has_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_float, value))
    return isinstance(value, float)


def _post(root: str, question: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(question).encode()
    asked = Request(
        f"{root}/api/v1/prefix/tokens", data=body, headers={"content-type": "application/json"}
    )
    with urlopen(asked, timeout=10) as answer:
        reported: dict[str, Any] = json.load(answer)
    return reported


@contextmanager
def publishing() -> Iterator[tuple[str, Callable[[list[int], int], None]]]:
    """Publish KV events as an engine does; give its endpoint, and what stores a prompt's blocks."""
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"

    def publish(tokens: list[int], block: int) -> None:
        hashes = list(range(1, len(tokens) // block + 1))
        event = ["BlockStored", hashes, None, tokens, block]
        payload = msgspec.msgpack.encode([0.0, [event]])
        socket.send_multipart([b"", bytes(8), payload])

    try:
        yield endpoint, publish
    finally:
        context.destroy(0)
