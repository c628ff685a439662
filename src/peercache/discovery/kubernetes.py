"""k8s://SERVICE: the endpoints of a service, read from the Kubernetes API with the pod's own token.

The API is asked for the EndpointSlices (discovery.k8s.io/v1, Kubernetes 1.21 and later) of the
service. A watch only reports that something has changed: then all slices are read again, so the
order and the loss of events do not matter.
"""

from __future__ import annotations

import json
import os
import random
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final
from urllib.parse import quote

import attrs

from peercache.config.entries import KubernetesAddress
from peercache.config.quantities import DEFAULT_CONTROL_PORT, format_address
from peercache.discovery.port import (
    OK,
    OnAddresses,
    Request,
    Resolver,
    SourceFailed,
    WebServer,
    pause,
    printable,
    reading,
    refusal_in,
)
from peercache.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder with the token, the authority and the namespace of a pod's service account."""

SLICES_AT_ONCE = 10
"""Slices of one answer: a thousand endpoints, 300 KB, and some milliseconds of the loop."""

SLICES_MAX = 4096
"""Slices read of one service: enough for all kept addresses, at four per slice."""

WATCH_S = 300
"""How long one watch lasts; afterwards the slices are read again in any case."""

PORT_NAME = "control"
"""The port of a service that has several."""

ACCOUNT_BYTES_MAX = 64 * 1024

_SERVICE_LABEL = "kubernetes.io/service-name"
_GONE = 410


@attrs.frozen
class ApiServer:
    """The address of the API of this pod's cluster. account: the folder of the service account."""

    host: str
    port: int
    account: Path = ACCOUNT

    @classmethod
    def of_this_pod(cls, text: str, environment: Mapping[str, str] | None = None) -> ApiServer:
        """Return the address that Kubernetes passes to pods; raise ConfigError outside a pod."""
        known = os.environ if environment is None else environment
        host, port = known.get("KUBERNETES_SERVICE_HOST", ""), known.get("KUBERNETES_SERVICE_PORT")
        if not host:
            raise ConfigError(
                "discovery_addr",
                f"{text} works in a pod only, and KUBERNETES_SERVICE_HOST is not set: use dns:// "
                "or addresses",
            )
        return cls(host, int(port) if port and port.isdecimal() else 443)


@final
class KubernetesSource:
    """The endpoints of one service."""

    def __init__(self, address: KubernetesAddress, api: ApiServer, *, rng: random.Random) -> None:
        """Use the API of this pod's cluster."""
        self.text = address.text
        self._address = address
        self._api = api
        self._rng = rng
        self._resolver = Resolver()

    async def follow(self, on_addresses: OnAddresses) -> None:
        """Report all addresses, again when they change; raise SourceFailed."""
        server = self._server()
        while True:
            addresses, version = await self._read(server)
            on_addresses(addresses)
            await self._watch(server, version)
            await pause(len(addresses), self._rng)

    def _server(self) -> WebServer:
        """Return the API server, with the current authority of the pod."""
        authority = self._api.account / "ca.crt"
        try:
            tls = ssl.create_default_context(cafile=str(authority))
        except (OSError, ssl.SSLError) as error:
            raise self._without(authority, error) from error
        return WebServer(self._api.host, self._api.port, self._resolver, tls)

    def _account(self, name: str) -> str:
        path = self._api.account / name
        try:
            with path.open("rb") as file:
                return file.read(ACCOUNT_BYTES_MAX).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise self._without(path, error) from error

    def _without(self, path: Path, error: Exception) -> SourceFailed:
        why = getattr(error, "strerror", None) or error
        return SourceFailed(
            f"cannot use {path} ({printable(why)}): give the pod a "
            "service account, with automountServiceAccountToken"
        )

    def _namespace(self) -> str:
        return self._address.namespace or self._account("namespace")

    def _request(self, **parameters: str) -> Request:
        # Kubernetes replaces the token while the pod runs.
        token = self._account("token")
        given = {"labelSelector": f"{_SERVICE_LABEL}={self._address.service}", **parameters}
        query = "&".join([f"{name}={quote(value, safe='')}" for name, value in given.items()])
        path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._namespace())}/endpointslices"
        headers = (("Authorization", f"Bearer {token}"), ("Accept", "application/json"))
        return Request("GET", f"{path}?{query}", headers)

    async def _read(self, server: WebServer) -> tuple[list[str], str]:
        """Return all addresses, and the version of the list."""
        addresses: list[str] = []
        more, slices = "", 0
        while True:
            asked = {"continue": more} if more else {}
            answer = await server.ask(self._request(limit=str(SLICES_AT_ONCE), **asked))
            if answer.status != OK:
                raise self._refused(answer.status, refusal_in(answer.body), "list")
            with reading(server.address):
                found = json.loads(answer.body)
                items, facts = found["items"], found["metadata"]
                for item in items:
                    addresses += self._of_slice(item)
                slices += len(items)
                version, more = str(facts["resourceVersion"]), facts.get("continue") or ""
            if not more or not items or slices >= SLICES_MAX:
                break
        if not slices:
            raise SourceFailed(
                f"the namespace {self._namespace()} has no EndpointSlice of a service "
                f"{self._address.service}: correct the name, or make the service"
            )
        return addresses, version

    def _of_slice(self, item: Any) -> Iterator[str]:
        if item["addressType"] not in ("IPv4", "IPv6"):
            return
        port = self._address.port or _port(item.get("ports") or [])
        for endpoint in item.get("endpoints") or []:
            # An endpoint that is not ready yet is a starting node.
            if not (endpoint.get("conditions") or {}).get("terminating"):
                for host in endpoint["addresses"]:
                    yield format_address(str(host), port)

    async def _watch(self, server: WebServer, version: str) -> None:
        """Return once a slice has changed since this version, or after WATCH_S."""
        request = self._request(watch="1", resourceVersion=version, timeoutSeconds=str(WATCH_S))
        status = await server.follow_lines(request, lambda line: bool(line.strip()), WATCH_S)
        if status not in (OK, _GONE):
            raise self._refused(status, "it refuses a watch", "watch")

    def _refused(self, status: int, reason: str, verb: str) -> SourceFailed:
        todo = "look at the log of the API server"
        if status == 401:
            todo = "the pod's token is not valid: look at its service account"
        elif status == 403:
            todo = (
                f"let the pod's service account get, list and watch endpointslices of the group "
                f"discovery.k8s.io in the namespace {self._namespace()}"
            )
        elif status == 404:
            todo = "it must be Kubernetes 1.21 or later"
        return SourceFailed(f"the Kubernetes API refuses to {verb} ({status}: {reason}): {todo}")


def _port(ports: list[Any]) -> int:
    """Return the port named `control`, the only one, or the default."""
    named = [row["port"] for row in ports if row.get("name") == PORT_NAME]
    if not named and len(ports) == 1:
        named = [ports[0]["port"]]
    return int(named[0]) if named and named[0] else DEFAULT_CONTROL_PORT
