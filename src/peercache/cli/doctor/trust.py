"""What the doctor finds out about certificates: of this host, and of the nodes to join."""

from __future__ import annotations

import ssl

from peercache.cli.doctor.facts import JoinFact, TrustFact
from peercache.config.entries import heads_of
from peercache.config.settings import Config
from peercache.errors import ConfigError
from peercache.observability.log import get_logger
from peercache.trust.contexts import client_context, shake_hands
from peercache.trust.files import LiveTls

JOINS_MAX = 8
"""Nodes to join that are asked."""


def look_at_trust(config: Config) -> TrustFact:
    """Return how a node with these settings is protected."""
    if not config.has_tls:
        return TrustFact(cluster=config.cluster, insecure=config.insecure)
    try:
        # The certificate may be a client's: the settings do not say what they are for.
        tls = LiveTls.open(config, is_node=False, log=get_logger())
    except ConfigError as error:
        return TrustFact(cluster=config.cluster, has_tls=True, problem=str(error))
    assert tls is not None, "there are certificates"
    context = client_context(tls)
    return TrustFact(
        cluster=tls.files.identity.cluster,
        has_tls=True,
        identity=tls.files.identity.uri(),
        days_left=tls.days_left,
        revoked=len(tls.revocations),
        joins=tuple(
            _join(address, context, tls) for address in heads_of(config.discovery_addr)[:JOINS_MAX]
        ),
    )


def _join(address: str, context: ssl.SSLContext, tls: LiveTls) -> JoinFact:
    """Connect to the control port of a node, and tell whose it is or why it refuses."""
    told = shake_hands(address, context, tls)
    return JoinFact(address, told.identity, told.problem, is_silent=told.is_silent)
