"""The drafter's end: the queue of packed hidden states that wait to be trained on."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dflash.batch import PackedHiddenStates, PackedLayout
from dflash.groups import Topology
from dflash.transport.channel import ControlChannel
from dflash.transport.control import ControlPlane
from dflash.transport.endpoint import Endpoint, Work
from dflash.transport.errors import ProtocolError
from dflash.transport.messages import Kind, Message
from dflash.transport.payload import PayloadChannel, ReceiveBuffer, ReceiveBuffers
from dflash.transport.window import CreditWindow, Schedule, num_to_start

_SETTLE_S = 200e-6
_MAX_SETTLE_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class _Held:
    """A micro-batch that occupies a buffer: being received, waiting, or being trained on."""

    index: int
    packed: PackedHiddenStates
    buffer: ReceiveBuffer


@dataclass(slots=True)
class _Edge:
    """What this drafter knows of one of its targets."""

    name: str
    target_rank: int
    payload: PayloadChannel
    expected: deque[tuple[int, PackedLayout]] = field(default_factory=deque)  # admitted and not yet announced
    num_announced: int = 0
    receiving: _Held | None = None
    has_ended: bool = False


class HiddenStateQueue(Endpoint):
    """Receives one drafter's micro-batches and hands them out strictly in order of g.

    `depth` and `num_bytes` count the micro-batches that occupy a buffer, from the posting of their receive until
    `consumed`, and the bytes of their payloads.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        control: ControlPlane,
        edge_groups: Mapping[tuple[int, int], dist.ProcessGroup],
        schedule_of: Callable[[int], Schedule],
        *,
        depth: int,
        max_bytes: int | None,
        min_ready: int,
        device: torch.device,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`schedule_of(d)` yields (g, layout) of the d-th drafter's own micro-batches, ascending, from where the run
        starts; of the other drafters only the beginning is read. `depth`, `max_bytes` and `min_ready` are this
        drafter's share, the same for all. The first credits leave at once.
        """
        super().__init__(control, on_wait)
        self._topology = topology
        self._device = device
        place = topology.index_in_group(rank)
        limits = {"depth": depth, "max_bytes": max_bytes}
        self._window = CreditWindow(schedule_of(place), **limits)
        self._num_to_start = num_to_start(schedule_of, place, topology.num_drafters, **limits, min_ready=min_ready)
        self._buffers = ReceiveBuffers(device, max_buffers=depth, max_bytes=max_bytes)
        self._edges: dict[int, _Edge] = {}
        for (target, drafter), group in edge_groups.items():
            assert topology.drafter_rank(drafter) == rank
            peer = topology.target_rank(target)
            name = f"edge {topology.name(peer)} -> {topology.name(rank)}"
            self._edges[peer] = _Edge(name, peer, PayloadChannel(group, peer_rank=peer, device=device))
        self._ready: dict[int, _Held] = {}
        self._taken: _Held | None = None
        self._has_started = False
        self._last_consumed = -1
        self._last: int | None = None
        self.max_depth_seen = 0
        self._extend_credit()

    @property
    def num_ready(self) -> int:
        """Micro-batches that have arrived and wait to be taken."""
        return len(self._ready)

    @property
    def depth(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        return sum(held.packed.layout.num_bytes for held in self._held)

    @property
    def num_allocated_bytes(self) -> int:
        """Bytes of all receive buffers, free ones included."""
        return self._buffers.num_allocated_bytes

    def take(self, index: int) -> PackedHiddenStates | None:
        """Waits, pumping, for micro-batch g, which must be the next of the schedule, and hands it out.

        The first time it also waits until `min_ready` micro-batches are there, or all that can come before anyone
        trains. Returns None, now and later, once a rank was asked to stop.
        """
        assert self._taken is None, "consume one micro-batch before taking the next"
        assert self._window.next_index == index, f"g {self._window.next_index} is next, not {index}"
        self.pump_until(
            lambda: self.stop_signal is not None or (index in self._ready and self._may_start()), is_polled=False
        )
        if self.stop_signal is not None:
            return None
        self._has_started = True
        self._taken = self._ready.pop(index)
        return self._taken.packed

    def consumed(self, packed: PackedHiddenStates) -> None:
        """Takes the buffer of `packed` back and extends the credit.

        On CUDA the work queued on the current stream may still read the buffer. The views in `packed` are void.
        """
        assert self._taken is not None and self._taken.packed is packed
        self._last_consumed = self._window.consume()
        packed.void()  # or a caller's reference would keep one buffer more alive than the bound allows
        self._buffers.release(self._taken.buffer)
        self._taken = None
        self._extend_credit()
        self._settle()

    def stop(self, last: int | None = None) -> None:
        """Ends the plan behind micro-batch g = `last`: targets serve through it, what comes beyond is dropped.

        None ends it behind what has been consumed.
        """
        last = self._last_consumed if last is None else last
        assert self._last is None and (self._taken is None or self._taken.index <= last)
        self._last = last
        self._window.stop_after(last)
        for index in [index for index in self._ready if index > last]:
            self._buffers.release(self._ready.pop(index).buffer)
        for rank in self._edges:
            self.control.send(rank, Message(Kind.STOP, index=last))

    def finish(self, start_barrier: Callable[[], Work]) -> None:
        """Waits for the end of every edge and parts from all ranks in good order; everything has been consumed."""
        assert self._window.is_finished and self._taken is None
        self.pump_until(lambda: all(edge.has_ended for edge in self._edges.values()), is_polled=False)
        self._part(start_barrier)

    @property
    def _held(self) -> list[_Held]:
        receiving = [edge.receiving for edge in self._edges.values() if edge.receiving is not None]
        return receiving + list(self._ready.values()) + ([] if self._taken is None else [self._taken])

    def _may_start(self) -> bool:
        return self._has_started or self.num_ready >= min(self._num_to_start, len(self._window))

    def _settle(self) -> None:
        """Pumps a few rounds while things move: after RECEIVED the next READY is a moment away, and once its receive
        is posted the transfer runs beside the computation that follows."""
        for _ in range(_MAX_SETTLE_ROUNDS):
            if not self._round(_SETTLE_S):
                return

    def _extend_credit(self) -> None:
        admitted = self._window.admit()
        ranks = []
        for index, layout in admitted:
            rank = self._topology.target_rank(self._topology.target_of(index))
            self._edges[rank].expected.append((index, layout))
            ranks.append(rank)
        for rank in dict.fromkeys(ranks):  # the others gain nothing by the new watermark
            self.control.send(rank, Message(Kind.CREDIT, index=self._window.watermark))

    def _must_poll(self) -> bool:
        return any(edge.receiving is not None for edge in self._edges.values())

    def _handle(self, channel: ControlChannel, message: Message) -> None:
        edge = self._edges.get(channel.rank)
        if edge is None:
            raise ProtocolError(f"{channel.name}, which has no edge to {self.control.name}, sent {message.kind.name}")
        match message.kind:
            case Kind.READY:
                self._receive(edge, message)
            case Kind.EOS:
                self._end(edge, message)
            case _:
                raise ProtocolError(f"{edge.name}: unexpected {message.kind.name} from the target")

    def _receive(self, edge: _Edge, message: Message) -> None:
        """Posts the receive of an announced payload, after holding the announcement against the plan."""
        where = f"{edge.name}, g {message.index}"
        if edge.receiving is not None or edge.has_ended or not edge.expected:
            raise ProtocolError(f"{where}: announced while nothing more was admitted on this edge")
        index, layout = edge.expected[0]
        announced = {
            "payload number": (message.sequence, edge.num_announced),
            "g": (message.index, index),
            "tokens": (message.num_tokens, layout.num_tokens),
            "documents": (message.num_documents, layout.num_documents),
            "feature width": (message.feature_width, layout.feature_width),
            "feature dtype": (message.feature_dtype, layout.feature_dtype),
            "bytes": (message.num_bytes, layout.num_bytes),
        }
        for what, (told, planned) in announced.items():
            if told != planned:
                raise ProtocolError(f"{where}: announced with {what} {told}, the plan says {planned}")
        edge.expected.popleft()
        edge.num_announced += 1
        buffer = self._buffers.acquire(layout.num_bytes)
        edge.receiving = _Held(index, PackedHiddenStates(layout, buffer.storage), buffer)
        edge.payload.receive(edge.receiving.packed, buffer.free)
        self.max_depth_seen = max(self.max_depth_seen, self.depth)

    def _end(self, edge: _Edge, message: Message) -> None:
        missing = [index for index, _ in edge.expected if self._last is None or index <= self._last]
        if missing or edge.receiving is not None or message.sequence != edge.num_announced:
            raise ProtocolError(
                f"{edge.name}: ended after {message.sequence} payloads, {edge.num_announced} were announced and "
                f"{len(missing)} more are due"
            )
        edge.has_ended = True

    def _advance(self) -> bool:
        has_arrived = False
        for edge in self._edges.values():
            if edge.receiving is not None and edge.payload.has_arrived():
                self._accept(edge, edge.receiving)
                has_arrived = True
        return has_arrived

    def _accept(self, edge: _Edge, held: _Held) -> None:
        sequence, index = edge.payload.finish_receive()
        if (sequence, index) != (edge.num_announced - 1, held.index):
            raise ProtocolError(
                f"{edge.name}, g {held.index}: the payload's trailer says number {sequence}, g {index}, "
                f"expected number {edge.num_announced - 1}"
            )
        edge.receiving = None
        self.control.send(edge.target_rank, Message(Kind.RECEIVED, sequence=sequence, index=index))
        if self._last is not None and index > self._last:
            self._buffers.release(held.buffer)
        else:
            self._ready[index] = held
