"""Where a node is reached, by what it knows; and what it reports when it is not."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import trio

from peercache.node import addresses as module
from peercache.node.addresses import (
    ALONE_S,
    FOUND_MAX,
    FRESH_S,
    HOSTS_MAX,
    Reach,
    is_ours,
    numeric_hosts,
    resolved,
    routed_host,
)
from tests.pace import PROMPT_S, TIMEOUT_S, assert_within


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reach(clock: Clock) -> Reach:
    return Reach(("head:1", "10.0.0.2:1"), clock=clock)


def test_numbers_need_no_resolver() -> None:
    assert numeric_hosts("10.0.0.1:5") == {"10.0.0.1"}
    assert numeric_hosts("[fd00::1]:5") == {"fd00::1"}
    assert numeric_hosts("localhost:5") == set()


def test_a_dead_resolver_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds a name were half a minute for three, and an embedded start gave up."""
    answer = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, *more: Any, **named: Any) -> Any:
        if host.startswith("dead"):
            answer.wait(TIMEOUT_S)
            raise socket.gaierror("timed out")
        return real(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    began = time.monotonic()

    found = trio.run(resolved, ("dead-1:1", "10.0.0.1:1", "localhost:1", "dead-2:1"), 0.5)

    answer.set()
    assert_within(time.monotonic() - began, PROMPT_S)
    assert found["10.0.0.1:1"] == {"10.0.0.1"}
    assert "127.0.0.1" in found["localhost:1"]
    assert found["dead-1:1"] == found["dead-2:1"] == set()


@pytest.mark.parametrize(
    ("routes", "interfaces", "reported"),
    [
        ({"10.0.0.9": "10.0.0.1", "192.0.2.1": "10.5.0.1"}, [], "10.0.0.1"),
        ({"192.0.2.1": "10.5.0.1"}, ["10.7.0.1"], "10.5.0.1"),
        ({"2001:db8::1": "fd00::5"}, [], "fd00::5"),
        ({}, ["127.0.0.1", "fe80::1", "10.7.0.1"], "10.7.0.1"),
        ({"10.0.0.9": "127.0.0.1"}, ["fd00::7"], "fd00::7"),
        ({"::1": "::1"}, ["127.0.0.1"], "::1"),
        ({}, ["127.0.0.1"], "127.0.0.1"),
        ({}, [], "127.0.0.1"),
    ],
)
def test_loopback_is_reported_only_where_there_is_nothing_else(
    routes: dict[str, str], interfaces: list[str], reported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Towards discovery, towards the internet, then any interface."""
    monkeypatch.setattr(module, "_source_address", lambda host: routes.get(host, ""))
    monkeypatch.setattr(module, "_interface_hosts", lambda: interfaces)

    assert routed_host(["10.0.0.9", "::1"]) == reported


def test_the_interfaces_of_this_host_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's tables are read right: what is reported can be bound."""
    assert is_ours(routed_host(["127.0.0.1"]))
    monkeypatch.setattr(module, "_source_address", lambda _: "")
    assert is_ours(routed_host([]))
    assert not is_ours("192.0.2.77")
    assert not is_ours("localhost")


def test_the_end_of_a_connection_is_the_better_address(reach: Reach) -> None:
    """Unless there is one at the present address; loopback and link-local ends report nothing."""
    for host in ("127.0.0.1", "::1", "fe80::1%eth0", "", "no number"):
        reach.connected(host)
    assert reach.better_than("10.5.0.1") == "10.5.0.1"

    reach.connected("::ffff:10.0.0.1")
    assert reach.better_than("10.5.0.1") == "10.0.0.1"
    reach.connected("10.5.0.1")
    assert reach.better_than("10.0.0.1") == "10.0.0.1"
    assert reach.better_than("127.0.0.1") == "10.5.0.1"


def test_few_addresses_are_remembered(reach: Reach) -> None:
    for number in range(HOSTS_MAX + 1):
        reach.connected(f"10.0.0.{number + 1}")

    assert reach.better_than("10.0.0.2") == "10.0.0.2"
    assert reach.better_than("10.0.0.1") == f"10.0.0.{HOSTS_MAX + 1}"


def test_a_node_that_is_alone_rightly_has_no_problem(reach: Reach, clock: Clock) -> None:
    """The first of a cluster; and one whose peers are down."""
    clock.now += 1000

    assert reach.problem("10.5.0.1:1") == ""


def test_a_node_that_is_welcomed_and_stays_alone_is_not_reached(reach: Reach, clock: Clock) -> None:
    """After a while: the peer's first message takes its time."""
    reach.welcomed("head:1")
    assert reach.problem("127.0.0.1:1") == ""
    clock.now += ALONE_S
    reach.welcomed("head:1")

    problem = reach.problem("127.0.0.1:1")

    assert "127.0.0.1:1" in problem
    assert "head:1" in problem
    assert "set advertise" in problem
    clock.now += FRESH_S
    assert reach.problem("127.0.0.1:1") == "", "the peer has died since"


def test_a_node_that_is_refused_reports_by_which_peer_and_why(reach: Reach, clock: Clock) -> None:
    reach.refused("head:1", "cluster: 'red', ours is 'blue'")

    assert "head:1: cluster: 'red'" in reach.problem("10.5.0.1:1")
    reach.welcomed("10.0.0.2:1")
    assert reach.problem("10.5.0.1:1") == "", "another peer admits it"
    reach.refused("10.0.0.2:1", "role: no")
    clock.now += FRESH_S
    assert reach.problem("10.5.0.1:1") == ""


def test_a_node_that_has_joined_forgets_its_time_alone(reach: Reach, clock: Clock) -> None:
    reach.welcomed("head:1")
    clock.now += ALONE_S
    reach.joined()
    reach.welcomed("head:1")

    assert reach.problem("10.5.0.1:1") == ""


def test_only_discovery_addresses_are_witnesses(reach: Reach, clock: Clock) -> None:
    """Members come and go; and this node's own answer does not count."""
    reach.welcomed("10.0.0.3:1")
    reach.refused("10.0.0.4:1", "no")
    reach.welcomed("head:1")
    reach.answered_itself("head:1")
    reach.answered_itself("10.0.0.3:1")
    clock.now += ALONE_S
    reach.welcomed("10.0.0.3:1")

    assert reach.own_head == "head:1"
    assert reach.problem("10.5.0.1:1") == ""


def test_addresses_of_sources_are_witnesses_while_they_are_given(
    reach: Reach, clock: Clock
) -> None:
    """A few of them; what they said is forgotten with them, and none is this node's rank."""
    reach.follow(["head:1", *[f"10.7.0.{n}:1" for n in range(100)]])
    assert len(reach.asked) == len(set(reach.asked)) == 2 + FOUND_MAX
    reach.refused("10.7.0.1:1", "cluster: 'red', ours is 'blue'")
    assert "10.7.0.1:1: cluster: 'red'" in reach.problem("10.5.0.1:1")

    reach.answered_itself("10.7.0.2:1")
    reach.follow(["10.7.0.2:1"])

    assert reach.own_head is None
    assert reach.problem("10.5.0.1:1") == ""
