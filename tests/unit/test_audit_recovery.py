"""The audit's rules on recoveries, on tokens that moved and on rolled-back steps: a right log passes, a forged one is named."""

from __future__ import annotations

import msgspec
import pytest
from made_log import forge, made_log
from story import ROLES, Story

from robustrl.core import events as ev
from robustrl.core.audit import audit
from robustrl.core.recoveries import recoveries_of

replace = msgspec.structs.replace


def findings(rule: str, entries: list[ev.Entry]) -> list[str]:
    return [finding.text for finding in audit(entries) if finding.rule == rule]


# -- every recovery ends -


def recovering(*, decided: bool = True, started: bool = True, back: bool = True, exit_known: bool = True, end: float = 700.0) -> Story:
    story = Story()
    if exit_known:
        story.exits(110.0, "rollout-0")
    if decided:
        story.restart(110.0, "rollout-0")
    if started:
        story.starts(111.0, "rollout-0")
    if back:
        story.ready(112.0, "rollout-0")
    story.ends(end, "stopped")
    return story


def test_a_recovery_that_ends_is_no_violation() -> None:
    assert findings("recoveries", recovering().entries) == []


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ({"decided": False, "started": False, "back": False}, "nothing was decided"),
        ({"started": False, "back": False}, "not back 590 s after its failure"),
        ({"back": False}, "not back 590 s after its failure"),
        ({"exit_known": False}, "no end of incarnation 1"),
    ],
)
def test_one_that_does_not_is_named(missing: dict[str, bool], text: str) -> None:
    (found,) = findings("recoveries", recovering(**missing).entries)
    assert text in found


def test_the_end_of_the_run_may_come_first() -> None:
    assert findings("recoveries", recovering(decided=False, started=False, back=False, end=115.0).entries) == []
    assert findings("recoveries", recovering(back=False, end=200.0).entries) == []


def test_in_the_mode_observe_nothing_need_be_decided() -> None:
    story = Story()
    story.at(101.0, ev.RecoverySettings(mode="observe", standbys="cold"))
    story.exits(110.0, "rollout-0")
    story.ends(700.0, "stopped")
    assert findings("recoveries", story.entries) == []


def test_a_restart_of_what_never_lived() -> None:
    story = recovering()
    story.at(700.0, ev.RestartDecided(role="rollout-7", incarnation=1, reason="so"))
    assert "which never started" in findings("recoveries", story.entries)[0]


def test_a_node_takes_the_lives_on_it_along() -> None:
    story = Story()
    story.at(110.0, ev.NodeLost(node="node-0", reason="so"))
    for role in ROLES:
        story.restart(110.0, role)
        story.starts(111.0, role)
        story.ready(112.0, role)
    story.ends(700.0, "stopped")
    assert findings("recoveries", story.entries) == []


def test_the_log_that_the_rule_reads_is_the_one_that_accounting_reads() -> None:
    assert [found.outcome for found in recoveries_of(recovering().entries)] == ["recovered"]


# -- tokens that moved -


def moved(runs: list[tuple[int, int]], moves: list[tuple[int, int]], turns: int = 0) -> list[str]:
    """What the rule says of a trajectory with these (version, tokens), after moves of (version of the new rollout, tokens kept)."""
    story = Story()
    for version, kept in moves:
        story.at(102.0, ev.TrajectoriesMoved(ids=[1], source="rollout-0", target="rollout-1", version=version, kept=[kept]))
    count = sum(n for _, n in runs)
    event = ev.TrajectoriesFinished(
        batch=1, group=0, ids=[1], prompt="", texts=[""], rewards=[0.0], tokens=[count], versions=[runs], tool_turns=[turns]
    )
    story.at(103.0, event)
    return findings("tokens", story.entries)


