"""Admission: which connections a node accepts, and which messages each may send."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from peercache.errors import Rejected
from peercache.memory.client_lock import folder_of, lock_name
from peercache.node import admission as admission_module
from peercache.node.admission import SENDERS, Admission, Role, Session
from peercache.wire.envelope import MESSAGES, WIRE_VERSION
from peercache.wire.messages.directory import Delete, Disputed, Located, Lookup, Put, Repair
from peercache.wire.messages.membership import Heartbeat, ViewAsked, ViewShared
from peercache.wire.messages.pool import Commit, Granted, Reserve, Touched
from peercache.wire.messages.session import Hello, Refused, SayHello, Welcome

FITTING = Hello(
    request=0,
    wire_oldest=WIRE_VERSION,
    wire_newest=WIRE_VERSION,
    cluster="test",
    is_node=False,
    granule=16384,
    credentials="secret",
    namespace="model",
    geometry="layers=2",
    lock="",
)
CLIENT = 0x77
NODE = attrs.evolve(FITTING, is_node=True, namespace="", geometry="")


@pytest.fixture
def home(tmp_path: Any) -> str:
    return f"ipc://{tmp_path}/node.ipc"


@pytest.fixture
def admission(home: str) -> Iterator[Admission]:
    admission = Admission(granule=16384, credentials="secret", home=home, local_token="a" * 32)
    yield admission
    admission.close()


@contextmanager
def lock_held(home: str, client: int = CLIENT) -> Iterator[subprocess.Popen[str]]:
    """Hold a client's lock in another process."""
    script = (
        "import sys; from peercache.memory.client_lock import ClientLock\n"
        "lock = ClientLock(sys.argv[1], int(sys.argv[2])); print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, home, str(client)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("hello", "reason", "said"),
    [
        (attrs.evolve(FITTING, wire_oldest=7, wire_newest=9), "wire_version", ["7 to 9", "1 to 1"]),
        (attrs.evolve(FITTING, wire_oldest=0, wire_newest=0), "wire_version", ["0 to 0", "1 to 1"]),
        (attrs.evolve(FITTING, granule=4096), "granule", ["4096", "16384"]),
        (attrs.evolve(FITTING, credentials="guess"), "credentials", ["credentials"]),
        (attrs.evolve(FITTING, credentials=""), "credentials", ["credentials"]),
        (attrs.evolve(FITTING, credentials="gehe\u00efm"), "credentials", ["credentials"]),
        (attrs.evolve(FITTING, geometry="layers=3"), "geometry", ["layers=2", "layers=3", "model"]),
        (attrs.evolve(FITTING, lock="../../x"), "lock", ["../../x", "77"]),
        (attrs.evolve(FITTING, lock=lock_name(CLIENT)), "lock", [lock_name(CLIENT)]),
    ],
)
def test_what_does_not_fit_is_refused_and_named(
    admission: Admission, hello: Hello, reason: str, said: list[str]
) -> None:
    """The sentence names the values of both sides, so that a person sees which to change."""
    admission.admit(1, 5, FITTING)

    with pytest.raises(Rejected) as refused:
        admission.admit(2, CLIENT, hello)

    assert refused.value.reason == reason
    assert all(part in refused.value.detail for part in said), refused.value.detail
    assert 2 not in admission.sessions


def test_credentials_are_never_told(admission: Admission) -> None:
    """A refusal goes to the connecting process, and into logs."""
    with pytest.raises(Rejected) as refused:
        admission.admit(1, CLIENT, attrs.evolve(FITTING, credentials="guess"))

    assert "secret" not in str(refused.value)
    assert "guess" not in str(refused.value)


def test_no_sender_is_called_zero(admission: Admission) -> None:
    """Zero is the listener at an address, never a sender."""
    with pytest.raises(Rejected, match="identity"):
        admission.admit(1, 0, FITTING)


def test_a_range_of_wire_versions_that_has_ours_fits(admission: Admission) -> None:
    """An upgrade of one side must not part them."""
    hello = attrs.evolve(FITTING, wire_oldest=1, wire_newest=8)

    assert admission.admit(1, CLIENT, hello).role is Role.READER


def test_namespaces_live_side_by_side(admission: Admission) -> None:
    """Ranks of one host share a node; only one name with two geometries is a mistake."""
    admission.admit(1, 5, FITTING)

    admission.admit(2, 6, attrs.evolve(FITTING, namespace="other", geometry="layers=9"))
    admission.admit(3, 7, attrs.evolve(FITTING))
    admission.admit(4, 8, attrs.evolve(FITTING, namespace="", geometry="anything"))

    assert len(admission.sessions) == 4


def test_a_geometry_is_free_again_when_its_last_session_has_ended(admission: Admission) -> None:
    """A model may be set up anew without a restart of the node."""
    admission.admit(1, 5, FITTING)
    admission.end(1)

    admission.admit(2, 6, attrs.evolve(FITTING, geometry="layers=3"))

    assert list(admission.sessions) == [2]


def test_a_client_without_a_lock_only_reads(admission: Admission) -> None:
    """The node could not tell when its reservations end."""
    session = admission.admit(1, CLIENT, FITTING)

    assert session == Session(CLIENT, Role.READER, "model", "layers=2")
    for message in (Reserve, Commit):
        assert Role.READER not in SENDERS[message]


