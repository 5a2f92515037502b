"""What a drafter holds that starts from its target, or from a drafter that is served, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers_drafter import randomize, small_shape
from helpers_run import make_target
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from dflash.batch import TargetShape
from dflash.drafter import initial
from dflash.drafter.initial import (
    check_start,
    locate_served,
    shape_to_start_from,
    source_layer_ids,
    start_from_served,
    start_from_target,
)
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import load_served, save_served
from dflash.target.layers import load_layers
from dflash.target.shape import read_target_shape

PAIR = Path(__file__).parent / "fixtures" / "served_pair"

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


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """A copy of the drafter that z-lab's runtime serves."""
    return Path(shutil.copytree(PAIR / "draft", tmp_path / "draft"))


@pytest.fixture(scope="module")
def target() -> TargetShape:
    return read_target_shape(str(PAIR / "target"))


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_served_drafter_is_started_from_whole(served: Path, target: TargetShape) -> None:
    shape = shape_to_start_from(locate_served(str(served)), {}, target)
    drafter = DFlashDrafter(shape).initialize(0)
    start_from_served(drafter, served)
    weights = load_file(served / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in drafter.state_dict().items())
    assert all(p.requires_grad and p.is_leaf and p.dtype == torch.float32 for p in drafter.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "changes", [{}, {"layer_types": ("sliding_attention",) * 2, "sliding_is_causal": False, "rope_theta": 1e7}]
)
def test_export_warm_start_export_gives_the_same_bytes(tmp_path: Path, changes: dict, dtype: torch.dtype) -> None:
    drafter = DFlashDrafter(small_shape(**changes))
    randomize(drafter)
    save_served(drafter, tmp_path / "first", dtype)
    target = target_of(drafter)
    started = DFlashDrafter(shape_to_start_from(tmp_path / "first", {}, target)).initialize(3)
    start_from_served(started, tmp_path / "first")
    save_served(started, tmp_path / "second", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def target_of(drafter: DFlashDrafter) -> TargetShape:
    """A target that the drafter fits and whose other sizes are none of the drafter's."""
    shape = drafter.shape
    return TargetShape(
        num_layers=shape.num_target_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        intermediate_size=shape.intermediate_size + 4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=shape.head_dim * 2,
        rms_norm_eps=1e-4,
        rope_theta=77.0,
        max_position_embeddings=9,
    )


def test_what_is_given_must_be_what_the_folder_has(served: Path, target: TargetShape) -> None:
    shape = load_served(served).shape
    same = {
        "num_layers": 3,
        "block_size": 8,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 12,
        "sliding_is_causal": True,
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": 63,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rope_theta": 10000.0,
    }
    assert shape_to_start_from(served, same, target) == shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_layers": 5}, "model.drafter.num_layers: 5 differs from 3, which the drafter in"),
        ({"block_size": 16}, "model.drafter.block_size: 16 differs from 8,"),
        ({"sliding_window": 2048}, "model.drafter.sliding_window: 2048 differs from 12,"),
        ({"sliding_is_causal": False}, "model.drafter.sliding_is_causal: false differs from true,"),
        ({"target_layer_ids": [1, 3]}, "model.drafter.target_layer_ids: [1, 3] differs from [1, 3, 5],"),
        ({"rope_theta": 1e6}, "model.drafter.rope_theta: 1000000.0 differs from 10000.0,"),
        (
            {"layer_types": ["full_attention"] * 3},
            "model.drafter.layer_types: [full_attention, full_attention, full_attention] differs from "
            "[sliding_attention, full_attention, full_attention],",
        ),
    ],
)
def test_what_is_given_and_differs_is_refused_by_key(
    served: Path, target: TargetShape, given: dict, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        shape_to_start_from(served, given, target)
    assert str(caught.value).startswith(message) and str(served) in str(caught.value)


def test_what_the_folder_lacks_is_taken_from_what_is_given(served: Path, target: TargetShape) -> None:
    shape = load_served(served).shape
    config = json.loads((served / "config.json").read_text())
    for key in ("dflash_config", "block_size", "num_target_layers"):
        del config[key]
    (served / "config.json").write_text(json.dumps(config))
    given = {"block_size": 8, "mask_token_id": 63, "target_layer_ids": [1, 3, 5]}
    assert shape_to_start_from(served, given, target) == shape
    with pytest.raises(ValueError, match="config.json has no 'mask_token_id'"):
        shape_to_start_from(served, {"block_size": 8}, target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 65}, "its vocab_size is 65, the target's 64"),
        ({"num_target_layers": 9}, "its num_target_layers is 9, the target's 8"),
        ({"hidden_size": 48, "vocab_size": 65}, "its hidden_size is 48, the target's 64; its vocab_size is 65,"),
        (
            {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [3, 1, 5]}},
            "its target_layer_ids [3, 1, 5] do not ascend",
        ),
        ({"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1]}}, "mask_token_id=64 is outside"),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 7]}}, "7 is not between 0 and 6"),
        ({"is_causal": False}, "a non-causal window can only be served when every layer is sliding_attention"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(served: Path, target: TargetShape, changes: dict, message: str) -> None:
    edit(served, **changes)
    with pytest.raises(ValueError) as caught:
        shape_to_start_from(served, {}, target)
    assert message in str(caught.value) and str(served) in str(caught.value) and "\n" not in str(caught.value)


def test_a_resumed_drafter_is_held_against_what_is_given_without_its_folder(target: TargetShape) -> None:
    shape = load_served(PAIR / "draft").shape
    check_start(shape, Path("checkpoint"), {"block_size": 8}, target)
    with pytest.raises(ValueError, match="model.drafter.block_size: 4 differs from 8, which the drafter in checkpoint"):
        check_start(shape, Path("checkpoint"), {"block_size": 4}, target)


def test_tensors_that_do_not_fit_are_named(served: Path) -> None:
    drafter = DFlashDrafter(load_served(served).shape)
    weights = load_file(served / "model.safetensors")
    save_file({**weights, "fc.weight": torch.zeros(64, 128)}, served / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc.weight \[64, 128\] instead of \[64, 192\]"):
        start_from_served(drafter, served)
    weights.pop("hidden_norm.weight")
    save_file({**weights, "embed_tokens.weight": torch.zeros(64, 64)}, served / "model.safetensors")
    with pytest.raises(ValueError, match="missing: .*hidden_norm.*left over: .*embed_tokens"):
        start_from_served(drafter, served)


def test_places_that_hold_no_drafter_are_named(tmp_path: Path, served: Path) -> None:
    assert locate_served(str(served)) == served
    for path in ("targte", str(tmp_path / "none"), "./none", "a/b/c", str(served / "config.json")):
        with pytest.raises(ValueError, match="model.drafter.init_from: .* is no folder; allowed here: null, target"):
            locate_served(path)
    with pytest.raises(ValueError, match="has no config.json; a checkpoint is exported first"):
        locate_served(str(tmp_path))


def test_a_hub_name_is_fetched_shard_by_shard(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(served / "model.safetensors")
    names = sorted(weights)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: weights[name].half() for name in members}, served / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (served / "model.safetensors.index.json").write_text(json.dumps(index))
    (served / "model.safetensors").unlink()
    asked = []

    def hub(name: str, file: str, **_: object) -> str | None:
        asked.append((name, file))
        return str(served / file) if (served / file).exists() else None

    monkeypatch.setattr(initial, "cached_file", hub)
    folder = locate_served("z-lab/Qwen3-8B-DFlash-b16")
    assert folder == served and {file for _, file in asked} >= {"config.json", *shards}
    drafter = DFlashDrafter(load_served(folder).shape)
    start_from_served(drafter, folder)
    assert torch.equal(drafter.fc.weight, weights["fc.weight"].half().float())


def test_a_hub_name_of_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial, "cached_file", lambda *_, **__: None)
    with pytest.raises(ValueError, match="model.drafter.init_from: z-lab/x is no folder, and no config.json"):
        locate_served("z-lab/x")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(*_: object, **__: object) -> None:
        raise OSError("no\nroute")

    monkeypatch.setattr(initial, "cached_file", hub)
    with pytest.raises(ValueError, match="model.drafter.init_from: z-lab/x cannot be fetched: no route; allowed"):
        locate_served("z-lab/x")
