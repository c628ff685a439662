"""A node is drained: its pages go to other nodes, and it leaves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from peercache.wire.messages.membership import (
    CancelDrain,
    DrainNode,
    ReportDrainState,
    RequestDrainState,
)
from peercache.wire.messages.session import OPERATOR, Welcome
from tests.pace import TIMEOUT_S, wait_until
from tests.system.nodes import LocalCluster, NodeProcess, command, keys_of, pages_of, read
from tests.system.test_control_tls import Speaker, hello

pytestmark = pytest.mark.slow

PAGES = 40


@contextlib.contextmanager
def operating(cluster: LocalCluster, node: NodeProcess) -> Iterator[Speaker]:
    """Be an operator of a trial, connected to a node."""
    with Speaker(node, cluster.name, None) as operator:
        greeting = hello(cluster.name, namespace="", geometry=OPERATOR, granule=0)
        assert isinstance(operator.ask(greeting), Welcome)
        yield operator


def reported(
    operator: Speaker, message: DrainNode | CancelDrain | RequestDrainState
) -> dict[str, object]:
    """Return what a node answers to an operator."""
    answer = operator.ask(message)
    assert isinstance(answer, ReportDrainState), answer
    assert answer.request == message.request
    return dict(answer.figures)


def ended(node: NodeProcess) -> int:
    """Return the exit status of a node that leaves by itself."""
    return node.process.wait(TIMEOUT_S)


def test_the_pages_of_a_drained_node_are_read_from_others() -> None:
    """They are hits after it has left; meanwhile it takes no page, and counts why."""
    with LocalCluster() as cluster:
        leaving, *others = cluster.start_many(3)
        keys = keys_of("stays", PAGES)
        with cluster.client(leaving) as client, cluster.client(others[0]) as reader:
            assert client.batch_set(keys, pages_of(keys)) == [True] * PAGES
            with operating(cluster, leaving) as operator:
                first = reported(operator, DrainNode(3, 0.0))
                assert (first["state"], first["problem"]) == ("handing_over", "")
                late = keys_of("late", 4)
                wait_until(lambda: reported(operator, RequestDrainState(5))["state"] == "leaving")
                assert client.batch_set(late, pages_of(late)) == [False] * 4
                assert client.stats()["sets_refused_draining"] == 4
                last = reported(operator, DrainNode(6, 0.0))
                assert (last["given"], last["lost"], last["left"]) == (PAGES, 0, 0)
            assert ended(leaving) == 0
            wait_until(lambda: reader.stats()["home_members_alive"] == 2)
            assert read(reader, keys) == [True] * PAGES


def test_the_command_shows_how_far_it_is_until_the_node_has_left() -> None:
    """One JSON object a line; it goes by tcp where that is asked for. The last node keeps all."""
    with LocalCluster() as cluster:
        flags = ("--fabric", "tcp", "--log-level", "debug")
        leaving, last = cluster.start(flags=flags), cluster.start(flags=flags)
        cluster.wait_for_members(leaving, 2)
        keys = keys_of("command", PAGES)
        with cluster.client(leaving) as client:
            assert client.batch_set(keys, pages_of(keys)) == [True] * PAGES

        # It does not wait for an answer of a node that has ended.
        said = command(
            "drain", leaving.ready["control"], "--cluster", cluster.name, "--json",
            "--timeout", str(3 * TIMEOUT_S),
        )  # fmt: skip

        assert (said.returncode, said.stderr) == (0, "")
        lines = [json.loads(line) for line in said.stdout.splitlines()]
        assert [line["state"] for line in lines][-1] == "left"
        assert lines[-1]["given"] == PAGES
        assert ended(leaving) == 0
        pulls = [json.loads(line) for line in last.said().splitlines() if ".pulled" in line]
        assert {pull["fabric"] for pull in pulls} == {"tcp"}

        # Over the home socket the user of the node is an operator.
        unnamed = command("drain", "--home", last.ready["home"], "--cluster", cluster.name)
        assert unnamed.returncode == 2
        assert "name it, or say --yes" in unnamed.stderr
        assert last.process.poll() is None
        alone = command("drain", last.ready["home"], "--cluster", cluster.name)
        assert alone.returncode == 0, alone.stderr
        assert "this is the last node of its cluster" in alone.stdout
        assert ended(last) == 0


def test_a_drain_is_taken_back() -> None:
    """While targets are too young to take pages the drain waits for them; then sets work again."""
    with LocalCluster() as cluster:
        node, _ = cluster.start_many(2)
        keys = keys_of("kept", 4)
        with cluster.client(node) as client, operating(cluster, node) as operator:
            assert client.batch_set(keys, pages_of(keys)) == [True] * 4
            idle = command("drain", node.ready["control"], "--cluster", cluster.name, "--cancel")
            assert (idle.returncode, "not being drained" in idle.stdout) == (1, True)
            assert reported(operator, DrainNode(3, 60.0))["state"] == "handing_over"
            figures = reported(operator, CancelDrain(4))
            assert (figures["state"], figures["problem"]) == ("serving", "")
            more = keys_of("more", 4)
            wait_until(lambda: client.batch_set(more, pages_of(more)) == [True] * 4)
            assert read(client, keys) == [True] * 4
            assert node.process.poll() is None
