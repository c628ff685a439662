"""A secured cluster of real nodes: revoked while it runs, seen over HTTPS."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache import Client
from peercache.trust.files import LOOK_S
from tests.certificates import Certificates
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess


def _files_of(certificates: Certificates, name: str, folder: Path) -> list[str]:
    """Give a node a folder of its own, as each host has one; return its flags."""
    folder.mkdir()
    flags = []
    for setting, path in certificates.node(name).items():
        copy = folder / f"{setting}.pem"
        shutil.copy(path, copy)
        copy.chmod(0o600)
        flags += ["--" + setting.replace("_", "-"), str(copy)]
    return flags


@pytest.mark.slow
def test_revoked_node_leaves_a_running_cluster(tmp_path: Path) -> None:
    """The list is copied to one node; all refuse the other one, and its own health says so."""
    with LocalCluster() as cluster:
        certificates = Certificates(tmp_path / "pki", cluster.name)
        operator = certificates.operator("ann")
        context = ssl.create_default_context(cafile=operator["tls_ca"])
        context.load_cert_chain(operator["tls_cert"], operator["tls_key"])

        def start(name: str) -> NodeProcess:
            flags = _files_of(certificates, name, tmp_path / name)
            return cluster.start(flags=(*flags, "--metrics-port", "-1"))

        def health(node: NodeProcess) -> dict[str, Any]:
            url = f"https://{node.ready['http']}/healthz"
            try:
                with urllib.request.urlopen(url, context=context, timeout=5) as answer:
                    return {"code": 200, **json.load(answer)}
            except urllib.error.HTTPError as error:
                with error:
                    return {"code": error.code, **json.load(error)}
            except OSError:  # Not in time, or closed: ask again.
                return {}

        near, far, lost = start("near"), start("far"), start("lost")
        for node in (near, far, lost):
            wait_until(lambda node=node: health(node).get("members_alive") == 3)  # type: ignore[misc]
        certificates.authority.revoke("node-lost")
        shutil.copy(certificates.folder / "revoked.crl", tmp_path / "near" / "revoked.crl")

        for node in (near, far):
            well = {"code": 200, "members_alive": 2}
            wait_until(lambda node=node, well=well: well.items() <= health(node).items())  # type: ignore[misc]
        wait_until(lambda: health(lost).get("code") == 503)
        # It has the list if a member told it before the others cut it off; else their refusals.
        refused = f"revoked: the certificate of peercache://{cluster.name}/node/lost is revoked"
        reason = health(lost).get("reason", "")
        assert reason == "this node's certificate is revoked" or reason.endswith(refused)
        kept = tmp_path / "far" / "revoked.crl"
        wait_until(lambda: kept.exists() and kept.read_text() == certificates.revoked())


def test_certificate_files_on_a_mount_that_hangs_stop_no_node(tmp_path: Path) -> None:
    """A pipe without a writer keeps who opens it for ever, as a network file system may."""
    with LocalCluster() as cluster:
        certificates = Certificates(tmp_path / "pki", cluster.name)
        node = cluster.start(flags=_files_of(certificates, "near", tmp_path / "near"))
        client = cluster.client(node, **certificates.client("engine"))
        hung = tmp_path / "near" / "tls_cert.pem"
        hung.unlink()
        os.mkfifo(hung)

        until = time.monotonic() + 3 * LOOK_S
        while time.monotonic() < until:
            assert client.stats().get("home_members_alive") == 1
        # Who opens it to write without waiting needs a reader, which is there all the time.
        os.close(os.open(hung, os.O_WRONLY | os.O_NONBLOCK))
        assert node.terminate() == 0


def test_a_client_learns_from_its_home_node_which_certificates_are_revoked(tmp_path: Path) -> None:
    """Its own folder never holds the list; one that comes later learns it with its welcome."""
    with LocalCluster() as cluster:
        certificates = Certificates(tmp_path / "pki", cluster.name)
        node = cluster.start(flags=_files_of(certificates, "near", tmp_path / "near"))
        settings = {}
        (tmp_path / "engine").mkdir()
        for setting, path in certificates.client("engine").items():
            settings[setting] = str(shutil.copy(path, tmp_path / "engine"))
            Path(settings[setting]).chmod(0o600)
        certificates.node("lost")
        early = cluster.client(node, **settings)

        certificates.authority.revoke("node-lost")
        shutil.copy(certificates.folder / "revoked.crl", tmp_path / "near" / "revoked.crl")

        wait_until(lambda: _numbers(early) == (1,))
        late = cluster.client(node, **settings)
        wait_until(lambda: _numbers(late) == (1,))
        assert not list((tmp_path / "engine").glob("*.crl"))


def _numbers(client: Client) -> tuple[int, ...]:
    """Return the numbers of the lists that a client knows."""
    tls = client._wiring.tls
    assert tls is not None
    return tls.revocations.numbers
