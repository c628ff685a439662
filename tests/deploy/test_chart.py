"""The Helm chart: what it renders is right for Kubernetes, and for PeerCache."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from click.testing import CliRunner

from peercache.cli.main import peercache
from peercache.config.quantities import parse_size
from peercache.config.settings import Config
from peercache.trust.identity import CertificateRole, parse_identity

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "peercache"
TOOLS = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peercache" / "deploy"
HELM = TOOLS / "helm"
VALIDATE = TOOLS / "schemas" / "bin" / "kubernetes-validate"
OLDEST, NEWEST = "1.25", "1.35"
FOREIGN_KINDS = {"ServiceMonitor", "Certificate"}
"""Kinds of other projects: Kubernetes has no schema of them."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("chart"),  # One worker renders each set of values once.
    pytest.mark.skipif(
        not (HELM.exists() and VALIDATE.exists()),
        reason="helm and the schemas are not here: tests/deploy/get_tools.sh fetches them",
    ),
]

SECURE = {"tls.kind": "secret", "tls.secret": "peercache-node"}
VALUES: dict[str, dict[str, str]] = {
    "trial": {"tls.kind": "insecure", "tls.cluster": "trial"},
    "README": dict(re.findall(r"--set (\S+)=(\S+)", (ROOT / "README.md").read_text())),
    "certificates": SECURE,
    "cert-manager": {"tls.kind": "certManager", "tls.certManager.issuerRef.name": "ours"},
    "disk": {**SECURE, "disk.enabled": "true", "disk.size": "2Ti"},
    "huge pages": {**SECURE, "hugepages.size": "1G", "poolSize": "64Gi"},
    "rdma by a plug-in": {
        **SECURE,
        "rdma.enabled": "true",
        "rdma.resource": "rdma/hca",
        "rdma.clearText": "true",
        "runAsUser": "0",
    },
    "rdma of the host": {
        "tls.kind": "insecure",
        "rdma.enabled": "true",
        "runAsUser": "0",
        "network.hostNetwork": "true",
        "sharing.mode": "hostIPC",
    },
    "the api": {**SECURE, "discovery.kind": "kubernetes", "serviceAccount.name": "nodes"},
    "everything off": {
        **SECURE,
        "httpOpen": "false",
        "podDisruptionBudget.enabled": "false",
        "networkPolicy.enabled": "false",
        "serviceAccount.create": "false",
    },
    "settings": {
        **SECURE,
        "settings.verify": "full",
        "settings.op_timeout_s": "1.5",
        "settings.max_masters": "5",
        "settings.mirror_pulls": "hot",
        "serviceMonitor.enabled": "true",
        "serviceMonitor.labels.release": "prometheus",
        "shareUids": "{1000,1001}",
    },
}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm in the chart's folder; it keeps nothing."""
    return subprocess.run(
        [str(HELM), *arguments], cwd=CHART, capture_output=True, text=True, check=False
    )


def flags_of(values: dict[str, str]) -> list[str]:
    """Return the flags that set values."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


def validated(version: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Compare files with the schemas of a version of Kubernetes."""
    command = [str(VALIDATE), "--strict", "-k", version, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def rendered_text(values: frozenset[tuple[str, str]]) -> str:
    """Return what the chart gives as release `r` in the namespace `llm`."""
    done = helm("template", "r", ".", "--namespace", "llm", *flags_of(dict(values)))
    assert done.returncode == 0, done.stderr
    return done.stdout


@attrs.frozen
class Rendered:
    """What one set of values gives."""

    objects: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, values: dict[str, str]) -> Rendered:
        """Render the chart."""
        text = rendered_text(frozenset(values.items()))
        objects = [each for each in yaml.safe_load_all(text) if each]
        names = [f"{each['kind']}/{each['metadata']['name']}" for each in objects]
        assert len(names) == len(set(names))
        return cls(dict(zip(names, objects, strict=True)))

    def __getitem__(self, kind: str) -> dict[str, Any]:
        """Return the only object of a kind."""
        [found] = [each for name, each in self.objects.items() if name.startswith(f"{kind}/")]
        return found

    def kinds(self) -> set[str]:
        """Return which kinds there are."""
        return {name.partition("/")[0] for name in self.objects}

    @property
    def pod(self) -> dict[str, Any]:
        """The pod's specification."""
        return self["DaemonSet"]["spec"]["template"]["spec"]

    @property
    def node(self) -> dict[str, Any]:
        """The container of the node."""
        [node] = self.pod["containers"]
        return node

    def config(self, folder: Path) -> Config:
        """Return the node's settings, as the node itself reads them."""
        file = folder / "node.toml"
        file.write_text(self["ConfigMap"]["data"]["node.toml"])
        return Config.load({}, file=str(file), environment={})


