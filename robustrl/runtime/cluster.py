"""The Ray cluster of a job: our own raylets on this machine, or somebody's cluster that we join.

``LocalCluster`` promises: everything it writes lies in its temporary folder and its shared-memory folder, so that any number of jobs, and
other people's Ray, live side by side; every process it starts carries ROBUSTRL_RUN; the job's Ray listens on the loopback
address unless told otherwise and asks every caller for a token of this job; ``stop`` leaves no process. ``JoinedCluster`` promises to start
and stop nothing. Neither places anything: see ``core/placement.py``; nodes are addressed by ``NodeAffinitySchedulingStrategy``.

Must be used before anything imports ray: Ray reads its settings from the environment when it is imported.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..core.placement import POOLS, NodeSpec
from ..errors import ConfigError, JobFailed, RobustRLError, WaitTimeout, counted
from . import ray_clusters, ray_worker
from .processes import MARK, find_marked, kill_marked

if TYPE_CHECKING:
    from .namespaces import Namespaces
    from .role import RoleSpec

_MAX_SOCKET_PATH = 106
_GOODBYE = 2.0
_STACK_FRAME = re.compile(r"\(\+0x[0-9a-f]+\)")
_NO_PORT = 1
"""Where nobody listens."""
_PLACEHOLDER = 'sh -c "exec cat" placeholder'
"""Ends when its input does; Ray adds arguments of its own, which the shell swallows."""
_SETTINGS = {
    # setproctitle would write the new title over the environment block and with it over our mark
    "SPT_NOENV": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_pipe_based_agent_to_parent_health_check": "1",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Ray would run its workers at niceness 15: whatever else the machine does would hold up the job, and its recovery
    "RAY_worker_niceness": "0",
    # Ray would kill roles when memory runs short, and nobody would know why one died
    "RAY_memory_monitor_refresh_ms": "0",
    # a killed raylet is noticed after about 3 s, and a busy machine has 5 s to answer
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}


class Cluster(Protocol):
    address: str
    nodes: list[NodeSpec]

    def start(self, deadline: float) -> None:
        """Connects this process as Ray's driver within ``deadline`` seconds; after that ``nodes`` have their ids and addresses."""

    def raylet_of(self, node: str) -> int:
        """Pid of the raylet of the node of this name. Raises RobustRLError for one that was not started here."""

    def create_actor(self, spec: RoleSpec, node: NodeSpec, name: str | None = None) -> Any:
        """The handle of a new role actor on ``node``: detached, never restarted by Ray, ``name`` (None: ``spec.actor_name``) in namespace
        ``spec.run``."""

    def lost(self) -> dict[str, str]:
        """Nodes of ``nodes`` that are gone -> what shows it."""

    def unreachable(self, name: str, timeout: float) -> str:
        """Why no packet comes through to a node that is ours to cut off; empty: it answers, or is not."""

    def replace(self, name: str, deadline: float) -> NodeSpec | None:
        """A new node of that name in the lost one's place, or None where nodes are not ours to make. Blocks."""

    def stop(self, actors: dict[str, Any], deadline: float) -> None:
        """Ends what ``start`` and ``create_actor`` began, and the connection. Safe to call twice and after a failed start."""


