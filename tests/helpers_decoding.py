"""Tiny random targets of every cache kind, drafters for them, and drafts that are right as far as a test wants."""

import itertools
import random
from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
)

from dflash.batch import TargetVocabulary
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.shape import DrafterShape

VOCAB_SIZE = 53
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 3
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}

# Full, all sliding, both, linear and full (cannot be cropped), short convolutions and full, both kinds in one layer.
TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {
    "full": lambda: LlamaConfig(**SMALL),
    "sliding": lambda: MistralConfig(**SMALL, sliding_window=9),
    "sliding_and_full": lambda: Gemma3TextConfig(**SMALL, sliding_window=7, layer_types=SLIDING_AND_FULL),
    "linear_and_full": lambda: Qwen3_5TextConfig(
        **SMALL, **LINEAR, layer_types=["linear_attention", "linear_attention", "full_attention"] * 2
    ),
    "convolution_and_full": lambda: Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"] * 3, block_auto_adjust_ff_dim=False
    ),
    "state_space_with_full": lambda: FalconH1Config(**SMALL, **MAMBA, mamba_chunk_size=16),
}


def random_target(name: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model whose greedy continuation wanders over the vocabulary instead of repeating one token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(TARGETS[name]())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 * parameter.shape[1] ** -0.5)
    return model.requires_grad_(False).eval()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def random_drafter(target: PreTrainedModel, block_size: int, seed: int = 0) -> DFlashDrafter:
    """A small drafter for a target of this file: a sliding and a full layer, three features, mask token 52."""
    shape = DrafterShape(
        hidden_size=SMALL["hidden_size"],
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=SMALL["max_position_embeddings"],
        vocab_size=VOCAB_SIZE,
        block_size=block_size,
        mask_token_id=VOCAB_SIZE - 1,
        target_layer_ids=(0, 2, 4),
        num_target_layers=target.config.num_hidden_layers,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=6,
    )
    return DFlashDrafter(shape).initialize(seed).requires_grad_(False).eval()


class ScriptedDrafting:
    """Stands in for `dflash.decoding.Drafting`: knows the answer, and gives every number of right drafts in turn."""

    def __init__(self, prompt: list[int], answer: list[int], block_size: int, seed: int = 0) -> None:
        self.prompt, self.answer, self.block_size = prompt, answer, block_size
        self.features: list[Tensor] = []
        self.num_right: list[int] = []
        order = random.Random(seed).sample(range(block_size), k=block_size)
        self._next_num_right = itertools.cycle(order)

    def __call__(self, _drafter: DFlashDrafter, _vocabulary: TargetVocabulary) -> "ScriptedDrafting":
        return self

    def extend(self, features_TF: Tensor) -> None:
        self.features.append(features_TF.clone())

    def draft(self, anchor_1: Tensor, start: int) -> Tensor:
        known = start - len(self.prompt) + 1
        assert anchor_1.tolist() == self.answer[known - 1 : known]
        assert sum(features.shape[0] for features in self.features) == start, "the context is all before the anchor"
        draft = (self.answer[known:] + [0] * self.block_size)[: self.block_size - 1]
        num_right = next(self._next_num_right)
        if num_right < self.block_size - 1:
            draft[num_right] = (draft[num_right] + 1) % VOCAB_SIZE
        self.num_right.append(num_right)
        return torch.tensor(draft)


def word_tokenizer(words: list[str], chat_template: str | None) -> PreTrainedTokenizerFast:
    """One token per word; plain text begins with the first word, as with a BOS token."""
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single=f"{words[0]} $A", special_tokens=[(words[0], 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=words[0], unk_token=words[1], chat_template=chat_template
    )
