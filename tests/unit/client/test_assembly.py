"""The parts of a client: its lock, memory to register, its home node, the report of a call."""

from __future__ import annotations

import os
import tempfile
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from peercache import Client
from peercache.client.assembly import ClientParts
from peercache.client.home import Attached, Home
from peercache.client.report import add_missed, add_moved, current, reporting
from peercache.config.settings import Config
from peercache.errors import ConfigError, PeerUnreachable
from peercache.memory.attached import AttachedSegment
from peercache.memory.client_lock import folder_of, lock_name
from peercache.memory.published import PublishedSegment
from peercache.model.ids import Incarnation
from peercache.model.keys import Namespace
from peercache.net.breaker import Breakers
from peercache.observability.log import get_logger
from peercache.observability.metrics import Metrics
from peercache.paths.read import Touches
from peercache.paths.write import ClientReservations


def test_a_namespace_is_one_or_a_name_and_nothing_else() -> None:
    """An engine that hands over a text means its name."""
    with Client.open(
        namespace="team-a", embedded=True, cluster="names", listen="127.0.0.1:0", pool_size="1MiB"
    ) as client:
        assert client.namespace == Namespace("team-a")
    for wrong in (5, b"team-a", ("team-a",)):
        with pytest.raises(ConfigError, match="a name or a Namespace"):
            Client.open(namespace=wrong)  # type: ignore[arg-type]


@pytest.fixture
def no_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of the default home address, at which no node listens; no call waits."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        monkeypatch.setattr("peercache.config.home.SYSTEM_FOLDER", Path(place) / "run")
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setattr("peercache.client.home.ATTACH_S", 0.05)
        yield Path(place) / "run"


def test_a_client_without_a_node_names_the_command_that_starts_one(no_node: Path) -> None:
    """In one sentence, with the settings that a node must share; it does not run a node itself."""
    home = f"ipc://{no_node}/home.ipc"
    with pytest.raises(PeerUnreachable) as plain:
        Client.open()
    with pytest.raises(PeerUnreachable) as named:
        Client.open(home=home, insecure=True)

    assert str(plain.value) == (
        f"no answer from a node at {home}: start one with `peercache node`, name the address of "
        "another one in home, or set embedded = true for a node in this process"
    )
    assert f"`peercache node --insecure --home {home}`" in str(named.value)
    # Nothing is left that a node of another user could not use.
    assert no_node.stat().st_mode & 0o777 == 0o700
    assert not list(no_node.iterdir())


def test_a_default_home_folder_that_is_a_link_is_not_used_by_a_client(no_node: Path) -> None:
    """Any user may put one into /tmp."""
    (no_node.parent / "elsewhere").mkdir(mode=0o700)
    no_node.symlink_to("elsewhere")

    with pytest.raises(ConfigError, match="home"):
        Client.open()
    assert not list((no_node.parent / "elsewhere").iterdir())


def test_a_lock_that_cannot_be_renewed_closes_no_descriptor_of_others() -> None:
    """Each try fails alike, and the first that can be made works."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        home = f"ipc://{place}/n.ipc"
        wiring = ClientParts(Config.load({"home": home}), Namespace())
        folder = folder_of(home)
        (folder / lock_name(wiring.identity)).unlink()
        folder.rmdir()
        folder.write_text("in the way")

        with pytest.raises(ConfigError):
            wiring.renew_lock()
        # They take the number that the old lock had.
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        with pytest.raises(ConfigError):
            wiring.renew_lock()
        for descriptor in others:
            os.fstat(descriptor)
            os.close(descriptor)

        folder.unlink()
        wiring.renew_lock()
        assert (folder / lock_name(wiring.identity)).exists()
        wiring.close(is_quiet=True)
        assert not list(folder.iterdir())


def test_memory_is_registered_with_the_fabrics_that_care_and_with_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fabric that reads anywhere alike is not bothered; the end comes once, and is passed on."""
    reported: list[tuple[object, ...]] = []

    class Careful:
        def register(
            self, name: str, address: int, length: int, owner: object
        ) -> Callable[[], None]:
            reported.append((name, address, length, owner))
            return lambda: reported.append(("end", address))

    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        wiring = ClientParts(Config.load({"home": f"ipc://{place}/n.ipc"}), Namespace())
        monkeypatch.setattr(wiring, "_fabrics", lambda: (object(), Careful()))

        end = wiring.register_memory(4096, 100, "owner")
        end()
        wiring.close(is_quiet=True)

    assert reported == [("engine", 4096, 100, "owner"), ("end", 4096)]


def test_breakers_that_open_are_counted_in_the_metrics_once() -> None:
    """A report to the home node reports them; they were in no metric before."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        wiring = ClientParts(Config.load({"home": f"ipc://{place}/n.ipc"}), Namespace())
        for beat_of in (2, 2, 5):
            wiring.breakers.opened_count = beat_of
            wiring._on_beat()
        wiring.close(is_quiet=True)

    assert wiring.metrics.registry.get_sample_value("peercache_breakers_opened_total") == 5


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


def test_a_report_collects_until_its_block_ends() -> None:
    with reporting() as report:
        add_moved(3, 300)
        add_moved(1, 100)
        add_missed({"absent": 2, "": 7, "evicted": 0})
        add_missed({"absent": 1, "deadline": 4})
    add_moved(9, 900)
    add_missed({"absent": 9})

    assert (report.pages, report.bytes) == (4, 400)
    assert report.misses == Counter({"absent": 3, "deadline": 4})


def test_no_report_is_open_where_nothing_asked_for_one() -> None:
    assert current.report is None


def test_an_inner_block_has_a_report_of_its_own() -> None:
    with reporting() as outer:
        with reporting(is_detailed=True) as inner:
            add_moved(1, 10)
        add_moved(2, 20)

    assert (inner.pages, outer.pages) == (1, 2)
    assert (inner.is_detailed, outer.is_detailed) == (True, False)


def test_an_error_ends_the_report_too() -> None:
    try:
        with reporting():
            raise ValueError
    except ValueError:
        pass

    assert current.report is None


def test_threads_do_not_write_into_the_reports_of_others() -> None:
    """SGLang's exists, get and set run at once."""
    both = threading.Barrier(2)
    seen: dict[str, Counter[str]] = {}

    def call(reason: str) -> None:
        with reporting() as report:
            both.wait(60)
            for _ in range(1000):
                add_missed({reason: 1})
            both.wait(60)
        seen[reason] = report.misses

    threads = [threading.Thread(target=call, args=(reason,)) for reason in ("absent", "evicted")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert seen == {"absent": Counter(absent=1000), "evicted": Counter(evicted=1000)}


def test_a_closed_client_keeps_no_memory_for_locations() -> None:
    """It waits for the collector of cycles, in a process that may open many clients."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        wiring = ClientParts(Config.load({"home": f"ipc://{place}/n.ipc"}), Namespace())
        tracemalloc.start()
        try:
            wiring.cache.clear()
            held = tracemalloc.get_traced_memory()[0]
            wiring.close(is_quiet=True)
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    assert held > 2**24
    assert kept < held / 2
