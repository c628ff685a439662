"""The compose file and the image: settings and commands in them are PeerCache's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from peercache.cli.main import peercache
from peercache.config.home import SYSTEM_FOLDER
from peercache.config.quantities import parse_size
from peercache.config.settings import Config
from peercache.trust.certificates import certificates_in, facts_of
from peercache.trust.identity import CertificateRole

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
NODES = [name for name in COMPOSE["services"] if name.startswith("node-")]
CONTAINERFILE = (DEPLOY / "container" / "Containerfile").read_text()
VERSION = re.search(
    r'^version = "(.+)"', (DEPLOY.parent / "pyproject.toml").read_text(), re.MULTILINE
)


def test_versions_are_those_of_the_package() -> None:
    """A release changes one number, and this test names the other places."""
    assert VERSION
    chart = yaml.safe_load((DEPLOY / "helm" / "peercache" / "Chart.yaml").read_text())
    images = {service["image"] for service in COMPOSE["services"].values()}

    # Charts have semantic versions, Python packages have PEP 440's.
    assert chart["version"] == VERSION[1].replace(".dev", "-dev")
    assert chart["appVersion"] == VERSION[1]
    assert images == {f"peercache:{VERSION[1]}"}


@pytest.mark.parametrize("name", NODES)
def test_settings_of_a_node_are_right(name: str) -> None:
    """All names are known, the pool fits into its shared memory, the stop outlasts the flush."""
    service: dict[str, Any] = COMPOSE["services"][name]
    config = Config.load({}, environment=service["environment"])
    mounts = [volume.split(":")[1] for volume in service["volumes"]]

    assert config.advertise == service["hostname"] == name
    assert f"{name}:31998" in config.discovery_addr
    assert len(config.discovery_addr) == len(NODES)
    assert config.pool_size < parse_size(service["shm_size"].replace("m", "MiB"))
    assert float(service["stop_grace_period"].rstrip("s")) > config.disk_flush_s + 10
    assert str(Path(config.tls_key).parent) in mounts
    assert not config.home
    assert str(SYSTEM_FOLDER) in mounts
    assert config.disk_path in mounts


@pytest.mark.slow
def test_certificates_are_made_as_the_nodes_name_them(tmp_path: Path) -> None:
    """The script of the one-shot service, run here in place of /etc/peercache/pki."""
    service = COMPOSE["services"]["certificates"]
    [script] = service["command"]
    for _ in range(2):  # A second start changes nothing.
        command = [*service["entrypoint"], script.replace("/etc/peercache/pki", str(tmp_path))]
        # The image has `peercache` on its path.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        subprocess.run(command, check=True, capture_output=True, env=environment)
        made = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    for name in NODES:
        environment = COMPOSE["services"][name]["environment"]
        files = {Path(environment[f"PEERCACHE_TLS_{kind}"]).name for kind in ("CA", "CERT", "KEY")}
        assert files <= set(made)
        [certificate] = certificates_in(made[f"node-{name}.crt"].decode())
        identity = facts_of(certificate).identity
        assert identity
        assert (identity.role, identity.cluster) == (CertificateRole.NODE, "compose")
    assert made == {file.name: file.read_bytes() for file in tmp_path.iterdir()}


def test_image_is_not_of_root_and_asks_peercache_for_its_health() -> None:
    """Its commands exist, and its folders are those that the other files mount."""
    final = CONTAINERFILE.rpartition("\nFROM ")[2]
    entry = re.search(r'^ENTRYPOINT \["(\w+)"\]', final, re.MULTILINE)
    probe = re.search(r"^HEALTHCHECK .* CMD \[(.+)\]", final, re.MULTILINE)
    assert entry
    assert probe
    program, *command = [word.strip('", ') for word in shlex.split(probe[1].replace(",", " "))]

    assert entry[1] == program == "peercache"
    assert CliRunner().invoke(peercache, [*command, "--help"]).exit_code == 0
    assert re.search(r"^USER 65532:65532$", final, re.MULTILINE)
    mounted = {v.split(":")[1] for name in NODES for v in COMPOSE["services"][name]["volumes"]}
    [folders] = re.findall(r"^RUN install -d -o 65532 -g 65532 -m 0700 (.+)$", final, re.MULTILINE)
    assert mounted <= set(folders.split())
