"""What there is to see of a run: one pure fold over its log, and pictures of it for the views, as plain JSON values of bounded size.

Promised: equal logs give equal pictures; a log that is not possible is shown with a warning, never fatal; memory and pictures stay bounded
however long the run is. Times in a picture are seconds since the run's first entry; -1: still going on. Left out: drawing, and time itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from robustrl.core import events as ev
from robustrl.core.detection import Detector
from robustrl.core.roles import RoleKind
from robustrl.core.run_state import PullView, RunState
from robustrl.core.thresholds import Thresholds

from . import board, faults, metrics, player, recovery_text, thresholds, trajectories
from .episodes import Episode, Episodes
from .ghost import Race
from .lanes import Lanes, chunked
from .words import BROKEN, LONG, SHORT, broken_off, closed, count, cut, seconds

_HISTORY = 40
_STORY = 40
_PULLS = 24
_GONE_AFTER = 4.0
"""Seconds for which a pull that is over is still shown: most are too short to be seen."""

_SINCE = {"injection": "fault", "last sign of life": "last sign of life", "decision": "restart was decided"}

_MOVED = "unfinished answers of"

Picture = dict[str, Any]
Line = list[Any]
"""[time, role, tone, words]; tone: bad, doing, good or plain."""


class Scene:
    def __init__(self) -> None:
        self.state = RunState()
        self.episodes = Episodes()
        self.lanes = Lanes()
        self.detector = Detector(Thresholds.lab())
        self.samples = trajectories.Samples()
        self.curves = metrics.Curves()
        self.race = Race()
        self.history: dict[str, deque[Line]] = {}
        """Role -> what happened to it."""
        self.story: deque[Line] = deque(maxlen=_STORY)
        self.recent_pulls: deque[tuple[PullView, float, float]] = deque(maxlen=_PULLS)
        """(pull, when it was over, its seconds on the wire)."""
        self.length = 0.0
        """Seconds that the whole run took; known of a recording only."""
        self.pace = 1.0
        """How fast it plays when it plays; of a recording only."""
        self.lost = ""
        """Why nothing more comes although the log has no end: its host died. No entry says so, whoever follows the run does."""
        self.last: ev.Entry | None = None
        self.ended = False
        """The log tells how the job ended, and of nobody who took it up again."""
        self.doubts: deque[str] = deque(maxlen=5)
        """Entries that cannot be."""
        self.drained: dict[str, int] = {}
        """Role -> its life that was to be drained."""
        self._joining: set[str] = set()
        """Roles that were added to a job that works, and do not take part yet."""

    def apply(self, entry: ev.Entry) -> None:
        """Takes the next entry in."""
        self.last = entry
        if isinstance(entry.event, ev.RunEnded | ev.RunResumed):
            self.ended = isinstance(entry.event, ev.RunEnded)
        pull = self.state.pulls.get(entry.event.target) if isinstance(entry.event, ev.PullCommitted) else None
        if self.state.seq and entry.seq > self.state.seq + 1:  # a log that was read in part: it goes on behind each hole
            self.doubts.append(f"entries {self.state.seq + 1} to {entry.seq - 1} of the log are missing")
            self.state.seq = entry.seq - 1
        try:
            self.state.apply(entry)
            self.detector.feed(entry)
        except ValueError as error:  # `robustrl audit` is the judge; a view goes on
            self.doubts.append(cut(f"entry {entry.seq} of the log is not possible: {error}"))
        if pull is not None and isinstance(entry.event, ev.PullCommitted):
            pull.done, pull.bytes = pull.bytes, max(pull.bytes, entry.event.bytes)
            self.recent_pulls.append((pull, entry.t, entry.event.seconds))
        self.episodes.apply(entry, self.state)
        self.lanes.apply(entry, self.state, self.episodes)
        self.samples.apply(entry)
        self.curves.apply(entry, self.state)
        self.race.apply(entry, self.state)
        self._tell(entry)

    # -- the story in words ----------------------------------------------------------------------------------------------------------------

    def _tell(self, entry: ev.Entry) -> None:
        t = round(entry.t - self.state.t0, 2)
        for episode in self.episodes.closed:
            if episode.record.total is not None:
                took, role = seconds(episode.record.total), episode.record.role
                self._say(t, role, "good", f"{role} takes part again, {took} after its {_SINCE[episode.record.onset_by]}.")
        for episode, _ in self.episodes.dated:
            self._reword(episode)
        match entry.event:
            case ev.RoleSample():
                return
            case ev.RoleStateChanged(role=role, incarnation=incarnation, new="failed", reason=reason):
                if (failed := self.episodes.last_of(role)) and failed.ended_for_it(role, incarnation):
                    why = "to be started again" if failed.asked else f"all roles are started anew because of {failed.record.role}"
                    self._note(t, role, "doing", f"ended: {why}")
                elif failed and (role, incarnation) != (failed.record.role, failed.record.incarnation):
                    how = "failed as well" if failed.began_with(role, incarnation) else "failed on its way back"
                    self._say(t, role, "bad", f"{role} {how}: {reason}")
                elif failed:
                    self._say(t, role, "bad", f"{recovery_text.seen(failed)} {failed.noticed}".strip())
            case ev.RoleStateChanged(role=role, new="healthy") if role in self._joining:
                self._joining.remove(role)
                self._say(t, role, "good", f"{role} takes part now.")
            case ev.RoleStateChanged(role=role, new=new, reason=reason):
                self._note(t, role, "plain", f"{new}: {reason}")
            case ev.Verdict(role=role, kind=kind, rule=rule) if kind != "failed":
                self._note(t, role, "bad" if kind == "suspect" else "plain", f"{kind}, rule {rule}")
            case ev.RoleOrdered(role=role, incarnation=incarnation, action="drain"):
                self.drained[role] = incarnation
                self._say(t, role, "doing", f"{role} is drained: its work goes to others, and it ends.")
            case ev.RestartDecided(role=role, incarnation=incarnation, mode="isolated") if (
                    (found := self.episodes.last_of(role)) and found.ended_for_it(role, incarnation)):
                self._say(t, role, "doing", recovery_text.seen(found))
            case ev.RestartDecided(role=role, mode=mode, standby=standby):
                how = f"{standby} takes over" if standby else "a new process is started"
                found = self.episodes.last_of(role) if mode == "full" else None
                because, why = (found.record.role, f": {found.why_all}" if found.why_all else "") if found else (role, "")
                words = f"All roles are started anew because of {because}{why}." if mode == "full" else f"{role} alone is restarted: {how}."
                (self._say if because == role else self._note)(t, role, "doing", words)
            case ev.RoleStarted(role=role, incarnation=incarnation, pid=pid):
                if incarnation == 1 and self.state.status in ("running", "paused"):
                    self._joining.add(role)
                    self._say(t, role, "doing", f"{role} joins: its process is started.")
                self._note(t, role, "doing" if incarnation > 1 else "plain", f"life {incarnation} begins, process {pid}")
            case ev.SnapshotRestored(role=role, step=step, source=source):
                self._say(t, role, "doing", f"{role} goes on from optimizer step {step}, out of the {source} copy.")
            case ev.RolledBack(old=old, to=to, reason=reason):
                self._say(t, "", "bad", f"Steps {to + 1} to {old} are done again: {reason}")
            case ev.TrajectoriesMoved(ids=ids, source=source, target=target, kept=kept):
                tokens = f", {count(sum(kept))} tokens are kept" if sum(kept) else ", from the start"
                self._say(t, source, "doing", f"{len(ids)} {_MOVED} {source} go on at {target}{tokens}.")
            case ev.WarningRaised(text=text):
                self._say(t, "", "plain", text)
            case ev.Paused(step=step):
                pauses, runs = ("Pauses", ", which still runs") if step > self.state.step else ("Paused", "")
                self._say(t, "", "plain", f"{pauses} after optimizer step {step}{runs}.")
            case ev.Resumed():
                self._say(t, "", "plain", "Resumed.")
            case ev.FaultInjected(role=role, fault=fault) if (view := self.state.faults.faults.get(fault)) and not view.masked:
                done = view.hits[-1].t if view.hits else entry.t  # the word of it may come after that of its effect
                words = f"Fault {fault} hits {role}: {view.kind.replace('_', ' ')}."
                for lines in (self.story, self._history_of(role)):
                    _add_cause(lines, [round(done - self.state.t0, 2), role, "bad", words])
            case ev.FaultRevealed(fault=fault) if (view := self.state.faults.faults.get(fault)):
                self._say(t, "", "plain", f"Fault {fault} is revealed: {view.kind}, {view.target}.")
            case ev.ErrorRaised(role=role, error=error, text=text):
                self._note(t, role, "bad", f"{error}: {text}")

    def _reword(self, episode: Episode) -> None:
        """Since when it was so has become known after it was told."""
        seen, told = recovery_text.seen(episode), recovery_text.seen(episode, proof=False)
        since = round(episode.record.detected - self.state.t0, 2)  # an earlier failure may have been told in the same words
        for lines in (self.story, self.history.get(episode.record.role, ())):
            for line in lines:
                if line[0] >= since and line[1] == episode.record.role and line[3].startswith((f"{seen} Noticed", f"{told} Noticed")):
                    line[3] = cut(f"{seen} {episode.noticed}", LONG if lines is not self.story else SHORT)

    def _note(self, t: float, role: str, tone: str, words: str) -> None:
        if role:
            self._add(self._history_of(role), [t, role, tone, cut(words, LONG)])

    def _history_of(self, role: str) -> deque[Line]:
        return self.history.setdefault(role, deque(maxlen=_HISTORY))

    def _say(self, t: float, role: str, tone: str, words: str) -> None:
        self._note(t, role, tone, words)
        self._add(self.story, [t, role, tone, cut(words)])

    def _add(self, lines: deque[Line], line: Line) -> None:
        """Groups of answers that move together are one line."""
        last = lines[-1] if lines else None
        if last and last[1:3] == line[1:3] and _MOVED in last[3] and _MOVED in line[3] and line[0] - last[0] < 1.0:
            last[3] = cut(recovery_text.moved(self.episodes.last_of(line[1])) or line[3])
        else:
            lines.append(line)

    # -- pictures --------------------------------------------------------------------------------------------------------------------------

    @property
    def t(self) -> float:
        """Of the last entry, in seconds since the first."""
        return self.state.t - self.state.t0

    @property
    def broken(self) -> str:
        """Of a recording, at the last moment of a log that does not tell how the job ended: that it breaks off, in words; else empty."""
        if self.last is None or self.ended or not 0 < self.length <= self.last.t - self.state.t0:
            return ""
        return broken_off(self.last, self.state)

    @property
    def status(self) -> str:
        return "failed" if self.lost else "unknown" if self.broken else self.state.status

    @property
    def over(self) -> bool:
        return bool(self.lost or self.broken) or self.state.over

    @property
    def closed(self) -> str:
        """Why nothing can be done to the job any more, in words; empty while something can."""
        return BROKEN if self.broken else closed(bool(self.lost), self.state.over, self.state.status)

    @property
    def gone(self) -> float | None:
        """Unix time up to which something is known of a job that is gone; None of any other."""
        return round(self.state.wall + self.t, 1) if self.lost else None

    def picture(self, view: str, now: float) -> Picture:
        """Of one of `VIEWS`, at ``now`` seconds after the first entry. Of a job that is gone each of them says so (``gone``), and of a log
        that breaks off (``broken``).
        """
        drawn = VIEWS[view](self, now)
        if broken := self.broken:
            drawn = {**drawn, "broken": broken}
        return drawn if self.gone is None else {**drawn, "gone": self.gone}

    def shown_pulls(self, now: float) -> dict[str, Picture]:
        """None of a run that is over: its time stands still, so its last ones would be shown for ever."""
        found: dict[str, Picture] = {}
        if self.over:
            return found
        t0 = self.state.t0
        for pull, over, took in self.recent_pulls:
            if now - (over - t0) <= _GONE_AFTER:
                found[f"{pull.target} {pull.version}"] = _pull(pull, t0, over - t0, pull.bytes / took if took > 0 else 0.0)
        for pull in self.state.pulls.values():
            passed = now - (pull.since - t0)
            found[f"{pull.target} {pull.version}"] = _pull(pull, t0, -1.0, pull.done / passed if passed > 0.05 else 0.0)
        return found

    def inspect(self, role: str) -> Picture:
        """What a person who clicked on a role reads: its history, newest last. Raises KeyError for an unknown one."""
        view = self.state.roles[role]
        offered = faults.fitting(view.kind.value, self.detector.thresholds)
        return {"role": role, "node": view.node, "pid": view.pid, "incarnation": view.incarnation, "state": str(view.state),
                "reason": cut(view.reason, LONG), "faults": list(offered), "seconds": offered, "history": list(self.history.get(role, ())),
                "episodes": [recovery_text.picture(each, self) for each in self.episodes.all if role in each.record.roles][-5:]}


def _add_cause(lines: deque[Line], line: Line) -> None:
    """By its own time, and before what it led to in that moment."""
    later: list[Line] = []
    while lines and (lines[-1][0] > line[0] or lines[-1][:2] == line[:2]):
        later.append(lines.pop())
    lines.extend([line, *reversed(later)])


def _pull(pull: PullView, t0: float, over: float, rate: float) -> Picture:
    return {"to": pull.target, "from": pull.source, "v": pull.version, "done": pull.done, "bytes": pull.bytes,
            "via": cut(pull.transport, 24), "t": round(pull.since - t0, 2), "over": round(over, 2), "rate": float(f"{rate:.3g}")}


def _timeline(scene: Scene, now: float) -> Picture:
    kinds = [RoleKind.TRAINER, RoleKind.ROLLOUT, RoleKind.STATE_KEEPER]
    order = sorted(scene.lanes.lanes, key=lambda role: _place(scene, role, kinds))
    picture = {"head": board.head(scene), "order": order, **scene.lanes.picture()}
    if race := scene.race.picture(scene.state, now):
        picture["ghost"] = {"lane": chunked(scene.race.lane(scene.state, now)), "words": race["words"], "label": race["label"]}
    return picture


def _place(scene: Scene, role: str, kinds: list[RoleKind]) -> tuple[int, str]:
    view = scene.state.roles.get(role)
    kind = view.kind if view else None
    return (kinds.index(kind) if kind in kinds else len(kinds) + (kind is RoleKind.NODE_AGENT), role)


VIEWS: dict[str, Callable[[Scene, float], Picture]] = {
    "board": board.picture, "timeline": _timeline, "faults": faults.picture, "thresholds": thresholds.picture, "metrics": metrics.picture,
    "trajectories": trajectories.picture, "recovery": recovery_text.pictures, "player": player.picture,
}
