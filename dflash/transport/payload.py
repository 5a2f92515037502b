"""The payload plane: one two-rank process group per edge, one transfer in flight on it, and the receive buffers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dflash.batch import PackedHiddenStates

_NOT_ARRIVED = -1


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """What the current stream has been given so far, as something another stream can wait for; None on a CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    # torch.cuda.stream(None) would do nothing too, but start CUDA where a run on CPUs leaves it alone.
    return nullcontext() if stream is None else torch.cuda.stream(stream)


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Keep torch.profiler off a transfer.

    Gloo notes a transfer's end where the profiler noted its beginning, in memory that is gone if the profiler has
    stopped in between: the process then crashes at some later time.
    """
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


class PayloadChannel:
    """One edge's payloads, seen from either end; at most one is in flight.

    Works are kept until they are complete: dropping one, or letting it time out, breaks its group.
    """

    def __init__(self, group: dist.ProcessGroup, *, peer_rank: int, device: torch.device) -> None:
        self._group = group
        self._peer_rank = peer_rank
        self._device = device
        # A stream of its own, or a transfer would wait for all compute that happens to be queued before it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._packed: PackedHiddenStates | None = None
        self._work: Any = None
        self._host_trailer: Tensor | None = None
        self._trailer_event: torch.cuda.Event | None = None

    @property
    def is_idle(self) -> bool:
        return self._work is None

    def send(self, packed: PackedHiddenStates, sequence: int, index: int, ready: torch.cuda.Event | None) -> None:
        """Writes the trailer and posts the isend, which does not copy: the buffer must stay until `finish_send`."""
        assert self.is_idle
        self._packed = packed
        with _on(self._stream):
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            packed.trailer[0].fill_(sequence)
            packed.trailer[1].fill_(index)
            with _unrecorded() if self._stream is None else nullcontext():
                self._work = dist.isend(packed.buffer, self._peer_rank, group=self._group)

    def finish_send(self) -> PackedHiddenStates:
        """Ends a send that the peer has confirmed and gives its buffer back."""
        self._work.wait()
        packed, self._packed, self._work = self._packed, None, None
        return packed

    def receive(self, packed: PackedHiddenStates, free: torch.cuda.Event | None) -> None:
        """Posts the irecv of a payload that the peer has announced, into the buffer of `packed`."""
        assert self.is_idle
        self._packed = packed
        with _on(self._stream):
            if self._stream is None:
                # Nothing says when a Gloo irecv is complete but the bytes themselves. The trailer is last, and its
                # last byte, the sign of g, is written last of all, so g >= 0 means that the whole payload is there.
                packed.trailer.fill_(_NOT_ARRIVED)
                self._host_trailer = packed.trailer
            elif free is not None:
                self._stream.wait_event(free)
            with _unrecorded() if self._stream is None else nullcontext():
                self._work = dist.irecv(packed.buffer, self._peer_rank, group=self._group)

    def has_arrived(self) -> bool:
        """Whether the payload being received is complete; never blocks."""
        if self._work is None:
            return False
        if self._stream is None:
            return self._host_trailer[1].item() >= 0
        if self._trailer_event is None and self._work.is_completed():
            with torch.cuda.stream(self._stream):
                self._work.wait()  # orders the stream behind the transfer, and does not hold up the host
                self._host_trailer = torch.empty(2, dtype=torch.int64, pin_memory=True)
                self._host_trailer.copy_(self._packed.trailer, non_blocking=True)
                self._trailer_event = self._stream.record_event()
        return self._trailer_event is not None and self._trailer_event.query()

    def finish_receive(self) -> tuple[int, int]:
        """Ends a receive that has arrived; returns the trailer: edge sequence number and g."""
        self._work.wait()  # at once on Gloo; on NCCL the current stream is ordered behind the transfer
        sequence, index = self._host_trailer.tolist()
        self._packed = self._work = self._host_trailer = self._trailer_event = None
        return sequence, index


@dataclass(frozen=True, slots=True)
class ReceiveBuffer:
    """Bytes to receive into, and the event after which nobody reads what was in them before."""

    storage: Tensor
    free: torch.cuda.Event | None


class ReceiveBuffers:
    """Buffers of a few sizes that are used again, so that memory stays flat over any number of micro-batches.

    Sizes are rounded up to eighths of a power of two: at most an eighth is wasted. Free buffers are let go before
    there are more than `max_buffers`, or more than `max_bytes` and that eighth, together with those in use.
    """

    def __init__(self, device: torch.device, *, max_buffers: int, max_bytes: int | None) -> None:
        self._device = device
        self._max_buffers = max_buffers
        self._max_bytes = None if max_bytes is None else max_bytes + max_bytes // 8
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[ReceiveBuffer] = []
        self.num_allocated = 0
        self.num_allocated_bytes = 0

    def acquire(self, num_bytes: int) -> ReceiveBuffer:
        size = _rounded_up(num_bytes)
        for place, buffer in enumerate(self._free):
            if buffer.storage.numel() == size:
                return self._free.pop(place)
        while self._free and self._is_full(size):
            self._forget(self._free.pop(0))
        with _on(self._stream):  # from this stream's pool, so that nothing the main stream still reads is handed out
            storage = torch.empty(size, dtype=torch.uint8, device=self._device)
            free = event_now(self._device)
        self.num_allocated += 1
        self.num_allocated_bytes += size
        return ReceiveBuffer(storage, free)

    def release(self, buffer: ReceiveBuffer) -> None:
        """Takes a buffer back; what the current stream has been given so far may still read it."""
        self._free.append(ReceiveBuffer(buffer.storage, event_now(self._device)))

    def _is_full(self, size: int) -> bool:
        is_over = self._max_bytes is not None and self.num_allocated_bytes + size > self._max_bytes
        return is_over or self.num_allocated >= self._max_buffers

    def _forget(self, buffer: ReceiveBuffer) -> None:
        if buffer.free is not None:
            self._stream.wait_event(buffer.free)  # its memory goes back to this stream's pool
        self.num_allocated -= 1
        self.num_allocated_bytes -= buffer.storage.numel()


def _rounded_up(num_bytes: int) -> int:
    step = 1 << max(num_bytes.bit_length() - 4, 4)
    return -(-num_bytes // step) * step