def test_chart_has_no_mistake_that_helm_finds() -> None:
    """Warnings count."""
    done = helm("lint", "--strict", ".", *flags_of(SECURE))

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_fit_the_schemas_of_kubernetes(version: str, tmp_path: Path) -> None:
    """An unknown field is an error, in the oldest version that the chart is for and in today's."""
    files = []
    for name, values in VALUES.items():
        for number, (title, found) in enumerate(Rendered.of(values).objects.items()):
            if title.partition("/")[0] in FOREIGN_KINDS:
                continue
            file = tmp_path / f"{name.replace(' ', '-')}-{number}.yaml"
            file.write_text(yaml.safe_dump(found))
            files.append(file)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(files[0].read_text().replace("metadata:", "metadato:", 1))

    done = validated(version, *files)

    assert done.returncode == 0, done.stdout + done.stderr
    assert validated(version, wrong).returncode != 0


@pytest.mark.parametrize("name", VALUES)
def test_a_node_takes_the_settings(name: str, tmp_path: Path) -> None:
    """The rendered file is right for PeerCache, and agrees with ports, folders and memory."""
    rendered = Rendered.of(VALUES[name])
    config = rendered.config(tmp_path)
    ports = {each["name"]: each["containerPort"] for each in rendered.node["ports"]}
    mounts = {each["mountPath"] for each in rendered.node["volumeMounts"]}

    assert config.listen_address() == ("", ports["control"])
    assert config.data_port == ports["data"]
    assert config.http_address(in_process=False) == ("0.0.0.0", ports["http"])
    assert os.path.dirname(config.home.removeprefix("ipc://")) in mounts  # noqa: PTH120 - no file
    assert config.shm_dir in mounts or rendered.pod.get("hostIPC")
    assert not config.disk_enabled or config.disk_path in mounts
    assert not config.has_tls or os.path.dirname(config.tls_key) in mounts  # noqa: PTH120
    assert config.hugepages == "off" or config.hugepages_dir in mounts
    limits = rendered.node["resources"]["limits"]
    engine = parse_size("2GiB")
    huge = next((size for key, size in limits.items() if key.startswith("hugepages-")), "0MiB")
    in_pool = parse_size(f"{limits['memory']}B") + parse_size(huge.rstrip("B") + "B") - engine
    assert in_pool == config.pool_size


