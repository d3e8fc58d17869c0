"""A log with a failure in it: a healthy start, then a rollout that dies and comes back; and a job that has it. For tests of the views."""

from __future__ import annotations

from types import SimpleNamespace

from made_log import Writer, made_log

from robustrl.core import events as ev
from robustrl.core.run_state import RunState
from robustrl.errors import ConfigError


def failing_log(rollout: str = "rollout-1", hostile: str = "") -> list[ev.Entry]:
    """Up to the moment before `rollout` is back; ``hostile`` turns up wherever a run says something in its own words."""
    log = Writer()
    for entry in made_log(steps=2, drop=False):
        if isinstance(entry.event, ev.TrajectoriesFinished) and entry.event.batch == 2:
            break
        log.write(entry.source, entry.event)
    state = RunState.of(log.entries)
    now = log.entries[-1].t
    role, pid = rollout, state.roles[rollout].pid
    log.write("node_agent-0", ev.ProcessExited(role=role, incarnation=1, pid=pid, cause="pidfd", last_lines=[hostile]))
    log.write("supervisor", ev.Verdict(
        role=role, incarnation=1, kind="failed", rule="exited", evidence={"cause": hostile or "pidfd", "phase": "decode"}, threshold=0.0,
        due=now, seen=now, onset=now - 0.05, blind_spot="a process that lives and does nothing"))
    log.write("supervisor", ev.RoleStateChanged(role=role, incarnation=1, old="healthy", new="failed", reason=hostile or "rule exited"))
    log.write("supervisor", ev.RestartDecided(role=role, incarnation=1, reason=hostile or "rule exited"))
    log.write("host", ev.RoleStarted(role=role, incarnation=2, node="node-0", pid=999, start_ticks=9))
    if hostile:
        log.write("host", ev.WarningRaised(text=hostile))
        log.write(role, ev.ErrorRaised(role="trainer-0", incarnation=1, error="E", text=hostile))
    return log.entries


def back(entries: list[ev.Entry], rollout: str = "rollout-1") -> list[ev.Entry]:
    """The same log, until the rollout takes part again."""
    log = Writer()
    for entry in entries:
        log.write(entry.source, entry.event)
    log.write(rollout, ev.RoleReady(role=rollout, incarnation=2, seconds=0.5))
    log.write("supervisor", ev.RoleStateChanged(role=rollout, incarnation=2, old="restarting", new="stale", reason="ready"))
    log.write("supervisor", ev.RoleStateChanged(role=rollout, incarnation=2, old="stale", new="healthy", reason="version committed"))
    return log.entries


def continued(entries: list[ev.Entry], *more: ev.Event) -> list[ev.Entry]:
    """The same log, and what the host says after that."""
    log = Writer()
    for entry in entries:
        log.write(entry.source, entry.event)
    for event in more:
        log.write("host", event)
    return log.entries


def full_restart() -> list[ev.Entry]:
    """Owing to trainer-0; until all roles are back."""
    begun = failing_log()
    failure = next(place for place, entry in enumerate(begun) if isinstance(entry.event, ev.ProcessExited))
    log, state = Writer(), RunState.of(begun[:failure])
    for entry in begun[:failure]:
        log.write(entry.source, entry.event)
    others = [role for role in state.roles if role not in ("trainer-0", "host")]
    pid = state.roles["trainer-0"].pid
    log.write("node_agent-0", ev.ProcessExited(role="trainer-0", incarnation=1, pid=pid, cause="pidfd", last_lines=[]))
    now = log.entries[-1].t
    log.write("supervisor", ev.Verdict(
        role="trainer-0", incarnation=1, kind="failed", rule="exited", evidence={"cause": "pidfd"}, threshold=0.0, due=now, seen=now,
        onset=now - 0.05, blind_spot=""))
    log.write("supervisor", ev.RoleStateChanged(role="trainer-0", incarnation=1, old="healthy", new="failed", reason="exited"))
    for role in ("trainer-0", *others):
        log.write("supervisor", ev.RestartDecided(role=role, incarnation=1, reason="all", mode="full"))
    for role in others:
        log.write("host", ev.ProcessExited(role=role, incarnation=1, pid=state.roles[role].pid, cause="ended by the host", last_lines=[]))
    for role in others:
        old = str(state.roles[role].state)
        log.write("supervisor", ev.RoleStateChanged(role=role, incarnation=1, old=old, new="failed", reason="ended by the host"))
    for role in (*reversed(others), "trainer-0"):
        log.write("host", ev.RoleStarted(role=role, incarnation=2, node="node-0", pid=999, start_ticks=9))
        log.write(role, ev.RoleReady(role=role, incarnation=2, seconds=0.5))
        log.write("supervisor", ev.RoleStateChanged(role=role, incarnation=2, old="restarting", new="healthy", reason="ready"))
    return log.entries


class FakeJob:
    """A job as the views see it."""

    def __init__(self, log, upto: int) -> None:
        self.log, self.upto, self.over, self.calls = log, upto, False, []
        self.roles = {name: SimpleNamespace(logs=lambda lines: ["x" * 9000]) for name in ("rollout-0", "rollout-1", "trainer-0")}
        self.thresholds = SimpleNamespace(update=self._update)
        self.run_dir = "/nowhere"
        self._box = self._lost = None

    @property
    def events(self):
        return self.log[: self.upto]

    def entries_after(self, count):
        return self.log[count : self.upto]

    def _call(self, verb, timeout, **args):
        self.calls.append((verb, args))
        return 1

    def wait_until(self, condition, seconds):
        return True

    def _update(self, changes):
        if "rollout.no_tokens" not in changes:
            raise ConfigError("x", 1, "no such threshold")
        self.calls.append(changes)
