"""The rule by which page sizes share room: when one size takes room from another, colder one.

Pool and disk follow it, each with an allocator of its own (ADR 0013).
"""

from __future__ import annotations

from typing import Final

COLDER_FACTOR: Final = 2
"""A size takes room from another whose pages are this many times older than its own oldest.

With 2, room that has just moved is not worth moving back: n sizes in equal use settle.
"""

DONOR_CHECK_EVERY: Final = 16
"""Evictions of a size between two looks at all others, of which there may be hundreds."""
