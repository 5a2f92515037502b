"""The target's frozen LM head: logits, and losses of slots that never hold more than a chunk of them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dflash.batch import TargetVocabulary
from dflash.drafter.terms import RowTerms, Terms, row_terms

# Logits held at a time. Larger chunks fall out of the CPU's cache; on CUDA they hide the launches.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# Logits that a mixture's passes work on at a time: on CPU so few that their temporaries stay in its cache.
_TILE_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as a teacher: its final normed hidden states [T, H], and each slot's place i64 [M] among them."""

    hidden_TH: Tensor
    places_M: Tensor


@dataclass(frozen=True, slots=True)
class SlotLosses:
    """Losses [M] of slots: `mixture` carries a gradient, and `ce` one of its own where it is not part of the mixture.

    `values` are the terms one by one, detached; `predicted` and `labels` are tokens, i64.
    """

    mixture_M: Tensor
    ce_M: Tensor
    values: dict[str, Tensor]
    predicted_M: Tensor
    labels_M: Tensor


def vocabulary_logits(hidden_MH: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    """Logits [M, V] of hidden states [M, H], at least fp32, scaled and capped as the target does."""
    dtype = _compute_dtype(hidden_MH, vocabulary.head)
    return _cap_(_multiply(hidden_MH, vocabulary.head.T, dtype), vocabulary)


@torch.no_grad()
def teacher_tokens(teacher: Teacher, vocabulary: TargetVocabulary, chunk_slots: int | None = None) -> Tensor:
    """The target's own choice for every slot, the argmax of its logits, i64 [M]."""
    head, dtype = _widened(vocabulary.head, teacher.hidden_TH)
    # Blocks overlap: often there are fewer tokens than slots.
    takes_all = teacher.hidden_TH.shape[0] <= teacher.places_M.numel()
    hidden = teacher.hidden_TH if takes_all else teacher.hidden_TH.index_select(0, teacher.places_M)
    tokens = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
    for rows in _chunks(hidden.shape[0], chunk_slots or _chunk_rows(_CHUNK_BYTES, vocabulary, hidden.device)):
        # Scaling and cap are increasing, but where they round two logits to one, the first of them is the argmax.
        logits_CV = _multiply(hidden[rows], head.T, dtype)
        _cap_(logits_CV, vocabulary)
        tokens[rows] = logits_CV.argmax(-1)
    return tokens.index_select(0, teacher.places_M) if takes_all else tokens


def frozen_head_cross_entropy(
    hidden_MH: Tensor, labels_M: Tensor, vocabulary: TargetVocabulary, chunk_slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy (nats) of every slot, [M], differentiable in `hidden_MH`, and the predicted tokens i64 [M].

    Embedding and head get no gradient. `chunk_slots` rows of logits exist at a time (None: what fits a fixed budget).
    """
    if chunk_slots is None:
        chunk_slots = _chunk_rows(_CHUNK_BYTES, vocabulary, hidden_MH.device)
    assert chunk_slots >= 1
    return _FrozenHeadCrossEntropy.apply(hidden_MH, labels_M, vocabulary, chunk_slots)


def frozen_head_losses(
    hidden_MH: Tensor,
    labels_M: Tensor | None,
    vocabulary: TargetVocabulary,
    terms: Terms,
    teacher: Teacher | None = None,
    *,
    separate_ce: bool = False,
    chunk_slots: int | None = None,
) -> SlotLosses:
    """A mixture of terms for every slot, differentiable in `hidden_MH` alone; `labels_M` None: the teacher's tokens.

    With `separate_ce` the mixture leaves out CE, which carries its own gradient, to be weighted once all slots are
    known. `chunk_slots` as for the cross entropy; as many rows of the teacher's logits exist along with them.
    """
    assert teacher is not None or not (terms.needs_teacher or labels_M is None)
    if chunk_slots is None:
        chunk_slots = _chunk_rows(_CHUNK_BYTES, vocabulary, hidden_MH.device)
    assert chunk_slots >= 1
    mixture_M, ce_M, values_KM, predicted_M, labels_M = _FrozenHeadLosses.apply(
        hidden_MH, labels_M, vocabulary, terms, teacher, separate_ce, chunk_slots
    )
    return SlotLosses(mixture_M, ce_M, dict(zip(terms.value_names, values_KM, strict=True)), predicted_M, labels_M)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Computes the gradient of each slot along with its loss, while its logits are at hand.

    Only [M, H] is kept for backward, which scales it by what arrives per slot: whatever weighs the slots, weighs later.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_MH: Tensor, labels_M: Tensor, vocabulary: TargetVocabulary, chunk_slots: int
    ) -> tuple[Tensor, Tensor]:
        head, dtype = _widened(vocabulary.head, hidden_MH)
        losses_M = torch.empty(hidden_MH.shape[0], dtype=dtype, device=hidden_MH.device)
        predicted_M = torch.empty_like(labels_M)
        grads_MH = torch.empty_like(hidden_MH, dtype=dtype) if ctx.needs_input_grad[0] else None
        for rows in _chunks(hidden_MH.shape[0], chunk_slots):
            losses_M[rows], predicted_M[rows] = _chunk(
                hidden_MH[rows], labels_M[rows], head, vocabulary, dtype, None if grads_MH is None else grads_MH[rows]
            )
        if grads_MH is not None:
            ctx.save_for_backward(grads_MH)
            ctx.hidden_dtype = hidden_MH.dtype
        ctx.mark_non_differentiable(predicted_M)
        return losses_M, predicted_M

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_losses_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grads_MH,) = ctx.saved_tensors
        return (grads_MH * grad_losses_M[:, None]).to(ctx.hidden_dtype), None, None, None


def _chunk(
    hidden_CH: Tensor,
    labels_C: Tensor,
    head_VH: Tensor,
    vocabulary: TargetVocabulary,
    dtype: torch.dtype,
    grads_CH: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Losses and predictions of one chunk; writes d loss / d hidden into `grads_CH`. One buffer [C, V] does it all."""
    softcap, multiplier = vocabulary.logit_softcap, vocabulary.logit_multiplier
    logits_CV = _multiply(hidden_CH, head_VH.T, dtype)
    if multiplier != 1.0:
        logits_CV.mul_(multiplier)
    slope_CV = None
    if softcap is not None:
        logits_CV.div_(softcap).tanh_()
        if grads_CH is not None:
            slope_CV = 1.0 - logits_CV.square()
        logits_CV.mul_(softcap)
    top_C, predicted_C = logits_CV.max(dim=-1)
    labels_C1 = labels_C[:, None]
    label_logits_C = logits_CV.gather(1, labels_C1).squeeze(1)
    shares_CV = logits_CV.sub_(top_C[:, None]).exp_()
    totals_C = shares_CV.sum(-1)
    losses_C = totals_C.log() + (top_C - label_logits_C)
    if grads_CH is not None:
        # (softmax - onehot) @ head, with the division by the total moved behind the product, from [C, V] to [C, H].
        shares_CV.scatter_(1, labels_C1, shares_CV.gather(1, labels_C1) - totals_C[:, None])
        if slope_CV is not None:
            shares_CV.mul_(slope_CV)
        torch.mul(_multiply(shares_CV, head_VH, dtype), (multiplier / totals_C)[:, None], out=grads_CH)
    return losses_C, predicted_C


class _FrozenHeadLosses(torch.autograd.Function):
    """As the cross entropy, for any mixture of terms; keeps [M, H], and another one for CE where that is separate."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden_MH: Tensor,
        labels_M: Tensor | None,
        vocabulary: TargetVocabulary,
        terms: Terms,
        teacher: Teacher | None,
        separate_ce: bool,
        chunk_slots: int,
    ) -> tuple[Tensor, ...]:
        head, dtype = _widened(vocabulary.head, hidden_MH)
        num_slots, device = hidden_MH.shape[0], hidden_MH.device
        values_KM = torch.empty(len(terms.value_names), num_slots, dtype=dtype, device=device)
        tokens_2M = tuple(torch.empty(num_slots, dtype=torch.int64, device=device) for _ in range(2))
        num_gradients = 1 + separate_ce if ctx.needs_input_grad[0] else 0
        grads = [torch.empty_like(hidden_MH, dtype=dtype) for _ in range(num_gradients)]
        for rows in _chunks(num_slots, chunk_slots):
            chunk = _Chunk(
                logits_CV=_multiply(hidden_MH[rows], head.T, dtype),
                teacher_CV=_teacher_logits(teacher, rows, head, dtype),
                labels_C=None if labels_M is None else labels_M[rows],
                values_KC=values_KM[:, rows],
                tokens_2C=tuple(tokens_M[rows] for tokens_M in tokens_2M),
            )
            for grad_MH, gradient_CV in zip(grads, chunk.compute(terms, vocabulary, num_gradients), strict=True):
                torch.mul(_multiply(gradient_CV, head, dtype), vocabulary.logit_multiplier, out=grad_MH[rows])
        ctx.save_for_backward(*grads)
        ctx.hidden_dtype = hidden_MH.dtype
        values = dict(zip(terms.value_names, values_KM, strict=True))
        mixture_M = sum(
            (getattr(terms, name) * values[name] for name in ("kl", "tv", "cap") if name in values),
            torch.zeros_like(values["ce"]) if separate_ce else terms.ce * values["ce"],
        )
        predicted_M, labels_M = tokens_2M
        ce_M = values["ce"].clone()
        ctx.mark_non_differentiable(values_KM, predicted_M, labels_M, *(() if separate_ce else (ce_M,)))
        return mixture_M, ce_M, values_KM, predicted_M, labels_M

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients kept belong to the first outputs, in their order.
        sums_MH = None
        for grad_MH, grad_losses_M in zip(ctx.saved_tensors, grad_outputs, strict=False):
            part_MH = grad_MH * grad_losses_M[:, None]
            sums_MH = part_MH if sums_MH is None else sums_MH.add_(part_MH)
        return (sums_MH.to(ctx.hidden_dtype), *(None,) * 6)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Logits of C slots as multiplied, and where their values [K, C] and their predictions and labels, [C] each, go."""

    logits_CV: Tensor
    teacher_CV: Tensor | None
    labels_C: Tensor | None
    values_KC: Tensor
    tokens_2C: tuple[Tensor, ...]

    def compute(self, terms: Terms, vocabulary: TargetVocabulary, num_gradients: int) -> list[Tensor]:
        """Fills the outputs, and returns the gradients with respect to what was multiplied, in the logits' memory."""
        gradients = [self.logits_CV][:num_gradients]
        if num_gradients == 2:
            gradients.append(torch.empty_like(self.logits_CV) if self.teacher_CV is None else self.teacher_CV)
        for rows in _chunks(self.logits_CV.shape[0], _chunk_rows(_TILE_BYTES, vocabulary, self.logits_CV.device)):
            self._tile(rows, terms, vocabulary, [gradient_CV[rows] for gradient_CV in gradients])
        return gradients

    def _tile(self, rows: slice, terms: Terms, vocabulary: TargetVocabulary, gradients: list[Tensor]) -> None:
        logits_RV, softcap = self.logits_CV[rows], vocabulary.logit_softcap
        teacher_RV = None if self.teacher_CV is None else _cap_(self.teacher_CV[rows], vocabulary)
        _cap_(logits_RV, vocabulary)
        slope_RV = None
        if softcap is not None and gradients:
            slope_RV = 1.0 - (logits_RV / softcap).square_()
        labels_R = None if self.labels_C is None else self.labels_C[rows]
        found: RowTerms = row_terms(terms, logits_RV, teacher_RV, labels_R, *(gradients or [None]))
        for gradient_RV in gradients:
            if slope_RV is not None:
                gradient_RV.mul_(slope_RV)
        for row_R, name in zip(self.values_KC[:, rows], terms.value_names, strict=True):
            row_R.copy_(found.values[name])
        for tokens_C, found_R in zip(self.tokens_2C, (found.predicted_R, found.labels_R), strict=True):
            tokens_C[rows] = found_R


def _teacher_logits(teacher: Teacher | None, rows: slice, head_VH: Tensor, dtype: torch.dtype) -> Tensor | None:
    if teacher is None:
        return None
    return _multiply(teacher.hidden_TH.index_select(0, teacher.places_M[rows]), head_VH.T, dtype)


def _cap_(logits: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    """Scales and caps products with the head, in place."""
    if vocabulary.logit_multiplier != 1.0:
        logits.mul_(vocabulary.logit_multiplier)
    if vocabulary.logit_softcap is not None:
        logits.div_(vocabulary.logit_softcap).tanh_().mul_(vocabulary.logit_softcap)
    return logits


def _widened(head: Tensor, hidden: Tensor) -> tuple[Tensor, torch.dtype]:
    """The head as all chunks multiply by it, and the dtype of the products."""
    dtype = _compute_dtype(hidden, head)
    # On CPU a half-precision head is widened once for all chunks: its matmuls are slow there, and round.
    widened = hidden.device.type == "cpu" or head.dtype.itemsize >= 4
    return (head.to(dtype) if widened else head), dtype


def _chunk_rows(budget_bytes: dict[str, int], vocabulary: TargetVocabulary, device: torch.device) -> int:
    """Rows of logits that a budget holds, at least one."""
    return max(1, budget_bytes.get(device.type, budget_bytes["cuda"]) // (4 * vocabulary.head.shape[0]))


def _compute_dtype(hidden: Tensor, head: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, head.dtype), torch.float32)


def _multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, accumulated and returned in `dtype`; on CUDA a half-precision head multiplies as it is."""
    if right.dtype.itemsize < 4 and right.device.type == "cuda":
        return torch.mm(left.to(right.dtype), right, out_dtype=dtype)
    return torch.mm(left.to(dtype), right.to(dtype))


def _chunks(num_rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_rows, chunk):
        yield slice(start, min(start + chunk, num_rows))
