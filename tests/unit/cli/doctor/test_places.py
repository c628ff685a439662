"""What the doctor reports of addresses, the disk, the cgroup, compiled parts and certificates."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner

from peercache.cli.doctor import host
from peercache.cli.doctor.checks import ADVICE, GOOD, PROBLEM, Finding, as_text, doctor, judge
from peercache.cli.doctor.facts import AddressFact, DiskFact, JoinFact, SourceFact, TrustFact
from peercache.cli.doctor.host import (
    look_at_addresses,
    look_at_disk,
    look_at_home,
    look_at_sources,
    look_at_trust,
)
from peercache.config.settings import Config
from peercache.errors import BrokenInstallation
from peercache.memory.kernel import cgroup_memory
from peercache.observability.log import get_logger
from peercache.trust.files import LiveTls
from tests.certificates import Certificates
from tests.unit.cli.doctor.test_checks import GIB, HOST, worst
from tests.unit.http.http_node import served

DISK = DiskFact(path="/data/peercache", wanted=100 * GIB, room=200 * GIB)
NO_ADDRESS = "203.0.113.9"
"""Of documentation: of no host."""


def disk(**changes: Any) -> DiskFact:
    return attrs.evolve(DISK, **changes)


def address(setting: str, named: str, *hosts: str) -> dict[str, Any]:
    return {"addresses": (AddressFact(setting, named, hosts),)}


def source(*fact: str, **more: Any) -> dict[str, Any]:
    return {"sources": (SourceFact(*fact, **more),)}


def test_disk_that_has_room_is_good_and_no_disk_no_line() -> None:
    """A host without a disk tier is shown nothing of one."""
    assert not any(finding.topic == "disk" for finding in judge(HOST))
    (found,) = [each for each in judge(attrs.evolve(HOST, disk=DISK)) if each.topic == "disk"]
    assert (found.level, found.text) == (GOOD, "100.0 GiB fit into /data/peercache")


@pytest.mark.parametrize(
    ("changes", "level", "topic", "text"),
    [
        # A node would start without its disk, and report it in its log only.
        ({"disk": disk(problem="/data is no folder", room=0)}, PROBLEM, "disk", "is no folder"),
        ({"disk": disk(room=0)}, PROBLEM, "disk", "is full"),
        ({"disk": disk(room=50 * GIB)}, ADVICE, "disk", "room for 50.0 GiB"),
        # What is there already is room.
        ({"disk": disk(room=50 * GIB, held=40 * GIB)}, ADVICE, "disk", "room for 90.0 GiB"),
        (address("discovery_addr", "head:1"), PROBLEM, "addresses", "head:1 does not resolve"),
        (address("advertise", "me.example"), PROBLEM, "addresses", "me.example does not resolve"),
        (address("listen", "a:1", NO_ADDRESS), PROBLEM, "addresses", "nothing can listen there"),
        # An address behind a router may be advertised.
        (address("advertise", "a", NO_ADDRESS), ADVICE, "addresses", "no address of this host"),
        # A node starts without etcd, but not with what works in a pod only.
        (source("k8s://pc", "pods only", ends_node=True), PROBLEM, "discovery", "pods only"),
        (source("etcd://e/p", "nothing answers"), ADVICE, "discovery", "a node starts alone"),
        # A tmpfs may be larger than the memory that is left.
        (
            {"memory": attrs.evolve(HOST.memory, available=10 * GIB)},
            PROBLEM,
            "pool",
            "larger than the free memory of this host, 10.0 GiB",
        ),
        # A node refuses to start there.
        ({"nofile_hard": 64}, PROBLEM, "open files", ""),
    ],
)
def test_what_a_node_cannot_use_is_reported_with_a_fix(
    changes: dict[str, Any], level: str, topic: str, text: str
) -> None:
    """Each alone on a host where all else is good."""
    (finding,) = worst(attrs.evolve(HOST, **changes))

    assert (finding.level, finding.topic) == (level, topic)
    assert text in finding.text
    assert finding.fix


def test_disk_folder_is_tried_by_writing(tmp_path: Path) -> None:
    """A folder that is still to be made counts as the nearest one that is there."""

    def found(path: Path) -> DiskFact:
        fact = look_at_disk(Config.load({"disk_enabled": True, "disk_path": str(path)}))
        assert fact is not None
        return fact

    file = tmp_path / "file"
    file.write_text("no folder")

    assert found(tmp_path / "new" / "deep").problem == ""
    assert found(tmp_path / "new").room > 0
    assert "is not a folder" in found(file / "below").problem
    assert "no file can be written in /proc" in found(Path("/proc/none/x")).problem
    assert sorted(tmp_path.iterdir()) == [file], "the doctor leaves nothing behind"


def test_disk_folder_that_is_full_already_by_us_has_room(tmp_path: Path) -> None:
    """The slabs of a node that runs are no reason for a warning."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "slab-0").write_bytes(b"x" * 2**20)

    fact = look_at_disk(Config.load({"disk_enabled": True, "disk_path": str(tmp_path)}))

    assert fact is not None
    assert fact.held >= 2**20