def test_a_client_of_this_process_shows_the_token(admission: Admission) -> None:
    """Its lock file must not be opened here: to close it would release the lock."""
    session = admission.admit(1, CLIENT, attrs.evolve(FITTING, lock="a" * 32))

    assert session.role is Role.WRITER
    assert admission.exited() == []


def test_a_writer_holds_its_own_lock(admission: Admission, home: str) -> None:
    """And no client writes in another's name: the lock carries the client's name."""
    with lock_held(home):
        assert admission.admit(1, CLIENT, _with_lock(CLIENT)).role is Role.WRITER
        with pytest.raises(Rejected, match="lock"):
            admission.admit(2, 0x99, _with_lock(CLIENT))
        with pytest.raises(Rejected, match="lock"):
            admission.admit(3, CLIENT, _with_lock(0x99))


def test_a_lock_that_is_not_held_admits_no_client(admission: Admission, home: str) -> None:
    """The file alone may be a dead client's."""
    folder_of(home).mkdir()
    (folder_of(home) / lock_name(CLIENT)).touch()
    before = _files_open()

    with pytest.raises(Rejected, match="is not held"):
        admission.admit(1, CLIENT, _with_lock(CLIENT))

    assert _files_open() == before


def test_an_exit_is_noticed_when_the_lock_is_free_and_not_before(
    admission: Admission, home: str
) -> None:
    """Lost connections are no exits; a process that is gone is told once."""
    with lock_held(home) as process:
        admission.admit(1, CLIENT, _with_lock(CLIENT))
        admission.end(1)
        assert admission.exited() == []
        admission.admit(2, CLIENT, _with_lock(CLIENT))
        assert admission.exited() == []

        process.kill()
        process.wait()

        assert admission.exited() == [CLIENT]
        assert admission.exited() == []
        assert not folder_of(home).exists()


def test_many_connections_of_one_client_cost_one_descriptor(
    admission: Admission, home: str
) -> None:
    """Each of its threads has some."""
    with lock_held(home):
        before = _files_open()
        for pipe in range(1, 30):
            admission.admit(pipe, CLIENT, _with_lock(CLIENT))

        assert _files_open() == before + 1


def test_writing_clients_are_bounded(
    admission: Admission, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a descriptor, and a probe a second."""
    monkeypatch.setattr(admission_module, "CLIENTS_MAX", 1)
    with lock_held(home, 1), lock_held(home, 2):
        admission.admit(1, 1, _with_lock(1))
        with pytest.raises(Rejected, match="clients"):
            admission.admit(2, 2, _with_lock(2))
        # An admitted client may have any number of connections.
        admission.admit(3, 1, _with_lock(1))


def test_closing_lets_clients_live(admission: Admission, home: str) -> None:
    """The next node of this home address will look at the same files."""
    with lock_held(home):
        admission.admit(1, CLIENT, _with_lock(CLIENT))

        admission.close()

        assert (folder_of(home) / lock_name(CLIENT)).exists()


@pytest.mark.parametrize(
    ("role", "message", "is_allowed"),
    [
        (Role.WRITER, Reserve(1, 1, 1, b"", b""), True),
        (Role.WRITER, Lookup(1, b""), True),
        (Role.READER, Lookup(1, b""), True),
        (Role.READER, Touched(b""), True),
        (Role.READER, Disputed(b""), True),
        (Role.READER, ViewAsked(1, b""), True),
        (Role.NODE, Put(1, b""), True),
        (Role.NODE, ViewAsked(1, b""), True),
        (Role.READER, Reserve(1, 1, 1, b"", b""), False),
        (Role.READER, Commit(1, 1, b"", b"", 0.0), False),
        (Role.NODE, Reserve(1, 1, 1, b"", b""), False),
        (Role.NODE, Commit(1, 1, b"", b"", 0.0), False),
        (Role.NODE, Touched(b""), False),
        (Role.WRITER, Put(1, b""), False),
        (Role.READER, Delete(1, b""), False),
        (Role.WRITER, Repair(1, b"", b""), False),
        (Role.WRITER, ViewShared(0, ()), False),
        (Role.WRITER, Located(1, b""), False),
        (Role.NODE, Granted(1, 1, b"", b""), False),
        (Role.NODE, Refused(1, "", ""), False),
        (Role.NODE, SayHello(1), False),
    ],
)
def test_each_role_may_send_what_it_needs(
    admission: Admission, role: Role, message: Any, is_allowed: bool
) -> None:
    """Only a holder speaks of its records, only a client of its reservations."""
    assert admission.may_send(Session(1, role, "", ""), message) is is_allowed


def test_answers_and_greetings_go_to_no_actor() -> None:
    """A message outside the table may not be sent; each one in it names a role."""
    answers = {Hello, Welcome, Refused, SayHello, Located, Granted}

    assert not answers & set(SENDERS)
    assert set(SENDERS) <= set(MESSAGES)
    assert all(roles for roles in SENDERS.values())
    assert SENDERS[Heartbeat] == (Role.NODE,)


def _with_lock(client: int) -> Hello:
    return attrs.evolve(FITTING, lock=lock_name(client))


def _files_open() -> int:
    from pathlib import Path

    return len(list(Path("/proc/self/fd").iterdir()))
