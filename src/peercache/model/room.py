"""Room: which page sizes and which namespaces give room to which, in pool and disk.

Pool and disk follow these rules, each with an allocator of its own (ADR 0013). A size takes room
from another, colder one. A quota names namespaces by a pattern, and which part of a node's pool and
disk each of them is guaranteed: each namespace that fits has the rule's shares for itself. What is
sure never comes to more than the whole: exact names get their part first, and names that fit a
pattern get what is left, in the order in which the node meets them.
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
"""Evictions of a size between two looks at all others, of which there may be hundreds."""


PRIORITY_MAX: Final = 100

RULES_MAX: Final = 256


@final
@attrs.frozen
class Amount:
    """A part of a whole, or bytes. The other one is 0."""

    part: float = 0.0
    size_bytes: int = 0

    def of(self, whole_bytes: int) -> int:
        """Return the bytes of a whole of so many."""
        return min(whole_bytes, self.size_bytes or int(whole_bytes * self.part))


@final
@attrs.frozen
class QuotaRule:
    """One rule. pool, disk: what each namespace that fits `pattern` is guaranteed."""

    pattern: str
    pool: Amount
    disk: Amount
    priority: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether the pattern is the name of one namespace."""
        return re.search(r"[*?\[]", self.pattern) is None

    def fits(self, name: str) -> bool:
        """Return whether the rule is for this namespace."""
        return self.pattern == name if self.is_exact else fnmatchcase(name, self.pattern)


def rule_of(rules: tuple[QuotaRule, ...], name: str) -> QuotaRule | None:
    """Return the rule for a namespace: one that names it exactly, else the first that fits."""
    fitting = [rule for rule in rules if rule.fits(name)]
    return next((rule for rule in fitting if rule.is_exact), fitting[0] if fitting else None)
