"""A naive dense drafter written from the text of the design, and small random inputs for both."""

import math

import torch
from torch import Tensor

from dflash.batch import MicroBatch, TargetVocabulary
from dflash.drafter.shape import DrafterShape


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
    draw = lambda: torch.randn(shape.vocab_size, shape.hidden_size, generator=generator, dtype=torch.float64)  # noqa: E731
    return TargetVocabulary(draw(), draw(), **scalings)


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
    num_blocks, block_size, num_heads, head_dim = queries.shape
    group = num_heads // keys.shape[2]
    out = torch.empty_like(queries)
    heads = []
    for h in range(num_heads):
        all_keys = torch.cat((context_keys[:, h // group], keys[:, :, h // group].reshape(-1, head_dim)))
        all_values = torch.cat((context_values[:, h // group], values[:, :, h // group].reshape(-1, head_dim)))
        scores = queries[:, :, h] @ all_keys.T / math.sqrt(head_dim)
        heads.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ all_values)
    out = torch.stack(heads, dim=2)
    return out


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
        get = lambda name, number=number: weights[f"layers.{number}.{name}.weight"]  # noqa: E731
        window = shape.sliding_window if kind == "sliding_attention" else None
        mask = visible_mask(anchors, lengths, block_size, window, shape.sliding_is_causal)
        split = lambda x: x.view(x.shape[0], -1, head_dim)  # noqa: E731
        normed = _norm(hidden, get("input_layernorm"), eps)
        project_key = lambda x, p, get=get: _rope(  # noqa: E731
            _norm(split(x @ get("self_attn.k_proj").T), get("self_attn.k_norm"), eps), p, shape.rope_theta
        )
        queries = _norm(split(normed @ get("self_attn.q_proj").T), get("self_attn.q_norm"), eps)
        queries = _rope(queries, slot_positions, shape.rope_theta)
        by_block = lambda x: x.unflatten(0, (num_blocks, block_size))  # noqa: E731
        attended = dense_attention(
            by_block(queries),
            project_key(context, token_positions),
            split(context @ get("self_attn.v_proj").T),
            by_block(project_key(normed, slot_positions)),
            by_block(split(normed @ get("self_attn.v_proj").T)),
            mask,
        )
        hidden = hidden + attended.reshape(hidden.shape[0], -1) @ get("self_attn.o_proj").T
        normed = _norm(hidden, get("post_attention_layernorm"), eps)
        gate, up = normed @ get("mlp.gate_proj").T, normed @ get("mlp.up_proj").T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ get("mlp.down_proj").T
    return _norm(hidden, weights["norm.weight"], eps).view(num_blocks, block_size, hidden_size)
