"""The audit's rules on what a run must have said by then: in one that was cut short, a missing word is named that others saw the result of,
and the last words of an honest one may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from made_log import forge, made_log
from test_audit import altered, chained, first, of_step_2
from test_audit_values import texts

from robustrl.core import audit_asked
from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.audit_log import Log
from robustrl.rl.tasks import _classes

replace = msgspec.structs.replace
GONE = ev.ProcessExited(role="task_runner", incarnation=1, pid=1, cause="pidfd", last_lines=[])


def paced(entries: list[ev.Entry], seconds: float) -> list[ev.Entry]:
    """With so many seconds from each entry to the next."""
    return chained([replace(e, t=100 + e.seq * seconds, at=50 + e.seq * seconds) for e in forge(entries)])


def slowly(entries: list[ev.Entry]) -> list[ev.Entry]:
    return paced(entries, 0.5)


def cut(steps: int = 3, *, status: str = "stopped", **settings: Any) -> list[ev.Entry]:
    made = made_log(steps=steps, status=status)
    return altered(made, ev.RunStarted, {"config": lambda config: config | {"evaluation_prompts": 10} | settings})


def less(entries: list[ev.Entry], kind: type, which: Callable[[Any], bool] = lambda event: True) -> list[ev.Entry]:
    return [e for e in entries if not (isinstance(e.event, kind) and which(e.event))]


def more(entries: list[ev.Entry], place: int, source: str, event: ev.Event) -> list[ev.Entry]:
    return [*entries[:place], replace(entries[place], source=source, incarnation=1, event=event), *entries[place:]]


@pytest.mark.parametrize("status", ["done", "stopped", "failed"])
@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.5, 2.0])
def test_an_honest_log_passes_at_any_pace(status: str, seconds: float) -> None:
    """But for what it was made with: seconds of pulls, and few samples."""
    assert {finding.rule for finding in audit(paced(cut(status=status), seconds))} <= {"durations", "expected"}


# -- for how long a word may be under way -


def late(*, word: float = 0.0, event: ev.Event | None = None) -> float:
    entries = made_log()
    entries = more(entries, 40, "host", event) if event else entries
    return Log([*entries[:50], replace(entries[50], t=entries[50].t + word), *entries[51:]]).late


def test_a_word_may_be_as_late_as_others_were() -> None:
    assert late() == 1.0
    assert late(word=0.1) == 1.0
    assert late(word=0.5) == pytest.approx(2.0)
    assert late(word=9.0) == 5.0


def test_and_later_where_something_holds_words_up() -> None:
    planned = ev.FaultPlanned(fault=1, kind="partition", target="rollout-0", when="now", benign=False, options={})
    assert [late(event=planned), late(event=ev.NodeLost(node="node-0", reason="")), late(event=ev.WarningRaised(text="w"))] == [5.0] * 3
    assert late(event=ev.ClockGap(seconds=0.6)) == pytest.approx(2.4)


# -- the order of words -


def swapped(kind: type, one: int, other: int) -> list[ev.Entry]:
    """These two words of the kind have each other's content."""
    entries = cut(status="done")
    a, b = [i for i, e in enumerate(entries) if isinstance(e.event, kind) and e.event.step in (one, other)]
    entries[a], entries[b] = replace(entries[a], event=entries[b].event), replace(entries[b], event=entries[a].event)
    return entries


@pytest.mark.parametrize(("rule", "kind"), [("metrics", ev.StepMetrics), ("consumption", ev.TrajectoriesConsumed)])
def test_one_life_tells_of_the_steps_in_their_order(rule: str, kind: type) -> None:
    assert [text for text in texts(rule, slowly(swapped(kind, 1, 2))) if "tells of step 1 after step 2" in text] != []
    entries = cut(status="done")
    place = first(entries, kind)
    late = [*entries[:place], *entries[place + 1 : -1], entries[place], entries[-1]]
    assert [text for text in texts(rule, slowly(late)) if "tells of step 1 after step 3" in text] != []


