"""What sources of addresses ask, in this process: a resolver, an etcd, and a Kubernetes API.

Each can be given addresses, and made to die, to hang, and to answer garbage. The two
that speak HTTP answer in the shapes that etcd 3.4 and Kubernetes 1.29 answer in.
"""

from __future__ import annotations

import base64
import json
import random
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

import attrs
import h11
import trio
import trustme

from peercache.config.entries import DnsAddress, EtcdAddress, KubernetesAddress, parse_source
from peercache.config.quantities import parse_address
from peercache.discovery.etcd import EtcdSource
from peercache.discovery.finder import DnsSource
from peercache.discovery.kubernetes import ApiServer, KubernetesSource
from peercache.discovery.port import AddressSource

PORT = 31998


class Asked(Protocol):
    """What a source asks, and the source."""

    def source(self) -> AddressSource:
        """Make the source under test."""

    async def start(self, nursery: trio.Nursery) -> None:
        """Begin to answer."""

    def has(self, hosts: Iterable[str]) -> None:
        """Answer with these numeric hosts from now on."""

    async def kill(self) -> None:
        """Stop to answer at all."""

    def hang(self) -> None:
        """Take questions, and answer none."""

    def answer_with(self, garbage: bytes) -> None:
        """Answer every question so."""

    def end(self) -> None:
        """Leave nothing behind."""


