"""Detectors of one's own beside ours and the peers': ranked by the time they cost, without seeing what was injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from detection_world import Fault
from test_replay_replaying import PATIENT, make, recorded

from robustrl import Run
from robustrl.core import events as ev
from robustrl.core.events import RoleSample
from robustrl.errors import ConfigError
from robustrl.replay.leaderboard import OURS, call_failed, leaderboard


class LoopStuck:
    def __init__(self, limit: float = 2.0) -> None:
        self.limit, self.last = limit, dict[tuple[str, int], RoleSample]()

    def feed(self, entry: ev.Entry) -> None:
        if isinstance(entry.event, RoleSample):
            self.last[entry.event.role, entry.event.incarnation] = entry.event

    def advance(self, now: float) -> list[ev.Verdict]:
        late = [life for life, sample in self.last.items() if sample.loop_age > self.limit]
        return [call_failed(*life, now, "loop stuck", self.last.pop(life).loop_age) for life in late]

    def next_deadline(self) -> float | None:
        return None


class Spy(LoopStuck):
    seen: list[str] = []

    def feed(self, entry: ev.Entry) -> None:
        self.seen.append(type(entry.event).__name__)
        if len(self.seen) > 300:
            raise RuntimeError("three hundred are enough")


class Nervous(LoopStuck):
    def __init__(self) -> None:
        super().__init__(limit=0.0)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    hang = recorded(make(41, Fault("freeze", "rollout-0", phase="decode")), "hang")
    slow = recorded(make(42, Fault("freeze", "rollout-0", seconds=1.5, phase="decode"), thresholds=PATIENT), "freeze", seconds=1.5)
    return [hang, slow]


def board(runs: list[Run], **detectors: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    return {row["detector"]: row for row in leaderboard(runs, detectors)}


def test_a_rule_of_ten_lines_is_scored_beside_the_others(runs: list[Run]) -> None:
    rows = board(runs, mine=LoopStuck, nervous=Nervous)
    mine, ours = rows["mine"], rows[OURS]
    assert (mine["detected"], mine["missed"], mine["false_alarms"]) == (1, 0, 0) and 2.0 < mine["delay_max"] < 3.5
    assert (ours["detected"], ours["false_alarms"]) == (1, 0)
    assert mine["time_lost_s"] == pytest.approx(mine["late_s"]) and mine["place"] < ours["place"]
    assert rows["nervous"]["false_alarms"] > 5 and rows["nervous"]["needless_s"] >= 50.0
    assert rows["heartbeat (TRL, 300 s)"]["missed"] == 1 and "ours, paper" in rows and len(rows) > 10
    assert [row["place"] for row in rows.values()] == list(range(1, len(rows) + 1))
    lost = [row["time_lost_s"] for row in rows.values()]
    assert lost == sorted(lost)


def test_a_death_that_the_live_job_repaired_at_once_is_still_there_for_slower_detectors() -> None:
    run = recorded(make(43, Fault("kill", "rollout-0"), restarts=1.0), "kill")
    rows = board([run])
    slow, never, ours = rows["heartbeat (torchft, 5 s)"], rows["cluster idle (NeMo-RL watchdog, 600 s)"], rows[OURS]
    assert slow["detected"] == 1 and 4.0 < slow["delay_max"] < 6.5 and ours["delay_max"] < 0.5
    assert never["missed"] == 1 and never["time_lost_s"] == pytest.approx(run.entries[-1].t - run.truth[0].start)


def test_nobody_sees_what_was_injected_and_an_error_is_the_detectors_own(runs: list[Run]) -> None:
    Spy.seen = []
    row = board(runs[:1], spy=Spy)["spy"]
    assert row["error"] == "RuntimeError: three hundred are enough" and row["missed"] == 1
    assert "RoleSample" in Spy.seen and not {"FaultInjected", "FaultPlanned", "Verdict", "ThresholdsChanged"} & set(Spy.seen)


def test_names_and_runs_are_checked(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match="another detector"):
        leaderboard(runs, {OURS: LoopStuck})
    for other in ([], None, "x", 5, [5], b"x"):
        with pytest.raises(ConfigError, match="runs = .*must be a Run or at least one of them"):
            leaderboard(other)  # type: ignore[arg-type]
    for other in (LoopStuck, [LoopStuck], "x"):
        with pytest.raises(ConfigError, match="detectors = .*must be a mapping from names"):
            leaderboard(runs, other)  # type: ignore[arg-type]
    for name in (5, "", None):
        with pytest.raises(ConfigError, match="detectors = .*must be a text"):
            leaderboard(runs, {name: LoopStuck})  # type: ignore[dict-item]
    assert len(leaderboard(runs[1], peers=False)) == 3


def _says(*said: Any) -> Callable[[], Any]:
    return type("Says", (LoopStuck,), {"advance": lambda self, now: list(said)})


class _Uncopyable(LoopStuck):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copy of me")


def test_what_is_wrong_with_a_detector_is_its_own_rows_error(runs: list[Run]) -> None:
    """Of a class of thirty one rule is wrong: the others want to see the table all the same."""
    wrong: dict[str, tuple[Any, str]] = {
        "five": (_says(5), "TypeError: advance gave 5: must be a list of verdicts"),
        "no list": (type("No", (LoopStuck,), {"advance": lambda self, now: 5}), "TypeError: 'int' object is not iterable"),
        "no time": (_says(call_failed("rollout-0", 1, None, "x")),  # type: ignore[arg-type]
                    "TypeError: advance gave a verdict whose due is None: must be a number"),
        "no life": (_says(call_failed("rollout-0", "1", 0.0, "x")),  # type: ignore[arg-type]
                    "TypeError: advance gave a verdict whose incarnation is '1': must be int"),
        "when": (type("When", (LoopStuck,), {"next_deadline": lambda self: "soon"}), "TypeError: next_deadline gave 'soon'"),
        "factory": (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        "none": (None, "ConfigError: detector = None: must make, when called"),
        "made": (LoopStuck(), "ConfigError: detector = <"), "half": (lambda: object(), "ConfigError: detector = <function"),
        "ends": (lambda: LoopStuck("x"), "TypeError: '>' not supported"),  # type: ignore[arg-type]
    }  # fmt: skip
    rows = board(runs[:1], mine=LoopStuck, **{name: make for name, (make, _) in wrong.items()})
    for name, (_, error) in wrong.items():
        assert rows[name]["error"].startswith(error) and rows[name]["missed"] == 1, name
    assert rows["mine"]["error"] == "" and rows["mine"]["detected"] == 1 and len(rows) > 20


def test_a_detector_that_cannot_be_copied_is_told_so_where_a_copy_goes_on_alone() -> None:
    run = recorded(make(43, Fault("kill", "rollout-0"), restarts=1.0), "kill")
    assert board([run], mine=_Uncopyable)["mine"]["error"] == "RuntimeError: no copy of me"
