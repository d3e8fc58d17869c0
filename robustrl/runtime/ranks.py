"""The process group of a trainer's ranks, as one of them sees it: gloo on CPU, nccl on devices. Collectives end at the group's time-out.

Left out: who is called to leave or to meet (rank_group.py, the host's side).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..errors import SnapshotError


def open_store(host: str, world: int) -> Any:
    """Rank 0's place of the next meeting, open at once: a port that is only looked up may be taken by then. None for one rank alone."""
    if world == 1:
        return None
    import torch.distributed as dist

    return dist.TCPStore(host, 0, world, is_master=True, wait_for_workers=False)


def join(rendezvous: str, rank: int, world: int, seconds: float, *, cuda: bool, store: Any = None) -> None:
    """Meet the others at ``rendezvous`` (host:port of rank 0, whose ``store`` it is), the group of before left; ``seconds``: its time-out.
    One alone has none.
    """
    if world == 1:
        return
    import torch.distributed as dist

    leave()
    patience = timedelta(seconds=seconds)
    host, _, port = rendezvous.rpartition(":")
    if rank == 0 and store.port != int(port):
        raise RuntimeError(f"{rendezvous}: the ranks have been called to another meeting since")
    if rank:
        store = dist.TCPStore(host, int(port), world, is_master=False, timeout=patience)
    store.set_timeout(patience)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world, timeout=patience)


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
