"""The host where its run directory's disk is full."""

from __future__ import annotations

import asyncio
import errno
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.core.guard import Guard
from robustrl.core.lifecycle import FAILED
from robustrl.core.placement import NodeSpec
from robustrl.core.roles import RoleId
from robustrl.core.run_state import RunState
from robustrl.core.thresholds import Thresholds
from robustrl.errors import JobFailed, PeerDied, WaitTimeout
from robustrl.runtime import cluster, serving, wire
from robustrl.runtime import lives as lives_module
from robustrl.runtime.event_log import EventLog, LogError, audit_run
from robustrl.runtime.host import Host
from robustrl.runtime.injecting import Injector
from robustrl.runtime.lives import Lives
from robustrl.runtime.restarting import Restarting
from robustrl.runtime.serving import Outbox, Serving


class _FullDisk(EventLog):
    """Writes only while nothing fills the disk, or once the reserve is gone."""

    full = False

    def _write(self, data: bytes) -> None:
        if self.full and (self.path.parent / "reserve").exists():
            raise LogError("no room") from OSError(errno.ENOSPC, "No space left on device")
        super()._write(data)


def _host(run_dir: Path) -> Host:
    host = Host.__new__(Host)
    host.run_dir, host._reserve, host.config, host.state = run_dir, run_dir / "reserve", JobConfig(profile="class"), RunState()
    host.outboxes, host._tasks, host.closing, host._turned = [], set(), False, time.monotonic()
    host.lives, host.guard = Lives(host), Guard(Thresholds.lab())
    host.restarting, host.serving, host.injector = Restarting(host), Serving(host), Injector(host)
    host.event_log = _FullDisk(run_dir / "events.jsonl", time.monotonic)
    return host


