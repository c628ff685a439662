"""Dynamo's indexer over block events: stored, evicted, restarted and lost, in its ranges."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import attrs
import pytest
import zmq

from peercache.events import publishing
from peercache.events.blocks import BlockEvent, BlockRemoved, BlockStored, decode
from peercache.events.publishing import BlockPublisher
from tests.integration.other_engines import EngineProcess, environment_of
from tests.pace import wait_until
from tests.system.nodes import free_port

MODEL = "tiny"
BLOCK = 4
PROMPT = tuple(range(100, 116))
ANY = "tcp://127.0.0.1:*"


def block(number: int) -> BlockStored:
    """Return one block of the prompt, by its place; blocks are named from 1 on."""
    tokens = PROMPT[number * BLOCK : (number + 1) * BLOCK]
    return BlockStored((number + 1,), number or None, tokens, BLOCK, "CPU")


class Indexer(EngineProcess):
    """Dynamo's indexer as a process, and its questions."""

    def __init__(self) -> None:
        """Start it."""
        self.port = free_port()
        python = environment_of("dynamo") / "bin/python"
        super().__init__(
            [python, "-m", "dynamo.indexer", "--port", self.port, "--threads", "1"], ready=""
        )
        wait_until(self._answers)

    def register(self, publisher: BlockPublisher) -> None:
        """Have it follow a publisher, and wait until it has what there is."""
        reported = {
            "instance_id": 1, "endpoint": publisher.endpoint, "model_name": MODEL,
            "replay_endpoint": publisher.replay, "block_size": BLOCK,
        }  # fmt: skip
        status, said = self._asked("/register", reported)
        assert status < 300, said

    def unregister(self) -> None:
        """Have it forget the publisher and its blocks."""
        status, said = self._asked("/unregister", {"instance_id": 1, "model_name": MODEL})
        assert status < 300, said

    def matched(self, **more: str) -> int:
        """Return how many leading tokens of the prompt it knows to be stored."""
        status, said = self._asked("/query", {"token_ids": PROMPT, "model_name": MODEL, **more})
        if status == 404:
            return 0  # No publisher of this model is registered.
        assert status < 300, said
        longest: int = said["instances"].get("1", {}).get("longest_matched", 0)
        return longest

    def comes_to(self, tokens: int) -> None:
        """Wait until it knows so many."""
        wait_until(lambda: self.matched() == tokens)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.said()
        try:
            return self._asked("/workers", None)[0] == 200
        except OSError:
            return False

    def _asked(self, path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                said = answer.read().decode()
                return answer.status, json.loads(said) if said[:1] in "[{" else said
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    """Return an indexer without publishers."""
    with Indexer() as indexer:
        yield indexer


def test_an_indexer_follows_what_is_stored_and_removed(indexer: Indexer) -> None:
    """From before it came, too: the first empty batch makes it ask for a replay."""
    with closing(BlockPublisher(ANY, ANY)) as publisher:
        publisher.publish([block(0), block(1)])
        indexer.register(publisher)
        indexer.comes_to(8)

        publisher.publish([block(2), block(3)])
        indexer.comes_to(16)
        publisher.publish([BlockRemoved((2,), "CPU")])
        indexer.comes_to(4)


def test_an_indexer_keeps_salts_apart(indexer: Indexer) -> None:
    """Blocks of a tenant match no prompt of another; several sorts of them cost no batch."""
    with closing(BlockPublisher(ANY, ANY)) as publisher:
        indexer.register(publisher)
        publisher.publish([attrs.evolve(block(0), extra=("tenant=t",))])
        wait_until(lambda: indexer.matched(cache_salt="tenant=t") == 4)
        assert indexer.matched() == indexer.matched(cache_salt="tenant=u") == 0

        # Other names: a hash is one block's, whatever its tokens depend on.
        both = BlockStored((11, 12), None, PROMPT[: 2 * BLOCK], BLOCK, "CPU", "", ("x", None))
        publisher.publish([both])
        indexer.comes_to(8)


def test_an_indexer_believes_nothing_of_a_publisher_before_its_restart(indexer: Indexer) -> None:
    """It has no blocks of the first life, though no message has reported that they are gone."""
    with closing(BlockPublisher(ANY, ANY)) as first:
        first.publish([block(0), block(1), block(2)])
        indexer.register(first)
        indexer.comes_to(12)
    # What a dead publisher has reported stays until it is taken out, or another one has begun.
    assert indexer.matched() == 12

    with closing(BlockPublisher(first.endpoint, first.replay, present=lambda: [block(0)])) as again:
        indexer.comes_to(4)
        again.publish([block(1)])
        indexer.comes_to(8)
    indexer.unregister()
    indexer.comes_to(0)


def test_an_indexer_gets_what_it_has_missed(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is lost on the way comes with the replay, in its place."""
    with closing(BlockPublisher(ANY, ANY)) as publisher:
        publisher.publish([block(0)])
        indexer.register(publisher)
        indexer.comes_to(4)

        lost: list[bytes] = []

        def lose(socket: zmq.Socket[bytes], frames: list[bytes], *more: Any, **named: Any) -> Any:
            if socket.type == zmq.XPUB and not lost and decode(frames[-1]).events:
                lost.append(frames[1])
                return None
            return send(socket, frames, *more, **named)

        send = zmq.Socket.send_multipart
        monkeypatch.setattr(zmq.Socket, "send_multipart", lose)
        publisher.publish([block(1)])
        wait_until(lambda: bool(lost))
        publisher.publish([block(2)])
        indexer.comes_to(12)


def test_a_publisher_that_was_overrun_leaves_no_block_behind(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be queued is reported again: removed blocks are gone at the indexer, too."""
    monkeypatch.setattr(publishing, "QUEUE_EVENTS_MAX", 3)
    there: list[BlockEvent] = [block(0), block(1), block(2)]
    with closing(BlockPublisher(ANY, ANY, present=lambda: list(there))) as publisher:
        indexer.register(publisher)
        indexer.comes_to(12)

        there.pop()
        publisher.publish([BlockRemoved((3,), "CPU")] * 4)
        indexer.comes_to(8)
        assert publisher.figures().resyncs == 1
