"""What a log says so far: roles, versions, pulls, ledger, metrics and rates, taken in entry by entry."""

from __future__ import annotations

import sys
from types import FrameType

import msgspec
import pytest
from made_log import Writer, made_log

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.roles import RoleKind, RoleState
from robustrl.core.run_state import RunState


def test_a_whole_run() -> None:
    entries = made_log(steps=3, prompts=2, samples=2, rollouts=2)
    state = RunState.of(entries)
    assert (state.run, state.name, state.status, state.reason, state.over) == ("run-1", "job", "done", "it was time", True)
    assert (state.step, state.steps, state.newest) == (3, 3, 3)
    assert state.committed == {"rollout-0": 3, "rollout-1": 3} and state.pulled == {"rollout-0": 4, "rollout-1": 4}
    assert state.ucx_bytes == {"posix": 8000} and state.pulls == {}
    balance = state.ledger.balance()
    assert (balance.started, balance.consumed, balance.dropped, balance.in_flight) == (12, 11, {"reward error": 1}, 0)
    assert state.finished == 11
    assert (
        [row["step"] for row in state.metrics] == [1, 2, 3]
        and state.metrics[0]["seconds_train"] == 0.01
        and state.metrics[0]["reward"] == 1.0
    )
    assert [evaluation.version for evaluation in state.evaluations] == [0, 3]
    assert {view.state for view in state.roles.values()} == {RoleState.STOPPED}
    assert list(state.nodes) == ["node-0"] and state.nodes["node-0"].lost is None
    committed = next(entry for entry in entries if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step == 1)
    assert state.seconds_to_first_step == pytest.approx(committed.t - entries[0].t)
    assert state.announced[2].address == "127.0.0.1:9" and state.announced[2].chunks == 1


def test_what_stands_goes_back_with_a_rollback_and_on_with_the_next_commit() -> None:
    entries = made_log(steps=3, prompts=2, samples=2, rollouts=2)
    state = RunState.of(entries)
    assert (state.step, state.stands) == (3, 3)
    commit = next(entry.event for entry in entries if isinstance(entry.event, ev.OptimizerStepCommitted) and entry.event.step == 2)
    state.apply(msgspec.structs.replace(entries[-1], seq=state.seq + 1, event=ev.RolledBack(old=3, to=1, reason="")))
    assert (state.step, state.stands) == (3, 1)
    state.apply(msgspec.structs.replace(entries[-1], seq=state.seq + 1, event=commit))
    assert (state.step, state.stands) == (2, 2)


def test_the_status_on_the_way() -> None:
    state = RunState()
    statuses = []
    for entry in made_log():
        state.apply(entry)
        if not statuses or statuses[-1] != state.status:
            statuses.append(state.status)
        assert state.paused == (state.status == "paused")
    assert statuses == ["starting", "running", "paused", "running", "done"]


def test_equal_logs_give_equal_states() -> None:
    assert RunState.of(made_log()) == RunState.of(made_log()) != RunState.of(made_log(seed=1))


@pytest.mark.parametrize("cut", range(20, 75, 6))
def test_a_run_cut_anywhere_is_closed_without_an_open_account(cut: int) -> None:
    """What the host records when every role is gone makes a log that passes the audit, wherever it was cut."""
    log = Writer()
    for entry in made_log()[:cut]:
        log.write(entry.source, entry.event)
    for event in RunState.of(log.entries).closing("the trainer died"):
        log.write("host", event)
    log.write("host", ev.RunEnded(status="failed", reason="the trainer died", wall=1e9))
    assert audit(log.entries) == []


def started(log: Writer, role: str = "rollout-0", incarnation: int = 1) -> None:
    log.write("host", ev.RoleStarted(role=role, incarnation=incarnation, node="node-0", pid=7 + incarnation, start_ticks=1))


def sample(log: Writer, progress: int, *, phase: str = "decode", incarnation: int = 1, **changes: float) -> ev.Entry:
    event = ev.RoleSample(
        role="rollout-0", incarnation=incarnation, phase=phase, progress=progress, pending=3, step=0, version=1, loop_age=0.1, cpu=2.0
    )
    log.write("node_agent-0", event)
    log.entries[-1] = msgspec.structs.replace(log.entries[-1], **changes)
    return log.entries[-1]


