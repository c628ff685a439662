"""A real Kubernetes API server on a real etcd, as processes of a test; no kubelet, no controller.

It is Kubernetes 1.20, the only one whose sources can be had here. What is newer in the chart is
served as a kind of its own with the newer name, or named as 1.20 does: see `NEWER` and `chart_for`.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import attrs

from tests.deploy.test_chart import CHART, HELM, TOOLS
from tests.pace import wait_until
from tests.system.nodes import free_port

BINARY = TOOLS / "kube-apiserver"
ADMIN = "admin-of-the-tests"
NEWER = (
    ("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),
    ("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    ("cert-manager.io", "v1", "certificates", "Certificate"),
)
"""Kinds that this server does not have: defined as custom resources, without a schema. The server
stores, lists, pages and watches them, and decides who may, as it does all others."""


def skip_reason() -> str:
    """Return why there can be no API server here, "" where there can."""
    if not (BINARY.exists() and shutil.which("etcd")):
        return "there is no API server: tests/deploy/get_apiserver.sh builds one in six minutes"
    return ""


@attrs.define(eq=False)
class ApiServer:
    """The server, and what an administrator sends to it."""

    folder: Path
    port: int = attrs.field(factory=lambda: int(free_port()))
    _started: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def start(self) -> None:
        """Start etcd and the server, and wait until it is ready and knows the newer kinds."""
        etcd, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        keys = self.folder / "keys"
        keys.mkdir()
        account_key = keys / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", str(account_key), "2048"],
                       check=True, capture_output=True)  # fmt: skip
        tokens = keys / "tokens.csv"
        tokens.write_text(f'{ADMIN},admin,1,"system:masters"\n')
        self._run("etcd", "--data-dir", str(self.folder / "etcd"),
                  "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
                  "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                  "--initial-cluster", f"default={peer}")  # fmt: skip
        self._run(str(BINARY), "--etcd-servers", etcd, "--cert-dir", str(keys),
                  "--bind-address", "127.0.0.1", "--secure-port", str(self.port),
                  "--advertise-address", "10.0.0.1", "--endpoint-reconciler-type", "none",
                  "--service-cluster-ip-range", "10.96.0.0/24",
                  "--authorization-mode", "RBAC", "--token-auth-file", str(tokens),
                  "--service-account-issuer", "https://kubernetes.default.svc",
                  "--service-account-key-file", str(account_key),
                  "--service-account-signing-key-file", str(account_key),
                  # As kubeadm sets it up: the chart has a privileged kind of pod.
                  "--allow-privileged=true",
                  # Its own older version of the group would hide the newer one.
                  "--runtime-config", "discovery.k8s.io/v1beta1=false",
                  # No controller makes the accounts that it wants.
                  "--disable-admission-plugins", "ServiceAccount")  # fmt: skip
        wait_until(lambda: self.ask("GET", "/readyz")[0] == 200)
        for group, version, plural, kind in NEWER:
            self.made("/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
                      _definition(group, version, plural, kind))  # fmt: skip
        for group, version, plural, _ in NEWER:
            path = f"/apis/{group}/{version}/{plural}"
            wait_until(lambda path=path: self.ask("GET", path)[0] == 200)  # type: ignore[misc]
        self._write_kubeconfig()

    def _run(self, *command: str) -> None:
        log = (self.folder / f"{Path(command[0]).name}.log").open("w")
        self._started.append(subprocess.Popen(command, stdout=log, stderr=log))
        log.close()

    def stop(self) -> None:
        """End both processes."""
        for process in reversed(self._started):
            process.kill()
            process.wait()

    @property
    def authority(self) -> Path:
        """The certificate by which the server proves itself; it has made it."""
        return self.folder / "keys" / "apiserver.crt"

    @property
    def url(self) -> str:
        """Where it is."""
        return f"https://127.0.0.1:{self.port}"

    def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, token: str = ADMIN
    ) -> tuple[int, Any]:
        """Return status and answer; status 0 while nothing answers."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            context = ssl.create_default_context(cafile=str(self.authority))
            with urllib.request.urlopen(request, context=context, timeout=10) as answer:
                return answer.status, _decoded(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read())
        except OSError:
            return 0, None

    def made(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make an object; return it as the server has it."""
        status, answer = self.ask("POST", path, body)
        assert status == 201, answer
        return dict(answer)

    def token_of(self, namespace: str, account: str) -> str:
        """Return a token of a service account, as a pod gets it."""
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
                   "spec": {"expirationSeconds": 3600}}  # fmt: skip
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self.made(path, request)["status"]["token"])

    def helm(self, *arguments: str) -> str:
        """Run helm against the server; return what it prints."""
        environment = {**os.environ, "KUBECONFIG": str(self.folder / "config"),
                       "HOME": str(self.folder)}  # fmt: skip
        done = subprocess.run([str(HELM), *arguments], env=environment, check=False,
                              capture_output=True, text=True, timeout=120)  # fmt: skip
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def _write_kubeconfig(self) -> None:
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {
                "server": self.url, "certificate-authority": str(self.authority)}}],
            "users": [{"name": "admin", "user": {"token": ADMIN}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "admin"}}],
        }  # fmt: skip
        file = self.folder / "config"
        file.write_text(json.dumps(config))
        file.chmod(0o600)


def chart_for(folder: Path) -> Path:
    """Return a copy of the chart that states of itself and of one kind what this server knows."""
    chart = folder / "peercache"
    shutil.copytree(CHART, chart)
    described, policies = chart / "Chart.yaml", chart / "templates" / "policies.yaml"
    for file, newer, older in (
        (described, 'kubeVersion: ">=1.25.0-0"', 'kubeVersion: ">=1.20.0-0"'),
        (policies, "apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n"),
    ):
        text = file.read_text()
        assert text.count(newer) == 1
        file.write_text(text.replace(newer, older))
    return chart


def _definition(group: str, version: str, plural: str, kind: str) -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [{"name": version, "served": True, "storage": True,
                          "schema": {"openAPIV3Schema": schema}}],
        },
    }  # fmt: skip


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
