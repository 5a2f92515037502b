"""The served layout: what is written, what is read, and what is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers_drafter import randomize, small_shape
from safetensors.torch import load_file, save_file

from dflash.drafter import served
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import (
    check_served_weights,
    load_served,
    read_served_shape,
    save_served,
    served_config,
    served_shape,
)
from dflash.drafter.shape import DrafterShape

FIXTURE = Path(__file__).parent / "fixtures" / "served_pair" / "draft"


def _drafter(**changes) -> DFlashDrafter:
    drafter = DFlashDrafter(small_shape(**changes))
    randomize(drafter)
    return drafter


def _edit(folder: Path, changes: dict, removed: tuple[str, ...] = ()) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    for key in removed:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the drafter that z-lab's runtime serves."""
    return Path(shutil.copytree(FIXTURE, tmp_path / "draft"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ("full_attention",)},
        {"layer_types": ("sliding_attention",) * 2, "sliding_is_causal": False},
        {"num_key_value_heads": 6, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "target_layer_ids": (0, 3)},
    ],
)
def test_round_trip(tmp_path, changes, dtype):
    drafter = _drafter(**changes)
    save_served(drafter, tmp_path / "out" / "drafter", dtype)
    loaded = load_served(tmp_path / "out" / "drafter")
    assert loaded.shape == drafter.shape
    for name, value in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.to(dtype).float())
    assert all(p.requires_grad and p.dtype == torch.float32 and p.is_leaf for p in loaded.parameters())
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["drafter"]


def test_the_fixture_loads_and_round_trips(tmp_path, folder):
    drafter = load_served(folder)
    assert drafter.shape == DrafterShape(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=512,
        vocab_size=64,
        block_size=8,
        mask_token_id=63,
        target_layer_ids=(1, 3, 5),
        num_target_layers=8,
        layer_types=("sliding_attention", "full_attention", "full_attention"),
        sliding_window=12,
    )
    save_served(drafter, tmp_path / "again", torch.float32)
    ours, theirs = load_file(tmp_path / "again" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    written, read = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "again", folder))
    for key in read.keys() - {"rope_scaling"}:
        assert written[key] == read[key], key


def test_config_says_what_the_design_lists():
    config = served_config(small_shape(), torch.bfloat16)
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config["use_sliding_window"] is True and config["sliding_window"] == 7
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["dflash_config"] == {"mask_token_id": 36, "target_layer_ids": [1, 2, 4]}
    assert config["num_target_layers"] == 6 and config["block_size"] == 5 and config["dtype"] == "bfloat16"
    assert "partial_rotary_factor" not in json.dumps(config) and "is_causal" not in config
    full = served_config(small_shape(layer_types=("full_attention",)), torch.float32)
    assert full["use_sliding_window"] is False and full["sliding_window"] is None
    non_causal = small_shape(layer_types=("sliding_attention",), sliding_is_causal=False)
    served = served_config(non_causal, torch.float32)
    assert served["is_causal"] is False and served["dflash_config"]["causal"] is False


def test_transformers_reads_the_config(tmp_path):
    from transformers import Qwen3Config

    save_served(_drafter(), tmp_path / "drafter")
    config = Qwen3Config.from_pretrained(tmp_path / "drafter")
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.sliding_window == 7 and config.rope_parameters["rope_theta"] == 10000.0
    assert config.head_dim == 8 and config.dflash_config["target_layer_ids"] == [1, 2, 4]


def test_mixed_non_causal_drafters_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="non-causal"):
        save_served(_drafter(sliding_is_causal=False), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_kept(tmp_path):
    (tmp_path / "drafter").mkdir()
    save_served(_drafter(), tmp_path / "drafter")
    with pytest.raises(ValueError, match="already exists"):
        save_served(_drafter(), tmp_path / "drafter")


def test_an_export_that_does_not_read_back_leaves_nothing(tmp_path, monkeypatch):
    def spoil(tensors, path, metadata):
        save_file({name: value + 1 for name, value in tensors.items()}, path, metadata)

    monkeypatch.setattr(served, "save_file", spoil)
    with pytest.raises(RuntimeError, match="does not read back"):
        save_served(_drafter(), tmp_path / "drafter")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "removed"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, ("rope_theta",)),
        ({"rope_parameters": {"full_attention": {"rope_theta": 10000.0}, "sliding_attention": None}}, ("rope_theta",)),
        ({"rope_parameters": {"rope_theta": 10000}, "is_causal": None}, ("rope_scaling",)),
        ({"partial_rotary_factor": 1.0, "torch_dtype": "float32"}, ("dtype", "attention_dropout", "use_cache")),
        ({}, ("rope_theta", "rms_norm_eps", "use_sliding_window", "hidden_act", "attention_bias")),
    ],
)
def test_other_spellings_of_the_same_drafter(folder, changes, removed):
    same = load_served(folder).shape
    _edit(folder, changes, removed)
    assert load_served(folder).shape == same


def test_layer_types_are_derived_as_qwen3_does(folder):
    _edit(folder, {"max_window_layers": 2}, ("layer_types",))
    assert [str(kind) for kind in load_served(folder).shape.layer_types] == ["full_attention"] * 2 + [
        "sliding_attention"
    ]
    _edit(folder, {"use_sliding_window": False})
    assert set(load_served(folder).shape.layer_types) == {"full_attention"}
    _edit(folder, {"use_sliding_window": True}, ("max_window_layers",))
    assert set(load_served(folder).shape.layer_types) == {"full_attention"}


