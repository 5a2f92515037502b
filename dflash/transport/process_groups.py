"""All process groups of a run, created by all ranks in one order."""

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash.groups import Role, Topology

_POLL_S = 1e-3
_CLOSE_S = 600.0  # a leader may still be publishing a checkpoint


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The groups a rank is a member of; a target has no drafter groups (None)."""

    store: dist.Store
    drafters: dist.ProcessGroup | None  # gradients and denominators
    checkpoint: dist.ProcessGroup | None  # Gloo over the drafters, for saving alone, which may run beside training
    edges: dict[tuple[int, int], dist.ProcessGroup]  # (target, drafter) -> group of this rank's own edges

    def barrier(self, timeout_s: float) -> None:
        """Waits until all ranks are here, in steps short enough for signal handlers to run.

        Raises TimeoutError after `timeout_s` seconds, RuntimeError when a rank is gone.
        """
        # A sum on the host instead of dist.barrier, which would choose NCCL on CUDA and stop the GPU.
        work = dist.all_reduce(torch.zeros(1), async_op=True)
        deadline_s = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all ranks came to the barrier within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leaves all groups together with all other ranks, after a run that ended well; a failed one just exits."""
        self.barrier(_CLOSE_S)
        dist.destroy_process_group()


def join(topology: Topology, rank: int, device: torch.device, *, timeout_s: float = 1800.0) -> ProcessGroups:
    """Meets the other ranks through torchrun's environment and creates all groups; every rank calls it.

    `timeout_s` bounds the meeting and every later collective. It is generous because drafters wait for one another as
    long as the slowest target makes them; that a peer is gone is found by the control plane, long before.
    """
    assert not topology.colocated, "one process needs no groups"
    timeout = timedelta(seconds=timeout_s)
    is_cuda = device.type == "cuda"
    store, store_rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    assert (store_rank, world_size) == (rank, topology.world_size)
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if is_cuda else None,
    )
    # use_local_synchronization would deadlock here: an edge's two ranks come to it at different places in their lists.
    backend = "nccl" if is_cuda else "gloo"
    drafter_ranks = [topology.drafter_rank(drafter) for drafter in range(topology.num_drafters)]
    drafters = dist.new_group(drafter_ranks, timeout=timeout, backend=backend)
    checkpoint = dist.new_group(drafter_ranks, timeout=timeout, backend="gloo")
    pairs = {edge: (topology.target_rank(edge[0]), topology.drafter_rank(edge[1])) for edge in topology.edges}
    edges = {edge: dist.new_group(list(pair), timeout=timeout, backend=backend) for edge, pair in pairs.items()}
    own_edges = {edge: group for edge, group in edges.items() if rank in pairs[edge]}
    for edge, group in own_edges.items():
        _warm_up(group, rank, *pairs[edge], device)
    is_drafter = topology.role(rank) is Role.DRAFTER
    return ProcessGroups(store, drafters if is_drafter else None, checkpoint if is_drafter else None, own_edges)


def _warm_up(group: dist.ProcessGroup, rank: int, source: int, destination: int, device: torch.device) -> None:
    """Makes the first transfer now, where everybody waits for it: NCCL connects when it is first used."""
    probe = torch.zeros(1, dtype=torch.uint8, device=device)
    if rank == source:
        dist.send(probe, destination, group=group)
    else:
        dist.recv(probe, source, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
