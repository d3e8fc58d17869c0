"""A recorded log read with suspicion: what is wrong with it is named by row, and what can be read of it is kept.

Promises: no row that can be used is given up; problems come in the order of the rows. Looked for: an empty file, a row that cannot be read
or was cut off, another schema version, numbers or times out of order, times that no clock shows, missing and doubled rows, phases and roles
that are none, settings that are none, roles never started. Blank lines at the end are nothing. Leaves out: the chain, and whether the run
was right (core/audit.py).
"""

from __future__ import annotations

import bisect
import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core import events as ev
from ..core.roles import Phase, RoleId
from ..core.thresholds import Thresholds
from ..errors import ConfigError, counted
from ..runtime.event_log import LogError

LATEST = 1e11
"""Host seconds; three thousand years: a time beyond it was no clock's, or is in milliseconds."""
_PHASES = frozenset(map(str, Phase))
_GZIP, _MEMBER = b"\x1f\x8b", re.compile(rb"\x1f\x8b\x08[\x00-\x1f].{4}[\x00\x02\x04][\x00-\x0d\xff]", re.DOTALL)
"""How a gzip file begins, and the header of each of its members."""
_PIECE = 4096
"""Compressed bytes, of a damaged file, that are unpacked at a time."""


class Problem(NamedTuple):
    row: int
    """From 1; of a Parquet file too. 0: the file's metadata."""
    kind: str
    """empty, unreadable, truncated, schema, metadata, unsorted, doubled, time, gap, settings or role."""
    text: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.text}" if self.row else f"its metadata: {self.text}"


class BadRun(LogError):
    """A log with problems. ``partial``: whether anything of it can be used."""

    def __init__(self, path: str, problems: list[Problem], partial: bool) -> None:
        more = f" (and {counted(len(problems) - 1, 'more problem')})" if len(problems) > 1 else ""
        advice = "; Run.load(path, partial=True) keeps what can be read" if partial else ""
        first = "".join(c if c.isprintable() else " " for c in str(problems[0]))  # a log may quote what would move a terminal's cursor
        super().__init__(f"{path}: {first}{more}{advice}")
        self.path, self.problems, self.partial = path, problems, partial

    def __reduce__(self) -> tuple[type, tuple[str, list[Problem], bool]]:
        return type(self), (self.path, self.problems, self.partial)


Row = tuple[int, ev.Entry]


