"""What faults do to real processes, without a job: signals at the very phase, proofs, and what is left when they are called off."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from robustrl.core import events as ev
from robustrl.core.roles import Phase
from robustrl.faults import hand
from robustrl.faults.disturbance import Disturbance, InjectedError
from robustrl.faults.hand import Hand
from robustrl.faults.orders import Order
from robustrl.runtime.processes import ProcessId, process_state, read_start_ticks, wait_exit
from robustrl.runtime.status_page import StatusPage


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


class Bench:
    """A hand, a status page, and what was emitted."""

    def __init__(self, tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
        self.said: queue.Queue[ev.Event] = queue.Queue()
        self.hand = Hand(self.said.put)
        self.tmp, self.pid = tmp_path, process.pid
        self.page = StatusPage.create(tmp_path / "page", incarnation=1, pid=process.pid)
        self.process = ProcessId(process.pid, read_start_ticks(process.pid))

    def order(self, kind: str, role: str = "rollout-0", fault: int = 1, **fields: Any) -> Order:
        folder, page = str(self.tmp / "faults"), str(self.tmp / "page")
        return Order(fault=fault, kind=kind, role=role, incarnation=1, node="node-0", pid=self.pid, page=page, folder=folder, **fields)

    def strike(self, order: Order) -> None:
        self.hand.strike(order, self.process)

    def next(self) -> Any:
        return self.said.get(timeout=30)

    def state(self, wanted: str) -> None:
        deadline = time.monotonic() + 20
        while process_state(self.pid) not in wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process_state(self.pid) in wanted


@pytest.fixture
def bench(tmp_path: Path, victim: subprocess.Popen[bytes]) -> Bench:
    return Bench(tmp_path, victim)


def test_a_kill_proves_that_the_process_is_gone(bench: Bench) -> None:
    bench.strike(bench.order("kill"))
    hit = bench.next()
    assert (hit.pid, hit.proof["process"], hit.proof["signal"]) == (bench.pid, "gone", "SIGKILL") and 0 <= hit.proof["ago"] < 1


def test_a_killed_process_that_lingers_on_a_busy_machine_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand, "wait_exit", lambda process, timeout: timeout > 3.0 and wait_exit(process, timeout))
    bench.strike(bench.order("kill"))
    assert bench.next().proof["process"] == "gone"


def test_a_hang_for_a_time_goes_on_by_itself(bench: Bench) -> None:
    bench.strike(bench.order("hang", options={"seconds": 0.2}))
    assert bench.next().proof["process"] == "T"
    end = bench.next()
    assert (end.outcome, end.fault) == ("over", 1)
    bench.state("SR")


def test_a_phase_is_waited_for_and_hit_for_certain(bench: Bench) -> None:
    """The page changes every millisecond or so: what is reported is what it says while the process cannot change it."""
    bench.page.phase = Phase.DECODE
    bench.strike(bench.order("hang", phase="pull"))
    time.sleep(0.05)
    assert bench.said.empty() and process_state(bench.pid) in "SR"
    bench.page.phase = Phase.PULL
    hit = bench.next()
    assert hit.phase == "pull" and hit.proof["process"] == "T"
    bench.state("T")


def test_a_trainers_step_is_waited_for(bench: Bench) -> None:
    bench.page.update(step=2)
    bench.page.phase = Phase.TRAIN
    bench.strike(bench.order("kill", role="trainer-0", phase="train", step=3))
    time.sleep(0.05)
    assert bench.said.empty()
    bench.page.update(step=3)
    assert bench.next().step == 3


def test_calling_off_sets_a_stopped_process_free_and_stops_one_that_waits(bench: Bench) -> None:
    order = bench.order("hang")
    bench.strike(order)
    bench.next()
    bench.state("T")
    bench.hand.call_off(1, order.folder, bench.process)
    bench.state("SR")
    assert order.off.exists()
    bench.page.phase = Phase.DECODE
    bench.strike(bench.order("kill", phase="pull"))
    bench.page.phase = Phase.PULL
    time.sleep(0.05)
    assert bench.said.empty() and process_state(bench.pid) in "SR", "the same fault is not done again"


def test_a_kill_that_is_done_is_not_called_off(bench: Bench) -> None:
    order = bench.order("kill", phase="pull")
    bench.strike(order)
    assert bench.hand.call_off(1, order.folder, bench.process), "it waited"
    order = bench.order("kill", fault=2)
    bench.strike(order)
    bench.next()
    assert not bench.hand.call_off(order.fault, order.folder, bench.process)


def test_slow_runs_part_of_the_time_and_leaves_the_process_running(bench: Bench) -> None:
    bench.strike(bench.order("slow", options={"seconds": 1.0, "share": 0.3, "period": 0.05}))
    assert bench.next().proof["process"] == "T"
    states = set()
    while bench.said.empty():
        states.add(process_state(bench.pid))
        time.sleep(0.003)
    assert "T" in states and states & {"S", "R"} and bench.next().outcome == "over"
    bench.state("SR")


def _second_hang(bench: Bench) -> None:
    bench.strike(bench.order("hang", fault=2, options={"seconds": 0.1}))
    assert bench.next().fault == 2
    assert bench.next().reason == "its 0.1 s are over; it is still held by fault 1"


def _second_slow(bench: Bench) -> None:
    bench.strike(bench.order("slow", fault=2, options={"seconds": 0.2, "share": 0.5, "period": 0.04}))
    assert bench.next().fault == 2 and "still held by fault 1" in bench.next().reason


def _another_phase(bench: Bench) -> None:
    """It stops the process to look, and finds that it is not the moment."""
    page, bench.page.phase = bench.page, Phase.DECODE
    reads = iter([Phase.PULL, Phase.DECODE])
    bench.strike(bench.order("hang", fault=2, phase="pull"))
    for phase in reads:
        page.phase = phase
    time.sleep(0.05)


def _called_off(bench: Bench) -> None:
    order = bench.order("kill", fault=2, phase="pull")
    bench.strike(order)
    time.sleep(0.05)
    bench.hand.call_off(2, order.folder, bench.process)


def _never_struck(bench: Bench) -> None:
    """A wedge, say, which is its target's own: the agent never had it."""
    bench.hand.call_off(2, bench.order("wedge").folder, bench.process)


