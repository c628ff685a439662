"""An operator asks a cluster of real nodes how it is."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peercache.cli import main as cli
from peercache.model.status import NO_ANSWER, MemberStatus, decoded_status, decoded_statuses
from peercache.wire.messages.membership import (
    ReportCluster,
    ReportStatus,
    RequestCluster,
    RequestStatus,
)
from peercache.wire.messages.session import OPERATOR, Refused, Welcome
from tests.certificates import Certificates
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, flags_of, keys_of, pages_of, read
from tests.system.test_control_tls import Secured, Speaker, hello

pytestmark = pytest.mark.slow


def gathered(cluster: LocalCluster, node: NodeProcess) -> dict[str, MemberStatus]:
    """Return every member's status as one node gathers it, by name."""
    with Speaker(node, cluster.name, None) as operator:
        welcome = operator.ask(hello(cluster.name, namespace="", geometry=OPERATOR, granule=0))
        assert isinstance(welcome, Welcome), welcome
        reported = operator.ask(RequestCluster(7, detail=False, after=0))
    assert isinstance(reported, ReportCluster), reported
    assert (reported.request, reported.more) == (7, False)
    return {each.status.name: each for each in decoded_statuses(reported.statuses)}


def fabric_of(cluster: LocalCluster, nodes: list[NodeProcess]) -> str:
    """Return how clients of the second node read from the first, by its status."""
    peers = gathered(cluster, nodes[1])[nodes[1].ready["control"]].status.peers
    [found] = [peer.fabric for peer in peers if peer.name == nodes[0].ready["control"]]
    return found


