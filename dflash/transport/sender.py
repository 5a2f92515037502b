"""The target's end: packed hidden states go out over this rank's edges."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from dflash.batch import PackedHiddenStates
from dflash.groups import Topology
from dflash.transport.channel import ControlChannel
from dflash.transport.control import ControlPlane
from dflash.transport.endpoint import Endpoint, Work
from dflash.transport.errors import ProtocolError
from dflash.transport.messages import Kind, Message
from dflash.transport.payload import PayloadChannel, event_now

Buffer = TypeVar("Buffer")
OnDelivered = Callable[[str, int, float, float, int], None]


@dataclass(frozen=True, slots=True)
class _Outgoing:
    packed: PackedHiddenStates
    index: int
    ready: torch.cuda.Event | None


@dataclass(slots=True)
class _Edge:
    """What this target knows of one of its drafters."""

    name: str
    drafter_rank: int
    payload: PayloadChannel
    watermark: int = -1
    num_sent: int = 0
    in_flight: _Outgoing | None = None
    started_s: float = 0.0  # when it was posted
    waiting: deque[_Outgoing] = field(default_factory=deque)
    stop_after: int | None = None


class HiddenStateSender(Endpoint):
    """Sends the packed micro-batches of one target, each to the drafter that trains on it.

    `send` never waits: it hands a micro-batch over, and `pump`, which every wait calls, puts it on its edge once the
    drafter has room for it and the edge is free. So a slow edge holds up the others only when all buffers of the
    pool wait for it. Buffers come back through `release` when their drafter has confirmed them.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        control: ControlPlane,
        edge_groups: Mapping[tuple[int, int], dist.ProcessGroup],
        *,
        device: torch.device,
        release: Callable[[PackedHiddenStates], None],
        on_wait: Callable[[], None] = lambda: None,
        on_delivered: OnDelivered = lambda drafter, index, start_s, end_s, num_bytes: None,
    ) -> None:
        """`edge_groups` maps this target's (target, drafter) pairs to their two-rank groups.

        `on_delivered(drafter, g, start_s, end_s, num_bytes)` is told of every transfer, from its posting until its
        confirmation was seen, in seconds of `time.perf_counter`.
        """
        super().__init__(control, on_wait)
        self._topology = topology
        self._device = device
        self._release = release
        self._on_delivered = on_delivered
        self._edges: dict[int, _Edge] = {}
        for (target, drafter), group in edge_groups.items():
            assert topology.target_rank(target) == rank
            peer = topology.drafter_rank(drafter)
            name = f"edge {topology.name(rank)} -> {topology.name(peer)}"
            self._edges[peer] = _Edge(name, peer, PayloadChannel(group, peer_rank=peer, device=device))

    @property
    def num_unconfirmed(self) -> int:
        """Micro-batches handed to `send` whose buffers have not come back yet."""
        return sum(len(edge.waiting) + (edge.in_flight is not None) for edge in self._edges.values())

    def is_moot(self, index: int) -> bool:
        """Whether its drafter has asked for an end before micro-batch g: it need not be computed or sent."""
        stop_after = self._edge_of(index).stop_after
        return stop_after is not None and index > stop_after

    def is_over(self, index: int) -> bool:
        """Whether all drafters of this target have asked for an end before micro-batch g: nothing is left to do."""
        stops = [edge.stop_after for edge in self._edges.values()]
        return all(stop_after is not None and index > stop_after for stop_after in stops)

    @property
    def was_stopped(self) -> bool:
        """Whether a drafter has asked for an end."""
        return any(edge.stop_after is not None for edge in self._edges.values())

    def can_send(self, index: int) -> bool:
        """Whether micro-batch g would leave at once: its edge is free and its drafter has room."""
        edge = self._edge_of(index)
        return edge.payload.is_idle and not edge.waiting and index <= edge.watermark

    def wait_until_can_send(self, index: int) -> bool:
        """Waits, pumping, until `can_send(g)`; returns False when a STOP makes micro-batch g moot."""
        self.pump_until(lambda: self.is_moot(index) or self.can_send(index), is_polled=False)
        return not self.is_moot(index)

    def wait_for_buffer(self, acquire: Callable[[], Buffer | None]) -> Buffer:
        """Waits, pumping, until `acquire` returns something else than None, and returns that."""
        found: list[Buffer] = []

        def has_buffer() -> bool:
            buffer = acquire()
            if buffer is not None:
                found.append(buffer)
            return bool(found)

        self.pump_until(has_buffer, is_polled=False)
        return found[0]

    def send(self, packed: PackedHiddenStates, index: int) -> None:
        """Hands over micro-batch g; per drafter in ascending order of g.

        On CUDA call it on the stream that packs, which need not have finished. The buffer, trailer included, belongs
        to the sender until `release` is called with `packed`; moot micro-batches are released without being sent.
        """
        edge = self._edge_of(index)
        assert not edge.waiting or edge.waiting[-1].index < index, "micro-batches of an edge go in order of g"
        edge.waiting.append(_Outgoing(packed, index, event_now(self._device)))
        self.pump()

    def finish(self, start_barrier: Callable[[], Work]) -> None:
        """Waits until all that was handed over has been confirmed, and parts from all ranks in good order."""
        self.pump_until(lambda: self.num_unconfirmed == 0, is_polled=False)
        for edge in self._edges.values():
            self.control.send(edge.drafter_rank, Message(Kind.EOS, sequence=edge.num_sent))
        # Drafters are done when they have trained on everything and saved it; until then this rank watches over them.
        self._part(start_barrier)

    def _edge_of(self, index: int) -> _Edge:
        return self._edges[self._topology.drafter_rank(self._topology.drafter_of(index))]

    def _must_poll(self) -> bool:
        return False  # credits and confirmations arrive on sockets

    def _handle(self, channel: ControlChannel, message: Message) -> None:
        edge = self._edges.get(channel.rank)
        if edge is None:
            raise ProtocolError(f"{channel.name}, which has no edge to {self.control.name}, sent {message.kind.name}")
        match message.kind:
            case Kind.CREDIT:
                if message.index < edge.watermark:
                    raise ProtocolError(f"{edge.name}: credit went back from g {edge.watermark} to {message.index}")
                edge.watermark = message.index
            case Kind.RECEIVED:
                self._confirm(edge, message)
            case Kind.STOP:
                if edge.stop_after is not None:
                    raise ProtocolError(f"{edge.name}: STOP after g {message.index}, before it after {edge.stop_after}")
                edge.stop_after = message.index
            case _:
                raise ProtocolError(f"{edge.name}: unexpected {message.kind.name} from the drafter")

    def _confirm(self, edge: _Edge, message: Message) -> None:
        outgoing = edge.in_flight
        expected = None if outgoing is None else (edge.num_sent - 1, outgoing.index)
        if outgoing is None or (message.sequence, message.index) != expected:
            raise ProtocolError(
                f"{edge.name}: RECEIVED for payload {message.sequence}, g {message.index}; in flight is {expected}"
            )
        edge.in_flight = None
        name, num_bytes = self._topology.name(edge.drafter_rank), outgoing.packed.layout.num_bytes
        self._on_delivered(name, message.index, edge.started_s, time.perf_counter(), num_bytes)
        self._release(edge.payload.finish_send())

    def _advance(self) -> bool:
        has_started = False
        for edge in self._edges.values():
            while edge.waiting and self.is_moot(edge.waiting[-1].index):
                self._release(edge.waiting.pop().packed)
            if edge.waiting and edge.payload.is_idle and edge.waiting[0].index <= edge.watermark:
                self._start(edge, edge.waiting.popleft())
                has_started = True
        return has_started

    def _start(self, edge: _Edge, outgoing: _Outgoing) -> None:
        """The isend first, then the word about it: a drafter never waits for what has not been posted."""
        packed, layout = outgoing.packed, outgoing.packed.layout
        edge.started_s = time.perf_counter()
        edge.payload.send(packed, edge.num_sent, outgoing.index, outgoing.ready)
        ready = Message(
            Kind.READY,
            sequence=edge.num_sent,
            index=outgoing.index,
            num_tokens=layout.num_tokens,
            num_documents=layout.num_documents,
            feature_width=layout.feature_width,
            feature_dtype=layout.feature_dtype,
            num_bytes=layout.num_bytes,
        )
        edge.in_flight = outgoing
        edge.num_sent += 1
        self.control.send(edge.drafter_rank, ready)
