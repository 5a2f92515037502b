"""Weights of single target layers, for a drafter that starts from them."""

import torch

from dflash.batch import TargetLayers
from dflash.target.shape import read_config
from dflash.target.vocabulary import files_of_tensors, read_tensor

# Architectures whose RMSNorm multiplies by 1 + weight: a drafter's multiplies by its weight.
_ZERO_CENTRED_NORMS = {"gemma", "gemma2", "gemma3", "qwen3_next", "qwen3_5", "qwen3_5_moe"}
# Where an architecture norms the attention's output as well, the norm before its MLP has another name.
_MLP_NORM, _OTHER_MLP_NORM = "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight"
_FINAL_NORM_ENDINGS = ("model.norm.weight", "language_model.norm.weight")


def load_layers(path: str, layer_ids: tuple[int, ...]) -> TargetLayers:
    """Read some layers of a target, and its final norm, from its safetensors files; fp32, on the CPU.

    path: a folder or a hub name. Raises ValueError where such files or layers are not there.
    """
    files, names_of_layers, final_norm = _find(path, layer_ids)
    model_type = read_config(path).get_text_config().model_type.removesuffix("_text")
    offset = 1.0 if model_type in _ZERO_CENTRED_NORMS else 0.0

    def read(name: str) -> torch.Tensor:
        tensor = read_tensor(path, files[name], name, torch.float32, torch.device("cpu"))
        return tensor + offset if name.endswith("norm.weight") else tensor

    layers = []
    for names in names_of_layers:
        layer = {short: read(name) for short, name in names.items()}
        if _OTHER_MLP_NORM in layer:
            layer[_MLP_NORM] = layer.pop(_OTHER_MLP_NORM)
        layers.append(layer)
    return TargetLayers(tuple(layers), read(final_norm))


def check_layers(path: str, layer_ids: tuple[int, ...]) -> None:
    """Raise ValueError unless `load_layers` will find these layers; no weights are read."""
    _find(path, layer_ids)


def _find(path: str, layer_ids: tuple[int, ...]) -> tuple[dict[str, str], list[dict[str, str]], str]:
    """Files of all tensors, the tensors of each layer by their names below it, and the final norm's name."""
    files = {} if path.lower().endswith(".gguf") else files_of_tensors(path)
    own = [name for name in files if not name.startswith("mtp.")]
    final_norms = [name for name in own if name.endswith(_FINAL_NORM_ENDINGS)]
    layers = []
    for layer_id in layer_ids:
        marker = f".layers.{layer_id}."
        layers.append({name.split(marker, 1)[1]: name for name in own if marker in name})
    if len(final_norms) != 1 or not all(layers):
        raise ValueError(
            f"model.drafter.init_from: target {path} has no safetensors files with layers {list(layer_ids)} and one "
            "final norm; allowed here: null"
        )
    return files, layers, final_norms[0]