def test_home_folder_is_tried_by_writing(tmp_path: Path) -> None:
    """Of the settings, or of this user; a folder that every user may write to is refused."""

    def found(home: Path) -> list[Finding]:
        facts = attrs.evolve(HOST, home=look_at_home(Config.load({"home": f"ipc://{home}"})))
        return [each for each in judge(facts) if each.topic == "home"]

    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    assert [each.level for each in found(tmp_path / "new" / "n.ipc")] == [GOOD]
    (opened,) = found(tmp_path / "open" / "n.ipc")
    assert (opened.level, "may be written by every user" in opened.text) == (PROBLEM, True)
    (readonly,) = found(Path("/proc/none/n.ipc"))
    assert "no file can be written in /proc" in readonly.text
    assert readonly.fix
    assert [each.name for each in tmp_path.iterdir()] == ["open"]


def test_addresses_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wildcards are no address; a node to join need not be this host."""
    names = {"head:31998": {NO_ADDRESS}, "gone:5": set[str]()}
    known = host.look_up
    monkeypatch.setattr(host, "look_up", lambda at: names[at] if at in names else known(at))
    settings = {"listen": ":31998", "http_listen": "127.0.0.1", "advertise": NO_ADDRESS}

    found = look_at_addresses(
        Config.load({**settings, "insecure": True, "discovery_addr": "head,dns://gone:5,k8s://pc"})
    )

    assert [(each.setting, each.hosts, each.is_own) for each in found] == [
        ("http_listen", ("127.0.0.1",), True),
        ("advertise", (NO_ADDRESS,), False),
        ("discovery_addr", (NO_ADDRESS,), False),
        ("discovery_addr", (), False),
    ]


def test_sources_are_asked_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One server of etcd is enough; outside a pod there is no Kubernetes API to ask."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server, unused_port() as silent:
        answers = f"127.0.0.1:{server.getsockname()[1]}"
        etcd = f"etcd://127.0.0.1:{silent},{answers}/a"
        settings = {"insecure": True, "discovery_addr": f"{etcd},etcd://127.0.0.1:{silent}/b"}

        works, dead = look_at_sources(Config.load(settings))
        (outside,) = look_at_sources(Config.load({"insecure": True, "discovery_addr": "k8s://pc"}))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(silent))
        (in_pod,) = look_at_sources(Config.load({"insecure": True, "discovery_addr": "k8s://pc"}))

    assert works == SourceFact(etcd)
    assert dead.problem == f"nothing answers (127.0.0.1:{silent}: Connection refused)"
    assert outside.ends_node
    assert "works in a pod only" in outside.problem
    assert in_pod == SourceFact("k8s://pc", dead.problem)


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """Keep a port that is bound and that nothing listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, (-1, 0)),
        ("0::/\n", {"memory.max": "900", "memory.current": "5"}, (900, 5)),
        # A systemd service: the limit is its own group's, not the root's.
        (
            "0::/system.slice/peercache.service\n",
            {
                "system.slice/peercache.service/memory.max": "700",
                "system.slice/peercache.service/memory.current": "100",
                "system.slice/memory.max": "max",
            },
            (700, 100),
        ),
        # The one above has less left.
        (
            "0::/pod/box\n",
            {
                "pod/box/memory.max": "700",
                "pod/memory.max": "800",
                "pod/memory.current": "600",
            },
            (800, 600),
        ),
        (
            "4:memory:/process/one\n0::/\n",
            {
                "memory/process/one/memory.limit_in_bytes": "500",
                "memory/process/one/memory.usage_in_bytes": "50",
                "memory/memory.limit_in_bytes": str(2**63 - 4096),
            },
            (500, 50),
        ),
    ],
)
def test_limit_of_memory_is_that_of_this_process(
    tmp_path: Path, groups: str, files: dict[str, str], expected: tuple[int, int]
) -> None:
    """A pool over the limit is killed without a word, so each group above counts."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")

    assert cgroup_memory(groups, tmp_path) == expected


def _broken() -> None:
    raise BrokenInstallation("the compiled library x.so is missing", "pip install it")


@pytest.mark.parametrize(
    ("name", "settings", "problems"),
    [
        ("load", {}, 1),
        ("load_tls", {}, 0),
        ("load_tls", {"tls_ca": "a", "tls_cert": "b", "tls_key": "c"}, 1),
    ],
)
def test_missing_compiled_part_is_a_problem_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    settings: dict[str, str],
    problems: int,
) -> None:
    """The part for TLS is missing on many hosts, and needed with certificates only."""
    monkeypatch.setattr(host, name, _broken)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]

    done = CliRunner().invoke(doctor, ["--quick", "--json", *flags], standalone_mode=False)

    findings = json.loads(done.output)["findings"]
    missing = [each for each in findings if each["topic"] == "installation"]
    assert [each["text"] for each in missing] == ["the compiled library x.so is missing"] * problems
    assert all(each["fix"] == "pip install it" for each in missing)


def test_notes_are_counted_next_to_problems() -> None:
    """`no problems` alone would hide them."""
    facts = attrs.evolve(HOST, disk=disk(room=50 * GIB))

    assert as_text(facts, judge(facts)).endswith("\nno problems, 1 note\n")
    assert as_text(HOST, judge(HOST)).endswith("\nno problems\n")


@pytest.fixture(name="certificates")
def _certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ca", "prod")


def _findings(**settings: str) -> list[Finding]:
    return _judged(look_at_trust(Config.load(settings)))


def _judged(trust: TrustFact) -> list[Finding]:
    found = judge(attrs.evolve(HOST, trust=trust))
    return [each for each in found if each.topic in ("certificates", "discovery")]


def test_host_without_certificates_serves_itself() -> None:
    """Nothing is wrong with that."""
    assert [(each.level, each.topic) for each in _findings()] == [(GOOD, "certificates")]


def test_trial_is_advised_to_become_a_cluster() -> None:
    """The command that fixes it has the cluster's name."""
    (found,) = _findings(cluster="ann", insecure=True)

    assert found.level == ADVICE
    assert "every process that connects may read every page" in found.text
    assert "--cluster ann" in found.fix