def test_a_role_as_it_is_sampled() -> None:
    log = Writer()
    started(log)
    first, second, third = sample(log, 10, phase="prefill"), sample(log, 20), sample(log, 20)
    view = RunState.of(log.entries).roles["rollout-0"]
    assert (view.kind, view.state, view.pid, view.node) == (RoleKind.ROLLOUT, RoleState.STARTING, 8, "node-0")
    assert (view.phase, view.phase_since, view.progress, view.progress_since) == ("decode", second.t, 20, second.t)
    assert (view.pending, view.version, view.loop_age, view.cpu, view.sampled) == (3, 1, 0.1, 2.0, third.t)
    assert first.t < second.t < third.t


def test_tokens_per_second_over_the_window_and_over_lives() -> None:
    log = Writer()
    started(log)
    for second in range(31):
        sample(log, 100 * second if second < 20 else 2000 + 10 * (second - 20), at=float(second), t=100.0 + second)
    state = RunState.of(log.entries)
    assert state.tokens_per_second() == {"rollout-0": pytest.approx(10.0)}, "the fast first seconds lie outside the window"
    assert state.tokens == {"rollout-0": 2100}
    assert state.mean_tokens_per_second() == pytest.approx(2100 / 30, rel=0.02)
    started(log, incarnation=2)
    log.entries[-1] = msgspec.structs.replace(log.entries[-1], t=131.0)
    sample(log, 3000, at=32.0, t=132.0)
    state = RunState.of(log.entries)
    assert state.tokens["rollout-0"] == 2100 and "rollout-0" not in state.tokens_per_second(), (
        "a late sample of the former life is not taken for the new"
    )
    sample(log, 50, incarnation=2, at=33.0, t=133.0)
    sample(log, 90, incarnation=2, at=34.0, t=134.0)
    state = RunState.of(log.entries)
    assert state.tokens["rollout-0"] == 2190 and state.tokens_per_second() == {"rollout-0": pytest.approx(40.0)}
    log.write("host", ev.WarningRaised(text="much later"))
    log.entries[-1] = msgspec.structs.replace(log.entries[-1], t=200.0)
    assert RunState.of(log.entries).tokens_per_second() == {"rollout-0": 0.0}, "nobody samples it any more"


def test_a_pull_under_way() -> None:
    log = Writer()
    started(log)
    log.write(
        "rollout-0",
        ev.PullStarted(source="state_keeper-0", source_incarnation=1, target="rollout-0", version=2, bytes=100, transport="tcp"),
    )
    log.write("rollout-0", ev.PullProgress(source="state_keeper-0", target="rollout-0", version=2, done=40, bytes=100, transport="tcp"))
    log.write(
        "rollout-0",
        ev.PullSourceSwitched(target="rollout-0", version=2, old_source="state_keeper-0", new_source="rollout-1", kept=40, reason="reset"),
    )
    pull = RunState.of(log.entries).pulls["rollout-0"]
    assert (pull.source, pull.version, pull.done, pull.bytes, pull.transport) == ("rollout-1", 2, 40, 100, "tcp")
    log.write("rollout-0", ev.PullDiscarded(target="rollout-0", version=2, bytes=40, reason="superseded"))
    state = RunState.of(log.entries)
    assert (state.discarded_bytes, state.ucx_bytes) == (40, {}) and state.pulls["rollout-0"].done == 40, "the pull goes on"
    log.write("supervisor", changed("starting", "failed"))
    assert RunState.of(log.entries).pulls == {}