@pytest.mark.parametrize("writer", ["host", "role"])
def test_a_full_disk_ends_the_job_with_a_closing_record_that_says_so(tmp_path: Path, writer: str) -> None:
    async def scenario() -> None:
        host = _host(tmp_path)
        host.end = asyncio.get_running_loop().create_future()
        host._keep_room()
        config = msgspec.to_builtins(host.config)
        run = {"run": "r", "name": host.config.name, "config": config, "machine": defaultdict(str)}
        host.record(ev.RunStarted(schema=ev.SCHEMA, wall=0.0, host_pid=1, **run))
        _FullDisk.full = True
        with pytest.raises(LogError, match="no room"):
            if writer == "host":
                host.record(ev.WarningRaised(text="x"))
            else:
                host.serving.take_events(msgspec.msgpack.encode([ev.Emitted("rollout-0", 1, 1, 0.5, ev.WarningRaised(text="x"))]))
        verdict = await host.end
        assert (verdict.status, verdict.reason) == (FAILED, "no room")
        host._close_log(verdict)

    try:
        asyncio.run(scenario())
    finally:
        _FullDisk.full = False
    assert audit_run(tmp_path) == []
    assert not (tmp_path / "reserve").exists() and (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("model, said", [("no-such-owner/model", 1), ("tiny", 0)])
def test_a_start_that_waits_for_the_hub_says_so(tmp_path: Path, model: str, said: int) -> None:
    async def scenario() -> list[str]:
        host = _host(tmp_path)
        host.config = msgspec.structs.replace(host.config, model=model)
        host.end = asyncio.get_running_loop().create_future()
        host._say_slow_checks()
        return [text for _, text in host.state.warnings]

    assert [f"waits for the model {model!r}" in text for text in asyncio.run(scenario())] == [True] * said


@pytest.mark.parametrize("error, why", [(TimeoutError("timed out"), "no answer within deadlines.cluster_start = 5 s"),
                                        (ConnectionRefusedError(111, "Connection refused"), r"\[Errno 111\] Connection refused")])
def test_an_address_where_nobody_answers_ends_the_start_within_its_deadline(
        monkeypatch: pytest.MonkeyPatch, error: OSError, why: str) -> None:
    asked = []

    def connect(place: tuple[str, int], timeout: float) -> None:
        asked.append((place, timeout))
        raise error

    monkeypatch.setattr(cluster.socket, "create_connection", connect)
    with pytest.raises(JobFailed, match=f"address = '10.255.255.1:6379': no Ray cluster could be joined there: {why}"):
        cluster._knock("10.255.255.1:6379", 5.0)
    assert asked == [(("10.255.255.1", 6379), 5.0)]
    cluster._knock("auto", 5.0)
    cluster._knock("ray://10.255.255.1:10001", 5.0)  # Ray's to say what it is


def test_a_node_whose_next_raylet_is_not_up_yet_is_not_reached() -> None:
    """Its next host has an address already. An error of the search, in a thread, would never come out of it."""
    network: Any = SimpleNamespace(answers=lambda *_: True)
    here = cluster.LocalCluster(Path("/t"), "r", [NodeSpec("node-0"), NodeSpec("node-1")], 1 << 20, "10.0.0.1", network)
    here._raylets = [SimpleNamespace(node_ip_address="10.0.0.2", node_manager_port=7)]
    here._ips = {"node-1": "10.0.0.2"}
    assert here.unreachable("node-1", 1.0) == ""
    here._ips = {"node-1": "10.0.0.3"}
    assert here.unreachable("node-1", 1.0) == "no raylet is up at 10.0.0.3 yet"


def test_a_run_directory_that_is_removed_is_said_once_and_the_job_goes_on_from_memory(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()

    async def scenario() -> list[ev.Entry]:
        host = _host(folder)
        host.end = asyncio.get_running_loop().create_future()
        host.record(ev.WarningRaised(text="before"))
        shutil.rmtree(folder)
        for number in (1, 2):
            host.serving.take_events(msgspec.msgpack.encode([ev.Emitted("rollout-0", 1, number, 0.5, ev.WarningRaised(text="after"))]))
        lines: list[bytes] = []
        server = await wire.listen(f"unix:{tmp_path}/socket", host.serving.serve)
        client = wire.HostClient(f"unix:{tmp_path}/socket")
        client.subscribe(lines.extend)  # one who joins late
        while len(lines) < 4:
            await asyncio.sleep(0.01)
        client.close()
        server.close()
        host.decide_end(FAILED, "enough")
        host._close_log(host.end.result())
        return [ev.entry_decoder.decode(line) for line in lines]

    told = [entry.event.text for entry in asyncio.run(asyncio.wait_for(scenario(), 10))]
    assert [told[0], told[1], told[3]] == ["before", "after", "after"]
    assert told[2] == f"{folder}/events.jsonl was removed while the job runs: it goes on from memory, and this log is lost once it ends"


def test_whatever_the_roles_ask_for_is_a_verb_of_the_host() -> None:
    sources = Path(serving.__file__).parent.glob("*.py")
    asked = {verb for path in sources for verb in re.findall(r'ask_host\(\s*"(\w+)"', path.read_text())}
    assert asked and asked <= set(Serving._VERBS)


@pytest.mark.parametrize(("ages", "urgent"),
                         [({}, False), ({"phase_age": 0.29}, False), ({"phase_age": 0.3}, True), ({"loop_age": 0.3}, True)])
def test_a_sample_is_urgent_once_a_limit_may_have_passed(ages: dict[str, float], urgent: bool) -> None:
    names = "progress", "pending", "step", "version", "cpu", "phase_age", "active_age", "progress_age", "loop_age", "lag"
    sample = ev.RoleSample(role="trainer-0", incarnation=1, phase="train", process="S", **dict.fromkeys(names, 0) | ages)

    async def scenario() -> None:
        outbox = Outbox()
        outbox.put(b"1", sample)
        reader = asyncio.ensure_future(outbox.get())
        for _ in range(5):
            await asyncio.sleep(0)
        assert reader.done() == urgent
        assert await reader == [b"1"]

    asyncio.run(scenario())


def test_what_nobody_has_to_act_on_waits_for_something_urgent_but_not_for_long() -> None:
    started = ev.TrajectoriesStarted(ids=[1], batch=1, group=0, rollout="rollout-0", version=0)

    async def scenario() -> None:
        outbox, loop = Outbox(), asyncio.get_running_loop()
        outbox.put(b"1", started)
        reader = asyncio.ensure_future(outbox.get())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reader.done()
        outbox.put(b"2", ev.Tick())
        assert await reader == [b"1", b"2"]
        began = loop.time()
        outbox.put(b"3", started)
        assert await asyncio.wait_for(outbox.get(), 5.0) == [b"3"] and loop.time() - began >= 0.04
        outbox.put(b"4", started)
        outbox.put(None)
        assert await outbox.get() == [b"4", None] and outbox.take() == []

    asyncio.run(scenario())


@pytest.mark.parametrize("history", [0, 2500])
def test_what_a_call_did_has_been_read_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: int) -> None:
    """A reader of the log that also calls: the answer comes after every line written before it, with a long history as well."""

    async def note(serving: Serving, text: str) -> int:
        serving._host.record(ev.WarningRaised(text=text))
        return serving._host.event_log.seq

    async def close(serving: Serving) -> str:
        """As `Host._finish` does: the last line, then none; what is still to be answered is answered."""
        for outbox in serving._host.outboxes:
            outbox.put(None)
        return "closed"

    monkeypatch.setitem(Serving._VERBS, "note", note)
    monkeypatch.setitem(Serving._VERBS, "close", close)

    def talk(address: str) -> None:
        seen: list[int] = []
        client = wire.HostClient(address)
        client.subscribe(lambda lines: seen.extend(ev.entry_decoder.decode(line).seq for line in lines))
        for number in range(20):
            seq = client.call("note", 5.0, text=f"note {number}")
            assert seen == list(range(1, seq + 1))
        assert client.call("close", 5.0) == "closed"
        assert wire.HostClient(address).call("note", 5.0, text="of one who does not read") == seq + 1
        client.close()

    async def scenario() -> None:
        host = _host(tmp_path)
        host.spawn = asyncio.ensure_future  # type: ignore[method-assign, assignment]
        for number in range(history):
            host.record(ev.WarningRaised(text=f"line {number}"))
        server = await wire.listen(f"unix:{tmp_path}/socket", host.serving.serve)
        await asyncio.wait_for(asyncio.to_thread(talk, f"unix:{tmp_path}/socket"), 20)
        server.close()

    asyncio.run(scenario())


class _Death(Exception):
    """What Ray says of one."""


@pytest.mark.parametrize("runner", ["lives", "hangs first", "died", "was replaced"])
def test_a_runner_that_lives_and_lost_a_trainer_goes_on_once_that_is_back(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    """The trainer stayed dead for longer than the runner waits, and nobody else would ask for the rest of the steps."""
    monkeypatch.setattr(lives_module, "_actor_error", lambda: _Death)
    monkeypatch.setattr(lives_module, "_BREATH", 0.0)
    calls = list[str]()
    answers = [WaitTimeout("identity()")] if runner == "hangs first" else []

    async def run(method: str, *, deadline: float) -> None:
        calls.append(method)
        if len(calls) == 1:
            if runner == "was replaced":
                host.lives.incarnations["task_runner"] = 2
            raise PeerDied("trainer-0 died during train()")

    async def identity() -> None:
        if answers:
            raise answers.pop()
        if runner == "died":
            raise _Death

    async def scenario() -> list[str]:
        trainer.ready, trainer.exited = True, "SIGKILL"
        training = asyncio.create_task(host.run_training())
        await asyncio.sleep(0.05)
        assert calls == ["run"], "nobody could train"
        trainer.incarnation, host.lives.incarnations["trainer-0"], trainer.exited = 2, 2, ""
        await host.lives.tell_changed()
        await asyncio.wait_for(training, 5)
        return [event.text for event in recorded]

    host, recorded = _host(tmp_path), list[Any]()
    host.record = recorded.append  # type: ignore[method-assign]
    trainer = SimpleNamespace(role="trainer-0", incarnation=1)
    host.state.roles["trainer-0"] = trainer  # type: ignore[assignment]
    host.lives.places = {RoleId.parse("trainer-0"): "node-0"}
    host.lives.incarnations = {"trainer-0": 1, "task_runner": 1}
    host.lives.actors["task_runner"] = SimpleNamespace(identity=SimpleNamespace(remote=identity))
    host.lives.peer = lambda role: SimpleNamespace(call=run)  # type: ignore[method-assign,assignment,return-value]
    told = asyncio.run(scenario())
    if runner in ("lives", "hangs first"):
        assert calls == ["run", "run"] and told == ["the training waits: trainer-0 died during train()"]
    else:
        assert calls == ["run"] and told == [], "its next life is asked by whoever makes it"
