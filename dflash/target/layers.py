"""Weights of single target layers, for a drafter that starts from them."""

import torch

from dflash.batch import TargetLayers
from dflash.target.shape import read_config
from dflash.target.vocabulary import files_of_tensors, read_tensor

# Architectures whose RMSNorm multiplies by 1 + weight: a drafter's multiplies by its weight.
_ZERO_CENTRED_NORMS = ("gemma", "qwen3_next", "qwen3_5")
_FINAL_NORM_ENDINGS = ("model.norm.weight", "language_model.norm.weight")


def load_layers(path: str, layer_ids: tuple[int, ...]) -> TargetLayers:
    """Read some layers of a target, and its final norm, from its safetensors files; fp32, on the CPU.

    path: a folder or a hub name. Raises ValueError where such files or layers are not there.
    """
    files = {} if path.lower().endswith(".gguf") else files_of_tensors(path)
    offset = 1.0 if read_config(path).get_text_config().model_type.startswith(_ZERO_CENTRED_NORMS) else 0.0

    def read(name: str) -> torch.Tensor:
        tensor = read_tensor(path, files[name], name, torch.float32, torch.device("cpu"))
        return tensor + offset if name.endswith("norm.weight") else tensor

    final_norms = [name for name in files if name.endswith(_FINAL_NORM_ENDINGS)]
    layers = []
    for layer_id in layer_ids:
        marker = f".layers.{layer_id}."
        names = [name for name in files if marker in f".{name}" and not name.startswith("mtp.")]
        layers.append({f".{name}".split(marker, 1)[1]: read(name) for name in names})
    if len(final_norms) != 1 or not all(layers):
        raise ValueError(
            f"model.drafter.init_from: target {path} has no safetensors files with layers {list(layer_ids)} and one "
            "final norm; allowed here: null"
        )
    return TargetLayers(tuple(layers), read(final_norms[0]))