def test_any_node_reports_how_all_are_and_which_do_not_answer() -> None:
    """Pools, workers and rates are those of the nodes; a stopped one costs a second."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(3)
        keys = keys_of("looked at", 4)
        with cluster.client(nodes[0]) as client:
            assert client.batch_set(keys, pages_of(keys)) == [True] * 4
            names = [node.ready["control"] for node in nodes]
            wait_until(lambda: _stored(gathered(cluster, nodes[1])[names[0]]) == 4)
            found = gathered(cluster, nodes[1])
        assert sorted(found) == sorted(names)
        assert {each.status.state for each in found.values()} == {"ok"}
        home = found[names[0]].status
        assert home.pool.pages == 4
        assert [worker.pid > 0 and worker.keys for worker in home.workers] == [4]
        assert sorted(peer.name for peer in home.peers) == sorted(names[1:])
        assert {peer.fabric for peer in home.peers} == {"shm"}
        with cluster.client(nodes[1], fabric="tcp") as far, cluster.client(nodes[1]) as near:
            for reader, expected in ((far, "tcp"), (near, "shm+tcp")):
                assert all(read(reader, keys))
                wait_until(lambda wanted=expected: fabric_of(cluster, nodes) == wanted)  # type: ignore[misc]
        assert sum(each.status.shard.share for each in found.values()) == pytest.approx(1, abs=1e-4)

        nodes[2].pause()
        wait_until(lambda: _state(cluster, nodes, 2) == NO_ANSWER)
        found = gathered(cluster, nodes[1])
        nodes[2].resume()

        assert [found[name].answers for name in names] == [True, True, False]


def completed(
    node: NodeProcess,
    words: str,
    begun: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> list[str]:
    """Return what fish gets for a word that is begun, on the host of a node."""
    with monkeypatch.context() as shell:
        shell.setenv(cli.COMPLETION, "fish_complete")
        shell.setenv("PEERCACHE_HOME", node.ready["home"])
        shell.setenv("COMP_WORDS", f"peercache {words} {begun}")
        shell.setenv("COMP_CWORD", begun)
        assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    return sorted(line.split(",")[1].split("\t")[0] for line in lines)


def test_the_command_line_shows_and_judges_the_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """0 while all is well, 1 with a stopped node, 2 where none answers; JSON shows the same."""
    monkeypatch.setenv("COLUMNS", "200")
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        at = ["--at", nodes[0].ready["control"]]
        assert cli.main(["status", *at]) == 0
        shown = capsys.readouterr().out
        assert f"cluster {cluster.name}: 2 members: 2 ok" in shown
        assert all(node.ready["control"] in shown for node in nodes)
        # Over the home address the node's own user needs no certificate.
        assert cli.main(["members", "--at", nodes[1].ready["home"], "--json"]) == 0
        listed = json.loads(capsys.readouterr().out)
        assert [each["state"] for each in listed["members"]] == ["ok", "ok"]
        assert completed(nodes[0], "status --at", "", monkeypatch, capsys) == sorted(
            node.ready["control"] for node in nodes
        )
        assert completed(
            nodes[0], "drain", nodes[1].ready["control"][:-1], monkeypatch, capsys
        ) == [nodes[1].ready["control"]]

        contexts = tmp_path / "peercache" / "contexts.toml"
        contexts.parent.mkdir()
        clusters = {"here": cluster.name, "gone": "another"}
        contexts.write_text(
            "".join(
                f'[{name}]\nat = "{at[1]}"\ncluster = "{of}"\n' for name, of in clusters.items()
            )
        )
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert cli.main(["status", "--context", "here"]) == 0
        capsys.readouterr()
        assert completed(nodes[0], "status --context", "", monkeypatch, capsys) == ["gone", "here"]
        monkeypatch.setenv("PEERCACHE_CONTEXT", "gone")
        assert cli.main(["status"]) == 2
        assert f"is of the cluster '{cluster.name}'" in capsys.readouterr().err
        assert cli.main(["drain"]) == 2
        assert "drains the node of the context gone: name it" in capsys.readouterr().err
        assert cli.main(["status", "--context", "here"]) == 0
        monkeypatch.setenv("PEERCACHE_CONTEXT", "")

        assert cli.main(["status", *at, "--cluster", "another"]) == 2
        assert f"is of the cluster '{cluster.name}'" in capsys.readouterr().err

        nodes[1].pause()
        wait_until(lambda: cli.main(["status", *at, "--json"]) == 1)
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        states = {m["status"]["name"]: m["status"]["state"] for m in last["members"]}
        assert states[nodes[1].ready["control"]] == NO_ANSWER
        assert not last["ok"]

        assert cli.main(["status", "--at", nodes[1].ready["control"], "--timeout", "0.3"]) == 2
        assert "it may be stopped" in capsys.readouterr().err
        nodes[1].resume()


def test_objectives_are_judged_over_the_address_of_all_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control address of any node: all members are judged, without an HTTP port."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        keys = keys_of("judged", 8)
        for node in nodes:
            with cluster.client(node) as client:
                client.batch_set(keys, pages_of(keys))
                client.contains(keys)
        at = ["--at", nodes[0].ready["control"], "--json"]

        def reported() -> dict[str, Any]:
            assert cli.main(["slo", *at]) in (0, 1)
            found: dict[str, Any] = json.loads(capsys.readouterr().out)
            return found

        wait_until(lambda: reported()["objectives"][0]["calls"] >= 2)
        assert reported()["nodes"] == 2
        assert reported()["objectives"][0]["within_s"] == 0.001


def test_slow_calls_are_shown_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """Of clients of every node, over any of them; a paused node's are missing."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        at = ["--at", nodes[1].ready["control"]]
        keys = keys_of("slow", 8)
        with cluster.client(nodes[0], namespace="chat") as client:
            assert all(client.batch_set(keys[:6], pages_of(keys[:6])))
            assert read(client, keys).count(False) == 2

            def called() -> list[dict[str, Any]]:
                assert cli.main(["slow", *at, "--operation", "get", "--json"]) == 0
                found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["calls"]
                return found

            wait_until(called)
            [call] = called()
            assert (call["node"], call["pages"]) == (nodes[0].ready["control"], 8)
            assert (call["tier"], call["outcome"], call["missed"]) == (
                "home",
                "some",
                {"absent": 2},
            )
            assert (call["namespace"], call["pid"]) == ("chat", os.getpid())
            assert 0 < call["seconds"] < TIMEOUT_S
            assert cli.main(["slow", *at, "--limit", "1"]) == 0
            assert len(capsys.readouterr().out.strip().splitlines()) == 3
        nodes[0].pause()
        wait_until(lambda: cli.main(["slow", *at]) == 1)
        assert f"! {nodes[0].ready['control']} does not answer" in capsys.readouterr().err
        nodes[0].resume()


