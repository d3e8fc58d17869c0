"""The process group of a trainer's ranks, as one of them sees it: gloo on CPU, nccl on devices. Collectives end at the group's time-out.

Left out: who is called to leave or to meet (rank_group.py, the host's side).
"""

from __future__ import annotations

from datetime import timedelta

from ..errors import SnapshotError


def join(rendezvous: str, rank: int, world: int, seconds: float, *, cuda: bool) -> None:
    """Meet the others at ``rendezvous`` (host:port of rank 0), the group of before left; ``seconds``: its time-out. One alone has none."""
    if world == 1:
        return
    import torch.distributed as dist

    leave()
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=f"tcp://{rendezvous}", rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """NCCL waits for ever for a peer that is gone, unless it is told."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def agree_on(step: int) -> None:
    """Collective. Raises SnapshotError where the ranks have taken up different steps: their weights would never be equal again."""
    import torch
    import torch.distributed as dist

    ends = torch.tensor([step, -step], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    newest, oldest = int(ends[0]), -int(ends[1])
    if newest != oldest:
        raise SnapshotError(f"this rank is at optimizer step {step}, and the ranks are at steps from {oldest} to {newest}")
