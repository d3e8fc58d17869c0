"""The command line: ``robustrl demo | run CONFIG | settings | audit RUN | export RUN | ps | stop | doctor | dashboard | bench NAME``.

Tables and messages go to stderr, results to stdout. Exit status: 0 done; 1 failed, with the reason; 2 wrong usage or a setting that cannot
be accepted; 130 ended by Ctrl-C, which also ends the job that the command started.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError, MissingExtra, RobustRLError, counted

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        return status
    except (ConfigError, MissingExtra) as error:
        print(f"robustrl: {error}", file=sys.stderr)
        return 2
    except RobustRLError as error:
        print(f"robustrl: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="robustrl", description="A live RL post-training job, every role a process of its own.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    demo = add("demo", _demo, "Run the bundled job to its end, and print its figures as one JSON line.")
    demo.add_argument("--profile", choices=("lab", "class"), default="lab", help="class: for small containers (default: lab)")
    demo.add_argument("--steps", type=int, help="optimizer steps (default: 60)")
    demo.add_argument("--seed", type=int)
    demo.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    demo.add_argument("--witness", action="store_true", help="let a process outside the job keep a log of its own (see audit --witness)")
    run = add("run", _run, "Run the job that a TOML or JSON file describes, with the names of JobConfig.")
    run.add_argument("config", type=_path, metavar="CONFIG")
    run.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    settings = add("settings", _settings, "Print all settings of a job with their defaults, as a config file for run.")
    settings.add_argument("--profile", choices=("lab", "class"), default="lab")
    audit = add("audit", _audit, "Check a run's log by itself; names the first violated rule.")
    audit.add_argument("run", type=_path, metavar="RUN", help="run directory, e.g. runs/latest, or its events.jsonl")
    audit.add_argument("--witness", action="store_true", help="hold the log of the run's witness against it, too")
    export = add("export", _export, "Write a run's timeline as a trace for ui.perfetto.dev.")
    export.add_argument("run", type=_path, metavar="RUN", help="run directory, or its events.jsonl")
    export.add_argument("--perfetto", type=_path, required=True, metavar="FILE")
    add("ps", _ps, "List your live jobs on this machine.")
    stop = add("stop", _stop, "End a live job, or all of them.")
    which = stop.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", metavar="NAME")
    which.add_argument("--all", action="store_true")
    soak = add("soak", _soak, "Hit a job with one random fault after the other; in the end all must be as if nothing had happened.")
    soak.add_argument("--faults", type=int, default=20, metavar="N")
    soak.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same faults")
    doctor = add("doctor", _doctor, "Say what this machine has for a job, and what to do about what is missing.")
    doctor.add_argument("--json", action="store_true")
    dashboard = add("dashboard", _dashboard, "Show a running job, or play a finished one, as a page in the browser.")
    dashboard.add_argument("run", nargs="?", type=_path, metavar="RUN",
                           help="a finished run to play: its directory, its events.jsonl (also gzipped), or a Parquet file")
    dashboard.add_argument("--job", metavar="NAME", help="a live job (default: the only one there is)")
    dashboard.add_argument("--demo", action="store_true", help="play the recorded run that comes with the package")
    dashboard.add_argument("--speed", type=float, default=1.0, help="of the playback, above 0 and at most 100 (default: 1)")
    dashboard.add_argument("--address", default="127.0.0.1",
                           help="to listen on (default: 127.0.0.1); one that others reach needs a token to look")
    dashboard.add_argument("--port", type=int, default=0, help="default: a free one")
    dashboard.add_argument("--origin", action="append", default=[], metavar="HOST:PORT", help="a proxy's own address; may be given again")
    dashboard.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    dashboard.add_argument("--json", action="store_true", help="print the addresses as one JSON line")
    bench = add("bench", _bench, "Run a benchmark (from a checkout).")
    bench.add_argument("name", metavar="NAME")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the benchmark, e.g. --json")
    return parser


def _path(text: str) -> Path:
    """An empty one would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("must be the name of a file or folder, and is empty")
    return Path(text)


def _there(run: Path) -> Path:
    if not run.exists():
        raise ConfigError("RUN", str(run), "there is no such path; must be a run directory, e.g. runs/latest, or its events.jsonl")
    return run


def _demo(arguments: argparse.Namespace) -> int:
    settings = {"name": "demo", "profile": arguments.profile, "steps": arguments.steps, "seed": arguments.seed,
                "witness": arguments.witness or None}
    return _run_to_end({name: value for name, value in settings.items() if value is not None}, arguments.json)


