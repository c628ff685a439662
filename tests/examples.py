"""How many examples a property gets: few in `make fast`, the usual number in `make test`, five
times as many in `make properties`.

A property without a number of its own gets a profile's `max_examples`; one with a number says
`examples(60)`, which the profile scales. `pytest --hypothesis-profile=NAME` chooses a profile.
"""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings

USUAL: Final = 100
PROFILES: Final = {"fast": 15, "usual": USUAL, "thorough": 5 * USUAL}
"""Examples of a property that names no number, by profile."""
EXAMPLES_MIN: Final = 5


def register_profiles() -> None:
    """Make the profiles known to Hypothesis, and choose the usual one."""
    for name, count in PROFILES.items():
        # A slow or busy machine makes a property no less true: time is no part of what they state.
        settings.register_profile(
            name,
            deadline=None,
            max_examples=count,
            suppress_health_check=[HealthCheck.too_slow],
            print_blob=True,
        )
    settings.load_profile("usual")


def examples(usual: int) -> int:
    """Return the examples for a property that gets `usual` of them in `make test`."""
    current = settings().max_examples
    return max(EXAMPLES_MIN, usual * current // USUAL)
