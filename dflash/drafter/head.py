"""The target's frozen LM head: logits, and cross entropy that never holds more than a chunk of them."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dflash.batch import TargetVocabulary

# Logits held at a time. Larger chunks fall out of the CPU's cache; on CUDA they hide the launches.
_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}


def vocabulary_logits(hidden_MH: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    """Logits [M, V] of hidden states [M, H], at least fp32, scaled and capped as the target does."""
    dtype = _compute_dtype(hidden_MH, vocabulary.head)
    logits_MV = _multiply(hidden_MH, vocabulary.head.T, dtype).mul_(vocabulary.logit_multiplier)
    if vocabulary.logit_softcap is not None:
        logits_MV.div_(vocabulary.logit_softcap).tanh_().mul_(vocabulary.logit_softcap)
    return logits_MV


def frozen_head_cross_entropy(
    hidden_MH: Tensor, labels_M: Tensor, vocabulary: TargetVocabulary, chunk_slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy (nats) of every slot, [M], differentiable in `hidden_MH`, and the predicted tokens i64 [M].

    Embedding and head get no gradient. `chunk_slots` rows of logits exist at a time (None: what fits a fixed budget).
    """
    if chunk_slots is None:
        row_bytes = 4 * vocabulary.head.shape[0]
        chunk_slots = max(1, _CHUNK_BYTES.get(hidden_MH.device.type, _CHUNK_BYTES["cuda"]) // row_bytes)
    assert chunk_slots >= 1
    return _FrozenHeadCrossEntropy.apply(hidden_MH, labels_M, vocabulary, chunk_slots)


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    """Computes the gradient of each slot along with its loss, while its logits are at hand.

    Only [M, H] is kept for backward, which scales it by what arrives per slot: whatever weighs the slots, weighs later.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden_MH: Tensor, labels_M: Tensor, vocabulary: TargetVocabulary, chunk_slots: int
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(hidden_MH, vocabulary.head)
        # On CPU a half-precision head is widened once for all chunks: its matmuls are slow there, and round.
        widened = hidden_MH.device.type == "cpu" or vocabulary.head.dtype.itemsize >= 4
        head = vocabulary.head.to(dtype) if widened else vocabulary.head
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
