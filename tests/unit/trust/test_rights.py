"""Rights: role × message, and what of a message must be the sender's own."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest

from peercache.model.ids import incarnation_of
from peercache.model.keys import Namespace
from peercache.model.member import ALIVE, Member
from peercache.model.records import RECORD
from peercache.trust.identity import CertificateRole, Identity
from peercache.trust.rights import (
    NAMESPACE,
    NOT_ITS_OWN,
    ROLE,
    Session,
    is_invented,
    reads_pages,
    reads_state,
    refusal,
    spaces_of,
)
from peercache.wire.envelope import MESSAGES
from peercache.wire.messages.declared import Message, Role
from peercache.wire.messages.directory import Put, Repair, RequestChanges, RequestKeys
from peercache.wire.messages.membership import Heartbeat, Join, OfferPages, OfferSpill
from peercache.wire.messages.pool import Clear, Demote, Remove, Reserve, ReserveMirror, Retain
from peercache.wire.messages.session import OpenChannel
from tests.certificates import ALIKE
from tests.contracts.frozen.record import sample

ME, OTHER = 7, 8
OURS, THEIRS = Namespace("ours"), Namespace("theirs")

TABLE = {
    # message:           node   reader writer operator
    "Hello":               (False, False, False, False),
    "Welcome":             (False, False, False, False),
    "Refused":             (False, False, False, False),
    "HelloRequired":       (False, False, False, False),
    "Join":                (True,  False, False, False),
    "Heartbeat":           (True,  False, False, False),
    "HeartbeatSeen":       (True,  False, False, False),
    "ShareView":           (True,  False, False, False),
    "RequestView":         (True,  True,  True,  True),
    "RequestViewChanges":  (True,  True,  True,  True),
    "ReportViewChanges":   (False, False, False, False),
    "CompareView":         (True,  False, False, False),
    "Lookup":              (False, True,  True,  False),
    "Located":             (False, False, False, False),
    "ReportStale":         (False, True,  True,  False),
    "Put":                 (True,  False, False, False),
    "Delete":              (True,  False, False, False),
    "Acknowledged":        (True,  False, False, False),
    "StreamSummary":       (True,  False, False, False),
    "SummaryDiffers":      (True,  False, False, False),
    "Repair":              (True,  False, False, False),
    "Reserve":             (False, False, True,  False),
    "ReserveMirror":       (False, False, True,  False),
    "Granted":             (False, False, False, False),
    "Commit":              (False, False, True,  False),
    "Committed":           (False, False, False, False),
    "Abort":               (False, False, True,  False),
    "LiveReservations":    (False, False, True,  False),
    "Touched":             (False, True,  True,  False),
    "Remove":              (True,  False, True,  True),
    "Clear":               (True,  False, True,  True),
    "Retain":              (True,  False, True,  True),
    "Demote":              (True,  False, True,  True),
    "Retained":            (True,  False, False, False),
    "Removed":             (True,  False, False, False),
    "RequestStats":        (False, True,  True,  True),
    "ReportStats":         (False, False, False, False),
    "SummaryMatches":      (True,  False, False, False),
    "HandedOver":          (True,  False, False, False),
    "RequestSummary":      (True,  False, False, False),
    "RequestFreshSummary": (True,  False, False, False),
    "VerifyRecords":       (True,  False, False, False),
    "Counted":             (False, False, True,  False),
    "Promote":             (False, True,  True,  False),
    "Promoted":            (False, False, False, False),
    "OpenChannel":         (False, True,  True,  False),
    "ChannelOpened":       (False, False, False, False),
    "ChannelsHeld":        (False, True,  True,  False),
    "ReportRevocations":   (True,  False, False, False),
    "RequestStatus":       (True,  False, False, True),
    "ReportStatus":        (False, False, False, False),
    "RequestCluster":      (False, False, False, True),
    "ReportCluster":       (False, False, False, False),
    "DrainNode":           (False, False, False, True),
    "CancelDrain":         (False, False, False, True),
    "RequestDrainState":   (True,  False, False, True),
    "ReportDrainState":    (False, False, False, False),
    "OfferPages":          (True,  False, False, False),
    "PagesTaken":          (True,  False, False, False),
    "OfferSpill":          (True,  False, False, False),
    "RequestRoom":         (True,  False, False, False),
    "ReportRoom":          (True,  False, False, False),
    "CopiesEvicted":          (True,  False, False, False),
    "RequestOverlap":      (True,  True,  True,  True),
    "ReportOverlap":       (False, False, False, False),
    "RequestKeys":         (True,  False, False, True),
    "ReportKeys":          (False, False, False, False),
    "RequestChanges":      (False, True,  True,  True),
    "ReportChanges":       (False, False, False, False),
}  # fmt: skip
"""Written by hand, and not made from the table that it tests."""

COLUMNS = (Role.NODE, Role.READER, Role.WRITER, Role.OPERATOR)


def session(role: Role, **fields: Any) -> Session:
    """Return a session of a role that may change everything that its role may."""
    may = {Role.READER: frozenset[int](), Role.WRITER: frozenset({OURS.space_tag()})}
    return Session(ME, role, **{"changes": may.get(role), **fields})


def own(kind: type[Message]) -> Message:
    """Return a message that concerns the sender only."""
    member = Member(ME, 1, ALIVE, 255, "h", "h:1", "h:2", "", "")
    said: Message = sample(kind, 2)
    changed: dict[str, Any] = {}
    for field in attrs.fields(kind):
        if str(field.type) == "Member":
            changed[field.name] = member
        elif field.name == "namespace" and str(field.type) == "Tag":
            changed[field.name] = OURS.tag()
    result: Message = attrs.evolve(said, **changed)
    return result


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("role", Role)
def test_each_role_may_send_what_the_table_allows(role: Role, kind: type[Message]) -> None:
    """Every message of the wire has a row; a message without one is refused."""
    is_allowed = TABLE[kind.__name__][COLUMNS.index(role)]

    assert refusal(session(role), own(kind)) == ("" if is_allowed else ROLE)
    assert (role in kind.declared.senders) is is_allowed


def records(*holders: int) -> bytes:
    made = np.zeros(len(holders), RECORD)
    made["holder"] = holders
    return made.tobytes()


@pytest.mark.parametrize("holders", [(OTHER,), (ME, OTHER), (0,), (ME, ME, 2**64 - 1)])
def test_a_node_publishes_its_own_records_only(holders: tuple[int, ...]) -> None:
    """One record of another holder refuses the whole message."""
    node = session(Role.NODE)

    for message in (Put(1, records(*holders)), Repair(1, b"\0", records(*holders))):
        assert refusal(node, message) == NOT_ITS_OWN
    assert refusal(node, Put(1, records(ME, ME))) == ""


@pytest.mark.parametrize("changed", [{"incarnation": OTHER}, {"name": "another"}])
def test_a_node_joins_and_beats_as_itself_only(changed: dict[str, Any]) -> None:
    """Neither as another incarnation, nor under another name than its certificate's."""
    node = session(Role.NODE, name="a")
    member = Member(ME, 1, ALIVE, 255, "h", "h:1", "h:2", "", "", "a")

    for kind in (Join, lambda said: Heartbeat(said, b"")):
        assert refusal(node, kind(member)) == ""
        assert refusal(node, kind(attrs.evolve(member, **changed))) == NOT_ITS_OWN


