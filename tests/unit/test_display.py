"""Static pictures of a job: everything shown, every word beside its colour, nothing unescaped, nothing to fetch."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

import pytest
from made_log import Writer, made_log

from robustrl import display
from robustrl.core import events as ev
from robustrl.core.roles import RoleState
from robustrl.core.run_state import RunState


def _running() -> RunState:
    """A job that has done its three steps and has not ended yet."""
    log = made_log(drop=False)
    return RunState.of(log[: next(i for i, entry in enumerate(log) if isinstance(entry.event, ev.EndDecided))])


class _Watched:
    """A job as `display.watch` sees it, which ends after a few looks."""

    status = "running"

    def __init__(self, looks: int) -> None:
        self.state, self.waits, self._looks = _running(), [], looks

    def follow(self, seconds):
        self.waits.append(seconds)
        return len(self.waits) >= self._looks

    def read(self, draw):
        return draw(self.state)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Balance(HTMLParser):
    """Fails on tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _parse(text: str) -> _Balance:
    parser = _Balance()
    parser.feed(text)
    parser.close()
    assert not parser.open
    return parser


def test_html_shows_every_role_with_its_words():
    state = _running()
    text = display.html_job(state, "running", "", "/runs/x")
    parser = _parse(text)
    assert {"table", "svg", "polyline"} <= parser.seen and not {"script", "link", "style", "img"} & parser.seen
    assert not re.search(r"https?:|url\(", text)
    for role, view in state.roles.items():
        row = next(part for part in text.split("<tr") if f">{role}<" in part)
        assert f"{view.state}</td>" in row and f">{view.pid}<" in row
    assert "optimizer step 3 of 3" in text and "held-out prompts" in text and "12 consumed" in text


def test_a_stopped_role_shows_no_phase_and_no_open_work():
    state = RunState.of(made_log(drop=False))
    rows = {view.role: cells for view, cells in display.role_rows(state)}
    assert {cells["state"] for cells in rows.values()} == {"stopped"}
    assert {cells["phase"] for cells in rows.values()} == {"-"}
    assert rows["rollout-0"]["progress"] == f"{state.roles['rollout-0'].progress} tokens"
    assert rows["trainer-0"]["progress"] == f"step {state.roles['trainer-0'].step}"


def test_a_failed_role_shows_the_phase_it_failed_in():
    state = _running()
    view = state.roles["rollout-0"]
    view.state, view.phase = RoleState.FAILED, "decode"
    assert {view.role: cells for view, cells in display.role_rows(state)}["rollout-0"]["phase"] == "decode"


def test_a_process_that_has_ended_is_not_shown_as_one_to_look_for():
    state = _running()
    state.roles["rollout-0"].exited = "SIGKILL"
    cells = {view.role: cells["pid"] for view, cells in display.role_rows(state)}
    assert cells["rollout-0"] == f"{state.roles['rollout-0'].pid}, ended" and cells["trainer-0"] == str(state.roles["trainer-0"].pid)


def test_html_before_anything_has_happened():
    text = display.html_job(RunState(), "starting", "", "/runs/x")
    _parse(text)
    assert "no role has started yet" in text and "svg" not in text


def test_what_comes_from_a_run_is_escaped():
    log = Writer()
    evil = "<script>alert(1)</script>"
    log.write("host", ev.RunStarted(schema=1, run="r", name=evil, wall=0.0, host_pid=1, config={"steps": 1}, machine={}))
    log.write("host", ev.NodeStarted(node=evil, ray_node_id="", ip="", kinds=[]))
    log.write("host", ev.RoleStarted(role="rollout-0", incarnation=1, node=evil, pid=1, start_ticks=1))
    log.write("host", ev.WarningRaised(text=evil))
    text = display.html_job(RunState.of(log.entries), "failed", evil, evil)
    assert "<script" not in text and text.count("&lt;script&gt;") == 5
    table = display.html_table([{evil: evil}], 1)
    assert "<script" not in table and table.count("&lt;script&gt;") == 2


def test_each_state_has_a_colour_of_its_own():
    assert len(set(display.STATE_COLOURS.values())) == len(display.STATE_COLOURS)
    assert set(display.STATE_COLOURS) == set(display.RoleState)


def test_a_terminal_of_80_columns_gets_a_live_table_at_most_four_times_a_second(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    job, terminal = _Watched(looks=3), _Terminal()
    pauses: list[float] = []
    monkeypatch.setattr(display.time, "sleep", pauses.append)
    display.watch(job, terminal)
    assert job.waits == [0.25] * 3
    assert len(pauses) == 1 and 0.2 < pauses[0] <= 0.25, "the last one too, and once: it came when the job ended"
    assert terminal.getvalue().count("progress") == 3
    lines = terminal.getvalue().splitlines()
    assert any(all(name in line for name in ("node", "role", "state", "phase", "version", "progress")) for line in lines)
    for role, view in job.state.roles.items():
        assert any(role in line and view.state in line and (view.phase or "-") in line for line in lines), role


@pytest.mark.parametrize("hide_rich", [False, True])
def test_elsewhere_a_line_every_few_seconds(monkeypatch, hide_rich):
    job, stream = _Watched(looks=2), io.StringIO()
    if hide_rich:
        monkeypatch.setitem(__import__("sys").modules, "rich.live", None)
        stream = _Terminal()
    display.watch(job, stream)
    assert job.waits == [5.0, 5.0]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and "running, step 3/3" in lines[0] and "rollout-1 healthy/" in lines[0] and "\x1b" not in lines[0]


def test_sparklines_survive_flat_and_short_series():
    assert display._sparkline([]) == display._sparkline([1.0]) == ""
    assert "nan" not in display._sparkline([0.5, 0.5, 0.5])