def test_a_node_that_was_killed_and_started_again_is_one_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The earlier process is not counted, shown, or a reason for another exit status."""
    with LocalCluster() as cluster:
        first, second = cluster.start_many(2)
        place = second.ready["control"]
        second.kill()
        cluster.start(flags=("--listen", place))
        at = ["--at", first.ready["control"]]

        wait_until(lambda: cli.main(["status", *at]) == 0)
        shown = capsys.readouterr().out.split("cluster ")[-1]
        assert "2 members: 2 ok" in shown
        assert shown.count(place) == 1
        assert cli.main(["members", *at, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["members"]) == 2


def test_with_certificates_only_an_operator_looks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An engine's certificate, and none at all, get a sentence that explains what is needed."""
    with Secured(tmp_path / "ca") as cluster:
        node = cluster.start_secured("one")
        at = ["status", "--at", node.ready["control"], "--timeout", "2"]

        operator = flags_of(cluster.certificates.operator("ann"))
        # A loaded machine may have a loop that is late, which is no health.
        wait_until(lambda: cli.main([*at, *operator]) == 0)
        assert re.search(r" \d+ d +0\.", capsys.readouterr().out)
        assert cli.main([*at, *flags_of(cluster.certificates.client("engine"))]) == 2
        assert "an operator needs an operator's: `peercache certs" in capsys.readouterr().err
        assert cli.main(at) == 2
        assert "give --tls-ca, --tls-cert and --tls-key" in capsys.readouterr().err
        assert cli.main(["status", "--at", node.ready["home"], "--cluster", cluster.name]) == 0


