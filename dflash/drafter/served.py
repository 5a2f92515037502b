"""Drafters in the layout that z-lab's runtime, vLLM and SGLang serve: config.json and model.safetensors."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.config import LayerType
from dflash.drafter.model import INITIALIZER_RANGE, DFlashDrafter
from dflash.drafter.shape import DrafterShape

ARCHITECTURE = "DFlashDraftModel"
SERVED_CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Defaults of Transformers' Qwen3Config, for what a config leaves out.
_QWEN3_HEAD_DIM, _QWEN3_MAX_WINDOW_LAYERS, _QWEN3_ROPE_THETA = 128, 28, 10000.0
_QWEN3_RMS_NORM_EPS, _QWEN3_MAX_POSITIONS, _QWEN3_SLIDING_WINDOW = 1e-6, 32768, 4096


def save_served(drafter: DFlashDrafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `drafter` with weights in `dtype`: in a temporary folder, reloaded and compared, then renamed.

    Raises ValueError where `folder` already holds something, or the layout cannot say what the drafter does.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists: remove it, or export to another folder")
    config = served_config(drafter.shape, dtype)
    weights = {name: value.detach().to("cpu", dtype).contiguous() for name, value in drafter.state_dict().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (scratch / SERVED_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(weights, scratch / WEIGHTS, metadata={"format": "pt"})
        _compare(load_served(scratch, dtype=dtype), drafter.shape, weights, folder)
        # mkdtemp's folder is for its owner alone; an export is for whoever may read its parent.
        scratch.chmod(0o755)
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def load_served(folder: Path, dtype: torch.dtype = torch.float32) -> DFlashDrafter:
    """Reads a drafter in the served layout, by whomever it was written, with weights in `dtype` (masters: fp32).

    Raises ValueError naming the folder and the key or tensors that are missing, left over or of a wrong shape.
    """
    folder = Path(folder)
    shape = read_served_shape(folder)
    with torch.device("meta"):
        drafter = DFlashDrafter(shape)
    weights = read_served_weights(folder, shape)
    drafter.load_state_dict({name: value.to(dtype) for name, value in weights.items()}, assign=True)
    # Tensors assigned from a file are not leaves that train until they are told so.
    return drafter.requires_grad_(True)


def read_served_shape(folder: Path, lacking: Mapping[str, Any] | None = None) -> DrafterShape:
    """The shape that a folder's config.json describes; see `served_shape`."""
    return served_shape(_read_json(folder / SERVED_CONFIG), folder, lacking)


def read_served_weights(folder: Path, shape: DrafterShape) -> dict[str, Tensor]:
    """Weights of a drafter of `shape`, as stored, by their names in a drafter's state.

    Raises ValueError naming the folder and the tensors that are missing, left over or of a wrong shape.
    """
    weights: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        try:
            weights |= load_file(file)
        except Exception as error:  # safetensors' own exception type is not importable in all its versions.
            raise ValueError(f"{file} cannot be read: {error}") from error
    weights = {_plain(name): value for name, value in weights.items()}
    _check_weights(folder, shape, {name: tuple(value.shape) for name, value in weights.items()})
    return weights