@pytest.mark.parametrize(
    "concerning",
    [
        lambda tag: Clear(1, tag),
        lambda tag: Remove(1, tag, b""),
        lambda tag: Retain(1, tag, b"", 1.0),
        lambda tag: Demote(1, tag, b""),
        lambda tag: Reserve(1, 1, tag, b"", b""),
        lambda tag: ReserveMirror(1, 1, tag, b"", b""),
    ],
    ids=["Clear", "Remove", "Retain", "Demote", "Reserve", "ReserveMirror"],
)
def test_a_writer_changes_its_own_namespace_only(concerning: Any) -> None:
    """Geometries and ranks of one name are one namespace to rights; another name is not."""
    writer = session(Role.WRITER)
    rank = Namespace("ours", geometry="layers=3", coordinates="tp=1")

    assert refusal(writer, concerning(OURS.tag())) == ""
    assert refusal(writer, concerning(rank.tag())) == ""
    assert refusal(writer, concerning(THEIRS.tag())) == NAMESPACE
    assert refusal(writer, concerning(0)) == NAMESPACE


def test_names_that_agree_in_32_bits_have_rights_of_their_own() -> None:
    """Such a pair is found in a second: the tag of one is no right to pages of the other."""
    for owner, stranger in (ALIKE, ALIKE[::-1]):
        spaces = frozenset({Namespace(owner).space_tag()})
        writer, node = session(Role.WRITER, changes=spaces), session(Role.NODE, changes=spaces)
        for name, reason in ((owner, ""), (stranger, NAMESPACE)):
            for tag in (Namespace(name, "layers=3").tag(), Namespace(name).space_tag()):
                assert refusal(node, OfferPages(1, tag, records(ME))) == reason
                for about in (Clear(1, tag), Remove(1, tag, b""), Retain(1, tag, b"", 1.0)):
                    assert refusal(writer, about) == refusal(node, about) == reason
                for about in (Reserve(1, 1, tag, b"", b""), ReserveMirror(1, 1, tag, b"", b"")):
                    assert refusal(writer, about) == reason


