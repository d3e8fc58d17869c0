"""A recording without what cannot matter: the few entries on which failures of given settings, or of slower ones, can depend.

Promises: for every setting whose limits are not below the *floors*, the detector says the same of failures and suspicions, at the same
times, as from all entries (for limits that are multiples of a role's own history: to a few milliseconds). Leaves out: what is only reported
(stragglers, slow pulls, late loops). Pure; nothing of a rule is decided here: a sample is kept if an age in it could pass some limit, and
with it whatever the rules look at beside it.

Kept are: of each life its first sample, and its last one before anything that happens to it; all samples of an *unrest*, from the one
before an age reaches its floor to the one after it is below again, of all trainer ranks where it is one's, for they are judged by each
other; the sample of each spell that says best when it began; and in a time without optimizer steps that may be a stall, everything.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable, Mapping
from operator import sub

import msgspec

from ..core import events as ev
from ..core.roles import RoleId, RoleKind
from ..core.thresholds import PATHS, SECTION, Relative, Thresholds
from .recording import Life, Recording

_REPORTED = (ev.PullStarted, ev.PullCommitted, ev.VersionRefused, ev.SnapshotCopied, ev.StepMetrics, ev.PeerGone)
"""What leads to reports only."""
_SPELLS = {
    RoleKind.TRAINER: ("phase_age", "active_age", "progress_age", "loop_age"),
    RoleKind.ROLLOUT: ("progress_age", "loop_age"),
}
"""Ages whose beginnings a rule asks for; all other kinds: the loop's."""
_SAME_SPELL = 0.05
_REMEMBERED = 8
_UNHEARD = "'"
"""Behind the name of a node agent that was never silent for long: the detector need not keep count of its words."""


class Floors(msgspec.Struct, frozen=True):
    """The lowest limits of some settings."""

    values: tuple[tuple[str, float], ...]
    histories: bool
    """Some failure depends on a role's own history."""


def floors(settings: Iterable[Thresholds]) -> Floors:
    lowest: dict[str, float] = dict.fromkeys(PATHS, math.inf)
    histories = False
    for thresholds in settings:
        for path, value in thresholds.items():
            limit = value.floor if isinstance(value, Relative) else float(value)
            histories |= isinstance(value, Relative) and path in ("trainer.no_compute", "trainer.no_marks", "job.stall")
            lowest[path] = min(lowest[path], limit)
    return Floors(tuple(lowest.items()), histories)


def rounded(low: Floors) -> Floors:
    """The next powers of two below: settings that differ little share a reduction."""
    values = tuple((path, 2.0 ** math.floor(math.log2(value)) if value > 0 else value) for path, value in low.values)
    return Floors(values, low.histories)


def reduced(recording: Recording, low: Floors) -> Recording:
    """Kept with the recording: the last few are not made again."""
    kept = recording.reductions
    if low not in kept:
        while len(kept) >= _REMEMBERED:
            del kept[next(iter(kept))]
        kept[low] = _reduce(recording, low)
    return kept[low]


def _reduce(recording: Recording, low: Floors) -> Recording:
    return _Reduction(recording, dict(low.values), low.histories).result()