@pytest.mark.parametrize("name", VALUES)
def test_services_and_policies_choose_the_pods(name: str) -> None:
    """A selector that misses is silent: no addresses, no metrics, no protection."""
    rendered = Rendered.of(VALUES[name])
    labels = rendered["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()
    selectors = [
        rendered["Service"]["spec"]["selector"],
        rendered["DaemonSet"]["spec"]["selector"]["matchLabels"],
    ]
    if "PodDisruptionBudget" in rendered.kinds():
        selectors.append(rendered["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"])
    if "NetworkPolicy" in rendered.kinds():
        policy = rendered["NetworkPolicy"]["spec"]
        selectors += [
            policy["podSelector"]["matchLabels"],
            policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"],
        ]
    for selector in selectors:
        assert selector.items() <= labels

    container_ports = {each["name"] for each in rendered.node["ports"]}
    service_ports = {each["targetPort"] for each in rendered["Service"]["spec"]["ports"]}
    assert service_ports == container_ports


def test_only_the_namespace_of_prometheus_reaches_the_http_port() -> None:
    """An empty selector would open it to every pod of the cluster."""
    policy = Rendered.of(SECURE)["NetworkPolicy"]["spec"]
    [rule] = [each for each in policy["ingress"] if each["ports"][0]["port"] == "http"]
    [peer] = rule["from"]
    assert peer == {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    }


def test_pod_gets_the_priority_class() -> None:
    """Of the values; without one, the default of the cluster."""
    assert Rendered.of({**SECURE, "priorityClassName": "high"}).pod["priorityClassName"] == "high"
    assert "priorityClassName" not in Rendered.of(SECURE).pod


def test_scrapes_find_the_service() -> None:
    """Prometheus' operator looks for a service of these labels, and a port of this name."""
    rendered = Rendered.of(VALUES["settings"])
    service, monitor = rendered["Service"], rendered["ServiceMonitor"]["spec"]
    [endpoint] = monitor["endpoints"]

    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


@pytest.mark.parametrize("name", ["certificates", "the api"])
def test_nodes_look_where_the_service_is(name: str, tmp_path: Path) -> None:
    """By DNS without rights, or through the API with the right to read slices."""
    rendered = Rendered.of(VALUES[name])
    service = rendered["Service"]
    [address] = rendered.config(tmp_path).discovery_addr
    target = f"{service['metadata']['name']}.llm"

    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    if name == "the api":
        assert address == f"k8s://{target}:31998"
        [subject] = rendered["RoleBinding"]["subjects"]
        assert subject["name"] == rendered.pod["serviceAccountName"] == "nodes"
        assert rendered["RoleBinding"]["roleRef"]["name"] == rendered["Role"]["metadata"]["name"]
        [rule] = rendered["Role"]["rules"]
        assert (rule["resources"], rule["verbs"]) == (["endpointslices"], ["get", "list", "watch"])
    else:
        assert address == f"dns://{target}.svc:31998"
        assert "Role" not in rendered.kinds()
    assert rendered.pod["automountServiceAccountToken"] is (name == "the api")


def test_certificates_of_an_issuer_have_the_names_that_nodes_ask_for() -> None:
    """PeerCache admits by cluster and role; every certificate has the name `peercache`."""
    rendered = Rendered.of(VALUES["cert-manager"])
    node = rendered.objects["Certificate/r-peercache-node"]["spec"]
    client = rendered.objects["Certificate/r-peercache-client"]["spec"]
    [volume] = [each for each in rendered.pod["volumes"] if each["name"] == "tls"]

    identity = parse_identity(node["uris"][0])
    assert (identity.role, identity.cluster) == (CertificateRole.NODE, "peercache")
    assert parse_identity(client["uris"][0]).role is CertificateRole.CLIENT
    assert "peercache" in node["dnsNames"]
    assert "peercache" in client["dnsNames"]
    assert {"client auth", "server auth"} <= set(node["usages"])
    assert "server auth" not in client["usages"]
    assert volume["secret"]["secretName"] == node["secretName"]


def test_key_can_be_read_by_the_node_alone(tmp_path: Path) -> None:
    """Kubernetes opens it to the pod's group, which then must be one that shares the node."""
    for values, mode in ((SECURE, 0o440), ({**SECURE, "runAsUser": "0"}, 0o400)):
        rendered = Rendered.of(values)
        [volume] = [each for each in rendered.pod["volumes"] if each["name"] == "tls"]
        group = rendered.pod["securityContext"].get("fsGroup")

        assert volume["secret"]["defaultMode"] == mode
        assert rendered.config(tmp_path).share_group == (str(group) if group else "")


def test_node_may_do_little(tmp_path: Path) -> None:
    """No root, no capability, no token, no writable image, no variables of other services."""
    pod = Rendered.of(SECURE).pod
    node = Rendered.of(SECURE).node["securityContext"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert node["capabilities"] == {"drop": ["ALL"]}
    assert node["allowPrivilegeEscalation"] is False
    assert node["readOnlyRootFilesystem"] is True
    assert "hostIPC" not in pod
    assert "hostNetwork" not in pod


def test_rdma_gets_devices_and_may_lock_memory() -> None:
    """From a plug-in without more rights, or from the host in a privileged pod."""
    by_plug_in = Rendered.of(VALUES["rdma by a plug-in"]).node
    of_host = Rendered.of(VALUES["rdma of the host"]).node

    assert by_plug_in["resources"]["limits"]["rdma/hca"] == "1"
    assert "privileged" not in by_plug_in["securityContext"]
    assert "IPC_LOCK" in by_plug_in["securityContext"]["capabilities"]["add"]
    assert of_host["securityContext"]["privileged"] is True
    assert "/dev/infiniband" in {each["mountPath"] for each in of_host["volumeMounts"]}


@pytest.mark.parametrize("name", VALUES)
def test_commands_of_the_pod_exist(name: str) -> None:
    """A probe that cannot run is noticed when it is too late: each must be a command of ours."""
    node = Rendered.of(VALUES[name]).node
    commands = [
        found["exec"]["command"]
        for found in (
            node["startupProbe"],
            node["readinessProbe"],
            node.get("lifecycle", {}).get("preStop", {}),
        )
        if "exec" in found
    ]
    commands.append(["peercache", *node["args"]])

    for program, command, *flags in commands:
        assert program == "peercache"
        done = CliRunner().invoke(peercache, [command, *flags, "--help"])
        assert done.exit_code == 0, done.output


def test_pod_is_given_the_time_that_leaving_takes(tmp_path: Path) -> None:
    """Kubernetes counts the hook before SIGTERM as part of it, and then kills."""
    rendered = Rendered.of({**SECURE, "leaveSeconds": "40", "drainSeconds": "90"})

    assert rendered.pod["terminationGracePeriodSeconds"] >= 90 + 40 + 5
    assert rendered.node["lifecycle"]["preStop"]["exec"]["command"][-1] == "90"
    assert "lifecycle" not in Rendered.of({**SECURE, "drainSeconds": "0"}).node
    assert rendered.config(tmp_path).disk_flush_s < 40


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "tls.secret: name the secret"),
        ({"tls.kind": "certManager"}, "name the issuer"),
        ({**SECURE, "poolsize": "1Gi"}, "poolsize"),
        ({**SECURE, "poolSize": "16GB"}, "poolSize"),
        ({**SECURE, "rdma.enabled": "true"}, "runAsUser"),
        ({**SECURE, "sharing.mode": "magic"}, "sharing/mode"),
        ({**SECURE, "network.control": "70000"}, "network/control"),
        ({**SECURE, "settings.Verify": "full"}, "Verify"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, str], said: str) -> None:
    """Before anything reaches the cluster, and with the name of the value."""
    done = helm("template", "r", ".", *flags_of(values))

    assert done.returncode != 0
    assert said in done.stderr


