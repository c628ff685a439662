"""What a node writes into etcd, and what it reports of an etcd that refuses."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trustme

from peercache.config.entries import parse_source
from peercache.config.settings import Config
from peercache.discovery import etcd, port
from peercache.discovery.finder import source_of
from peercache.discovery.port import SourceFailed
from peercache.errors import ConfigError
from peercache.trust.contexts import EtcdFiles
from tests.contracts.source_fakes import PORT, FakeEtcd
from tests.pace import TIMEOUT_S, ends_within, until

KEY = b"pc/nodes/me"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeEtcd:
    """An etcd; leases are kept alive at once, and changes read at once."""
    monkeypatch.setattr(etcd, "KEEP_S", 0.1)
    monkeypatch.setattr(port, "GAP_MIN_S", 0.01)
    monkeypatch.setattr(port, "GAP_MAX_S", 0.01)
    return FakeEtcd()


async def test_node_is_found_under_its_name_while_it_runs(
    server: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key has a lease, follows its address, comes back when it was lost, and goes with it."""
    # A stop gives the lease back within this; a busy machine needs longer.
    monkeypatch.setattr(etcd, "GOODBYE_S", TIMEOUT_S)
    own = f"10.9.9.9:{PORT}"
    async with trio.open_nursery() as nursery:
        await server.start(nursery)
        source = server.source(own=lambda: own)
        following = trio.CancelScope()

        async def follow() -> None:
            with following:
                await source.follow(lambda addresses: None)

        nursery.start_soon(follow)
        await until(lambda: KEY in server.keys)
        value, lease = server.keys[KEY]
        assert value == own.encode()
        assert server.leases[lease] == etcd.LEASE_S

        own = f"10.9.9.10:{PORT}"
        await until(lambda: server.keys[KEY][0] == own.encode())

        server.expire(lease)
        await until(lambda: KEY in server.keys and server.keys[KEY][1] != lease)

        following.cancel()
        await until(lambda: not server.keys and not server.leases)
        nursery.cancel_scope.cancel()


class _StopAtStep(trio.abc.Instrument):
    """Cancels a scope just before the loop has run this many more steps of its tasks."""

    def __init__(self, scope: trio.CancelScope, steps: int) -> None:
        self._scope, self._left = scope, steps

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._left -= 1
        if not self._left:
            self._scope.cancel()


async def test_node_that_stops_leaves_no_address_behind(
    server: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is doing then: it asks, listens, or is making a connection."""
    monkeypatch.setattr(etcd, "GOODBYE_S", TIMEOUT_S)
    stopped = 0
    async with trio.open_nursery() as nursery:
        await server.start(nursery)
        for steps in range(1, 200):
            source = server.source()
            with trio.CancelScope() as scope:
                stop = _StopAtStep(scope, steps)
                trio.lowlevel.add_instrument(stop)
                await source.follow(lambda addresses: None)
            trio.lowlevel.remove_instrument(stop)
            stopped += bool(server.web.requests)
            await until(lambda: not server.keys, f"no address after a stop at step {steps}")
        nursery.cancel_scope.cancel()
    assert stopped > 100


async def test_stop_waits_for_no_etcd_that_hangs(server: FakeEtcd) -> None:
    """Giving back the lease has half a second."""
    async with trio.open_nursery() as nursery:
        await server.start(nursery)
        source = server.source()
        with ends_within():
            async with trio.open_nursery() as inner:
                inner.start_soon(source.follow, lambda addresses: None)
                await until(lambda: KEY in server.keys)
                server.hang()
                began = trio.current_time()
                inner.cancel_scope.cancel()
        # Not the seconds that a request may take.
        assert trio.current_time() - began < etcd.GOODBYE_S + 4
        nursery.cancel_scope.cancel()


async def test_watch_that_always_ends_at_once_is_not_asked_in_a_circle(
    server: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new watch waits as long as a new reading does."""
    monkeypatch.setattr(etcd, "KEEP_S", 1000.0)
    reads = 0

    def count(addresses: object) -> None:
        nonlocal reads
        reads += 1

    async with trio.open_nursery() as nursery:
        await server.start(nursery)
        source = server.source()
        nursery.start_soon(source.follow, count)
        await until(lambda: reads > 0)
        server._watch = _ended_at_once  # type: ignore[method-assign]
        server.news()
        await until(lambda: reads > 5)
        nursery.cancel_scope.cancel()

    watches = sum(path == "/v3/watch" for path, _ in server.web.requests)
    assert watches <= reads + 2


async def _ended_at_once(exchange: object, since: int, header: object) -> None:
    await exchange.begin()  # type: ignore[attr-defined]
    await exchange.end()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("refusal", "todo"),
    [
        ((400, "etcdserver: user name is empty"), "allow clients without a user"),
        ((404, "Not Found"), "etcd 3.4 or later"),
        ((503, "etcdserver: no leader"), "look at its log"),
    ],
)
async def test_refusal_explains_what_to_do(
    server: FakeEtcd, refusal: tuple[int, str], todo: str
) -> None:
    """One sentence names the server, its reason, and the way out."""
    server.refusal = refusal
    async with trio.open_nursery() as nursery:
        await server.start(nursery)
        source = server.source()
        with pytest.raises(SourceFailed) as caught:
            await source.follow(lambda addresses: None)
        nursery.cancel_scope.cancel()

    said = str(caught.value)
    assert said.startswith("etcd at 127.0.0.1:")
    assert refusal[1] in said
    assert todo in said
    assert re.search(r"\n", said) is None


def secured(folder: Path, **other: str) -> Config:
    """Return settings whose files for etcd are there, and right."""
    authority = trustme.CA()
    issued = authority.issue_cert("node")
    files = {name: folder / name for name in ("etcd_ca", "etcd_cert", "etcd_key")}
    authority.cert_pem.write_to_path(str(files["etcd_ca"]))
    issued.cert_chain_pems[0].write_to_path(str(files["etcd_cert"]))
    files["etcd_key"].touch(mode=0o600)
    issued.private_key_pem.write_to_path(str(files["etcd_key"]))
    return Config.load({**{name: str(path) for name, path in files.items()}, **other})


@pytest.mark.parametrize(
    ("spoil", "name", "said"),
    [
        (lambda files: (files / "etcd_ca").unlink(), "etcd_ca", "No such file"),
        (lambda files: (files / "etcd_ca").write_text("no PEM"), "etcd_ca", "it is no PEM"),
        (lambda files: (files / "etcd_cert").unlink(), "etcd_cert", "No such file"),
        (lambda files: (files / "etcd_key").chmod(0o644), "etcd_key", "chmod 600"),
        (
            lambda files: (files / "etcd_key").write_text(
                trustme.CA().issue_cert("other").private_key_pem.bytes().decode()
            ),
            "etcd_cert",
            "no pair",
        ),
    ],
)
async def test_wrong_file_is_named_at_the_start_and_later(
    spoil: Callable[[Path], object], name: str, said: str, tmp_path: Path
) -> None:
    """A node does not start with it; one that runs reports it of the source, and goes on."""
    config = secured(tmp_path)
    address = parse_source("etcds://127.0.0.1:1/pc")

    def source() -> object:
        return source_of(
            address,
            name="me",
            own_address=lambda: "",
            rng=random.Random(1),
            etcd_tls=EtcdFiles(config).context,
        )

    running = source()
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=said) as caught:
        source()
    assert caught.value.name == name
    with pytest.raises(SourceFailed, match=said):
        await running.follow(lambda addresses: None)  # type: ignore[attr-defined]
