"""How the dashboard is started: in this process by the command line, in one of its own by a notebook. Panel is imported when needed."""

from __future__ import annotations

import errno
import html
import json
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robustrl.core import events as ev
from robustrl.errors import ConfigError, JobFailed, MissingExtra, WaitTimeout
from robustrl.replay.reading import BadRun
from robustrl.runtime.event_log import LogError

from .access import Access, in_url, is_local
from .feed import Feed
from .ghost_files import folder_of, run_dir_of
from .hosts import feed_of
from .sources import FASTEST, RecordedRun, load_entries

if TYPE_CHECKING:
    from robustrl.job import Job

SAMPLE = Path(__file__).parent / "sample" / "demo.jsonl.gz"
"""A recorded run of the class profile, for ``dashboard --demo``."""
_BEFORE = 3.0
"""Seconds before the first fault at which the demo begins: its start-up is slow and shows nothing."""
_GRACE = 5.0
_LAST_PORT = 65535
_ORIGIN = re.compile(r"((?P<host>[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)|\[(?P<ipv6>[0-9A-Fa-f:.]+)\])(:(?P<port>[0-9]{1,5}))?")


def show(*, run: Path | None, job: str | None, demo: bool, speed: float, address: str, port: int, origins: tuple[str, ...],
         until_eof: bool = False, as_json: bool = False) -> None:
    """Serves until it is interrupted, or standard input ends. Raises ConfigError, LogError, MissingExtra."""
    given = {"RUN": run, "--job": job, "--demo": demo or None}
    several = {name: value for name, value in given.items() if value is not None}
    if len(several) > 1:
        name, value = next(iter(several.items()))
        raise ConfigError(name, str(value), f"not together with {' and '.join(list(several)[1:])}: give one of {', '.join(given)}")
    if not 0 < speed <= FASTEST:
        raise ConfigError("speed", speed, f"must be above 0 and at most {FASTEST}")
    if speed != 1.0 and run is None and not demo:
        raise ConfigError("speed", speed, "must be 1, or left out, for a live job: only a recording (RUN or --demo) is played")
    if not 0 <= port <= _LAST_PORT:
        raise ConfigError("port", port, f"must be 0, for a free one, to {_LAST_PORT}")
    if not address.strip():
        raise ConfigError("address", address, "must be an address of this machine, such as 127.0.0.1 or ::1, or 0.0.0.0 for all of them")
    if "%" in address:
        raise ConfigError("address", address, "must be without a zone (what stands behind %): browsers open no such address")
    origins = tuple(map(_origin, origins))
    access = Access.at(address)
    feeds, title, shared = _feeds(run, job, demo, speed)
    try:
        from .dashboard import serve
    except ImportError as error:
        raise MissingExtra(f"the dashboard needs Panel ({error}): pip install 'robustrl[views]'") from error
    if until_eof:
        threading.Thread(target=end_with_input, name="robustrl-dashboard-owner", daemon=True).start()
    try:
        serve(feeds, access, shared=shared, title=title, address=address, port=port, origins=origins,
              ready=partial(_announce, access, address, shared, as_json))
    except (OSError, UnicodeError) as error:  # UnicodeError: no host can have such a name
        raise _not_listening(address, port, error) from None
    except KeyboardInterrupt:
        pass


def _origin(origin: str) -> str:
    """In the spelling in which a browser names it."""
    if (found := _ORIGIN.fullmatch(origin)) and 1 <= int(found["port"] or 80) <= _LAST_PORT:
        host = in_url(found["ipv6"]) if found["ipv6"] else found["host"]
        if found["host"] or host.startswith("["):  # what is no address comes back as it is
            return host + (f":{found['port']}" if found["port"] else "")
    raise ConfigError("origin", origin, "must be HOST or HOST:PORT, such as hub.example.org:8000 or [::1]:80, without http:// or wildcards")


