"""How many examples a property gets: few in `make fast`, more in `make test`, eight times as many
in `make properties`.

A property without a number of its own gets a profile's `max_examples`; one with a number states
`examples(40)`, for a profile of 100, and the profile in use scales it.
`pytest --hypothesis-profile=NAME` chooses a profile.
"""

from __future__ import annotations

from typing import Final

from hypothesis import HealthCheck, settings

SCALE: Final = 100
PROFILES: Final = {"fast": 15, "usual": 60, "thorough": 500}
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


def examples(count: int) -> int:
    """Return the examples of a property that gets `count` of them in a profile of 100."""
    current = settings().max_examples
    return max(EXAMPLES_MIN, count * current // SCALE)