def test_is_causal(folder):
    _edit(folder, {"layer_types": ["sliding_attention"] * 3, "is_causal": False})
    assert load_served(folder).shape.sliding_is_causal is False
    _edit(folder, {"is_causal": True})
    assert load_served(folder).shape.sliding_is_causal is True
    _edit(folder, {"layer_types": ["full_attention"] * 3, "is_causal": False})
    assert load_served(folder).shape.sliding_is_causal is True


def _dflash(**changes) -> dict:
    return {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1, 3, 5], **changes}}


@pytest.mark.parametrize(
    ("changes", "window", "is_causal"),
    [
        ({"layer_types": ["full_attention"] * 3, **_dflash(use_swa=True, swa_window_size=9)}, 9, False),
        ({"layer_types": None, **_dflash(use_swa=True)}, 12, False),
        ({"layer_types": None, **_dflash(use_swa=True, causal=True)}, 12, True),
        ({"layer_types": ["sliding_attention"] * 3, **_dflash(use_swa=True)}, 12, False),
        ({"layer_types": ["sliding_attention"] * 3, **_dflash(causal=False)}, 12, False),
        ({"layer_types": ["sliding_attention"] * 3, "is_causal": False, **_dflash(causal=False)}, 12, False),
        ({"layer_types": ["sliding_attention"] * 3, **_dflash(use_swa=False)}, 12, True),
    ],
)
def test_windows_as_vllm_spells_them(folder, changes, window, is_causal):
    _edit(folder, changes)
    shape = load_served(folder).shape
    assert set(shape.layer_types) == {"sliding_attention"}
    assert (shape.sliding_window, shape.sliding_is_causal) == (window, is_causal)


def test_dflash_values_in_either_place_or_from_the_caller(folder):
    same = read_served_shape(folder)
    _edit(folder, {"mask_token_id": 63, "target_layer_ids": [1, 3, 5]}, ("dflash_config",))
    assert read_served_shape(folder) == same
    _edit(folder, {"dflash_config": {"mask_token_id": None, "block_size": 8}}, ("block_size", "mask_token_id"))
    assert read_served_shape(folder, {"mask_token_id": 63, "block_size": 5}) == same


def test_names_and_shapes_are_checked_without_reading_weights(folder):
    shape = read_served_shape(folder)
    check_served_weights(folder, shape)
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name != "norm.weight"}
    save_file({**kept, "lm_head.weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: \['norm.weight'\]; tensors left over: \['lm_head.weight'\]"):
        check_served_weights(folder, shape)
    save_file({**weights, "norm.weight": torch.ones(63)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"norm.weight \[63\] instead of \[64\]"):
        check_served_weights(folder, shape)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        check_served_weights(folder, shape)


@pytest.mark.parametrize(
    ("changes", "removed", "word"),
    [
        ({}, ("block_size",), "'block_size'"),
        ({}, ("dflash_config",), "'mask_token_id'"),
        ({"dflash_config": {"target_layer_ids": [1]}}, (), "'mask_token_id'"),
        ({"rope_theta": 5000.0, "rope_parameters": {"rope_theta": 1e6}}, (), "disagree"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, (), "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, (), "linear"),
        ({"partial_rotary_factor": 0.5}, (), "partial_rotary_factor"),
        ({"attention_bias": True}, (), "attention_bias"),
        ({"hidden_act": "gelu"}, (), "gelu"),
        ({"is_causal": True}, (), "is_causal"),
        ({"is_causal": False, **_dflash(causal=True)}, (), "disagree"),
        ({"architectures": ["DFlash2DraftModel"]}, (), "DFlash2DraftModel"),
        ({"use_sliding_window": False}, (), "use_sliding_window"),
        ({"layer_types": ["full_attention"]}, (), "num_hidden_layers"),
        ({"layer_types": ["chunked_attention"] * 3}, (), "chunked_attention"),
        ({"sliding_window": None}, (), "sliding_window"),
        ({"intermediate_size": 100}, (), r"layers.0.mlp.down_proj.weight \[64, 128\] instead of \[64, 100\]"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, (), "left over: .*layers.2.mlp"),
        ({"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}, (), "missing: .*layers.3.mlp"),
        ({"hidden_size": "64"}, (), "config.json"),
    ],
)
def test_what_cannot_be_read_is_named(folder, changes, removed, word):
    _edit(folder, changes, removed)
    with pytest.raises(ValueError, match=word) as caught:
        load_served(folder)
    assert str(folder) in str(caught.value)


def test_missing_and_damaged_files_are_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ValueError, match="model.safetensors"):
        load_served(folder)
    weights.unlink()
    with pytest.raises(ValueError, match="neither"):
        load_served(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_served(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="does not exist"):
        load_served(folder)


def test_shards_prefixes_and_other_dtypes_load(folder):
    weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({f"model.{name}": weights[name] for name in members}, folder / file)
    index = {"weight_map": {f"model.{name}": file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    loaded = load_served(folder, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in names)


def test_served_shape_reads_a_plain_mapping():
    shape = small_shape()
    assert served_shape(served_config(shape, torch.float32), Path("x")) == shape