@pytest.mark.parametrize(
    ("runs", "moves", "text"),
    [
        ([(1, 10)], [], ""),
        ([(1, 10)], [(1, 4)], ""),
        ([(1, 4), (2, 6)], [(2, 4)], ""),
        ([(1, 4), (3, 6)], [(2, 4)], ""),  # a newer version still, before its first token there
        ([(1, 3), (2, 2), (3, 5)], [(2, 3), (3, 5)], ""),
        ([(1, 9), (2, 6)], [(2, 4)], "9 tokens of versions below 2, but only 4 were kept"),
        ([(1, 10)], [(2, 4)], "10 tokens of versions below 2, but only 4 were kept"),  # mixed, and not marked
        ([(1, 10)], [(2, 4), (2, 3)], "had 4 tokens when it moved before, and now 3"),
        ([(1, 3)], [(1, 4)], "ended with 3 tokens; 4 were kept"),
        ([(2, 4), (1, 6)], [], "must rise"),
        ([(1, 4), (1, 6)], [], "must rise"),
        ([(1, 4), (2, 0)], [], "must rise"),
    ],
)
def test_tokens_are_of_the_version_of_who_made_them(runs: list[tuple[int, int]], moves: list[tuple[int, int]], text: str) -> None:
    found = moved(runs, moves)
    assert text in found[0] if text else found == []


def test_the_answers_of_tools_are_not_among_the_kept_tokens() -> None:
    assert moved([(1, 10), (2, 4)], [(2, 4)], turns=1) == []


# -- rollbacks -


def rolled_back(to: int = 1, old: int = 2, version: int = 3) -> list[ev.Entry]:
    """A good log whose step 2 is rolled back and made again as version 3, which then has no step of its own any more."""
    entries = made_log(steps=2)
    at = next(i for i, e in enumerate(entries) if isinstance(e.event, ev.EndDecided))
    commit = next(e.event for e in entries if isinstance(e.event, ev.OptimizerStepCommitted) and e.event.step == 2)
    announced = next(e.event for e in entries if isinstance(e.event, ev.VersionAnnounced) and e.event.version == 2)
    metrics = next(e.event for e in entries if isinstance(e.event, ev.StepMetrics) and e.event.step == 2)
    again = [
        ev.RolledBack(old=old, to=to, reason="the copies of step 2 were bad"),
        replace(commit, version=version, digest="f" * 32),
        replace(announced, version=version, digest="f" * 32),
        metrics,
    ]
    host = entries[-1]
    told = [replace(host, source=getattr(event, "holder", host.source), event=event) for event in again]
    return forge([*entries[:at], *told, *entries[at:]])


def test_a_rolled_back_step_is_made_again_under_a_new_version() -> None:
    assert audit(rolled_back()) == []


def test_a_rolled_back_step_that_is_made_again_bit_for_bit_is_the_version_that_it_was() -> None:
    entries = rolled_back(version=2)
    digest = next(e.event.digest for e in entries if isinstance(e.event, ev.OptimizerStepCommitted) and e.event.step == 2)
    at = next(i for i, e in enumerate(entries) if isinstance(e.event, ev.RolledBack))
    again = entries[at + 1].event
    assert isinstance(again, ev.OptimizerStepCommitted)
    entries[at + 1] = replace(entries[at + 1], event=replace(again, digest=digest))
    assert audit(forge([*entries[: at + 2], *entries[at + 4 :]])) == []


@pytest.mark.parametrize(
    ("forged", "text"),
    [
        ({"old": 3}, "rolled back from step 3 to 1, when the last committed step was 2"),
        ({"old": 2, "to": 2}, "rolled back from step 2 to 2"),
        ({"to": 0}, "step 2 was committed, step 1 is due"),
        ({"version": 2}, "claims version 2 after version 2"),
    ],
)
def test_a_forged_rollback_is_named(forged: dict[str, int], text: str) -> None:
    assert any(text in found for found in findings("steps", rolled_back(**forged)))


def test_a_rollback_that_is_not_told() -> None:
    entries = [entry for entry in rolled_back() if not isinstance(entry.event, ev.RolledBack)]
    assert "step 2 was committed, step 3 is due" in findings("steps", forge(entries))[0]


