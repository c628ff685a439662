"""Admission: which connections a node accepts, and which messages each may send."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest

from peercache.actors.mailboxes import ITSELF, PROMOTER, TAKER
from peercache.actors.origin import Origin
from peercache.errors import Rejected
from peercache.memory.client_lock import LockProbe, folder_of, lock_name
from peercache.model.ids import FIRST_IDENTITY
from peercache.model.keys import Namespace
from peercache.net.peers import Gate, Peer, Transport
from peercache.node import admission as admission_module
from peercache.node.admission import Admission
from peercache.trust.identity import CertificateRole, Identity
from peercache.trust.sharing import Sharing
from peercache.wire.envelope import WIRE_VERSION, versions_spoken
from peercache.wire.messages.declared import Role
from peercache.wire.messages.session import OPERATOR, Hello
from tests.descriptors import open_files

FITTING = Hello(
    request=0,
    wire_oldest=WIRE_VERSION,
    wire_newest=WIRE_VERSION,
    cluster="test",
    is_node=False,
    granule=16384,
    name="",
    nonce=b"",
    namespace="model",
    geometry="layers=2",
    lock="",
    secret=b"",
)
CLIENT = 0x77
SECRET = b"a" * 32
SHARING = Sharing.of(insecure=True)
LOCAL = Peer(Transport.IPC, uid=SHARING.uid)
OWN = Peer(Transport.INPROC)
REMOTE = Peer(Transport.TCP, local=("192.0.2.1", 31998), remote=("192.0.2.2", 40000))
NODE = attrs.evolve(FITTING, is_node=True, namespace="", geometry="")


@pytest.fixture
def home(tmp_path: Any) -> str:
    return f"ipc://{tmp_path}/node.ipc"


@pytest.fixture
def admission(home: str) -> Iterator[Admission]:
    admission = Admission(
        cluster="test",
        granule=16384,
        home=home,
        local_secret=SECRET,
        gate=Gate(SHARING, None),
        probe=lambda home, name: LockProbe(home, name, Sharing.of()),
    )
    yield admission
    admission.close()


@contextmanager
def lock_held(home: str, client: int = CLIENT) -> Iterator[subprocess.Popen[str]]:
    """Hold a client's lock in another process."""
    script = (
        "import sys; from peercache.memory.client_lock import ClientLock\n"
        "from peercache.trust.sharing import Sharing\n"
        "lock = ClientLock(sys.argv[1], int(sys.argv[2]), Sharing.of())\n"
        "print('held', flush=True)\n"
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
        (
            attrs.evolve(FITTING, wire_oldest=7, wire_newest=9),
            "wire_version",
            ["7 to 9", f"this node {versions_spoken()}:"],
        ),
        (
            attrs.evolve(FITTING, wire_oldest=1, wire_newest=2),
            "wire_version",
            ["1 to 2", f"this node {versions_spoken()}:"],
        ),
        (attrs.evolve(FITTING, granule=4096), "granule", ["4096", "16384"]),
        (attrs.evolve(FITTING, secret=b"guess"), "secret", ["secret"]),
        (attrs.evolve(FITTING, secret=b"a" * 31), "secret", ["secret"]),
        (attrs.evolve(FITTING, lock="../../x"), "lock", ["../../x", "77"]),
        (attrs.evolve(FITTING, lock=lock_name(CLIENT)), "lock", [lock_name(CLIENT)]),
    ],
)
def test_what_does_not_fit_is_refused_and_named(
    admission: Admission, hello: Hello, reason: str, said: list[str]
) -> None:
    """The sentence names the values of both sides, so that a person sees which to change."""
    admission.admit(1, LOCAL, 5, FITTING)

    with pytest.raises(Rejected) as refused:
        admission.admit(2, LOCAL, CLIENT, hello)

    assert refused.value.reason == reason
    assert all(part in refused.value.detail for part in said), refused.value.detail
    assert 2 not in admission.sessions


def test_secrets_are_never_reported(admission: Admission) -> None:
    """A refusal goes to the connecting process, and into logs; so may a Hello."""
    hello = attrs.evolve(FITTING, secret=b"guess")
    with pytest.raises(Rejected) as refused:
        admission.admit(1, LOCAL, CLIENT, hello)

    assert "aaaa" not in str(refused.value)
    assert "guess" not in str(refused.value)
    assert "guess" not in repr(hello)


