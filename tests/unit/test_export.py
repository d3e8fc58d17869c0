"""The trace for Perfetto: well-formed, and it shows phases, faults and the stages of recoveries where they were."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from made_log import made_log
from story import Story

from robustrl import cli
from robustrl.core import events as ev
from robustrl.export import perfetto


def story() -> Story:
    story = Story()
    story.commit(100.5, 0)
    story.sample(102.0, "trainer-0", "train", 1, phase_age=0.5)
    story.sample(103.0, "trainer-0", "train", 2, phase_age=1.5)
    story.sample(104.0, "trainer-0", "waiting_batch", 2)
    story.commit(104.0, 1)
    story.injects(105.0, "trainer-0", fault=3)
    story.exits(105.5, "trainer-0")
    story.restart(105.5, "trainer-0")
    story.starts(106.0, "trainer-0")
    story.ready(108.0, "trainer-0", healthy=109.0)
    story.at(110.0, ev.NodeLost(node="node-7", reason="so"))
    return story


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "Xi":
            found[names[event["pid"], event["tid"]]].append(event)
    return found


def test_phases_are_slices_of_their_role() -> None:
    slices = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in tracks(perfetto(story().entries))["trainer-0"] if e["ph"] == "X"]
    assert slices == [
        ("starting", 0.0, 0.0),
        ("ready", 0.0, 1.5),
        ("train", 1.5, 2.5),
        ("waiting_batch", 4.0, 1.5),
        ("starting", 6.0, 2.0),
        ("ready", 8.0, 2.0),
    ]


def test_faults_and_recoveries_are_where_they_were() -> None:
    found = tracks(perfetto(story().entries))
    (mark,) = [e for e in found["trainer-0"] if e["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]["proof"]) == ("fault 3", 5e6, {"signal": "SIGKILL"})
    stages = {e["name"]: (e["ts"] / 1e6, e["dur"] / 1e6) for e in found["trainer-0: recoveries"]}
    assert stages == {"recovery 1": (5.0, 4.0), "detect": (5.0, 0.5), "restart": (5.5, 2.5), "reconnect": (8.0, 1.0)}
    assert [e["name"] for e in found["optimizer steps"]] == ["step 1"] and [e["name"] for e in found["events"]] == ["node-7 lost"]


@pytest.mark.parametrize("entries", [[], made_log(steps=3), made_log(status="failed"), story().entries])
def test_slices_of_a_track_nest(entries: list[ev.Entry]) -> None:
    trace = json.loads(json.dumps(perfetto(entries)))
    for events in tracks(trace).values():
        open_until: list[float] = []
        for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert event["dur"] >= 0 and (not open_until or end <= open_until[-1] + 0.2), event
            open_until.append(end)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join(ev.encoder.encode(entry) + b"\n" for entry in made_log()))
    assert cli.main(["export", str(tmp_path), "--perfetto", str(tmp_path / "trace.json")]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert cli.main(["export", str(tmp_path), "--perfetto", str(tmp_path / "missing" / "trace.json")]) == 1
    (tmp_path / "trace.json").unlink()
    assert cli.main(["export", str(tmp_path / "missing"), "--perfetto", str(tmp_path / "trace.json")]) == 2
    for empty in (b"", b'{"seq":1'):
        log.write_bytes(empty)
        capsys.readouterr()
        assert cli.main(["export", str(tmp_path), "--perfetto", str(tmp_path / "trace.json")]) == 1
        assert capsys.readouterr().err == f"robustrl: {log}: holds no entries, so there is nothing to show\n"
    assert not (tmp_path / "trace.json").exists()
