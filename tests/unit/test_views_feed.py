"""The feed between a run and its pages, the playback of recordings, and who may command what: without threads where that is possible."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time

import msgspec
import pytest
from made_log import Writer, made_log
from robustrl_widgets import assets, static
from robustrl_widgets.access import student_name
from robustrl_widgets.channel import merged
from robustrl_widgets.commands import MAX_COMMAND, Commander, Right
from robustrl_widgets.feed import RATE, Feed, Gone
from robustrl_widgets.presets import INCIDENTS, NOT_STAGED, PRESETS
from robustrl_widgets.scene import VIEWS
from robustrl_widgets.sources import LiveRun, RecordedRun
from views_log import FakeJob, failing_log

from robustrl.core import events as ev
from robustrl.core.accounting import account
from robustrl.faults import make_schedule
from tests.benchmarks._made_up_run import MadeUpRun


class _Clock:
    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


@pytest.fixture
def feed():
    """Over a job with one rollout ill, and no thread of its own."""
    log = failing_log()
    clock = _Clock()
    made = Feed(LiveRun(FakeJob(log, len(log)), clock), clock)
    made._thread = threading.current_thread()
    made.later = lambda task: task()
    return made


def _watch(feed, view="board"):
    seen = []
    subscription = feed.subscribe(view, lambda what, channel: seen.append((what, json.loads(channel.full), json.loads(channel.delta))))
    return seen, subscription


def test_whoever_comes_gets_the_whole_picture_and_then_only_what_changes(feed):
    job = feed.source.job
    job.upto -= 5
    early, _ = _watch(feed)
    assert early[0][0] == "full" and early[0][1]["picture"]["head"]["ill"] == []
    feed.step()
    assert len(early) == 1, "nothing has changed"
    job.upto += 5
    feed._clock.t = 0.5
    feed.step()
    late, _ = _watch(feed)
    assert early[-1][1]["key"] == late[0][1]["key"] and early[-1][2]["patch"] == late[0][2]["patch"], "one state for all"
    feed._clock.t = 2.0
    feed.step()
    assert [len(early), len(late)] == [3, 2] and early[-1][0] == "delta", "a sign of life"
    assert early[-1][2]["now"] > early[-2][2]["now"]


@pytest.mark.parametrize("error", [AttributeError("_change_callbacks"), Gone("its session is over")])
def test_a_sink_that_fails_touches_no_other(feed, caplog, error):
    """A page that was closed took the others' keyframe with it: they drew nothing until the next."""
    failing, called = [], []

    def sink(what, channel):
        called.append(what)
        if failing:
            raise error

    before, _ = _watch(feed)
    feed.subscribe("board", sink)
    after, _ = _watch(feed)
    failing.append(True)
    for second in (1.0, 2.0, 3.0):
        feed._clock.t = second
        feed.step()
        assert len(before) == len(after) == 1 + second
    gone = isinstance(error, Gone)
    assert len(called) == (2 if gone else 4) and len(feed._subscriptions) == (2 if gone else 3)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == (0 if gone else 1), "said once"
    failing.clear()
    feed._clock.t = 4.0
    feed.step()
    assert after[-1][0] == "delta" and (called[-1] == "full" or gone), "it has missed a keyframe, maybe"


def test_who_fails_at_once_is_no_subscriber(feed):
    with pytest.raises(ZeroDivisionError):
        feed.subscribe("board", lambda what, channel: 1 / 0)
    assert feed._subscriptions == []


def test_a_job_whose_host_died_is_shown_as_failed_though_its_log_has_no_end(feed):
    job = feed.source.job
    board, faults = _watch(feed)[0], _watch(feed, "faults")[0]
    assert board[0][1]["picture"]["head"]["status"] == "running" and not faults[0][1]["picture"]["over"]
    job._lost, job.over, job.reason = RuntimeError("gone"), True, "its host (process 5) ended without a closing record"
    feed._clock.t = 0.5
    feed.step()
    head = merged(board[-1][1]["picture"], board[-1][2]["patch"])["head"]
    assert head["status"] == "failed" and head["lost"] and head["reason"] == job.reason and board[-1][2]["speed"] == 0
    assert merged(faults[-1][1]["picture"], faults[-1][2]["patch"])["over"]
    assert "ended without a closing record" in static.board_html(*feed.still())


