"""SGLang's own publisher of KV events, followed by the prefix index, and read by our codec."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peercache.config.entries import EngineEvents
from peercache.events.blocks import decode
from peercache.manager.engine_follower import EngineFollower
from peercache.manager.gpu_blocks import KNOWN, GpuBlocks, OnGpu
from tests.pace import wait_until

kv_events = pytest.importorskip("sglang.srt.disaggregation.kv_events")

PROMPT = np.arange(8, dtype=np.uint32)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Any]:
    """Return a publisher as `--kv-events-config` makes it."""
    config = {
        "publisher": "zmq",
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    publisher = kv_events.EventPublisherFactory.create(json.dumps(config))
    yield publisher
    publisher.shutdown()


def stored(hashes: list[int], parent: int | None, **more: Any) -> Any:
    """Return SGLang's event of blocks of two tokens."""
    begin = 2 * (hashes[0] - 1)
    tokens = PROMPT[begin : begin + 2 * len(hashes)].tolist()
    return kv_events.BlockStored(hashes, parent, tokens, 2, None, **more)


def batch(*events: Any) -> Any:
    return kv_events.KVEventBatch(time.time(), list(events))


def follow(tmp_path: Path) -> tuple[EngineFollower, Callable[[], OnGpu]]:
    """Follow the publisher; return what its GPU has of the prompt."""
    blocks = GpuBlocks(["gpu"])
    engine = EngineEvents("gpu", f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    return EngineFollower([engine], blocks), lambda: blocks.find(PROMPT)[0]


def test_the_index_knows_what_sglang_has_on_its_gpu(publisher: Any, tmp_path: Path) -> None:
    """From before it was asked to follow; copies in host memory do not count."""
    publisher.publish(batch(stored([1, 2], None, medium=kv_events.StorageMedium.GPU)))
    follower, there = follow(tmp_path)
    with closing(follower):
        wait_until(lambda: there().state == KNOWN and there().prefix_tokens == 4)

        publisher.publish(batch(stored([3], 2), stored([4], 3, medium=kv_events.StorageMedium.CPU)))
        wait_until(lambda: there().prefix_tokens == 6)
        publisher.publish(batch(kv_events.BlockRemoved([2], kv_events.StorageMedium.GPU)))
        wait_until(lambda: there().prefix_tokens == 2)
        publisher.publish(batch(kv_events.AllBlocksCleared()))
        wait_until(lambda: there().prefix_tokens == 0)
        assert there().state == KNOWN


def test_a_salted_block_is_not_reported_for_its_tokens(publisher: Any, tmp_path: Path) -> None:
    """Another tenant's prompt has the same tokens, and none of its blocks."""
    publisher.publish(batch(stored([1], None, cache_salt="tenant"), stored([2], None)))
    follower, there = follow(tmp_path)
    with closing(follower):
        wait_until(lambda: there().state == KNOWN and there().blocks == 2)
        assert there().prefix_tokens == 0


def test_every_event_of_sglang_is_read() -> None:
    """As its encoder writes them: none is skipped, and each field arrives."""
    import msgspec

    reported = batch(
        stored([1, 2], None, lora_name="adapter", cache_salt="s", session_id="x"),
        kv_events.BlockRemoved([1]),
        kv_events.AllBlocksCleared(),
    )
    read = decode(msgspec.msgpack.Encoder().encode(reported))

    assert read.skipped == ()
    first, removed, _ = read.events
    assert (first.hashes, first.tokens, first.lora) == ((1, 2), (0, 1, 2, 3), "adapter")
    assert all(first.extra)
    assert removed.hashes == (1,)