@pytest.mark.parametrize(
    ("lifetime", "level"), [(dt.timedelta(days=30), GOOD), (dt.timedelta(days=3), ADVICE)]
)
def test_certificate_is_shown_with_its_days(
    certificates: Certificates, lifetime: dt.timedelta, level: str
) -> None:
    """Two weeks before its end it is time."""
    (found,) = _findings(**certificates.node("a", lifetime=lifetime))

    assert found.level == level
    assert "peercache://prod/node/a" in found.text


def test_wrong_files_are_a_problem(certificates: Certificates) -> None:
    """In the words of the node's own start."""
    settings = certificates.node("a")
    Path(settings["tls_key"]).chmod(0o644)
    (found,) = _findings(**settings)

    assert found.level == PROBLEM
    assert "chmod 600" in found.text


def _live(settings: dict[str, str]) -> LiveTls:
    live = LiveTls.open(Config.load(settings), is_node=True, log=get_logger())
    assert live is not None
    return live


async def test_node_to_join_announces_who_it_is(certificates: Certificates) -> None:
    """Or why it and this host refuse each other."""
    settings, theirs = certificates.node("a"), certificates.node("b")

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**settings, "discovery_addr": address})

    assert found == JoinFact(address, "peercache://prod/node/b")


async def test_node_of_another_authority_is_found(
    certificates: Certificates, tmp_path: Path
) -> None:
    """The doctor's host does not trust it."""
    other = Certificates(tmp_path / "other", "prod")
    settings, theirs = certificates.node("a"), other.node("b")

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**settings, "discovery_addr": address})

    assert "certificate" in found.problem
    assert not found.identity


async def test_node_that_does_not_trust_this_host_is_found(
    certificates: Certificates, tmp_path: Path
) -> None:
    """With TLS 1.3 that is reported after the handshake."""
    other = Certificates(tmp_path / "other", "prod")
    theirs, ours = other.node("b"), certificates.node("a")
    both = tmp_path / "both.crt"
    both.write_text(_joined(ours, theirs))

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**ours, "tls_ca": str(both), "discovery_addr": address})

    assert "does not accept" in found.problem or "ca" in found.problem
    assert not found.is_silent


async def test_node_of_another_cluster_is_found(certificates: Certificates, tmp_path: Path) -> None:
    """One authority's file may serve two clusters by mistake."""
    other = Certificates(tmp_path / "other", "test")
    theirs, ours = other.node("b"), certificates.node("a")
    both = tmp_path / "both.crt"
    both.write_text(_joined(ours, theirs))
    for each in (theirs, ours):
        each["tls_ca"] = str(both)

    async with served(settings=theirs, tls=_live(theirs)) as address:
        found = await _look({**ours, "discovery_addr": address})

    assert "for cluster 'test', this one is 'prod'" in found.problem


def _joined(*peers: dict[str, str]) -> str:
    """Return the authorities of several peers as one file."""
    return "".join([Path(peer["tls_ca"]).read_text() for peer in peers])


async def _look(settings: dict[str, str]) -> JoinFact:
    fact = await trio.to_thread.run_sync(lambda: look_at_trust(Config.load(settings)))
    (found,) = fact.joins
    return found


@pytest.fixture(name="dead")
def _dead() -> Iterator[str]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_node_that_gives_no_answer_is_no_problem_of_trust(
    certificates: Certificates, dead: str
) -> None:
    """It may start later."""
    _, found = _findings(**certificates.node("a"), discovery_addr=dead)

    assert found.level == ADVICE
    assert "Connection refused" in found.text


def test_refusal_is_a_problem() -> None:
    """It does not go away alone."""
    fact = TrustFact(has_tls=True, identity="x", days_left=99, joins=(JoinFact("a:1", "", "no"),))
    _, found = _judged(fact)

    assert found.level == PROBLEM
    assert "refuse each other: no" in found.text