@pytest.mark.parametrize(("peer", "hello"), [(LOCAL, FITTING), (REMOTE, NODE)])
@pytest.mark.parametrize("own", [PROMOTER, TAKER, ITSELF, Origin(FIRST_IDENTITY - 1)])
def test_no_sender_has_an_identity_of_the_nodes_own_actors(
    admission: Admission, own: Origin, peer: Peer, hello: Hello
) -> None:
    """It would share their reservations, or end them. Zero is also the listener at an address."""
    with pytest.raises(Rejected, match="identity"):
        admission.admit(1, peer, own.identity, hello)


def test_a_range_of_wire_versions_that_has_ours_fits(admission: Admission) -> None:
    """An upgrade of one side must not part them."""
    hello = attrs.evolve(FITTING, wire_oldest=2, wire_newest=8)

    assert admission.admit(1, LOCAL, CLIENT, hello).role is Role.READER


def test_namespaces_live_side_by_side(admission: Admission) -> None:
    """Ranks of one host share a node, and one name may have several geometries."""
    writer = attrs.evolve(FITTING, secret=SECRET)
    admission.admit(1, OWN, 5, writer)

    admission.admit(2, OWN, 6, attrs.evolve(writer, namespace="other", geometry="layers=9"))
    admission.admit(3, OWN, 7, writer)
    admission.admit(4, OWN, 8, attrs.evolve(writer, geometry="layers=3"))

    assert list(admission.sessions) == [1, 2, 3, 4]


def test_a_certificate_allows_a_namespace_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names may have one space tag."""
    ours, theirs = "team-1", "team-2"
    monkeypatch.setattr(Namespace, "space_tag", lambda self: len(self.name))
    identity = Identity("c", CertificateRole.CLIENT, "a", (ours,))
    gate = SimpleNamespace(identity=lambda _: identity)
    admission = Admission(
        cluster="c", granule=16384, home="ipc:///none", local_secret=b"s",
        gate=cast("Gate", gate), probe=lambda *_: pytest.fail("no lock is looked at"),
    )  # fmt: skip

    session = admission.admit(1, REMOTE, 5, attrs.evolve(FITTING, namespace=ours))
    assert session.reads == {Namespace(ours).space_tag()}
    with pytest.raises(Rejected) as refused:
        admission.admit(2, REMOTE, 6, attrs.evolve(FITTING, namespace=theirs))

    assert refused.value.reason == "namespace"


@pytest.mark.parametrize("fields", [{"secret": SECRET}, {"lock": lock_name(CLIENT)}])
def test_no_connection_over_tcp_is_a_writers(
    admission: Admission, home: str, fields: dict[str, Any]
) -> None:
    """Even with the right secret: a process that can read it can reach the home address."""
    with lock_held(home):
        said = attrs.evolve(_with_lock(home), **fields)
        for hello in (said, _with_lock(home)):
            with pytest.raises(Rejected) as refused:
                admission.admit(1, REMOTE, CLIENT, hello)

            assert refused.value.reason == "transport"
    assert admission.sessions == {}


def test_the_secret_of_this_process_proves_nothing_in_another(admission: Admission) -> None:
    """It never leaves the process, so over ipc it is a guess."""
    with pytest.raises(Rejected, match="secret"):
        admission.admit(1, LOCAL, CLIENT, attrs.evolve(FITTING, secret=SECRET))


@pytest.mark.parametrize("peer", [LOCAL, OWN])
def test_a_node_connects_over_tcp_only(admission: Admission, peer: Peer) -> None:
    """A client's connection must not become a node's."""
    with pytest.raises(Rejected, match="transport"):
        admission.admit(1, peer, 5, NODE)


@pytest.mark.parametrize("uid", [4711, None])
def test_a_user_who_does_not_share_the_host_is_refused_in_words_that_help(
    admission: Admission, uid: int | None
) -> None:
    """The sentence names the setting; a kernel that reports no user admits none."""
    with pytest.raises(Rejected) as refused:
        admission.admit(1, Peer(Transport.IPC, uid=uid), CLIENT, FITTING)

    assert refused.value.reason == "owner"
    assert uid is None or "share_uids = 4711" in refused.value.detail


def test_a_process_on_loopback_that_cannot_be_identified_is_refused(admission: Admission) -> None:
    """Nothing is connected at these ends, so they belong to no user."""
    peer = Peer(Transport.TCP, local=("127.0.0.1", 1), remote=("127.0.0.1", 2))

    with pytest.raises(Rejected, match="owner"):
        admission.admit(1, peer, CLIENT, FITTING)


def test_a_client_without_a_lock_only_reads(admission: Admission) -> None:
    """The node would not know when its reservations end."""
    session = admission.admit(1, LOCAL, CLIENT, FITTING)

    assert (session.role, session.changes) == (Role.READER, frozenset())


def test_a_client_of_this_process_shows_its_secret(admission: Admission) -> None:
    """Its lock file must not be opened here: to close it would release the lock."""
    session = admission.admit(1, OWN, CLIENT, attrs.evolve(FITTING, secret=SECRET))

    assert session.role is Role.WRITER
    assert admission.exited() == []


def test_a_writer_holds_its_own_lock(admission: Admission, home: str) -> None:
    """And no client writes in another's name: the lock carries the client's name."""
    with lock_held(home) as process:
        assert admission.admit(1, LOCAL, CLIENT, _with_lock(home)).role is Role.WRITER
        with pytest.raises(Rejected, match="lock"):
            admission.admit(2, LOCAL, 0x99, _with_lock(home))
        with pytest.raises(Rejected, match="lock"):
            admission.admit(3, LOCAL, CLIENT, attrs.evolve(_with_lock(home), lock=lock_name(0x99)))
        assert process.poll() is None


@pytest.mark.parametrize("secret", [b"", b"guess", bytes(32)])
def test_the_name_of_a_lock_admits_no_writer(
    admission: Admission, home: str, secret: bytes
) -> None:
    """A client's id is in its messages; only the secret in its lock file proves that it is this."""
    with lock_held(home):
        before = _locks_open(home)
        with pytest.raises(Rejected, match="secret"):
            admission.admit(1, LOCAL, CLIENT, attrs.evolve(_with_lock(home), secret=secret))

        assert _locks_open(home) == before
        admission.admit(2, LOCAL, CLIENT, _with_lock(home))
        with pytest.raises(Rejected, match="secret"):
            admission.admit(3, LOCAL, CLIENT, attrs.evolve(_with_lock(home), secret=secret))