class LocalCluster:
    """Raylets of this job on this machine: the first of ``nodes`` is the head.

    ``temp_dir`` must exist and be private to the run; ``object_store_bytes`` is per node (Ray takes at least 75 MiB). Raises ConfigError if
    the path of ``temp_dir`` is too long for the sockets in it.
    """

    def __init__(self, temp_dir: Path, run: str, nodes: list[NodeSpec], object_store_bytes: int, ip: str = "127.0.0.1",
                 namespaces: Namespaces | None = None) -> None:
        self.temp_dir, self.run, self.nodes = Path(temp_dir), run, list(nodes)
        self.object_store_bytes, self.ip = object_store_bytes, ip
        self.namespaces = namespaces
        self.address = ""
        self._raylets: list[Any] = []
        self._ips: dict[str, str] = {}
        """Node -> its address, where it has one of its own."""
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        """The GCS and the raylets, each with the name of its node."""
        self._spawning = threading.Lock()
        self._stopped = False
        self._earlier: set[int] | None = None
        self._folders: dict[str, str] = {}
        """Node -> its folder; a replaced node's sockets and logs stay where they were."""
        self._starting = threading.Lock()
        longest = max(len(os.fsencode(self.temp_dir / f"{node.name}.99" / "ray/sockets/plasma_store")) for node in nodes)
        if longest > _MAX_SOCKET_PATH:
            raise ConfigError("temp_dir", str(temp_dir), f"must be at least {longest - _MAX_SOCKET_PATH} bytes shorter: the path of a "
                              f"socket below it may have {_MAX_SOCKET_PATH}")

    def start(self, deadline: float) -> None:
        """Brings up the nodes one by one and connects this process as driver, within ``deadline`` seconds.

        Raises WaitTimeout or JobFailed naming the node that did not come up, with the end of its log; nothing is left running then.
        """
        if "ray" in sys.modules:
            raise RuntimeError("LocalCluster.start: ray was imported already, so its settings can no longer be changed")
        end = time.monotonic() + deadline
        self._earlier = {process.pid for process in find_marked(self.run)}
        self._prepare()
        for i, node in enumerate(self.nodes):
            self.nodes[i] = self._add(node, end)
        _connect(self.address, self.run, self.ip)
        self._check_alive()

    def _prepare(self) -> None:
        token = self.temp_dir / "ray.token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        (self.temp_dir / "ray").mkdir(exist_ok=True)
        os.environ.update(_SETTINGS, RAY_TMPDIR=str(self.temp_dir), RAY_AUTH_TOKEN_PATH=str(token))
        os.environ[MARK] = self.run
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
            os.environ.pop(name, None)
        if self.ip == "127.0.0.1":
            # Ray replaces a loopback address by the machine's own unless told that there will be no other machine
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        ray_worker.skip_slow_import()

    def _add(self, node: NodeSpec, end: float) -> NodeSpec:
        thread, failure = self._begin(node)
        while thread.is_alive() and time.monotonic() < end:
            thread.join(0.1)
            self._check_alive()
        if failure:
            raise self._failed(JobFailed, node.name, str(failure[0])) from failure[0]
        if thread.is_alive():
            up = f"{len(self._raylets)} of {counted(len(self.nodes), 'node')} up"
            raise self._failed(WaitTimeout, node.name, f"deadlines.cluster_start passed; {up}")
        self.address = self._raylets[0].gcs_address
        return msgspec.structs.replace(node, ray_node_id=self._raylets[-1].node_id, ip=self._ips.get(node.name, self.ip))

    def _begin(self, node: NodeSpec) -> tuple[threading.Thread, list[Exception]]:
        """The thread that starts the node's raylet, and what it raised."""
        failure: list[Exception] = []

        def build() -> None:
            try:
                if self.namespaces is not None and self._raylets:
                    self._ips[node.name] = self.namespaces.add(node.name)
                self._raylets.append(_start_raylet(self, node))
            except Exception as error:  # handed to the waiting thread
                failure.append(error)

        thread = threading.Thread(target=build, name=f"start-{node.name}", daemon=True)
        thread.start()
        return thread, failure

    def unreachable(self, name: str, timeout: float) -> str:
        """See Cluster."""
        if self.namespaces is None or name not in self._ips:
            return ""
        there = (raylet for raylet in reversed(self._raylets) if raylet.node_ip_address == self._ips[name])
        if (raylet := next(there, None)) is None:  # it is being replaced, and its next host has an address already
            return f"no raylet is up at {self._ips[name]} yet"
        if self.namespaces.answers(name, raylet.node_manager_port, timeout):
            return ""
        return f"{self._ips[name]} took no connection within {timeout:g} s"

    def lost(self) -> dict[str, str]:
        """See Cluster: a raylet, on the head also the GCS, that has ended."""
        found = {}
        for name, process in list(self._processes):
            if process.poll() is not None:
                found[name] = f"its process {process.pid} ended with exit status {process.returncode}"
        return found

    def replace(self, name: str, deadline: float) -> NodeSpec:
        """See Cluster. Raises JobFailed or WaitTimeout; what else is up stays up."""
        with self._starting:
            place = next(i for i, node in enumerate(self.nodes) if node.name == name)
            if place == 0:
                raise JobFailed(f"{name}: the head of the cluster cannot be replaced")
            for process in [process for node, process in self._processes if node == name]:
                process.kill()
                process.wait(deadline)
            self._processes = [pair for pair in self._processes if pair[0] != name]
            earlier = self._folders.get(name, name)
            self._folders[name] = f"{name}.{int(earlier.rpartition('.')[2]) + 1 if '.' in earlier else 2}"
            thread, failure = self._begin(self.nodes[place])
            thread.join(deadline)
            if failure:
                raise JobFailed(f"{name} could not be replaced: {failure[0]}\n{self.log_tail(self._folders[name])}") from failure[0]
            if thread.is_alive():
                raise WaitTimeout(f"a new {name} was not up within {deadline:g} s\n{self.log_tail(self._folders[name])}")
            found = {"ray_node_id": self._raylets[-1].node_id, "ip": self._ips.get(name, self.ip)}
            self.nodes[place] = msgspec.structs.replace(self.nodes[place], **found)
            return self.nodes[place]

    def _check_alive(self) -> None:
        for name, process in self._processes:
            if process.poll() is not None:
                raise self._failed(JobFailed, name, f"its process {process.pid} ended with exit status {process.returncode}")

    def _failed(self, kind: type[RobustRLError], name: str, reason: str) -> RobustRLError:
        """The error to raise, after everything has been stopped."""
        text = f"{name} did not come up: {reason}\n{self.log_tail(name)}"
        self.stop({}, deadline=10.0)
        return kind(text)

    def log_tail(self, name: str, lines: int = 20) -> str:
        """The last errors that the node's raylet, on the head also the GCS, logged; without any, the last lines."""
        folder = self.temp_dir / name / "ray/logs"
        for suffix in ("err", "out"):
            out = []
            for path in (folder / f"gcs_server.{suffix}", folder / f"raylet.{suffix}"):
                text = path.read_text(errors="replace").splitlines() if path.exists() else []
                text = [line for line in text if line.strip() and not _STACK_FRAME.search(line)][-lines:]
                out += [f"--- {name} {path.name}", *text] if text else []
            if out:
                return "\n".join(out)
        return f"--- {name}: no log was written"

    def raylet_of(self, node: str) -> int:
        """See Cluster. The head's GCS was started before its raylet."""
        if pids := [process.pid for name, process in self._processes if name == node]:
            return pids[-1]
        raise RobustRLError(f"{node}: no raylet of this name was started")

    def create_actor(self, spec: RoleSpec, node: NodeSpec, name: str | None = None) -> Any:
        """See Cluster. The mark comes with the raylet's environment: a runtime_env would double the time of the process's start."""
        return _create_actor(spec, node, name)

    def stop(self, actors: dict[str, Any], deadline: float) -> None:
        """Kills every process of the run that was started since ``start``, roles included, but this one; the actors go with their raylets.

        Raises WaitTimeout naming what survived SIGKILL for ``deadline`` seconds.
        """
        with self._spawning:
            self._stopped = True
        # Ray waits for ever for a raylet that is stopped; once that is dead, it does not
        goodbye = threading.Thread(target=_disconnect, name="disconnect", daemon=True)
        goodbye.start()
        goodbye.join(_GOODBYE)
        if self._earlier is not None:
            kill_marked(self.run, deadline, spare=self._earlier)
        goodbye.join(_GOODBYE)
        for _, process in self._processes:
            process.wait(deadline)
        if self.namespaces is not None:
            self.namespaces.close()
        self._raylets.clear()
        self._processes.clear()