def test_work_for_a_rollout_whose_life_never_held_the_version() -> None:
    """It died with version 3 and was given work for it after two more lives without any."""
    story = Story()
    story.at(101.0, ev.PullCommitted(source="k", target="rollout-0", incarnation=1, version=3, digest="d", bytes=1, seconds=0.1,
             commit_seconds=0.1, transport="shm", lag=1, probe_gap=0.0, address=""))  # fmt: skip
    given = ev.TrajectoriesStarted(batch=1, group=0, ids=[1], rollout="rollout-0", version=3)
    story.at(102.0, given)
    story.starts(103.0, "rollout-0")
    story.at(103.1, given)
    assert findings("serving", story.entries) == [], "the word of it may be late"
    story.starts(104.0, "rollout-0")
    story.at(105.0, given)
    assert "neither incarnation 3 nor the one before held" in findings("serving", story.entries)[0]


@pytest.mark.parametrize("kind", [ev.VersionAnnounced, ev.PullCommitted])
@pytest.mark.parametrize("address", ["garbage", "127.0.0.1:0", "127.0.0.1:99999", "8.8.8.8:9"])
def test_a_place_that_a_life_cannot_serve_at_is_named_though_it_says_so_each_time(kind: type, address: str) -> None:
    entries = [replace(e, event=replace(e.event, address=address)) if isinstance(e.event, kind) else e for e in made_log(steps=2)]
    assert any("serves at" in text for text in findings("transfers", forge(entries)))


def test_a_node_in_the_place_of_a_lost_one_may_have_another_address() -> None:
    entries = made_log(steps=2)
    at = max(i for i, e in enumerate(entries) if isinstance(e.event, ev.VersionAnnounced))
    node = next(e for e in entries if isinstance(e.event, ev.NodeStarted))
    other = replace(node, event=replace(node.event, ip="10.0.0.9", ray_node_id="other"))
    assert findings("transfers", forge([*entries[:at], other, *entries[at:]])) == []


# -- the last word of a life may not reach the log -


def without_last_words(entries: list[ev.Entry], role: str, lost: int) -> list[ev.Entry]:
    own = [i for i, entry in enumerate(entries) if entry.source == role]
    return forge([entry for i, entry in enumerate(entries) if i not in own[-lost:]])


@pytest.mark.parametrize("lost", range(1, 7))
@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_a_run_that_is_cut_short_may_lack_the_last_words_of_a_rollout(status: str, lost: int) -> None:
    """It committed a version and was given work for it, and the run ended before its word of the first was written."""
    entries = made_log(steps=4, status=status)
    assert isinstance([entry for entry in entries if entry.source == "rollout-0"][-1].event, ev.PullCommitted)
    assert audit(without_last_words(entries, "rollout-0", lost)) == []


@pytest.mark.parametrize("lost", range(1, 7))
def test_one_that_is_done_lacks_none(lost: int) -> None:
    assert audit(without_last_words(made_log(steps=4), "rollout-0", lost)) != []


def a_word_lost(*, announced: float = 109.0, given: float = 109.5, then: tuple[ev.Event, ...] = (), end: float = 110.0) -> list[str]:
    """rollout-0 told of version 0; it died, and had been given work for version 1. What the audit says of that work."""
    story = Story()
    pull = ev.PullCommitted(source="state_keeper-0", target="rollout-0", incarnation=1, version=0, digest="0", bytes=1, seconds=0.1,
                            commit_seconds=0.1, transport="shm", lag=1, probe_gap=0.0, address="")  # fmt: skip
    version = ev.VersionAnnounced(version=1, digest="1", bytes=1, chunks=1, holder="state_keeper-0", incarnation=1, address="h:1")
    work = ev.TrajectoriesStarted(batch=2, group=0, ids=[1], rollout="rollout-0", version=1)
    sample = ev.RoleSample(role="rollout-0", incarnation=1, phase="decode", progress=1, pending=1, step=0, version=1, loop_age=0.0, cpu=1.0)
    happenings = [(101.0, pull), (announced, version), (given, work), (given, sample), *((given, event) for event in then)]
    for t, event in sorted(happenings, key=lambda one: one[0]):
        story.at(t, event, source="rollout-0" if isinstance(event, ev.PullStarted) else "host")
    story.exits(end, "rollout-0")
    story.restart(end, "rollout-0")
    story.starts(end + 1, "rollout-0")
    story.ends(end + 2, "done")
    return [text for rule in ("staleness", "serving", "pulls") for text in findings(rule, story.entries) if "version 1" in text]