def test_a_lock_that_is_not_held_admits_no_client(admission: Admission, home: str) -> None:
    """The file alone may be a dead client's."""
    folder_of(home).mkdir()
    (folder_of(home) / lock_name(CLIENT)).touch()
    before = _locks_open(home)

    with pytest.raises(Rejected, match="is not held"):
        admission.admit(1, LOCAL, CLIENT, _with_lock(home))

    assert _locks_open(home) == before


def test_an_exit_is_noticed_when_the_lock_is_free_and_not_before(
    admission: Admission, home: str
) -> None:
    """Lost connections are no exits; a process that is gone is reported once."""
    with lock_held(home) as process:
        admission.admit(1, LOCAL, CLIENT, _with_lock(home))
        admission.end(1)
        assert admission.exited() == []
        admission.admit(2, LOCAL, CLIENT, _with_lock(home))
        assert admission.exited() == []

        process.kill()
        process.wait()

        assert admission.exited() == [CLIENT]
        assert admission.exited() == []
        assert not list(folder_of(home).iterdir())


def test_many_connections_of_one_client_cost_one_descriptor(
    admission: Admission, home: str
) -> None:
    """Each of its threads has some."""
    with lock_held(home):
        before = _locks_open(home)
        for pipe in range(1, 30):
            admission.admit(pipe, LOCAL, CLIENT, _with_lock(home))

        assert _locks_open(home) == before + 1


