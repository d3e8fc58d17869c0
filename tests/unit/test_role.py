"""Calls to a peer whose death nobody has noticed yet, and where a role keeps its temporary files."""

from __future__ import annotations

import asyncio
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest

from robustrl.errors import ConfigError, PeerDied
from robustrl.runtime import role as role_module
from robustrl.runtime.role import LifeEnded, Peer, Role


class _Directory:
    """Its role's first life is dead; the second can be called once somebody waited for it."""

    def __init__(self) -> None:
        self.alive = False

    async def present(self, role: str) -> tuple[int, Any]:
        if not self.alive:
            raise LifeEnded(role, 1)

        class Method:
            @staticmethod
            def remote(*args: Any) -> Any:
                return asyncio.sleep(0, ("answer", *args))

        return 2, type("Handle", (), {"invoke": Method})

    async def successor(self, role: str, incarnation: int, deadline: float) -> None:
        assert (role, incarnation) == ("node_agent-0", 1) and deadline > 0
        self.alive = True


def test_a_call_to_a_life_that_has_ended_is_a_peers_death_or_goes_to_the_next_life() -> None:
    pytest.importorskip("ray")
    peer = Peer(_Directory(), "node_agent-0")
    with pytest.raises(PeerDied, match="node_agent-0 incarnation 1 has died"):
        asyncio.run(peer.call("ask", deadline=5.0))
    assert asyncio.run(peer.call("ask", 1, deadline=5.0, again=True)) == ("answer", "node_agent-0", 2, "ask", 1)


def test_an_actor_that_ray_does_not_know_any_more_is_a_peers_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError would end the role that asked: one death after the other."""
    ray = pytest.importorskip("ray")

    def get_actor(name: str, namespace: str) -> None:
        raise ValueError("Failed to look up actor with name")

    async def ask_host(*_: Any, **__: Any) -> tuple[int, str]:
        return 3, "rollout-0.3"

    role: Any = Role.__new__(Role)
    role._present, role.ask_host = {}, ask_host
    role.deadlines, role.spec = type("D", (), {"role_start": 1.0}), type("S", (), {"run": "r"})
    monkeypatch.setattr(ray, "get_actor", get_actor)
    with pytest.raises(PeerDied, match="rollout-0 incarnation 3 has died"):
        asyncio.run(role.present("rollout-0"))


@pytest.mark.parametrize("raised", [ConfigError("path", "/proc/x", "must be a folder"), OSError(28, "No space left on device")])
def test_an_error_of_a_peer_arrives_as_it_was_raised_and_without_colours(raised: Exception) -> None:
    """Ray's own text for it is a traceback with the colours of a terminal."""
    exceptions = pytest.importorskip("ray.exceptions")
    task = exceptions.RayTaskError("invoke", "Traceback (most recent call last):\n\x1b[36mray\x1b[39m", raised, "worker", 7, "127.0.0.1")
    across = pickle.loads(pickle.dumps(task)).as_instanceof_cause()
    assert "\x1b[" in str(across)

    async def failing() -> None:
        raise across

    class Directory:
        async def present(self, role: str) -> tuple[int, Any]:
            return 1, type("Handle", (), {"invoke": type("Method", (), {"remote": staticmethod(lambda *_: failing())})})

    with pytest.raises(type(raised)) as caught:
        asyncio.run(Peer(Directory(), "trainer-0").call("save_pretrained", deadline=5.0))  # type: ignore[arg-type]
    assert type(caught.value) is type(raised) and str(caught.value) == str(raised)
    assert getattr(caught.value, "__notes__", []) == ([] if isinstance(raised, ConfigError) else ["raised by trainer-0.save_pretrained()"])


def test_temporary_files_go_with_the_run_and_the_cache_of_compiled_code_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a user without a name, as in a container, and for the second role of a process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "everybody"))
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("getpass.getuser", None)
    for folder in ("one", "two"):
        role_module._keep_temporary_files_in(str(tmp_path / folder))
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / folder)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "everybody" / f"torchinductor_{os.getuid()}")
