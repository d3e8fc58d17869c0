"""What all tests share: the machine is noisy, so a slow example is no failure of a property test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("noisy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noisy")