def test_an_end_of_a_process_a_node_and_a_refusal() -> None:
    log = Writer()
    log.write("host", ev.NodeStarted(node="node-0", ray_node_id="a", ip="127.0.0.1", kinds=["rollout"]))
    started(log)
    log.write("rollout-0", ev.RoleReady(role="rollout-0", incarnation=1, seconds=1.0))
    log.write("rollout-0", ev.VersionRefused(role="rollout-0", incarnation=1, version=2, probe_gap=0.5, limit=0.001))
    log.write("node_agent-0", ev.ProcessExited(role="rollout-0", incarnation=1, pid=8, cause="pidfd", last_lines=[]))
    log.write("supervisor", ev.RoleStateChanged(role="rollout-0", incarnation=1, old="starting", new="failed", reason="its process exited"))
    log.write("host", ev.NodeLost(node="node-0", reason="raylet exited"))
    log.write("host", ev.LogRepaired(dropped_bytes=9))
    log.write("supervisor", ev.EndDecided(status="failed", reason="rollout-0 died"))
    state = RunState.of(log.entries)
    view = state.roles["rollout-0"]
    assert (view.state, view.exited, view.reason, view.ready) == (RoleState.FAILED, "pidfd", "its process exited", True)
    assert state.nodes["node-0"].lost == "raylet exited" and state.refused[0].version == 2
    assert (state.status, state.ending, state.reason) == ("starting", "failed", "rollout-0 died")
    assert "9 bytes" in state.warnings[0][1]


def changed(old: str, new: str, incarnation: int = 1) -> ev.RoleStateChanged:
    return ev.RoleStateChanged(role="rollout-0", incarnation=incarnation, old=old, new=new, reason="")


def test_what_must_never_be_in_a_log() -> None:
    def after(*events: ev.Event) -> RunState:
        log = Writer()
        started(log)
        for event in events:
            log.write("supervisor", event)
        return RunState.of(log.entries)

    with pytest.raises(ValueError, match="stale -> failed, but it is incarnation 1 in state starting"):
        after(changed("stale", "failed"))
    with pytest.raises(ValueError, match="failed -> healthy is not a legal transition"):
        after(changed("starting", "failed"), changed("failed", "healthy"))
    with pytest.raises(ValueError, match="incarnation 1 started after incarnation 1"):
        after(ev.RoleStarted(role="rollout-0", incarnation=1, node="node-0", pid=1, start_ticks=1))
    with pytest.raises(ValueError, match="rollout-1: no such role was started; there are rollout-0"):
        after(ev.RoleReady(role="rollout-1", incarnation=1, seconds=1.0))
    second = ev.RoleStarted(role="rollout-0", incarnation=2, node="node-0", pid=9, start_ticks=1)
    assert after(second, changed("starting", "failed")).roles["rollout-0"].state is RoleState.RESTARTING, "the end of a former life"
    entries = made_log()
    with pytest.raises(ValueError, match="entry 5 came after entry 3"):
        RunState.of([*entries[:3], entries[4]])


def test_cheap_enough_for_a_notebook_kernel() -> None:
    log = Writer()
    started(log)
    entry = sample(log, 1)
    entries = [msgspec.structs.replace(entry, seq=seq, event=msgspec.structs.replace(entry.event, progress=seq)) for seq in range(2, 4002)]
    state, work = RunState.of(log.entries[:1]), 0

    def traced(frame: FrameType, event: str, arg: object) -> object:
        nonlocal work
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        work += event == "opcode"
        return traced

    def of(part: list[ev.Entry]) -> float:
        """Instructions for each."""
        nonlocal work
        before, work = sys.gettrace(), 0
        sys.settrace(traced)
        try:
            for entry in part:
                state.apply(entry)
        finally:
            sys.settrace(before)
        return work / len(part)

    first = of(entries[:100])
    for entry in entries[100:-100]:
        state.apply(entry)
    last = of(entries[-100:])
    assert 0 < first < 600 and last == pytest.approx(first, rel=0.02), "few, and no more for a log that is longer"


@pytest.mark.parametrize("mark_first", [False, True])
def test_a_commit_and_its_mark_in_either_order(mark_first: bool) -> None:
    log = Writer()
    log.write("request_manager", ev.TrajectoriesStarted(batch=1, group=0, ids=[1, 2], rollout="rollout-0", version=0))
    commit = ev.OptimizerStepCommitted(
        step=1, version=1, digest="d", snapshot_digest="s", consumed=[1, 2], batch=1, bytes=1, holder="state_keeper-0", incarnation=1
    )
    mark = ev.TrajectoriesConsumed(step=1, ids=[1, 2])
    log.write("a", mark if mark_first else commit)
    assert RunState.of(log.entries).unreconciled() == ([] if mark_first else [(1, [1, 2])])
    log.write("b", commit if mark_first else mark)
    assert RunState.of(log.entries).unreconciled() == [] == RunState.of(log.entries).closing("over")
