"""The wiring of a client: its lock in a folder that is in a bad way, and memory to register."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import pytest

from peercache import Client
from peercache.client.assembly import ClientParts
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.memory.client_lock import folder_of, lock_name
from peercache.model.keys import Namespace


def test_a_namespace_is_one_or_a_name_and_nothing_else() -> None:
    """An engine that hands over a text means its name."""
    with Client.open(
        namespace="team-a", cluster="names", listen="127.0.0.1:0", pool_size="1MiB"
    ) as client:
        assert client.namespace == Namespace("team-a")
    for wrong in (5, b"team-a", ("team-a",)):
        with pytest.raises(ConfigError, match="a name or a Namespace"):
            Client.open(namespace=wrong)  # type: ignore[arg-type]


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
            wiring._renew_lock()
        # They take the number that the old lock had.
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]
        with pytest.raises(ConfigError):
            wiring._renew_lock()
        for descriptor in others:
            os.fstat(descriptor)
            os.close(descriptor)

        folder.unlink()
        wiring._renew_lock()
        assert (folder / lock_name(wiring.identity)).exists()
        wiring.close(is_quiet=True)
        assert not list(folder.iterdir())


def test_memory_is_registered_with_the_fabrics_that_care_and_with_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fabric that reads anywhere alike is not bothered; the end comes once, and is passed on."""
    told: list[tuple[object, ...]] = []

    class Careful:
        def register(
            self, name: str, address: int, length: int, owner: object
        ) -> Callable[[], None]:
            told.append((name, address, length, owner))
            return lambda: told.append(("end", address))

    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        wiring = ClientParts(Config.load({"home": f"ipc://{place}/n.ipc"}), Namespace())
        monkeypatch.setattr(wiring, "_fabrics", lambda: (object(), Careful()))

        end = wiring.register_memory(4096, 100, "owner")
        end()
        wiring.close(is_quiet=True)

    assert told == [("engine", 4096, 100, "owner"), ("end", 4096)]


def test_breakers_that_open_are_counted_in_the_metrics_once() -> None:
    """A report to the home node tells them; they were in no metric before."""
    with tempfile.TemporaryDirectory(prefix="peercache-") as place:
        wiring = ClientParts(Config.load({"home": f"ipc://{place}/n.ipc"}), Namespace())
        for beat_of in (2, 2, 5):
            wiring.breakers.opened_count = beat_of
            wiring._on_beat()
        wiring.close(is_quiet=True)

    assert wiring.metrics.registry.get_sample_value("peercache_breakers_opened_total") == 5