def test_effective_training_time_is_one_curve_for_who_was_there_who_comes_late_and_in_a_recording():
    """A late viewer, and who opened a finished recording, saw a single point."""
    log = made_log(steps=40)
    clock = _Clock()

    def feed_over(source) -> Feed:
        made = Feed(source, clock)
        made._thread = threading.current_thread()
        return made

    job = FakeJob(log, 1)
    early = feed_over(LiveRun(job, clock))
    _watch(early, "metrics")
    while job.upto < len(log):
        clock.t, job.upto = clock.t + 0.25, min(len(log), job.upto + 20)
        early.step()
    late, played = feed_over(LiveRun(FakeJob(log, len(log)), clock)), feed_over(RecordedRun(log, clock=clock))
    clock.t += 1000.0
    curves = []
    for feed in (early, late, played):
        scene, now = feed.still()  # nothing comes any more, and the last word counts all the same
        curves.append(scene.picture("metrics", now)["ettrs"])
        assert scene.curves.ettr == {"strict": curves[-1][-1][1], "paper": curves[-1][-1][2]}
    saved = played.whole()[0].picture("metrics", 0.0)["ettrs"]
    assert curves[0] == curves[1] == curves[2] == saved and len(saved) > 1
    assert saved[-1][1:] == [1.0, 1.0] and saved[-1][0] == pytest.approx(account(log).span + saved[0][0] - 1.0, abs=0.11)


def test_curves_are_drawn_less_often_than_the_board(feed):
    job = feed.source.job
    job.upto = 1
    board, curves = _watch(feed, "board")[0], _watch(feed, "metrics")[0]
    for quarter in range(1, 9):
        feed._clock.t, job.upto = quarter / 4, job.upto + 5
        feed.step()
    assert len(board) == 9 and 2 <= len(curves) <= 4
    feed._clock.t = 4.0
    feed.step()
    assert curves[-1][2]["now"] > 2.0, "the last word arrives"


def test_a_feed_has_threads_only_while_somebody_looks():
    log = made_log()
    before = threading.active_count()
    feed = Feed(RecordedRun(log, speed=100.0))
    got = threading.Event()
    subscriptions = [feed.subscribe("board", lambda what, channel: "done" in channel.delta + channel.full and got.set()) for _ in range(3)]
    assert got.wait(10.0), "the end of the recording arrives"
    feed.later(got.clear)
    for subscription in subscriptions:
        subscription.close()
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before


def test_no_view_gets_more_messages_than_the_rate_allows():
    log = made_log(steps=40)
    times: list[float] = []
    feed = Feed(RecordedRun(log, speed=2.0))
    subscription = feed.subscribe("board", lambda what, channel: times.append(time.monotonic()))
    time.sleep(1.0)
    subscription.close()
    assert 2 <= len(times) <= 2 + RATE


def test_a_recording_plays_at_any_speed_stops_and_winds_back():
    clock, log = _Clock(), made_log()
    run = RecordedRun(log, speed=2.0, clock=clock)
    clock.t = 0.25
    assert len(run.take()) == 51 and run.now() == 0.5 and run.take() == []
    run.play(speed=0)
    clock.t = 9.0
    assert run.now() == 0.5 and run.speed == 0
    run.play(speed=1, at=0.1)
    assert run.generation == 1 and len(run.take()) == 11 and len(run.entries()) == 11
    clock.t = 1000.0
    assert len(run.take()) == len(log) - 11 and run.now() == run.length and run.speed == 0.0
    for wrong in ({"speed": -1}, {"speed": float("nan")}, {"at": -1.0}, {"at": float("nan")}):
        with pytest.raises(ValueError, match="must be"):
            run.play(**wrong)


@pytest.mark.parametrize("speed", [60.0, 0.25, 100.0])
def test_the_speed_that_was_asked_for_is_the_one_that_is_shown_also_while_it_stands_still(speed):
    clock = _Clock()
    feed = Feed(RecordedRun(made_log(), speed, clock=clock), clock)
    pace = lambda: feed.still()[0].picture("player", 0.0)["pace"]  # noqa: E731
    assert pace() == speed == feed.source.speed
    feed.source.play(speed=0)
    assert pace() == speed and feed.source.speed == 0
    feed.source.play(at=0.0)
    clock.t += 1e9
    feed.source.play(speed=2)
    assert pace() == 2 and Feed(RecordedRun(made_log(), speed=0)).still()[0].picture("player", 0.0)["pace"] == 1


@pytest.mark.parametrize("speed", [-1.0, 100.5, float("nan"), float("inf")])
def test_a_recording_is_not_made_with_a_speed_that_it_cannot_have(speed):
    with pytest.raises(ValueError, match=r"speed = .*: must be from 0 to 100"):
        RecordedRun(made_log(), speed=speed)


