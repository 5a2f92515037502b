"""What the drafter is trained on: which slots carry loss, with what weight, and the sums of one micro-batch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.batch import TargetVocabulary
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import (
    SlotLosses,
    Teacher,
    frozen_head_cross_entropy,
    frozen_head_losses,
    teacher_tokens,
)
from dflash.drafter.metrics import MetricSums
from dflash.drafter.terms import Terms

LABELS = ("data", "target")
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
class ObjectiveSettings:
    """What the drafter is trained on; the default is cross entropy on the data's tokens, decaying along the block.

    `labels`: "data", the tokens of the data, or "target", the argmax of the target's logits. `dpace_alpha`: None is the
    decay with `gamma` (None: the block size's default); with a number CE has D-PACE's weights instead, and the other
    terms weigh all slots alike.
    Raises ValueError, with the config's key, for what is out of range or senseless. Source: design section 3.
    """

    gamma: float | None = None
    labels: str = "data"
    ce_weight: float = 1.0
    kl_weight: float = 0.0
    kl_temperature: float = 1.0
    tv_weight: float = 0.0
    cap_weight: float = 0.0
    dpace_alpha: float | None = None

    def __post_init__(self) -> None:
        if self.labels not in LABELS:
            raise ValueError(f"objective.labels: {self.labels!r} must be one of {', '.join(LABELS)}")
        weights = {name: getattr(self, f"{name}_weight") for name in ("ce", "kl", "tv", "cap")}
        for name, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"objective.{name}.weight: {weight} must be a number of at least 0")
        if not any(weights.values()):
            raise ValueError("objective.ce.weight: the weights of ce, kl, tv and cap are all 0; one must be above")
        if not 0 < self.kl_temperature < math.inf:
            raise ValueError(f"objective.kl.temperature: {self.kl_temperature} must be a number above 0")
        if self.kl_temperature != 1 and not self.kl_weight:
            raise ValueError(
                f"objective.kl.temperature: {self.kl_temperature} has no effect while objective.kl.weight is 0; leave "
                "it at 1"
            )
        if self.dpace_alpha is not None:
            if not 0 <= self.dpace_alpha <= 1:
                raise ValueError(f"objective.dpace.alpha: {self.dpace_alpha} must be from 0 to 1, or null for off")
            if self.gamma is not None:
                raise ValueError(
                    f"objective.gamma: {self.gamma} has no effect with objective.dpace.alpha, which replaces the "
                    "decay; leave it null"
                )
            if not self.ce_weight:
                raise ValueError(
                    "objective.dpace.alpha: D-PACE weighs cross entropy, and objective.ce.weight is 0; raise it or set "
                    "objective.dpace.alpha=null"
                )

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's final normed hidden state must come along."""
        return self.terms.needs_teacher or self.labels == "target"

    @property
    def terms(self) -> Terms:
        return Terms(self.ce_weight, self.kl_weight, self.tv_weight, self.cap_weight, self.kl_temperature)

    @property
    def metric_terms(self) -> tuple[str, ...]:
        """Names of the sums that MetricSums holds besides loss and accuracy; none where CE is all and is the loss."""
        if not self.terms.is_mixture and self.ce_weight == 1 and self.dpace_alpha is None:
            return ()
        return tuple(name for name in self.terms.value_names if name != "ce" or self.ce_weight > 0)

    def decay(self, block_size: int) -> float:
        """The decay constant (slots) of the weights v; infinite, so that all weigh alike, under D-PACE."""
        return decay_gamma(block_size, self.gamma) if self.dpace_alpha is None else math.inf


PLAIN = ObjectiveSettings()


@dataclass(frozen=True, slots=True)
class TrainedSlots:
    """The M supervised slots of N blocks, picked on the host, where the tokens are known.

    Shapes: `index` i64 [M], places in the flattened [N*B]; `labels` i64 [M]; `weights` f32 [M], the v of each slot;
    `counts` f32 [B-1], supervised slots per place in the block; `whole_blocks` i64 [W], blocks whose slots 1 … B-1 are
    all supervised; `denominator` the sum of v; `teacher_places` i64 [M], where a teacher is needed: the packed index of
    the token before each slot's, at which the target's logits are for the slot.
    """

    index: Tensor
    labels: Tensor
    weights: Tensor
    counts: Tensor
    whole_blocks: Tensor
    num_blocks: int
    block_size: int
    denominator: float
    teacher_places: Tensor | None = None

    @classmethod
    def of(
        cls, blocks: Blocks, input_ids_T: Tensor, loss_mask_T: Tensor, gamma: float, needs_teacher: bool = False
    ) -> "TrainedSlots":
        """Slots k >= 1 within the document whose token is supervised; each is to predict that token."""
        tokens_NB = blocks.tokens_NB.clamp(max=blocks.num_tokens - 1)
        supervised_NB = blocks.in_document_NB & (loss_mask_T[tokens_NB] != 0)
        return cls.labelled(supervised_NB, input_ids_T[tokens_NB], gamma, tokens_NB - 1 if needs_teacher else None)

    @classmethod
    def labelled(
        cls, supervised_NB: Tensor, labels_NB: Tensor, gamma: float, teacher_places_NB: Tensor | None = None
    ) -> "TrainedSlots":
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
            teacher_places=None if teacher_places_NB is None else teacher_places_NB.flatten()[index].long(),
        )

    @property
    def num_slots(self) -> int:
        return self.index.numel()

    def to(self, device: torch.device | str) -> "TrainedSlots":
        """The same slots on `device`; from pinned memory the copy does not block."""
        moved = (self.index, self.labels, self.weights, self.counts, self.whole_blocks)
        moved = (tensor.to(device, non_blocking=True) for tensor in moved)
        places = self.teacher_places
        places = None if places is None else places.to(device, non_blocking=True)
        return TrainedSlots(*moved, self.num_blocks, self.block_size, self.denominator, places)


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """`loss_sum` carries the gradient; `metrics` holds its value, the denominator and the metric sums, detached."""

    loss_sum: Tensor
    metrics: MetricSums


