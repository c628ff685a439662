"""A publisher of block events with real sockets: what late readers, and those of a gap, see."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import attrs
import pytest
import zmq

from peercache.errors import InvalidRequest
from peercache.events import publishing
from peercache.events.blocks import (
    SEQUENCE_END,
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    decode,
    frames_of,
    sequence_of,
)
from peercache.events.publishing import BlockPublisher
from tests.pace import TIMEOUT_S

ANY = "tcp://127.0.0.1:*"
WAIT_MS = int(1000 * TIMEOUT_S)


def stored(number: int) -> BlockStored:
    """Return one block of two tokens."""
    return BlockStored((number,), None, (number, number), 2)


@contextmanager
def reading(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(endpoint)
        yield socket


def received(socket: zmq.Socket[bytes]) -> tuple[int, list[BlockEvent]]:
    assert socket.poll(WAIT_MS), "nothing came"
    *_, sequence, payload = socket.recv_multipart()
    number = sequence_of(sequence)
    return number, [] if number == SEQUENCE_END else list(decode(payload).events)


def replayed(endpoint: str, since: int) -> list[tuple[int, list[BlockEvent]]]:
    """Ask for all batches since a sequence, as vLLM's readers do."""
    with reading(zmq.DEALER, endpoint) as dealer:
        dealer.send_multipart([b"", *frames_of(since, b"")[1:2]])
        batches: list[tuple[int, list[BlockEvent]]] = []
        while not batches or batches[-1][0] != SEQUENCE_END:
            batches.append(received(dealer))
    return batches[:-1]


def test_a_reader_gets_what_is_published_and_the_rest_by_replay() -> None:
    """The first event of all is AllBlocksCleared; sequences follow each other."""
    with closing(BlockPublisher(ANY, ANY, topic="kv")) as publisher:
        with reading(zmq.SUB, publisher.endpoint) as reader:
            number = 0
            while not (number and reader.poll(20)):
                number += 1
                publisher.publish([stored(number)])
            first, events = received(reader)
        publisher.publish([BlockRemoved((1,))])
        batches: list[tuple[int, list[BlockEvent]]] = []
        while not batches or BlockRemoved((1,)) not in batches[-1][1]:
            batches = replayed(publisher.replay, 0)

    assert batches[0][1][0] == AllBlocksCleared()
    assert (first, events) in batches
    sequences = [one for one, _ in batches]
    assert sequences == list(range(sequences[0], sequences[0] + len(batches)))
    flat = [event for _, events in batches for event in events]
    assert flat == [AllBlocksCleared(), *map(stored, range(1, number + 1)), BlockRemoved((1,))]
    assert [one for one, _ in batches if one >= first] == sequences[sequences.index(first) :]


def test_a_publisher_that_begins_again_has_higher_sequences() -> None:
    """A router ignores those that are lower than it has seen."""
    seen = []
    for _ in range(2):
        with closing(BlockPublisher(ANY, ANY)) as publisher:
            batches: list[tuple[int, list[BlockEvent]]] = []
            while not batches:
                batches = replayed(publisher.replay, 0)
            seen.append(batches[0][0])

    assert seen[1] > seen[0]


def test_too_many_events_are_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing grows, and nothing that is gone stays in a reader's index."""
    monkeypatch.setattr(publishing, "QUEUE_EVENTS_MAX", 4)
    may_go, asked = threading.Event(), []

    def present() -> Iterator[BlockEvent]:
        asked.append(len(asked))
        assert may_go.wait(10)
        yield stored(100 + asked[-1])

    with closing(BlockPublisher(ANY, ANY, present=present)) as publisher:
        while not asked:
            pass
        for number in range(20):
            publisher.publish([stored(number)])
        may_go.set()
        batches: list[tuple[int, list[BlockEvent]]] = []
        while sum(AllBlocksCleared() in events for _, events in batches) < 2:
            batches = replayed(publisher.replay, 0)
        figures = publisher.figures()

    flat = [event for _, events in batches for event in events]
    begin = len(flat) - 1 - flat[::-1].index(AllBlocksCleared())
    assert flat[begin : begin + 2] == [AllBlocksCleared(), stored(101)]
    assert figures.resyncs == 1


