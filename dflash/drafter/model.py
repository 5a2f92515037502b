"""The drafter: Qwen3-style layers whose queries come from blocks and whose keys come from the context as well."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash.batch import TargetVocabulary
from dflash.config import LayerType
from dflash.drafter.attention import Attend, plan_attention
from dflash.drafter.blocks import Blocks
from dflash.drafter.cache import DrafterCache
from dflash.drafter.rotary import Rotary
from dflash.drafter.shape import DrafterShape

INITIALIZER_RANGE = 0.02


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in fp32 at least, returned in the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return F.rms_norm(hidden.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps).to(hidden.dtype)


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202)."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Attention(nn.Module):
    """Projections around attention: queries of the block, keys and values of context and block alike."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width = shape.num_attention_heads * shape.head_dim
        key_width = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """Turned queries [..., Hq, D] of `hidden` [..., H]."""
        return rotary.turn(self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))))

    def keys_values(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Turned keys and values, each [..., Hkv, D], of `hidden` [..., H]."""
        keys = rotary.turn(self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))))
        return keys, self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))

    def output(self, attended: Tensor) -> Tensor:
        """Hidden states [..., H] of attended values [..., Hq, D]."""
        return self.o_proj(attended.flatten(-2))


class Layer(nn.Module):
    """One decoder layer; the context passes only through its key and value projections."""

    def __init__(self, shape: DrafterShape, kind: LayerType) -> None:
        super().__init__()
        self.kind = kind
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, hidden_NBH: Tensor, block_rotary: Rotary, context_keys_values: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        normed = self.input_layernorm(hidden_NBH)
        queries = self.self_attn.queries(normed, block_rotary)
        block_keys_values = self.self_attn.keys_values(normed, block_rotary)
        attended = attend(queries, *context_keys_values, *block_keys_values)
        hidden_NBH = hidden_NBH + self.self_attn.output(attended)
        return hidden_NBH + self.mlp(self.post_attention_layernorm(hidden_NBH))


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What all layers share of one micro-batch's blocks: rotary tables, and an attention plan per kind of layer."""

    context_rotary: Rotary
    block_rotary: Rotary
    attends: Mapping[LayerType, Attend]


class DFlashDrafter(nn.Module):
    """The drafter, with parameter names as served: `fc`, `hidden_norm`, `layers.N…`, `norm`; no embedding, no head.

    Weights are fp32 masters; on CUDA it computes in bf16 under autocast, on CPU in the dtype of its weights.
    """

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.feature_width, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, kind) for kind in shape.layer_types)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def initialize(self, seed: int) -> "DFlashDrafter":
        """Draws every matrix from N(0, 0.02^2), the same for one seed on any device; norms are ones."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape).normal_(0.0, INITIALIZER_RANGE, generator=generator)
                    parameter.copy_(drawn)
        return self

    def forward(self, features_TF: Tensor, block_embeddings_NBH: Tensor, blocks: Blocks) -> Tensor:
        """Final normed hidden states [N, B, H] of blocks over one packed row.

        Shapes: `features_TF` [T, n*H], the target's captured layers; `block_embeddings_NBH` from `embed_blocks`.
        Everything lies on one device. Its three parts can be called one by one, to time them.
        """
        assert features_TF.shape == (blocks.num_tokens, self.shape.feature_width), features_TF.shape
        return self.run_layers(self.project_context(features_TF), block_embeddings_NBH, self.plan(blocks))

    def plan(self, blocks: Blocks) -> BlockPlan:
        """Rotary tables and attention plans, made once for all layers."""
        shape = self.shape
        return BlockPlan(
            context_rotary=Rotary.at(blocks.token_positions, shape.head_dim, shape.rope_theta),
            block_rotary=Rotary.at(blocks.positions_NB, shape.head_dim, shape.rope_theta),
            attends={
                kind: plan_attention(blocks, visibility, shape.num_attention_heads)
                for kind, visibility in shape.visibilities.items()
            },
        )

    def run_layers(self, context_TH: Tensor, block_embeddings_NBH: Tensor, plan: BlockPlan) -> Tensor:
        """Final normed hidden states [N, B, H] of the blocks of `plan` over the context of `project_context`."""
        assert context_TH.shape[:1] == plan.context_rotary.cos.shape[:1], context_TH.shape
        assert block_embeddings_NBH.shape[:2] == plan.block_rotary.cos.shape[:2], block_embeddings_NBH.shape
        with _precision(context_TH.device):
            hidden_NBH = block_embeddings_NBH.to(context_TH.dtype)
            for layer in self.layers:
                context_keys_values = layer.self_attn.keys_values(context_TH, plan.context_rotary)
                hidden_NBH = layer(hidden_NBH, plan.block_rotary, context_keys_values, plan.attends[layer.kind])
            return self.norm(hidden_NBH)

    def project_context(self, features_TF: Tensor) -> Tensor:
        """What the layers read of the target: `hidden_norm(fc(features))`, [T, H]."""
        with _precision(features_TF.device):
            if features_TF.device.type == "cpu":
                features_TF = features_TF.to(self.fc.weight.dtype)
            return self.hidden_norm(self.fc(features_TF))

    def new_cache(self, capacity: int = 256) -> DrafterCache:
        """An empty context cache for one sequence; it grows by itself beyond `capacity` tokens."""
        return DrafterCache(num_layers=self.shape.num_layers, capacity=capacity)

    @torch.no_grad()
    def append_context(self, cache: DrafterCache, features_TF: Tensor) -> None:
        """Appends the context tokens that follow those of `cache` (one sequence): their keys and values, per layer."""
        positions_T = torch.arange(cache.length, cache.length + features_TF.shape[0], device=features_TF.device)
        rotary = Rotary.at(positions_T, self.shape.head_dim, self.shape.rope_theta)
        with _precision(features_TF.device):
            context_TH = self.project_context(features_TF)
            cache.append([layer.self_attn.keys_values(context_TH, rotary) for layer in self.layers])

    @torch.no_grad()
    def draft_hidden(self, block_embeddings_BH: Tensor, cache: DrafterCache, position: int) -> Tensor:
        """Final normed hidden states [B, H] of one block whose anchor stands at `position` of the cached sequence.

        The block sees the cached tokens before `position`; tokens cached beyond it stay unseen. The block may be
        shorter than the drafter's block size. Slot k >= 1 predicts the token at position + k.
        """
        assert 0 <= position <= cache.length, f"the cache holds {cache.length} tokens, the anchor is at {position}"
        shape, device = self.shape, block_embeddings_BH.device
        slots_B = torch.arange(block_embeddings_BH.shape[0], device=device)
        rotary = Rotary.at(position + slots_B, shape.head_dim, shape.rope_theta)
        views = {kind: cache.view(visibility, position, slots_B) for kind, visibility in shape.visibilities.items()}
        with _precision(device):
            hidden_BH = block_embeddings_BH.to(self.norm.weight.dtype if device.type == "cpu" else torch.bfloat16)
            for index, layer in enumerate(self.layers):
                view = views[layer.kind]
                hidden_BH = layer(hidden_BH, rotary, view.keys_values(index), view.attend)
            return self.norm(hidden_BH)


def embed_blocks(vocabulary: TargetVocabulary, anchor_tokens_N: Tensor, mask_token_id: int, block_size: int) -> Tensor:
    """Embedded inputs [N, B, H] of blocks: the anchor's token, then mask tokens, in the target's frozen embedding."""
    ids_NB = anchor_tokens_N.long()[:, None].repeat(1, block_size)
    ids_NB[:, 1:] = mask_token_id
    return F.embedding(ids_NB, vocabulary.embedding) * vocabulary.embedding_scale


def _precision(device: torch.device) -> AbstractContextManager[None]:
    """bf16 compute on CUDA, whatever the dtype of the weights; CPU computes as stored."""
    return torch.autocast("cuda", dtype=torch.bfloat16, enabled=device.type == "cuda")
