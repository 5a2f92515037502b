"""Real ranks for the transport tests: processes over Gloo on loopback, and what they send one another."""

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dflash.batch import PackedHiddenStates, PackedLayout
from dflash.groups import Role, Topology
from dflash.transport.connect import connect
from dflash.transport.control import ControlPlane
from dflash.transport.messages import Kind, Message
from dflash.transport.payload import PayloadChannel
from dflash.transport.process_groups import ProcessGroups, join
from dflash.transport.queue import HiddenStateQueue
from dflash.transport.sender import HiddenStateSender

# A server that has imported torch forks every rank, which takes milliseconds instead of seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["helpers_transport", "pytest"])  # a rank imports our main module, pytest


@dataclass(frozen=True)
class Spec:
    """One run of the exchange; `seconds` maps a rank's name to what each micro-batch costs it."""

    num_entries: int
    depth: int = 4
    max_bytes: int | None = None
    min_ready: int = 1
    num_buffers: int = 2
    peer_timeout_s: float = 20.0
    micro_batches_per_step: int = 6
    max_tokens: int = 300
    seconds: dict[str, float] = field(default_factory=dict)
    stop_after: int | None = None
    victim: str = ""  # "kill target-0": what happens to which rank
    at: int = -1  # at which of its micro-batches
    note: str = ""  # where the victim writes down when
    asks_to_stop: str = ""  # the rank that asks all others to stop, at its micro-batch `at`


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its result, or the name and text of its exception, or the signal that killed it."""

    value: Any = None
    error: str = ""
    text: str = ""
    exit_code: int | None = 0
    ended_s: float = 0.0


def layout_of(index: int, max_tokens: int) -> PackedLayout:
    """Sizes that depend on g alone: one token, few, many; one document or several; two dtypes."""
    num_tokens = 1 if index % 7 == 0 else 1 + (index * 7919) % max_tokens
    dtype = torch.bfloat16 if index % 3 == 0 else torch.float32
    return PackedLayout(num_tokens, 1 + index % min(num_tokens, 4), 12, dtype)


def fill(packed: PackedHiddenStates, index: int) -> None:
    """Random bytes that depend on g alone, in every byte before the trailer."""
    num_bytes = packed.layout.sections["trailer"][0]
    random = torch.Generator().manual_seed(index)
    packed.buffer[:num_bytes] = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=random)


def verify(packed: PackedHiddenStates, index: int) -> None:
    expected = PackedHiddenStates(packed.layout, torch.empty(packed.layout.num_bytes, dtype=torch.uint8))
    fill(expected, index)
    num_bytes = packed.layout.sections["trailer"][0]
    assert torch.equal(packed.buffer[:num_bytes], expected.buffer[:num_bytes]), f"g {index} arrived damaged"
    assert packed.trailer[1] == index


class Pool:
    """A few buffers for packing, large enough for every micro-batch."""

    def __init__(self, num_buffers: int, max_tokens: int) -> None:
        num_bytes = PackedLayout(max_tokens, 4, 12, torch.float32).num_bytes
        self._free = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(num_buffers)]
        self._storage: dict[int, torch.Tensor] = {}

    def acquire(self) -> torch.Tensor | None:
        return self._free.pop() if self._free else None

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)

    def release(self, packed: PackedHiddenStates) -> None:
        self._free.append(self._storage.pop(id(packed)))

    def pack(self, buffer: torch.Tensor, index: int, max_tokens: int) -> PackedHiddenStates:
        packed = PackedHiddenStates(layout_of(index, max_tokens), buffer)
        fill(packed, index)
        self._storage[id(packed)] = buffer
        return packed


def make_sender(
    topology: Topology, rank: int, groups: ProcessGroups, control: ControlPlane, pool: Pool
) -> HiddenStateSender:
    device = torch.device("cpu")
    return HiddenStateSender(topology, rank, control, groups.edges, device=device, release=pool.release)


def make_queue(
    topology: Topology,
    rank: int,
    groups: ProcessGroups,
    control: ControlPlane,
    spec: Spec,
    on_wait: Callable[[], None] = lambda: None,
) -> HiddenStateQueue:
    def schedule_of(drafter: int) -> Iterator[tuple[int, PackedLayout]]:
        for index in range(drafter, spec.num_entries, topology.num_drafters):
            yield index, layout_of(index, spec.max_tokens)

    return HiddenStateQueue(
        topology,
        rank,
        control,
        groups.edges,
        schedule_of,
        depth=spec.depth,
        max_bytes=spec.max_bytes,
        min_ready=spec.min_ready,
        device=torch.device("cpu"),
        on_wait=on_wait,
    )


def exchange(topology: Topology, rank: int, spec: Spec) -> dict[str, Any]:
    """The whole life of a rank that computes nothing; returns what it saw."""
    groups = join(topology, rank, torch.device("cpu"), timeout_s=30)
    control = connect(topology, rank, groups.store, peer_timeout_s=spec.peer_timeout_s, timeout_s=30)
    try:
        play = serve if topology.role(rank) is Role.TARGET else train
        seen = play(topology, rank, groups, control, spec)
    except Exception as error:
        control.announce_error(f"{topology.name(rank)}: {type(error).__name__}: {error}")
        raise
    groups.close()
    return seen


def _live(topology: Topology, rank: int, spec: Spec, index: int) -> None:
    """Spends the time a micro-batch costs this rank, and dies or fails where the spec says so."""
    name = topology.name(rank)
    time.sleep(spec.seconds.get(name, 0.0))
    if index == spec.at and spec.victim.endswith(name):
        perish(spec, f"no good at g {index}")


def perish(spec: Spec, text: str) -> None:
    Path(spec.note).write_text(str(time.time()))
    match spec.victim.split()[0]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fail":
            raise ValueError(text)


def serve(topology: Topology, rank: int, groups: ProcessGroups, control: ControlPlane, spec: Spec) -> dict[str, Any]:
    pool = Pool(spec.num_buffers, spec.max_tokens)
    sender = make_sender(topology, rank, groups, control, pool)
    blocked_s, sent = 0.0, []
    for index in range(topology.index_in_group(rank), spec.num_entries, topology.num_targets):
        started_s = time.monotonic()
        buffer = sender.wait_for_buffer(pool.acquire)
        blocked_s += time.monotonic() - started_s
        if sender.is_over(index):
            break
        if sender.is_moot(index):
            pool.give_back(buffer)
            continue
        _live(topology, rank, spec, index)
        sender.send(pool.pack(buffer, index, spec.max_tokens), index)
        sent.append(index)
    sender.finish(groups.start_barrier)
    return {"sent": sent, "blocked_s": blocked_s}


def train(topology: Topology, rank: int, groups: ProcessGroups, control: ControlPlane, spec: Spec) -> dict[str, Any]:
    queue = make_queue(topology, rank, groups, control, spec)
    seen: dict[str, Any] = {"taken": [], "starved_s": 0.0, "sums": [], "ready_at_start": None}
    for first in range(0, spec.num_entries, spec.micro_batches_per_step):
        total = torch.zeros(1000)
        for index in range(first, min(first + spec.micro_batches_per_step, spec.num_entries)):
            if topology.drafter_rank(topology.drafter_of(index)) != rank:
                continue
            started_s = time.monotonic()
            packed = queue.take(index)
            seen["starved_s"] += time.monotonic() - started_s
            if seen["ready_at_start"] is None:
                seen["ready_at_start"] = queue.num_ready + 1
            verify(packed, index)
            seen["taken"].append(index)
            _live(topology, rank, spec, index)
            total += packed.layout.num_tokens
            queue.consumed(packed)
        queue.complete(partial(dist.all_reduce, total, group=groups.drafters, async_op=True))
        seen["sums"].append(int(total[0]))
        if first == 0:
            seen["resources"] = num_resources()
        if spec.stop_after is not None and first + spec.micro_batches_per_step > spec.stop_after:
            queue.stop(spec.stop_after)
            break
    seen["resources_at_end"] = num_resources()
    seen["allocated"] = queue.num_allocated_bytes
    queue.finish(groups.start_barrier)
    return seen | {"max_depth": queue.max_depth_seen, "held": queue.depth}


def num_resources() -> tuple[int, int]:
    """Open file descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