class JoinedCluster:
    """A Ray cluster that somebody else owns: nodes are listed, never started or stopped."""

    def __init__(self, address: str, run: str) -> None:
        self.address, self.run = address, run
        self.nodes: list[NodeSpec] = []
        self._joined = False

    def start(self, deadline: float) -> None:
        """Connects and lists the nodes that are alive, in the order of Ray's ids, as node-0, node-1, ...

        A node states its pools by a label ``robustrl`` (``trainer``, or several: ``trainer-rollout``) or by resources ``robustrl:trainer``.
        Raises ConfigError for another job's private cluster; JobFailed or WaitTimeout, within the deadline, if none can be reached: Ray
        would try again by its own clocks.
        """
        os.environ.update(SPT_NOENV="1", RAY_gcs_rpc_server_connect_timeout_s=str(max(1, int(deadline))))
        os.environ[MARK] = self.run
        end = time.monotonic() + deadline
        self.address = ray_clusters.choose(self.address, ray_clusters.found_here(), os.environ)
        ray_worker.skip_slow_import()
        _knock(self.address, deadline)
        table = _listed(self.address, self.run, end, deadline)
        self._joined = True
        alive = sorted((node for node in table if node["Alive"]), key=lambda node: node["NodeID"])
        for i, node in enumerate(alive):
            self.nodes.append(NodeSpec(f"node-{i}", _stated_pools(node), node["NodeID"], node["NodeManagerAddress"]))

    def raylet_of(self, node: str) -> int:
        """See Cluster."""
        raise RobustRLError(f"{node} was not started by this job")

    def lost(self) -> dict[str, str]:
        """See Cluster: those that Ray's node table calls dead; new ones join ``nodes``."""
        table = {node["NodeID"]: node for node in _nodes()}
        known = {node.ray_node_id for node in self.nodes}
        for node in table.values():
            if node["Alive"] and node["NodeID"] not in known:
                self.nodes.append(NodeSpec(f"node-{len(self.nodes)}", _stated_pools(node), node["NodeID"], node["NodeManagerAddress"]))
        return {node.name: "Ray calls the node dead" for node in self.nodes if not table.get(node.ray_node_id, {}).get("Alive")}

    def unreachable(self, name: str, timeout: float) -> str:
        """See Cluster."""
        return ""

    def replace(self, name: str, deadline: float) -> None:
        """Not ours to make."""

    def create_actor(self, spec: RoleSpec, node: NodeSpec, name: str | None = None) -> Any:
        """See Cluster. The mark has to come by runtime_env here."""
        return _create_actor(spec, node, name, runtime_env={"env_vars": {MARK: self.run, "SPT_NOENV": "1"}})

    def stop(self, actors: dict[str, Any], deadline: float) -> None:
        """Kills our actors and disconnects; all else there belongs to others. A stopped (SIGSTOP) actor is left to its node's agent.

        A thread that still waits for the cluster to answer is left alone: there is nothing of ours there, and it ends with this process.
        """
        if not self._joined:
            return
        import ray

        for handle in actors.values():
            ray.kill(handle)
        _disconnect()


