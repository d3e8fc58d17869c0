"""What a node agent logs: ages that are exact to a look, changes at the first look or the second, and one sign of life a second."""

from __future__ import annotations

import pytest

from robustrl.core.roles import Phase
from robustrl.core.sampling import ActivityMeter, Sampler


class Looker:
    """Looks at a role every 0.1 s; what the role shows is set between looks."""

    def __init__(self, marks: tuple[float, ...] = (), start: float = 100.0, role: str = "trainer-0") -> None:
        self.sampler = Sampler(role, 1, marks=marks)
        self.shown = {"phase": Phase.TRAIN, "progress": 1, "pending": 3, "step": 1, "version": 0, "loop_age": 0.0}
        self.cpu, self.ticks, self.start = 0.0, 0, start
        self.logged = []

    def look(self, times: int = 1, busy: float = 1.0, **shown):
        self.shown.update(shown)
        for _ in range(times):
            self.ticks += 1
            self.cpu += 0.1 * busy
            sample = self.sampler.look(self.start + self.ticks / 10, cpu=self.cpu, process=lambda: "S", **self.shown)
            if sample:
                self.logged.append((round(self.ticks / 10, 1), sample))
        return self

    def times(self):
        return [t for t, _ in self.logged]


def test_a_healthy_role_is_logged_once_a_second():
    looker = Looker()
    for i in range(50):
        looker.look(progress=i)
    assert looker.times() == [0.1, 1.0, 2.0, 3.0, 4.0, 5.0], "at whole seconds of the agent's clock: those of all its roles at once"


@pytest.mark.parametrize("change", [{"phase": Phase.OPTIMIZER}, {"step": 2}])
def test_a_change_of_a_trainer_is_logged_at_once(change):
    looker = Looker().look(3)
    looker.look(progress=2, **change)
    assert looker.times() == [0.1, 0.4]


def test_a_phase_of_another_role_is_logged_by_the_second_look_and_one_that_is_over_by_then_never():
    looker = Looker(role="rollout-0").look(3, phase=Phase.DECODE)
    looker.look(1, phase=Phase.PULL).look(2, phase=Phase.DECODE)
    assert looker.times() == [0.1], "the pull was over before anybody could act on it"
    looker.look(3, phase=Phase.PULL)
    assert [(t, s.phase, s.phase_age) for t, s in looker.logged[1:]] == [(0.8, "pull", pytest.approx(0.1))]


def test_a_sign_of_life_shows_a_phase_that_has_just_begun_and_it_is_not_told_again():
    looker = Looker(role="rollout-0").look(9, phase=Phase.DECODE)
    looker.look(3, phase=Phase.PULL)
    assert [(t, s.phase) for t, s in looker.logged[1:]] == [(1.0, "pull")]
    looker.look(1, phase=Phase.DECODE).look(1, phase=Phase.PULL)
    assert len(looker.logged) == 2


def test_a_role_that_went_on_after_a_mark_was_passed_says_so_at_once_though_its_phase_is_new():
    looker = Looker(marks=(2.0,), role="rollout-0").look(15, phase=Phase.DECODE, pending=1).look(8, busy=0.0)
    assert looker.logged[-1][1].progress_age >= 2.0
    count = len(looker.logged)
    assert len(looker.look(1, phase=Phase.PULL).logged) == count + 1


@pytest.mark.parametrize(("role", "change"), [("trainer-0", {"version": 1}), ("rollout-0", {"version": 1}),
                                              ("state_keeper-0", {"step": 2, "version": 1}), ("task_runner", {"step": 2})])
def test_a_step_or_version_that_another_event_tells_waits_for_the_next_sign_of_life(role, change):
    looker = Looker(role=role).look(3)
    looker.look(10, **change)
    assert looker.times() == [0.1, 1.0]
    assert {name: getattr(looker.logged[-1][1], name) for name in change} == change


@pytest.mark.parametrize("phases", [(Phase.PREFILL, Phase.DECODE), (Phase.RUNNING, Phase.IDLE)])
def test_phases_that_alternate_by_the_millisecond_are_one(phases):
    looker = Looker()
    for i in range(9):
        looker.look(phase=phases[i % 2], progress=i)
    assert looker.times() == [0.1]
    assert looker.look(phase=Phase.WAITING_REQUEST).logged[-1][1].phase == "waiting_request"


def test_an_age_past_its_mark_is_logged_at_the_first_look_and_so_is_its_return():
    looker = Looker(marks=(2.0,))
    looker.look(10)
    start = looker.ticks / 10
    looker.look(25, busy=0.0)
    passed = [(t, s.active_age) for t, s in looker.logged if s.active_age >= 2.0]
    assert passed[0] == (pytest.approx(start + 2.0), pytest.approx(2.0)), "exact to the look"
    count = len(looker.logged)
    looker.look(1, busy=1.0)
    assert len(looker.logged) == count + 1 and looker.logged[-1][1].active_age == 0.0


