"""Starting a drafter from layers of its target, or from a drafter that is already served, instead of from noise."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from dflash.batch import TargetLayers, TargetShape
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import INDEX, SERVED_CONFIG, WEIGHTS, read_served_shape, read_served_weights, served_config
from dflash.drafter.shape import DrafterShape

_KEY = "model.drafter.init_from"
_ALLOWED = "allowed here: null, target, a folder with a served drafter, or such a folder's hub name, OWNER/NAME"
# What a config.json may leave to the runtime's command line, and so to ours.
_MAY_LACK = ("block_size", "mask_token_id", "target_layer_ids")

_COPIED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)


def source_layer_ids(shape: DrafterShape) -> tuple[int, ...]:
    """The target layers a drafter starts from: the last ones, which end where the target's LM head reads.

    Raises ValueError where the drafter has more layers than the target.
    """
    if shape.num_layers > shape.num_target_layers:
        raise ValueError(
            f"model.drafter.init_from: target has {shape.num_target_layers} layers, fewer than "
            f"model.drafter.num_layers ({shape.num_layers}); allowed here: null"
        )
    return tuple(range(shape.num_target_layers - shape.num_layers, shape.num_target_layers))


@torch.no_grad()
def start_from_target(drafter: DFlashDrafter, source: TargetLayers) -> None:
    """Copy every weight whose shape is the same; the others keep what they were drawn as.

    The final norm is the target's; `fc` passes the last captured feature through. Query and key norms, where the
    target has none, get the root mean square that its queries and keys have for normed input, so that attention is
    as sharp as it was: sqrt(mean over outputs of sum_j (W_ij g_j)^2), g the weight of the norm before.
    """
    _copy(drafter.norm.weight, source.final_norm)
    for layer, weights in zip(drafter.layers, source.layers, strict=True):
        parameters = dict(layer.named_parameters())
        for name in _COPIED:
            _copy(parameters[name], weights.get(name))
        for kind in ("q", "k"):
            norm, projection = parameters[f"self_attn.{kind}_norm.weight"], f"self_attn.{kind}_proj.weight"
            is_copied = _copy(norm, weights.get(f"self_attn.{kind}_norm.weight"))
            if not is_copied and _fits(parameters[projection], weights.get(projection)):
                scaled = parameters[projection] * parameters["input_layernorm.weight"]
                norm.fill_(float(scaled.square().sum(1).mean().sqrt()))
    hidden_size = drafter.shape.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden_size:] = torch.eye(hidden_size)


def _copy(parameter: Tensor, weight: Tensor | None) -> bool:
    if not _fits(parameter, weight):
        return False
    parameter.copy_(weight)
    return True


def _fits(parameter: Tensor, weight: Tensor | None) -> bool:
    return weight is not None and weight.shape == parameter.shape


def locate_served(path: str) -> Path:
    """Folder of a served drafter: `path` itself, or the hub's cache where `path` is a hub name.

    Raises ValueError when neither a folder nor a hub name with such files is there.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        if not (place / SERVED_CONFIG).is_file():
            raise ValueError(
                f"{_KEY}: {path} has no {SERVED_CONFIG}; a checkpoint is exported first: "
                f"python -m dflash.export checkpoint={path} output=FOLDER"
            )
        return place
    # The hub must not be asked for a mistyped folder.
    if place.exists() or path.count("/") != 1 or path.startswith(("/", ".", "~")):
        raise ValueError(f"{_KEY}: {path} is no folder; {_ALLOWED}")
    config = _fetch(path, SERVED_CONFIG)
    if config is None:
        raise ValueError(f"{_KEY}: {path} is no folder, and no {SERVED_CONFIG} of that name is on the hub; {_ALLOWED}")
    if _fetch(path, WEIGHTS) is None and (index := _fetch(path, INDEX)) is not None:
        for shard in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())):
            _fetch(path, shard)
    return config.parent


def shape_to_start_from(folder: Path, given: Mapping[str, Any], target: TargetShape) -> DrafterShape:
    """Shape of the served drafter in `folder`, once it fits the target and all that is `given`.

    given: what the user set below `model.drafter`, by its key; it must agree with the folder, and stands for what the
    folder's config.json lacks. Raises ValueError naming the key, or what does not fit, with both values.
    """
    lacking = {key: given[key] for key in _MAY_LACK if key in given}
    shape = read_served_shape(folder, {**lacking, "num_target_layers": target.num_layers})
    check_start(shape, folder, given, target)
    try:
        # What could not be exported in the end is refused before it is trained.
        served_config(shape, torch.float32)
    except ValueError as error:
        raise ValueError(f"{_KEY}: {folder}: {error}") from None
    return shape


def check_start(shape: DrafterShape, where: Path, given: Mapping[str, Any], target: TargetShape) -> None:
    """Raises ValueError unless the drafter at `where` is as `given` and fits the target; see `shape_to_start_from`."""
    for key, value in given.items():
        own = getattr(shape, key)
        if (tuple(value) if isinstance(value, list | tuple) else value) != own:
            raise ValueError(
                f"model.drafter.{key}: {_plain(value)} differs from {_plain(own)}, which the drafter in {where} has "
                f"({_KEY}); allowed here: null, or the same"
            )
    pairs = {
        "hidden_size": (shape.hidden_size, target.hidden_size),
        "vocab_size": (shape.vocab_size, target.vocab_size),
        "num_target_layers": (shape.num_target_layers, target.num_layers),
    }
    problems = [f"its {name} is {own}, the target's {theirs}" for name, (own, theirs) in pairs.items() if own != theirs]
    ids = shape.target_layer_ids
    if list(ids) != sorted(ids):
        problems.append(f"its target_layer_ids {list(ids)} do not ascend, as features are captured and served")
    if problems:
        raise ValueError(f"{_KEY}: the drafter in {where} does not fit model.target.path: {'; '.join(problems)}")


@torch.no_grad()
def start_from_served(drafter: DFlashDrafter, folder: Path) -> None:
    """Copies all weights of the served drafter in `folder`, in whatever dtype they are stored.

    Raises ValueError naming the tensors that are missing, left over or of another shape.
    """
    weights = read_served_weights(folder, drafter.shape)
    for name, parameter in drafter.named_parameters():
        parameter.copy_(weights[name])


def _plain(value: Any) -> Any:
    """How the configuration spells a value."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value


def _fetch(name: str, file: str) -> Path | None:
    """A file of a hub repository, None where the repository has no such file."""
    try:
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # Transformers raises many types here, and all of them mean "not to be had".
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{_KEY}: {name} cannot be fetched: {reason}; {_ALLOWED}") from error
    return Path(found) if found else None
