"""Placement: who goes where, on own nodes and on somebody's, and what is said where it cannot be."""

from __future__ import annotations

import pytest

from robustrl.config import JobConfig
from robustrl.core.placement import POOLS, NodeSpec, place, place_again, place_another, plan_nodes
from robustrl.core.roles import MANAGEMENT, RoleId, RoleKind
from robustrl.errors import ConfigError


def _placed(nodes, **config):
    return {str(role): node for role, node in place(nodes, JobConfig(**config)).items()}


def _own(count, **config):
    return _placed(plan_nodes(JobConfig(nodes=count)), **config)


def test_four_own_nodes():
    assert _own(4, rollouts=3, trainer_ranks=2, agent_workers=2) == {
        "node_agent-0": "node-0", "node_agent-1": "node-1", "node_agent-2": "node-2", "node_agent-3": "node-3",
        "supervisor": "node-0", "task_runner": "node-0", "rollout_manager": "node-0", "request_manager": "node-0",
        "agent_worker-0": "node-0", "agent_worker-1": "node-0", "state_keeper-0": "node-1", "state_keeper-1": "node-0",
        "trainer-0": "node-1", "trainer-1": "node-1",
        "rollout-0": "node-2", "rollout-1": "node-3", "rollout-2": "node-2",
    }


def test_one_node_takes_everything():
    placed = _own(1)
    assert set(placed.values()) == {"node-0"} and "node_agent-0" in placed and "rollout-1" in placed


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_rollouts_share_no_node_with_the_trainer_and_use_all_of_theirs(count):
    placed = _own(count, rollouts=count)
    rollouts = {node for role, node in placed.items() if role.startswith("rollout-")}
    assert placed["trainer-0"] not in rollouts and placed["supervisor"] not in rollouts
    assert len(rollouts) == max(1, count - 2)
    assert len({node for role, node in placed.items() if role.startswith("node_agent")}) == count


def test_stated_pools_are_obeyed():
    nodes = [NodeSpec("node-0", ("rollout",)), NodeSpec("node-1", ("trainer",)), NodeSpec("node-2", ("management",)),
             NodeSpec("node-3", ("trainer", "rollout"))]
    placed = _placed(nodes, rollouts=2, trainer_ranks=3)
    assert placed["supervisor"] == "node-2"
    assert [placed[f"trainer-{i}"] for i in range(3)] == ["node-1", "node-3", "node-1"]
    assert [placed[f"rollout-{i}"] for i in range(2)] == ["node-0", "node-3"]


@pytest.mark.parametrize(("count", "wanted"), [
    (1, ("node-0", "node-0", ["node-0", "node-0"])),
    (2, ("node-0", "node-1", ["node-1", "node-1"])),
    (3, ("node-0", "node-1", ["node-2", "node-2"])),
    (5, ("node-0", "node-1", ["node-2", "node-3"])),
])
def test_without_pools_the_order_decides(count, wanted):
    placed = _placed([NodeSpec(f"node-{i}") for i in range(count)], rollouts=2)
    assert (placed["supervisor"], placed["trainer-0"], [placed["rollout-0"], placed["rollout-1"]]) == wanted


def test_a_free_node_fills_the_pool_that_is_wanting():
    placed = _placed([NodeSpec("node-0"), NodeSpec("node-1", ("trainer",)), NodeSpec("node-2", ("rollout",))])
    assert (placed["supervisor"], placed["trainer-0"], placed["rollout-1"]) == ("node-0", "node-1", "node-2")


def test_management_roles_are_together():
    placed = _own(4, agent_workers=5)
    names = {kind.value for kind in MANAGEMENT}
    assert {node for role, node in placed.items() if role.partition("-")[0] in names} == {"node-0"}


def test_impossible_placements_name_role_wanted_and_what_there_is():
    with pytest.raises(ConfigError, match=r"placement of trainer-0 = 'trainer': .*node-0 \(management\+rollout\)"):
        _placed([NodeSpec("node-0", ("management", "rollout"))])
    with pytest.raises(ConfigError, match="placement of supervisor = 'management': .*no node at all"):
        _placed([])
    with pytest.raises(ConfigError, match="label robustrl of node-0 = 'trainers': must be one of management, trainer, rollout"):
        _placed([NodeSpec("node-0", ("trainers",))])


def test_own_nodes_cover_every_pool():
    for count in range(1, 9):
        assert {pool for node in plan_nodes(JobConfig(nodes=count)) for pool in node.pools} == set(POOLS)


def test_another_rollout_goes_where_there_are_fewest() -> None:
    config = JobConfig(rollouts=3)
    nodes = plan_nodes(config)
    placed = place(nodes, config)
    assert placed[RoleId(RoleKind.ROLLOUT, 2)] == "node-2"
    assert place_another(RoleKind.ROLLOUT, nodes, placed) == (RoleId(RoleKind.ROLLOUT, 3), "node-3")


def test_standbys_are_with_those_whom_they_can_become() -> None:
    config = JobConfig(standbys=2)
    placed = place(plan_nodes(config), config)
    where = {str(role): node for role, node in placed.items() if role.kind is RoleKind.STANDBY}
    trainer, rollout = placed[RoleId(RoleKind.TRAINER, 0)], placed[RoleId(RoleKind.ROLLOUT, 0)]
    assert where == {"standby-0": trainer, "standby-1": rollout, "standby-2": placed[RoleId(RoleKind.SUPERVISOR)]}
    assert not [role for role in place(plan_nodes(JobConfig()), JobConfig()) if role.kind is RoleKind.STANDBY]


def test_a_role_without_a_node_goes_to_the_emptiest_of_its_kind_or_waits() -> None:
    nodes = [NodeSpec("a", ("rollout",)), NodeSpec("b", ("rollout",)), NodeSpec("c", ("trainer",))]
    placed = {RoleId(RoleKind.ROLLOUT, 0): "lost", RoleId(RoleKind.ROLLOUT, 1): "a"}
    assert place_again(RoleId(RoleKind.ROLLOUT, 0), nodes, placed) == "b"
    assert place_again(RoleId(RoleKind.TRAINER, 0), nodes, placed) == "c"
    assert place_again(RoleId(RoleKind.TRAINER, 0), nodes[:2], placed) == ""
    assert place_again(RoleId(RoleKind.TRAINER, 0), [*nodes[:2], NodeSpec("d")], placed) == "d"