def test_pages_by_hand_and_the_end_of_a_namespace(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    """Set, exists, get, rm and clear over real nodes; each reports by its status what it found."""
    with LocalCluster() as cluster:
        nodes = cluster.start_many(2)
        here = ["--home", nodes[0].ready["home"], "--namespace", "by hand"]
        there = ["--home", nodes[1].ready["home"], "--namespace", "by hand"]
        page, copy = tmp_path / "page", tmp_path / "copy"
        page.write_bytes(bytes(range(256)) * 99)

        assert cli.main(["set", *here, "one", str(page)]) == 0
        assert cli.main(["set", *here, "two", str(page), "--geometry", "of tests"]) == 0
        copy.write_bytes(b"another length")
        assert cli.main(["set", *here, "one", str(copy)]) == 1
        assert b"a page of another length is stored under this key" in capsysbinary.readouterr().err
        assert cli.main(["exists", *there, "one", "none"]) == 1
        assert capsysbinary.readouterr().out == b"yes one\nno  none\n"
        assert cli.main(["get", *there, "one", "-o", str(copy)]) == 0
        assert copy.read_bytes() == page.read_bytes()
        assert cli.main(["get", *there, "one"]) == 0
        assert capsysbinary.readouterr().out == page.read_bytes()
        assert cli.main(["get", *there, "none"]) == 1
        assert b"no page of 'none': no node holds it" in capsysbinary.readouterr().err
        assert cli.main(["get", "--at", nodes[0].ready["control"], "one"]) == 2
        assert b"is no home address" in capsysbinary.readouterr().err

        assert cli.main(["retain", *there, "--for", "60", "one", "none", "--json"]) == 1
        assert json.loads(capsysbinary.readouterr().out) == {"asked": 2, "retained": 1}
        assert cli.main(["retain", *there, "--for", "60", "one"]) == 0
        assert capsysbinary.readouterr().out == b"1 of 1 retained for 60 s\n"
        assert cli.main(["retain", *there, "--for", "0", "one"]) == 0
        assert capsysbinary.readouterr().out == b"1 of 1 let go\n"

        assert cli.main(["rm", *there, "one", "--json"]) == 0
        assert json.loads(capsysbinary.readouterr().out) == {"removed": 1}
        assert cli.main(["rm", *there, "one"]) == 1
        assert cli.main(["set", *here, "one", str(page)]) == 0
        capsysbinary.readouterr()
        clear = ["clear", "--at", nodes[1].ready["control"], "--namespace", "by hand"]
        assert cli.main([*clear, "--yes", "--json"]) == 0
        assert json.loads(capsysbinary.readouterr().out) == {"removed": 2, "missed": []}
        assert cli.main(["exists", *here, "one"]) == 1
        # A name that no page has is probably misspelt.
        wrong = [*clear[:-1], "by  hand", "--yes"]
        assert cli.main(wrong) == 1
        assert b"no member has a page of the namespace 'by  hand'" in capsysbinary.readouterr().err
        assert cli.main([*wrong, "--json"]) == 1
        assert json.loads(capsysbinary.readouterr().out) == {"removed": 0, "missed": []}
        # Without an answer nothing goes.
        assert cli.main(["set", *here, "one", str(page)]) == 0
        assert cli.main(clear) == 2
        assert b"say --yes" in capsysbinary.readouterr().err
        assert cli.main(["exists", *here, "one"]) == 0

        nodes[0].pause()
        assert cli.main([*clear, "--yes", "--timeout", "2"]) == 1
        assert f"! {nodes[0].ready['control']} did not answer".encode() in (
            capsysbinary.readouterr().out
        )
        nodes[0].kill()
        dead = nodes[0].ready["control"]
        wait_until(lambda: gathered(cluster, nodes[1])[dead].seen == "dead")
        assert cli.main([*clear, "--yes"]) == 1
        assert f"! {dead} has just ended (dead)".encode() in capsysbinary.readouterr().out


def test_a_second_node_and_an_expired_certificate_are_one_sentence(tmp_path: Path) -> None:
    """At the same home socket, and where the certificate is over: status 2, and what to do."""

    def refused(*flags: str) -> str:
        command = [sys.executable, "-m", "peercache", "node", "--listen", "127.0.0.1:0"]
        done = subprocess.run(
            [*command, "--pool-size", "1MiB", "--metrics-port", "0", *flags],
            capture_output=True, text=True, timeout=2 * TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]

    with LocalCluster() as cluster:
        home = cluster.start("one").ready["home"]
        said = refused("--home", home)
    assert said.endswith(f"home = {home} is in use: stop its owner, or choose another")

    certificates = Certificates(tmp_path / "ca")
    said = refused(*flags_of(certificates.node("late", lifetime=dt.timedelta(minutes=-1))))
    assert "node-late.crt" in said
    assert "expired" in said


def _state(cluster: LocalCluster, nodes: list[NodeProcess], place: int) -> str:
    """Return how a node is, as the second one reports; at most a second old."""
    return gathered(cluster, nodes[1])[nodes[place].ready["control"]].status.state


def _stored(member: MemberStatus) -> float:
    return sum(worker.keys for worker in member.status.workers)


def test_details_come_when_asked_and_clients_get_none() -> None:
    """A client of the engine's kind sees no status; details name threads and settings."""
    with LocalCluster() as cluster:
        node = cluster.start("one")
        with Speaker(node, cluster.name, None) as reader:
            assert isinstance(reader.ask(hello(cluster.name)), Welcome)
            for question in (
                RequestStatus(2, detail=False),
                RequestCluster(3, detail=False, after=0),
            ):
                refused = reader.ask(question)
                assert isinstance(refused, Refused), refused
                assert refused.reason == "role"
        with Speaker(node, cluster.name, None) as operator:
            operator.ask(hello(cluster.name, namespace="", geometry=OPERATOR, granule=0))
            for detail in (False, True):
                reported = operator.ask(RequestStatus(4, detail=detail))
                assert isinstance(reported, ReportStatus), reported
                status = decoded_status(reported.status)
                assert bool(status.detail.threads) is detail
                assert (status.detail.settings.get("cluster") == cluster.name) is detail