def test_what_is_published_at_once_is_not_lost() -> None:
    """Before the publisher's thread has run; what is present may be published twice."""
    with closing(BlockPublisher(ANY, ANY, present=lambda: [stored(1)])) as publisher:
        publisher.publish([stored(1), stored(2)])
        flat: list[BlockEvent] = []
        while stored(2) not in flat:
            flat = [event for _, events in replayed(publisher.replay, 0) for event in events]

    assert flat == [AllBlocksCleared(), stored(1), stored(1), stored(2)]
    assert publisher.figures().resyncs == 0


def test_a_quiet_publisher_is_learned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has missed the last batch sees the gap before the next event."""
    monkeypatch.setattr(publishing, "QUIET_S", 0.1)
    with (
        closing(BlockPublisher(ANY, ANY)) as publisher,
        reading(zmq.SUB, publisher.endpoint) as reader,
    ):
        batches = [received(reader), received(reader)]

    assert batches[1][1] == []
    assert batches[1][0] == batches[0][0] + 1


def test_a_replay_from_before_what_is_kept_reports_everything_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that joins after a day knows what there is, not what happened lately."""
    monkeypatch.setattr(publishing, "REPLAY_BATCHES_MAX", 2)
    monkeypatch.setattr(publishing, "EVENTS_A_BATCH", 1)
    monkeypatch.setattr(publishing, "QUIET_S", 0.1)
    monkeypatch.setattr(publishing, "RESYNC_S", TIMEOUT_S)
    with closing(BlockPublisher(ANY, ANY, present=lambda: [stored(7)])) as publisher:
        publisher.publish([stored(number) for number in range(5)])
        while publisher.figures().events < 7:
            pass
        with reading(zmq.SUB, publisher.endpoint) as reader:
            received(reader)
            assert AllBlocksCleared() not in replayed(publisher.replay, 0)[0][1]
            flat: list[BlockEvent] = []
            while stored(7) not in flat:
                flat += received(reader)[1]
            # Not again soon: a stranger could keep the publisher busy.
            replayed(publisher.replay, 0)
            assert publisher.figures().resyncs == 1

    assert flat == [AllBlocksCleared(), stored(7)]


