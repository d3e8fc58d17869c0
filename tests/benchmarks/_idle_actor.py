"""An actor of Ray that does nothing, in the cluster of a job: what an idle actor costs, with its process to stop and go on.

As a program: joins the cluster at the address given, prints the actor's pid, and ends with its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from robustrl.job import Job
from robustrl.runtime.processes import MARK
from robustrl.runtime.ray_clusters import found_here


@contextmanager
def idle_actor(job: Job) -> Iterator[int]:
    """The pid of one more actor in the job's own cluster, which the job knows nothing of."""
    address = next(place for place, run in found_here().items() if run == job.run)
    agent = Path(f"/proc/{job.roles['node_agent-0'].pid}/environ").read_bytes().decode().split("\0")
    ours = dict(line.split("=", 1) for line in agent if line.startswith((f"{MARK}=", "RAY_AUTH_", "RAY_ENABLE_")))
    command = [sys.executable, "-m", __name__, address]
    with subprocess.Popen(command, env=os.environ | ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdin and driver.stdout
        try:
            yield int(driver.stdout.readline())
        finally:
            driver.stdin.close()
            driver.wait(30)


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
