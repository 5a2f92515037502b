"""Drafters of odd shapes: training, its dense twin, decoding and the export agree; each kind of layer has one plan."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_drafter import dense_drafter, randomize, small_micro_batch, small_shape, small_vocabulary
from hydra import compose, initialize_config_dir
from torch import Tensor

from dflash.config import TrainConfig, config_folder, register_schema, to_train_config
from dflash.drafter import attention_flex, attention_tiles, model
from dflash.drafter.attention_flex import FlexAttend
from dflash.drafter.blocks import Blocks, Visibility
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.served import load_served, save_served, served_config
from dflash.drafter.shape import DrafterShape
from dflash.roles.setup import drafter_shape
from dflash.target.shape import read_target_shape

F, S = "full_attention", "sliding_attention"
LENGTHS = [13, 2, 1, 25]
# First and last tokens of documents, neighbours, a repeat, blocks that hang over their document's end.
ANCHORS = [40, 0, 12, 13, 14, 15, 22, 23, 16, 30, 0]

SHAPES: dict[str, dict] = {
    "block 2, one layer, one feature": {"block_size": 2, "layer_types": (F,), "target_layer_ids": (3,)},
    "block 2, one sliding layer of window 1": {"block_size": 2, "layer_types": (S,), "sliding_window": 1},
    "block 3, its own window": {"block_size": 3, "sliding_window": 3},
    "block 3, window below, non-causal": {
        "block_size": 3,
        "layer_types": (S, S),
        "sliding_window": 2,
        "sliding_is_causal": False,
    },
    "block 8, window 1, non-causal": {
        "block_size": 8,
        "layer_types": (S,),
        "sliding_window": 1,
        "sliding_is_causal": False,
    },
    "block 16, window 5": {"block_size": 16, "sliding_window": 5, "layer_types": (S, S, F)},
    "block 16, window 16, non-causal": {
        "block_size": 16,
        "layer_types": (S, S, S),
        "sliding_window": 16,
        "sliding_is_causal": False,
    },
    "block 16, five layers, six features": {
        "block_size": 16,
        "layer_types": (S, S, S, S, F),
        "sliding_window": 20,
        "target_layer_ids": (0, 1, 2, 5, 7, 8),
        "num_target_layers": 10,
    },
    "block 32, full then sliding": {"block_size": 32, "layer_types": (F, S), "sliding_window": 7},
    "block 32, window beyond any document": {"block_size": 32, "layer_types": (S, F, S), "sliding_window": 4096},
    "block 32, non-causal, window beyond any document": {
        "block_size": 32,
        "layer_types": (S, S),
        "sliding_window": 4096,
        "sliding_is_causal": False,
    },
    "wide heads, one key head": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 26, "block_size": 6},
    "narrow heads, small base": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 2,
        "rope_theta": 500.0,
        "layer_types": (F, F, S, S),
    },
    "large base, other epsilon": {"rope_theta": 1e7, "rms_norm_eps": 1e-3, "intermediate_size": 3, "block_size": 10},
}
every_shape = pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())


def made(changes: dict, dtype: torch.dtype = torch.float64) -> DFlashDrafter:
    drafter = DFlashDrafter(small_shape(**changes)).to(dtype)
    randomize(drafter)
    return drafter


def inputs_of(shape: DrafterShape, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Blocks]:
    generator = torch.Generator().manual_seed(5)
    features_TF = torch.randn(sum(LENGTHS), shape.feature_width, generator=generator, dtype=torch.float64)
    tokens = small_micro_batch(LENGTHS).input_ids[torch.tensor(ANCHORS)]
    embeddings_NBH = embed_blocks(small_vocabulary(shape), tokens, shape.mask_token_id, shape.block_size)
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), shape.block_size)
    return features_TF.to(dtype), embeddings_NBH.to(dtype), blocks


@every_shape
def test_training_equals_its_dense_twin_with_gradients(changes: dict) -> None:
    drafter = made(changes)
    features_TF, embeddings_NBH, blocks = inputs_of(drafter.shape)
    inputs = [*drafter.parameters(), features_TF.requires_grad_(), embeddings_NBH.requires_grad_()]
    hidden = drafter(features_TF, embeddings_NBH, blocks)
    weights = dict(drafter.named_parameters())
    twin = dense_drafter(weights, drafter.shape, features_TF, embeddings_NBH, ANCHORS, LENGTHS)
    # Rotary tables are fp32, all else fp64.
    torch.testing.assert_close(hidden, twin, rtol=0, atol=1e-5)
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    ours, theirs = torch.autograd.grad(hidden, inputs, grad), torch.autograd.grad(twin, inputs, grad)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-9


@every_shape
def test_decoding_with_the_cache_gives_trainings_logits(changes: dict) -> None:
    drafter = made(changes)
    shape = drafter.shape
    features_TF, embeddings_NBH, blocks = inputs_of(shape)
    head_VH = small_vocabulary(shape).head
    trained = drafter(features_TF, embeddings_NBH, blocks) @ head_VH.T
    start = sum(LENGTHS[:-1])
    cache, known = drafter.new_cache(capacity=3), 0
    last = [n for n, anchor in enumerate(ANCHORS) if anchor >= start]
    for n in sorted(last, key=lambda n: ANCHORS[n]):
        position = ANCHORS[n] - start
        drafter.append_context(cache, features_TF[start + known : start + position])
        known = position
        decoded = drafter.draft_hidden(embeddings_NBH[n], cache, position) @ head_VH.T
        torch.testing.assert_close(decoded, trained[n], rtol=0, atol=2e-5)
    assert known == LENGTHS[-1] - 1, "the last block hangs over the document's end"


@every_shape
def test_an_export_is_the_same_drafter(changes: dict, tmp_path: Path) -> None:
    drafter = made(changes, torch.float32)
    save_served(drafter, tmp_path / "drafter", torch.float32)
    loaded = load_served(tmp_path / "drafter")
    assert loaded.shape == drafter.shape
    inputs = inputs_of(drafter.shape, torch.float32)
    assert torch.equal(loaded(*inputs), drafter(*inputs))


@every_shape
def test_the_path_of_cuda_computes_the_same(changes: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention runs eagerly on CPU, forward only; its mask is built by the same code as on CUDA."""
    drafter = made(changes)
    inputs = inputs_of(drafter.shape)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiled = drafter(*inputs)
        monkeypatch.setattr(model, "plan_attention", flex_plan)
        torch.testing.assert_close(drafter(*inputs), tiled, rtol=0, atol=1e-11)


