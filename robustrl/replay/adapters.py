"""Logs of others as runs: a CSV of per-rank utilisation, and Prometheus range exports (DCGM and vLLM names).

    run = from_csv("utilisation.csv", "failures.csv")       columns t, rank, utilisation; and rank, start, end (end may be empty)
    run = from_prometheus(["gpu.json", "tokens.json"], "failures.csv")      answers of /api/v1/query_range; failures: role, start, end

What becomes of them: a GPU or rank is a trainer that is always in its train phase, active while its utilisation is at least ``floor``; an
idle one is taken to be behind the others, which wait for it. A vLLM instance is a rollout, with ``vllm:generation_tokens_total`` as its
progress and ``vllm:num_requests_running`` as its work; its loop is taken to turn when tokens come, so a heartbeat to a silent one goes
unanswered. A value holds until the next one; a series without a value for more than `GAP` times its usual step was not seen in that time.
A Prometheus value NaN is none: so it marks a series that was not there (*stale*); a series of nothing else is left out, and the run's
``problems`` say so. The scale of a DCGM series follows from its name; of several of one GPU the first in `DCGM` counts, which tells most.
Failures are truth. Raises ConfigError that names file, row or value, and what is allowed.
Leaves out: phases, micro-batches, optimizer steps, exits; rules that need them say nothing. Nobody watched live, so nothing was said live:
replay such a run with thresholds, not without.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import math
import reprlib
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..core.thresholds import KEEP_ALIVE
from ..errors import ConfigError
from .given import path_of
from .reading import LATEST, Problem
from .run import Run

GAP = 3.0
DCGM = {"DCGM_FI_PROF_SM_ACTIVE": 1.0, "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 1.0, "DCGM_FI_DEV_GPU_UTIL": 100.0}
"""Names and what stands for full utilisation, the one that tells most first: for the others a single busy unit is a busy GPU."""
TOKENS, RUNNING = "vllm:generation_tokens_total", "vllm:num_requests_running"
_FILE = "must be the path of a file"
_AGENT = "node_agent-0"
_LONG = 100
_RANKS = 1_000_000
_COUNT = 2.0**53
_TIME = ".15g"
"""Unix times with all their digits."""
_SLOWEST = 3600.0
"""Seconds between the values of a series, usually, at most."""
_SAMPLES = 10_000_000
"""Of all series together, with those in between, at most: a week of sixteen of them."""
Series = list[tuple[float, float]]


def from_csv(utilisation: str | Path, failures: str | Path | None = None, *, floor: float = 0.05) -> Run:
    """``t``: seconds from 0 on; ``rank``: from 0; ``utilisation``: a share of 1, or per cent if any is above 1; empty or NaN: a gap."""
    path = path_of(utilisation, "utilisation", _FILE)
    _check(failures, floor)
    series: dict[str, Series] = {}
    for number, row in _rows(path, ("t", "rank", "utilisation")):
        where = f"{path}, row {number}"
        rank = _within(row["rank"], f"{where}: rank", 0, _RANKS - 1)
        if rank != int(rank):
            raise ConfigError(f"{where}: rank", row["rank"], "must be a whole number")
        if row["utilisation"].strip().lower() in ("", "nan"):
            continue
        value = _within(row["utilisation"], f"{where}: utilisation", 0, 100)
        _add(series.setdefault(f"trainer-{int(rank)}", []), row["t"], value, f"{where}: t")
    if not series:
        raise ConfigError(str(path), "", "must hold at least one row with a value")
    return _marked(_run(path.stem, _shares(series), {}, {}, floor), failures, "rank")


def from_prometheus(exports: str | Path | Sequence[str | Path], failures: str | Path | None = None, *, floor: float = 0.05) -> Run:
    """``exports``: JSON files, each the answer to a range query. Series of other names are not looked at."""
    if not isinstance(exports, str | Path | Sequence) or isinstance(exports, bytes) or not exports:
        raise ConfigError("exports", exports, "must be the path of a file, or a list of at least one")
    paths = [path_of(path, "exports", _FILE) for path in ([exports] if isinstance(exports, str | Path) else exports)]
    _check(failures, floor)
    found: dict[str, dict[str, Series]] = {name: {} for name in (*DCGM, TOKENS, RUNNING)}
    empty: list[Problem] = []
    for path in paths:
        for number, (metric, values, where) in enumerate(_matrix(path), 1):
            name = str(metric.get("__name__", ""))
            if name in found:
                which = ", ".join(f"{key}={metric[key]}" for key in sorted(metric) if key not in ("__name__", "job"))
                where, most = f"{where}, {name}{{{which}}}", DCGM.get(name, _COUNT)
                pairs = list(_pairs(values, where, most))
                if not pairs:
                    empty.append(Problem(number, "empty", f"{where}: holds no number; this series is left out"))
                for t, value, place in pairs:
                    _add(found[name].setdefault(which, []), t, value / most if name in DCGM else value, f"{place}: time")
    shares: dict[str, Series] = {}
    for name in reversed(DCGM):
        shares |= found[name]
    if not shares and not found[TOKENS]:
        if empty:
            raise ConfigError(", ".join(map(str, paths)), "NaN", f"must have a value that is a number: {empty[0].text}")
        raise ConfigError(", ".join(map(str, paths)), "", f"must hold a series named {', '.join((*DCGM, TOKENS))}")
    ranks = {f"trainer-{i}": shares[which] for i, which in enumerate(sorted(shares))}
    instances = sorted(found[TOKENS])
    tokens = {f"rollout-{i}": found[TOKENS][which] for i, which in enumerate(instances)}
    running = {f"rollout-{i}": found[RUNNING].get(which, []) for i, which in enumerate(instances)}
    run = _run(paths[0].stem, ranks, tokens, running, floor)
    return _marked(dataclasses.replace(run, problems=tuple(empty)), failures, "role")


def _run(name: str, shares: dict[str, Series], tokens: dict[str, Series], running: dict[str, Series], floor: float) -> Run:
    every = {**shares, **tokens}
    _check_size(every)
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
    usual = _usual(series)
    for (t, value), (following, _) in zip(series, [*series[1:], (series[-1][0], 0.0)], strict=True):
        yield t, value
        if following - t <= GAP * usual:
            steps = math.ceil((following - t) / KEEP_ALIVE - 1e-9)
            yield from ((t + i * KEEP_ALIVE, value) for i in range(1, steps))


def _usual(series: Series) -> float:
    """Seconds from value to value."""
    return statistics.median(b[0] - a[0] for a, b in zip(series, series[1:], strict=False)) if len(series) > 1 else KEEP_ALIVE


def _check_size(every: dict[str, Series]) -> None:
    """What is between the values is made up, value by value: that is bounded by what somebody can have meant."""
    count = 0.0
    for role, series in every.items():
        if (usual := _usual(series)) > _SLOWEST:
            raise ConfigError(f"{role}: seconds between its values", usual, f"must usually be at most {_SLOWEST:g}")
        count += sum(min(b[0] - a[0], GAP * usual) for a, b in zip(series, series[1:], strict=False)) / KEEP_ALIVE
    if count > _SAMPLES:
        raise ConfigError("seconds that the series cover", round(count), f"must be at most {_SAMPLES:,} in all: give less at a time")


def _shares(series: dict[str, Series]) -> dict[str, Series]:
    if all(value <= 1 for values in series.values() for _, value in values):
        return series
    return {role: [(t, value / 100) for t, value in values] for role, values in series.items()}


def _marked(run: Run, failures: str | Path | None, who: str) -> Run:
    if failures is None:
        return run
    path = path_of(failures, "failures", _FILE)
    for number, row in _rows(path, (who, "start", "end")):
        where = f"{path}, row {number}"
        role = row["role"] if who == "role" else f"trainer-{row['rank']}"
        start = _within(row["start"], f"{where}: start", 0, LATEST)
        end = _within(row["end"], f"{where}: end", 0, LATEST) if row["end"] else None
        begin, last = run.begin, run.entries[-1].t
        if not begin <= start <= last:
            raise ConfigError(f"{where}: start", row["start"], f"must lie in the run, from {begin:{_TIME}} to {last:{_TIME}}")
        if end is not None and not start < end <= last:
            allowed = f"must lie after its start, {start:{_TIME}}, and in the run, up to {last:{_TIME}}"
            raise ConfigError(f"{where}: end", row["end"], allowed)
        try:
            run = run.annotate(role, start - begin, None if end is None else end - begin, kind="failure")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.field}", error.value, error.allowed) from None
    return run


def _check(failures: Any, floor: Any) -> None:
    if failures is not None:
        path_of(failures, "failures", _FILE)
    if isinstance(floor, bool) or not isinstance(floor, int | float) or not 0 < floor <= 1:
        raise ConfigError("floor", floor, "must be a share above 0 and at most 1")


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """(row: the line of the file, from 1; its values)."""
    number = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path}, row 1", reader.fieldnames, f"the columns {', '.join(missing)} are missing")
            number = 1
            for row in reader:
                number = reader.line_num
                if None in row or None in row.values():
                    raise ConfigError(f"{path}, row {number}", row, f"must have {len(reader.fieldnames or ())} values")
                yield number, row
    except csv.Error as error:
        raise ConfigError(f"{path}, row {number + 1}", "", f"is no row of a CSV: {error}") from error
    except UnicodeDecodeError as error:
        raise _no_text(path) or ConfigError(str(path), "", f"cannot be read: {error}") from None
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error}") from error


def _no_text(path: Path) -> ConfigError | None:
    """The first line that is no UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return ConfigError(f"{path}, row {number}", _short(line), f"must be UTF-8; {error.reason} at its byte {error.start + 1}")
    return None