class Stopped(Exception):
    """What the stop hook of a test raises."""


def wait_and_be_stopped(topology: Topology, rank: int, spec: Spec) -> float | None:
    """Drafter 1 waits for what never comes, in the queue and in a collective, until a signal; returns how late."""
    groups = join(topology, rank, torch.device("cpu"), timeout_s=30)
    control = connect(topology, rank, groups.store, peer_timeout_s=spec.peer_timeout_s, timeout_s=30)
    if rank != 1:
        groups.barrier(30)
        return None
    signals: list[int] = []

    def look() -> None:
        if signals:
            raise Stopped

    signal.signal(signal.SIGALRM, lambda number, _: signals.append(number))
    queue = make_queue(topology, rank, groups, control, spec, on_wait=look)
    late_s = []
    for wait in (
        lambda: queue.take(0),
        lambda: queue.complete(lambda: dist.all_reduce(torch.ones(3), group=groups.drafters, async_op=True)),
    ):
        signals.clear()
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        started_s = time.monotonic()
        try:
            wait()
        except Stopped:
            late_s.append(time.monotonic() - started_s - 0.3)
    groups.barrier(30)
    assert len(late_s) == 2
    return max(late_s)


def joining_time(topology: Topology, rank: int, spec: Spec) -> float:
    """Joins and connects; returns the seconds it took."""
    started_s = time.monotonic()
    groups = join(topology, rank, torch.device("cpu"), timeout_s=30)
    connect(topology, rank, groups.store, peer_timeout_s=spec.peer_timeout_s, timeout_s=30)
    own_edges = [edge for edge in topology.edges if rank in (edge[0], topology.drafter_rank(edge[1]))]
    assert list(groups.edges) == own_edges
    is_target = topology.role(rank) is Role.TARGET
    assert (groups.drafters is None) == (groups.checkpoint is None) == is_target
    groups.barrier(20)
    return time.monotonic() - started_s