def test_an_operator_lists_the_namespaces_of_its_certificate() -> None:
    """Geometries of one name are one namespace here too."""
    ours_only = session(Role.OPERATOR, reads=frozenset({OURS.space_tag()}))

    for tag, reason in ((OURS.tag(), ""), (OURS.space_tag(), ""), (THEIRS.tag(), NAMESPACE)):
        assert refusal(ours_only, RequestKeys(1, tag, 0, 0, 0, 1)) == reason
        assert refusal(session(Role.OPERATOR), RequestKeys(1, tag, 0, 0, 0, 1)) == ""


def test_a_nodes_certificate_states_what_it_may_clear() -> None:
    """By default all of its cluster: a weight update must empty every host."""
    everything = Identity("c", CertificateRole.NODE, "a")
    ours_only = attrs.evolve(everything, namespaces=("ours",))

    assert spaces_of(everything) is None
    for tag, reason in ((OURS.tag(), ""), (THEIRS.tag(), NAMESPACE)):
        assert refusal(session(Role.NODE), Clear(1, tag)) == ""
        assert refusal(session(Role.NODE, changes=spaces_of(ours_only)), Clear(1, tag)) == reason


@pytest.mark.parametrize("kind", [OpenChannel, RequestChanges])
def test_a_restricted_client_gets_no_queue_pair_and_follows_no_node(kind: type[Message]) -> None:
    """One key of a memory region opens all of it, and page keys do not show their namespace."""
    opened = sample(kind, 0)
    restricted = spaces_of(Identity("c", CertificateRole.CLIENT, "a", ("ours",)))

    assert refusal(session(Role.READER), opened) == ""
    assert refusal(session(Role.READER, reads=restricted), opened) == NAMESPACE


@pytest.mark.parametrize("role", [CertificateRole.CLIENT, CertificateRole.NODE])
def test_a_certificates_namespaces_restrict_what_its_owner_reads(role: CertificateRole) -> None:
    """A node's too: engines with an embedded node read with its certificate."""
    owner = Identity("c", role, "a", ("ours", "theirs"))

    assert spaces_of(owner) == {OURS.space_tag(), THEIRS.space_tag()}
    assert spaces_of(attrs.evolve(owner, namespaces=())) is None
    assert spaces_of(None) is None


def test_a_node_offers_its_own_pages_in_its_namespaces_only() -> None:
    """As it clears them: what a target takes over is that target's page from then on."""
    everything = session(Role.NODE)
    ours_only = session(Role.NODE, changes=frozenset({OURS.space_tag()}))

    for offerer, reason in ((everything, ""), (ours_only, NAMESPACE)):
        for offer, more in ((OfferPages, ()), (OfferSpill, (b"",))):
            assert refusal(offerer, offer(1, OURS.tag(), records(ME), *more)) == ""
            assert refusal(offerer, offer(1, THEIRS.tag(), records(ME), *more)) == reason
            assert refusal(offerer, offer(1, OURS.tag(), records(ME, OTHER), *more)) == NOT_ITS_OWN


@pytest.mark.parametrize(
    ("role", "has_pages", "has_state"),
    [
        (CertificateRole.NODE, True, True),
        (CertificateRole.CLIENT, True, False),
        (CertificateRole.OPERATOR, False, True),
    ],
)
def test_the_other_doors_go_by_the_certificates_role(
    role: CertificateRole, has_pages: bool, has_state: bool
) -> None:
    """Pages for engines, the state for operators."""
    identity = Identity("c", role, "a")

    assert (reads_pages(identity), reads_state(identity)) == (has_pages, has_state)


def test_an_invented_member_is_recognised_by_its_name_and_nonce() -> None:
    """Gossip gives addresses; whose they are follows from the certificate's name."""
    nonce = bytes(range(16))
    honest = Member(
        incarnation_of("c", "a", nonce), 1, ALIVE, 255, "h", "h:1", "h:2", "", "", "a", nonce
    )

    assert not is_invented("c", honest)
    assert is_invented("d", honest)
    for changed in ({"name": "b"}, {"nonce": bytes(16)}, {"incarnation": 5}):
        assert is_invented("c", attrs.evolve(honest, **changed))  # type: ignore[arg-type]
