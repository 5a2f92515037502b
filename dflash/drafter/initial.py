"""Starting a drafter from layers of its target instead of from noise."""

import torch
from torch import Tensor

from dflash.batch import TargetLayers
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.shape import DrafterShape

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
