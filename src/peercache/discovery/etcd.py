"""etcd://HOST:PORT/PREFIX: every node writes its address below a prefix, and reads all of them.

A node's key has a lease that the node keeps alive, so that the addresses of dead nodes are removed.
The node uses etcd's JSON gateway (3.4 and later). A watch only reports that something has changed:
then all keys are read again, so the order and the loss of events do not matter. etcds:// is etcd
over TLS.
"""

from __future__ import annotations

import base64
import json
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

import trio

from peercache.config.entries import EtcdAddress
from peercache.discovery.port import (
    OK,
    OnAddresses,
    Request,
    Resolver,
    SourceFailed,
    WebServer,
    pause,
    reading,
    refusal_in,
)
from peercache.errors import ConfigError

LEASE_S = 30
"""How long the address of a dead node stays; dialling it costs little."""

KEEP_S = 10.0
"""How often the lease is kept alive: two attempts may fail."""

KEYS_AT_ONCE = 1000
"""Keys of one answer: 150 KB, and a millisecond of the loop."""

GOODBYE_S = 0.5
"""How long a stop may take to revoke the lease."""


@final
class EtcdSource:
    """The addresses below one prefix, including this node's own."""

    def __init__(
        self,
        address: EtcdAddress,
        *,
        name: str,
        own_address: Callable[[], str],
        rng: random.Random,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Write `own_address` under `name`, which must be unique to this node.

        tls: only for etcds://, returns the TLS context of an attempt, and raises ConfigError.
        """
        self.text = address.text
        self._address = address
        self._name = name
        self._own_address = own_address
        self._rng = rng
        self._tls = tls
        resolver = Resolver()
        self._servers = [WebServer(host, port, resolver) for host, port in address.servers]
        self._lease = ""
        self._written = ""

    async def follow(self, on_addresses: OnAddresses) -> None:
        """Write the own address, and report all addresses; raise SourceFailed."""
        # The next attempt asks the next member of the etcd cluster.
        self._servers.append(self._servers.pop(0))
        self._servers[0].tls = self._context()
        self._lease = ""
        try:
            await self._keep_reporting(on_addresses)
        except SourceFailed:
            # The next attempt writes the same key again, under a new lease.
            raise
        except BaseException:
            # Cancelled, or a group with it: a stop may occur while a connection is being made.
            with trio.CancelScope(deadline=trio.current_time() + GOODBYE_S, shield=True):
                await self._give_back()
            raise

    def _context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a new attempt: certificates are replaced while a node runs."""
        try:
            return None if self._tls is None else self._tls()
        except ConfigError as error:
            raise SourceFailed(str(error)) from error

    async def _keep_reporting(self, on_addresses: OnAddresses) -> None:
        await self._register()
        keep_at = trio.current_time() + KEEP_S
        addresses, revision = await self._read()
        on_addresses(addresses)
        while True:
            left_s = keep_at - trio.current_time()
            has_news = left_s > 0 and await self._watch(revision + 1, left_s)
            if trio.current_time() >= keep_at or self._own_address() != self._written:
                await self._keep()
                keep_at = trio.current_time() + KEEP_S
            if has_news:
                await pause(len(addresses), self._rng)
                addresses, revision = await self._read()
                on_addresses(addresses)

    async def _register(self) -> None:
        granted = await self._ask("/v3/lease/grant", TTL=LEASE_S)
        with self._reading():
            self._lease = str(int(granted["ID"]))
        await self._write()

    async def _write(self) -> None:
        own = self._own_address()
        key = f"{self._address.prefix}/{self._name}"
        await self._ask("/v3/kv/put", key=_raw(key), value=_raw(own), lease=self._lease)
        self._written = own

    async def _keep(self) -> None:
        """Keep the own key alive, or write it again: etcd may have been unreachable for longer than
        the lease.
        """
        kept = await self._ask("/v3/lease/keepalive", ID=self._lease)
        with self._reading():
            is_alive = int(kept["result"].get("TTL", 0)) > 0
        if not is_alive:
            await self._register()
        elif self._own_address() != self._written:
            await self._write()

    async def _give_back(self) -> None:
        if self._lease:
            with suppress(SourceFailed):
                await self._ask("/v3/lease/revoke", ID=self._lease)

    async def _read(self) -> tuple[list[str], int]:
        """Return all addresses, and the revision of the first answer."""
        addresses: list[str] = []
        first, end, revision = f"{self._address.prefix}/", f"{self._address.prefix}0", 0
        begin = first.encode()
        while True:
            # A later page may be newer: the watch starts at the first one.
            page = await self._ask(
                "/v3/kv/range", key=_raw(begin), range_end=_raw(end), limit=KEYS_AT_ONCE
            )
            with self._reading():
                revision = revision or int(page["header"]["revision"])
                keys = [base64.b64decode(row["key"]) for row in page.get("kvs", ())]
                addresses += [_text(row.get("value", "")) for row in page.get("kvs", ())]
                is_all = not page.get("more") or not keys or keys[-1] < begin
            if is_all:
                return addresses, revision
            begin = keys[-1] + b"\0"

    async def _watch(self, revision: int, within_s: float) -> bool:
        """Wait until a key has changed since this revision; return whether one has."""
        has_changed = False

        def is_news(line: bytes) -> bool:
            nonlocal has_changed
            has_changed = not _is_created(line)
            return has_changed

        create = {
            "key": _raw(f"{self._address.prefix}/"),
            "range_end": _raw(f"{self._address.prefix}0"),
            "start_revision": revision,
        }
        body = json.dumps({"create_request": create}).encode()
        server = self._servers[0]
        ends_at = trio.current_time() + within_s
        status = await server.follow_lines(
            Request("POST", "/v3/watch", body=body), is_news, within_s
        )
        if status != OK:
            raise self._refused(status, "it refuses to watch")
        # A watch that ends early is not restarted at once, and may have missed something.
        return has_changed or trio.current_time() < ends_at

    async def _ask(self, path: str, **body: Any) -> Any:
        server = self._servers[0]
        request = Request("POST", path, body=json.dumps(body).encode())
        answer = await server.ask(request)
        if answer.status != OK:
            raise self._refused(answer.status, refusal_in(answer.body))
        with self._reading():
            # A stream of one message, such as that of keepalive, is a line.
            found = json.loads(answer.body)
            if not isinstance(found, dict):
                raise TypeError("no object")
        return found

    def _refused(self, status: int, reason: str) -> SourceFailed:
        todo = "look at its log"
        if status == 404:
            todo = "it must be etcd 3.4 or later, with its gRPC gateway"
        elif status in (400, 401, 403):
            todo = "allow clients without a user to read and write below the prefix"
        at = self._servers[0].address
        return SourceFailed(f"etcd at {at} refuses ({status}: {reason}): {todo}")

    def _reading(self) -> Any:
        return reading(self._servers[0].address)


def _raw(text: str | bytes) -> str:
    raw = text if isinstance(text, bytes) else text.encode()
    return base64.b64encode(raw).decode()


def _text(value: str) -> str:
    return base64.b64decode(value).decode(errors="replace")


def _is_created(line: bytes) -> bool:
    """Return whether a line only reports that the watch has been created."""
    try:
        result = json.loads(line)["result"]
        return bool(result.get("created")) and not result.get("events")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError):
        # Unknown content: the keys are read again.
        return False