def test_an_accelerator_that_idles_shows_behind_a_busy_cpu():
    looker = Looker(marks=(2.0,)).look(30, busy=1.0)
    assert looker.logged[-1][1].active_age == 0.0
    sampler, samples = Sampler("trainer-0", 1, marks=(2.0,)), []
    for i in range(31):
        samples.append(sampler.look(i / 10, cpu=i / 10, busy=1.0, process=lambda: "R", **looker.shown))
    assert max(s.active_age for s in samples if s) >= 2.0


def test_the_clock_that_the_agent_has_does_not_matter():
    runs = [Looker(marks=(2.0,), start=start).look(10).look(30, busy=0.0).logged for start in (0.0, 5.0, 1e6)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("jump", [5.0, -5.0, 3600.0])
def test_a_clock_that_is_set_meanwhile_makes_nobody_older(jump):
    looker = Looker(marks=(2.0,)).look(20, busy=1.0).look(10, busy=0.0)
    looker.start += jump
    looker.look(9, busy=0.0)
    assert all(s.active_age < 2.0 and s.phase_age < 4.0 and s.progress_age < 4.0 for _, s in looker.logged)
    looker.look(3, busy=0.0)
    assert looker.logged[-1][1].active_age == pytest.approx(2.0, abs=0.15)


def test_progress_age_counts_only_work_that_stands_still():
    looker = Looker().look(20, phase=Phase.WAITING_BATCH)
    assert looker.logged[-1][1].progress_age == 0.0
    looker.look(16, phase=Phase.TRAIN)
    assert [s.progress_age for _, s in looker.logged[-3:]] == pytest.approx([0.0, 0.0, 0.9])
    rollout = Looker().look(15, phase=Phase.DECODE, pending=0)
    assert rollout.logged[-1][1].progress_age == 0.0


def test_the_largest_lag_since_the_last_sample_is_kept():
    looker = Looker().look(2).look(1, loop_age=0.4).look(8, loop_age=0.0)
    assert [s.lag for _, s in looker.logged] == [0.0, 0.4]


def test_a_quiet_phase_has_no_marks_but_the_loops():
    looker = Looker(marks=(2.0,)).look(1, phase=Phase.WAITING_BATCH)
    looker.look(30, busy=0.0)
    assert looker.times() == [0.1, 1.0, 2.0, 3.0]
    looker.look(1, loop_age=2.5)
    assert looker.times()[-1] == 3.2


def _meter(bursts: list[float], floor: float = 0.05, step: float = 0.1) -> ActivityMeter:
    meter, used = ActivityMeter(floor), 0.0
    meter.read(0.0, 0.0)
    for i, spent in enumerate(bursts, 1):
        used += spent
        meter.read(i * step, used)
    return meter


def test_a_process_that_stops_is_quiet_from_that_look_on():
    assert _meter([0.1] * 10 + [0.03] + [0.0] * 20).last == pytest.approx(1.1), "it may have stopped at the end of the eleventh stretch"
    assert _meter([0.1] * 10 + [0.003] + [0.0] * 20).last == pytest.approx(1.0033), "below the floor, and still never too early"
    assert _meter([0.02] * 10 + [0.004] + [0.0] * 20).last == pytest.approx(1.022), "it had a fifth of a core: 4 ms took it 20 ms, or 22"


def test_housekeeping_is_no_activity_and_a_duty_cycle_is():
    assert _meter([0.1] * 10 + [0.0004] * 30).last == pytest.approx(1.0, abs=0.001)
    idle = [0.0] * 30
    idle[15] = 0.02  # 20 ms at once: more than 5% of a look, less than 5% of a second
    assert _meter([0.1] * 10 + idle).last == pytest.approx(1.0)
    assert _meter([0.02, 0.0] * 20).last > 3.8


@pytest.mark.parametrize("gap", [3.3, 4.0, 4.9])
def test_an_agent_that_goes_on_speaks_at_its_first_look(gap):
    """It was silent long enough: nobody shall wait for its next keep-alive."""
    looker = Looker().look(14)
    said = len(looker.logged)
    looker.start += gap
    looker.look(1)
    assert len(looker.logged) == said + 1


def test_a_stamp_from_before_the_agents_own_gap_is_not_older_for_it():
    """A whole node that is frozen and goes on: the agent may look before the others have had their turn."""
    looker = Looker(marks=(5.0,)).look(20)
    looker.start += 60.0
    looker.look(1, loop_age=60.1)
    assert looker.logged[-1][1].loop_age < 0.5
    looker.look(2, loop_age=0.0)
    looker.start += 60.0
    for i in range(60):  # one that had stopped before goes on ageing
        looker.look(1, loop_age=60.1 + i / 10)
    assert looker.logged[-1][1].loop_age == pytest.approx(6.0, abs=0.3)
