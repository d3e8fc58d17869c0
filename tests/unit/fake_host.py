"""A host for tests of the client: plays a made-up log over the real protocol, as far as it is told. Run as ``fake_host.py RUN_DIR``.

``FAKE_HOST`` in the environment: ``refuse`` (leaves a ConfigError, as a check before the start does), ``die`` (ends without a word),
``deaf`` (ignores stop), ``late`` (does nothing before there is a file ``go`` in the run's directory), ``play`` (goes to the end by itself),
``fail`` (fails by itself).
Verbs: advance(step), finish(), fail(reason), vanish(), stop(reason), pause(), logs(role, lines), save_pretrained(path).
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from made_log import Writer, made_log

from robustrl.config import JobConfig
from robustrl.core import events as ev
from robustrl.errors import ConfigError, RobustRLError
from robustrl.runtime import registry, wire

MODE = os.environ.get("FAKE_HOST", "")


class FakeHost:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.file = msgspec.json.decode((run_dir / "job.json").read_bytes(), type=registry.HostFile)
        config = msgspec.json.decode((run_dir / "config.json").read_bytes(), type=JobConfig)
        self.script = made_log(steps=config.steps, staleness=config.staleness, drop=False)
        self.log = Writer()
        self.subscribers: list[asyncio.StreamWriter] = []
        self.end = asyncio.Event()

    async def main(self) -> None:
        while MODE == "late" and not (self.run_dir / "go").exists():
            await asyncio.sleep(0.01)
        registry.temp_dir(self.file.run).mkdir()  # and none in shared memory: tests kill this host, and nobody cleans up after it
        self.play(until=ev.TrajectoriesStarted)
        server = await wire.listen(f"unix:{registry.socket_path(self.file.run)}", self.serve)
        if MODE == "play":
            self.answer("finish", {})
        elif MODE == "fail":
            self.close("failed", "rollout-0 died")
        await self.end.wait()
        server.close()
        registry.release(self.file.run)
        registry.remove_folders(self.file.run)

    def write(self, source: str, event: ev.Event) -> None:
        self.log.write(source, event)
        line = ev.encoder.encode(self.log.entries[-1])
        with open(self.run_dir / "events.jsonl", "ab") as file:
            file.write(line + b"\n")
        for writer in self.subscribers:
            wire.write_message(writer, wire.Entries([line]))

    def play(self, until: type, step: int | None = None) -> None:
        while self.script:
            entry = self.script.pop(0)
            self.write(entry.source, entry.event)
            if isinstance(entry.event, until) and (step is None or entry.event.step == step):
                return

    def close(self, status: str, reason: str) -> None:
        self.write("host", ev.RunEnded(status=status, reason=reason, wall=time.time()))
        self.end.set()

    def answer(self, verb: str, args: dict[str, Any]) -> Any:
        match verb:
            case "advance":
                self.play(ev.StepMetrics, args["step"])
            case "finish":
                self.play(ev.RunEnded)
                self.end.set()
            case "fail":
                self.close("failed", args["reason"])
            case "vanish":
                print("last words of the host", flush=True)
                os._exit(7)
            case "stop" if MODE != "deaf":
                self.close("stopped", args["reason"])
            case "logs":
                return [args["role"], str(args["lines"])]
            case "save_pretrained":
                Path(args["path"]).mkdir()
            case "pause" | "stop":
                pass
            case _:
                raise RobustRLError(f"verb {verb!r}")
        return None

    async def serve(self, hello: wire.Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while message := await wire.read_message(reader):
            if isinstance(message, wire.Call):
                try:
                    result = wire.Result(message.id, self.answer(message.verb, message.args))
                except RobustRLError as error:
                    result = wire.Result(message.id, error=wire.Failure.of(error))
                wire.write_message(writer, result)
            elif isinstance(message, wire.Subscribe):
                wire.write_message(writer, wire.Entries([ev.encoder.encode(entry) for entry in self.log.entries[message.after:]]))
                self.subscribers.append(writer)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if MODE == "refuse":
        failure = wire.Failure.of(ConfigError("model", "no/such", "there is no such model on the hub"))
        (folder / "host-error.json").write_bytes(msgspec.json.encode(failure))
        sys.exit(1)
    if MODE == "die":
        sys.exit("a library is missing")
    asyncio.run(FakeHost(folder).main())