def test_no_version_is_evaluated_before_there_is_one() -> None:
    entries = cut(status="done")
    place = max(i for i, e in enumerate(entries) if isinstance(e.event, ev.EvaluationDone))
    early = [*entries[:20], entries[place], *entries[20:place], *entries[place + 1 :]]
    assert [text for text in texts("evaluations", slowly(early)) if "before that version was announced" in text] != []


def test_a_run_ends_as_was_decided() -> None:
    for status in ("stopped", "failed"):
        (text,) = texts("closing", slowly(altered(cut(status="done"), ev.RunEnded, {"status": lambda _: status})))  # noqa: B023
        assert text == f"the run ended as {status!r}; decided was that it does as 'done'"


# -- a commit -


def without_its_commit(seconds: float) -> list[str]:
    """rollout-0 was seen on version 2, and the run was stopped."""
    entries = cut()
    place = max(i for i, e in enumerate(entries) if isinstance(e.event, ev.PullCommitted) and e.event.target == "rollout-0")
    sample = replace(entries[first(entries, ev.RoleSample)].event, role="rollout-0", version=2, progress=99, cpu=99.0)
    entries = more(entries, len(entries) - 12, "node_agent-0", sample)
    assert texts("pulls", paced(entries, seconds)) == []
    return [text for text in texts("pulls", paced([*entries[:place], *entries[place + 1 :]], seconds)) if "seen to run" in text]


def test_a_rollout_that_was_seen_on_a_version_has_committed_it() -> None:
    assert without_its_commit(0.01) == []
    assert without_its_commit(0.5) == ["rollout-0 was seen to run on version 2, which it never committed"]


# -- what was rated -


def rated(progress: int, *, seconds: float = 0.5, lacking: int = 0, **told: ev.Event) -> list[str]:
    """After both groups of batch 1 ended, the rollout manager says that it has done so many; the log lacks some of the groups."""
    entries = cut()
    place = first(entries, ev.OptimizerStepCommitted, lambda event: event.step == 1)
    sample = replace(entries[first(entries, ev.RoleSample)].event, role="rollout_manager", phase="idle", version=-1, pending=0, cpu=0.5)
    entries = more(entries, place, "node_agent-0", replace(sample, progress=progress))
    for event in told.values():
        entries = more(entries, place, "host", event)
    gone = [i for i, e in enumerate(entries) if isinstance(e.event, ev.TrajectoriesFinished) and e.event.batch == 1][:lacking]
    return texts("finished", paced([e for i, e in enumerate(entries) if i not in gone], seconds))


def test_what_was_rated_is_in_the_log() -> None:
    assert rated(24) == [], "4 answers, and 10 of each evaluation: the last step is committed, and its evaluation may be under way"
    assert rated(25) == ["25 answers were rated, for evaluations up to 20 of them; of 4 the log tells that they had ended"], "3 ended later"
    assert any("24 answers were rated, for evaluations up to 20 of them; of 2" in text for text in rated(24, lacking=1))


def test_but_for_the_last_words_and_where_one_that_told_of_it_died() -> None:
    assert rated(25, seconds=0.001) == []
    assert rated(25, gone=replace(GONE, role="request_manager")) == []
    assert rated(25, gone=replace(GONE, role="rollout_manager")) == []


# -- evaluations -


def test_an_evaluation_comes_before_the_steps_that_follow_it() -> None:
    found = texts("evaluations", forge(less(cut(), ev.EvaluationDone)))
    assert found == ["metrics of step 1, and no evaluation of version 0 before it was trained"]
    entries = cut(evaluation_every=1)
    assert texts("evaluations", forge(entries)) == ["metrics of step 2, and no evaluation of version 1 before it was trained"]
    first_done = entries[first(entries, ev.EvaluationDone)]
    place = first(entries, ev.StepMetrics, of_step_2)
    entries.insert(place, replace(first_done, event=replace(first_done.event, version=1)))
    assert texts("evaluations", forge(entries)) == []


