"""A run that never was: as many roles as wanted, each sampled four times a second, one optimizer step a second. A `Source` for the views.

As a program, ``_made_up_run.py ROLES``: a dashboard of it, which prints its port and ends when standard input ends. As ``_made_up_run.py
--clients PORT COUNT``: so many websocket clients of that dashboard, until standard input ends.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from robustrl.core import events as ev

PERIOD = 0.25
READY = ('{"msgid":"2","msgtype":"PATCH-DOC"}', "{}",
         '{"events":[{"kind":"MessageSent","msg_type":"bokeh_event","msg_data":{"type":"event","name":"document_ready","values":{"type":"map"}}}]}')
"""What a page says when it has drawn its document; Panel sends nothing before."""


class MadeUpRun:
    """Time starts with the first `take`."""

    def __init__(self, roles: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.job, self.generation, self.length, self.speed, self.lost = None, 0, 0.0, 1.0, ""
        self._clock, self._began, self._seq, self._told, self._step = clock, 0.0, 0, 0, 0
        self._rollouts = [f"rollout-{i}" for i in range(roles - 1)]
        self._tokens = 0
        self.wall = 0.0
        """Unix time of the first entry: step n is committed n seconds later."""

    def now(self) -> float:
        return self._clock() - self._began if self._seq else 0.0

    def entries(self) -> Sequence[ev.Entry]:
        return []

    all = entries

    def take(self) -> Sequence[ev.Entry]:
        found: list[ev.Entry] = []
        if not self._seq:
            self._began, self.wall = self._clock(), time.time()
            self._start(found)
        while self._told * PERIOD <= self.now():
            self._sample(found, self._told * PERIOD)
            self._told += 1
        while self._step + 1 <= self.now():
            self._step += 1
            self._write(found, float(self._step), ev.OptimizerStepCommitted(
                step=self._step, version=self._step, digest="d", snapshot_digest="s", consumed=[], batch=self._step, bytes=1, holder="h",
                incarnation=1))
        return found

    def _write(self, found: list[ev.Entry], t: float, event: ev.Event) -> None:
        self._seq += 1
        found.append(ev.Entry(self._seq, 1000.0 + t, "host", 1, self._seq, t, event))

    def _start(self, found: list[ev.Entry]) -> None:
        self._write(found, 0.0, ev.RunStarted(schema=1, run="r", name="made up", wall=self.wall, host_pid=1, config={"steps": 100000},
                                              machine={}))
        for node in range(8):
            self._write(found, 0.0, ev.NodeStarted(node=f"node-{node}", ray_node_id="x", ip="127.0.0.1", kinds=[]))
        for place, role in enumerate(["trainer-0", *self._rollouts]):
            self._write(found, 0.0, ev.RoleStarted(role=role, incarnation=1, node=f"node-{place % 8}", pid=place + 1, start_ticks=1))
            self._write(found, 0.0, ev.RoleReady(role=role, incarnation=1, seconds=0.0))
            self._write(found, 0.0, ev.RoleStateChanged(role=role, incarnation=1, old="starting", new="healthy", reason="ready"))

    def _sample(self, found: list[ev.Entry], t: float) -> None:
        self._tokens += 50
        for place, role in enumerate(self._rollouts):
            phase = "decode" if (self._told + place) % 7 else "waiting_request"
            pending = (self._told + place) % 30
            self._write(found, t, ev.RoleSample(role=role, incarnation=1, phase=phase, progress=self._tokens, pending=pending,
                                                step=self._step, version=self._step, loop_age=0.01, cpu=t))
        self._write(found, t, ev.RoleSample(role="trainer-0", incarnation=1, phase="train", progress=self._told, pending=self._told % 8,
                                            step=self._step, version=self._step, loop_age=0.01, cpu=t))


def _serve(roles: int) -> None:
    from robustrl_widgets.access import Access
    from robustrl_widgets.dashboard import serve
    from robustrl_widgets.feed import Feed
    from robustrl_widgets.showing import end_with_input

    run = MadeUpRun(roles)
    feed = Feed(run)
    feed.still()
    threading.Thread(target=end_with_input, daemon=True).start()
    serve(lambda: feed, Access.at("127.0.0.1"), shared=True, title="bench", ready=lambda port: print(port, run.wall, flush=True))


async def _look(port: int, count: int) -> None:
    from tornado.httpclient import HTTPRequest
    from tornado.websocket import websocket_connect

    async def one() -> None:
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60).read().decode())
        token = re.search(r'"token":"([^"]+)"', page)
        assert token, "the page has a session"
        request = HTTPRequest(f"ws://127.0.0.1:{port}/ws", headers={"Origin": f"http://127.0.0.1:{port}"})
        socket: Any = await websocket_connect(request, subprotocols=["bokeh", token[1]])
        for _ in range(3):  # the server speaks first: ACK
            await socket.read_message()
        header = '{"msgid":"1","msgtype":"PULL-DOC-REQ"}'
        for part in (header, "{}", "{}", *READY):
            await socket.write_message(part)
        while await socket.read_message() is not None:
            pass
        raise ConnectionError("the dashboard hung up")

    tasks = []
    for _ in range(count):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.3)
    print("all there", flush=True)
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    if sys.argv[1] == "--clients":
        from robustrl_widgets.showing import end_with_input

        threading.Thread(target=end_with_input, daemon=True).start()
        asyncio.run(_look(int(sys.argv[2]), int(sys.argv[3])))
    else:
        _serve(int(sys.argv[1]))
