"""Runs as Parquet, for other tools and for keeping: one row per entry, nothing lost.

Columns: ``seq`` int64, ``t`` float64 (host's monotonic seconds), ``source`` string, ``incarnation`` int32, ``n`` int64, ``at`` float64
(emitter's monotonic seconds), ``type`` string, ``role`` string (null: the event is about none), ``event`` string (the event as JSON, as in
``events.jsonl``), ``chain`` string. ``type`` and ``role`` are for other tools and are not read. File metadata ``robustrl``: JSON of
{format, name, window, annotations}. What is damaged costs its row group, or the end of it, and no more. Needs pyarrow.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..core import events as ev
from ..errors import MissingExtra
from ..runtime.event_log import LogError
from .reading import LATEST, BadRun, Problem, Row
from .run import EXPECTED, Mark

FORMAT = 1
COLUMNS = ("seq", "t", "source", "incarnation", "n", "at", "type", "role", "event", "chain")
_DERIVED = ("type", "role")
"""For other tools; not read."""
_GROUP, _BATCH = 512, 64
"""Rows of a row group, which is what damage costs at most, and that are read at a time."""
_READ = tuple(name for name in COLUMNS if name not in _DERIVED)
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
    pq.write_table(pa.table(columns, schema=schema), path, compression="zstd", row_group_size=_GROUP, write_page_checksum=True)


def read_parquet(path: Path) -> tuple[list[Row], list[Problem], dict[str, Any]]:
    """Rows that can be read, problems of what cannot, and of the file's facts those that a Run has. Raises LogError, MissingExtra."""
    pa, pq = _pyarrow()
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path}: is no Parquet file that can be read: {error}") from error
    with file:
        return _read(path, pa, file)


def _read(path: Path, pa: Any, file: Any) -> tuple[list[Row], list[Problem], dict[str, Any]]:
    problems: list[Problem] = []
    schema = file.schema_arrow
    facts = _facts(path, (schema.metadata or {}).get(_KEY), problems)
    if absent := sorted(set(COLUMNS) - set(schema.names)):
        problem = Problem(1, "schema", f"the columns {', '.join(absent)} are missing")
        if not set(absent) <= set(_DERIVED):
            raise BadRun(str(path), [problem], False)
        problems.append(problem)
    if wrong := _wrong_columns(pa, schema):
        raise BadRun(str(path), [Problem(1, "schema", text) for text in wrong], False)
    rows: list[Row] = []
    for number, values in _numbered(pa, file, problems):
        seq, t, source, incarnation, n, at, event, chain = values
        missing = [name for name, value in zip(_READ, values, strict=True) if value is None]
        if missing or not (math.isfinite(t) and math.isfinite(at)):
            what = f"{', '.join(missing)} is null" if missing else f"its times are t = {t} and at = {at}: must be finite"
            problems.append(Problem(number, "unreadable", f"cannot be read: {what}"))
            continue
        try:
            rows.append((number, ev.Entry(seq, float(t), source, incarnation, n, float(at), _event_decoder.decode(event), chain)))
        except (msgspec.DecodeError, RecursionError) as error:
            problems.append(Problem(number, "unreadable", f"cannot be read: event: {error}"))
    return rows, problems, facts


