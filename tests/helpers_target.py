"""Tiny random targets of several architectures, and micro-batches for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.batch import MicroBatch, PackedLayout
from dflash.target.capture import CapturedHiddenStates, FrozenTarget

VOCAB_SIZE = 97
HIDDEN_SIZE = 32
NUM_LAYERS = 6

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough that a wrong mask shows far above rounding
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}


def forward(target: FrozenTarget, micro_batch: MicroBatch) -> CapturedHiddenStates:
    """Hidden states of one micro-batch."""
    return target.run(target.stage(micro_batch))


def tiny_target(name: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a random fp32 target: 6 layers, hidden size 32, 97 tokens."""
    torch.manual_seed(seed)
    model_type, config_type, extra = {
        "llama": (LlamaForCausalLM, LlamaConfig, {}),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
        "qwen3_sliding": (Qwen3ForCausalLM, Qwen3Config, {**_SLIDING, "use_sliding_window": True}),
        "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 0.3, "sliding_window": 5}),
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**_SLIDING, "final_logit_softcapping": 0.3}),
        "granite": (GraniteForCausalLM, GraniteConfig, {"embedding_multiplier": 12.0, "logits_scaling": 8.0}),
        "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.0625}),
        "minicpm3": (
            MiniCPM3ForCausalLM,
            MiniCPM3Config,
            {
                "kv_lora_rank": 8,
                "q_lora_rank": 8,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "dim_model_base": 16,
                "num_key_value_heads": 4,
            },
        ),
        "qwen3_5": (
            Qwen3_5ForCausalLM,
            Qwen3_5TextConfig,
            {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            },
        ),
    }[name]
    model = model_type(config_type(**{**_SIZES, **extra, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases start as ones and zeros, which would hide what scales or shifts by them.
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def micro_batch_of(lengths: Sequence[int], index: int = 0, seed: int = 1) -> MicroBatch:
    """Make documents of these lengths from random tokens, with ids that are not their places."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    return MicroBatch(
        index=index,
        document_ids=torch.arange(len(lengths)) * 7 + 1000,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        input_ids=torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator, dtype=torch.int32),
        loss_mask=torch.randint(0, 2, (num_tokens,), generator=generator, dtype=torch.uint8),
    )


@torch.no_grad()
def features_alone(model: PreTrainedModel, micro_batch: MicroBatch, target_layer_ids: Sequence[int]) -> Tensor:
    """Naive twin: each document alone through the whole model, features [T, n*H] from its hidden_states."""
    features = []
    for document in micro_batch.input_ids.long().split(micro_batch.lengths.tolist()):
        hidden = model(input_ids=document[None], output_hidden_states=True, use_cache=False).hidden_states
        features.append(torch.cat([hidden[layer + 1][0] for layer in target_layer_ids], dim=-1))
    return torch.cat(features)


def buffer_bytes(micro_batch: MicroBatch, target: FrozenTarget) -> int:
    """Size of a buffer that just holds this micro-batch."""
    return PackedLayout(
        micro_batch.num_tokens, micro_batch.num_documents, target.feature_width, target.feature_dtype
    ).num_bytes