def objective_sums(
    hidden_NBH: Tensor,
    slots: TrainedSlots,
    vocabulary: TargetVocabulary,
    settings: ObjectiveSettings = PLAIN,
    teacher_TH: Tensor | None = None,
    chunk_slots: int | None = None,
) -> ObjectiveSums:
    """Sums of one micro-batch over its supervised slots; everything on one device, nothing is read back.

    The loss of a step is the sum of `loss_sum` over all its micro-batches, divided once by the sum of denominators.
    `slots` are weighted by `settings.decay`. `teacher_TH`: the target's final normed hidden states, where needed.
    """
    assert hidden_NBH.shape[:2] == (slots.num_blocks, slots.block_size), hidden_NBH.shape
    hidden_MH = hidden_NBH.flatten(0, 1).index_select(0, slots.index)
    losses = _slot_losses(hidden_MH, slots, vocabulary, settings, teacher_TH, chunk_slots)
    if settings.dpace_alpha is None:
        loss_sum = (losses.mixture_M * slots.weights).sum()
    else:
        weights_M = dpace_weights(losses.values["ce"], slots, settings.dpace_alpha)
        loss_sum = (losses.ce_M * weights_M).sum() * settings.ce_weight
        if settings.terms.is_mixture:
            loss_sum = loss_sum + (losses.mixture_M * slots.weights).sum()
    return ObjectiveSums(loss_sum, _metric_sums(loss_sum.detach(), losses, slots, settings.metric_terms))


@torch.no_grad()
def dpace_weights(ce_M: Tensor, slots: TrainedSlots, alpha: float) -> Tensor:
    """D-PACE's weights [M]: w_j = sum over supervised m >= j of prod over i <= m of q_i, q = (1 - alpha) p + alpha.

    p is the probability of the right token; slots that are not supervised count q = 1 and are not summed over. It is
    what a block's expected accept length gains, smoothed by alpha. Source: arXiv 2605.18810.
    """
    shape = (slots.num_blocks, slots.block_size)
    confidences_NB = ce_M.new_ones(shape)
    confidences_NB.view(-1).index_copy_(0, slots.index, (-ce_M).exp_().mul_(1 - alpha).add_(alpha))
    supervised_NB = ce_M.new_zeros(shape)
    supervised_NB.view(-1).index_fill_(0, slots.index, 1.0)
    reached_NB = confidences_NB.cumprod(1) * supervised_NB
    return reached_NB.flip(1).cumsum(1).flip(1).flatten().index_select(0, slots.index)


def _slot_losses(
    hidden_MH: Tensor,
    slots: TrainedSlots,
    vocabulary: TargetVocabulary,
    settings: ObjectiveSettings,
    teacher_TH: Tensor | None,
    chunk_slots: int | None,
) -> SlotLosses:
    terms, teacher = settings.terms, None
    if settings.needs_teacher:
        assert teacher_TH is not None and slots.teacher_places is not None, "the objective needs a teacher"
        teacher = Teacher(teacher_TH, slots.teacher_places)
    is_separate = settings.dpace_alpha is not None
    labels_M = slots.labels if settings.labels == "data" else None
    if terms.is_mixture:
        # Labels alone come cheaper from all tokens at once than from every slot's logits.
        if labels_M is None and not terms.needs_teacher:
            labels_M, teacher = teacher_tokens(teacher, vocabulary, chunk_slots), None
        return frozen_head_losses(
            hidden_MH, labels_M, vocabulary, terms, teacher, separate_ce=is_separate, chunk_slots=chunk_slots
        )
    if labels_M is None:
        labels_M = teacher_tokens(teacher, vocabulary, chunk_slots)
    ce_M, predicted_M = frozen_head_cross_entropy(hidden_MH, labels_M, vocabulary, chunk_slots)
    mixture_M = ce_M if terms.ce == 1 else ce_M * terms.ce
    return SlotLosses(mixture_M, ce_M, {"ce": ce_M.detach()}, predicted_M, labels_M)


def _metric_sums(loss_sum: Tensor, losses: SlotLosses, slots: TrainedSlots, terms: tuple[str, ...]) -> MetricSums:
    device = loss_sum.device
    right_NB = torch.zeros(slots.num_blocks * slots.block_size, dtype=torch.float64, device=device)
    right_NB.index_copy_(0, slots.index, (losses.predicted_M == losses.labels_M).double())
    right_NK = right_NB.view(slots.num_blocks, slots.block_size)[:, 1:]
    # Slots up to the first wrong one, and the anchor's own: the token that a verification gains in any case.
    leading_W = right_NK.index_select(0, slots.whole_blocks).cumprod(1).sum(1)
    num_whole = slots.whole_blocks.numel()
    head = torch.zeros(4, dtype=torch.float64, device=device)
    head[0] = loss_sum
    head[1].fill_(slots.denominator)
    head[2] = leading_W.sum() + num_whole
    head[3].fill_(num_whole)
    parts = [head, right_NK.sum(0), slots.counts.double()]
    for name in terms:
        values_M = losses.values[name] if name == "entropy" else losses.values[name] * slots.weights
        parts.append(values_M.sum(dtype=torch.float64)[None])
    return MetricSums(torch.cat(parts), terms)
