"""Which role runs on which node: a pure function of the nodes there are and of the configuration.

Nodes belong to *pools* (``management``, ``trainer``, ``rollout``). On own raylets ``plan_nodes`` hands them out; on an existing cluster a
node states its pools by a label or resource, and one that states none may take any part. Placement knows pools only, not free CPU or
memory: Ray is not asked to find room, so nothing can wait unseen for a node that is full.
"""

from __future__ import annotations

import msgspec

from ..config import JobConfig
from ..errors import ConfigError
from .roles import MANAGEMENT, SINGLE, RoleId, RoleKind

POOLS = ("management", "trainer", "rollout")
_POOL_OF = {RoleKind.TRAINER: "trainer", RoleKind.STATE_KEEPER: "trainer", RoleKind.ROLLOUT: "rollout"}


class NodeSpec(msgspec.Struct, frozen=True):
    """A node by its name in this run, e.g. ``node-0``, and the pools it belongs to; none: it takes any."""

    name: str
    pools: tuple[str, ...] = ()
    ray_node_id: str = ""
    """Empty until it is up, as is ``ip``."""
    ip: str = ""


def plan_nodes(config: JobConfig) -> list[NodeSpec]:
    """The nodes of a cluster of our own, node-0, node-1, ...: the first manages, the next one trains, the others roll out."""
    if config.nodes == 1:
        return [NodeSpec("node-0", POOLS)]
    if config.nodes == 2:
        return [NodeSpec("node-0", ("management", "trainer")), NodeSpec("node-1", ("rollout",))]
    pools = [("management",), ("trainer",)] + [("rollout",)] * (config.nodes - 2)
    return [NodeSpec(f"node-{i}", pool) for i, pool in enumerate(pools)]


def place(nodes: list[NodeSpec], config: JobConfig) -> dict[RoleId, str]:
    """The name of each role's node. On each node there is one node_agent; state_keeper-0 is with the trainer, state_keeper-1, its copy,
    on another node if there is one: with the management, since that node's loss ends the job anyway.

    Raises ConfigError naming the role, the pool it wants and the nodes there are, if a pool has no node.
    """
    pools = _share_out(nodes)
    placed: dict[RoleId, str] = {RoleId(RoleKind.NODE_AGENT, i): node.name for i, node in enumerate(nodes)}
    manager = pools["management"][0]
    for kind in RoleKind:
        if kind in MANAGEMENT:
            count = 1 if kind in SINGLE else config.agent_workers
            placed |= {RoleId(kind, i): manager for i in range(count)}
    placed |= _spread(RoleKind.STATE_KEEPER, 1, pools["trainer"])
    if elsewhere := [name for name in (manager, *(node.name for node in nodes)) if name != pools["trainer"][0]]:
        placed[RoleId(RoleKind.STATE_KEEPER, 1)] = elsewhere[0]
    placed |= _spread(RoleKind.TRAINER, config.trainer_ranks, pools["trainer"])
    placed |= _spread(RoleKind.ROLLOUT, config.rollouts, pools["rollout"])
    return placed | place_standbys(config, placed)


def place_another(kind: RoleKind, nodes: list[NodeSpec], placed: dict[RoleId, str]) -> tuple[RoleId, str]:
    """The next role of a kind, and its node: the first of those in its pool that have the fewest of them."""
    numbers = [role.index for role in placed if role.kind is kind]
    pool = _share_out(nodes)[_POOL_OF.get(kind, "management")]
    counts = {name: sum(1 for role, where in placed.items() if role.kind is kind and where == name) for name in pool}
    return RoleId(kind, max(numbers, default=-1) + 1), min(pool, key=lambda name: counts[name])


def place_again(role: RoleId, nodes: list[NodeSpec], placed: dict[RoleId, str]) -> str:
    """Where a role goes whose node is lost: the node of its pool, or of none, that has the fewest of its kind; empty: there is none."""
    pool = _POOL_OF.get(role.kind, "management")
    able = [node.name for node in nodes if pool in node.pools] or [node.name for node in nodes if not node.pools]
    counts = {name: sum(1 for other, where in placed.items() if other.kind is role.kind and where == name) for name in able}
    return min(able, key=lambda name: counts[name], default="")


def place_standbys(config: JobConfig, placed: dict[RoleId, str]) -> dict[RoleId, str]:
    """Standbys that can become a trainer or a rollout, in turn on the nodes of these; and one for all other roles, with the management."""
    if not config.standbys:
        return {}
    first = [placed[RoleId(RoleKind.TRAINER, 0)], placed[RoleId(RoleKind.ROLLOUT, 0)]]
    standbys = {RoleId(RoleKind.STANDBY, i): first[i % 2] for i in range(config.standbys)}
    return standbys | {RoleId(RoleKind.STANDBY, config.standbys): placed[RoleId(RoleKind.SUPERVISOR)]}


def _spread(kind: RoleKind, count: int, names: list[str]) -> dict[RoleId, str]:
    return {RoleId(kind, i): names[i % len(names)] for i in range(count)}


def _share_out(nodes: list[NodeSpec]) -> dict[str, list[str]]:
    """The nodes of each pool: those that state it, else those that state none, one for each such pool as long as they last."""
    for node in nodes:
        for pool in node.pools:
            if pool not in POOLS:
                raise ConfigError(f"label robustrl of {node.name}", pool, f"must be one of {', '.join(POOLS)}")
    pools = {pool: [node.name for node in nodes if pool in node.pools] for pool in POOLS}
    free = [node.name for node in nodes if not node.pools]
    wanting = [pool for pool in POOLS if not pools[pool]]
    if wanting and not free:
        role = {"management": "supervisor", "trainer": "trainer-0", "rollout": "rollout-0"}[wanting[0]]
        there = ", ".join(f"{node.name} ({'+'.join(node.pools) or 'any'})" for node in nodes) or "no node at all"
        raise ConfigError(f"placement of {role}", wanting[0], f"needs a node of this pool or one without a pool; there is {there}")
    for i, pool in enumerate(wanting):
        # the last pool (rollout, if it is wanting) takes all that is left
        pools[pool] = free[i:] if i == len(wanting) - 1 and free[i:] else [free[min(i, len(free) - 1)]]
    return pools
