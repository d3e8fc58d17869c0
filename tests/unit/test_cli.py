"""The command line as a user meets it: what it prints, where, and its exit status. Jobs are played by a fake host."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_log import forge, made_log

from robustrl import cli, doctor, launching
from robustrl.config import JobConfig, _fields, check, load_config, make_config
from robustrl.core import events as ev
from robustrl.runtime import registry
from robustrl.settings_text import settings_text

_FAKE = str(Path(__file__).with_name("fake_host.py"))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="rr-"))
    monkeypatch.setenv(registry.TMP_VARIABLE, str(folder / "top"))  # not made again by a host that ends late
    monkeypatch.setattr(launching, "_HOST", (_FAKE,))
    monkeypatch.chdir(tmp_path)
    yield folder
    for entry in registry.live_jobs():
        os.kill(entry.host_pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)  # a host that ends late removes its own part of it meanwhile


def test_demo_ends_with_one_json_line_and_its_table_on_stderr(monkeypatch, capsys):
    monkeypatch.setenv("FAKE_HOST", "play")
    assert cli.main(["demo", "--profile", "class", "--steps", "4"]) == 0
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert out.count("\n") == 1 and summary["status"] == "done" and summary["steps"] == 4
    assert "4 optimizer steps of arithmetic" in err and "done, step 4/4" in err
    assert registry.live_jobs() == []
    assert cli.main(["audit", "runs/latest"]) == 0


def test_demo_json_prints_nothing_else(monkeypatch, capsys):
    monkeypatch.setenv("FAKE_HOST", "play")
    assert cli.main(["demo", "--profile", "class", "--steps", "2", "--seed", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "done" and not err


def test_a_job_that_fails_gives_its_reason_and_status_1(monkeypatch, capsys):
    monkeypatch.setenv("FAKE_HOST", "fail")
    assert cli.main(["demo", "--profile", "class"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "failed" and "robustrl: job 'demo' failed: rollout-0 died" in err


def test_ctrl_c_ends_the_job(tmp_path, home):
    code = (f"import sys; from robustrl import cli, launching; launching._HOST = ({_FAKE!r},); "
            "sys.exit(cli.main(['demo', '--profile', 'class']))")
    demo = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert "Ctrl-C ends the job" in demo.stderr.readline()
    host = registry.find("demo")
    demo.send_signal(signal.SIGINT)
    out, err = demo.communicate(timeout=30)
    assert demo.returncode == 130 and "ending the job" in err and json.loads(out)["status"] == "stopped"
    assert not host.alive


def test_run_takes_a_file_and_names_an_unknown_key(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FAKE_HOST", "play")
    config = tmp_path / "job.toml"
    config.write_text('name = "mine"\nprofile = "class"\nsteps = 2\n')
    assert cli.main(["run", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2
    config.write_text("stebs = 2\n")
    assert cli.main(["run", str(config)]) == 2
    assert capsys.readouterr().err.startswith("robustrl: stebs = 2: there is no such setting; did you mean steps? There are: name, ")


@pytest.mark.parametrize("command", ["run", "audit", "dashboard"])
def test_an_empty_name_is_not_the_working_directory(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, ""])
    assert "must be the name of a file or folder, and is empty" in capsys.readouterr().err


@pytest.mark.parametrize("profile", ["lab", "class"])
def test_settings_are_a_config_file_with_every_default(profile, capsys, tmp_path):
    assert cli.main(["settings", "--profile", profile]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.toml").write_text(text)
    assert load_config(tmp_path / "all.toml") == JobConfig(profile=profile)
    for name in _fields(JobConfig):
        assert re.search(rf"^(# )?\[?{name.rpartition('.')[2]}\b( =| is not set|\])", text, re.MULTILINE), name
    assert 'mode = "isolated"  # observe | isolated | full' in text and "restart everything, the usual baseline." in text
    assert "Seconds after which a wait ends" in text and "Struct" not in text


def test_a_mapping_of_settings_is_written_as_it_is_read(tmp_path):
    config = make_config({"task_options": {"max_tokens": 9, "tool_seconds": 0.5}, "keep_alive": True, "model": 'a"b\\c'})
    (tmp_path / "it.toml").write_text(settings_text(config))
    assert load_config(tmp_path / "it.toml") == config


def test_the_example_configuration_is_accepted():
    config = load_config(Path(__file__).parents[2] / "examples" / "job.toml")
    check(config)
    assert config != JobConfig(profile=config.profile)


def _write(folder: Path, entries: list[ev.Entry]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "events.jsonl").write_bytes(b"".join(ev.encoder.encode(entry) + b"\n" for entry in entries))


def test_audit_names_the_first_violated_rule(tmp_path, capsys):
    log = made_log()
    _write(tmp_path / "good", log)
    assert cli.main(["audit", str(tmp_path / "good")]) == 0
    assert f"{len(log)} entries satisfy all" in capsys.readouterr().out
    _write(tmp_path / "bad", forge(entry for entry in log if not isinstance(entry.event, ev.TrajectoriesConsumed)))
    assert cli.main(["audit", str(tmp_path / "bad" / "events.jsonl")]) == 1
    assert "violates ledger: entry " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert cli.main(["audit", str(tmp_path / "empty")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run"], ["audit"], ["dashboard"], ["export", "--perfetto", "out"]])
def test_a_path_where_nothing_is_is_wrong_usage(command, tmp_path, capsys):
    path = str(tmp_path / "none.toml")
    assert cli.main([*command, path]) == 2
    assert f" = {path!r}: " in capsys.readouterr().err


def test_ps_and_stop(tmp_path, capsys):
    jobs = [launching.launch(name=name, engine="torch", run_dir=str(tmp_path)) for name in ("one", "two", "three")]
    assert cli.main(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[0].startswith(f"one\trun {jobs[0].run}\thost ") and f"owner {os.getpid()}" in lines[0]
    assert cli.main(["stop", "one"]) == 0
    assert capsys.readouterr().out == f"one (run {jobs[0].run}) has ended\n"
    assert [entry.name for entry in registry.live_jobs()] == ["two", "three"]
    assert cli.main(["stop", "one"]) == 2
    assert "no live job has this name on this machine; there are: three, two" in capsys.readouterr().err
    assert cli.main(["stop", "--all"]) == 0
    assert registry.live_jobs() == []
    with pytest.raises(SystemExit) as wrong:
        cli.main(["stop"])
    assert wrong.value.code == 2


def test_bench_dispatches_and_names_what_there_is(monkeypatch, capsys):
    assert cli.main(["bench", "nothing"]) == 2
    assert "NAME = 'nothing': must be one of " in capsys.readouterr().err
    import tests.benchmarks.api as api

    monkeypatch.setattr(api, "main", lambda argv: print("called with", argv) or 0)
    assert cli.main(["bench", "api", "--json", "--rows", "x"]) == 0
    assert capsys.readouterr().out == "called with ['--json', '--rows', 'x']\n"


def test_bench_outside_a_checkout_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "robustrl" / "cli.py"))
    assert cli.main(["bench", "api"]) == 1
    assert "the benchmarks are part of a checkout" in capsys.readouterr().err


def _doctor(monkeypatch, **answers) -> dict[str, doctor.Check]:
    """The checks, with what the processes that import heavy packages would have answered."""
    ucx = {"installed": True, "ucxx": "0.52", "ucx": "1.21", "library": "/lib", "transports": ["posix", "tcp"], "rdma": False}
    ucx |= answers.pop("ucx", {})
    torch = answers.pop("torch", [None, False, 0])
    monkeypatch.setattr(doctor, "_ask", lambda code: torch if "torch" in code else ucx)
    for name, value in answers.items():
        monkeypatch.setattr(doctor.machine, name, lambda value=value: value)
    return {check.name: check for check in doctor.examine()}


def test_doctor_on_a_machine_that_has_all(monkeypatch, capsys):
    found = _doctor(monkeypatch, available_memory=(16 << 30, "free memory of the machine"), shared_memory=(1 << 30, 1 << 30))
    assert found["gpu"] == doctor.Check("gpu", "note", "none", "jobs run on the CPU")
    assert found["rdma"].level == "note" and "conda" in found["rdma"].advice
    assert found["ucx cma"].level == "note" and "twice" in found["ucx cma"].advice
    assert _doctor(monkeypatch, ucx={"transports": ["cma", "posix", "tcp"]})["ucx cma"].level == "ok"
    assert found["memory"].level == found["/dev/shm"].level == found["ray"].level == "ok"
    assert doctor.run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop() == "all that a job needs is here"
    width = max(map(len, found))
    rows = [line for line in lines if not line.startswith(" ")]
    assert [row[8:10 + width] for row in rows] == [f"{name:{width}}  " for name in found] and all(row[10 + width] != " " for row in rows)
    assert doctor.run(as_json=True) == 0
    assert {check["name"] for check in json.loads(capsys.readouterr().out)} == set(found)


def test_doctor_says_what_to_do(monkeypatch, capsys):
    found = _doctor(monkeypatch, available_memory=(5 << 30, "control group /x, limit 5.00 GiB"), shared_memory=(64 << 20, 64 << 20),
                    torch=["12.8", False, 0])
    assert found["memory"].level == "note" and "profile='class' needs 2." in found["memory"].advice and "/x" in found["memory"].found
    assert found["/dev/shm"].level == "note" and "--shm-size=1g" in found["/dev/shm"].advice
    assert found["gpu"].found == "none, although torch is built for CUDA 12.8"
    found = _doctor(monkeypatch, available_memory=(1 << 30, "control group"), shared_memory=(0, 0),
                    ucx={"installed": False, "hint": "pip install it"})
    assert [found[name].level for name in ("memory", "/dev/shm", "ucx")] == ["missing"] * 3
    assert doctor.run() == 1
    assert "missing: ucx, memory, /dev/shm" in capsys.readouterr().out


def test_module_entry_point():
    done = subprocess.run([sys.executable, "-m", "robustrl", "--help"], capture_output=True, text=True, check=True)
    for command in ("demo", "run", "audit", "ps", "stop", "doctor", "bench"):
        assert f"\n    {command} " in done.stdout
