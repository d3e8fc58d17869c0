"""Logs of others as runs: a CSV of per-rank utilisation, and Prometheus range exports (DCGM and vLLM names).

    run = from_csv("utilisation.csv", "failures.csv")       columns t, rank, utilisation; and rank, start, end (end may be empty)
    run = from_prometheus(["gpu.json", "tokens.json"], "failures.csv")      answers of /api/v1/query_range; failures: role, start, end

What becomes of them: a GPU or rank is a trainer that is always in its train phase, active while its utilisation is at least ``floor``; an
idle one is taken to be behind the others, which wait for it. A vLLM instance is a rollout, with ``vllm:generation_tokens_total`` as its
progress and ``vllm:num_requests_running`` as its work; its loop is taken to turn when tokens come, so a heartbeat to a silent one goes
unanswered. A value holds until the next one; a series without a value
for more than `GAP` times its usual step was not seen in that time. Failures are truth. Raises ConfigError that names file and row.
Leaves out: phases, micro-batches, optimizer steps, exits; rules that need them say nothing. Nobody watched live, so nothing was said live:
replay such a run with thresholds, not without.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..core.thresholds import KEEP_ALIVE
from ..errors import ConfigError
from .run import Run

GAP = 3.0
DCGM = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_SM_ACTIVE")
TOKENS, RUNNING = "vllm:generation_tokens_total", "vllm:num_requests_running"
_AGENT = "node_agent-0"
Series = list[tuple[float, float]]


def from_csv(utilisation: str | Path, failures: str | Path | None = None, *, floor: float = 0.05) -> Run:
    """``t``: seconds; ``rank``: from 0; ``utilisation``: a share of 1, or per cent if any value is above 1."""
    path = Path(utilisation)
    series: dict[str, Series] = {}
    for number, row in _rows(path, ("t", "rank", "utilisation")):
        t, rank, value = (_number(path, number, row, name) for name in ("t", "rank", "utilisation"))
        if rank < 0 or rank != int(rank) or not 0 <= value <= 100:
            raise ConfigError(f"{path}, row {number}", row, "rank must be a number from 0 on, utilisation lie between 0 and 100")
        _add(series.setdefault(f"trainer-{int(rank)}", []), t, value, f"{path}, row {number}")
    if not series:
        raise ConfigError(str(path), "", "must hold at least one row")
    return _marked(_run(path.stem, _shares(series), {}, {}, floor), failures, "rank")


def from_prometheus(exports: str | Path | Sequence[str | Path], failures: str | Path | None = None, *, floor: float = 0.05) -> Run:
    """``exports``: JSON files, each the answer to a range query. Series of other names are not looked at."""
    paths = [Path(exports)] if isinstance(exports, str | Path) else [Path(path) for path in exports]
    found: dict[str, dict[str, Series]] = {"util": {}, TOKENS: {}, RUNNING: {}}
    for path in paths:
        for metric, values in _matrix(path):
            name = str(metric.get("__name__", ""))
            group = "util" if name in DCGM else name
            if group in found:
                which = ", ".join(f"{key}={metric[key]}" for key in sorted(metric) if key not in ("__name__", "job"))
                target = found[group].setdefault(which, [])
                for place, (t, text) in enumerate(values, 1):
                    _add(target, float(t), _finite(text, f"{path}, {name}{{{which}}}, value {place}"), f"{path}, {name}, value {place}")
    if not found["util"] and not found[TOKENS]:
        raise ConfigError(", ".join(map(str, paths)), "", f"must hold a series named {', '.join((*DCGM, TOKENS))}")
    ranks = {f"trainer-{i}": found["util"][which] for i, which in enumerate(sorted(found["util"]))}
    instances = sorted(found[TOKENS])
    tokens = {f"rollout-{i}": found[TOKENS][which] for i, which in enumerate(instances)}
    running = {f"rollout-{i}": found[RUNNING].get(which, []) for i, which in enumerate(instances)}
    return _marked(_run(paths[0].stem, _shares(ranks), tokens, running, floor), failures, "role")


def _run(name: str, shares: dict[str, Series], tokens: dict[str, Series], running: dict[str, Series], floor: float) -> Run:
    every = {**shares, **tokens}
    begin = min(series[0][0] for series in every.values())
    facts: list[tuple[float, str, ev.Event]] = [
        (begin, ev.HOST, ev.RunStarted(schema=ev.SCHEMA, run=name, name=name, wall=begin, host_pid=0, config={}, machine={}))
    ]
    for role in ("supervisor", _AGENT, *every):
        facts.append((begin, ev.HOST, ev.RoleStarted(role=role, incarnation=1, node="node-0", pid=0, start_ticks=0)))
        facts.append((begin, role, ev.RoleReady(role=role, incarnation=1, seconds=0.0)))
    for role, series in shares.items():
        facts += [(sample[0], _AGENT, sample[1]) for sample in _trainer(role, series, floor)]
    for role, series in tokens.items():
        facts += [(sample[0], _AGENT, sample[1]) for sample in _rollout(role, series, running[role])]
    facts.sort(key=lambda fact: fact[0])
    return Run.of([ev.Entry(number, t, source, 1, number, t, event) for number, (t, source, event) in enumerate(facts, 1)], name)


def _trainer(role: str, series: Series, floor: float) -> Iterator[tuple[float, ev.RoleSample]]:
    active, done = series[0][0], 0
    for t, share in _filled(series):
        if share >= floor:
            active, done = t, done + 1
        behind = 1 if active == t else 2
        yield t, ev.RoleSample(role=role, incarnation=1, phase="train", progress=done, pending=behind, step=0, version=-1, loop_age=0.0,
                               cpu=0.0, phase_age=t - series[0][0], active_age=t - active, progress_age=t - active)  # fmt: skip


def _rollout(role: str, series: Series, running: Series) -> Iterator[tuple[float, ev.RoleSample]]:
    since, before, place = series[0][0], series[0][1], -1
    for t, count in _filled(series):
        while place + 1 < len(running) and running[place + 1][0] <= t:
            place += 1
        pending = int(running[place][1]) if place >= 0 else 0 if running else 1
        if count != before or not pending:
            since, before = t, count
        yield t, ev.RoleSample(role=role, incarnation=1, phase="decode" if pending else "waiting_request", progress=int(count),
                               pending=pending, step=0, version=-1, loop_age=t - since, cpu=0.0, phase_age=t - series[0][0],
                               progress_age=t - since, lag=t - since)  # fmt: skip


def _filled(series: Series) -> Iterator[tuple[float, float]]:
    """With the keep-alives of a node agent between the values, where it can be said to have looked."""
    usual = statistics.median(b[0] - a[0] for a, b in zip(series, series[1:], strict=False)) if len(series) > 1 else KEEP_ALIVE
    for (t, value), (following, _) in zip(series, [*series[1:], (series[-1][0], 0.0)], strict=True):
        yield t, value
        if following - t <= GAP * usual:
            steps = math.ceil((following - t) / KEEP_ALIVE - 1e-9)
            yield from ((t + i * KEEP_ALIVE, value) for i in range(1, steps))


def _shares(series: dict[str, Series]) -> dict[str, Series]:
    if all(value <= 1 for values in series.values() for _, value in values):
        return series
    return {role: [(t, value / 100) for t, value in values] for role, values in series.items()}


def _marked(run: Run, failures: str | Path | None, who: str) -> Run:
    if failures is None:
        return run
    path = Path(failures)
    for number, row in _rows(path, (who, "start", "end")):
        role = row["role"] if who == "role" else f"trainer-{row['rank']}"
        start = _number(path, number, row, "start") - run.begin
        end = _number(path, number, row, "end") - run.begin if row["end"] else None
        try:
            run = run.annotate(role, start, end, kind="failure")
        except ConfigError as error:
            raise ConfigError(f"{path}, row {number}: {error.field}", error.value, error.allowed) from None
    return run


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(row, counted with the header as 1; its values)."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path}, row 1", reader.fieldnames, f"the columns {', '.join(missing)} are missing")
            for number, row in enumerate(reader, 2):
                if None in row or None in row.values():
                    raise ConfigError(f"{path}, row {number}", row, f"must have {len(reader.fieldnames or ())} values")
                yield number, row
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), "", f"cannot be read: {error}") from error


def _matrix(path: Path) -> list[tuple[dict[str, Any], list[Any]]]:
    try:
        answer = msgspec.json.decode(path.read_bytes())
        if answer["status"] != "success" or answer["data"]["resultType"] != "matrix":
            raise ConfigError(str(path), answer.get("status"), "must be a successful answer to a range query (resultType matrix)")
        return [(series["metric"], series["values"]) for series in answer["data"]["result"]]
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise ConfigError(str(path), "", f"is no answer of /api/v1/query_range: {type(error).__name__}: {error}") from error


def _number(path: Path, number: int, row: dict[str, str], name: str) -> float:
    return _finite(row[name], f"{path}, row {number}: {name}")


def _finite(text: Any, where: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(where, text, "must be a finite number")
    return value


def _add(series: Series, t: float, value: float, where: str) -> None:
    if series and t <= series[-1][0]:
        raise ConfigError(where, t, f"must come after {series[-1][0]:g}: the times of one series rise")
    series.append((t, value))