def _numbered(pa: Any, file: Any, problems: list[Problem]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(row number, values) of all that can be read. Of a row group what comes before damage is kept; pyarrow finds no way behind it."""
    end, groups = 0, file.num_row_groups
    for group in range(groups):
        number, end = end, end + file.metadata.row_group(group).num_rows
        try:
            for batch in file.iter_batches(_BATCH, row_groups=[group], columns=list(_READ)):
                for values in zip(*(_values(batch.column(name)) for name in _READ), strict=True):
                    number += 1
                    yield number, values
        except (OSError, pa.ArrowException) as error:
            lost = "cannot be read" if number + 1 == end else f"it and all rows up to {end} cannot be read"
            problems.append(Problem(number + 1, "unreadable", f"{lost}: row group {group + 1} of {groups} is damaged: {error}"))


def _wrong_columns(pa: Any, schema: Any) -> list[str]:
    """Integers and texts of any width will do, as other tools write them; a time may be an integer."""
    whole, number, text = pa.types.is_integer, lambda kind: pa.types.is_floating(kind) or pa.types.is_integer(kind), _is_text
    allowed = {"seq": (whole, "int64"), "incarnation": (whole, "int32"), "n": (whole, "int64"), "t": (number, "float64"),
               "at": (number, "float64"), "source": (text, "string"), "event": (text, "string"), "chain": (text, "string")}
    return [f"the column {name} holds {schema.field(name).type}, must be {what}" for name, (right, what) in allowed.items()
            if not right(schema.field(name).type)]  # fmt: skip


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view") or str(kind).startswith("dictionary<values=string,")


def _values(column: Any) -> list[Any]:
    """Text that is no UTF-8 is read as null."""
    try:
        found: list[Any] = column.to_pylist()
        return found
    except UnicodeDecodeError:
        return [_value(value) for value in column]


def _value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None


def _facts(path: Path, data: bytes | None, problems: list[Problem]) -> dict[str, Any]:
    """What can be used of the metadata; the rows can be read without. Raises BadRun for a format of another time."""

    def wrong(text: str) -> None:
        problems.append(Problem(0, "metadata", text))

    try:
        facts = msgspec.json.decode(data) if data is not None else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        wrong(f"'{_KEY.decode()}' is no JSON: {error}")
        return {}
    if not isinstance(facts, dict):
        found = "missing" if facts is None else reprlib.repr(facts)
        wrong(f"'{_KEY.decode()}' is {found}: must be the JSON of {{format, name, window, annotations}}")
        return {}
    if facts.get("format") != FORMAT:
        raise BadRun(str(path), [Problem(0, "schema", f"the file's format is {facts.get('format')}, this is {FORMAT}")], False)
    told: dict[str, Any] = {}
    if (name := facts.get("name")) is not None:
        if isinstance(name, str):
            told["name"] = name
        else:
            wrong(f"name = {reprlib.repr(name)}: must be a text")
    if "window" in facts:
        if _is_window(window := facts["window"]):
            told["window"] = float(window[0]), float(window[1])
        else:
            wrong(f"window = {reprlib.repr(window)}: must be two numbers, [begin, end], in host seconds")
    marks = facts.get("annotations", [])
    if not isinstance(marks, list):
        wrong(f"annotations = {reprlib.repr(marks)}: must be a list of marks")
        marks = []
    told["annotations"] = tuple(filter(None, (_mark(place, mark, wrong) for place, mark in enumerate(marks, 1))))
    return told


def _is_window(value: Any) -> bool:
    return (isinstance(value, list) and len(value) == 2 and all(isinstance(t, int | float) and not isinstance(t, bool) for t in value)
            and 0 <= value[0] <= value[1] <= LATEST)  # fmt: skip


def _mark(place: int, value: Any, wrong: Callable[[str], None]) -> Mark | None:
    if isinstance(value, dict) and value.get("lasts", 0.0) is None:
        value = {name: given for name, given in value.items() if name != "lasts"}  # JSON has no infinity
    try:
        mark = msgspec.convert(value, Mark)
    except msgspec.ValidationError as error:
        wrong(f"annotation {place} = {reprlib.repr(value)}: must be a mark with {', '.join(Mark.__struct_fields__)}: {error}")
        return None
    if mark.expect not in EXPECTED or not 0 <= mark.start <= mark.end <= LATEST or not mark.lasts > 0:
        allowed = f"expect must be one of {', '.join(EXPECTED)}, start and end host seconds with start <= end, lasts above 0"
        wrong(f"annotation {place} = {reprlib.repr(value)}: {allowed}")
        return None
    return mark


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtra(f"Parquet needs pyarrow ({error}): pip install 'robustrl[job]', or pip install pyarrow") from error
    return pyarrow, pyarrow.parquet
