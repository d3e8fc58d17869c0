"""The node agent's signals: what is hit, what is said when nothing is, and that nobody gets a successor while he lives."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.config import Deadlines
from robustrl.errors import RobustRLError, WaitTimeout
from robustrl.runtime import node_agent
from robustrl.runtime.node_agent import NodeAgent
from robustrl.runtime.processes import ProcessId, read_start_ticks
from robustrl.runtime.sensors import _last_lines


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def agent(process: subprocess.Popen[bytes], run_dir: str = "/nowhere") -> NodeAgent:
    """Without a host or a cluster; it watches ``process`` as rollout-0."""
    made = NodeAgent.__new__(NodeAgent)
    spec: Any = SimpleNamespace(role="node_agent-0", run_dir=run_dir)
    made.spec, made.log, made.deadlines = spec, logging.getLogger("test"), Deadlines(call=0.4)
    made._processes = {("rollout-0", 1): ProcessId(process.pid, read_start_ticks(process.pid))}
    return made


def of(process: subprocess.Popen[bytes]) -> ProcessId:
    return ProcessId(process.pid, read_start_ticks(process.pid))


def test_a_signal_that_hits_nothing_says_so(victim: subprocess.Popen[bytes]) -> None:
    here = agent(victim)
    with pytest.raises(RobustRLError, match=r"rollout-0 incarnation 2 is not watched by node_agent-0 yet"):
        asyncio.run(here.signal("rollout-0", 2, "kill", 0.0))
    assert asyncio.run(here.signal("rollout-0", 1, "kill", 0.0)) == victim.pid
    assert victim.wait(5) == -signal.SIGKILL
    with pytest.raises(RobustRLError, match=rf"rollout-0 incarnation 1 \(pid {victim.pid}\) has ended already: nothing was hit"):
        asyncio.run(here.signal("rollout-0", 1, "kill", 0.0))


def test_it_signals_itself_after_its_answer(victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hit: list[tuple[int, int]] = []
    monkeypatch.setattr(node_agent.os, "kill", lambda *what: hit.append(what))

    async def scenario() -> None:
        assert await agent(victim).signal("node_agent-0", 1, "kill", 0.0) == os.getpid()
        assert not hit
        await asyncio.sleep(0.5)

    asyncio.run(scenario())
    assert hit == [(os.getpid(), signal.SIGKILL)]


def test_a_kill_needs_no_evidence_but_a_death(victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(agent(victim).kill("rollout-0", 1, *of(victim)))  # its evidence cannot be written: there is no run directory
    assert victim.poll() is not None or victim.wait(5) == -signal.SIGKILL
    monkeypatch.setattr(node_agent, "wait_exit", lambda process, timeout: time.sleep(timeout))
    with pytest.raises(WaitTimeout, match="not dead 0.2 s after SIGKILL"):
        asyncio.run(agent(another := subprocess.Popen(["true"])).kill("rollout-0", 1, *of(another)))


def test_a_later_life_kills_whom_it_does_not_watch_yet(victim: subprocess.Popen[bytes]) -> None:
    """The agent hung with a role of its node: its next life is asked for the role's end before it is told whom to watch."""
    here = agent(victim)
    here._processes.clear()
    asyncio.run(here.kill("rollout-0", 1, *of(victim)))
    assert victim.wait(5) == -signal.SIGKILL


def test_it_can_be_called_before_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that starts beside a later life of the agent has it watched as soon as the agent's process is there."""
    monkeypatch.setattr(node_agent.Role, "__init__", lambda self, spec: setattr(self, "spec", spec))
    monkeypatch.setattr(NodeAgent, "emit", lambda self, event: None)
    spec: Any = SimpleNamespace(temp_dir=str(tmp_path / "a" / "temp"), shm_dir=str(tmp_path / "shm"))
    made = NodeAgent(spec)
    made.page = SimpleNamespace(update=lambda **_: None)  # type: ignore[assignment]
    try:
        asyncio.run(made.watch("rollout-0", 1, os.getpid(), "no page", ""))
        assert made._processes["rollout-0", 1].pid == os.getpid()
    finally:
        made._sensors.close()


def test_the_last_lines_of_a_log_have_no_colours(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\x1b[36mray::Role.invoke()\x1b[39m (pid=7)\nlast\n")
    assert _last_lines(str(tmp_path / "log")) == ["ray::Role.invoke() (pid=7)", "last"]
