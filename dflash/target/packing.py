"""Gather the captured hidden states of a micro-batch into one pooled buffer, off the forward's stream on CUDA."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.batch import MicroBatch, PackedHiddenStates, PackedLayout
from dflash.target.capture import CapturedHiddenStates

_METADATA = ("input_ids", "loss_mask", "lengths", "document_ids")


class BufferPool:
    """A fixed number of equal byte buffers, lent out one micro-batch at a time."""

    def __init__(self, num_buffers: int, num_bytes: int, device: torch.device) -> None:
        """Allocates all `num_buffers` buffers of `num_bytes` at once, so that nothing is allocated while training."""
        assert num_buffers >= 1 and num_bytes >= 1
        self.num_bytes = num_bytes
        self._free = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        self._lent: dict[int, Tensor] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Tensor | None:
        """Lend a buffer, u8 [num_bytes], or None while all are lent."""
        if not self._free:
            return None
        buffer = self._free.pop()
        self._lent[buffer.data_ptr()] = buffer
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Take back a lent buffer, given as it was lent or as the `buffer` of what was packed into it.

        On CUDA whoever read it must have enqueued that before the next forward, or have finished: the next pack()
        into it waits for no more than the stream its forward ran on.
        """
        lent = self._lent.pop(buffer.data_ptr(), None)
        assert lent is not None, "this buffer is not out of the pool: released twice, or never acquired"
        self._free.append(lent)


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Smallest and largest feature of one micro-batch, on their way to the host."""

    index: int
    document_ids: Tensor
    extremes: Tensor  # fp32 [2], on the host
    arrived: torch.cuda.Event | None


class HiddenStatePacker:
    """Packs captured hidden states into buffers of a pool and watches that they are sound.

    On CUDA all of it runs on `stream`, behind the forward that is enqueued on the current stream, while the next
    forward starts at once.
    """

    def __init__(self, pool: BufferPool, feature_dtype: torch.dtype, device: torch.device) -> None:
        self._pool = pool
        self._feature_dtype = feature_dtype
        self._device = device
        self._verdicts: deque[_Verdict] = deque()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.packed_event: torch.cuda.Event | None = None
        # Surrounds what is enqueued on `stream` for micro-batch g.
        self.timed: Callable[[int], AbstractContextManager[None]] = lambda index: nullcontext()

    def on_stream(self) -> AbstractContextManager[None]:
        """Enqueue what follows behind the packing; does nothing on CPU, where asking for a stream would start CUDA."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    @torch.no_grad()
    def pack(self, captured: CapturedHiddenStates, micro_batch: MicroBatch, buffer: Tensor) -> PackedHiddenStates:
        """Gather the real tokens into `buffer`, documents in the micro-batch's order, features side by side.

        The trailer stays unwritten: it is the transport's. On CUDA the result is complete once `packed_event`, new at
        each call, is; work enqueued on `stream` comes after it by itself. On CPU it is complete at return, and features
        that are all zero raise ValueError here.
        """
        features = captured.hidden[0]
        layout = PackedLayout(
            num_tokens=micro_batch.num_tokens,
            num_documents=micro_batch.num_documents,
            feature_width=len(features) * features[0].shape[-1],
            feature_dtype=self._feature_dtype,
        )
        assert layout.num_bytes <= self._pool.num_bytes, (
            f"micro-batch {micro_batch.index} needs {layout.num_bytes} bytes, a buffer has {self._pool.num_bytes}"
        )
        packed = PackedHiddenStates(layout, buffer)
        if self.stream is None:
            self._fill(packed, captured, micro_batch)
            self.raise_if_bad()
            return packed
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream), self.timed(micro_batch.index):
            self._fill(packed, captured, micro_batch)
            self.packed_event = self.stream.record_event()
        # The forward's stream allocated these; without this their memory would go to the next forward while read here.
        captured.token_slots_T.record_stream(self.stream)
        for sub_batch in captured.hidden:
            for hidden in sub_batch:
                hidden.record_stream(self.stream)
        return packed

    def raise_if_bad(self, wait: bool = False) -> None:
        """Raise ValueError if a packed micro-batch's features were all zero, naming its documents.

        What is not finite is the drafters' to judge, who can leave a step out together. Looks at the verdicts that
        have arrived on the host; `wait` waits for all of them, for the end of a run.
        """
        while self._verdicts:
            verdict = self._verdicts[0]
            if verdict.arrived is not None and not verdict.arrived.query():
                if not wait:
                    return
                verdict.arrived.synchronize()
            self._verdicts.popleft()
            _raise_on(verdict)

    def _fill(self, packed: PackedHiddenStates, captured: CapturedHiddenStates, micro_batch: MicroBatch) -> None:
        hidden_size = captured.hidden[0][0].shape[-1]
        for feature, per_sub_batch in enumerate(zip(*captured.hidden, strict=True)):
            rows = [hidden.reshape(-1, hidden_size) for hidden in per_sub_batch]
            # Micro-batches come sorted by length, so one sub-batch is the rule and this copy the exception.
            padded_PH = rows[0] if len(rows) == 1 else torch.cat(rows)
            columns = slice(feature * hidden_size, (feature + 1) * hidden_size)
            torch.index_select(padded_PH, 0, captured.token_slots_T, out=packed.features[:, columns])
        self._write_metadata(packed, micro_batch)
        self._watch(packed, micro_batch)

    def _write_metadata(self, packed: PackedHiddenStates, micro_batch: MicroBatch) -> None:
        if self.stream is None:
            for name in _METADATA:
                getattr(packed, name).copy_(getattr(micro_batch, name))
            return
        # The sections lie side by side, so all of them go over in one copy from pinned memory.
        sections = packed.layout.sections
        start, end = sections["input_ids"][0], sections["trailer"][0]
        staging = torch.zeros(end - start, dtype=torch.uint8, pin_memory=True)
        for name in _METADATA:
            offset, dtype, shape = sections[name]
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            section = staging[offset - start : offset - start + num_bytes].view(dtype)
            section.copy_(getattr(micro_batch, name))
        packed.buffer[start:end].copy_(staging, non_blocking=True)

    def _watch(self, packed: PackedHiddenStates, micro_batch: MicroBatch) -> None:
        """Start the check of one micro-batch: the extremes tell zero features."""
        extremes = torch.stack(torch.aminmax(packed.features)).float()
        arrived = None
        if self.stream is not None:
            on_host = torch.empty(2, dtype=torch.float32, pin_memory=True)
            on_host.copy_(extremes, non_blocking=True)
            extremes, arrived = on_host, self.stream.record_event()
        self._verdicts.append(_Verdict(micro_batch.index, micro_batch.document_ids, extremes, arrived))


def _raise_on(verdict: _Verdict) -> None:
    lowest, highest = verdict.extremes.tolist()
    if lowest == highest == 0.0:
        raise ValueError(
            f"the target's hidden states of micro-batch {verdict.index} are all zero; its documents are "
            f"{verdict.document_ids.tolist()}; check the target's weights"
        )