def _order_to_hang(bench: Bench) -> None:
    assert bench.hand.hang(bench.process, 0.05)
    time.sleep(0.2)


SECONDS = [_second_hang, _second_slow, _another_phase, _called_off, _never_struck, _order_to_hang]


@pytest.mark.parametrize("second", SECONDS, ids=lambda second: second.__name__)
def test_no_end_of_one_fault_undoes_another_on_the_same_process(bench: Bench, second: Callable[[Bench], None]) -> None:
    order = bench.order("hang")
    bench.strike(order)
    assert bench.next().proof["process"] == "T"
    second(bench)
    bench.state("T")
    time.sleep(0.05)
    bench.state("T")
    bench.hand.call_off(1, order.folder, bench.process)
    if second is _another_phase:
        bench.hand.call_off(2, order.folder, bench.process)
    bench.state("SR")


def test_an_order_to_hang_outlasts_a_fault_and_one_that_is_shorter(bench: Bench) -> None:
    assert bench.hand.hang(bench.process, 0.0) and bench.hand.hang(bench.process, 0.05)
    bench.strike(bench.order("freeze", options={"seconds": 0.1}))
    bench.next()
    assert bench.next().reason == "its 0.1 s are over; it is still held by an order to hang"
    bench.state("T")


def test_a_process_that_is_held_can_be_killed(bench: Bench) -> None:
    bench.strike(bench.order("hang"))
    bench.next()
    bench.strike(bench.order("kill", fault=2))
    assert bench.next().proof["process"] == "gone"


def test_what_is_called_off_stops_nothing_any_more(bench: Bench) -> None:
    """However late its thread comes to it."""
    order = bench.order("hang")
    bench.hand.call_off(1, order.folder, bench.process)
    assert not bench.hand._hold(bench.process, 1) and bench.hand._stop(bench.process, 1) == ""
    bench.state("SR")