def cut_payload(topology: Topology, rank: int, spec: Spec) -> None:
    """Target 0 dies in the middle of a large payload, which the first drafter is receiving."""
    groups = join(topology, rank, torch.device("cpu"), timeout_s=30)
    control = connect(topology, rank, groups.store, peer_timeout_s=spec.peer_timeout_s, timeout_s=30)
    layout = PackedLayout(700_000, 1, 48, torch.float32)  # 134 MB
    device = torch.device("cpu")
    if topology.role(rank) is Role.TARGET:
        sender = HiddenStateSender(topology, rank, control, groups.edges, device=device, release=lambda _: None)
        sender.wait_until_can_send(0)
        sender.send(PackedHiddenStates(layout, torch.ones(layout.num_bytes, dtype=torch.uint8)), 0)
        groups.store.wait(["receiving"])
        perish(spec, "")
    limits = {"depth": 2, "max_bytes": None, "min_ready": 1, "device": device}
    queue = HiddenStateQueue(topology, rank, control, groups.edges, lambda d: [(d, layout)], **limits)
    queue.pump_until(lambda: queue.depth == 1 or rank != topology.drafter_rank(0))
    groups.store.set("receiving", "1")
    queue.take(topology.index_in_group(rank))


def lie(topology: Topology, rank: int, spec: Spec) -> dict[str, Any]:
    """An exchange in which target 0 says something untrue about micro-batch `at`: the field that `victim` names."""
    if rank == 0:
        _tell(spec.victim, spec.at)
    return exchange(topology, rank, spec)


def _tell(untruth: str, at: int) -> None:
    honest_send, honest_payload = ControlPlane.send, PayloadChannel.send

    def send(plane: ControlPlane, rank: int, message: Message) -> None:
        if message.kind is Kind.READY and message.index == at and untruth != "trailer":
            value = torch.float16 if untruth == "feature_dtype" else getattr(message, untruth) + 2
            message = replace(message, **{untruth: value})
        honest_send(plane, rank, message)

    def send_payload(
        channel: PayloadChannel, packed: PackedHiddenStates, sequence: int, index: int, ready: None
    ) -> None:
        is_untrue = index == at and untruth == "trailer"
        honest_payload(channel, packed, sequence, index + 2 * is_untrue, ready)

    ControlPlane.send = send
    PayloadChannel.send = send_payload


Body = Callable[[Topology, int, Spec], Any]


def _rank_main(pipe: Any, body: Body, topology: Topology, rank: int, spec: Spec, port: int) -> None:
    torch.set_num_threads(1)
    world_size = str(topology.world_size)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        outcome = Outcome(value=body(topology, rank, spec), ended_s=time.time())
    except BaseException as error:
        outcome = Outcome(error=type(error).__name__, text=str(error), exit_code=1, ended_s=time.time())
        if os.environ.get("TRANSPORT_TEST_TRACEBACK"):
            traceback.print_exc()
    pipe.send(outcome)
    pipe.close()
    os._exit(outcome.exit_code or 0)  # after a failure the groups are not destroyed


def run_ranks(body: Body, topology: Topology, spec: Spec, *, timeout_s: float = 60.0) -> list[Outcome]:
    """Runs `body(topology, rank, spec)` on every rank in a process of its own; none of them outlives the call."""
    _start_server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(topology.world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank_main, args=(theirs, body, topology, rank, spec, port))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    deadline_s = time.monotonic() + timeout_s
    outcomes = [_outcome(process, pipe, deadline_s) for process, pipe in ranks]
    for process, pipe in ranks:
        process.kill()
        process.join()
        pipe.close()
    return outcomes


def _start_server() -> None:
    """Before Python 3.13 the server does not get our sys.path, and would preload nothing."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    forkserver.ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _outcome(process: Any, pipe: Any, deadline_s: float) -> Outcome:
    try:
        if pipe.poll(max(deadline_s - time.monotonic(), 0)):
            return pipe.recv()
    except EOFError:
        process.join(5)
        return Outcome(error="killed", exit_code=process.exitcode)
    return Outcome(error="hung", exit_code=None)
