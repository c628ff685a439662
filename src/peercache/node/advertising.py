"""Advertising: keeps the address that this node tells others the one at which they reach it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

import attrs
import trio

from peercache.actors.effects import Effect
from peercache.actors.membership.actor import Membership
from peercache.config.entries import heads_of
from peercache.config.quantities import format_address, parse_address
from peercache.config.settings import Config
from peercache.node import addresses
from peercache.node.reach import Reach, resolved, routed_host
from peercache.trust.contexts import client_context, shake_hands
from peercache.trust.files import LiveTls

LOOK_S = 0.5
"""How soon a new address is told; a look compares a few words."""

GREET_S = 5.0
"""How often a node that is alone asks its discovery addresses whether they admit it."""

RESOLVE_AGAIN_S = 1.0
RESOLVE_LONGEST_S = 30.0
"""Back-off between two attempts to resolve the names of discovery, and how long one may take."""


@final
@attrs.define(eq=False)
class Advertising:
    """Follows names that resolve late and connections that show this node's address.

    is_fixed: whether the configuration says the address, so that only the head rank may change.
    greet:    says Hello to discovery addresses once more.
    tls:      the certificates; nng does not tell a dialer why its handshake fails.
    """

    config: Config
    membership: Membership
    reach: Reach
    is_fixed: bool
    perform: Callable[[Effect], None]
    greet: Callable[[Iterable[str]], None]
    log: Any
    known: dict[str, set[str]]
    tls: LiveTls | None = None
    _told_problem: str = attrs.field(default="", init=False)

    async def run(self) -> None:
        """Work until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._resolve)
            nursery.start_soon(self._watch)
            while True:
                await trio.sleep(LOOK_S)
                self.look()

    async def _watch(self) -> None:
        """Find out whether a node that is alone is rightly so, and log it if not."""
        while True:
            if self.membership.is_joined:
                self.reach.joined()
            else:
                self.greet(self.reach.asked)
                await self._shake_hands()
            self._tell_problem()
            await trio.sleep(GREET_S)

    async def _shake_hands(self) -> None:
        """Ask the heads that have not admitted this node for the reason of a failed handshake."""
        if self.tls is None:
            return
        context = client_context(self.tls)
        for address in self.reach.silent_heads():
            told = await trio.to_thread.run_sync(
                shake_hands, address, context, self.tls, abandon_on_cancel=True
            )
            if told.problem and not told.is_silent and not self.membership.is_joined:
                self.reach.refused(address, told.problem)

    def _tell_problem(self) -> None:
        me = self.membership.me
        problem = "" if self.membership.is_joined else self.reach.problem(me.control)
        if problem and not self._told_problem:
            self.log.warning("node.not_reached", problem=problem)
        elif self._told_problem and not problem:
            self.log.info("node.reached_again")
        self._told_problem = problem

    async def _resolve(self) -> None:
        """Resolve what did not resolve at the start, until all of it has."""
        pause_s = RESOLVE_AGAIN_S
        while missing := [address for address, hosts in self.known.items() if not hosts]:
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESOLVE_LONGEST_S)
            found = await resolved(missing, RESOLVE_LONGEST_S)
            self.known.update(found)
            if any(found.values()):
                self.look(is_news=True)

    def look(self, *, is_news: bool = False) -> None:
        """Tell the others where this node is, if that has changed.

        is_news: whether names have resolved that had not.
        """
        me = self.membership.me
        host, port = parse_address(me.control)
        if not self.is_fixed:
            if is_news:
                host = routed_host(_hosts(self.known, heads_of(self.config.discovery_addr)))
            host = self.reach.better_than(host)
        control = format_address(host, port)
        data = format_address(host, parse_address(me.data)[1])
        rank = self._rank(control)
        if (control, data, rank) == (me.control, me.data, me.head_rank):
            return
        self.log.info("node.address_changed", control=control, data=data, before=me.control)
        effects = self.membership.move(
            trio.current_time(), control=control, data=data, head_rank=rank
        )
        for effect in effects:
            self.perform(effect)

    def _rank(self, control: str) -> int:
        own = self.reach.own_head
        if own is not None:
            return min(heads_of(self.config.discovery_addr).index(own), addresses.NO_HEAD)
        return addresses.head_rank(self.config, control, self.known)


def _hosts(known: dict[str, set[str]], wanted: Iterable[str]) -> list[str]:
    return [host for address in wanted for host in sorted(known.get(address, ()))]