def test_a_stopped_recording_that_is_wound_says_where_it_is_and_nothing_more():
    """Nothing was sent where the picture was the same: the bar of the player went back to where it had been."""
    clock = _Clock()
    feed = Feed(RecordedRun(made_log(), speed=0, clock=clock, at=0.2), clock)
    feed._thread = threading.current_thread()
    player, board = _watch(feed, "player")[0], _watch(feed)[0]
    for at in (0.4, 0.1, 0.3):
        before = len(player), len(board)
        feed.source.play(at=at)
        for _ in range(40):
            clock.t += 0.25
            feed.step()
        assert player[-1][2]["now"] == at == board[-1][2]["now"] and (len(player), len(board)) == (before[0] + 1, before[1] + 1)


def _ask(feed, right, verb, student="", **args):
    answers = []
    feed.still()
    Commander(feed, right, student, may_play=True).take(json.dumps({"id": "1", "verb": verb, "args": args}), answers.append)
    (answer,) = answers
    return answer


@pytest.mark.parametrize("verb", ["inject", "abort", "schedule", "reveal", "set_threshold", "set_recovery", "pause", "resume"])
def test_who_may_only_look_changes_nothing(feed, verb):
    answer = _ask(feed, Right.READ, verb, kind="kill", target="rollout-1", fault=1, path="rollout.no_tokens", value="3s", name="surprise")
    assert "may only look" in answer["error"] and feed.source.job.calls == []
    assert _ask(feed, Right.READ, "inspect", role="rollout-0")["value"]["right"] == 0


@pytest.mark.parametrize(("verb", "args"), [
    ("inject", {"kind": "kill", "target": "trainer-0"}), ("abort", {"fault": 1}), ("schedule", {"name": "surprise (hidden)"}),
    ("reveal", {"fault": 1}), ("set_threshold", {"path": "rollout.no_tokens", "value": "3s"}), ("set_recovery", {"mode": "full"}),
    ("pause", {}), ("resume", {}),
])  # fmt: skip
def test_to_a_job_that_is_gone_nothing_is_done_and_its_logs_are_read_still(feed, verb, args):
    job = feed.source.job
    log = Writer()
    for entry in job.log:
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="trainer-0", when="now", benign=False, options={}))
    job.log, job.upto = log.entries, len(log.entries)
    job._lost, job.over, job.reason = RuntimeError("gone"), True, "its host died\n" + "x" * 9000
    assert _ask(feed, Right.INSTRUCTOR, verb, **args)["error"] == "the job is gone: nothing can be done to it any more"
    assert job.calls == [] and "value" in _ask(feed, Right.INSTRUCTOR, "logs", role="rollout-0")
    assert "value" in _ask(feed, Right.INSTRUCTOR, "inspect", role="rollout-0")


@pytest.mark.parametrize("verb", ["schedule", "reveal", "set_threshold", "set_recovery", "pause", "resume"])
def test_a_student_sets_nothing(feed, verb):
    assert "may only queue a fault" in _ask(feed, Right.STUDENT, verb, path="rollout.no_tokens", value="3s", name="surprise")["error"]
    assert feed.source.job.calls == []


def test_a_student_has_one_fault_at_a_time_under_a_name(feed):
    job = feed.source.job
    assert "name=" in _ask(feed, Right.STUDENT, "inject", kind="kill", target="rollout-0", sure=True)["error"]
    assert "one role's process" in _ask(feed, Right.STUDENT, "inject", "Ada", kind="node_loss", target="rollout-0", sure=True)["error"]
    assert "not hidden" in _ask(feed, Right.STUDENT, "inject", "Ada", kind="kill", target="trainer-0", hidden=True)["error"]
    assert job.calls == []
    assert "ordered" in _ask(feed, Right.STUDENT, "inject", "Ada", kind="kill", target="trainer-0")["value"]["said"]
    assert [call[1]["by"] for call in job.calls] == ["student Ada"]
    log = Writer()
    for entry in job.log:
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="trainer-0", when="now", benign=False, options={}, by="student Ada"))
    job.log, job.upto = log.entries, len(log.entries)
    assert "one at a time" in _ask(feed, Right.STUDENT, "inject", "Ada", kind="kill", target="trainer-0")["error"]
    assert "value" in _ask(feed, Right.STUDENT, "inject", "Bob", kind="kill", target="trainer-0")
    assert "no such fault of yours" in _ask(feed, Right.STUDENT, "abort", "Bob", fault=1)["error"]
    assert "value" in _ask(feed, Right.STUDENT, "abort", "Ada", fault=1)


