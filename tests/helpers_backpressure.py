"""Exchanges with a witness: every isend, arrival and consumption with its time, and the bounds held against them."""

import math
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers_transport import Outcome, Spec, exchange, layout_of, make_queue, run_ranks, serve, verify

from dflash.batch import PackedHiddenStates
from dflash.groups import Role, Topology
from dflash.transport.connect import connect
from dflash.transport.payload import PayloadChannel
from dflash.transport.process_groups import join
from dflash.transport.queue import HiddenStateQueue
from dflash.transport.sender import HiddenStateSender
from dflash.transport.window import CreditWindow

EXTREMES = 2 * 7919  # as `max_tokens`: micro-batches of 1 token and of 7,920 take turns
SIGTERM = 15


class Witness:
    """Sees what one rank does below and above the queue, without asking the queue or the sender.

    `events` holds (time in ns, what, g). The clock is the machine's, so the ranks' events can be merged: a send is
    noted before it begins and a consumption before it ends, which stretches what lies between, never shortens it.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, str, int]] = []
        self.max_buffers = 0
        self.max_buffer_bytes = 0
        self._buffers: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, what: str, index: int) -> None:
        self.events.append((time.monotonic_ns(), what, index))

    def watch(self) -> None:
        """Puts itself around the calls of torch.distributed, and of the loop to the queue."""
        isend, irecv = dist.isend, dist.irecv
        finish_receive = PayloadChannel.finish_receive
        take, consumed = HiddenStateQueue.take, HiddenStateQueue.consumed

        def see_isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note("sent", int(tensor[-8:].view(torch.int64)))
            return isend(tensor, *args, **kwargs)

        def see_irecv(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._count_buffer(tensor)
            return irecv(tensor, *args, **kwargs)

        def see_arrival(channel: PayloadChannel) -> tuple[int, int]:
            sequence, index = finish_receive(channel)
            self.note("arrived", index)
            return sequence, index

        def see_taking(queue: HiddenStateQueue, index: int) -> PackedHiddenStates | None:
            packed = take(queue, index)
            self.note("taken", index)
            return packed

        def see_consumption(queue: HiddenStateQueue, packed: PackedHiddenStates) -> None:
            self.note("consumed", int(packed.trailer[1]))
            consumed(queue, packed)

        dist.isend, dist.irecv = see_isend, see_irecv
        PayloadChannel.finish_receive = see_arrival
        HiddenStateQueue.take, HiddenStateQueue.consumed = see_taking, see_consumption

    def _count_buffer(self, tensor: torch.Tensor) -> None:
        """Counts the receive buffers that are alive, free ones included, by the tensors that own their memory."""
        owner = tensor if tensor._base is None else tensor._base
        self._buffers[id(owner)] = weakref.ref(owner)
        alive = [buffer for reference in self._buffers.values() if (buffer := reference()) is not None]
        self._buffers = {id(buffer): weakref.ref(buffer) for buffer in alive}
        self.max_buffers = max(self.max_buffers, len(alive))
        self.max_buffer_bytes = max(self.max_buffer_bytes, sum(buffer.numel() for buffer in alive))


def observed(topology: Topology, rank: int, spec: Spec) -> dict[str, Any]:
    """`exchange`, or its end at a signal, with a witness; `victim` may also be "leak depth" or "leak bytes"."""
    witness = Witness()
    witness.watch()
    hold_back_slow_edges(topology, rank, spec)
    if spec.victim.startswith("leak"):
        leak(spec)
    if spec.asks_to_stop:
        ask_to_stop(topology, rank, spec)
        seen = exchange_until_asked(topology, rank, spec)
    else:
        seen = exchange(topology, rank, spec)
    return seen | {"events": witness.events, "buffers": (witness.max_buffers, witness.max_buffer_bytes)}


def edge_name(topology: Topology, target_rank: int, drafter_rank: int) -> str:
    return f"{topology.name(target_rank)} -> {topology.name(drafter_rank)}"


def hold_back_slow_edges(topology: Topology, rank: int, spec: Spec) -> None:
    """What has arrived on an edge is only seen to have done so `spec.seconds[edge]` later."""
    honest = PayloadChannel.has_arrived
    since_s: dict[int, float] = {}

    def has_arrived(channel: PayloadChannel) -> bool:
        if not honest(channel):
            return False
        delay_s = spec.seconds.get(edge_name(topology, channel._peer_rank, rank), 0.0)
        arrived_s = since_s.setdefault(int(channel._packed.trailer[1]), time.monotonic())
        return time.monotonic() - arrived_s >= delay_s

    PayloadChannel.has_arrived = has_arrived


def leak(spec: Spec) -> None:
    """A window that admits one micro-batch too many, for the witness to see."""
    honest = CreditWindow._has_room

    def has_room(window: CreditWindow, num_bytes: int) -> bool:
        if spec.victim == "leak depth":
            return len(window) <= spec.depth
        return honest(window, 0) or honest(window, num_bytes)

    CreditWindow._has_room = has_room


def ask_to_stop(topology: Topology, rank: int, spec: Spec) -> None:
    """One rank asks all to stop when it sends, or has trained on, micro-batch `at`."""
    if topology.name(rank) != spec.asks_to_stop:
        return
    send, consumed = HiddenStateSender.send, HiddenStateQueue.consumed

    def send_and_ask(sender: HiddenStateSender, packed: PackedHiddenStates, index: int) -> None:
        send(sender, packed, index)
        if index == spec.at:
            sender.ask_to_stop(SIGTERM)

    def consume_and_ask(queue: HiddenStateQueue, packed: PackedHiddenStates) -> None:
        index = int(packed.trailer[1])
        consumed(queue, packed)
        if index == spec.at:
            queue.ask_to_stop(SIGTERM)

    HiddenStateSender.send, HiddenStateQueue.consumed = send_and_ask, consume_and_ask


def exchange_until_asked(topology: Topology, rank: int, spec: Spec) -> dict[str, Any]:
    """As `exchange`, but the drafters agree on a stop in each step's all-reduce, as training does."""
    groups = join(topology, rank, torch.device("cpu"), timeout_s=30)
    control = connect(topology, rank, groups.store, peer_timeout_s=spec.peer_timeout_s, timeout_s=30)
    if topology.role(rank) is Role.TARGET:
        seen = serve(topology, rank, groups, control, spec)
        groups.close()
        return seen
    queue = make_queue(topology, rank, groups, control, spec)
    taken: list[int] = []
    for first in range(0, spec.num_entries, spec.micro_batches_per_step):
        for index in range(first, min(first + spec.micro_batches_per_step, spec.num_entries)):
            if topology.drafter_rank(topology.drafter_of(index)) != rank:
                continue
            packed = queue.take(index)
            if packed is None:
                break
            verify(packed, index)
            taken.append(index)
            time.sleep(spec.seconds.get(topology.name(rank), 0.0))
            queue.consumed(packed)
        is_asked = torch.tensor([float(queue.stop_signal is not None)])
        queue.complete(partial(dist.all_reduce, is_asked, group=groups.drafters, async_op=True))
        if is_asked > 0:
            queue.stop()
            break
    queue.finish(groups.start_barrier)
    groups.close()
    return {"taken": taken, "held": queue.depth}