@pytest.mark.parametrize("culprit", ["present", "event"])
def test_an_error_ends_no_publisher(
    culprit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of `present`, or of an event that no msgpack holds: logged, then all is published again."""
    monkeypatch.setattr(publishing, "RESYNC_S", 0.1)
    failing = [culprit == "present"]

    def present() -> list[BlockEvent]:
        if failing.pop() if failing else False:
            raise ValueError("no blocks available")
        return [stored(7)]

    with closing(BlockPublisher(ANY, ANY, present=present)) as publisher:
        while failing:
            pass
        if culprit == "event":
            publisher.publish([attrs.evolve(stored(1), lora=2**64)])
        deadline = time.monotonic() + WAIT_MS / 1000
        while publisher.figures().resyncs < 1:
            assert time.monotonic() < deadline, "the publisher has ended"
        flat: list[BlockEvent] = []
        while not flat or flat[-1] != stored(7) or AllBlocksCleared() not in flat:
            assert time.monotonic() < deadline, "nothing was published again"
            flat = [event for _, events in replayed(publisher.replay, 0) for event in events]

    assert sum("events.publish_failed" in line for line in caplog.messages) == 1


def test_what_is_no_question_for_a_replay_is_passed_over() -> None:
    """A stranger at the replay endpoint ends nothing."""
    with closing(BlockPublisher(ANY, ANY)) as publisher:
        with reading(zmq.DEALER, publisher.replay) as dealer:
            for frames in ([b"x"], [b"", b"", b""], [b"", bytes(9)]):
                dealer.send_multipart(frames)
        while not replayed(publisher.replay, 0):
            pass


def test_a_reader_that_never_reads_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get every event meanwhile; what waits for it is bounded, and it sees the gap."""
    monkeypatch.setattr(publishing, "WAITING_MAX", 4)
    batches, tokens = 120, tuple(range(10**6, 10**6 + 2**14))
    with (
        closing(BlockPublisher(ANY)) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as idle,
        reading(zmq.SUB, publisher.endpoint) as reader,
    ):
        idle.linger, idle.rcvhwm, idle.rcvbuf = 0, 1, 2**14
        idle.subscribe(b"")
        idle.connect(publisher.endpoint)
        for each in (idle, reader):
            while not each.poll(20):
                publisher.publish([stored(0)])
        for number in range(1, batches):
            event = BlockStored((number,), None, tokens, len(tokens))
            publisher.publish([event])
            while event not in received(reader)[1]:
                pass
        numbers = [received(idle)[0]]
        while len(numbers) < 2 or numbers[-1] == numbers[-2] + 1:
            assert len(numbers) < batches, "all batches have waited for one reader"
            if idle.poll(100):
                numbers.append(received(idle)[0])
            else:
                # It has what waited for it: the gap is in front of the next one.
                publisher.publish([BlockRemoved((1,))])


def test_an_address_that_is_taken_is_named() -> None:
    """The error names which endpoint, and no thread or socket stays."""
    with closing(BlockPublisher(ANY)) as publisher:
        with pytest.raises(OSError, match=publisher.endpoint.rpartition(":")[2]):
            BlockPublisher(publisher.endpoint)
        assert publisher.replay == ""


@pytest.mark.parametrize(
    "endpoints", [("tcp://127.0.0.1:65536",), ("tcp://127.0.0.1:*", "tcp://127.0.0.1:99999")]
)
def test_a_port_that_is_invalid_is_refused(endpoints: tuple[str, ...]) -> None:
    """ZeroMQ would bind another one, of 16 bits, and no router would find it."""
    with pytest.raises(OSError, match=f"a port is at most 65535: .*{re.escape(endpoints[-1])}"):
        BlockPublisher(*endpoints)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (attrs.evolve(stored(1), tokens=(1, -2)), "token 1 is -2"),
        (attrs.evolve(stored(1), tokens=(1, "2")), "token 1 is '2'"),
        (attrs.evolve(stored(1), tokens=(1, 2, 3)), "3 tokens in 1 blocks of 2"),
        (attrs.evolve(stored(1), block_tokens=0), "2 tokens in 1 blocks of 0"),
        (attrs.evolve(stored(1), hashes=(1.5,)), "1.5 is no hash"),
        (attrs.evolve(stored(1), parent=2**64), "64 bits"),
        (attrs.evolve(stored(1), ahead=((1,), (2,))), "ahead has no row"),
        (attrs.evolve(stored(1), ahead=((-1,),)), "token 0 is -1"),
        (BlockRemoved((-(2**63) - 1,)), "64 bits"),
        ("AllBlocksCleared", "no block event"),
    ],
)
def test_what_readers_could_not_take_is_refused(event: Any, why: str) -> None:
    """With all that came with it; what came before and comes after is published."""
    with closing(BlockPublisher(ANY)) as publisher, reading(zmq.SUB, publisher.endpoint) as reader:
        received(reader)
        publisher.publish([stored(1)])
        with pytest.raises(InvalidRequest, match=re.escape(why)):
            publisher.publish([stored(2), event])
        publisher.publish([BlockRemoved((2**64 - 1, b"a", "b")), AllBlocksCleared()])
        events: list[BlockEvent] = []
        while AllBlocksCleared() not in events:
            events += received(reader)[1]
        assert events == [stored(1), BlockRemoved((2**64 - 1, b"a", "b")), AllBlocksCleared()]
