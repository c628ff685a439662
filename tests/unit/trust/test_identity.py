"""Identities: one spelling each, and nothing else is read as one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peercache.errors import Rejected
from peercache.trust.identity import CertificateRole, Identity, identity_among, parse_identity

# As str.isprintable judges: texts filtered by it are drawn several times.
_printable = st.characters(exclude_categories=("C", "Z"), include_characters=" ")
_texts = st.text(_printable, min_size=1, max_size=12)


def _identities() -> st.SearchStrategy[Identity]:
    restricted = st.builds(
        Identity,
        cluster=_texts,
        role=st.sampled_from([CertificateRole.NODE, CertificateRole.CLIENT]),
        name=_texts,
        namespaces=st.lists(_texts, max_size=4).map(tuple),
    )
    operators = st.builds(
        Identity, cluster=_texts, role=st.just(CertificateRole.OPERATOR), name=_texts
    )
    return st.one_of(restricted, operators)


def test_uris_look_as_the_documentation_specifies() -> None:
    """Other tools issue certificates with such names."""
    node = Identity("prod", CertificateRole.NODE, "gpu-7")
    client = Identity("prod", CertificateRole.CLIENT, "team a", ("llama/8b", "ü"))
    operator = Identity("prod", CertificateRole.OPERATOR, "ann")

    assert node.uri() == "peercache://prod/node/gpu-7"
    assert client.uri() == (
        "peercache://prod/client/team%20a?namespace=llama%2F8b&namespace=%C3%BC"
    )
    assert operator.uri() == "peercache://prod/operator/ann"


@given(_identities())
def test_identity_survives_writing_and_reading(identity: Identity) -> None:
    """What `uri` writes, `parse_identity` reads, whatever the names hold."""
    assert parse_identity(identity.uri()) == identity


@given(_identities(), _identities())
def test_two_identities_never_share_a_uri(one: Identity, other: Identity) -> None:
    """A name with a slash or a question mark is no other owner."""
    assert (one.uri() == other.uri()) == (one == other)


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "peercache://",
        "peercache://prod/node/",
        "peercache:///node/a",
        "peercache://prod/master/a",
        "peercache://prod/node/a/b",
        "peercache://prod/node/a#b",
        "peercache://prod/node/a?",
        "peercache://prod/client/a?namespace=",
        "peercache://prod/client/a?role=node",
        "peercache://prod/operator/a?namespace=b",
        "https://prod/node/a",
        "peercache://prod/node/%ff",
        "peercache://prod/node/a%0ab",
        "peercache://prod/node/a\n",
        "peercache://prod/node/" + "a" * 256,
        "peercache://prod/client/a?" + "&".join(["namespace=n"] * 65),
        "peercache://prod/client/" + "a" * 20_000,
    ],
)
def test_other_texts_are_refused(uri: str) -> None:
    """The refusal names what is wrong, and is short whatever the certificate holds."""
    with pytest.raises(Rejected) as caught:
        parse_identity(uri)

    assert caught.value.reason == "certificate"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "uri", ["peercache://prod/node/%61", "peercache://prod/node/ü", "peercache://prod/node/a%2f"]
)
def test_a_second_spelling_of_an_identity_is_refused(uri: str) -> None:
    """A revoked or bounded peer must not come back under a text that compares as another."""
    with pytest.raises(Rejected, match="not how PeerCache writes"):
        parse_identity(uri)


def test_certificate_has_one_identity_among_its_names() -> None:
    """Host names and foreign URIs next to it do not matter."""
    found = identity_among(["peercache", "gpu-7", "spiffe://x/y", "peercache://prod/node/gpu-7"])

    assert found == Identity("prod", CertificateRole.NODE, "gpu-7")


@pytest.mark.parametrize(
    "names",
    [[], ["peercache"], ["peercache://prod/node/a", "peercache://prod/client/a"]],
)
def test_certificate_with_none_or_two_identities_is_refused(names: list[str]) -> None:
    """Otherwise each place that looks could find another one."""
    with pytest.raises(Rejected, match="instead of one"):
        identity_among(names)