def flex_plan(blocks: Blocks, visibility: Visibility, num_query_heads: int) -> FlexAttend:
    return FlexAttend(blocks, visibility)


@pytest.mark.parametrize(("layer_types", "num_kinds"), [((S,) * 4 + (F,), 2), ((S,) * 5, 1), ((F,) * 5, 1)])
@pytest.mark.parametrize("path", ["tiles", "flex"])
def test_layers_of_one_kind_share_one_mask(
    layer_types: tuple[str, ...], num_kinds: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where masks are made, on two micro-batches: one per kind of layer for each of them."""
    built = []
    if path == "flex":
        builder = attention_flex._mask_builder("cpu")
        monkeypatch.setattr(model, "plan_attention", flex_plan)
        monkeypatch.setattr(
            attention_flex, "_mask_builder", lambda _: lambda *a, **k: built.append(path) or builder(*a, **k)
        )
    else:
        cut = attention_tiles._runs
        monkeypatch.setattr(attention_tiles, "_runs", lambda *a: built.append(path) or cut(*a))
    drafter = made({"layer_types": layer_types, "block_size": 4})
    features_TF, embeddings_NBH, blocks = inputs_of(drafter.shape)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drafter(features_TF, embeddings_NBH, blocks)
        assert len(built) == num_kinds
        drafter(features_TF, embeddings_NBH, replace(blocks, anchors=blocks.anchors.flip(0), ends=blocks.ends.flip(0)))
    assert len(built) == 2 * num_kinds


def composed(*overrides: str) -> TrainConfig:
    register_schema()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return to_train_config(compose("config", overrides=list(overrides)))


QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
QWEN3_5 = {
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.25},
        "vocab_size": 248320,
    },
}
# What the released drafters' config.json say, as far as it is not Transformers' boilerplate.
RELEASED_QWEN3 = {
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "head_dim": 128,
    "layer_types": [F] * 5,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
RELEASED_QWEN3_6 = {
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [S, S, S, S, F],
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "vocab_size": 248320,
}


@pytest.mark.parametrize(
    ("preset", "path", "target", "released"),
    [
        (
            "qwen3_4b",
            "Qwen/Qwen3-4B",
            {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
            {**RELEASED_QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
        ),
        (
            "qwen3_8b",
            "Qwen/Qwen3-8B",
            {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
            {**RELEASED_QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
        ),
        ("qwen3_5_27b", "Qwen/Qwen3.5-27B", QWEN3_5, RELEASED_QWEN3_6),
        ("qwen3_6_27b", "Qwen/Qwen3.6-27B", QWEN3_5, RELEASED_QWEN3_6),
    ],
)
def test_presets_make_the_released_drafters(
    preset: str, path: str, target: dict, released: dict, tmp_path: Path
) -> None:
    config = composed(f"model={preset}", "data=conversations", "data.train_path=rows.jsonl")
    assert config.model.target.path == path
    (tmp_path / "config.json").write_text(json.dumps(target))
    shape = drafter_shape(config.model.drafter, read_target_shape(str(tmp_path)))
    served = served_config(shape, torch.bfloat16)
    assert {key: served[key] for key in released} == released
    with torch.device("meta"):
        drafter = DFlashDrafter(shape)
    assert drafter.fc.weight.shape == (released["hidden_size"], 5 * released["hidden_size"])


def test_sliding_cap_5x3_is_five_targets_and_three_drafters_of_sliding_layers(tmp_path: Path) -> None:
    config = composed("experiment=sliding_cap_5x3", "model=qwen3_6_27b", "data=conversations", "data.train_path=x")
    assert (config.pipeline.colocated, config.pipeline.num_target_ranks) == (False, 5)
    assert (config.pipeline.queue.depth * 3, config.pipeline.queue.min_ready) == (60, 10)
    assert config.train.micro_batches_per_step % 3 == 0
    assert config.objective.ce.weight > 0 and config.objective.cap.weight > 0
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_5))
    shape = drafter_shape(config.model.drafter, read_target_shape(str(tmp_path)))
    assert (shape.layer_types, shape.sliding_window) == ((S,) * 5, 2048)
    assert served_config(shape, torch.bfloat16)["layer_types"] == [S] * 5
    demo = composed("experiment=sliding_cap_5x3")
    assert (demo.model.drafter.block_size, demo.model.drafter.num_layers) == (8, 5)