@pytest.mark.parametrize(("name", "same"), [
    ("Ada", True), ("ada", True), ("ADA ", True), ("A\u0301da", False), ("\u00c1DA", False), ("Ada\u200b", True), ("\u202eAda", True),
    ("\uff21da", True), ("Ad\u0338a", True), ("A\u00adda", True), ("Ad", False), ("Bob", False), ("Ad\ufffda", True),
])  # fmt: skip
def test_one_person_is_one_name_however_it_is_written(feed, name, same):
    """`Ada`, `ada` and `Ada` with a sign that nobody sees had a fault each."""
    job, log = feed.source.job, Writer()
    for entry in job.log:
        log.write(entry.source, entry.event)
    log.write("host", ev.FaultPlanned(fault=1, kind="kill", target="trainer-0", when="now", benign=False, options={}, by="student Ada"))
    job.log, job.upto = log.entries, len(log.entries)
    name = student_name({"name": [name.encode()]})
    answer = _ask(feed, Right.STUDENT, "inject", name, kind="kill", target="trainer-0")
    assert ("one at a time" in answer.get("error", "")) is same and ("value" in answer) is not same
    assert ("value" in _ask(feed, Right.STUDENT, "abort", name, fault=1)) is same


def test_the_last_live_rollout_is_killed_only_when_that_was_said_twice(feed):
    assert "last live rollout" in _ask(feed, Right.INSTRUCTOR, "inject", kind="kill", target="rollout-0")["confirm"]
    assert feed.source.job.calls == []
    _ask(feed, Right.INSTRUCTOR, "inject", kind="kill", target="rollout-0", sure=True)
    _ask(feed, Right.INSTRUCTOR, "inject", kind="hang", target="trainer-0", seconds=10, ahead=2)
    first, second = (call[1]["fault"] for call in feed.source.job.calls)
    assert first["fault"] == "kill" and first["force"] is True
    assert second["seconds"] == 10 and second["step"] == feed.scene.state.step + 3 and second["force"] is False


@pytest.mark.parametrize("args", [{"kind": "no_such", "target": "rollout-0"}, {"kind": "kill", "target": "rollout-99-x"}, {"kind": "kill"},
                                  {"kind": "kill", "target": "trainer-0", "phase": "decode"}, {"kind": "slow", "target": "trainer-0"},
                                  {"kind": "hang", "target": "trainer-0", "seconds": -1}])  # fmt: skip
def test_a_fault_that_is_none_is_refused_with_the_reason(feed, args):
    assert "error" in _ask(feed, Right.INSTRUCTOR, "inject", **args) and feed.source.job.calls == []


def test_a_refused_value_says_why_and_an_accepted_one_applies(feed):
    assert "no such threshold" in _ask(feed, Right.INSTRUCTOR, "set_threshold", path="a.b", value="3s")["error"]
    said = _ask(feed, Right.INSTRUCTOR, "set_threshold", path="rollout.no_tokens", value="3s")["value"]["said"]
    assert said.startswith("rollout.no_tokens is ") and "; it was " in said
    assert feed.source.job.calls == [{"rollout.no_tokens": "3s"}]


@pytest.mark.parametrize(("args", "why"), [
    ({"mode": "sometimes"}, "must be one of observe"), ({"standbys": "hot"}, "warm, cold"), ({}, "takes mode"),
    ({"mode": "full", "more": 1}, "takes mode"), ({"mode": "full", "standbys": None}, "warm, cold"),
])  # fmt: skip
def test_how_failures_are_answered_is_set_whole_or_not_at_all(feed, args, why):
    assert why in _ask(feed, Right.INSTRUCTOR, "set_recovery", **args)["error"] and feed.source.job.calls == []
    assert _ask(feed, Right.INSTRUCTOR, "set_recovery", mode="full")["value"]["said"] == "from now on: mode full"
    assert feed.source.job.calls == [("set_recovery", {"mode": "full"})]


def test_presets_are_schedules_of_the_catalogue_and_only_those_that_fit_are_offered(feed):
    assert len(INCIDENTS) + len(NOT_STAGED) == 28 and not NOT_STAGED & set(INCIDENTS), "each is staged, or said not to be"
    for preset in PRESETS.values():
        faults = [occurrence.fault for occurrence in itertools.islice(make_schedule(preset.schedule).occurrences(100, 0), 3)]
        assert faults and preset.words
    shown = feed.still()[0].picture("faults", 0.0)["presets"]
    assert "incident/restarted-stays-dead" in shown and "incident/dead-member-in-quorum" not in shown, "there is one trainer rank"
    assert "there is no schedule" in _ask(feed, Right.INSTRUCTOR, "schedule", name="incident/none")["error"]
    _ask(feed, Right.INSTRUCTOR, "schedule", name="incident/silent-server")
    ((verb, sent),) = feed.source.job.calls
    (fault,) = sent["schedule"]["faults"]
    assert (verb, fault["fault"], fault["target"], fault["phase"]) == ("schedule", "hang", "rollout", "decode")