def check_served_weights(folder: Path, shape: DrafterShape) -> None:
    """Raises ValueError as `read_served_weights` would for names and shapes; no weights are read."""
    found: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                found |= {_plain(name): tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except Exception as error:  # As above.
            raise ValueError(f"{file} cannot be read: {error}") from error
    _check_weights(folder, shape, found)


def served_config(shape: DrafterShape, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a drafter. Source: design section 8, z-lab's published drafters.

    Raises ValueError for a non-causal window next to full layers: `is_causal` is one key for the whole drafter.
    """
    slides = LayerType.sliding_attention in shape.layer_types
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "initializer_range": INITIALIZER_RANGE,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "layer_types": [str(kind) for kind in shape.layer_types],
        "use_sliding_window": slides,
        "sliding_window": shape.sliding_window if slides else None,
        "max_window_layers": shape.num_layers,
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": {
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
    }
    if slides and not shape.sliding_is_causal:
        if LayerType.full_attention in shape.layer_types:
            raise ValueError("a non-causal window can only be served when every layer is sliding_attention")
        config["is_causal"] = False
        # vLLM looks for the same fact here, and slides causally where it is not told.
        config["dflash_config"]["causal"] = False
    return config


def served_shape(config: Mapping[str, Any], where: Path, lacking: Mapping[str, Any] | None = None) -> DrafterShape:
    """The shape that a config.json describes; `where` is named in errors.

    lacking: DFlash's own values (block_size, mask_token_id, target_layer_ids, num_target_layers) for what the config
    leaves out or has as null. Raises ValueError for what this drafter cannot be: another architecture, other rotary
    scalings, biases, activations, or contradictions.
    """
    try:
        return _shape(config, lacking or {})
    except KeyError as error:
        raise ValueError(f"{where}: {SERVED_CONFIG} has no {error.args[0]!r}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {SERVED_CONFIG}: {error}") from None


def _shape(config: Mapping[str, Any], lacking: Mapping[str, Any]) -> DrafterShape:
    named = config.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in named:
        raise ValueError(f"architectures={named} is not supported, only {ARCHITECTURE!r}")
    if config.get("attention_bias"):
        raise ValueError("attention_bias=true is not supported: the drafter's projections have no bias")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported, only 'silu'")
    # Folders exist with DFlash's own keys in either place; the runtimes look into dflash_config first.
    places = (lacking, config, config.get("dflash_config") or {})
    dflash = {key: value for place in places for key, value in place.items() if value is not None}
    layer_types = _layer_types(config, dflash)
    slides = LayerType.sliding_attention in layer_types
    default_window = _QWEN3_SLIDING_WINDOW if config.get("use_sliding_window") else None
    window = dflash.get("swa_window_size", config.get("sliding_window", default_window))
    return DrafterShape(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=config.get("head_dim") or _QWEN3_HEAD_DIM,
        rms_norm_eps=config.get("rms_norm_eps", _QWEN3_RMS_NORM_EPS),
        rope_theta=_rope_theta(config),
        max_position_embeddings=config.get("max_position_embeddings", _QWEN3_MAX_POSITIONS),
        vocab_size=config["vocab_size"],
        block_size=dflash["block_size"],
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=tuple(dflash["target_layer_ids"]),
        num_target_layers=dflash["num_target_layers"],
        layer_types=layer_types,
        sliding_window=window if slides else None,
        sliding_is_causal=_sliding_is_causal(dflash, layer_types),
    )


def _layer_types(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> tuple[LayerType, ...]:
    num_layers, uses_window = config["num_hidden_layers"], config.get("use_sliding_window")
    named = config.get("layer_types")
    if named is not None and len(named) != num_layers:
        raise ValueError(f"layer_types names {len(named)} layers, num_hidden_layers is {num_layers}")
    if dflash.get("use_swa") and LayerType.sliding_attention not in (named or ()):
        # vLLM's rule: unless some layer is named as sliding, all of them slide.
        return (LayerType.sliding_attention,) * num_layers
    if named is None:
        # Qwen3's own rule where layers are not named: the first max_window_layers are full.
        first = config.get("max_window_layers", _QWEN3_MAX_WINDOW_LAYERS)
        slides = bool(uses_window) and config.get("sliding_window", _QWEN3_SLIDING_WINDOW) is not None
        return tuple(
            LayerType.sliding_attention if slides and i >= first else LayerType.full_attention
            for i in range(num_layers)
        )
    if uses_window is False and LayerType.sliding_attention in named:
        raise ValueError("layer_types names sliding_attention, but use_sliding_window is false")
    return tuple(named)


def _sliding_is_causal(dflash: Mapping[str, Any], layer_types: tuple[LayerType, ...]) -> bool:
    """Whether sliding layers are causal inside the block: `is_causal` of z-lab's runtime, `causal` of vLLM's."""
    found = {bool(dflash[key]) for key in ("is_causal", "causal") if key in dflash}
    if len(found) > 1:
        raise ValueError("is_causal and dflash_config.causal disagree")
    if found == {True} and LayerType.full_attention in layer_types:
        raise ValueError("is_causal=true is not supported with full_attention: full layers see their whole block")
    if LayerType.sliding_attention not in layer_types:
        return True
    # Where neither says it, windows are causal, unless they come from vLLM's use_swa.
    return found.pop() if found else not dflash.get("use_swa")


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The rotary base, from whichever of the two spellings the config uses; both must agree."""
    parameters = config.get("rope_parameters") or {}
    # Transformers may keep a set per kind of layer.
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    found = [] if config.get("rope_theta") is None else [float(config["rope_theta"])]
    for rope in [*(nested or [parameters]), config.get("rope_scaling") or {}]:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(f"rope type {kind!r} is not supported, only 'default'")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not supported: every head is turned as a whole")
        if rope.get("rope_theta") is not None:
            found.append(float(rope["rope_theta"]))
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported: every head is turned as a whole")
    if len(set(found)) > 1:
        raise ValueError(f"rope_theta and rope_parameters disagree: {sorted(set(found))}")
    return found[0] if found else _QWEN3_ROPE_THETA


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError(f"{folder / INDEX} has no 'weight_map'")
        return [folder / name for name in sorted(set(weight_map.values()))]
    raise ValueError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")


def _plain(name: str) -> str:
    """A tensor's name in a drafter's state: some writers put the model's own prefix before it."""
    return name.removeprefix("model.")


def _check_weights(folder: Path, shape: DrafterShape, found: Mapping[str, tuple[int, ...]]) -> None:
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in DFlashDrafter(shape).state_dict().items()}
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"{folder}: tensors missing: {missing or 'none'}; tensors left over: {extra or 'none'}")
    wrong = [f"{n} {list(found[n])} instead of {list(size)}" for n, size in expected.items() if found[n] != size]
    if wrong:
        raise ValueError(f"{folder}: tensors that disagree with {SERVED_CONFIG}: {'; '.join(wrong)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def _compare(written: DFlashDrafter, shape: DrafterShape, weights: Mapping[str, Tensor], folder: Path) -> None:
    same = written.shape == shape and all(
        torch.equal(value.view(torch.uint8), weights[name].view(torch.uint8))
        for name, value in written.state_dict().items()
    )
    if not same:
        raise RuntimeError(f"the export to {folder} does not read back as what was written")