def _matrix(path: Path) -> Iterator[tuple[dict[str, Any], list[Any], str]]:
    """(labels, values, place in the file) of each series."""
    try:
        answer = msgspec.json.decode(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(str(path), "", f"is no answer of /api/v1/query_range: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict) or answer.get("status") != "success" \
            or answer["data"].get("resultType") != "matrix":  # fmt: skip
        status = _short(answer.get("status") if isinstance(answer, dict) else answer)
        raise ConfigError(str(path), status, "must be a successful answer to a range query (resultType matrix)")
    found = answer["data"].get("result")
    if not isinstance(found, list):
        raise ConfigError(f"{path}, result", _short(found), "must be a list of series")
    for place, series in enumerate(found, 1):
        where = f"{path}, series {place}"
        if not isinstance(series, dict):
            raise ConfigError(where, _short(series), "must be an object with metric and values")
        metric, values = series.get("metric"), series.get("values")
        if not isinstance(metric, dict):
            raise ConfigError(f"{where}: metric", _short(metric), "must be an object of labels")
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: values", _short(values), "must be a list of at least one [time, value]")
        yield metric, values, where


def _pairs(values: list[Any], where: str, most: float) -> Iterator[tuple[Any, float, str]]:
    """(time, value, place in the file) of those that are numbers."""
    for place, pair in enumerate(values, 1):
        at = f"{where}, value {place}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ConfigError(at, _short(pair), "must be a pair [time, value]")
        if str(pair[1]).lower() == "nan":
            continue
        yield pair[0], _within(pair[1], at, 0, most), at


def _short(value: Any) -> Any:
    return value if len(repr(value)) < _LONG else reprlib.repr(value)


def _within(value: Any, where: str, low: float, high: float) -> float:
    """Of a number, or the text of one."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high:
        raise ConfigError(where, _short(value), f"must be a number from {low:g} to {high:g}")
    return number


def _add(series: Series, t: Any, value: float, where: str) -> None:
    seconds = _within(t, where, 0, LATEST)
    if series and seconds <= series[-1][0]:
        raise ConfigError(where, t, f"must come after {series[-1][0]:{_TIME}}: the times of one series rise")
    series.append((seconds, value))