def test_a_later_life_of_the_agent_undoes_what_the_one_before_did(bench: Bench) -> None:
    order = bench.order("hang")
    bench.strike(order)
    bench.next()
    bench.state("T")
    Hand(bench.said.put).call_off(1, order.folder, bench.process)
    bench.state("SR")


def test_a_later_life_lets_go_what_the_one_before_stopped_and_only_that(bench: Bench) -> None:
    """It knows what the one before holds: no end of a fault of its own sets that process free, the end of that one does."""
    bench.strike(first := bench.order("hang"))
    bench.next()
    former, bench.hand = bench.hand, Hand(bench.said.put)
    bench.strike(bench.order("freeze", fault=2, options={"seconds": 0.1}))
    assert bench.next().fault == 2 and bench.next().reason == "its 0.1 s are over; it is still held by fault 1"
    bench.state("T")
    bench.strike(bench.order("hang", fault=3))
    assert bench.next().fault == 3
    bench.hand.call_off(1, first.folder, bench.process)
    bench.state("T")
    time.sleep(0.05)
    bench.state("T")
    bench.hand.call_off(3, first.folder, bench.process)
    bench.state("SR")
    assert former is not bench.hand and not list(Path(first.folder).glob("*.held"))[1:]


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_two_faults_of_a_former_life_are_called_off_one_by_one_also_twice(bench: Bench, order: tuple[int, int]) -> None:
    for fault in (1, 2):
        bench.strike(bench.order("hang", fault=fault))
        bench.next()
    folder, later = bench.order("hang").folder, Hand(bench.said.put)
    later.call_off(order[0], folder, bench.process)
    later.call_off(order[0], folder, bench.process)
    time.sleep(0.05)
    bench.state("T")
    later.call_off(order[1], folder, bench.process)
    bench.state("SR")


def test_what_was_over_in_a_former_life_holds_nothing(bench: Bench) -> None:
    bench.strike(bench.order("freeze", options={"seconds": 0.05}))
    assert [type(bench.next()).__name__ for _ in range(2)] == ["FaultInjected", "FaultEnded"]
    bench.hand = Hand(bench.said.put)
    bench.strike(bench.order("freeze", fault=2, options={"seconds": 0.05}))
    assert bench.next().fault == 2 and bench.next().reason == "it goes on after 0.05 s"
    bench.state("SR")


def test_a_target_that_vanishes_leaves_no_thread(bench: Bench, victim: subprocess.Popen[bytes]) -> None:
    bench.strike(bench.order("kill", phase="pull"))
    victim.kill()
    victim.wait()
    deadline = time.monotonic() + 20
    while any(thread.name == "fault-1" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.name == "fault-1" for thread in threading.enumerate()) and bench.said.empty()