def test_nor_need_the_log_have_the_last_word_of_a_rollout_that_died() -> None:
    assert a_word_lost() == []


@pytest.mark.parametrize(
    "shape",
    [
        {"announced": 111.5},
        {"end": 150.0},
        {"then": (ev.PullStarted(source="state_keeper-0", source_incarnation=1, target="rollout-0", version=2, bytes=1, transport="shm"),)},
    ],
    ids=["a version of after its death", "it lived on", "it told of what came later"],
)
def test_but_no_more_than_that(shape: dict) -> None:
    found = a_word_lost(**shape)
    assert any("dispatched to rollout-0 by version 1, which it never committed" in text for text in found)
    assert any("given work for version 1" in text for text in found)
    assert any("seen to run on version 1" in text for text in found)


# -- two ranks: one is replaced, the other one stays -


def copied(step: int, digest: str = "s") -> ev.SnapshotCopied:
    return ev.SnapshotCopied(step=step, source="trainer-0", holder="disk", digest=digest, bytes=1, seconds=0.1)


def restored(role: str, step: int, source: str, digest: str = "s") -> ev.SnapshotRestored:
    return ev.SnapshotRestored(role=role, incarnation=1, step=step, source=source, digest=digest, seconds=0.1)


@pytest.mark.parametrize("source", ["disk", "local"])
def test_a_rank_that_stayed_writes_the_checkpoint_again_that_it_came_back_from(source: str) -> None:
    """The keeper's copy was bad, no peer had one, and the checkpoint is of the last committed step: nothing is rolled back."""
    story = Story(roles=(*ROLES, "trainer-1", "state_keeper-0"))
    story.commit(101.0, 0)
    story.commit(102.0, 1)
    story.at(103.0, copied(1), "trainer-0")
    refused = ev.SnapshotRefused(role="trainer-0", incarnation=1, step=1, source="local", reason="the weights do not match their checksums")
    story.at(104.0, refused, "state_keeper-0")
    story.at(104.0, restored("trainer-0", 1, source), "trainer-0")
    story.at(105.0, copied(1), "trainer-0")
    expected = [] if source == "disk" else ["a copy of step 1 reached disk after one of step 1"]
    assert findings("copies", story.entries) == expected
    story.at(106.0, copied(1), "trainer-0")
    assert len(findings("copies", story.entries)) == len(expected) + 1, "once"


@pytest.mark.parametrize("lost", ["before its commit was heard of", "after it was", "no"])
def test_a_step_that_is_lost_with_its_node_before_the_log_heard_of_it_is_made_again(lost: str) -> None:
    """The rank that stayed had come back to it; with the peer's copy it goes back by one, and its trajectories are generated again."""
    story = Story(roles=(*ROLES, "trainer-1", "state_keeper-0"))
    for step in range(3 if lost == "after it was" else 2):
        story.commit(101.0 + step, step)
    story.at(104.0, restored("trainer-1", 2, "local", "of before"), "trainer-1")
    story.sample(104.0, "trainer-1", "waiting_batch")
    story.entries[-1] = with_version(story.entries[-1], 2)
    if lost != "no":
        story.at(105.0, ev.NodeLost(node="node-0", reason="so"))
    story.sample(106.0, "trainer-1", "waiting_batch")
    story.entries[-1] = with_version(story.entries[-1], 1)
    if lost != "after it was":
        story.commit(107.0, 2)
    honest = lost == "before its commit was heard of"
    digest = "trainer-1, restored to step 2, has digest of before; committed was s"
    assert findings("copies", story.entries) == ([] if honest else [digest])
    assert findings("samples", story.entries) == (["trainer-1 incarnation 1 had version 2, and then 1"] if lost == "no" else [])


def with_version(entry: ev.Entry, version: int) -> ev.Entry:
    return replace(entry, event=replace(entry.event, version=version))
