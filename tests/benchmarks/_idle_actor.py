"""An actor of Ray that does nothing, in the cluster of a job: what an idle actor costs, with its process to stop and go on.

As a program: joins the cluster at the address given, prints the actor's pid, and ends with its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from robustrl.job import Job
from robustrl.runtime.processes import MARK
from robustrl.runtime.ray_clusters import found_here

_DEADLINE = 60.0
"""Seconds for the driver to start, and to end."""


@contextmanager
def idle_actor(job: Job) -> Iterator[int]:
    """The pid of one more actor in the job's own cluster, which the job knows nothing of."""
    address = next(place for place, run in found_here().items() if run == job.run)
    agent = Path(f"/proc/{job.roles['node_agent-0'].pid}/environ").read_bytes().decode().split("\0")
    ours = dict(line.split("=", 1) for line in agent if line.startswith((f"{MARK}=", "RAY_AUTH_", "RAY_ENABLE_")))
    command = [sys.executable, "-m", __name__, address]
    with subprocess.Popen(command, env=os.environ | ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin and driver.stdout
        late = threading.Timer(_DEADLINE, driver.kill)
        late.start()
        try:
            pid = driver.stdout.readline()
            late.cancel()
            if not pid:
                raise RuntimeError(f"no idle actor in the cluster at {address} within {_DEADLINE:g} s: its driver has ended")
            yield int(pid)
        finally:
            late.cancel()
            driver.stdin.close()
            try:
                driver.wait(_DEADLINE)
            except subprocess.TimeoutExpired:
                driver.kill()


def main(address: str) -> None:
    import ray

    class Idle:
        async def pid(self) -> int:
            return os.getpid()

    ray.init(address=address, namespace="idle", log_to_driver=False)
    actor = ray.remote(Idle).options(num_cpus=0).remote()
    print(ray.get(actor.pid.remote()), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