class Timeline:
    """The merged events of all ranks of an exchange, and what they say about one drafter's window."""

    def __init__(self, topology: Topology, spec: Spec, outcomes: list[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.error]
        assert not failed, (topology, spec, failed)
        self.topology, self.spec = topology, spec
        self.reports = [outcome.value for outcome in outcomes]
        merged = [event for report in self.reports for event in report["events"]]
        self.events = sorted(merged)
        self.num_bytes = [layout_of(index, spec.max_tokens).num_bytes for index in range(spec.num_entries)]

    @property
    def drafter_reports(self) -> list[dict[str, Any]]:
        return self.reports[self.topology.num_targets :]

    def times(self, what: str, *, edge: tuple[int, int] | None = None, drafter: int | None = None) -> list[int]:
        """Times in ns of one kind of event, in order: of one (target, drafter) edge, of one drafter, or of all."""
        of = self.topology
        return [
            time_ns
            for time_ns, kind, index in self.events
            if kind == what
            and edge in (None, (of.target_of(index), of.drafter_of(index)))
            and drafter in (None, of.drafter_of(index))
        ]

    def outstanding(self, drafter: int) -> list[set[int]]:
        """After each of its sends, which of a drafter's micro-batches had been sent and not yet consumed."""
        held: set[int] = set()
        found = []
        for _, what, index in self.events:
            if self.topology.drafter_of(index) != drafter:
                continue
            if what == "sent":
                assert index not in held, f"g {index} was sent twice"
                held.add(index)
                found.append(set(held))
            elif what == "consumed":
                held.remove(index)
        return found

    def peak(self, drafter: int) -> int:
        return max((len(held) for held in self.outstanding(drafter)), default=0)

    def excesses(self) -> list[str]:
        """Moments at which more was on its way to a drafter, or buffered by it, than its bounds allow."""
        found = []
        depth, max_bytes, largest = self.spec.depth, self.spec.max_bytes, max(self.num_bytes, default=0)
        for drafter, report in enumerate(self.drafter_reports):
            for held in self.outstanding(drafter):
                num_bytes = sum(self.num_bytes[index] for index in held)
                if len(held) > depth:
                    found.append(f"drafter {drafter}: {len(held)} micro-batches {sorted(held)}, depth {depth}")
                # The one that is due next is admitted whatever its size, and then it is alone.
                if max_bytes is not None and num_bytes > max_bytes and len(held) > 1:
                    found.append(f"drafter {drafter}: {num_bytes} bytes {sorted(held)}, max_bytes {max_bytes}")
            num_buffers, num_buffer_bytes = report["buffers"]
            if num_buffers > depth:
                found.append(f"drafter {drafter}: {num_buffers} receive buffers, depth {depth}")
            allowed = depth * largest if max_bytes is None else max(max_bytes, largest)
            if num_buffer_bytes > allowed * 9 / 8 + 16 * depth:  # buffers come in eighths of powers of two
                found.append(f"drafter {drafter}: receive buffers of {num_buffer_bytes} bytes, allowed {allowed}")
        return found

    def check(self) -> None:
        """Everything that holds for every exchange; the contents were compared where they arrived."""
        of, spec = self.topology, self.spec
        excesses = self.excesses()
        assert excesses == [], (excesses, of, spec)
        for drafter, report in enumerate(self.drafter_reports):
            taken, own = report["taken"], list(range(drafter, spec.num_entries, of.num_drafters))
            consumed = [index for _, what, index in self.events if what == "consumed" and index in set(own)]
            assert taken == consumed == own[: len(taken)], (of, spec, drafter)
            assert report["held"] == 0
            if not spec.asks_to_stop and spec.stop_after is None:
                assert taken == own, (of, spec, drafter)
        sent = [index for _, what, index in self.events if what == "sent"]
        assert len(sent) == len(set(sent)), (of, spec)
        for target, drafter in of.edges:
            on_edge = [g for g in sent if (of.target_of(g), of.drafter_of(g)) == (target, drafter)]
            assert on_edge == sorted(on_edge), (of, spec)
        for what in ("sent", "arrived"):
            seen = {index for _, kind, index in self.events if kind == what}
            assert {g for report in self.drafter_reports for g in report["taken"]} <= seen


def play(
    topology: Topology, spec: Spec, body: Callable[[Topology, int, Spec], Any] = observed, timeout_s: float = 60.0
) -> Timeline:
    """Runs an observed exchange to its end and returns its events, bounds not yet checked."""
    return Timeline(topology, spec, run_ranks(body, topology, spec, timeout_s=timeout_s))


def size_of(index: int, spec: Spec) -> int:
    return layout_of(index, spec.max_tokens).num_bytes


def random_setting(seed: int) -> tuple[Topology, Spec]:
    """Ranks, bounds, sizes and speeds drawn at random; every second one ends early, somewhere, by any rank's wish."""
    rng = random.Random(seed)
    topology = Topology(rng.randint(1, 4), rng.randint(1, 3))
    step = topology.num_drafters * rng.randint(1, 4)
    depth = rng.choice([1, 2, 3, rng.randint(4, 9)])
    spec = Spec(
        num_entries=rng.randint(1, 60),
        depth=depth,
        min_ready=rng.choice([1, depth, depth + rng.randint(1, 5)]),
        num_buffers=rng.randint(1, 4),
        micro_batches_per_step=step,
        max_tokens=rng.choice([1, 2, 40, 300, EXTREMES]),
    )
    largest = max(size_of(index, spec) for index in range(spec.num_entries))
    spec = replace(spec, max_bytes=rng.choice([None, None, 1, largest, largest - 1, rng.randint(1, 4 * largest) | 1]))
    speeds = [0.0, 0.0, 0.001, rng.choice([0.005, 0.012])]
    names = [topology.name(rank) for rank in range(topology.world_size)]
    names += [edge_name(topology, topology.target_rank(t), topology.drafter_rank(d)) for t, d in topology.edges]
    spec = replace(spec, seconds={name: rng.choice(speeds) for name in names})
    ends = rng.choice(["plan", "plan", "step", "asked"])
    if ends == "step":
        spec = replace(spec, stop_after=step * rng.randint(1, math.ceil(spec.num_entries / step)) - 1)
        if spec.stop_after >= spec.num_entries:
            spec = replace(spec, stop_after=None)
    elif ends == "asked":
        at = rng.randrange(spec.num_entries)
        asking = rng.choice(
            [topology.target_rank(topology.target_of(at)), topology.drafter_rank(topology.drafter_of(at))]
        )
        spec = replace(spec, asks_to_stop=topology.name(asking), at=at)
    return topology, spec


def check_random(seed: int) -> None:
    """One random setting from end to end; whatever fails names the seed and the setting."""
    topology, spec = random_setting(seed)
    try:
        play(topology, spec, timeout_s=45).check()
    except BaseException as error:
        raise AssertionError(f"seed {seed}, {topology}, {spec}: {type(error).__name__}: {error}") from error