class FakeResolver:
    """The resolver of the system."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.is_dead = False
        self.garbage = b""
        self.released = threading.Event()
        self.released.set()

    def source(self) -> AddressSource:
        address = parse_source(f"dns://nodes:{PORT}")
        assert isinstance(address, DnsAddress)
        return DnsSource(address, self._look)

    def _look(self, name: str, port: int) -> list[str]:
        assert (name, port) == ("nodes", PORT)
        assert self.released.wait(120)
        if self.is_dead or not self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [self.garbage.decode("latin-1")] if self.garbage else list(self.hosts)

    async def start(self, nursery: trio.Nursery) -> None:
        self.is_dead = False

    def has(self, hosts: Iterable[str]) -> None:
        self.hosts = list(hosts)

    async def kill(self) -> None:
        self.is_dead = True

    def hang(self) -> None:
        self.released.clear()

    def answer_with(self, garbage: bytes) -> None:
        self.garbage = garbage

    def end(self) -> None:
        self.released.set()


@attrs.define(eq=False)
class WebStub:
    """An HTTP server on a free port of loopback. `handle` writes the answer to a request."""

    handle: Callable[[Exchange], Awaitable[None]]
    tls: ssl.SSLContext | None = None
    port: int = 0
    is_hung: bool = False
    garbage: bytes = b""
    requests: list[tuple[str, dict[str, str]]] = attrs.field(factory=list)
    _scope: trio.CancelScope | None = None
    _ended: trio.Event = attrs.field(factory=trio.Event)

    async def start(self, nursery: trio.Nursery) -> None:
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        self._scope, self._ended = trio.CancelScope(), trio.Event()
        nursery.start_soon(self._run, listeners, self._scope, self._ended)

    async def kill(self) -> None:
        assert self._scope is not None
        self._scope.cancel()
        await self._ended.wait()

    async def _run(self, listeners: Any, scope: trio.CancelScope, ended: trio.Event) -> None:
        with scope:
            await trio.serve_listeners(self._serve, listeners)
        ended.set()

    async def _serve(self, plain: trio.SocketStream) -> None:
        stream: Any = plain
        if self.tls is not None:
            stream = trio.SSLStream(plain, self.tls, server_side=True, https_compatible=True)
        try:
            async with stream:
                await self._answer(stream)
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            return  # The client went away.

    async def _answer(self, stream: Any) -> None:
        connection, body, head = h11.Connection(h11.SERVER), b"", None
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(bytes(await stream.receive_some(65536)))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                break
        if head is None:
            return
        if self.is_hung:
            await trio.sleep_forever()
        if self.garbage:
            await stream.send_all(self.garbage)
            return
        path = head.target.decode()
        self.requests.append((path, {k.decode(): v.decode() for k, v in head.headers}))
        await self.handle(Exchange(stream, connection, head.method.decode(), path, body))


@attrs.define(eq=False)
class Exchange:
    """One request, and the way to answer it."""

    stream: Any
    connection: h11.Connection
    method: str
    path: str
    body: bytes

    async def begin(self, status: int = 200) -> None:
        head = h11.Response(status_code=status, headers=[("Content-Type", "application/json")])
        await self.stream.send_all(self.connection.send(head))

    async def send(self, said: Any) -> None:
        data = json.dumps(said).encode() + b"\n"
        await self.stream.send_all(self.connection.send(h11.Data(data=data)))

    async def end(self) -> None:
        await self.stream.send_all(self.connection.send(h11.EndOfMessage()) or b"")

    async def answer(self, said: Any, status: int = 200) -> None:
        await self.begin(status)
        await self.send(said)
        await self.end()


class _OverHttp:
    """What the two that speak HTTP have in common."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.web = WebStub(self.handle, tls)
        self.revision = 1
        self.changed = trio.Event()

    async def handle(self, exchange: Exchange) -> None:
        raise AssertionError("each has its own")

    def news(self) -> None:
        self.revision += 1
        self.changed.set()
        self.changed = trio.Event()

    async def start(self, nursery: trio.Nursery) -> None:
        await self.web.start(nursery)

    async def kill(self) -> None:
        await self.web.kill()

    def hang(self) -> None:
        self.web.is_hung = True
        self.changed.set()

    def answer_with(self, garbage: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(garbage)
        self.web.garbage = head + garbage
        self.changed.set()

    def end(self) -> None:
        self.changed.set()


class FakeEtcd(_OverHttp):
    """The JSON gateway of etcd: leases, keys, a watch."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[bytes, tuple[bytes, str]] = {}
        self.leases: dict[str, int] = {}
        self.refusal: tuple[int, str] | None = None

    def source(self, name: str = "me", own: Callable[[], str] = lambda: f"10.9.9.9:{PORT}") -> Any:
        address = parse_source(f"etcd://127.0.0.1:{self.web.port}/pc/nodes")
        assert isinstance(address, EtcdAddress)
        return EtcdSource(address, name=name, own_address=own, rng=random.Random(1))

    def has(self, hosts: Iterable[str]) -> None:
        self.keys = {key: row for key, row in self.keys.items() if row[1]}
        for host in hosts:
            self.keys[f"pc/nodes/of-{host}".encode()] = (f"{host}:{PORT}".encode(), "")
        self.news()

    async def handle(self, exchange: Exchange) -> None:
        asked = json.loads(exchange.body)
        header = {"cluster_id": "1", "member_id": "2", "revision": str(self.revision)}
        if self.refusal:
            status, said = self.refusal
            await exchange.answer({"error": said, "code": 16, "message": said}, status)
        elif exchange.path == "/v3/lease/grant":
            lease = str(7587000000000000000 + self.revision)
            self.leases[lease] = asked["TTL"]
            self.revision += 1
            await exchange.answer({"header": header, "ID": lease, "TTL": str(asked["TTL"])})
        elif exchange.path == "/v3/lease/keepalive":
            found = {"TTL": str(self.leases[asked["ID"]])} if asked["ID"] in self.leases else {}
            await exchange.answer({"result": {"header": header, "ID": asked["ID"], **found}})
        elif exchange.path == "/v3/lease/revoke":
            self.expire(asked["ID"])
            await exchange.answer({"header": header})
        elif exchange.path == "/v3/kv/put":
            key, value = base64.b64decode(asked["key"]), base64.b64decode(asked["value"])
            assert asked["lease"] in self.leases
            self.keys[key] = (value, asked["lease"])
            self.news()
            await exchange.answer({"header": header})
        elif exchange.path == "/v3/kv/range":
            await exchange.answer({"header": header, **self._range(asked)})
        else:
            assert exchange.path == "/v3/watch", exchange.path
            await self._watch(exchange, int(asked["create_request"]["start_revision"]), header)

    def expire(self, lease: str) -> None:
        del self.leases[lease]
        self.keys = {key: row for key, row in self.keys.items() if row[1] != lease}
        self.news()

    def _range(self, asked: dict[str, Any]) -> dict[str, Any]:
        begin, end = base64.b64decode(asked["key"]), base64.b64decode(asked["range_end"])
        keys = sorted(key for key in self.keys if begin <= key < end)
        first = keys[: asked["limit"]]
        rows = [
            {"key": base64.b64encode(key).decode(), "version": "1",
             "value": base64.b64encode(self.keys[key][0]).decode()}
            for key in first
        ]  # fmt: skip
        more = {"more": True} if len(keys) > len(first) else {}
        return {**({"kvs": rows} if rows else {}), **more, "count": str(len(keys))}

    async def _watch(self, exchange: Exchange, since: int, header: dict[str, str]) -> None:
        await exchange.begin()
        await exchange.send({"result": {"header": header, "created": True}})
        while self.revision < since:
            await self.changed.wait()
            if self.web.is_hung or self.web.garbage:
                return
        await exchange.send({"result": {"header": header, "events": [{"kv": {"key": "cA=="}}]}})


class FakeKubernetes(_OverHttp):
    """The API of a cluster, over TLS, and the service account of a pod."""

    TOKEN = "eyJhbGciOiJSUzI1NiJ9.first"

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(tls)
        super().__init__(tls)
        self.account = folder
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        (folder / "namespace").write_text("serving")
        self.token(self.TOKEN)
        self.slices: list[dict[str, Any]] = []
        self.refusal: dict[str, Any] | None = None
        self.refuses_to_watch = False

    def token(self, text: str) -> None:
        (self.account / "token").write_text(text + "\n")
        self.expected = text

    def source(self, text: str = "k8s://peercache") -> AddressSource:
        address = parse_source(text)
        assert isinstance(address, KubernetesAddress)
        server = ApiServer("127.0.0.1", self.web.port, self.account)
        return KubernetesSource(address, server, rng=random.Random(1))

    def has(self, hosts: Iterable[str]) -> None:
        """Answer in slices of a hundred endpoints, as Kubernetes does."""
        hosts = list(hosts)
        parts = [hosts[at : at + 100] for at in range(0, len(hosts), 100)] or [[]]
        self.slices = [self._slice(number, part) for number, part in enumerate(parts)]
        self.news()

    def _slice(self, number: int, hosts: list[str]) -> dict[str, Any]:
        return {
            "metadata": {
                "name": f"peercache-{number:05}", "namespace": "serving",
                "labels": {"kubernetes.io/service-name": "peercache"},
            },
            "addressType": "IPv4",
            "endpoints": [
                {
                    "addresses": [host],
                    "conditions": {"ready": True, "serving": True, "terminating": False},
                    "nodeName": "worker-1",
                    "targetRef": {"kind": "Pod", "namespace": "serving", "name": f"pc-{host}"},
                }
                for host in hosts
            ],
            "ports": [
                {"name": "metrics", "port": 31997, "protocol": "TCP"},
                {"name": "control", "port": PORT, "protocol": "TCP"},
            ],
        }  # fmt: skip

    async def handle(self, exchange: Exchange) -> None:
        url = urlsplit(exchange.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        token = self.web.requests[-1][1].get("authorization", "")
        if token != f"Bearer {self.expected}":
            await exchange.answer(status_of(401, "Unauthorized", "Unauthorized"), 401)
        elif self.refusal is not None:
            await exchange.answer(self.refusal, self.refusal["code"])
        elif url.path != "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices":
            missing = "the server could not find the requested resource"
            await exchange.answer(status_of(404, "NotFound", missing), 404)
        elif asked.get("watch"):
            await self._watch(exchange, int(asked["resourceVersion"]))
        else:
            await self._list(exchange, asked)

    async def _list(self, exchange: Exchange, asked: dict[str, str]) -> None:
        _, _, service = asked["labelSelector"].partition("kubernetes.io/service-name=")
        mine = [
            one
            for one in self.slices
            if one["metadata"]["labels"]["kubernetes.io/service-name"] == service
        ]
        begin, limit = int(asked.get("continue", "0")), int(asked["limit"])
        end = begin + limit
        more = {"continue": str(end)} if end < len(mine) else {}
        await exchange.answer({
            "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
            "metadata": {"resourceVersion": str(self.revision), **more}, "items": mine[begin:end],
        })  # fmt: skip

    async def _watch(self, exchange: Exchange, since: int) -> None:
        if self.refuses_to_watch:
            await exchange.answer(forbidden("watch"), 403)
            return
        await exchange.begin()
        while self.revision <= since:
            await self.changed.wait()
            if self.web.is_hung or self.web.garbage:
                return
        await exchange.send({"type": "MODIFIED", "object": self.slices[0] if self.slices else {}})


def status_of(code: int, reason: str, message: str) -> dict[str, Any]:
    """Return what the API answers to a refused request."""
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code}  # fmt: skip


def forbidden(verb: str) -> dict[str, Any]:
    """Return the refusal of RBAC, as Kubernetes words it."""
    message = (
        'endpointslices.discovery.k8s.io is forbidden: User "system:serviceaccount:serving:default"'
        f' cannot {verb} resource "endpointslices" in API group "discovery.k8s.io" in the '
        'namespace "serving"'
    )
    refusal = status_of(403, "Forbidden", message)
    return {**refusal, "details": {"group": "discovery.k8s.io", "kind": "endpointslices"}}


def hosts_of(addresses: Iterable[str]) -> set[str]:
    """Return the hosts of addresses at PORT, without that of the source itself."""
    found = {parse_address(address) for address in addresses}
    assert all(port == PORT for _, port in found)
    return {host for host, _ in found} - {"10.9.9.9"}
