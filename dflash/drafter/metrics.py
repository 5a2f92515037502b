"""Sums behind loss, accuracy and accept length: one small tensor that adds up over micro-batches and ranks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metrics:
    """Means read from `MetricSums`; NaN where nothing was counted.

    `loss` nats per unit of weight; `accept_length` tokens per block, the bonus included; `accuracy_per_slot` of the
    slots 1 … B-1.
    """

    loss: float
    accuracy: float
    accept_length: float
    accuracy_per_slot: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums of one or many micro-batches, all on one device.

    Shape: `values` [4 + 2 * (B - 1)]: loss sum, denominator, accept length sum, blocks counted in it, right slots
    [B-1], supervised slots [B-1]. The first two are those of the optimizer step.
    """

    values: Tensor

    @staticmethod
    def width(block_size: int) -> int:
        return 4 + 2 * (block_size - 1)

    @classmethod
    def zeros(cls, block_size: int, device: torch.device | str = "cpu") -> "MetricSums":
        """Empty sums in fp64, to accumulate counts over an interval of any length."""
        return cls(torch.zeros(cls.width(block_size), dtype=torch.float64, device=device))

    @property
    def denominator(self) -> Tensor:
        return self.values[1]

    def add_(self, other: "MetricSums") -> None:
        self.values.add_(other.values)

    def read(self) -> Metrics:
        """The means; copies to the host and waits for the device, so it belongs at the end of a log interval."""
        loss_sum, denominator, accept_sum, num_blocks, *slots = self.values.tolist()
        right, counted = slots[: len(slots) // 2], slots[len(slots) // 2 :]
        return Metrics(
            loss=_ratio(loss_sum, denominator),
            accuracy=_ratio(sum(right), sum(counted)),
            accept_length=_ratio(accept_sum, num_blocks),
            accuracy_per_slot=tuple(_ratio(r, c) for r, c in zip(right, counted, strict=True)),
        )


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
