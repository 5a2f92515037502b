"""Fixture files of both schemas, written by the dense twins: other shapes, losses and weights than the oracles'."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from helpers_drafter import (
    dense_dpace_weight,
    dense_drafter,
    dense_terms,
    randomize,
    small_micro_batch,
    small_shape,
    small_vocabulary,
)
from safetensors.torch import save_file

from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.shape import DrafterShape


def _written(path: Path, meta: dict, weights: dict, tensors: dict, loss: torch.Tensor) -> Path:
    """A fixture whose loss and gradients come from the dense twin."""
    loss.backward()
    grads = {name: weight.grad for name, weight in weights.items()}
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    meta["expected"] = {"loss": float(loss.detach()), "grad_norm": norm}
    tensors |= {f"draft.{name}": weight.detach() for name, weight in weights.items()}
    tensors |= {f"grad.{name}": grad for name, grad in grads.items()}
    single = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file({name: value.contiguous() for name, value in single.items()}, path, {"meta": json.dumps(meta)})
    return path


def _twin_weights(shape: DrafterShape) -> dict[str, torch.Tensor]:
    drafter = DFlashDrafter(shape)
    randomize(drafter)
    return {name: value.double().requires_grad_() for name, value in drafter.state_dict().items()}


def padded_variant(path: Path, alpha: float | None = None) -> Path:
    """Block 5, window 6, three query heads to a key head, no decay, an unused row, blocks past the end.

    With `alpha` D-PACE's weights, and the number of rows, the unused one too, as the divisor.
    """
    shape = small_shape(layer_types=("sliding_attention", "full_attention"), sliding_window=6)
    vocabulary, batch, size = small_vocabulary(shape), small_micro_batch([21] * 3), shape.block_size
    features = torch.randn(3, 21, shape.feature_width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    anchors = torch.tensor([[20, 3, 9, 3], [1, 2, 3, 4], [18, 0, 12, 7]])
    keep = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    rows = [(r, int(a)) for r in range(3) for a, kept in zip(anchors[r], keep[r], strict=True) if kept]
    packed = [r * 21 + a for r, a in rows]
    weights = _twin_weights(shape)
    embeddings = embed_blocks(vocabulary, batch.input_ids[packed], shape.mask_token_id, size)
    hidden = dense_drafter(weights, shape, features.flatten(0, 1), embeddings, packed, [21] * 3)
    losses = []
    for n, (r, a) in enumerate(rows):
        block = {}
        for k in range(1, size):
            if a + k < 21 and batch.loss_mask[r * 21 + a + k]:
                label = batch.input_ids[r * 21 + a + k].long()
                block[k] = F.cross_entropy(hidden[n, k] @ vocabulary.head.T, label)
        losses += block.values() if alpha is None else _dpace_losses(block, alpha)
    meta = {name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    meta |= {name: getattr(shape, name) for name in ("num_key_value_heads", "head_dim", "vocab_size", "block_size")}
    meta |= {name: getattr(shape, name) for name in ("mask_token_id", "rms_norm_eps", "rope_theta", "sliding_window")}
    meta |= {"layer_types": list(shape.layer_types), "gamma": None, "loss_type": "dflash", "num_target_features": 3}
    if alpha is not None:
        meta |= {"loss_type": "dpace", "dpace_alpha": alpha}
    tensors = {"embed.weight": vocabulary.embedding, "lm_head.weight": vocabulary.head, "hidden_states": features}
    tensors |= {"anchors": anchors, "anchor_keep": keep}
    tensors |= {"input_ids": batch.input_ids.view(3, 21).long(), "loss_mask": batch.loss_mask.view(3, 21).long()}
    loss = torch.stack(losses).mean() if alpha is None else torch.stack(losses).sum() / 3
    return _written(path, meta, weights, tensors, loss)


def _dpace_losses(block: dict[int, torch.Tensor], alpha: float) -> list[torch.Tensor]:
    """The weighted cross entropies of one block, from those of its supervised slots."""
    confidences = {k: math.exp(-float(loss.detach())) for k, loss in block.items()}
    return [dense_dpace_weight(confidences, k, alpha) * loss for k, loss in block.items()]


def packed_variant(path: Path, loss: str = "ce", alpha: float | None = None) -> Path:
    """Sliding layers, non-causal in the block, blocks that run into the next document, unused anchors in between."""
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    shape = small_shape(layer_types=kinds, sliding_window=4, sliding_is_causal=False, block_size=6, rope_theta=1e6)
    lengths, size, padding = [17, 9, 14], shape.block_size, 5
    vocabulary, batch = small_vocabulary(shape), small_micro_batch([*lengths, padding])
    batch.loss_mask[-padding:] = 0
    generator = torch.Generator().manual_seed(6)
    features, last = (
        torch.randn(45, width, dtype=torch.float64, generator=generator)
        for width in (shape.feature_width, shape.hidden_size)
    )
    anchors = [30, -1, 14, 2, -1, 0]
    used = [a for a in anchors if a >= 0]
    weights = _twin_weights(shape)
    embeddings = embed_blocks(vocabulary, batch.input_ids[used], shape.mask_token_id, size)
    hidden = dense_drafter(weights, shape, features, embeddings, used, [*lengths, padding])
    normed = last / torch.sqrt(last.square().mean(-1, keepdim=True) + 1e-6)
    teacher = normed @ vocabulary.head.T
    total, mask, logits = torch.zeros(()), torch.zeros(len(anchors), size), torch.zeros(len(anchors), size, 37)
    for n, a in enumerate(used):
        row = anchors.index(a)
        logits[row] = hidden[n].detach() @ vocabulary.head.T
        block = {}
        for k in range(1, size):
            if batch.loss_mask[a + k]:
                mask[row, k] = 1
                theirs = teacher[a + k - 1]
                terms = dense_terms(hidden[n, k] @ vocabulary.head.T, theirs, int(theirs.argmax()))
                block[k] = terms[loss.removesuffix("_div")]
        if alpha is None:
            total = total + sum(value * math.exp(-(k - 1) / 2.5) for k, value in block.items())
        else:
            total = total + sum(_dpace_losses(block, alpha))
    cfg = {
        "hidden": 20,
        "ffn": 28,
        "layers": 3,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab": 37,
        "draft_vocab": 0,
    }
    cfg |= {"rope_theta": 1e6, "aux_layers": 3, "block_size": size, "mask_token_id": 36, "sliding_window": 4}
    cfg |= {"full_attention_indices": "1", "non_causal": True, "sample_from_anchor": False, "loss": loss, "gamma": 2.5}
    cfg |= {"weighting": "fixed-exp-decay" if alpha is None else "dpace", "dpace_alpha": alpha or 0.5}
    document_ids = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
    position_ids = torch.tensor([p for length in lengths for p in range(length)] + [0] * padding)
    tensors = {"embed.weight": vocabulary.embedding, "lm_head.weight": vocabulary.head, "hidden_states": features}
    tensors |= {"anchors": torch.tensor(anchors), "document_ids": document_ids, "position_ids": position_ids}
    tensors |= {"input_ids": batch.input_ids.long(), "loss_mask": batch.loss_mask.long()}
    tensors |= {"verifier_last_hidden_states": last, "target_norm.weight": torch.ones(20)}
    tensors |= {"expected.aligned_loss_mask": mask.view(1, -1).long(), "expected.logits": logits.view(1, -1, 37)}
    return _written(path, {"cfg": cfg}, weights, tensors, total / (mask.sum() + 1e-5))
