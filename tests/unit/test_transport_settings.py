"""UCX's settings are made in one place, before ucxx is imported, and the user's own win."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from robustrl.errors import ConfigError
from robustrl.transport import settings


def in_fresh_process(code: str, **environment: str) -> dict:
    """What ``code`` puts into ``out``, run where ucxx is not imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    script = f"import json, os, sys\nfrom robustrl.transport import settings\nout = {{}}\n{code}\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", script], env=clean | environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_unknown_transport() -> None:
    with pytest.raises(ConfigError, match="transport = 'rdma': must be one of 'shm' .*'tcp', 'auto'"):
        settings.apply("rdma")


def test_apply_sets_what_the_transport_needs_and_can_change_its_mind_before_the_import() -> None:
    out = in_fresh_process("""
for name in ("shm", "tcp", "auto"):
    settings.apply(name)
    out[name] = [settings.in_use(), settings.between(False), os.environ.get("UCX_POSIX_ERROR_HANDLING")]
out["imported"] = "ucxx" in sys.modules
""")
    assert out == {"shm": ["shm", "tcp", "y"], "tcp": ["tcp", "tcp", None], "auto": ["auto", "auto", None], "imported": False}


def test_the_users_variables_win() -> None:
    out = in_fresh_process("settings.apply('shm', shm_dir='/dev/shm/x')\nout = dict(os.environ)", UCX_TLS="tcp", UCX_POSIX_DIR="/mine")
    assert out["UCX_TLS"] == "tcp" and out["UCX_POSIX_DIR"] == "/mine" and out["UCX_POSIX_ERROR_HANDLING"] == "y"


def test_ucx_without_a_cache_of_registrations_does_not_start() -> None:
    """It would crash in a source whose puller dies."""
    pytest.importorskip("ucxx")
    out = in_fresh_process("""
import threading
settings.apply("tcp")
from robustrl.transport import lane
try:
    lane.get()
except RuntimeError as error:
    out["error"] = str(error)
out["threads"] = [thread.name for thread in threading.enumerate()]
""", UCX_MEM_MMAP_HOOK_MODE="none")
    assert "robustrl-ucx" not in out["threads"], "each try would leave one"
    assert "needs its cache of registrations (UCX_RCACHE_ENABLE=y)" in out["error"] and "UCX_MEM_MMAP_HOOK_MODE" in out["error"]


@pytest.mark.parametrize("value", ["n", "No", "try", "Y"])
def test_a_user_who_switches_the_cache_of_registrations_off_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Else the source of a puller that dies crashes, over tcp as well: seen with UCX 1.21."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("UCX", "ROBUSTRL_UCX"))}
    monkeypatch.setattr(os, "environ", clean | {"UCX_RCACHE_ENABLE": value})
    monkeypatch.setattr(settings, "_applied", settings._COMMON | settings._SETTINGS["tcp"])  # should another test have imported ucxx
    if value == "Y":
        settings.apply("tcp")
        return
    with pytest.raises(ConfigError, match=f"UCX_RCACHE_ENABLE = '{value}': must be y, or not set"):
        settings.apply("tcp")


@pytest.mark.parametrize(("listed", "name", "far"), [("cma,tcp", "shm", "tcp"), ("sm,tcp", "shm", "tcp"), ("rc,tcp", "rc", "rc"),
                                                     ("^posix", "auto", "auto"), ("all", "auto", "auto"), ("", "auto", "auto")])
def test_name_of_the_transport(monkeypatch: pytest.MonkeyPatch, listed: str, name: str, far: str) -> None:
    monkeypatch.setenv("UCX_TLS", listed)
    assert (settings.in_use(), settings.between(False)) == (name, far)


def test_what_a_parent_applied_is_not_the_users() -> None:
    out = in_fresh_process("""
import subprocess
settings.apply("shm")
child = "from robustrl.transport import settings; settings.apply('tcp'); print(settings.in_use())"
out["child"] = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=30).stdout.strip()
""")
    assert out == {"child": "tcp"}


def test_other_settings_after_the_import_are_refused() -> None:
    pytest.importorskip("ucxx")
    out = in_fresh_process("""
settings.apply("tcp")
import ucxx
settings.apply("tcp")
try:
    settings.apply("shm")
except RuntimeError as error:
    out["error"] = str(error)
""")
    assert "too late: ucxx is imported already" in out["error"]


def test_describe_without_ucxx_says_how_to_install_it() -> None:
    out = in_fresh_process("sys.modules['ucxx'] = None\nout = settings.describe()")
    assert out["installed"] is False and "pip install 'robustrl[job]'" in out["hint"]


def test_describe() -> None:
    pytest.importorskip("ucxx")
    out = in_fresh_process("settings.apply('tcp')\nout = settings.describe()")
    assert out["installed"] and out["in_use"] == "tcp" and out["library"].endswith(".so") or ".so." in out["library"]
    assert isinstance(out["rdma"], bool) and isinstance(out["cuda"], bool) and out["ucx"][0].isdigit()
    assert out["settings"]["UCX_TLS"] == "tcp"


def test_importing_the_package_imports_nothing_heavy() -> None:
    out = in_fresh_process("""
import robustrl.core.weights, robustrl.transport.manifest, robustrl.transport.wire
out["heavy"] = [name for name in ("ucxx", "torch", "ray", "vllm") if name in sys.modules]
""")
    assert out["heavy"] == []


def test_ucx_listens_on_the_interface_of_the_host_only() -> None:
    pytest.importorskip("ucxx")
    out = in_fresh_process("""
import psutil
settings.apply("tcp", host="127.0.0.1")
from robustrl.transport import lane
lane.get()
out["listening"] = sorted({one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"})
""")
    assert out == {"listening": ["127.0.0.1"]}


def test_host_that_is_not_of_this_machine() -> None:
    with pytest.raises(ConfigError, match="host = '203.0.113.77': must be an address of this machine: .*127.0.0.1"):
        settings.apply("tcp", host="203.0.113.77")