def test_a_later_life_of_the_task_runner_tells_what_it_was_there_for() -> None:
    entries = less(cut(), ev.EvaluationDone)
    later = [replace(e, incarnation=2) if e.source == "task_runner" else e for e in entries]
    assert texts("evaluations", forge(later)) == []


def test_an_evaluation_comes_before_the_work_that_follows_it() -> None:
    entries = less(cut(steps=1), ev.EvaluationDone)
    assert texts("evaluations", forge(entries)) == []
    assert texts("evaluations", slowly(entries)) == ["work on batch 1 was given out, and no evaluation of version 0 was done"]
    place = first(entries, ev.OptimizerStepCommitted, lambda event: event.step == 1)
    assert texts("evaluations", slowly(more(entries, place, "host", GONE))) == [], "its word may have died with it"


# -- tokens -


def test_tokens_of_what_ended_are_journalled() -> None:
    entries = cut()
    assert texts("journalled", forge(less(entries, ev.TokensJournalled))) == []
    assert len(texts("journalled", slowly(less(entries, ev.TokensJournalled)))) == 2
    place = max(i for i, e in enumerate(entries) if isinstance(e.event, ev.TokensJournalled) and e.event.role == "rollout-0")
    fewer = replace(entries[place], event=replace(entries[place].event, tokens=entries[place].event.tokens - 1))
    (found,) = texts("journalled", slowly([*entries[:place], fewer, *entries[place + 1 :]]))
    assert "answers with" in found and "of rollout-0 had ended" in found


@pytest.mark.parametrize(
    "odd",
    [
        replace(GONE, role="rollout-0"),
        replace(GONE, role="request_manager"),
        ev.WarningRaised(text="the journal cannot be written"),
        ev.ClockGap(seconds=3.0),
        ev.RoleOrdered(role="rollout-0", incarnation=1, action="drain"),
    ],
)
def test_but_for_what_a_death_or_a_doubt_may_have_kept(odd: ev.Event) -> None:
    assert texts("journalled", slowly(more(less(cut(), ev.TokensJournalled), 60, "host", odd))) == []


def test_and_not_where_none_is() -> None:
    assert texts("journalled", slowly(less(cut(journal_tokens=False), ev.TokensJournalled))) == []


# -- what follows the last step -


def test_the_last_version_is_announced() -> None:
    entries = less(cut(), ev.VersionAnnounced, lambda event: event.version == 3)
    assert texts("versions", forge(entries)) == []
    (found,) = texts("versions", slowly(entries))
    assert "version 3 was committed" in found and "never announced" in found
    gone = replace(GONE, role="state_keeper-0")
    assert texts("versions", slowly(more(entries, len(entries) - 3, "host", gone))) == []


def test_the_last_step_has_metrics_once_its_version_is_pulled() -> None:
    entries = cut()
    place = max(i for i, e in enumerate(entries) if isinstance(e.event, ev.VersionAnnounced)) + 1
    pull = replace(entries[first(entries, ev.PullStarted)].event, version=3, lease=999)
    pulled = more(entries, place, pull.target, pull)
    assert texts("metrics", forge(pulled)) == []
    assert texts("metrics", slowly(pulled)) == ["version 3 is pulled, and step 3 has no metrics"]
    assert texts("metrics", slowly(more(pulled, place, "host", GONE))) == []


# -- what the task makes of an answer -


def task(kind: type, changes: dict[str, Any], **settings: Any) -> list[str]:
    return texts("asked", forge(altered(cut(**settings), kind, changes)))


TURNS: tuple[type, dict[str, Any]] = (ev.TrajectoriesFinished, {"tool_turns": lambda turns: [1 for _ in turns]})
HALF: tuple[type, dict[str, Any]] = (ev.TrajectoriesFinished, {"rewards": lambda rewards: [0.5 for _ in rewards]})
SHOWN: tuple[type, dict[str, Any]] = (ev.EvaluationDone, {"samples": [{"prompt": "1+1=", "text": "2", "reward": 7.0}]})


