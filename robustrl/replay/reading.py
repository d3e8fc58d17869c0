"""A recorded log read with suspicion: what is wrong with it is named by row, and what can be read of it is kept.

Promises: `read_rows` never gives up a row that can be used; problems come in the order of the rows. Looked for: an empty file, a row that
cannot be read or was cut off, another schema version, numbers or times out of order, missing rows, roles that are none or never
started. Leaves out: the chain, and whether the run was right (core/audit.py).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core import events as ev
from ..core.roles import RoleId
from ..runtime.event_log import LogError


class Problem(NamedTuple):
    row: int
    """From 1; of a Parquet file too."""
    kind: str
    """empty, unreadable, truncated, schema, unsorted, gap or role."""
    text: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.text}"


class BadRun(LogError):
    """A log with problems. ``partial``: whether anything of it can be used."""

    def __init__(self, path: str, problems: list[Problem], partial: bool) -> None:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        advice = "; Run.load(path, partial=True) keeps what can be read" if partial else ""
        super().__init__(f"{path}: {problems[0]}{more}{advice}")
        self.path, self.problems, self.partial = path, problems, partial

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem], bool]]:
        return type(self), (self.path, self.problems, self.partial)


Row = tuple[int, ev.Entry]


def read_rows(path: Path) -> tuple[list[Row], list[Problem]]:
    """The (row number, entry) that can be read of an ``events.jsonl``, plain or gzipped, and what cannot. Raises LogError: no file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    problems: list[Problem] = []
    if data[:2] == b"\x1f\x8b":
        data = _unzipped(data, problems)
    lines = data.split(b"\n")
    tail = lines.pop()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        _take(number, line, rows, problems)
    if tail:
        text = f"is cut off: {len(tail)} bytes without an end"
        if not _take(len(lines) + 1, tail, rows, []):
            problems.append(Problem(len(lines) + 1, "truncated", text))
    return rows, sorted(problems)


def examine(rows: Iterable[Row]) -> tuple[list[ev.Entry], list[Problem]]:
    """The entries in the order of time, without those that no detector could take, and all that is wrong with them."""
    problems: list[Problem] = []
    kept: list[Row] = []
    known: dict[str, str] = {}
    number, latest = 0, float("-inf")
    for row, entry in rows:
        event = entry.event
        if entry.seq <= number:
            problems.append(Problem(row, "unsorted", f"its number {entry.seq} comes after {number}"))
        elif entry.seq > number + 1:
            missing = f"{entry.seq - number - 1} rows are missing before it"
            problems.append(Problem(row, "gap", f"its number is {entry.seq}, and {number + 1} was next: {missing}"))
        number = max(number, entry.seq)
        if entry.t < latest:
            problems.append(Problem(row, "unsorted", f"its time {entry.t:.6f} lies before {latest:.6f}"))
        latest = max(latest, entry.t)
        if isinstance(event, ev.RunStarted) and event.schema != ev.SCHEMA:
            problems.append(Problem(row, "schema", f"the run was written with schema {event.schema}, this is {ev.SCHEMA}"))
        if isinstance(event, ev.RoleStarted):
            known[event.role] = known.get(event.role) or _why_no_role(event.role)
        role = getattr(event, "role", None)
        if role is not None and not isinstance(event, ev.FaultInjected):
            why = known[role] if role in known else _why_no_role(role) or f"role {role!r} was never started"
            if why:
                problems.append(Problem(row, "role", why))
                continue
        kept.append((row, entry))
    kept.sort(key=lambda item: item[1].t)  # stable: rows of one instant keep their order
    return [entry for _, entry in kept], problems


def _take(number: int, line: bytes, rows: list[Row], problems: list[Problem]) -> bool:
    try:
        rows.append((number, ev.entry_decoder.decode(line)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problems.append(Problem(number, "unreadable", f"cannot be read: {error}{_of_schema(line)}"))
        return False
    return True


def _of_schema(line: bytes) -> str:
    """A row of another schema version may not decode; it says so itself."""
    try:
        event: Any = msgspec.json.decode(line).get("event", {})
        schema = event.get("schema", ev.SCHEMA)
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, RecursionError):
        return ""
    return f" (schema {schema}, this is {ev.SCHEMA})" if schema != ev.SCHEMA else ""


def _why_no_role(name: str) -> str:
    try:
        RoleId.parse(name)
    except ValueError as error:
        return str(error)
    return ""


def _unzipped(data: bytes, problems: list[Problem]) -> bytes:
    """As much as can be unpacked."""
    import zlib

    unpacker = zlib.decompressobj(wbits=31)
    try:
        found = unpacker.decompress(data) + unpacker.flush()
    except zlib.error as error:
        whole = _prefix(data)
        problems.append(Problem(whole.count(b"\n") + 1, "truncated", f"the gzip file is damaged from here on: {error}"))
        return whole
    if not unpacker.eof:
        problems.append(Problem(found.count(b"\n") + 1, "truncated", "the gzip file is cut off here"))
    return found


def _prefix(data: bytes) -> bytes:
    import zlib

    unpacker, found = zlib.decompressobj(wbits=31), b""
    for start in range(0, len(data), 512):
        try:
            found += unpacker.decompress(data[start:start + 512])
        except zlib.error:
            break
    return found


def write_gzip(path: Path, entries: Iterable[ev.Entry]) -> None:
    """As ``events.jsonl`` has them; equal entries give equal bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.writelines(ev.encoder.encode(entry) + b"\n" for entry in entries)
