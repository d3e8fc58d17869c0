"""Runs as Parquet, for other tools and for keeping: one row per entry, nothing lost.

Columns: ``seq`` int64, ``t`` float64 (host's monotonic seconds), ``source`` string, ``incarnation`` int32, ``n`` int64, ``at`` float64
(emitter's monotonic seconds), ``type`` string, ``role`` string (null: the event is about none), ``event`` string (the event as JSON, as in
``events.jsonl``), ``chain`` string. File metadata ``robustrl``: JSON of {format, name, window, annotations}. Needs pyarrow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..errors import MissingExtra
from ..runtime.event_log import LogError
from .reading import BadRun, Problem, Row

FORMAT = 1
COLUMNS = ("seq", "t", "source", "incarnation", "n", "at", "type", "role", "event", "chain")
_KEY = b"robustrl"
_event_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(ev.Event)


def write_parquet(path: Path, entries: Sequence[ev.Entry], facts: dict[str, Any]) -> None:
    pa, pq = _pyarrow()
    kinds = (pa.int64(), pa.float64(), pa.string(), pa.int32(), pa.int64(), pa.float64(), *4 * (pa.string(),))
    schema = pa.schema(list(zip(COLUMNS, kinds, strict=True)), metadata={_KEY: msgspec.json.encode({"format": FORMAT, **facts})})
    columns: list[list[Any]] = [[] for _ in COLUMNS]
    for entry in entries:
        event = entry.event
        values = (entry.seq, entry.t, entry.source, entry.incarnation, entry.n, entry.at, event.__struct_config__.tag,
                  getattr(event, "role", None), ev.encoder.encode(event).decode(), entry.chain)  # fmt: skip
        for column, value in zip(columns, values, strict=True):
            column.append(value)
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd")


def read_parquet(path: Path) -> tuple[list[Row], list[Problem], dict[str, Any]]:
    """Rows that can be read, problems of those that cannot, and the facts of the file. Raises LogError, MissingExtra."""
    pa, pq = _pyarrow()
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path}: is no Parquet file that can be read: {error}") from error
    facts = msgspec.json.decode((table.schema.metadata or {}).get(_KEY, b"{}"))
    if facts.get("format") != FORMAT:
        raise BadRun(str(path), [Problem(1, "schema", f"the file's format is {facts.get('format')}, this is {FORMAT}")], False)
    if absent := sorted(set(COLUMNS) - set(table.column_names)):
        raise BadRun(str(path), [Problem(1, "schema", f"the columns {', '.join(absent)} are missing")], False)
    rows: list[Row] = []
    problems: list[Problem] = []
    read = [name for name in COLUMNS if name not in ("type", "role")]
    for number, values in enumerate(zip(*(table.column(name).to_pylist() for name in read), strict=True), 1):
        seq, t, source, incarnation, n, at, event, chain = values
        missing = [name for name, value in zip(read, values, strict=True) if value is None]
        if missing or not (math.isfinite(t) and math.isfinite(at)):
            what = f"{', '.join(missing)} is null" if missing else "its times must be finite"
            problems.append(Problem(number, "unreadable", f"cannot be read: {what}"))
            continue
        try:
            rows.append((number, ev.Entry(seq, t, source, incarnation, n, at, _event_decoder.decode(event), chain)))
        except msgspec.DecodeError as error:
            problems.append(Problem(number, "unreadable", f"cannot be read: {error}"))
    return rows, problems, facts


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra(f"Parquet needs pyarrow ({error}): pip install 'robustrl[job]', or pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
