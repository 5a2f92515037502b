"""A naive dense drafter written from the text of the design, and small random inputs for both."""

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.batch import MicroBatch, TargetVocabulary
from dflash.drafter.shape import DrafterShape


class LargestTensor(TorchDispatchMode):
    """Notes the largest storage, in elements, of whatever is computed inside it, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def small_shape(**changes) -> DrafterShape:
    """A drafter of odd sizes: 2 sliding layers and a full one, three query heads to a key head."""
    settings = dict(
        hidden_size=20,
        intermediate_size=28,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_size=37,
        block_size=5,
        mask_token_id=36,
        target_layer_ids=(1, 2, 4),
        num_target_layers=6,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        sliding_window=7,
    )
    return DrafterShape(**{**settings, **changes})


def small_micro_batch(
    lengths: list[int], vocab_size: int = 37, seed: int = 0, index: int = 0, share: float = 0.7
) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    return MicroBatch(
        index=index,
        document_ids=torch.arange(100, 100 + len(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        input_ids=torch.randint(0, vocab_size, (num_tokens,), generator=generator, dtype=torch.int32),
        loss_mask=(torch.rand(num_tokens, generator=generator) < share).to(torch.uint8),
    )


def small_vocabulary(shape: DrafterShape, seed: int = 1, **scalings) -> TargetVocabulary:
    generator = torch.Generator().manual_seed(seed)
    size = (2, shape.vocab_size, shape.hidden_size)
    return TargetVocabulary(*torch.randn(size, generator=generator, dtype=torch.float64), **scalings)


def randomize(drafter: torch.nn.Module, seed: int = 2) -> None:
    """Weights large enough that every part of the model matters, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else noise * parameter.shape[1] ** -0.5)


def visible_mask(
    anchors: list[int], lengths: list[int], block_size: int, window: int | None, causal: bool = True
) -> Tensor:
    """Bool [N, B, T + N*B], slot by slot: context of the row, then the slots of all blocks."""
    documents = [d for d, length in enumerate(lengths) for _ in range(length)]
    num_tokens, num_blocks = len(documents), len(anchors)
    mask = torch.zeros(num_blocks, block_size, num_tokens + num_blocks * block_size, dtype=torch.bool)
    for n, a in enumerate(anchors):
        for j in range(block_size):
            for t in range(num_tokens):
                near = window is None or (a + j) - t < window
                mask[n, j, t] = documents[t] == documents[a] and t < a and near
            for i in range(block_size):
                if window is None:
                    sees = True
                elif causal:
                    sees = i <= j and j - i < window
                else:
                    sees = abs(j - i) < window
                mask[n, j, num_tokens + n * block_size + i] = sees
    return mask


def dense_attention(
    queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor, mask: Tensor
) -> Tensor:
    """Softmax attention with the whole score matrix, one query head at a time."""
    num_heads, head_dim = queries.shape[2:]
    group = num_heads // keys.shape[2]
    heads = []
    for h in range(num_heads):
        all_keys = torch.cat((context_keys[:, h // group], keys[:, :, h // group].reshape(-1, head_dim)))
        all_values = torch.cat((context_values[:, h // group], values[:, :, h // group].reshape(-1, head_dim)))
        scores = queries[:, :, h] @ all_keys.T / math.sqrt(head_dim)
        heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ all_values)
    return torch.stack(heads, dim=2)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotates pairs (i, i + D/2) of x [L, heads, D] by position * theta^(-2i/D)."""
    half = x.shape[-1] // 2
    frequencies = torch.tensor([theta ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    angles = positions.to(x.dtype)[:, None, None] * frequencies
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def dense_drafter(
    weights: dict[str, Tensor],
    shape: DrafterShape,
    features_TF: Tensor,
    embeddings_NBH: Tensor,
    anchors: list[int],
    lengths: list[int],
) -> Tensor:
    """Final hidden states [N, B, H], computed with dense masks from the weights alone."""
    num_blocks, block_size, hidden_size = embeddings_NBH.shape
    eps, head_dim = shape.rms_norm_eps, shape.head_dim
    starts = [sum(lengths[:d]) for d, length in enumerate(lengths) for _ in range(length)]
    token_positions = torch.tensor([t - start for t, start in enumerate(starts)])
    slot_positions = torch.tensor([a - starts[a] + j for a in anchors for j in range(block_size)])
    context = _norm(features_TF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    hidden = embeddings_NBH.reshape(-1, hidden_size)
    for number, kind in enumerate(shape.layer_types):
        layer = {n.removeprefix(f"layers.{number}."): w for n, w in weights.items()}
        window = shape.sliding_window if kind == "sliding_attention" else None
        mask = visible_mask(anchors, lengths, block_size, window, shape.sliding_is_causal)
        normed = _norm(hidden, layer["input_layernorm.weight"], eps)

        def heads(x: Tensor, name: str, positions: Tensor | None = None, layer: dict[str, Tensor] = layer) -> Tensor:
            split = (x @ layer[f"self_attn.{name}_proj.weight"].T).view(x.shape[0], -1, head_dim)
            if positions is None:
                return split
            return _rope(_norm(split, layer[f"self_attn.{name}_norm.weight"], eps), positions, shape.rope_theta)

        attended = dense_attention(
            heads(normed, "q", slot_positions).unflatten(0, (num_blocks, block_size)),
            heads(context, "k", token_positions),
            heads(context, "v"),
            heads(normed, "k", slot_positions).unflatten(0, (num_blocks, block_size)),
            heads(normed, "v").unflatten(0, (num_blocks, block_size)),
            mask,
        )
        hidden = hidden + attended.reshape(hidden.shape[0], -1) @ layer["self_attn.o_proj.weight"].T
        normed = _norm(hidden, layer["post_attention_layernorm.weight"], eps)
        gate, up = normed @ layer["mlp.gate_proj.weight"].T, normed @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    return _norm(hidden, weights["norm.weight"], eps).view(num_blocks, block_size, hidden_size)


def dense_logits(hidden: Tensor, vocabulary: TargetVocabulary) -> Tensor:
    logits = hidden @ vocabulary.head.T * vocabulary.logit_multiplier
    cap = vocabulary.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def dense_terms(logits: Tensor, teacher: Tensor | None, label: int, temperature: float = 1.0) -> dict[str, Tensor]:
    """CE, KL, TV, CAP and entropy of one slot, its logits [V] and its teacher's, from their definitions."""
    shares = logits.softmax(-1)
    entropy = -(shares * shares.log()).sum()
    is_right = int(logits.argmax()) == label
    values = {"ce": -shares[label].log(), "cap": entropy if is_right else 0 * entropy, "entropy": entropy}
    if teacher is not None:
        soft, soft_teacher = (logits / temperature).softmax(-1), (teacher / temperature).softmax(-1)
        values["kl"] = (soft_teacher * (soft_teacher / soft).log()).sum()
        values["tv"] = 1 - torch.minimum(shares, teacher.softmax(-1)).sum()
    return values


def dense_dpace_weight(confidences: dict[int, float], j: int, alpha: float) -> float:
    """The weight of slot j of one block, whose supervised slots have these probabilities of the right token."""
    total = 0.0
    for m in confidences:
        if m >= j:
            product = 1.0
            for i, confidence in confidences.items():
                if i <= m:
                    product *= (1 - alpha) * confidence + alpha
            total += product
    return total
