"""What drafters tell one another in a step's own all-reduce, beside gradients and metrics: stops and faults."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.data.plan import PlanEntry

_STOPPING, _UNFINISHED, _OVERFLOW, _NUM_COUNTS = 0, 1, 2, 3
_SOUND, _BAD_FEATURES, _BAD_LOSS, _BAD_GRADIENTS = range(4)
_CAUSES = {_BAD_FEATURES: "hidden states are", _BAD_LOSS: "loss is", _BAD_GRADIENTS: "gradients are"}


def fault_code(features_ok: Tensor, loss_ok: Tensor, gradients_ok: Tensor) -> Tensor:
    """The first thing that is not finite, from 0-d bools on the device, as a number; 0 where all is sound."""
    code = torch.where(gradients_ok, _SOUND, _BAD_GRADIENTS)
    return torch.where(features_ok, torch.where(loss_ok, code, _BAD_LOSS), _BAD_FEATURES)


class Votes:
    """Counts and codes that a sum over all drafters keeps readable: each micro-batch is one drafter's.

    Shape: `values` [3 + M]: drafters that were asked to stop, drafters that left micro-batches out, whether the sum
    over all of them overflowed (known once they are summed), and the fault code of each of the M micro-batches.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @staticmethod
    def width(num_micro_batches: int) -> int:
        return _NUM_COUNTS + num_micro_batches

    def stop(self, *, is_unfinished: bool) -> None:
        self.values[_STOPPING].fill_(1.0)
        if is_unfinished:
            self.values[_UNFINISHED].fill_(1.0)

    def accuse(self, place: int, code: Tensor) -> None:
        """Note the fault code of the micro-batch at `place` of its step."""
        self.values[_NUM_COUNTS + place].copy_(code)

    def to_host(self) -> "PendingOutcome":
        """Start the way of the reduced values to the host; on CUDA behind what the current stream has been given."""
        if self.values.device.type != "cuda":
            return PendingOutcome(self.values.clone(), None)
        on_host = torch.empty(self.values.shape, dtype=self.values.dtype, pin_memory=True)
        on_host.copy_(self.values, non_blocking=True)
        return PendingOutcome(on_host, torch.cuda.current_stream().record_event())

    def note_overflow(self, is_overflow: Tensor) -> None:
        """Note, after the sum and on every drafter alike, that gradients finite by themselves have none that is."""
        self.values[_OVERFLOW].copy_(is_overflow)

    @property
    def is_spoilt(self) -> Tensor:
        """0-d bool on the device: the sums are not those of the whole step, or not finite."""
        return (self.values[_UNFINISHED:] != 0).any()


@dataclass(frozen=True, slots=True)
class PendingOutcome:
    """Reduced votes that may still be on their way from the device."""

    values: Tensor
    arrived: torch.cuda.Event | None

    def is_there(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def read(self) -> "Outcome":
        assert self.is_there()
        return Outcome.of(self.values.numpy().tolist())  # by way of numpy: nothing of this waits for a device


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the drafters agreed on, the same on each of them; `faults` maps places in the step to fault codes."""

    is_stopping: bool
    is_unfinished: bool
    is_overflow: bool
    faults: dict[int, int]

    @classmethod
    def of(cls, votes_on_host: Sequence[float]) -> "Outcome":
        faults = {place: int(code) for place, code in enumerate(votes_on_host[_NUM_COUNTS:]) if code}
        stopping, unfinished, overflow = (count > 0 for count in votes_on_host[:_NUM_COUNTS])
        return cls(stopping, unfinished, overflow, faults)

    @property
    def is_bad(self) -> bool:
        return self.is_overflow or bool(self.faults)

    def describe(self, entries: list[PlanEntry]) -> str:
        """The faults, by micro-batch and documents; `entries` are the step's."""
        if not self.faults:
            return f"the sum of gradients is not finite over micro-batches {entries[0].index} to {entries[-1].index}"
        return "; ".join(
            f"the {_CAUSES[code]} not finite in micro-batch {entries[place].index}, "
            f"whose documents are {entries[place].document_ids.tolist()}"
            for place, code in self.faults.items()
        )
