"""Bugs that are planted in the simulated world itself, in place of a fabric or a driver.

All others are planted in production code, from outside: see `canaries`. Empty in a normal run.
"""

from __future__ import annotations

RETURNS_WHILE_WRITING = "returns-while-writing"
READS_SOURCE_LATE = "reads-source-late"
WORD_BEFORE_BYTES = "word-before-bytes"
CHECKSUM_NOT_VERIFIED = "disk-checksum-not-verified"
NO_FIRST_LOOK = "no-first-look"
FUTURE_ACCEPTED = "future-generation-accepted"
KEY_AFTER_WORD = "key-after-word"

planted: set[str] = set()
"""The planted bugs, by name."""