def test_a_tool_answers_where_the_task_has_one() -> None:
    assert task(*TURNS) == ["a tool answered in a trajectory of batch 1, and the task 'arithmetic' has none"]
    assert len(task(*TURNS, task="jsonl:/x")) == 1
    assert task(*TURNS, task="arithmetic_tool") == task(*TURNS, task="my_own") == []


def test_a_reward_is_one_that_the_task_gives() -> None:
    assert task(*HALF) == ["a reward of 0.5; the task 'arithmetic' gives 0 or 1"]
    assert task(*SHOWN) == ["an evaluation shows a reward of 7; the task 'arithmetic' gives 0 or 1"]
    for settings in ({"reward": "mine:reward"}, {"task": "my_own"}, {"task": "reasoning_gym:chain_sum"}):
        assert task(*HALF, **settings) == task(*SHOWN, **settings) == []


def test_the_audit_knows_the_tasks_as_they_are() -> None:
    toolless = {name for name, made in _classes().items() if not made.stop and "tool" not in vars(made)}
    assert toolless == {*audit_asked._NO_TOOL, *audit_asked._NO_TOOL_FROM}
    assert {*audit_asked._RIGHT_OR_WRONG} == {name for name, made in _classes().items() if made.reward is not None}


# -- order -


@pytest.mark.parametrize("kind", [ev.OptimizerStepCommitted, ev.TrajectoriesConsumed])
def test_a_step_consumes_in_the_order_of_numbers(kind: type) -> None:
    name = "consumed" if kind is ev.OptimizerStepCommitted else "ids"
    forged = forge(altered(cut(), kind, {name: lambda ids: ids[::-1]}, of_step_2))
    assert len(texts("consumption", forged)) == 1 and "order" in texts("consumption", forged)[0]


@pytest.mark.parametrize(
    ("kind", "name", "rule"), [(ev.TrajectoriesStarted, "ids", "batches"), (ev.TrajectoriesFinished, "ids", "finished")]
)
def test_trajectories_start_and_finish_in_the_order_of_numbers(kind: type, name: str, rule: str) -> None:
    forged = forge(altered(cut(), kind, {name: lambda ids: ids[::-1]}))
    assert len(texts(rule, forged)) == 1 and "out of the order" in texts(rule, forged)[0]
    twice = forge(altered(cut(), kind, {name: lambda ids: [ids[0], *ids[:-1]]}))
    assert any("out of the order" in text for text in texts(rule, twice))


def test_a_group_is_started_once_but_for_a_batch_that_is_generated_again() -> None:
    entries = altered(cut(), ev.TrajectoriesStarted, {"group": 0}, lambda event: (event.batch, event.group) == (3, 1))
    assert texts("batches", forge(entries))[0] == "group 0 of batch 3 was started before"
    full = ev.RestartDecided(role="rollout-0", incarnation=1, reason="", mode="full")
    for odd in (full, ev.RunResumed(wall=1e9, host_pid=11)):
        assert all("before" not in text for text in texts("batches", forge(more(entries, 60, "host", odd))))


# -- a run that is done -


def test_every_rollout_has_the_last_version_of_a_run_that_is_done() -> None:
    """Without evaluations, too."""
    entries = less(cut(status="done", evaluation_prompts=0), ev.EvaluationDone)
    assert audit(forge(entries)) == []
    short = less(entries, ev.PullCommitted, lambda event: (event.target, event.version) == ("rollout-1", 3))
    assert texts("pulls", forge(short)) == ["the run is called done, and rollout-1 only came to version 2 of 3"]
    order = ev.RoleOrdered(role="rollout-1", incarnation=1, action="drain")
    assert texts("pulls", forge(more(short, len(short) - 14, "host", order))) == []