def _create_actor(spec: RoleSpec, node: NodeSpec, name: str | None, **options: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from .shell import shell_of

    return ray.remote(shell_of(spec)).options(
        name=name or spec.actor_name, namespace=spec.run, lifetime="detached", max_restarts=0, max_task_retries=0, num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_node_id, soft=False), **options,
    ).remote(spec)


def _connect(address: str, namespace: str, ip: str = "127.0.0.1") -> None:
    import ray

    own = {} if ip == "127.0.0.1" else {"_node_ip_address": ip}
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR, **own)


def _listed(address: str, namespace: str, end: float, deadline: float) -> list[dict[str, Any]]:
    """Connects, and returns Ray's node table. Raises JobFailed or, at ``end``, WaitTimeout: the thread that still waits for Ray, which
    tries again for many minutes, is left alone.
    """
    table: list[dict[str, Any]] = []
    failure: list[Exception] = []

    def join() -> None:
        try:
            _connect(address, namespace)
            table.extend(_nodes())
        except Exception as error:  # of Ray, gRPC or the network; handed to the waiting thread
            failure.append(error)

    thread = threading.Thread(target=join, name="join", daemon=True)
    thread.start()
    thread.join(max(0.0, end - time.monotonic()))
    why = f"address = {address!r}: no Ray cluster could be joined there"
    if failure:
        raise JobFailed(f"{why}: {failure[0]}") from failure[0]
    if thread.is_alive():
        raise WaitTimeout(f"{why} within deadlines.cluster_start = {deadline:g} s: Ray still waited for its GCS, which does not answer "
                          "those without its token either")
    return table


