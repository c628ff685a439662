"""Two engines' stores over real verbs: what one backs up, the other prefetches.

SGLang's own controllers, host pools and storage threads, with PeerCacheStore attached to each; node
A and the writer use one end of a cable, node B and the reader the other. Both engines are in this
process, because importing SGLang is most of what this takes.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rdma.links import received_bytes

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None,
        reason="needs SGLang: make test-rdma runs it where tests/integration has made its Python",
    ),
]

INTEGRATION = Path(__file__).parents[1] / "integration"
PAGES = 9
LEFT, RIGHT = "rxe1", "rxe2"
# One processor for two engines and two nodes: time is not what this states.
PATIENT = {"exists_timeout_s": 60.0, "op_timeout_s": 60.0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """The rig of SGLang's parts, and the store, imported with the stand-ins for a CPU in place."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.syspath_prepend(INTEGRATION / "cpu_engine")
        import host_copies

        host_copies.prepare()
        from tests.integration import sglang_rig

        yield sglang_rig


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """The name of a cluster, and the homes of its two nodes, one on each end of the cable."""
    from tests.system.nodes import LocalCluster

    with LocalCluster() as cluster:
        nodes = [
            cluster.start(device, pool="64MiB", flags=["--rdma-device-names", device])
            for device in (LEFT, RIGHT)
        ]
        for node in nodes:
            cluster.wait_for_members(node, 2)
        yield cluster.name, nodes[0].ready["home"], nodes[1].ready["home"]


@pytest.mark.parametrize(
    ("kind", "layout", "interface"),
    [
        ("mha", "layer_first", "v1"),
        ("mha", "page_first", "v1"),
        ("mha", "page_head", "v1"),
        ("mla", "page_first", "v1"),
        ("mha", "page_first", "v0"),
    ],
)
def test_pages_travel_between_engines_by_one_sided_reads(
    engine: Any, homes: tuple[str, str, str], kind: str, layout: str, interface: str
) -> None:
    """Bit for bit, over the cable: the reader may use nothing but rdma."""
    from peercache.sglang import PeerCacheStore

    cluster, left, right = homes
    model = f"{kind}-{layout}-{interface}"
    shape = engine.Shape(kind=kind, layout=layout, interface=interface, model=model)
    tokens, seed = engine.prompt(PAGES, len(model)), len(model)
    common = {**PATIENT, "cluster": cluster}
    writer = engine.Rig(shape, {**common, "home": left, "rdma_device_names": LEFT}, PeerCacheStore)
    stored = writer.back_up(tokens, seed)
    writer.close()
    before = received_bytes("rd2")

    reader = engine.Rig(
        shape,
        {**common, "home": right, "rdma_device_names": RIGHT, "fabric": "rdma"},
        PeerCacheStore,
    )
    try:
        loaded = reader.prefetch(tokens, seed)
    finally:
        reader.close()

    assert (stored, loaded) == (PAGES, (PAGES, True))
    # Nothing but packets of RDMA goes over that interface.
    assert received_bytes("rd2") - before > 10_000
