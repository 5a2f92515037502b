"""All process groups of a run, created by all ranks in one order."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from dflash.groups import Role, Topology

_POLL_S = 1e-3


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The groups a rank is a member of; a target has no drafter groups (None)."""

    store: dist.Store
    drafters: dist.ProcessGroup | None  # gradients and denominators
    checkpoint: dist.ProcessGroup | None  # Gloo over the drafters, for saving alone, which may run beside training
    edges: dict[tuple[int, int], dist.ProcessGroup]  # (target, drafter) -> group of this rank's own edges

    def start_barrier(self) -> dist.Work:
        """A barrier over all ranks that the caller waits for in its own way."""
        # A sum on the host instead of dist.barrier, which would choose NCCL on CUDA and stop the GPU.
        return dist.all_reduce(torch.zeros(1), async_op=True)

    def barrier(self, timeout_s: float) -> None:
        """Waits until all ranks are here, in steps short enough for signal handlers to run.

        Raises TimeoutError after `timeout_s` seconds, RuntimeError when a rank is gone.
        """
        work = self.start_barrier()
        deadline_s = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not all ranks came to the barrier within {timeout_s:.0f} s")
            time.sleep(_POLL_S)
        work.wait()

    def close(self) -> None:
        """Leaves all groups, after a barrier and a run that ended well; a failed one just exits."""
        dist.destroy_process_group()


def join(topology: Topology, rank: int, device: torch.device, *, timeout_s: float = 1800.0) -> ProcessGroups:
    """Meets the other ranks through torchrun's environment and creates all groups; every rank calls it.

    `timeout_s` bounds the meeting and every later collective. It is generous because drafters wait for one another as
    long as the slowest target makes them; that a peer is gone is found by the control plane, long before.
    Raises ConnectionError, which names the address and the reason, when they do not meet.
    """
    assert not topology.colocated, "one process needs no groups"
    timeout = timedelta(seconds=timeout_s)
    is_cuda = device.type == "cuda"
    with _told_in_one_line(topology.name(rank)):
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
        return _make_groups(topology, rank, device, store, timeout)


def _make_groups(
    topology: Topology, rank: int, device: torch.device, store: dist.Store, timeout: timedelta
) -> ProcessGroups:
    is_cuda = device.type == "cuda"
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


@contextmanager
def _told_in_one_line(name: str) -> Iterator[None]:
    """Turns what torch raises while the ranks meet into an error with the address, the reason and what to do."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # the rendezvous raises ValueError for what the environment lacks
        host, port = (os.environ.get(key, "(not set)") for key in ("MASTER_ADDR", "MASTER_PORT"))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConnectionError(
            f"{name} cannot meet the other ranks at MASTER_ADDR {host}, MASTER_PORT {port}: {_advice(reason)} "
            f"[{reason[:300]}]"
        ) from error


def _advice(reason: str) -> str:
    if "EADDRINUSE" in reason or "already in use" in reason:
        return "another program listens on that port; choose a free one (torchrun: --master-port, or --standalone)"
    if "connect to" in reason or "waiting for clients" in reason:
        return "not all ranks came in time; check that all were started, and that the first one's address is reachable"
    if "MASTER_" in reason or "port" in reason or "literal" in reason:
        return "start the ranks with torchrun, or set MASTER_ADDR and MASTER_PORT (0 to 65535) for all of them"
    return "a rank is gone, or the network between the ranks fails"