def _run(arguments: argparse.Namespace) -> int:
    import msgspec

    from .config import load_config

    return _run_to_end(msgspec.structs.asdict(load_config(arguments.config)), arguments.json)


def _settings(arguments: argparse.Namespace) -> int:
    from .config import JobConfig
    from .settings_text import settings_text

    print(settings_text(JobConfig(profile=arguments.profile)), end="")
    return 0


def _run_to_end(settings: dict[str, Any], quiet: bool) -> int:
    from .display import watch
    from .launching import launch
    from .summary import summarize

    job = launch(**settings)
    try:
        if quiet:
            job.wait()
        else:
            print(f"{job.run_dir}: {counted(job.config.steps, 'optimizer step')} of {job.config.task}, model {job.config.model}; "
                  "Ctrl-C ends the job", file=sys.stderr)
            watch(job)
            job.wait()
        return 0 if job.status == "done" else 1
    except KeyboardInterrupt:
        print("ending the job", file=sys.stderr)
        return _INTERRUPTED
    finally:
        job.stop()
        if (job.run_dir / "events.jsonl").exists():
            print(json.dumps(summarize(job.run_dir)), flush=True)


def _audit(arguments: argparse.Namespace) -> int:
    from .core.audit import RULES
    from .runtime.event_log import read_and_audit

    path = _there(arguments.run)
    path = path / "events.jsonl" if path.is_dir() else path
    entries, findings = read_and_audit(path)
    if findings:
        print(f"{path}: violates {findings[0]}" + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""))
        return 1
    if arguments.witness and not _witnessed(path, entries):
        return 1
    print(f"{path}: {len(entries)} entries satisfy all {len(RULES)} rules: {', '.join(RULES)}")
    return 0


def _witnessed(path: Path, entries: list[Any]) -> bool:
    from .core.testimony import cross_check
    from .runtime.witness import FILE, read_testimony

    lines = read_testimony(path.parent)
    if findings := cross_check(entries, lines):
        print(f"{path}: against {FILE}: {findings[0].text}" + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""))
        return False
    print(f"{path.parent / FILE}: {len(lines)} lines of the witness agree with it")
    return True


def _export(arguments: argparse.Namespace) -> int:
    from .export import write_perfetto

    try:
        count = write_perfetto(_there(arguments.run), arguments.perfetto)
    except OSError as error:
        raise RobustRLError(f"{arguments.perfetto}: {error.strerror}") from error
    print(f"{arguments.perfetto}: {count} trace events; open it at ui.perfetto.dev")
    return 0


def _ps(arguments: argparse.Namespace) -> int:
    from .runtime.registry import live_jobs

    for entry in live_jobs():
        print(f"{entry.name}\trun {entry.run}\thost {entry.host_pid}\towner {entry.owner_pid}\t{entry.run_dir}")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    from .job import Job
    from .launching import attach
    from .runtime.registry import live_jobs

    jobs = [Job(entry) for entry in live_jobs()] if arguments.all else [attach(arguments.name)]
    for job in jobs:
        job.stop()
        print(f"{job.name} (run {job.run}) has ended")
    return 0


def _dashboard(arguments: argparse.Namespace) -> int:
    try:
        from robustrl_widgets.showing import show
    except ImportError as error:
        raise MissingExtra(f"the dashboard needs Panel ({error}): pip install 'robustrl[views]'") from error

    show(run=arguments.run, job=arguments.job, demo=arguments.demo, speed=arguments.speed, address=arguments.address, port=arguments.port,
         origins=tuple(arguments.origin), until_eof=arguments.until_eof, as_json=arguments.json)
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from . import doctor

    return doctor.run(as_json=arguments.json)


def _soak(arguments: argparse.Namespace) -> int:
    from .soak import soak

    if arguments.faults < 1:
        raise ConfigError("--faults", arguments.faults, "must be at least 1")
    print(soak(arguments.faults, arguments.seed))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    checkout = Path(__file__).parent.parent
    names = sorted(path.stem for path in (checkout / "tests" / "benchmarks").glob("[a-z]*.py"))
    if not names:
        raise RobustRLError(f"the benchmarks are part of a checkout of RobustRL, and {checkout} is none: clone it and run it there")
    if arguments.name not in names:
        raise ConfigError("NAME", arguments.name, f"must be one of {', '.join(names)}")
    sys.path.insert(0, str(checkout))
    status: int = importlib.import_module(f"tests.benchmarks.{arguments.name}").main(arguments.arguments)
    return status
