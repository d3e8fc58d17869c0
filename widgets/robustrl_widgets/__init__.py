"""What people look at: the views of a job, in a notebook and in a browser. Each is built from the run's events and never asks a role.

Without ipywidgets and Panel the package still draws: `robustrl_widgets.static`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FaultPanel", "Metrics", "Player", "RecoveryReport", "RoleBoard", "ThresholdPanel", "Timeline", "Trajectories", "TuningLab",
           "save_html"]


def __getattr__(name: str) -> Any:
    if name == "save_html":
        from .report import save_html

        return save_html
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import notebook, tuning_widget
    except ImportError as error:
        from robustrl.errors import MissingExtra

        raise MissingExtra(f"live views need ipywidgets, anywidget and bokeh ({error}): pip install 'robustrl[views]'") from error
    return getattr(tuning_widget if name == "TuningLab" else notebook, name)


def __dir__() -> list[str]:
    return list(__all__)