def test_writing_clients_are_bounded(
    admission: Admission, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a descriptor, and a probe a second."""
    monkeypatch.setattr(admission_module, "CLIENTS_MAX", 1)
    with lock_held(home, 5), lock_held(home, 6):
        admission.admit(1, LOCAL, 5, _with_lock(home, 5))
        with pytest.raises(Rejected, match="clients"):
            admission.admit(2, LOCAL, 6, _with_lock(home, 6))
        # An admitted client may have any number of connections.
        admission.admit(3, LOCAL, 5, _with_lock(home, 5))


def test_closing_lets_clients_live(admission: Admission, home: str) -> None:
    """The next node of this home address will look at the same files."""
    with lock_held(home):
        admission.admit(1, LOCAL, CLIENT, _with_lock(home))

        admission.close()

        assert (folder_of(home) / lock_name(CLIENT)).exists()


def _with_lock(home: str, client: int = CLIENT) -> Hello:
    """Return the Hello of a client whose lock file is there; without a file it knows no secret."""
    file = folder_of(home) / lock_name(client)
    secret = file.read_bytes() if file.exists() else b""
    return attrs.evolve(FITTING, lock=lock_name(client), secret=secret)


def _locks_open(home: str) -> int:
    """Return how many of this process's descriptors are of lock files: other tests leave others."""
    folder = folder_of(home)
    return sum(file.parent == folder for file in open_files())


OPERATES = attrs.evolve(FITTING, namespace="", geometry=OPERATOR, lock="", secret=b"", granule=0)


@pytest.mark.parametrize(
    ("peer", "role"),
    [
        (REMOTE, Role.OPERATOR),
        (Peer(Transport.IPC, uid=os.getuid()), Role.OPERATOR),
        (Peer(Transport.IPC, uid=0), Role.OPERATOR),
        (Peer(Transport.IPC, uid=4711), Role.READER),
    ],
)
def test_an_operator_without_certificates_is_a_trials_or_of_this_user(
    tmp_path: Path, peer: Peer, role: Role
) -> None:
    """It names no granule; another user who shares the host only reads."""
    sharing = attrs.evolve(SHARING, uids=frozenset({0, 4711, os.getuid()}))
    door = Admission(
        cluster="c", granule=16384, home=f"ipc://{tmp_path}/home", local_secret=b"s",
        gate=Gate(sharing, None), probe=lambda home, name: LockProbe(home, name, sharing),
    )  # fmt: skip

    assert door.admit(1, peer, 5, OPERATES).role is role
    with pytest.raises(Rejected, match="granule"):
        door.admit(2, peer, 5, attrs.evolve(OPERATES, geometry="layers=2"))


@pytest.mark.parametrize("role", list(CertificateRole))
def test_with_certificates_only_an_operators_makes_an_operator(role: CertificateRole) -> None:
    """What a Hello states of itself proves nothing there."""
    gate = SimpleNamespace(identity=lambda _: Identity("c", role, "ann"))
    door = Admission(
        cluster="c", granule=16384, home="ipc:///none", local_secret=b"s",
        gate=cast("Gate", gate), probe=lambda *_: pytest.fail("no lock is looked at"),
    )  # fmt: skip

    session = door.admit(1, Peer(Transport.TCP), 5, OPERATES)

    assert (session.role is Role.OPERATOR) is (role is CertificateRole.OPERATOR)


ROOM = 64


@pytest.fixture
def crowded() -> Admission:
    """A node with room for ROOM connections; who connects is named by its common name."""

    def identity(peer: Peer) -> Identity | None:
        return Identity("c", CertificateRole.CLIENT, peer.common_name) if peer.common_name else None

    return Admission(
        cluster="c", granule=16384, home="ipc:///none", local_secret=SECRET,
        gate=cast("Gate", SimpleNamespace(identity=identity)),
        probe=lambda *_: pytest.fail("no lock is looked at"), connections_max=ROOM,
    )  # fmt: skip


READS = attrs.evolve(FITTING, cluster="c", lock="", secret=b"")


def _tcp(name: str) -> Peer:
    return attrs.evolve(REMOTE, common_name=name)


def test_one_certificate_has_a_quarter_of_the_connections(crowded: Admission) -> None:
    """A connection more is refused until one has ended; a repeated Hello is no connection more."""
    for pipe in range(ROOM // 4):
        crowded.admit(pipe, _tcp("greedy"), 5, READS)
    crowded.admit(0, _tcp("greedy"), 5, READS)

    with pytest.raises(Rejected, match="one certificate") as refused:
        crowded.admit(ROOM, _tcp("greedy"), 5, READS)
    assert refused.value.reason == "busy"
    assert crowded.admit(ROOM + 1, _tcp("modest"), 6, READS)
    crowded.end(0)
    assert crowded.admit(ROOM, _tcp("greedy"), 5, READS)


def test_admitted_connections_leave_room_for_those_without_a_hello(crowded: Admission) -> None:
    """However many certificates there are; this host's own clients are always let in."""
    for pipe in range(ROOM * 3 // 4):
        crowded.admit(pipe, _tcp(f"client-{pipe % 8}"), 5, READS)

    with pytest.raises(Rejected, match="open files"):
        crowded.admit(ROOM, _tcp("another"), 6, READS)
    own = attrs.evolve(READS, secret=SECRET)
    assert crowded.admit(ROOM + 1, OWN, 7, own).role is Role.WRITER
