"""The drivers that test_cluster.py starts: each plays a host, tells what it has in a JSON line, and obeys lines of input."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any


def spec(cluster: Any, temp: Path, role: str) -> Any:
    from robustrl.config import JobConfig
    from robustrl.runtime.role import RoleSpec

    return RoleSpec(
        role=role, incarnation=1, run=cluster.run, node="", ip="127.0.0.1", run_dir=str(temp), temp_dir=str(temp), shm_dir=str(temp),
        host_address=f"unix:{temp}/host.sock", host_token=None, config=JobConfig())


def start_roles(cluster: Any, temp: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One agent_worker a node, as it comes from create_actor; (handles, what each says of itself and how long it took)."""
    import ray

    handles, told = {}, {}
    for i, node in enumerate(cluster.nodes):
        start = time.monotonic()
        role = f"agent_worker-{i}"
        handles[role] = cluster.create_actor(spec(cluster, temp, role), node)
        pid = ray.get(handles[role].identity.remote(), timeout=60)["pid"]
        told[role] = {"pid": pid, "seconds": time.monotonic() - start}
    return handles, told


def main() -> None:
    what, run, temp = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(temp / "host.sock"))
    listener.listen(64)
    {"local": local, "joined": joined}[what](run, temp)


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def local(run: str, temp: Path) -> None:
    from robustrl.config import JobConfig
    from robustrl.core.placement import plan_nodes
    from robustrl.runtime import reaper
    from robustrl.runtime.cluster import LocalCluster

    nodes = int(sys.argv[4])
    watch = reaper.start_reaper(run, [temp])
    cluster = LocalCluster(temp, run, plan_nodes(JobConfig(nodes=nodes)), object_store_bytes=80 << 20)
    start = time.monotonic()
    cluster.start(deadline=100)
    seconds = time.monotonic() - start
    handles, roles = start_roles(cluster, temp)
    tell(seconds=seconds, address=cluster.address, nodes=[(n.name, n.ray_node_id, n.ip, n.pools) for n in cluster.nodes], roles=roles,
         raylets=[process.pid for _, process in cluster._processes])
    for line in sys.stdin:
        if line.strip() == "lost":
            tell(seconds=until_dead(cluster.nodes[-1].ray_node_id, cluster._processes[-1][1]))
        if line.strip() == "stop":
            start = time.monotonic()
            cluster.stop(handles, deadline=10)
            tell(seconds=time.monotonic() - start)
            cluster.stop(handles, deadline=10)
            watch.dismiss()
            return


def until_dead(node_id: str, raylet: Any) -> float:
    import ray

    raylet.kill()
    start = time.monotonic()
    while next(node for node in ray.nodes() if node["NodeID"] == node_id)["Alive"]:
        assert time.monotonic() < start + 60
        time.sleep(0.1)
    return time.monotonic() - start


def joined(run: str, temp: Path) -> None:
    from robustrl.runtime.cluster import JoinedCluster

    cluster = JoinedCluster(sys.argv[4], run)
    cluster.start(deadline=60)
    handles, roles = start_roles(cluster, temp)
    tell(nodes=[(n.name, n.ray_node_id, n.ip, n.pools) for n in cluster.nodes], roles=roles,
         environ=[f"ROBUSTRL_RUN={run}" in Path(f"/proc/{r['pid']}/environ").read_text().split("\0") for r in roles.values()])
    sys.stdin.readline()
    cluster.stop(handles, deadline=10)
    tell()


if __name__ == "__main__":
    main()
