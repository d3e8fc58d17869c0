"""What all tests share: the machine is noisy, so a slow example is no failure of a property test; Ctrl-C works as in a terminal."""

from __future__ import annotations

import gc
import signal

from hypothesis import HealthCheck, settings

gc.disable()  # while all that the tests import is made: it stays, and is not looked through again and again

settings.register_profile("noisy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noisy")
# a shell that starts the tests in the background has SIGINT ignored, in them and in all that they start
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
