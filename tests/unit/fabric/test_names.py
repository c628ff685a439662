"""Names are resolved without waiting longer than one is told to."""

from __future__ import annotations

import socket
import threading

import pytest

from peercache.fabric.tcp.names import Address, Names
from tests.pace import TIMEOUT_S

FOUND: list[Address] = [(socket.AF_INET, ("192.0.2.1", 80))]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_address_in_figures_needs_no_name_server(host: str) -> None:
    """Figures are taken as they are, even with no timeout at all."""
    found = Names().resolve(host, 80, 0.0)

    assert [address[:2] for _, address in found] == [(host, 80)]


def test_name_is_looked_up() -> None:
    """What is no figures is asked of the system."""
    found = Names().resolve("localhost", 80, TIMEOUT_S)

    assert found


def test_slow_name_server_holds_up_no_caller() -> None:
    """One thread resolves a name for all waiting callers, and for callers that come later."""
    answers = threading.Event()
    asked: list[str] = []

    def ask(host: str, port: int, flags: int) -> list[Address]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not in figures")
        asked.append(host)
        answers.wait(TIMEOUT_S)
        return FOUND

    names = Names(ask)
    first = names.resolve("slow.example", 80, 0.01)
    second = names.resolve("slow.example", 80, 0.01)
    asked_by_two = list(asked)
    answers.set()
    third = names.resolve("slow.example", 80, TIMEOUT_S)

    assert first == second == []
    assert third == FOUND
    assert asked_by_two == ["slow.example"]


def test_unknown_name_has_no_address() -> None:
    """A resolver's error is an empty answer, each time again."""

    def ask(host: str, port: int, flags: int) -> list[Address]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    names = Names(ask)

    assert names.resolve("unknown.example", 80, TIMEOUT_S) == []
    assert names.resolve("unknown.example", 80, TIMEOUT_S) == []


def test_name_that_cannot_be_encoded_has_no_address() -> None:
    """A name that the resolver cannot even be asked for is no exception of the caller's."""
    found = Names().resolve("a" * 300 + ".example", 80, TIMEOUT_S)

    assert found == []
