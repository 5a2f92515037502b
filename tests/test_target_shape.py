"""Sizes read from configs of many spellings, default and checked layer ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dflash.batch import TargetShape
from dflash.target.shape import check_target_layer_ids, default_target_layer_ids, read_target_shape, target_shape

LLAMA = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 77,
    "rms_norm_eps": 1e-5,
}


class OldStyleConfig(PreTrainedConfig):
    """A config as remote code writes it: plain attributes, the old spelling of rope_theta."""

    model_type = "old_style"

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        for name, value in fields.items():
            setattr(self, name, value)


def test_llama_config_gives_every_size():
    assert target_shape(LlamaConfig(**LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 123.0})) == (
        TargetShape(
            num_layers=5,
            hidden_size=36,
            vocab_size=101,
            intermediate_size=72,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=12,
            rms_norm_eps=1e-5,
            rope_theta=123.0,
            max_position_embeddings=77,
        )
    )


def test_old_spelling_of_rope_theta_and_missing_kv_heads():
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    shape = target_shape(OldStyleConfig(**fields, rope_theta=5e5))
    assert shape.rope_theta == 5e5
    assert shape.num_key_value_heads == shape.num_attention_heads == 3


def test_rope_per_layer_type_takes_the_full_attention_base():
    assert target_shape(Gemma3TextConfig()).rope_theta == 1e6


def test_multimodal_wrapper_is_read_through_its_text_config():
    text = Gemma3TextConfig(hidden_size=48, num_hidden_layers=7)
    assert target_shape(Gemma3Config(text_config=text.to_dict())) == target_shape(text)


def test_per_layer_fields_fall_back_to_the_model_wide_value():
    assert target_shape(Gemma4TextConfig()).head_dim == 256


def test_norm_eps_of_a_layer_norm_model():
    assert target_shape(CohereConfig(layer_norm_eps=3e-4)).rms_norm_eps == 3e-4


def test_mixture_without_a_dense_mlp_takes_the_active_width():
    shape = target_shape(Qwen3_5MoeTextConfig(moe_intermediate_size=24, num_experts_per_tok=6))
    assert shape.intermediate_size == 144
    stated = Qwen3MoeConfig()
    assert target_shape(stated).intermediate_size == stated.intermediate_size


@pytest.mark.parametrize("config_type", [LlamaConfig, Qwen3Config, Qwen3_5TextConfig, Gemma3TextConfig])
def test_defaults_of_common_architectures_are_readable(config_type: type[PreTrainedConfig]):
    shape = target_shape(config_type())
    assert all(getattr(shape, name) > 0 for name in TargetShape.__slots__)


@pytest.mark.parametrize(
    "name", ["hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]
)
def test_a_missing_size_is_named(name: str):
    fields = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(ValueError, match=rf"old_style.*has no {name}"):
        target_shape(OldStyleConfig(**fields, rope_theta=1e4))


def test_missing_rope_base_and_eps_are_named():
    with pytest.raises(ValueError, match="has no rope_theta"):
        target_shape(OldStyleConfig(**LLAMA))
    with pytest.raises(ValueError, match="rms_norm_eps"):
        target_shape(OldStyleConfig(**{k: v for k, v in LLAMA.items() if k != "rms_norm_eps"}, rope_theta=1e4))
    with pytest.raises(ValueError, match="gpt2"):
        target_shape(GPT2Config())


def test_impossible_sizes_are_named():
    with pytest.raises(ValueError, match="hidden_size must be a positive integer, got 0"):
        target_shape(OldStyleConfig(**{**LLAMA, "hidden_size": 0}, rope_theta=1e4))
    with pytest.raises(ValueError, match="not divisible by its 5 attention heads"):
        target_shape(OldStyleConfig(**{**LLAMA, "num_attention_heads": 5}, rope_theta=1e4))


def test_shape_is_read_from_a_folder_without_weights(tmp_path: Path):
    config = LlamaConfig(**LLAMA)
    config.save_pretrained(tmp_path)
    assert read_target_shape(str(tmp_path)) == target_shape(config)


def test_a_folder_without_a_usable_config_is_a_value_error(tmp_path: Path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_target_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_architecture"}))
    with pytest.raises(ValueError, match="config cannot be read"):
        read_target_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 round to even, as Python's round does
        (28, 3, (1, 13, 25)),
        (48, 1, (24,)),
        (3, 1, (1,)),
        (5, 2, (1, 2)),
    ],
)
def test_default_ids(num_layers: int, num_features: int, expected: tuple[int, ...]):
    assert default_target_layer_ids(num_layers, num_features) == expected


@pytest.mark.parametrize(("num_layers", "num_features"), [(8, 7), (4, 2), (3, 2), (2, 1), (1, 1), (36, 0)])
def test_default_ids_of_too_shallow_targets_are_refused(num_layers: int, num_features: int):
    with pytest.raises(ValueError, match=r"model\.drafter\.target_layer_ids"):
        default_target_layer_ids(num_layers, num_features)


def test_good_ids_pass():
    check_target_layer_ids([0], 2)
    check_target_layer_ids((0, 3, 34), 36)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([-1, 2], "no layer -1"),
        ([2, 36], "no layer 36"),
        ([2, 35], "35 is the target's last layer"),
        ([2, 2], "repeats"),
        ([5, 2], "not in order"),
    ],
)
def test_bad_ids_are_refused_with_the_allowed_range(ids: list[int], message: str):
    with pytest.raises(ValueError, match=message) as error:
        check_target_layer_ids(ids, 36)
    assert "model.drafter.target_layer_ids" in str(error.value)
    assert "from 0 to 34" in str(error.value)
