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

    Shape: `values` [4 + 2 * (B - 1) + K]: loss sum, denominator, accept length sum, blocks counted in it, right slots
    [B-1], supervised slots [B-1], then one sum for each of the K names in `terms`. The first two are those of the
    optimizer step. What `terms` holds is said by the objective: each term of the loss by itself, weighted as the
    denominator is, and "entropy", of which every slot has one share.
    """

    values: Tensor
    terms: tuple[str, ...] = ()

    @staticmethod
    def width(block_size: int, terms: tuple[str, ...] = ()) -> int:
        return 4 + 2 * (block_size - 1) + len(terms)

    @classmethod
    def zeros(cls, block_size: int, device: torch.device | str = "cpu", terms: tuple[str, ...] = ()) -> "MetricSums":
        """Empty sums in fp64, to accumulate counts over an interval of any length."""
        return cls(torch.zeros(cls.width(block_size, terms), dtype=torch.float64, device=device), terms)

    @property
    def denominator(self) -> Tensor:
        return self.values[1]

    def add_(self, other: "MetricSums") -> None:
        assert self.terms == other.terms, (self.terms, other.terms)
        self.values.add_(other.values)

    def read(self) -> Metrics:
        """The means; copies to the host and waits for the device, so it belongs at the end of a log interval."""
        (loss_sum, denominator, accept_sum, num_blocks), right, counted, _ = self._parts()
        return Metrics(
            loss=_ratio(loss_sum, denominator),
            accuracy=_ratio(sum(right), sum(counted)),
            accept_length=_ratio(accept_sum, num_blocks),
            accuracy_per_slot=tuple(_ratio(r, c) for r, c in zip(right, counted, strict=True)),
        )

    def read_terms(self) -> dict[str, float]:
        """Means of what the loss is mixed from, by name, empty for plain cross entropy, whose mean is the loss; waits.

        `ce`, `kl`, `cap` in nats and `tv` are per unit of weight; `entropy`, in nats, is over all supervised slots;
        `cap_share` is the share of them that CAP acts on. Terms that are off are not there.
        """
        (_, denominator, *_), right, counted, sums = self._parts()
        num_slots = sum(counted)
        means = {
            name: _ratio(total, num_slots if name == "entropy" else denominator)
            for name, total in zip(self.terms, sums, strict=True)
        }
        if "cap" in means:
            # CAP acts on the right slots, which are counted anyway.
            means["cap_share"] = _ratio(sum(right), num_slots)
        return means

    def _parts(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """On the host: the first four sums, right and supervised slots [B-1] each, and the sums of terms."""
        values = self.values.tolist()
        end = len(values) - len(self.terms)
        middle = (4 + end) // 2
        return values[:4], values[4:middle], values[middle:end], values[end:]


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan
