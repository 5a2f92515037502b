"""A drafter that starts from its target holds the target's weights where the shapes allow, and noise elsewhere."""

from pathlib import Path

import pytest
import torch
from helpers_drafter import small_shape
from helpers_run import make_target
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from dflash.drafter.initial import source_layer_ids, start_from_target
from dflash.drafter.model import DFlashDrafter
from dflash.target.layers import load_layers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def started(folder: Path, **changes: object) -> DFlashDrafter:
    layers = {"num_target_layers": 6, "target_layer_ids": (1, 3), "layer_types": ("full_attention",) * 2}
    shape = small_shape(**{**SIZES, **layers, **changes})
    drafter = DFlashDrafter(shape).initialize(0)
    start_from_target(drafter, load_layers(str(folder), source_layer_ids(shape)))
    return drafter


def test_layers_norms_and_features_come_from_the_target(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    drafter = started(make_target(tmp_path / "target"))
    decoder = Qwen3ForCausalLM.from_pretrained(tmp_path / "target").model
    for layer, source in zip(drafter.layers, decoder.layers[4:], strict=True):
        theirs = source.state_dict()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, theirs[name]), name
    assert torch.equal(drafter.norm.weight, decoder.norm.weight)
    features = torch.randn(5, 64)
    assert torch.equal(drafter.fc(features), features[:, 32:])


def test_head_norms_keep_the_scale_of_a_target_without_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, num_hidden_layers=6, max_position_embeddings=64, **SIZES)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.input_layernorm.weight, 0.5, 2.0)
        torch.nn.init.normal_(layer.self_attn.q_proj.weight, std=0.3)
    model.save_pretrained(tmp_path / "target")
    drafter = started(tmp_path / "target")
    normed = torch.randn(4000, 32) * model.model.layers[5].input_layernorm.weight
    queries = model.model.layers[5].self_attn.q_proj(normed)
    measured = queries.square().mean().sqrt().item()
    assert drafter.layers[1].self_attn.q_norm.weight.unique().numel() == 1
    assert drafter.layers[1].self_attn.q_norm.weight[0].item() == pytest.approx(measured, rel=0.03)


def test_zero_centred_norms_are_read_as_what_they_multiply_by(tmp_path: Path) -> None:
    config = Gemma3TextConfig(vocab_size=96, num_hidden_layers=6, max_position_embeddings=64, **SIZES)
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "target")
    drafter = started(tmp_path / "target")
    assert torch.equal(drafter.norm.weight, torch.ones(32))
    assert torch.equal(drafter.layers[0].self_attn.q_norm.weight, torch.ones(8))


def test_what_does_not_fit_stays_as_drawn(tmp_path: Path) -> None:
    drafter = started(make_target(tmp_path / "target"), intermediate_size=48)
    fresh = DFlashDrafter(drafter.shape).initialize(0)
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, fresh.layers[0].mlp.up_proj.weight)
    assert not torch.equal(drafter.layers[0].self_attn.q_proj.weight, fresh.layers[0].self_attn.q_proj.weight)


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target")
    with pytest.raises(ValueError, match="model.drafter.init_from: target .* has no safetensors files with layers"):
        load_layers(str(folder), (7,))
    with pytest.raises(ValueError, match="model.drafter.init_from: target has 2 layers"):
        source_layer_ids(small_shape(num_target_layers=2, target_layer_ids=(0,)))
