"""The closing figures of a run, computed from its log alone."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from .core import events as ev
from .core.accounting import account
from .core.run_state import RunState


def summarize(run_dir: str | Path) -> dict[str, Any]:
    """Of a run directory's ``events.jsonl``, whether the run has ended or not. Raises LogError for a log that cannot be read."""
    from .runtime.event_log import read_log

    return summary_of(read_log(Path(run_dir) / "events.jsonl", live=True))


def summary_of(entries: list[ev.Entry]) -> dict[str, Any]:
    """Plain values, ready for JSON. Seconds count from the first entry; ``step_seconds`` are medians per trainer phase, in seconds;
    ``accuracy`` is that of the held-out prompts, of the first and the last evaluation; None: there was none.
    """
    state = RunState.of(entries)
    first, last = (state.evaluations[0], state.evaluations[-1]) if state.evaluations else (None, None)
    phases = sorted({name for row in state.metrics for name in row if name.startswith("seconds_")})
    medians = {name.removeprefix("seconds_"): round(statistics.median(row[name] for row in state.metrics if name in row), 4)
               for name in phases}
    times = [state.step_times[step] for step in sorted(state.step_times)]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    roles = {role: {"pid": view.pid, "node": view.node, "state": str(view.state), "incarnation": view.incarnation}
             for role, view in state.roles.items()}
    costs = account(entries)
    balance = msgspec.to_builtins(state.ledger.balance())
    return {
        "run": state.run, "name": state.name, "status": state.status, "reason": state.reason,
        "nodes": len(state.nodes), "roles": roles, "distinct_pids": len({view.pid for view in state.roles.values()}),
        "steps": state.step,
        "accuracy": {"before": first and first.accuracy, "after": last and last.accuracy, "prompts": min(first.prompts, last.prompts)
                     if first and last else 0, "before_version": first and first.version, "after_version": last and last.version},
        "versions_pulled": dict(sorted(state.pulled.items())),
        "ucx": {"bytes": sum(state.ucx_bytes.values()), "by_transport": dict(state.ucx_bytes)},
        "tokens_per_second": round(state.mean_tokens_per_second(), 1), "tokens": sum(state.tokens.values()),
        "step_seconds": medians, "seconds_per_step": round(statistics.median(gaps), 4) if gaps else None,
        "seconds_to_first_step": state.seconds_to_first_step,
        "wall_seconds": round(state.t - state.t0, 3),
        "trajectories": balance, "warnings": len(state.warnings),
        "ettr": {"strict": costs.ettr_strict, "paper": costs.ettr_paper, "faults": costs.faults, "recoveries": costs.recoveries,
                 "recovered": costs.recovered, "lost_seconds": round(costs.lost, 3), "redone_seconds": round(costs.redone, 3)},
    }
