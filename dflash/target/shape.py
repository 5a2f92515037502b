"""What a target looks like without its weights, and which of its layers feed the drafter."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from dflash.batch import TargetShape
from dflash.target.loading import locate

_LAYER_IDS_KEY = "model.drafter.target_layer_ids"


def read_target_shape(path: str) -> TargetShape:
    """Read a target's sizes from its config alone; no weights are touched.

    path: a folder, a hub name or a `.gguf` file.
    Raises ValueError when nothing usable lies there.
    """
    return target_shape(read_config(path))


def read_config(path: str) -> PreTrainedConfig:
    """Read the Transformers config of a folder, a hub name or a `.gguf` file.

    Raises ValueError, one line, when nothing usable lies there.
    """
    location = locate(path)
    try:
        return AutoConfig.from_pretrained(**location, trust_remote_code=False)
    except Exception as error:  # Transformers raises nearly every type here, and all of them mean "not readable".
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise ValueError(f"target {path}: its config cannot be read: {reason}") from error


def target_shape(config: PreTrainedConfig) -> TargetShape:
    """Derive the sizes that the drafter and the transport need from a Transformers config.

    Multimodal wrappers are read through their text config. Raises ValueError naming the field the config lacks.
    """
    text = config.get_text_config(decoder=True)
    hidden_size = _size(text, "hidden_size")
    num_heads = _size(text, "num_attention_heads")
    return TargetShape(
        num_layers=_size(text, "num_hidden_layers"),
        hidden_size=hidden_size,
        vocab_size=_size(text, "vocab_size"),
        intermediate_size=_intermediate_size(text),
        num_attention_heads=num_heads,
        num_key_value_heads=_optional_size(text, "num_key_value_heads") or num_heads,
        head_dim=_optional_size(text, "head_dim") or _default_head_dim(text, hidden_size, num_heads),
        rms_norm_eps=_norm_eps(text),
        rope_theta=_rope_theta(text),
        max_position_embeddings=_size(text, "max_position_embeddings"),
    )


def default_target_layer_ids(num_layers: int, num_features: int) -> tuple[int, ...]:
    """Spread `num_features` captured layers over an L-layer target: round(1 + k*(L-4)/(n-1)), k = 0..n-1.

    One feature sits at L//2. Raises ValueError where the target has too few layers for that many.
    Source: z-lab's DFlash (`build_target_layer_ids`), which serving engines repeat.
    """
    if num_features < 1:
        raise ValueError(f"{_LAYER_IDS_KEY}: the number of captured layers must be at least 1, got {num_features}")
    if num_features == 1:
        ids = (num_layers // 2,)
    else:
        span = num_layers - 4
        ids = tuple(round(1 + k * span / (num_features - 1)) for k in range(num_features))
    try:
        check_target_layer_ids(ids, num_layers)
    except ValueError as error:
        raise ValueError(
            f"{_LAYER_IDS_KEY}: a target of {num_layers} layers is too shallow for {num_features} evenly spread ones "
            f"(they would be {list(ids)}); name fewer, strictly ascending, from 0 to {num_layers - 2}"
        ) from error
    return ids


def check_target_layer_ids(ids: Sequence[int], num_layers: int) -> None:
    """Raise ValueError unless `ids` are strictly ascending layers of the target, the last layer excluded.

    Descending or repeated ids are refused because serving engines collect the layers in ascending order, once each,
    whatever the order they are listed in: such a drafter would be fed permuted features.
    """
    allowed = f"strictly ascending integers from 0 to {num_layers - 2}"
    if num_layers < 2:
        raise ValueError(f"{_LAYER_IDS_KEY}: a target of {num_layers} layers has none before its last to capture")
    if not ids:
        raise ValueError(f"{_LAYER_IDS_KEY}: the list is empty; name at least one, {allowed}")
    for layer in ids:
        if layer == num_layers - 1:
            raise ValueError(
                f"{_LAYER_IDS_KEY}: {layer} is the target's last layer, whose output is normed; allowed are {allowed}"
            )
        if not 0 <= layer < num_layers - 1:
            raise ValueError(
                f"{_LAYER_IDS_KEY}: the target has no layer {layer} (it has {num_layers}); allowed are {allowed}"
            )
    if any(later <= earlier for earlier, later in zip(ids, ids[1:], strict=False)):
        raise ValueError(f"{_LAYER_IDS_KEY}: {list(ids)} is not in order or repeats a layer; allowed are {allowed}")


def read_field(config: PreTrainedConfig, name: str) -> Any:
    """Read one field of a config, None where it is absent.

    Fields that differ per layer refuse plain access in Transformers; their model-wide value is what is wanted here.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return config.to_dict().get(name)


def _size(config: PreTrainedConfig, name: str) -> int:
    size = _optional_size(config, name)
    if size is None:
        raise _missing(config, name)
    return size


def _optional_size(config: PreTrainedConfig, name: str) -> int | None:
    value = read_field(config, name)
    if value is None:
        return None
    if isinstance(value, list | tuple):  # Per-layer sizes: the drafter takes the largest.
        value = max(value, default=0)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"target config ({config.model_type}): {name} must be a positive integer, got {value!r}")
    return value


def _intermediate_size(config: PreTrainedConfig) -> int:
    """Width of the dense MLP, or of the experts active per token where there is no dense one.

    Qwen's mixtures that state both (Qwen3-30B-A3B, Qwen3-235B-A22B) state exactly that product.
    """
    dense = _optional_size(config, "intermediate_size")
    if dense is not None:
        return dense
    expert = _optional_size(config, "moe_intermediate_size")
    num_active = _optional_size(config, "num_experts_per_tok")
    if expert is None or num_active is None:
        raise _missing(config, "intermediate_size")
    return expert * num_active


def _default_head_dim(config: PreTrainedConfig, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"target config ({config.model_type}): it has no head_dim and its hidden_size {hidden_size} "
            f"is not divisible by its {num_heads} attention heads"
        )
    return hidden_size // num_heads


def _norm_eps(config: PreTrainedConfig) -> float:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        value = read_field(config, name)
        if value is not None:
            return float(value)
    raise _missing(config, "rms_norm_eps")


def _rope_theta(config: PreTrainedConfig) -> float:
    """Base of the rotary embedding, of the full-attention layers where it differs per layer type."""
    theta = read_field(config, "rope_theta")
    parameters = read_field(config, "rope_parameters")
    if theta is None and isinstance(parameters, Mapping):
        theta = parameters.get("rope_theta")
        if theta is None:
            nested = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
            chosen = nested.get("full_attention") or next(iter(nested.values()), {})
            theta = chosen.get("rope_theta")
    if theta is None:
        raise _missing(config, "rope_theta")
    return float(theta)


def _missing(config: PreTrainedConfig, name: str) -> ValueError:
    return ValueError(
        f"target config ({config.model_type}): it has no {name}, from which the drafter's size is derived; "
        "this architecture cannot be a target"
    )
