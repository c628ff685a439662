"""The chart on a real Kubernetes API server: installed, upgraded, removed; and its nodes' token."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import yaml

from peercache.config.entries import KubernetesAddress, parse_source
from peercache.discovery import kubernetes
from peercache.discovery.kubernetes import KubernetesSource
from peercache.discovery.port import SourceFailed
from tests.deploy.api_server import ApiServer, chart_for, skip_reason
from tests.deploy.test_chart import HELM, NEWEST, VALIDATE, VALUES, flags_of, validated
from tests.pace import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("chart"),
    pytest.mark.skipif(bool(skip_reason()), reason=skip_reason()),
    pytest.mark.skipif(
        not (HELM.exists() and VALIDATE.exists()),
        reason="helm and the schemas are not here: tests/deploy/get_tools.sh fetches them",
    ),
]

SPACE = "llm"
SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SPACE}/endpointslices"
LISTS = {
    "DaemonSet": "/apis/apps/v1/daemonsets",
    "Service": "/api/v1/services",
    "ConfigMap": "/api/v1/configmaps",
    "ServiceAccount": "/api/v1/serviceaccounts",
    "Secret": "/api/v1/secrets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1beta1/poddisruptionbudgets",
    "ServiceMonitor": "/apis/monitoring.coreos.com/v1/servicemonitors",
    "Certificate": "/apis/cert-manager.io/v1/certificates",
}


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServer]:
    """A server of this module's own, with an empty namespace."""
    with tempfile.TemporaryDirectory() as folder:
        server = ApiServer(Path(folder))
        try:
            server.start()
            server.made("/api/v1/namespaces", {"metadata": {"name": SPACE}})
            yield server
        finally:
            server.stop()


@pytest.fixture(autouse=True)
def nothing_installed(api: ApiServer) -> Iterator[None]:
    """Remove what a failed test has left."""
    yield
    api.helm("uninstall", "r", "--namespace", SPACE, "--ignore-not-found")


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, as this server knows its kinds."""
    return chart_for(tmp_path_factory.mktemp("chart"))


def objects(api: ApiServer) -> dict[str, dict[str, Any]]:
    """Return every object of the namespace, by kind and name."""
    found = {}
    for kind, path in LISTS.items():
        head, _, plural = path.rpartition("/")
        status, answer = api.ask("GET", f"{head}/namespaces/{SPACE}/{plural}")
        assert status == 200, answer
        found |= {f"{kind}/{each['metadata']['name']}": each for each in answer["items"]}
    return found


@pytest.mark.parametrize("name", VALUES)
def test_a_release_comes_changes_and_goes(name: str, api: ApiServer, chart: Path) -> None:
    """The server accepts every object as it is rendered; after uninstall nothing is left."""
    values = flags_of(VALUES[name])
    before = objects(api)
    api.helm("install", "r", str(chart), "--namespace", SPACE, *values)
    manifest = api.helm("get", "manifest", "r", "--namespace", SPACE)
    rendered = {
        f"{each['kind']}/{each['metadata']['name']}" for each in yaml.safe_load_all(manifest)
    }
    installed = objects(api)
    made = {key for key in installed.keys() - before.keys() if not key.startswith("Secret/sh.helm")}
    assert made == rendered
    assert "DaemonSet/r-peercache" in made
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        assert (f"{kind}/r-peercache" in made) is (name != "everything off")

    api.helm("upgrade", "r", str(chart), "--namespace", SPACE, *values,
             "--set", "settings.verify=full", "--set", "poolSize=2Gi")  # fmt: skip
    upgraded = objects(api)["DaemonSet/r-peercache"]["metadata"]["generation"]
    # Pods take the settings by a rolling update: the template has changed.
    assert upgraded == installed["DaemonSet/r-peercache"]["metadata"]["generation"] + 1

    api.helm("uninstall", "r", "--namespace", SPACE)
    assert objects(api).keys() == before.keys()


def endpoint_slice(name: str, *hosts: str) -> dict[str, Any]:
    """Return what Kubernetes' controller makes of the pods of the chart's service."""
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": SPACE,
                     "labels": {"kubernetes.io/service-name": "r-peercache"}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [host], "conditions": {"ready": False, "serving": False,
                                                           "terminating": False}}
                      for host in hosts],
        "ports": [{"name": "control", "port": 31998, "protocol": "TCP"},
                  {"name": "http", "port": 31997, "protocol": "TCP"}],
    }  # fmt: skip


def source_of(api: ApiServer, account: Path, token: str) -> KubernetesSource:
    """Return what a pod with this token asks."""
    (account / "token").write_text(token)
    (account / "namespace").write_text(SPACE)
    (account / "ca.crt").write_bytes(api.authority.read_bytes())
    address = parse_source("k8s://r-peercache")
    assert isinstance(address, KubernetesAddress)
    server = kubernetes.ApiServer("127.0.0.1", api.port, account)
    return KubernetesSource(address, server, rng=random.Random(1))


async def test_the_charts_account_reads_slices_and_nothing_else(
    api: ApiServer, chart: Path, tmp_path: Path
) -> None:
    """Its token finds the nodes and learns of changes; all else is forbidden, in words."""
    api.helm("install", "r", str(chart), "--namespace", SPACE, *flags_of(VALUES["the api"]))
    first, second = endpoint_slice("r-a", "10.1.0.1", "10.1.0.2"), endpoint_slice("r-b")
    manifest = tmp_path / "slice.yaml"
    manifest.write_text(yaml.safe_dump(first))
    assert validated(NEWEST, manifest).returncode == 0
    api.made(SLICES, first)
    token = api.token_of(SPACE, "nodes")
    reported: list[set[str]] = []

    async def found(*hosts: str) -> None:
        await until(lambda: reported[-1:] == [{f"{host}:31998" for host in hosts}])

    async with trio.open_nursery() as nursery:
        source = source_of(api, tmp_path, token)
        nursery.start_soon(source.follow, lambda hosts: reported.append(set(hosts)))
        await found("10.1.0.1", "10.1.0.2")
        second["endpoints"] = endpoint_slice("r-b", "10.1.0.3")["endpoints"]
        await trio.to_thread.run_sync(api.made, SLICES, second)
        await found("10.1.0.1", "10.1.0.2", "10.1.0.3")
        await trio.to_thread.run_sync(api.ask, "DELETE", f"{SLICES}/r-a")
        await found("10.1.0.3")
        nursery.cancel_scope.cancel()

    for method, path in (
        ("GET", f"/api/v1/namespaces/{SPACE}/pods"),
        ("GET", f"/api/v1/namespaces/{SPACE}/secrets"),
        ("GET", "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"),
        ("DELETE", f"{SLICES}/r-b"),
        ("POST", SLICES),
    ):
        body = endpoint_slice("r-c") if method == "POST" else None
        assert api.ask(method, path, body, token)[0] == 403, path
    assert api.ask("GET", SLICES, token=token)[0] == 200

    other = {"metadata": {"name": "other"}}
    api.made(f"/api/v1/namespaces/{SPACE}/serviceaccounts", other)
    for stranger, said in (
        (api.token_of(SPACE, "other"), "get, list and watch endpointslices"),
        ("no-token", "the pod's token is not valid"),
    ):
        with pytest.raises(SourceFailed, match=said):
            await source_of(api, tmp_path, stranger).follow(lambda found: None)