def _not_listening(address: str, port: int, error: OSError | UnicodeError) -> ConfigError:
    """Of the two, the one to blame: a free port (0) is never it."""
    if not port or isinstance(error, UnicodeError | socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        allowed = "must be an address of this machine, such as 127.0.0.1 or ::1, or 0.0.0.0 for all of them; the port is --port's"
        return ConfigError("address", address, f"{allowed}: {error}")
    return ConfigError("port", port, f"cannot listen on {address}: {error}")


def _feeds(run: Path | None, job: str | None, demo: bool, speed: float) -> tuple[Callable[[], Feed], str, bool]:
    if run is not None or demo:
        path = run or SAMPLE
        if not path.exists():
            raise ConfigError("RUN", str(path), "there is no such run")
        entries = _entries(path)
        at = _first_fault(entries) - _BEFORE if demo else 0.0
        run_dir = None if demo else run_dir_of(path)
        return (lambda: Feed(RecordedRun(entries, speed, at=at, run_dir=run_dir), ghosts=folder_of(path))), f"RobustRL: {path.name}", False
    from robustrl.launching import attach
    from robustrl.runtime.registry import live_jobs

    names = [entry.name for entry in live_jobs()]
    if job is None and len(names) != 1:
        raise ConfigError("--job", None, f"name one of the live jobs: {', '.join(names) or 'there is none; --demo shows a recorded one'}")
    feed = feed_of(attach(job or names[0]))
    return (lambda: feed), f"RobustRL: {job or names[0]}", True


def _entries(path: Path) -> Sequence[ev.Entry]:
    """Raises LogError, with what can be done here about a log that is damaged."""
    try:
        return load_entries(path)
    except BadRun as error:
        part = f"; in a notebook, robustrl_widgets.RoleBoard(robustrl.Run.load({str(path)!r}, partial=True)) shows what can be read of it"
        raise LogError(f"{BadRun(error.path, error.problems, False)}{part if error.partial else ''}") from None


def _first_fault(entries: Sequence[ev.Entry]) -> float:
    """Seconds from the first entry to it; 0 without one."""
    return next((entry.t - entries[0].t for entry in entries if isinstance(entry.event, ev.FaultInjected)), 0.0)


def _announce(access: Access, address: str, live: bool, as_json: bool, port: int) -> None:
    base = f"http://{in_url({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(address, address))}:{port}/"
    links = {"look": base if is_local(address) else f"{base}?token={access.viewer}"}
    if live:
        links |= {"instructor": f"{base}?token={access.instructor}", "student": f"{base}?token={access.student}"}
    if as_json:
        print(json.dumps({"port": port, **links}), flush=True)
        return
    words = {"look": "look on", "instructor": "inject faults and change thresholds", "student": "queue one fault at a time"}
    for name, link in links.items():
        print(f"{words[name] + ':':40} {link}", file=sys.stderr, flush=True)
    print("Ctrl-C ends it", file=sys.stderr, flush=True)


def end_with_input() -> None:
    """Ends this process when whoever started it is gone."""
    while os.read(0, 4096):
        pass
    os._exit(0)


class DashboardHandle:
    """A dashboard in a process of its own. ``url`` opens it with all rights; ``student_url`` is for a class, ``look_url`` for everybody."""

    def __init__(self, process: subprocess.Popen[bytes], links: dict[str, Any]) -> None:
        self._process = process
        self.port: int = links["port"]
        self.url, self.student_url, self.look_url = str(links["instructor"]), str(links["student"]), str(links["look"])

    def stop(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_GRACE)

    def __repr__(self) -> str:
        return f"<dashboard at {self.url}>" if self._process.poll() is None else "<dashboard, ended>"

    def _repr_html_(self) -> str:
        if self._process.poll() is not None:
            return "<div>the dashboard has ended</div>"
        link = html.escape(self.url, quote=True)
        return f'<div><a href="{link}" target="_blank" rel="noopener">Open the dashboard</a> ({html.escape(repr(self))})</div>'


def start(job: Job, timeout: float) -> DashboardHandle:
    """A dashboard of this job, which ends with this process. Raises JobFailed with its last words, WaitTimeout."""
    import importlib.util

    if importlib.util.find_spec("panel") is None:
        raise MissingExtra("the dashboard needs Panel: pip install 'robustrl[views]'")
    what = ["--job", job.name] if not job.over else [str(job.run_dir)]
    process = subprocess.Popen([sys.executable, "-m", "robustrl", "dashboard", *what, "--json", "--until-eof"], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = _first_line(process, timeout)
    if not line:
        process.kill()
        words = process.stderr.read().decode(errors="replace").strip()[-2000:] if process.stderr else ""
        ended = process.wait(_GRACE)
        if words:
            raise JobFailed(f"the dashboard did not start (exit status {ended}): {words}")
        raise WaitTimeout(f"the dashboard did not say its address within {timeout:g} s")
    links = json.loads(line)
    return DashboardHandle(process, {"instructor": links["look"], "student": links["look"], **links})


def _first_line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    assert process.stdout is not None
    deadline, text = time.monotonic() + timeout, b""
    while b"\n" not in text and (left := deadline - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            if not (piece := os.read(process.stdout.fileno(), 4096)):
                break
            text += piece
    return text if b"\n" in text else b""
