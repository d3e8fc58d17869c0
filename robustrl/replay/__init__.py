"""Recorded runs: read, replayed, and held against other detectors.

``robustrl.replay`` is this package and the function at once: ``robustrl.replay(run, thresholds)`` is `replaying.replay`.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from .replaying import replay

        return replay(*arguments, **settings)


sys.modules[__name__].__class__ = _Callable
