"""The plan of a soak, and what it makes of a job that does not come back: no process is started here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from robustrl import cli, soak
from robustrl.faults import Hang, Kill
from robustrl.soak import SoakFailed, Strike, plan


def test_a_plan_is_its_seeds() -> None:
    assert plan(3, 50) == plan(3, 50) != plan(4, 50)
    assert plan(3, 100)[:20] == plan(3, 20)


def test_a_long_plan_has_everything_in_it() -> None:
    strikes = plan(0, 400)
    assert {strike.fault.kind.value for strike in strikes} == set(soak._TARGETS)
    assert {type(strike.fault) for strike in strikes} == set(soak._KINDS)
    assert not strikes[0].double and 0.1 < sum(strike.double for strike in strikes) / 400 < 0.3
    watchers = [strike.fault for strike in strikes if strike.fault.kind in soak._WATCHERS]
    assert {type(fault) for fault in watchers} == {Kill, Hang}


class _Job:
    """A job whose victim is dead for good."""

    def __init__(self, *, dead: bool = False, over: bool = False) -> None:
        self.over, self.status, self.reason, self.step, self.run = over, "failed" if over else "running", "so", 5, "no-such-run"
        self.roles = {"rollout-0": SimpleNamespace(name="rollout-0", state="failed" if dead else "healthy", incarnation=1)}
        self._entry = SimpleNamespace(host_pid=1)

    def wait(self, **_: Any) -> None:
        pass

    def wait_until(self, condition: Any, seconds: float) -> bool:
        return bool(condition())

    def inject(self, fault: Any) -> Any:
        hit = SimpleNamespace(role="rollout-0", incarnation=1, phase="decode")
        return SimpleNamespace(wait=lambda *a, **k: None, view=SimpleNamespace(hits=[hit], kind="kill"))


def test_a_job_that_does_not_come_back_fails_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_held", lambda job: {"processes": 1})
    said: list[str] = []
    with pytest.raises(SoakFailed, match="rollout-0 to be back after fault 1: not within"):
        soak._strike_all(_Job(), [Strike(Kill("rollout"), 0.0, False)], said.append)  # type: ignore[arg-type]
    assert said == ["fault 1/1: rollout-0 kill in phase decode"]
    with pytest.raises(SoakFailed, match="whole before fault 1: not within .*rollout-0.1 failed"):
        soak._strike_all(_Job(dead=True), [Strike(Kill("rollout"), 0.0, False)], said.append)  # type: ignore[arg-type]
    with pytest.raises(SoakFailed, match="whole before fault 1: failed"):
        soak._strike_all(_Job(over=True), [Strike(Kill("rollout"), 0.0, False)], said.append)  # type: ignore[arg-type]


def test_growth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([{"descriptors of the host": 40}, {"descriptors of the host": 90}])
    monkeypatch.setattr(soak, "_held", lambda job: next(held))
    monkeypatch.setattr(soak, "_replaced", lambda *_: True)
    monkeypatch.setattr(soak, "_wait", lambda *_: None)
    with pytest.raises(SoakFailed, match="descriptors of the host grew from 40 to 90"):
        soak._strike_all(_Job(), [Strike(Kill("rollout"), 0.0, False)], lambda text: None)  # type: ignore[arg-type]


def test_the_command_tells_how_to_run_a_failing_seed_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> None:
        raise SoakFailed("something was left")

    stopped: list[bool] = []
    job = SimpleNamespace(run_dir="runs/x", stop=lambda: stopped.append(True))
    monkeypatch.setattr("robustrl.launching.launch", lambda **_: job)
    monkeypatch.setattr(soak, "_strike_all", fails)
    assert cli.main(["soak", "--faults", "3", "--seed", "7"]) == 1
    assert "something was left" in (err := capsys.readouterr().err) and "again with: robustrl soak --faults 3 --seed 7" in err
    assert stopped == [True]
    assert cli.main(["soak", "--faults", "0"]) == 2