class _Reduction:
    def __init__(self, recording: Recording, low: Mapping[str, float], histories: bool) -> None:
        self.recording, self.low, self.histories = recording, low, histories
        self.entries = recording.entries
        self.keep = bytearray(len(self.entries))
        self.samples = recording.samples
        self.times = {life: [self.entries[i].t for i in places] for life, places in self.samples.items()}

    def result(self) -> Recording:
        unrest = self._unrest()
        for life, spans in unrest.items():
            for span in spans:
                self._keep_span(life, *span)
        for places in (*self.samples.values(), *self.recording.heard.values()):
            self.keep[places[0]] = 1
        stalls = self._others()
        for span in stalls:
            for life in self.samples:
                self._keep_span(life, *span)
        if self.histories:
            self._keep_turns()
        renamed = {agent: agent + _UNHEARD for agent in self._agents()}
        old = self.recording
        entries: list[ev.Entry] = []
        before: list[float] = []
        kept_as: dict[int, ev.Entry] = {}
        for i, kept in enumerate(self.keep):
            if kept:
                entry = self.entries[i]
                if isinstance(entry.event, ev.RoleSample):
                    if entry.source in renamed:
                        entry = msgspec.structs.replace(entry, source=renamed[entry.source])
                    kept_as[id(self.entries[i])] = entry
                entries.append(entry)
                before.append(old.before[i])
        between = [(earlier, kept_as[id(entry)], less) for earlier, entry, less in old.between if id(entry) in kept_as]
        return dataclasses.replace(old, entries=entries, before=before, between=between, others=[], whole=old, renamed=renamed)

    # -- ages that may pass a limit ---

    def _unrest(self) -> dict[Life, list[tuple[float, float]]]:
        low, found = self.low, dict[Life, list[tuple[float, float]]]()
        for life, places in self.samples.items():
            kind = RoleId.parse(life[0]).kind
            work, marks, loop = self.recording.peaks[life]
            if kind is RoleKind.TRAINER:
                a, b, c = low["trainer.no_compute"], low["trainer.no_marks"], low["trainer.silent"]
                at = [i for i, (x, y, z) in enumerate(zip(work, marks, loop, strict=True)) if x >= a or y >= b or z >= c]
            elif kind is RoleKind.ROLLOUT:
                a, c = low["rollout.no_tokens"], low["rollout.wedged"]
                at = [i for i, (x, z) in enumerate(zip(marks, loop, strict=True)) if x >= a or z >= c]
            elif kind in (RoleKind.NODE_AGENT, RoleKind.SUPERVISOR):
                continue
            else:
                c = low[f"{SECTION.get(kind, 'management')}.silent"]
                at = [i for i, z in enumerate(loop) if z >= c]
            spans: list[tuple[float, float]] = []
            for i in at:
                start = self.entries[places[max(0, i - 1)]].t
                end = self.entries[places[i + 1]].t if i + 1 < len(places) else self.recording.over.get(life, math.inf)
                if spans and start <= spans[-1][1]:
                    spans[-1] = spans[-1][0], end
                else:
                    spans.append((start, end))
            if spans:
                found[life] = spans
        ranks = [life for life in self.samples if RoleId.parse(life[0]).kind is RoleKind.TRAINER]
        shared = sorted(span for life in ranks for span in found.get(life, ()))
        return {**found, **dict.fromkeys(ranks, shared)} if shared else found

    def _keep_span(self, life: Life, start: float, end: float) -> None:
        """All samples in it, and what is known of the life when it begins."""
        times, places = self.times[life], self.samples[life]
        first, last = bisect.bisect_left(times, start), bisect.bisect_right(times, end)
        for i in range(first, last):
            self.keep[places[i]] = 1
        if first > 0:
            self.keep[places[first - 1]] = 1
            self._keep_beginnings(life, first - 1)
        elif places:
            self._keep_beginnings(life, min(first, len(places) - 1))

    def _keep_beginnings(self, life: Life, i: int) -> None:
        """Of the spells that last at the i-th sample, the samples that say best when they began."""
        places = self.samples[life]
        for name in _SPELLS.get(RoleId.parse(life[0]).kind, ("loop_age",)):
            entry = self.entries[places[i]]
            at, best, host = entry.at - getattr(entry.event, name), i, entry.t - getattr(entry.event, name)
            for j in range(i - 1, -1, -1):
                earlier = self.entries[places[j]]
                before = earlier.at - getattr(earlier.event, name)
                if abs(before - at) >= _SAME_SPELL or earlier.source != entry.source:
                    break
                at = before
                if earlier.t - getattr(earlier.event, name) < host:
                    best, host = j, earlier.t - getattr(earlier.event, name)
            self.keep[places[best]] = 1

    # -- everything else ---

    def _others(self) -> list[tuple[float, float]]:
        """Keeps what is no sample; gives the times in which a stall may be due."""
        commits: list[int] = []
        resets: list[float] = []
        for i in self.recording.others:
            event = self.entries[i].event
            if isinstance(event, _REPORTED):
                continue
            if isinstance(event, ev.OptimizerStepCommitted):
                commits.append(i)
                continue
            self.keep[i] = 1
            if isinstance(event, ev.RoleReady | ev.Resumed):
                resets.append(self.entries[i].t)
            self._keep_last(event, self.entries[i].t)
        limit = self.low["job.stall"]
        kept = -math.inf
        for place, i in enumerate(commits):
            following = self.entries[commits[place + 1]].t if place + 1 < len(commits) else math.inf
            if self.histories or following - kept >= limit or place == 0:
                self.keep[i] = 1
                kept = self.entries[i].t
        moments = sorted([*resets, *(self.entries[i].t for i in commits)])
        ends = [*moments[1:], self.recording.end] if moments else []  # a short stretch has none
        return [(a + limit, b) for a, b in zip(moments, ends, strict=True) if b - a >= limit]

    def _keep_last(self, event: ev.Event, t: float) -> None:
        """What was seen last of the lives that this is about."""
        if isinstance(event, ev.NodeLost):
            lives = [life for life in self.samples if self.recording.started[life].node == event.node]
        else:
            lives = [(getattr(event, "role", ""), getattr(event, "incarnation", 0))]
        for life in lives:
            if life in self.samples and (place := bisect.bisect_right(self.times[life], t)):
                self.keep[self.samples[life][place - 1]] = 1

    def _keep_turns(self) -> None:
        """Where the trainers' train phase begins and ends: its durations are what limits are multiples of."""
        for life, places in self.samples.items():
            if RoleId.parse(life[0]).kind is RoleKind.TRAINER:
                phases = [self.entries[i].event.phase for i in places]  # type: ignore[union-attr]
                for i in range(1, len(places)):
                    if phases[i] != phases[i - 1] and "train" in (phases[i], phases[i - 1]):
                        self.keep[places[i]] = 1

    def _agents(self) -> set[str]:
        """Node agents that were never silent for as long as matters; of the others enough words are kept."""
        limit, loud, heard = self.low["node.silent"], set[str](), self.recording.heard
        for (agent, incarnation), places in heard.items():
            times = [self.entries[i].t for i in places]
            end = min(self.recording.over.get((agent, incarnation), math.inf), self.recording.end)
            if max(map(sub, [*times[1:], end], times)) >= limit:
                loud.add(agent)
        for (agent, _), places in heard.items():
            if agent not in loud:
                continue
            kept = -math.inf
            for i, following in zip(places, [*places[1:], -1], strict=True):
                later = self.entries[following].t if following >= 0 else math.inf
                if self.keep[i] or later - kept >= limit:
                    self.keep[i], kept = 1, self.entries[i].t
        return {agent for agent, _ in heard} - loud