def read_rows(path: Path, live: bool = False) -> tuple[list[Row], list[Problem]]:
    """The (row number, entry) that can be read of an ``events.jsonl``, plain or gzipped, and what cannot. Raises LogError: no file.

    ``live``: somebody may still write it, and a last row without its end is no problem, unless it is gzipped.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from error
    problems: list[Problem] = []
    if data.startswith(_GZIP):
        data, live = _unzipped(data, problems), False
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    tail = lines.pop()
    while not tail.strip() and lines and not lines[-1].strip():
        tail = lines.pop()
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        _take(number, line, rows, problems)
    if tail.strip() and not _take(len(lines) + 1, tail, rows, []) and not live:
        problems.append(Problem(len(lines) + 1, "truncated", f"is cut off: {counted(len(tail), 'byte')} without an end"))
    return rows, sorted(problems)


def read_file(path: Path, live: bool = False) -> tuple[list[Row], list[Problem], dict[str, Any]]:
    """Of a run directory, a log or a Parquet file: rows, problems, and what it says of the whole run. Raises LogError, MissingExtra."""
    if path.suffix == ".parquet" and not path.is_dir():
        from .parquet import read_parquet

        return read_parquet(path)
    return *read_rows(path / "events.jsonl" if path.is_dir() else path, live), {}


def examine(rows: Iterable[Row]) -> tuple[list[ev.Entry], list[Problem]]:
    """The entries in the order of time, without those that no detector could take, and all that is wrong with them.

    Left out are doubled rows, times that cannot be, phases and roles that there are none of. A role whose start is not in the log is known
    by what is told of it: its rows are kept, though no detector judges a role that never started.
    """
    problems: list[Problem] = []
    kept: list[Row] = []
    known: dict[str, str] = {}
    orphans: dict[str, list[int]] = {}
    """Of roles that never started, the rows."""
    number, latest = 0, float("-inf")
    rows, ordered = list(rows), True
    first: dict[int, Row] = {}
    for row, entry in rows:
        event = entry.event
        if not (0 <= entry.t <= LATEST and abs(entry.at) <= LATEST):
            problems.append(Problem(row, "time", f"its times are t = {entry.t:g} and at = {entry.at:g}: must be seconds, t from 0 on, "
                                                 f"up to {LATEST:g}; such a row is left out"))  # fmt: skip
            number = max(number, entry.seq)
            continue
        if entry.seq <= number:
            first = first or {earlier.seq: (place, earlier) for place, earlier in reversed(rows)}
            place, same = first.get(entry.seq, (row, entry))
            if place != row and same == entry:
                problems.append(Problem(row, "doubled", f"is row {place} once more; such a row is left out"))
                continue
            problems.append(Problem(row, "unsorted", f"its number {entry.seq} comes after {number}"))
        elif entry.seq > number + 1:
            missing = entry.seq - number - 1
            text = f"its number is {entry.seq}, and {number + 1} was next: {counted(missing, 'row')} {_are(missing)} missing before it"
            problems.append(Problem(row, "gap", text))
        number = max(number, entry.seq)
        if entry.t < latest:
            ordered = False
            problems.append(Problem(row, "unsorted", f"its time {entry.t:.6f} lies before {latest:.6f}"))
        latest = max(latest, entry.t)
        if isinstance(event, ev.RunStarted) and event.schema != ev.SCHEMA:
            problems.append(Problem(row, "schema", f"the run was written with schema {event.schema}, this is {ev.SCHEMA}"))
        if isinstance(event, ev.ThresholdsChanged) and (why := _why_no_settings(event.thresholds)):
            problems.append(Problem(row, "settings", f"its {why}; such a row is left out"))
            continue
        if isinstance(event, ev.RoleStarted):
            known[event.role] = known.get(event.role) or _why_no_role(event.role)
        elif isinstance(event, ev.RoleSample) and event.phase not in _PHASES:
            text = f"phase {event.phase!r}: must be one of {', '.join(sorted(_PHASES))}; such a row is left out"
            problems.append(Problem(row, "unreadable", text))
            continue
        role = getattr(event, "role", None)
        if role is not None and not isinstance(event, ev.FaultInjected):
            if why := known[role] if role in known else _why_no_role(role):
                problems.append(Problem(row, "role", f"{why}; such a row is left out"))
                continue
            if role not in known:
                orphans.setdefault(role, []).append(row)
        kept.append((row, entry))
    for role, told in orphans.items():
        text = f"role {role!r} was never started, and {counted(len(told), 'row')} {_are(len(told))} about it"
        problems.append(Problem(told[0], "role", text))
    if not ordered:
        kept = list(_within(kept, problems))
    kept.sort(key=lambda item: item[1].t)  # stable: rows of one instant keep their order
    return [entry for _, entry in kept], sorted(problems)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _within(rows: list[Row], problems: list[Problem]) -> Iterator[Row]:
    """Without those whose time lies outside of the run that the most rows tell of: the longest series in which, by number, times rise."""
    numbered = sorted(rows, key=lambda item: item[1].seq)
    ends: list[float] = []
    firsts: list[float] = []
    """Of the series of each length that ends earliest: its last and its first time."""
    for _, entry in numbered:
        place = bisect.bisect_right(ends, entry.t)
        first = firsts[place - 1] if place else entry.t
        ends[place:place + 1], firsts[place:place + 1] = [entry.t], [first]
    low, high = firsts[-1], ends[-1]
    for row, entry in rows:
        if low <= entry.t <= high:
            yield row, entry
        else:
            text = f"its time {entry.t:.6f} lies outside of the run, which goes from {low:.6f} to {high:.6f}; such a row is left out"
            problems.append(Problem(row, "time", text))


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


def _why_no_settings(values: Any) -> str:
    try:
        Thresholds.from_dict(values)
    except ConfigError as error:
        return str(error)
    return ""


def _unzipped(data: bytes, problems: list[Problem]) -> bytes:
    """As much as can be unpacked, of all members; behind a damaged one the next is looked for."""
    found: list[bytes] = []
    row, lost = 1, False
    while data:
        unpacker, why = zlib.decompressobj(wbits=31), ""
        try:
            piece = unpacker.decompress(data)
            rest = unpacker.unused_data.lstrip(b"\0")
            why = "" if unpacker.eof else "cut off here"
        except zlib.error as error:
            piece, rest, why = b"", b"", f"damaged, here or before: {error}"
        if why and ((following := _MEMBER.search(data, 1)) or not piece):
            end = following.start() if following else len(data)  # what comes from there on is not this one's
            piece, rest = _prefix(data[:end]), data[end:]
        if lost and why and not piece:
            data = rest  # it only looked like a member
            continue
        if lost and found and not found[-1].endswith(b"\n"):
            piece = b"\n" + piece  # what follows damage begins a row of its own
        found += [piece] if piece else []
        row += piece.count(b"\n")
        if not why and rest and not _MEMBER.match(rest):
            why, following = f"followed by {counted(len(rest), 'byte')} that are none of its own", _MEMBER.search(rest)
            rest = rest[following.start():] if following else b""
        if why:
            problems.append(Problem(row, "truncated", f"the gzip file is {why}"))
        data, lost = rest, bool(why)
    return b"".join(found)


def _prefix(data: bytes) -> bytes:
    """Of a damaged member, to the last byte that can be unpacked."""
    unpacker, found = zlib.decompressobj(wbits=31), []
    for start in range(0, len(data), _PIECE):
        before = unpacker.copy()
        try:
            found.append(unpacker.decompress(data[start:start + _PIECE]))
        except zlib.error:
            for i in range(start, min(start + _PIECE, len(data))):
                try:
                    found.append(before.decompress(data[i:i + 1]))
                except zlib.error:
                    break
            break
    return b"".join(found)


def write_gzip(path: Path, entries: Iterable[ev.Entry]) -> None:
    """As ``events.jsonl`` has them; equal entries give equal bytes."""
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as packed:
        packed.writelines(ev.encoder.encode(entry) + b"\n" for entry in entries)