def _nodes() -> list[dict[str, Any]]:
    import ray

    return ray.nodes()


def _knock(address: str, deadline: float) -> None:
    """Whether HOST:PORT takes a connection: Ray would ask one that never answers for longer than it is told to. Raises JobFailed."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=deadline).close()
    except (OSError, OverflowError) as error:
        why = f"no answer within deadlines.cluster_start = {deadline:g} s" if isinstance(error, TimeoutError) else str(error)
        raise JobFailed(f"address = {address!r}: no Ray cluster could be joined there: {why}") from None


def _disconnect() -> None:
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


def _stated_pools(node: dict[str, Any]) -> tuple[str, ...]:
    label = node.get("Labels", {}).get("robustrl", "")
    stated = set(label.replace("-", " ").split()) | {pool for pool in POOLS if f"robustrl:{pool}" in node["Resources"]}
    return tuple(sorted(stated))


def _start_raylet(cluster: LocalCluster, spec: NodeSpec) -> Any:
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class _QuietNode(Node):
        def start_api_server(self, **_: Any) -> None:
            """Left out: two seconds and a process of 100 MB that no role asks for anything."""

    def start_process(command: list[str], *args: Any, **kwargs: Any) -> Any:
        with cluster._spawning:
            if cluster._stopped:
                raise RuntimeError("the cluster was stopped while it was starting")
            command = _adapt(command)
            if cluster.namespaces is not None:
                command = cluster.namespaces.command(spec.name, command)
            started = start_ray_process(command, *args, **kwargs)
            cluster._processes.append((spec.name, started.process))
        return started

    head = not cluster._raylets
    params = RayParams(
        gcs_address=None if head else cluster.address,
        node_ip_address=cluster._ips.get(spec.name, cluster.ip),
        node_name=spec.name,
        temp_dir=str(cluster.temp_dir / cluster._folders.get(spec.name, spec.name)),
        session_name="ray" if head else None,
        num_cpus=0,
        num_gpus=0,
        memory=2**30,
        object_store_memory=cluster.object_store_bytes,
        resources={f"robustrl:{pool}": 1000 for pool in spec.pools},
        labels={"robustrl": "-".join(spec.pools)},
        # 0: any free port
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
        worker_path=ray_worker.__file__,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    start_ray_process = services.start_ray_process
    services.start_ray_process = start_process
    try:
        # no fate sharing with the thread that starts it: the reaper and stop() end it
        return _QuietNode(params, head=head, shutdown_at_exit=False, spawn_reaper=False)
    finally:
        services.start_ray_process = start_ray_process


def _adapt(command: list[str]) -> list[str]:
    """A raylet's command line with as many starting workers as cores, and a placeholder for each of its two agents: a process that waits
    until the raylet ends.

    The agents serve Ray's dashboard and runtime environments, of which a role uses neither. They cost 160 MB and 5 s of CPU time a
    node, and a raylet waits for the files in which they state their ports, and aborts after 15 s: on a busy machine, often.
    """
    from ray import _raylet

    settings = dict(part.partition("=")[::2] for part in command)
    if "--dashboard_agent_command" not in settings:
        return command
    for name in (_raylet.METRICS_AGENT_PORT_NAME, _raylet.METRICS_EXPORT_PORT_NAME, _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
                 _raylet.RUNTIME_ENV_AGENT_PORT_NAME):
        _raylet.persist_port(settings["--session_dir"], settings["--node_id"], name, _NO_PORT)
    settings |= {"--dashboard_agent_command": _PLACEHOLDER, "--runtime_env_agent_command": _PLACEHOLDER}
    # Ray's own choice goes by num_cpus, 0 here, and would start one worker after the other
    settings["--maximum_startup_concurrency"] = str(max(2, len(os.sched_getaffinity(0))))
    return [part if "=" not in part else f"{part.partition('=')[0]}={settings[part.partition('=')[0]]}" for part in command]
