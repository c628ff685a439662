"""The home node as its client sees it: a restart of the node leaves nothing of the old one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from peercache.client.home import Attached, Home
from peercache.config.settings import Config
from peercache.memory.attached import AttachedSegment
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.net.breaker import Breakers
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.paths.read import Touches
from peercache.paths.write import ClientReservations

GRANULE = 4096


def home() -> Home:
    return Home(
        url="ipc:///home",
        config=Config(),
        bridge=cast("Any", None),
        breakers=Breakers(),
        touches=Touches(),
        report=None,
        on_view=lambda _: None,
        renew_lock=lambda: None,
        metrics=Metrics(),
        log=get_logger(),
    )


def attached(folder: Path, number: int) -> tuple[PublishedSegment, Attached]:
    published = PublishedSegment.create(
        folder, incarnation=Incarnation(number), page_bytes=GRANULE, granule=GRANULE
    )
    memory = AttachedSegment.open(published.path, incarnation=Incarnation(number), writable=True)
    return published, Attached(number, memory, ClientReservations())


def test_memory_of_the_node_before_goes_although_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptor would keep the whole pool of a node that is dead."""
    published = [attached(tmp_path, number) for number in (1, 2)]
    (_, old), (_, new) = published

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    unmapped: list[AttachedSegment] = []
    close = AttachedSegment.close
    monkeypatch.setattr(
        AttachedSegment,
        "close",
        lambda segment, timeout_s: unmapped.append(segment) or close(segment, timeout_s),
    )
    monkeypatch.setattr(threading.Thread, "start", refuse)
    home()._came(new, old)

    assert unmapped == [old.memory]
    new.memory.close(1.0)
    for segment, _ in published:
        segment.close()
