"""Hosts of one machine: each Ray node but the first in a network namespace of its own, on a private bridge (``hosts="namespaces"``).

The job's host process lives in a namespace that holds the bridge, which is also the first node's; so nothing is visible outside, names
and addresses clash with nobody's, and nothing has to be removed: a namespace, its interfaces and its mounts go with the last process in
it, however that ends. Files, shared memory and pids stay common, as on one machine. No way leads out of the job's network.

A node is cut off by taking its end off the bridge: packets vanish, as with a pulled plug. Packets are delayed by the kernel's netem.
Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN), util-linux and iproute2. Linux only.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from ..errors import ConfigError, RobustRLError

INSIDE = "--inside"
"""Option of the host's command line: it is in its namespace."""
HEAD_IP = "10.77.0.1"
_NET = "10.77.0."
_BRIDGE = "nodes"
_MOST = 250
_PATIENCE = 5.0
"""Seconds for one command, and for a namespace to be there."""
_OWN = ("unshare", "--net", "--mount", "--propagation", "private")
_SEE_OWN_INTERFACES = "mount -t sysfs sysfs /sys && ip link set lo up"
"""UCX lists interfaces by /sys."""
_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2"}


def why_not() -> str:
    """Why this machine gives no namespaces; empty: it does."""
    if missing := [f"{name} (package {package})" for name, package in _PROGRAMS.items() if not shutil.which(name)]:
        return f"these programs are not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "it takes root"
    try:
        _run(*_OWN, "sh", "-c", f"{_SEE_OWN_INTERFACES} && ip link add {_BRIDGE} type bridge && ip link add left type veth peer name right")
    except RobustRLError as error:
        return str(error)
    return ""


def check() -> None:
    """Raises ConfigError with the reason."""
    if why := why_not():
        raise ConfigError("hosts", "namespaces", f"is not possible here: {why}")


def enter(arguments: Sequence[str]) -> None:
    """Start this very process anew inside the job's own namespace; does not return. Pid and environment stay."""
    os.execvp(_OWN[0], [*_OWN, sys.executable, *arguments, INSIDE])


class Namespaces:
    """The nodes' namespaces, for a process that was started by `enter`. Raises RobustRLError with the words of the command that failed."""

    def __init__(self) -> None:
        _run("sh", "-c", _SEE_OWN_INTERFACES)
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "link", "set", _BRIDGE, "up")
        _run("ip", "link", "add", "head", "type", "veth", "peer", "name", "eth0")  # UCX takes no bridge for a device
        _run("ip", "link", "set", "head", "master", _BRIDGE, "up")
        _run("ip", "address", "add", f"{HEAD_IP}/24", "dev", "eth0")
        _run("ip", "link", "set", "eth0", "up")
        _run("ip", "route", "add", "default", "dev", "eth0")  # Ray asks which address packets to elsewhere would have
        self._hosts: dict[str, _Host] = {}
        self._made = 0
        self.why_no_delay = self._try_netem()

    def _try_netem(self) -> str:
        try:
            _run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms")
            _run("tc", "qdisc", "del", "dev", "lo", "root")
        except RobustRLError as error:
            return f"the kernel's netem is not there: {error}"
        return ""

    def add(self, node: str) -> str:
        """A new host for this node, in the place of one it may have had; its address."""
        self.remove(node)
        self._made += 1
        if self._made > _MOST:
            raise RobustRLError(f"{node}: {_MOST} namespaces have been made, their addresses are used up")
        host = _Host(f"node{self._made}", f"{_NET}{self._made + 1}")
        self._hosts[node] = host
        return host.ip

    def command(self, node: str, command: list[str]) -> list[str]:
        """The command that runs ``command`` on that node; the first node is where this process is."""
        return [*self._hosts[node].prefix, *command] if node in self._hosts else command

    def remove(self, node: str) -> None:
        """Its host goes once no process is left on it."""
        if host := self._hosts.pop(node, None):
            host.leave()

    def close(self) -> None:
        for node in list(self._hosts):
            self.remove(node)

    def link(self, node: str) -> str:
        """Name of the present host's link: what `cut` and the rest take. Raises RobustRLError for a node without one."""
        if node not in self._hosts:
            raise RobustRLError(f"{node} has no network namespace of its own")
        return self._hosts[node].link

    def cut(self, link: str) -> None:
        """No packet goes in or out."""
        _run("ip", "link", "set", link, "nomaster")

    def heal(self, link: str) -> None:
        """As before; a link that is gone with its host is left in peace."""
        if os.path.exists(f"/sys/class/net/{link}"):
            _run("ip", "link", "set", link, "master", _BRIDGE)

    def delay(self, link: str, milliseconds: float) -> None:
        """Each packet to and from the host is so much later."""
        half = f"{milliseconds / 2:g}ms"
        host = next(host for host in self._hosts.values() if host.link == link)
        _run("tc", "qdisc", "replace", "dev", link, "root", "netem", "delay", half)
        _run(*host.prefix, "tc", "qdisc", "replace", "dev", "eth0", "root", "netem", "delay", half)

    def hurry(self, link: str) -> None:
        """No more delay; see `heal`."""
        for host in [host for host in self._hosts.values() if host.link == link]:
            _run("tc", "qdisc", "del", "dev", link, "root")
            _run(*host.prefix, "tc", "qdisc", "del", "dev", "eth0", "root")

    def answers(self, node: str, port: int, timeout: float) -> bool:
        """Whether something takes a connection there in time."""
        try:
            socket.create_connection((self._hosts[node].ip if node in self._hosts else HEAD_IP, port), timeout).close()
        except OSError:
            return False
        return True


class _Host:
    """A namespace, held by a process that ends with this one (its input does), and its link to the bridge."""

    def __init__(self, link: str, ip: str) -> None:
        self.link, self.ip = link, ip
        self._holder = subprocess.Popen(
            [*_OWN, "sh", "-c", f"{_SEE_OWN_INTERFACES} && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
        )  # fmt: skip
        assert self._holder.stdout is not None
        ready = select.select([self._holder.stdout], [], [], _PATIENCE)[0]
        said = self._holder.stdout.readline().decode().strip() if ready else f"nothing within {_PATIENCE:g} s"
        if said != "up":
            self.leave()
            raise RobustRLError(f"{link}: no namespace: {said}")
        enter = ["nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--"]
        self.prefix = [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]  # another mount namespace begins at /
        try:
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
            _run("ip", "link", "set", link, "master", _BRIDGE, "up")
            _run(*self.prefix, "sh", "-c", f"ip address add {ip}/24 dev eth0 && ip link set eth0 up && ip route add default via {HEAD_IP}")
        except RobustRLError:
            self.leave()
            raise

    def leave(self) -> None:
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.kill()
        self._holder.wait(_PATIENCE)


def _run(*command: str) -> None:
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RobustRLError(f"{' '.join(command)} ({time.monotonic() - began:.1f} s): {error}") from None
    if done.returncode:
        raise RobustRLError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip() or f'exit status {done.returncode}'}")
