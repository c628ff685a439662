"""Who may read a publisher, and how much a reader may cost."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import zmq

from peercache.errors import ConfigError, InvalidRequest
from peercache.events import publishing
from peercache.events.blocks import SEQUENCE_END, AllBlocksCleared, frames_of, sequence_of
from peercache.events.objects import ObjectNames, ObjectPublisher
from peercache.events.publishing import (
    FRAME_BYTES_MAX,
    SUBSCRIPTIONS_MAX,
    BlockPublisher,
    is_on_this_host,
)
from tests.pace import wait_until

ANY = "tcp://127.0.0.1:*"
EVERYWHERE = "tcp://0.0.0.0:*"
PAGE = "a" * 64

Publisher = BlockPublisher | ObjectPublisher
MAKES: dict[str, Callable[..., Publisher]] = {
    "block": BlockPublisher,
    "object": lambda endpoint, **given: ObjectPublisher(
        endpoint, ObjectNames(), present=lambda: [PAGE], **given
    ),
}


@contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as opened:
        opened.linger = 0
        opened.sndhwm = 0
        if kind == zmq.SUB:
            opened.subscribe(b"")
        opened.connect(endpoint)
        yield opened


def receives(publisher: Publisher, reader: zmq.Socket[bytes]) -> bool:
    """Return whether something comes; what is published is reported until then."""
    if isinstance(publisher, BlockPublisher):
        publisher.publish([AllBlocksCleared()])
    else:
        publisher.publish(stored=[PAGE])
    return bool(reader.poll(20))


def own_address() -> str:
    """Return an address of this host that others reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    if address.startswith("127."):
        pytest.skip("this host has no other address")
    return address


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
@pytest.mark.parametrize("endpoint", [EVERYWHERE, "tcp://*:*", "tcp://192.0.2.1:5557"])
def test_an_endpoint_that_other_hosts_reach_wants_readers(
    make: Callable[..., Publisher], endpoint: str
) -> None:
    """Page hashes and tokens are nothing for strangers."""
    with pytest.raises(ConfigError, match=r"readers.*is open to other hosts"):
        make(endpoint)
    with pytest.raises(ConfigError, match=r"readers.*10\.0\.0\.0/16"):
        make(endpoint, readers=["everyone"])


def test_a_replay_endpoint_wants_readers_too() -> None:
    """It reports the same."""
    with pytest.raises(ConfigError, match="is open to other hosts"):
        BlockPublisher(ANY, EVERYWHERE)


@pytest.mark.parametrize(
    ("endpoint", "is_ours"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://127.1.2.3:*", True),
        ("tcp://localhost:5557", True),
        ("tcp://lo:5557", True),
        ("ipc:///run/x", True),
        ("tcp://*:5557", False),
        ("tcp://eth0:5557", False),
        ("tcp://10.0.0.7:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://[::1]:5557", True),
        ("pgm://eth0;239.0.0.1:5557", False),
    ],
)
def test_what_other_hosts_reach_is_reported_by_the_endpoint(endpoint: str, is_ours: bool) -> None:
    """What is not known is open."""
    assert is_on_this_host(endpoint) == is_ours


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_only_readers_that_are_named_are_notified(make: Callable[..., Publisher]) -> None:
    """A stranger is closed as it connects; a reader and this host itself are not."""
    address = own_address()
    for readers, is_reported in ((["203.0.113.9"], False), (["203.0.113.9", address], True)):
        with closing(make(EVERYWHERE, readers=readers)) as publisher:
            port = publisher.endpoint.rpartition(":")[2]
            with (
                connected(zmq.SUB, f"tcp://{address}:{port}") as other,
                connected(zmq.SUB, f"tcp://127.0.0.1:{port}") as local,
            ):
                wait_until(lambda: receives(publisher, local))
                if is_reported:
                    wait_until(lambda: receives(publisher, other))
                for _ in range(20):
                    assert receives(publisher, other) == is_reported


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_endless_subscriptions_cost_bounded_memory_and_no_reader(
    make: Callable[..., Publisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket is closed and opened again: a reader connects again by itself."""
    kept: list[int] = []
    drop = publishing.Readers._drop

    def noted(readers: Any, opened: Any) -> None:
        kept.append(readers._subscriptions)
        drop(readers, opened)

    monkeypatch.setattr(publishing.Readers, "_drop", noted)
    with (
        closing(make(ANY)) as publisher,
        connected(zmq.SUB, publisher.endpoint) as reader,
        connected(zmq.XSUB, publisher.endpoint) as flood,
    ):
        for _ in range(SUBSCRIPTIONS_MAX + 1):
            flood.send(b"\1" + os.urandom(100))

        def is_dropped_again() -> bool:
            flood.poll(0)  # A socket that has connected again repeats its subscriptions only then.
            return len(kept) >= 3

        wait_until(is_dropped_again)
        assert set(kept) == {SUBSCRIPTIONS_MAX + 1}
        flood.close(linger=0)
        while reader.poll(0):
            reader.recv_multipart()
        wait_until(lambda: receives(publisher, reader))


def test_what_is_longer_than_any_question_ends_its_connection_alone() -> None:
    """At both sockets: nothing of it is kept, and others are answered."""

    def replayed() -> bool:
        with connected(zmq.DEALER, publisher.replay) as asker:
            asker.send_multipart([b"", *frames_of(0, b"")[1:2]])
            return bool(asker.poll(200)) and sequence_of(asker.recv_multipart()[-2]) != SEQUENCE_END

    with closing(BlockPublisher(ANY, ANY)) as publisher:
        with connected(zmq.DEALER, publisher.replay) as stranger:
            for _ in range(100):
                stranger.send_multipart([b"", bytes(FRAME_BYTES_MAX + 1)])
            assert not stranger.poll(100)
            assert publisher.figures().replays == 0
            wait_until(replayed)
        with (
            connected(zmq.XSUB, publisher.endpoint) as stranger,
            connected(zmq.SUB, publisher.endpoint) as reader,
        ):
            stranger.send(b"\1" + bytes(FRAME_BYTES_MAX))
            wait_until(lambda: receives(publisher, reader))


def test_a_topic_that_no_reader_could_subscribe_to_is_refused() -> None:
    """A subscription has the whole of it."""
    with pytest.raises(InvalidRequest, match="256 bytes"):
        BlockPublisher(ANY, topic="x" * 257)
