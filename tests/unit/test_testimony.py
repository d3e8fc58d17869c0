"""The witness's log against the run's: agreement passes, and each kind of contradiction is named, whichever of the two is forged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from story import Story

from robustrl.core import events as ev
from robustrl.core.roles import RoleState
from robustrl.core.testimony import Began, Born, Died, Ended, Line, Read, Sight, Weights, cross_check, seal

replace = msgspec.structs.replace


def story() -> Story:
    """rollout-0 is killed at 110 and comes back; the run ends at 140."""
    story = Story()
    story.commit(101.0, 0)
    story.sample(109.0, "rollout-0", "decode", 5)
    story.injects(109.9, "rollout-0")
    story.entries[-1] = replace(story.entries[-1], event=replace(story.entries[-1].event, proof={"process": "gone"}))
    story.exits(110.0, "rollout-0")
    story.restart(110.0, "rollout-0")
    story.starts(112.0, "rollout-0")
    story.ready(113.0, "rollout-0")
    story.ends(140.0)
    return story


def sights() -> list[Sight]:
    seen: list[Sight] = [Began(t=99.0, run="r", host_pid=1)]
    for role in ("supervisor", "trainer-0", "rollout-0", "rollout-1"):
        seen.append(Born(t=99.9, role=role, incarnation=1, pid=7, start_ticks=7))
    seen.append(Weights(t=101.0, holder="state_keeper-0", version=0, digest=f"{0:032x}"))
    seen.append(Read(t=105.0, lives={"rollout-0.1": (0.0, "S")}))
    seen.append(Died(t=109.95, role="rollout-0", incarnation=1, pid=7))
    seen.append(Born(t=111.9, role="rollout-0", incarnation=2, pid=7, start_ticks=7))
    for role, life in (("supervisor", 1), ("trainer-0", 1), ("rollout-0", 2), ("rollout-1", 1)):
        seen.append(Died(t=140.5, role=role, incarnation=life, pid=7))
    return [*seen, Ended(t=141.0, left=[])]


def chained(seen: list[Sight]) -> list[Line]:
    lines: list[Line] = []
    for number, sight in enumerate(seen, 1):
        lines.append(seal(Line(number, sight), lines[-1].chain if lines else ev.GENESIS))
    return lines


def check(seen: list[Sight], entries: list[ev.Entry] | None = None) -> list[str]:
    return [finding.text for finding in cross_check(story().entries if entries is None else entries, chained(seen))]


def test_two_logs_of_one_run_agree() -> None:
    assert check(sights()) == []


def changed(kind: type, which: Callable[[Any], bool] = lambda s: True, **fields: Any) -> list[Sight]:
    seen = sights()
    at = next(i for i, s in enumerate(seen) if isinstance(s, kind) and which(s))
    seen[at] = replace(seen[at], **fields)
    return seen


def without(kind: type, which: Callable[[Any], bool] = lambda s: True) -> list[Sight]:
    return [s for s in sights() if not (isinstance(s, kind) and which(s))]


def first_rollout(s: Any) -> bool:
    return (s.role, s.incarnation) == ("rollout-0", 1)


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (changed(Weights, digest="f" * 32), "version 0 in the memory of state_keeper-0 has digest ffff"),
        (changed(Weights, version=9), "version 9, which the log does not call committed"),
        (changed(Born, first_rollout, pid=8), "is pid 7 in the log; the witness saw pid 8"),
        (changed(Born, first_rollout, start_ticks=8), "is pid 7 in the log"),
        (without(Born, lambda s: s.role == "trainer-0"), "trainer-0 incarnation 1 started, the witness saw no such process"),
        ([*sights()[:-1], Born(t=120.0, role="rollout-7", incarnation=1, pid=9, start_ticks=9), sights()[-1]], "the log does not know it"),
        (without(Died, first_rollout), "has ended in the log; the witness saw it alive"),
        (changed(Died, first_rollout, t=115.0), "began while incarnation 1 (pid 7) was alive"),
        (changed(Died, lambda s: s.role == "rollout-1", t=120.0), "saw rollout-1 incarnation 1 end at 120.00; the log does not say so"),
        (changed(Read, lives={"rollout-0.1": (5.0, "S")}), "is said to have used 0.00 s of CPU time; not so"),
        (changed(Ended, left=["rollout-0.2 (pid 7)"]), "still there after the run: rollout-0.2 (pid 7)"),
        (without(Ended), "it was cut short"),
    ],
)
def test_a_contradiction_is_named(seen: list[Sight], text: str) -> None:
    assert any(text in found for found in check(seen)), check(seen)


def test_a_death_that_the_log_hides() -> None:
    entries = [e for e in story().entries if not isinstance(e.event, ev.ProcessExited)]
    assert any("the log does not say so" in found for found in check(sights(), entries))


@pytest.mark.parametrize("process", ["gone", "T"])
def test_a_fault_that_did_nothing(process: str) -> None:
    """The log claims that rollout-1 was hit at 115; the witness saw it run on."""
    other = Story()
    other.life["rollout-1"] = 1
    other.injects(115.0, "rollout-1")
    hit = other.entries[-1]
    hit = replace(hit, event=replace(hit.event, proof={"process": process}))
    seen = sights()
    seen.insert(-5, Read(t=115.5, lives={"rollout-1.1": (1.0, "R")}))
    found = check(seen, [*story().entries[:-2], hit, *story().entries[-2:]])
    assert len(found) == 1 and "fault 1 is said to have" in found[0] and "rollout-1" in found[0]


def test_a_process_that_becomes_another_role_is_two_lives() -> None:
    """standby-0 becomes rollout-1 at 115; a new standby-0 is started at 116 while the process lives on."""
    told = story()
    extra = Story()
    extra.entries = []
    extra.starts(103.0, "standby-0")
    extra.becomes(115.0, "standby-0", RoleState.STOPPED)
    extra.starts(116.0, "standby-0")
    entries = [*told.entries[:-2], *extra.entries, *told.entries[-2:]]
    seen = sights()
    lives = [Born(t=103.0, role="standby-0", incarnation=1, pid=7, start_ticks=7), Born(t=116.0, role="standby-0", incarnation=2, pid=7,
             start_ticks=7), Died(t=140.4, role="standby-0", incarnation=1, pid=7)]  # fmt: skip
    assert check([*seen[:-5], *lives, *seen[-5:]], entries) == []
    stays = [entry for entry in entries if not (isinstance(entry.event, ev.RoleStateChanged) and entry.event.role == "standby-0")]
    assert any("standby-0 incarnation 2 began while incarnation 1" in found for found in check([*seen[:-5], *lives, *seen[-5:]], stays))


def test_a_resumed_run_may_have_two_witnesses_or_one() -> None:
    """The first witness ended at 105; what began before the second one did, nobody saw."""
    first: list[Sight] = [Began(t=99.0, run="r", host_pid=1), *sights()[1:7], Ended(t=105.0, left=[])]
    later = [Began(t=113.5, run="r", host_pid=2), *sights()[-5:]]
    lines = [*chained(first), *chained(later)]
    found = [finding.text for finding in cross_check(story().entries, lines)]
    assert not any("was changed" in text or "saw no such process" in text or "cut short" in text for text in found), found


def test_its_own_lines_are_chained() -> None:
    lines = chained(sights())
    lines[3] = replace(lines[3], sight=replace(lines[3].sight, pid=99))
    assert "line 4 of the witness's own log was changed" in cross_check(story().entries, lines)[0].text
    assert "line 1" in cross_check(story().entries, chained(sights())[1:])[0].text


def test_a_damage_that_was_ordered_is_no_contradiction() -> None:
    entries = story().entries
    order = ev.FaultPlanned(fault=2, kind="corrupt_snapshot", target="state_keeper-0", when="now", benign=False, options={})
    assert check(changed(Weights, digest="f" * 32), [replace(entries[0], event=order), *entries]) == []
