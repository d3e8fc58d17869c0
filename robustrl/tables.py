"""Tables that a notebook looks at, made from a run's log alone: lists of rows that turn into pandas frames when asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec

from .core import events as ev
from .errors import MissingExtra

if TYPE_CHECKING:
    import pandas

_SHOWN = 20


class Table(list[dict[str, Any]]):
    """Rows by column name."""

    def to_pandas(self) -> pandas.DataFrame:
        """Raises MissingExtra without pandas."""
        return _frame(self)

    def _repr_html_(self) -> str:
        from .display import html_table

        return html_table(self[-_SHOWN:], len(self))


class Events(list[ev.Entry]):
    """Entries of the log, typed; ``to_pandas()`` has a column for each field of each type."""

    def of(self, *kinds: type[ev.Event]) -> Events:
        """Those whose event is of one of these types of `robustrl.core.events`."""
        return Events(entry for entry in self if isinstance(entry.event, kinds))

    @overload
    def __getitem__(self, index: SupportsIndex) -> ev.Entry: ...
    @overload
    def __getitem__(self, index: slice) -> Events: ...
    def __getitem__(self, index: Any) -> Any:
        """An entry, or for a slice, Events again."""
        found = super().__getitem__(index)
        return Events(found) if isinstance(index, slice) else found

    def to_pandas(self) -> pandas.DataFrame:
        """``seq``, ``t``, ``source``, ``incarnation``, ``at``, ``type``, then the events' own fields. Raises MissingExtra."""
        rows = []
        for entry in self:
            fields = msgspec.to_builtins(entry.event)
            kind = fields.pop("type")
            rows.append({"seq": entry.seq, "t": entry.t, "source": entry.source, "incarnation": entry.incarnation, "at": entry.at,
                         "type": kind} | fields)
        return _frame(rows)

    def __repr__(self) -> str:
        return f"<{len(self)} events; .of(TYPE), .to_pandas()>"


def trajectories(entries: Iterable[ev.Entry]) -> Table:
    """A row per trajectory: id, batch, group, rollout, dispatch_version, prompt, text, reward, tokens, versions (runs of (version, count of
    tokens)), tool_turns, end (``in flight``, ``consumed`` or ``dropped: REASON``) and the optimizer step that consumed it.
    """
    rows: dict[int, dict[str, Any]] = {}
    for entry in entries:
        match entry.event:
            case ev.TrajectoriesStarted(batch=batch, group=group, ids=ids, rollout=rollout, version=version):
                for number in ids:
                    rows[number] = {"id": number, "batch": batch, "group": group, "rollout": rollout, "dispatch_version": version}
                    rows[number] |= dict.fromkeys(("prompt", "text", "reward", "tokens", "versions", "tool_turns"))
                    rows[number] |= {"end": "in flight", "step": None}
            case ev.TrajectoriesFinished() as done:
                columns = zip(done.ids, done.texts, done.rewards, done.tokens, done.versions, done.tool_turns, strict=True)
                for number, text, reward, tokens, versions, turns in columns:
                    rows[number] |= {"prompt": done.prompt, "text": text, "reward": reward, "tokens": tokens, "versions": versions,
                                     "tool_turns": turns}
            case ev.TrajectoriesConsumed(step=step, ids=ids):
                for number in ids:
                    rows[number] |= {"end": "consumed", "step": step}
            case ev.TrajectoriesDropped(ids=ids, reason=reason):
                for number in ids:
                    rows[number]["end"] = f"dropped: {reason}"
    return Table(rows.values())


class RecoveryRow(dict[str, Any]):
    """One recovery, by column name."""

    def __init__(self, values: Mapping[str, Any], entries: Sequence[ev.Entry], run_dir: Path | None) -> None:
        super().__init__(values)
        self._entries, self._run_dir = entries, run_dir

    def save_html(self, path: str | Path) -> Path:
        """Write it to ``path`` as one page that needs no Python: with a slider over time and the audit's result. Returns the path.

        Raises OSError, and MissingExtra without the extra ``views``.
        """
        try:
            from robustrl_widgets.report import write_html
        except ImportError as error:
            raise MissingExtra(f"save_html() needs the views ({error}): pip install 'robustrl[views]'") from error
        return write_html(self._entries, self._run_dir, path, self["number"])


class RecoveryTable(Table):
    """A row per recovery, in the order in which the failures were noticed; see `recoveries`."""

    def __repr__(self) -> str:
        from .timeline import recovery_text

        return recovery_text(self)

    def _repr_html_(self) -> str:
        from .timeline import recovery_html

        return recovery_html(self)


def recoveries(entries: Sequence[ev.Entry], run_dir: Path | None = None) -> RecoveryTable:
    """A row per recovery: number, role, incarnation (the life that failed), rule, cause, faults (numbers), mode, standby, attempts, step,
    node, roles (all that were restarted), ``at`` (seconds from the start of the run to the onset), onset_by, detect, restart, reconnect,
    total (seconds), outcome, and what it cost: lost and redone (seconds of training, see core/accounting.py), journalled_tokens,
    lost_tokens, regenerated_tokens, moved (trajectories), tokens_meanwhile.
    """
    from .core.accounting import costs
    from .core.recoveries import STAGES, recoveries_of

    begin = entries[0].t if entries else 0.0
    table = RecoveryTable()
    for found, cost in zip(recoveries_of(entries), costs(entries), strict=True):
        plain = ("number", "role", "incarnation", "rule", "cause", "mode", "standby", "attempts", "step", "node", "outcome", "onset_by")
        row = {name: getattr(found, name) for name in plain} | {"at": found.onset - begin}
        row |= {stage: getattr(found, stage) for stage in STAGES} | {"roles": list(found.roles), "faults": list(found.faults)}
        row |= {name: value for name, value in msgspec.structs.asdict(cost).items() if name != "number"}
        table.append(RecoveryRow(row, entries, run_dir))
    return table


def _frame(rows: list[dict[str, Any]]) -> pandas.DataFrame:
    try:
        import pandas
    except ImportError as error:
        raise MissingExtra(f"to_pandas() needs pandas ({error}): pip install 'robustrl[views]'") from error
    return pandas.DataFrame(rows)
