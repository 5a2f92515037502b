"""What the drafter is trained on: which slots carry loss, with what weight, and the sums of one micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.batch import TargetVocabulary
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import frozen_head_cross_entropy
from dflash.drafter.metrics import MetricSums

DEFAULT_GAMMAS = {16: 7.0, 10: 5.0, 8: 4.0}


def decay_gamma(block_size: int, gamma: float | None) -> float:
    """The decay constant to use (slots): the given one, or the default of the block size.

    Raises ValueError where there is no default, or the given one is not positive. Source: design section 3.
    """
    if gamma is None:
        if block_size not in DEFAULT_GAMMAS:
            known = ", ".join(str(size) for size in sorted(DEFAULT_GAMMAS))
            raise ValueError(f"objective.gamma: must be given for block size {block_size}, defaults exist for {known}")
        return DEFAULT_GAMMAS[block_size]
    if not gamma > 0:
        raise ValueError(f"objective.gamma: {gamma} must be a number above 0")
    return gamma


@dataclass(frozen=True, slots=True)
class TrainedSlots:
    """The M supervised slots of N blocks, picked on the host, where the tokens are known.

    Shapes: `index` i64 [M], places in the flattened [N*B]; `labels` i64 [M]; `weights` f32 [M], the v of each slot;
    `counts` f32 [B-1], supervised slots per place in the block; `whole_blocks` i64 [W], blocks whose slots 1 … B-1 are
    all supervised; `denominator` the sum of v.
    """

    index: Tensor
    labels: Tensor
    weights: Tensor
    counts: Tensor
    whole_blocks: Tensor
    num_blocks: int
    block_size: int
    denominator: float

    @classmethod
    def of(cls, blocks: Blocks, input_ids_T: Tensor, loss_mask_T: Tensor, gamma: float) -> "TrainedSlots":
        """Slots k >= 1 within the document whose token is supervised; each is to predict that token."""
        tokens_NB = blocks.tokens_NB.clamp(max=blocks.num_tokens - 1)
        supervised_NB = blocks.in_document_NB & (loss_mask_T[tokens_NB] != 0)
        return cls.labelled(supervised_NB, input_ids_T[tokens_NB], gamma)

    @classmethod
    def labelled(cls, supervised_NB: Tensor, labels_NB: Tensor, gamma: float) -> "TrainedSlots":
        """Slots that are supervised (bool), with the tokens they are to predict; slot 0 is never trained."""
        num_blocks, block_size = supervised_NB.shape
        supervised_NB = supervised_NB.clone()
        supervised_NB[:, 0] = False
        index = torch.nonzero(supervised_NB.flatten()).flatten()
        # In fp64 on the host: the denominator is summed before it is rounded, the same on every rank.
        decay_B = torch.exp(-(torch.arange(block_size, dtype=torch.float64) - 1) / gamma)
        weights = decay_B[index % block_size]
        return cls(
            index=index,
            labels=labels_NB.flatten()[index].long(),
            weights=weights.float(),
            counts=supervised_NB[:, 1:].sum(0).float(),
            whole_blocks=torch.nonzero(supervised_NB[:, 1:].all(1)).flatten(),
            num_blocks=num_blocks,
            block_size=block_size,
            denominator=float(weights.sum()),
        )

    @property
    def num_slots(self) -> int:
        return self.index.numel()

    def to(self, device: torch.device | str) -> "TrainedSlots":
        """The same slots on `device`; from pinned memory the copy does not block."""
        moved = (self.index, self.labels, self.weights, self.counts, self.whole_blocks)
        moved = (tensor.to(device, non_blocking=True) for tensor in moved)
        return TrainedSlots(*moved, self.num_blocks, self.block_size, self.denominator)


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """`loss_sum` carries the gradient; `metrics` holds its value, the denominator and the metric sums, detached."""

    loss_sum: Tensor
    metrics: MetricSums


def objective_sums(
    hidden_NBH: Tensor, slots: TrainedSlots, vocabulary: TargetVocabulary, chunk_slots: int | None = None
) -> ObjectiveSums:
    """Sums of one micro-batch over its supervised slots; everything on one device, nothing is read back.

    The loss of a step is the sum of `loss_sum` over all its micro-batches, divided once by the sum of denominators.
    """
    assert hidden_NBH.shape[:2] == (slots.num_blocks, slots.block_size), hidden_NBH.shape
    hidden_MH = hidden_NBH.flatten(0, 1).index_select(0, slots.index)
    cross_entropy_M, predicted_M = frozen_head_cross_entropy(hidden_MH, slots.labels, vocabulary, chunk_slots)
    loss_sum = (cross_entropy_M * slots.weights).sum()
    return ObjectiveSums(loss_sum, _metric_sums(loss_sum.detach(), predicted_M == slots.labels, slots))


def _metric_sums(loss_sum: Tensor, right_M: Tensor, slots: TrainedSlots) -> MetricSums:
    device = loss_sum.device
    right_NB = torch.zeros(slots.num_blocks * slots.block_size, dtype=torch.float64, device=device)
    right_NB.index_copy_(0, slots.index, right_M.double())
    right_NK = right_NB.view(slots.num_blocks, slots.block_size)[:, 1:]
    # Slots up to the first wrong one, and the anchor's own: the token that a verification gains in any case.
    leading_W = right_NK.index_select(0, slots.whole_blocks).cumprod(1).sum(1)
    num_whole = slots.whole_blocks.numel()
    head = torch.zeros(4, dtype=torch.float64, device=device)
    head[0] = loss_sum
    head[1].fill_(slots.denominator)
    head[2] = leading_W.sum() + num_whole
    head[3].fill_(num_whole)
    return MetricSums(torch.cat((head, right_NK.sum(0), slots.counts.double())))
