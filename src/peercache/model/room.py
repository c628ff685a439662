"""Room: which page sizes and namespaces give room to others, in pool and disk.

Pool and disk follow these rules, each with an allocator of its own (ADR 0013). A page size takes
room from another, colder one. A quota names namespaces by a pattern, and the share of a node's pool
and disk that each of them is guaranteed: each matching namespace has the rule's shares for itself.
The guarantees never exceed the whole: exact names get their shares first, and names that match a
pattern get what is left, in the order in which they appear on the node.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final, final

import attrs

COLDER_FACTOR: Final = 2
"""A size takes room from another whose pages are this many times older than its own oldest.

With 2, room that has just moved is not worth moving back: n sizes in equal use settle.
"""

DONOR_CHECK_EVERY: Final = 16
"""Evictions of a size between two checks of all other sizes, which may be hundreds."""


PRIORITY_MAX: Final = 100

RULES_MAX: Final = 256


@final
@attrs.frozen
class Amount:
    """A share of a whole, or a number of bytes. The other one is 0."""

    part: float = 0.0
    size_bytes: int = 0

    def of(self, whole_bytes: int) -> int:
        """Return the number of bytes, given the size of the whole."""
        return min(whole_bytes, self.size_bytes or int(whole_bytes * self.part))


@final
@attrs.frozen
class QuotaRule:
    """One rule. pool, disk: the guarantee of each namespace that matches `pattern`.

    ttl_s, disk_ttl_s: how long after their last use its pages stay, 0: as long as there is room;
                       None: the rule does not say.
    """

    pattern: str
    pool: Amount
    disk: Amount
    priority: int = 0
    ttl_s: float | None = None
    disk_ttl_s: float | None = None

    @property
    def is_exact(self) -> bool:
        """Return whether the pattern is the name of one namespace."""
        return re.search(r"[*?\[]", self.pattern) is None

    def fits(self, name: str) -> bool:
        """Return whether the rule applies to this namespace."""
        return self.pattern == name if self.is_exact else fnmatchcase(name, self.pattern)


def rule_of(rules: tuple[QuotaRule, ...], name: str) -> QuotaRule | None:
    """Return the rule for a namespace: one with its exact name, else the first that matches."""
    fitting = [rule for rule in rules if rule.fits(name)]
    return next((rule for rule in fitting if rule.is_exact), fitting[0] if fitting else None)