@pytest.mark.parametrize("raw", [
    None, 7, "", "[]", "{", "x" * (MAX_COMMAND + 1), '{"id": 1, "verb": "kill"}', '{"id": "1", "verb": "kill", "more": 1}',
    '{"id": "1", "verb": "kill", "args": {"role": ["rollout-0"]}}', json.dumps({"id": "i" * 65, "verb": "kill"}), "[" * 4000,
])  # fmt: skip
def test_what_is_no_command_is_refused_and_nothing_else(feed, raw):
    answers = []
    Commander(feed, Right.INSTRUCTOR).take(raw, answers.append)
    assert len(answers) == 1 and "error" in answers[0] and feed.source.job.calls == []


@pytest.mark.parametrize("args", [{"role": "../../etc/passwd"}, {"role": None}, {}, {"role": "<script>"}])
@pytest.mark.parametrize("verb", ["logs", "stack", "inspect"])
def test_a_role_that_is_none_reaches_no_file_and_no_process(feed, verb, args):
    assert "there is no role" in _ask(feed, Right.INSTRUCTOR, verb, **args)["error"]


def test_logs_are_cut_and_a_recording_takes_no_commands(feed):
    (line,) = _ask(feed, Right.READ, "logs", role="rollout-0")["value"]
    assert len(line) <= 400
    assert "recording" in _ask(feed, Right.READ, "play", speed=1)["error"]
    recorded = Feed(RecordedRun(failing_log(), speed=100.0))
    recorded.later = lambda task: task()
    time.sleep(0.05)
    recorded.still()
    assert "recording" in _ask(recorded, Right.INSTRUCTOR, "inject", kind="kill", target="rollout-0")["error"]
    assert _ask(recorded, Right.READ, "play", speed=0, at=0.3)["value"]["at"] == pytest.approx(0.3)


def test_where_the_logs_of_a_recording_are_is_said(tmp_path):
    """Whoever asked for them read that nothing can be done to it any more."""
    (tmp_path / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in failing_log()))
    for path in (tmp_path, tmp_path / "events.jsonl"):
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)
        recorded = Feed(RecordedRun.load(path))
        recorded.later = lambda task: task()
        for verb, kept in (("logs", "logs"), ("stack", "stacks")):
            assert _ask(recorded, Right.READ, verb, role="rollout-0")["error"] == f"a recording: there are no {kept} beside it"
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "rollout-0.1.log").write_text("x")
        assert _ask(recorded, Right.READ, "logs", role="rollout-0")["error"] == f"a recording: its logs are in {tmp_path / 'logs'}"
    assert "nothing can be done" in _ask(recorded, Right.INSTRUCTOR, "pause")["error"]


def test_a_recording_says_where_its_log_breaks_off_when_it_is_there_and_not_when_it_is_wound_back():
    clock = _Clock()
    feed = Feed(RecordedRun(failing_log(), clock=clock), clock)
    feed._thread = threading.current_thread()
    seen, _ = _watch(feed)
    clock.t = feed.source.length + 1
    feed.step()
    feed.source.play(at=feed.source.length - 0.1)
    feed.step()
    pictures = [merged(full["picture"], delta["patch"]) for _, full, delta in seen]
    assert [picture["head"]["status"] for picture in pictures[1:]] == ["unknown", "paused"]
    assert [bool(picture.get("broken")) for picture in pictures] == [False, True, False]
    assert feed.whole()[0].status == "unknown", "as a saved notebook shows it"


def test_pages_fetch_nothing_and_write_no_markup():
    for view in assets.NAMES:
        text = assets.esm(view)
        own = text.replace("http://www.w3.org/2000/svg", "")
        assert "http" not in own and "import " not in own and "innerHTML" not in own and "eval(" not in own, view
        assert text.rstrip().endswith("export default { render };"), view


def test_the_run_that_the_benchmark_makes_up_is_a_source_like_the_others() -> None:
    clock = [0.0]
    feed = Feed(MadeUpRun(8, clock=lambda: clock[0]))
    feed.still()
    clock[0] = 3.0
    scene, now = feed.still()
    assert now == 3.0 and scene.state.step == 3 and all(scene.picture(view, now) for view in VIEWS)
    assert list(feed.source.all()) == list(feed.source.entries()) and feed.source.lost == ""
