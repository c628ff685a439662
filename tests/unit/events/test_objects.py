"""Object events: what each reader is notified, when it comes and after a loss."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from peercache.errors import LocalProtocolError
from peercache.events import objects, publishing
from peercache.events.objects import ObjectNames, ObjectPublisher
from tests.pace import wait_until

ANY = "tcp://127.0.0.1:*"
A, B, C = ("a" * 64, "b" * 64, "c" * 64)
ONE = ObjectNames(ranks=0)


@contextmanager
def reader(publisher: ObjectPublisher) -> Iterator[Any]:
    """Yield what reads the next message: its sequence, and (event, object) of each event."""
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        socket.connect(publisher.endpoint)

        def following() -> tuple[int, list[tuple[str, str]]]:
            assert socket.poll(10_000), "no message came"
            topic, sequence, payload = socket.recv_multipart()
            at_ms, events, rank = msgspec.msgpack.decode(payload)
            assert (topic, rank) == (b"", 0)
            assert abs(at_ms / 1000 - time.time()) < 60
            assert all(event["tenant_id"] == "default" for event in events)
            reported = [(event["event_type"], event["object_key"]) for event in events]
            return struct.unpack(">Q", sequence)[0], reported

        yield following


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (ObjectNames(), [f"{A}_0_k", f"{A}_0_v"]),
        (ObjectNames("t_m", 2), [f"t_m_{A}_{r}_{half}" for r in (0, 1) for half in "kv"]),
        (ObjectNames("m", 0), [f"m_{A}__k"]),
        (ObjectNames("m", 1, 2), [f"m_{A}_0_{stage}_{half}" for stage in (0, 1) for half in "kv"]),
        (ObjectNames("m", 0, 2), [f"m_{A}_0_k", f"m_{A}_1_k"]),
    ],
)
def test_a_page_has_the_objects_of_sglangs_mooncake_store(
    names: ObjectNames, expected: list[str]
) -> None:
    assert list(names.of(A)) == expected


def test_a_reader_that_comes_gets_what_there_is_and_then_each_change() -> None:
    """Sequences follow each other from there on, also when another reader comes."""
    there = [A, B]
    with (
        closing(ObjectPublisher(ANY, ONE, present=lambda: there)) as publisher,
        reader(publisher) as following,
    ):
        first, reported = following()
        assert reported == [("stored", f"{A}__k"), ("stored", f"{B}__k")]

        publisher.publish(stored=[C], removed=[A])
        second, reported = following()
        assert reported == [("stored", f"{C}__k"), ("removed", f"{A}__k")]

        with reader(publisher) as late:
            third, reported = late()
            assert len(reported) == 2
            assert following() == (third, reported)
        assert [second, third] == [first + 1, first + 2]
        assert publisher.resyncs == 0


def test_after_an_overrun_a_sequence_is_left_out_before_everything_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that readers forget what was removed meanwhile."""
    there = [A, B]
    monkeypatch.setattr(objects, "QUEUE_PAGES_MAX", 0)
    with (
        closing(ObjectPublisher(ANY, ONE, present=lambda: list(there))) as publisher,
        reader(publisher) as following,
    ):
        first, _ = following()
        there.clear()
        publisher.publish(removed=[A, B])

        second, reported = following()

        assert (second, reported) == (first + 2, [])
        assert publisher.resyncs == 1


def test_after_an_error_of_what_is_there_everything_is_reported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread does not end by it."""
    monkeypatch.setattr(publishing, "RESYNC_S", 0.05)
    failures = iter([OSError("not now")])

    def present() -> list[str]:
        for failure in failures:
            raise failure
        return [A]

    with (
        closing(ObjectPublisher(ANY, ONE, present=present)) as publisher,
        reader(publisher) as following,
    ):
        assert following()[1] == [("stored", f"{A}__k")]


def test_a_reader_that_never_reads_holds_up_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has no room for is an error of the send, and everything is reported again later."""
    monkeypatch.setattr(publishing, "RESYNC_S", 0.05)
    monkeypatch.setattr(publishing, "WAITING_MAX", 2)
    page = [f"{number:064x}" for number in range(objects.PAGES_A_MESSAGE)]
    with (
        closing(ObjectPublisher(ANY, ObjectNames(ranks=8))) as publisher,
        zmq.Context() as context,
        context.socket(zmq.SUB) as idle,
    ):
        idle.set_hwm(1)
        idle.setsockopt(zmq.RCVBUF, 4096)
        idle.subscribe(b"")
        idle.connect(publisher.endpoint)

        def reported_in_vain() -> bool:
            publisher.publish(stored=page)
            return publisher.resyncs > 0

        wait_until(reported_in_vain)
        idle.close(linger=0)


def test_a_closed_publisher_reports_it_and_a_taken_address_too() -> None:
    """One sentence each."""
    publisher = ObjectPublisher(ANY, ONE)
    with pytest.raises(OSError, match="Address already in use"):
        ObjectPublisher(publisher.endpoint, ONE)
    publisher.close()
    publisher.close()

    with pytest.raises(LocalProtocolError, match="closed"):
        publisher.publish(stored=[A])


def test_a_port_that_is_invalid_is_refused() -> None:
    """As of the block publisher."""
    with pytest.raises(OSError, match="a port is at most 65535"):
        ObjectPublisher("tcp://127.0.0.1:70000", ONE)