def test_a_changed_setting_is_a_rolling_update() -> None:
    """Pods do not read a changed ConfigMap by themselves."""
    annotations = [
        Rendered.of(values)["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]
        for values in (SECURE, {**SECURE, "settings.verify": "full"})
    ]

    assert annotations[0] != annotations[1]


def blocks_of_the_page() -> dict[str, Any]:
    """Return the YAML of docs/how-to/kubernetes.md, by its title."""
    text = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    found = re.findall(r'^```yaml title="(.+?)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL)
    return {title: yaml.safe_load(block) for title, block in found}


def test_the_page_shows_what_works(tmp_path: Path) -> None:
    """Its values render, and its engine mounts and names what the node of its host has."""
    blocks = blocks_of_the_page()
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(blocks["values.yaml"]))
    done = helm("template", "peercache", ".", "--namespace", "llm", "--values", str(values))
    assert done.returncode == 0, done.stderr
    objects = [each for each in yaml.safe_load_all(done.stdout) if each]
    node = Rendered({f"{each['kind']}/{each['metadata']['name']}": each for each in objects})
    config = node.config(tmp_path)
    template = blocks["sglang.yaml"]["spec"]["template"]
    [engine] = template["spec"]["containers"]
    extra = json.loads(engine["args"][-1])
    reported = Config.from_sglang(extra, {})
    manifest = tmp_path / "sglang.yaml"
    manifest.write_text(yaml.safe_dump(blocks["sglang.yaml"]))

    assert validated(NEWEST, manifest).returncode == 0
    assert (reported.cluster, reported.home) == (config.cluster, config.home)
    assert reported.share_group == config.share_group == "65532"
    assert reported.share_uids == (str(node.pod["securityContext"]["runAsUser"]),)
    mounts = {each["mountPath"]: each["name"] for each in engine["volumeMounts"]}
    volumes = {each["name"]: each for each in template["spec"]["volumes"]}
    for folder in ("/run/peercache", config.shm_dir):
        assert volumes[mounts[folder]]["hostPath"]["path"] == folder
    assert str(Path(reported.tls_key).parent) in mounts
    [policy] = [each for each in objects if each["kind"] == "NetworkPolicy"]
    allowed = policy["spec"]["ingress"][0]["from"][1]["podSelector"]["matchLabels"]
    assert allowed.items() <= template["metadata"]["labels"].items()
