from __future__ import annotations

from hypothesis import HealthCheck, settings

# The same examples everywhere and every time: a failure on another machine can be repeated on this one.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("fixed")
