"""An operator asks a cluster of real nodes how it is."""

from __future__ import annotations

import pytest

from peercache.model.status import NO_ANSWER, MemberStatus, decoded_status, decoded_statuses
from peercache.wire.messages.operations import ClusterAsked, ClusterTold, StatusAsked, StatusTold
from peercache.wire.messages.session import OPERATOR, Refused, Welcome
from tests.system.nodes import LocalCluster, NodeProcess, keys_of, pages_of, wait_until
from tests.system.test_control_tls import Speaker, hello

pytestmark = pytest.mark.slow


def gathered(cluster: LocalCluster, node: NodeProcess) -> dict[str, MemberStatus]:
    """Return every member's status as one node gathers it, by name."""
    with Speaker(node, cluster.name, None) as operator:
        welcome = operator.ask(hello(cluster.name, namespace="", geometry=OPERATOR, granule=0))
        assert isinstance(welcome, Welcome), welcome
        told = operator.ask(ClusterAsked(7, detail=False, after=0))
    assert isinstance(told, ClusterTold), told
    assert (told.request, told.more) == (7, False)
    return {each.status.name: each for each in decoded_statuses(told.statuses)}


def test_any_node_tells_how_all_are_and_which_do_not_answer() -> None:
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
        assert 0 < home.shard.share <= 1

        nodes[2].pause()
        wait_until(lambda: _state(cluster, nodes, 2) == NO_ANSWER)
        found = gathered(cluster, nodes[1])
        nodes[2].resume()

        assert [found[name].answers for name in names] == [True, True, False]


def _state(cluster: LocalCluster, nodes: list[NodeProcess], place: int) -> str:
    """Return how a node is, as the second one tells; at most a second old."""
    return gathered(cluster, nodes[1])[nodes[place].ready["control"]].status.state


def _stored(member: MemberStatus) -> float:
    return sum(worker.keys for worker in member.status.workers)


def test_details_come_when_asked_and_clients_get_none() -> None:
    """A client of the engine's kind sees no status; details name threads and settings."""
    with LocalCluster() as cluster:
        node = cluster.start("one")
        with Speaker(node, cluster.name, None) as reader:
            assert isinstance(reader.ask(hello(cluster.name)), Welcome)
            for question in (StatusAsked(2, detail=False), ClusterAsked(3, detail=False, after=0)):
                refused = reader.ask(question)
                assert isinstance(refused, Refused), refused
                assert refused.reason == "role"
        with Speaker(node, cluster.name, None) as operator:
            operator.ask(hello(cluster.name, namespace="", geometry=OPERATOR, granule=0))
            for detail in (False, True):
                told = operator.ask(StatusAsked(4, detail=detail))
                assert isinstance(told, StatusTold), told
                status = decoded_status(told.status)
                assert bool(status.detail.threads) is detail
                assert (status.detail.settings.get("cluster") == cluster.name) is detail
