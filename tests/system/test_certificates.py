"""A secured cluster of real nodes: revoked while it runs, seen over HTTPS."""

from __future__ import annotations

import json
import logging
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tests.needs_openssl  # noqa: F401 - skips this module
from peercache.trust.files import LOOK_S
from tests.certificates import Certificates
from tests.pace import wait_until
from tests.system.nodes import LocalCluster, NodeProcess, command, flags_of


def _files_of(certificates: Certificates, name: str, folder: Path) -> list[str]:
    """Give a node a folder of its own, as each host has one; return its flags."""
    folder.mkdir()
    copies = {}
    for setting, path in certificates.node(name).items():
        copies[setting] = str(shutil.copy(path, folder / f"{setting}.pem"))
        Path(copies[setting]).chmod(0o600)
    return flags_of(copies)


@pytest.mark.slow
def test_revoked_node_leaves_a_running_cluster(tmp_path: Path) -> None:
    """The list is copied to one node; all refuse the other one, and its own health shows it."""
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
        # It has the list if a member sent it before the others cut it off; else their refusals.
        refused = f"revoked: the certificate of peercache://{cluster.name}/node/lost is revoked"
        reason = health(lost).get("reason", "")
        assert reason == "this node's certificate is revoked" or reason.endswith(refused)
        # To the others it is no dead process.
        shown = command("status", "--at", near.ready["control"], *flags_of(operator)).stdout
        assert f"! {lost.ready['control']}: its certificate is revoked" in shown
        kept = tmp_path / "far" / "revoked.crl"
        wait_until(lambda: kept.exists() and kept.read_text() == certificates.revoked())


def test_certificate_files_on_a_mount_that_hangs_stop_no_node(tmp_path: Path) -> None:
    """A pipe without a writer keeps who opens it forever, as a network file system may."""
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


def test_a_client_learns_from_its_home_node_which_certificates_are_revoked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own folder never holds the list; one that comes later learns it with its welcome."""
    caplog.set_level(logging.INFO, logger="peercache")
    with LocalCluster() as cluster:
        certificates = Certificates(tmp_path / "pki", cluster.name)
        node = cluster.start(flags=_files_of(certificates, "near", tmp_path / "near"))
        settings = {}
        (tmp_path / "engine").mkdir()
        for setting, path in certificates.client("engine").items():
            settings[setting] = str(shutil.copy(path, tmp_path / "engine"))
            Path(settings[setting]).chmod(0o600)
        certificates.node("lost")
        known = partial(_reported_of_revocations, caplog)
        cluster.client(node, **settings)

        certificates.authority.revoke("node-lost")
        shutil.copy(certificates.folder / "revoked.crl", tmp_path / "near" / "revoked.crl")

        wait_until(lambda: known() == 1)
        cluster.client(node, **settings)
        wait_until(lambda: known() == 2)
        assert not list((tmp_path / "engine").glob("*.crl"))


def _reported_of_revocations(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many clients of this process have said that they have taken a list."""
    return sum("event=tls.revocations_changed" in line for line in caplog.messages)


@pytest.mark.parametrize("is_same", [False, True], ids=["another authority", "the same"])
def test_a_node_of_another_authority_reports_that_it_is_refused(
    tmp_path: Path, is_same: bool
) -> None:
    """Nng reports no reason of a failed handshake; a node of the same authority has no problem."""
    with LocalCluster() as cluster:
        ours = Certificates(tmp_path / "ours", cluster.name)
        theirs = ours if is_same else Certificates(tmp_path / "theirs", cluster.name)
        first = cluster.start(flags=_files_of(ours, "a", tmp_path / "a"))
        second = cluster.start(flags=_files_of(theirs, "b", tmp_path / "b"))

        def problems() -> list[str]:
            lines = [json.loads(line) for line in second.said().splitlines() if line[:1] == "{"]
            return [line["problem"] for line in lines if line["event"] == "node.not_reached"]

        if is_same:
            wait_until(lambda: "membership.member_changed" in second.said())
            assert problems() == []
            return
        wait_until(lambda: problems() != [])
        (problem,) = problems()
        assert "refuses this one" in problem
        assert first.ready["control"] in problem
        assert "cert" in problem
