"""Engines that publish over ZMQ, followed by the real sockets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from peercache.config.entries import EngineEvents
from peercache.errors import ConfigError
from peercache.events.blocks import BlockStored
from peercache.events.publishing import BlockPublisher
from peercache.manager.engine_follower import EngineFollower
from peercache.manager.gpu_blocks import AWAY, KNOWN, UNKNOWN, GpuBlocks, OnGpu
from tests.pace import wait_until

zmq = pytest.importorskip("zmq")

END = (2**64 - 1).to_bytes(8, "big")


class Publisher:
    """Publishes as vLLM and SGLang do: three frames, and those that it kept over a router."""

    def __init__(self, folder: Path, *, begins_at: int = 0) -> None:
        self.context = zmq.Context()
        self.events = EngineEvents("e", f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self.number = begins_at
        self.sent: list[tuple[int, bytes]] = []
        self.out = self.context.socket(zmq.PUB)
        self.out.bind(self.events.endpoint)
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(self.events.replay)

    def publish(self, *events: Any, arrives: bool = True) -> None:
        payload = msgspec.msgpack.encode([0.5, list(events)])
        self.sent.append((self.number, payload))
        if arrives:
            self.out.send_multipart([b"", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    def serve_replay(self) -> None:
        """Answer what has been asked."""
        while self.router.poll(0):
            client, empty, first = self.router.recv_multipart()
            for number, payload in self.sent:
                if number >= int.from_bytes(first, "big"):
                    raw = number.to_bytes(8, "big")
                    self.router.send_multipart([client, empty, raw, payload])
            self.router.send_multipart([client, empty, END, b""])

    def close(self) -> None:
        self.context.destroy(0)


def block(at: int) -> list[Any]:
    return ["BlockStored", [at], at - 1 if at else None, [at, at], 2]


def state(blocks: GpuBlocks) -> OnGpu:
    return blocks.find(np.repeat(np.arange(9, dtype=np.uint32), 2))[0]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()


@pytest.mark.slow
def test_an_engine_that_lives_is_missed_dies_and_begins_again(
    publisher: Publisher, tmp_path: Path
) -> None:
    """Joined late, a gap, its death, and another process at its place: each time what it has."""
    publisher.publish(block(0), arrives=False)
    blocks = GpuBlocks(["e"])
    follower = EngineFollower([publisher.events], blocks)

    def has(state_wanted: str, tokens: int) -> bool:
        publisher.serve_replay()
        reported = state(blocks)
        return (reported.state, reported.prefix_tokens) == (state_wanted, tokens)

    wait_until(lambda: has(KNOWN, 2))
    publisher.publish(block(1))
    wait_until(lambda: has(KNOWN, 4))
    publisher.publish(block(2), arrives=False)
    publisher.publish(block(3))
    wait_until(lambda: has(KNOWN, 8))
    publisher.publish(["BlockRemoved", [3]])
    wait_until(lambda: has(KNOWN, 6))

    publisher.close()
    wait_until(lambda: state(blocks).state == AWAY)
    assert len(blocks) == 0
    again = Publisher(tmp_path)
    again.publish(block(0), arrives=False)
    try:
        wait_until(lambda: (again.serve_replay(), state(blocks).prefix_tokens == 2)[1])
    finally:
        follower.close()
        follower.close()
        again.close()


@pytest.mark.slow
def test_frames_that_are_none_and_a_bug_cost_only_the_engine(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = GpuBlocks(["e"])
    follower = EngineFollower([attrs_without_replay(publisher.events)], blocks)
    try:
        wait_until(lambda: state(blocks).state == UNKNOWN)
        publisher.publish(block(0))
        wait_until(lambda: state(blocks).prefix_tokens == 2)
        for frames in ([b"x"], [b"", b"short", b"y"], [b"", b"", b"", b""]):
            publisher.out.send_multipart(frames)
        publisher.publish(block(1))
        wait_until(lambda: state(blocks).prefix_tokens == 4)

        monkeypatch.setattr(blocks, "remove", None)
        publisher.publish(["BlockRemoved", [1]])
        wait_until(lambda: "bug" in state(blocks).why)
        publisher.publish(["AllBlocksCleared"], block(0))
        wait_until(lambda: state(blocks).prefix_tokens == 2)
    finally:
        follower.close()


def test_a_publisher_of_ours_is_known_however_late_it_is_followed(tmp_path: Path) -> None:
    """With its replay endpoint: it numbers its batches by the clock, and clears the cache first."""
    blocks = GpuBlocks(["e"])
    at, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    with closing(BlockPublisher(at, replay=replay)) as publisher:
        publisher.publish([BlockStored((1,), None, (0, 0), 2)])
        with closing(EngineFollower([EngineEvents("e", at, replay)], blocks)):
            wait_until(lambda: (state(blocks).state, state(blocks).prefix_tokens) == (KNOWN, 2))
            publisher.publish([BlockStored((2,), 1, (1, 1), 2)])
            wait_until(lambda: state(blocks).prefix_tokens == 4)


def attrs_without_replay(events: EngineEvents) -> EngineEvents:
    return EngineEvents(events.name, events.endpoint)


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install msgspec pyzmq"):
        EngineFollower([EngineEvents("e", "tcp://127.0.0.1:1")], GpuBlocks(["e"]))
