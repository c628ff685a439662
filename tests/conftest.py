"""What every test of this tree shares: how Hypothesis behaves on a loaded machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A slow or busy machine makes a property no less true: time is no part of what they state.
settings.register_profile(
    "peercache", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("peercache")