@pytest.mark.parametrize("kind", ["kill", "hang", "slow"])
def test_of_a_process_that_another_fault_has_just_ended_nothing_is_claimed(
    bench: Bench, victim: subprocess.Popen[bytes], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when it was looked for, and is not when the signal comes, or just after it."""
    order = bench.order(kind, options={"seconds": 1.0, "share": 0.5, "period": 0.2})
    status = bench.hand._aim(order, bench.process, threading.Event())
    assert status is not None
    victim.kill()
    os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)  # dead, and not collected
    monkeypatch.setattr(hand, "send_signal", lambda process, number: True)
    getattr(bench.hand, f"_{kind}")(order, bench.process, status, threading.Event())
    assert bench.said.empty() and not list(Path(order.folder).glob("*.held"))


# -- what a role does to itself -


class Inside(Bench):
    def __init__(self, tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(tmp_path, process)
        self.disturbance = Disturbance(self.page, self.said.put, lambda timeout: None)


@pytest.fixture
def inside(tmp_path: Path, victim: subprocess.Popen[bytes]) -> Inside:
    return Inside(tmp_path, victim)


def test_an_exception_is_raised_at_its_phase_and_step_by_the_work_loop(inside: Inside) -> None:
    inside.disturbance.arm(inside.order("exception", role="trainer-0", phase="optimizer", step=2, options={"text": "boom"}))
    inside.page.phase = Phase.OPTIMIZER
    for step, place in ((1, Phase.OPTIMIZER), (2, Phase.TRAIN)):
        inside.page.step = step
        inside.disturbance.pass_by(place)
    assert inside.said.empty()
    with pytest.raises(InjectedError, match="fault 1: boom"):
        inside.disturbance.pass_by(Phase.OPTIMIZER)
    hit = inside.next()
    assert (hit.phase, hit.step, hit.proof["raised"], hit.pid) == ("optimizer", 2, "InjectedError", inside.pid)
    inside.disturbance.pass_by(Phase.OPTIMIZER)  # once


@pytest.mark.parametrize("busy", [True, False])
def test_a_wedge_ends_when_it_is_called_off(inside: Inside, busy: bool) -> None:
    order = inside.order("wedge", options={"seconds": 0.0, "busy": busy})
    inside.disturbance.arm(order)
    stuck = threading.Thread(target=inside.disturbance.pass_by, args=(Phase.DECODE,), name="engine", daemon=True)
    stuck.start()
    assert inside.next().proof == {"thread": "engine", "place": "decode", "busy": busy}
    stuck.join(0.2)
    assert stuck.is_alive()
    inside.hand.call_off(1, order.folder, None)
    stuck.join(2)
    assert not stuck.is_alive() and inside.said.empty(), "its end is the caller's to write"


def test_a_delay_happens_where_it_would_and_is_over(inside: Inside) -> None:
    inside.disturbance.arm(inside.order("long_checkpoint", role="trainer-0", options={"seconds": 0.1}))
    inside.disturbance.pass_by(Phase.TRAIN)
    assert inside.said.empty()
    began = time.monotonic()
    inside.disturbance.pass_by(Phase.SNAPSHOT)
    assert time.monotonic() - began >= 0.1
    assert inside.next().proof["place"] == "snapshot" and inside.next().outcome == "over"


def test_held_tokens(inside: Inside) -> None:
    assert not inside.disturbance.holds("rollout-0")
    began = time.monotonic()
    inside.disturbance.arm(inside.order("long_first_token", options={"seconds": 0.1}))
    inside.disturbance.pass_by(Phase.DECODE)
    assert not inside.disturbance.holds("rollout-1") and inside.said.empty()
    while inside.disturbance.holds("rollout-0"):
        time.sleep(0.005)
    assert time.monotonic() - began >= 0.1
    assert inside.next().proof["held"] == "tokens" and inside.next().outcome == "over"


def test_held_tokens_are_over_in_time_though_there_is_no_work_to_hold(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("robustrl.faults.disturbance.time", SimpleNamespace(monotonic=lambda: now[0]))
    inside.disturbance.arm(inside.order("long_first_token", options={"seconds": 5.0}))
    inside.disturbance.release("rollout-0")
    assert inside.said.empty(), "nothing is held yet"
    assert inside.disturbance.holds("rollout-0") and inside.next().proof["held"] == "tokens"
    for now[0] in (4.9, 5.1):
        assert inside.said.empty()
        inside.disturbance.release("rollout-0")
    assert inside.next().outcome == "over"


def test_tokens_that_two_faults_hold_come_after_the_later_end(inside: Inside) -> None:
    began = time.monotonic()
    for fault, seconds in ((1, 0.1), (2, 0.3)):
        inside.disturbance.arm(inside.order("long_first_token", fault=fault, options={"seconds": seconds}))
    while inside.disturbance.holds("rollout-0"):
        time.sleep(0.005)
    assert time.monotonic() - began >= 0.3
    said = [inside.next() for _ in range(4)]
    assert [(type(each).__name__, each.fault) for each in said] == [
        ("FaultInjected", 1), ("FaultInjected", 2), ("FaultEnded", 1), ("FaultEnded", 2)]  # fmt: skip


def test_a_disk_that_two_faults_fill_is_filled_once_and_freed_once(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done: list[str] = []
    monkeypatch.setattr("robustrl.faults.disk.fill", lambda folder: done.append("filled") or 65536)
    monkeypatch.setattr("robustrl.faults.disk.free", lambda folder: done.append("freed"))
    off, *orders = (inside.order("full_disk", "trainer-0", fault, options={"seconds": fault / 10}) for fault in (3, 1, 2))
    inside.hand.call_off(3, off.folder, None)
    for order in (off, *orders):
        inside.disturbance.arm(order)
    inside.disturbance.disk(tmp_path / "checkpoints")
    assert [inside.next().proof["full"] for _ in orders] == [65536, 65536]
    for _ in orders:
        time.sleep(0.11)
        inside.disturbance.disk(tmp_path / "checkpoints")
    assert [inside.next().fault, inside.next().fault] == [1, 2] and done == ["filled", "freed"] and inside.said.empty()


def test_a_first_compile_waits_for_work(inside: Inside) -> None:
    inside.disturbance.arm(inside.order("first_compile", options={"seconds": 0.02}))
    inside.disturbance.pass_by(Phase.WAITING_REQUEST, working=False)
    assert inside.said.empty()
    inside.disturbance.pass_by(Phase.PREFILL)
    assert inside.next().proof["place"] == "prefill"


def test_damage_is_done_in_the_loop_and_counted(inside: Inside) -> None:
    kept = bytearray(1000)
    order = inside.order("corrupt_weights", in_loop=True)
    inside.disturbance.arm(order)
    assert inside.disturbance.strike_in_loop(order, lambda kind: memoryview(kept))
    assert inside.next().proof == {"bytes": 64, "at": 500, "of": 1000} and kept.count(0xFF) == 64


_MEMORY = """
import sys
from pathlib import Path
from robustrl.faults.disturbance import Disturbance
from robustrl.faults.orders import Order
from robustrl.runtime.status_page import StatusPage
page = StatusPage.create(sys.argv[1], incarnation=1, pid=1)
order = Order(fault=1, kind="memory_exhaustion", role="rollout-0", incarnation=1, node="node-0", pid=1, page=sys.argv[1],
              folder=str(Path(sys.argv[1]).parent), options={"room_mb": 64})
said = []
disturbance = Disturbance(page, said.append, lambda timeout: None)
disturbance.arm(order)
try:
    disturbance.pass_by("decode")
except MemoryError as error:
    proof = said[0].proof
    print(proof["raised"], 32 << 20 < proof["allocated"] <= 64 << 20, error)
"""


def test_memory_runs_out_inside_a_limit(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY, str(tmp_path / "page")], capture_output=True, text=True, timeout=30)
    assert done.stdout.startswith("MemoryError True fault 1: RLIMIT_AS of"), done.stdout + done.stderr


_DISK = """
import errno, os, sys, threading
from pathlib import Path
from robustrl.faults import disk
folder = Path(sys.argv[1])
def writer():
    try:
        print("filled", disk.fill(folder))
    except OSError as error:
        print("refused", error)
        return
    try:
        (folder / "checkpoint").write_bytes(bytes(9000))
    except OSError as error:
        print(errno.errorcode[error.errno], sorted(os.listdir(folder)))
    disk.free(folder)
    (folder / "checkpoint").write_bytes(bytes(9000))
thread = threading.Thread(target=writer)
thread.start()
thread.join()
print(sorted(os.listdir(folder)))
"""


def test_a_full_disk_is_the_writers_own_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "older").touch()
    done = subprocess.run([sys.executable, "-c", _DISK, str(tmp_path)], capture_output=True, text=True, timeout=30)
    lines = done.stdout.splitlines()
    if lines[0].startswith("refused"):
        pytest.skip(f"this machine does not allow it: {lines[0]}")
    assert lines == ["filled 65536", "ENOSPC ['checkpoint', 'full']", "['checkpoint', 'older']"], done.stderr
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


_EXIT = _MEMORY.replace("memory_exhaustion", "clean_exit").replace("said = []", "said = []; import atexit")


def test_a_clean_exit_has_status_0(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _EXIT + "print('still here')", str(tmp_path / "page")], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
