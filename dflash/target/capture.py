"""The frozen target: truncated after the last captured layer, run on right-padded batches, tapped by hooks."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from dflash.batch import MicroBatch
from dflash.target.shape import check_target_layer_ids, read_field

# What one more forward costs, in padded tokens. CPU: measured, SmolLM2-135M in fp32 on one core takes 50 ms plus
# 2.5 ms per token. CUDA: the roofline's ridge, some 300 tokens for bf16 on Hopper (990 TFLOP/s over 3.35 TB/s, two
# bytes and two FLOPs per weight and token): a smaller batch takes as long as reading the weights does.
_FORWARD_OVERHEAD_TOKENS = {"cpu": 20, "cuda": 300}

_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f")


@dataclass(frozen=True, slots=True)
class CapturedHiddenStates:
    """Hidden states of one micro-batch, still padded, on the target's device.

    `hidden[b][f]` is feature f of sub-batch b, [documents, padded length, H]. `token_slots_T` i64 says where token t
    of the micro-batch lies when all sub-batches of one feature are flattened to rows and laid end to end.
    """

    hidden: tuple[tuple[Tensor, ...], ...]
    token_slots_T: Tensor


@dataclass(frozen=True, slots=True)
class StagedTokens:
    """Tokens of one micro-batch on the target's device, on CUDA perhaps still on their way there.

    `ids` i64 [num_slots], the padded sub-batches of `shapes` (documents, padded length) end to end; `token_slots_T` as
    in CapturedHiddenStates.
    """

    ids: Tensor
    shapes: tuple[tuple[int, int], ...]
    token_slots_T: Tensor


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """How the documents of one micro-batch are laid out in right-padded sub-batches.

    `shapes` is (documents, padded length) per sub-batch, shortest documents first; `token_slots_T` i64 is the flat
    place of each token, in the micro-batch's own order; `num_slots` counts padded tokens over all sub-batches.
    """

    shapes: tuple[tuple[int, int], ...]
    token_slots_T: np.ndarray
    num_slots: int


def plan_sub_batches(lengths: np.ndarray, overhead_tokens: int, boundary: int | None = None) -> PaddedPlan:
    """Split documents into right-padded sub-batches so that padding and launches together cost least.

    A sub-batch costs its padded tokens plus `overhead_tokens`. Over documents sorted by length the cheapest split is
    found exactly, by dynamic programming over the distinct lengths. No sub-batch mixes documents of at most
    `boundary` tokens with longer ones.
    lengths: [N], each at least 1.
    """
    assert lengths.size and lengths.min() >= 1, "a document of a micro-batch has at least one token"
    distinct, counts = np.unique(lengths, return_counts=True)
    num_documents_below = np.concatenate(([0], np.cumsum(counts)))
    cost = np.zeros(distinct.size + 1)
    first = np.zeros(distinct.size + 1, dtype=np.int64)
    for end in range(1, distinct.size + 1):
        longest = int(distinct[end - 1])
        start = int(np.searchsorted(distinct, boundary, side="right")) if boundary and longest > boundary else 0
        num_documents = num_documents_below[end] - num_documents_below[start:end]
        candidates = cost[start:end] + num_documents * longest + overhead_tokens
        first[end] = start + int(candidates.argmin())
        cost[end] = candidates.min()
    ends = [distinct.size]
    while first[ends[-1]]:
        ends.append(int(first[ends[-1]]))
    ends.reverse()

    shapes, row_widths = [], []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        shape = (int(num_documents_below[end] - num_documents_below[start]), int(distinct[end - 1]))
        shapes.append(shape)
        row_widths.append(np.full(shape[0], shape[1]))
    row_starts = np.concatenate(([0], np.cumsum(np.concatenate(row_widths))))
    slot_starts = np.empty(lengths.size, dtype=np.int64)
    slot_starts[np.argsort(lengths, kind="stable")] = row_starts[:-1]
    token_starts = np.cumsum(lengths, dtype=np.int64) - lengths
    token_slots = np.repeat(slot_starts - token_starts, lengths) + np.arange(int(lengths.sum()))
    return PaddedPlan(tuple(shapes), token_slots, int(row_starts[-1]))


class FrozenTarget:
    """The layers of a target up to the last captured one, run without gradients, their outputs captured by hooks.

    Documents run right-padded and without an attention mask: under causal attention, sliding or not, and under
    causal linear attention no real token sees the padding behind it.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int], keep_final_norm: bool = False) -> None:
        """Takes the model over: drops, in place, everything that the captured layers do not need.

        target_layer_ids: strictly ascending, the last layer excluded; feature f is the output of layer ids[f].
        keep_final_norm: keeps all layers and adds the final normed hidden state as one more feature.
        Raises ValueError on layer ids the target has not, and on architectures whose layers cannot be found.
        """
        decoder = model.get_decoder()
        layers = decoder_layers(decoder)
        check_target_layer_ids(target_layer_ids, len(layers))
        self._decoder = decoder.requires_grad_(False).eval()
        self._keeps_final_norm = keep_final_norm
        self.num_features = len(target_layer_ids) + keep_final_norm
        hidden_size = decoder.config.hidden_size
        self.feature_width = self.num_features * hidden_size
        parameter = next(layers[target_layer_ids[-1]].parameters())
        self.device = parameter.device
        self.feature_dtype = decoder.get_input_embeddings().weight.dtype
        self._hidden_size = hidden_size
        self._overhead_tokens = _FORWARD_OVERHEAD_TOKENS.get(self.device.type, _FORWARD_OVERHEAD_TOKENS["cuda"])
        self._length_boundary = _rope_switch_length(decoder.config)

        _drop_all_but(model, decoder)
        if not keep_final_norm:
            _truncate(decoder, layers, target_layer_ids[-1] + 1)
        self._captured: list[Tensor | None] = [None] * len(target_layer_ids)
        for feature, layer in enumerate(target_layer_ids):
            layers[layer].register_forward_hook(self._capture_as(feature))

    @torch.inference_mode()
    def stage(self, micro_batch: MicroBatch) -> StagedTokens:
        """Lay out a micro-batch's tokens and start their way to the device."""
        plan = plan_sub_batches(micro_batch.lengths.numpy(), self._overhead_tokens, self._length_boundary)
        # One transfer carries the padded ids and the slots: [num_slots | T]. Padding is token 0, any would do.
        staging = torch.zeros(
            plan.num_slots + micro_batch.num_tokens, dtype=torch.int64, pin_memory=self.device.type == "cuda"
        )
        token_slots = torch.from_numpy(plan.token_slots_T)
        staging[token_slots] = micro_batch.input_ids.long()
        staging[plan.num_slots :] = token_slots
        staged = staging.to(self.device, non_blocking=True)
        return StagedTokens(staged[: plan.num_slots], plan.shapes, staged[plan.num_slots :])

    @torch.inference_mode()
    def run(self, staged: StagedTokens) -> CapturedHiddenStates:
        """Run what was staged and return its captured hidden states; on CUDA the work is only enqueued.

        Raises ValueError when a captured layer gives something else than one hidden state per token.
        """
        hidden, start = [], 0
        with _no_packed_sequence_probe():
            for num_documents, length in staged.shapes:
                end = start + num_documents * length
                hidden.append(self._run(staged.ids[start:end].view(num_documents, length)))
                start = end
        return CapturedHiddenStates(tuple(hidden), staged.token_slots_T)

    def _run(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self._decoder(input_ids=input_ids, use_cache=False, return_dict=True)
        captured = tuple(self._captured)
        self._captured[:] = [None] * len(captured)
        if self._keeps_final_norm:
            captured = (*captured, output.last_hidden_state)
        for hidden in captured:
            if not isinstance(hidden, Tensor) or hidden.shape != (*input_ids.shape, self._hidden_size):
                found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
                raise ValueError(
                    f"model.target.path: layers of {type(self._decoder).__name__} give {found}, not one hidden state "
                    f"of {self._hidden_size} per token; this architecture cannot be a target"
                )
        return captured

    def _capture_as(self, feature: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._captured[feature] = output[0] if isinstance(output, tuple) else output

        return hook


def decoder_layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the decoder's own list of layers; raises ValueError when there is no telling which it is."""
    num_layers = decoder.config.num_hidden_layers
    found = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(found) != 1:
        raise ValueError(
            f"model.target.path: {type(decoder).__name__} has {len(found)} lists of {num_layers} layers where one is "
            "expected; this architecture cannot be a target"
        )
    return found[0]


def _drop_all_but(module: nn.Module, decoder: nn.Module) -> None:
    """Replace every part of the wrapper around `decoder` (LM head, vision tower) by an Identity without weights."""
    if module is decoder:
        return
    for name, child in module.named_children():
        if any(part is decoder for part in child.modules()):
            _drop_all_but(child, decoder)
        else:
            setattr(module, name, nn.Identity())


def _truncate(decoder: nn.Module, layers: nn.ModuleList, num_kept: int) -> None:
    """Drop the layers from `num_kept` on and the final norm, and let the decoder's own config say so."""
    del layers[num_kept:]
    for name in _FINAL_NORM_NAMES:
        if isinstance(getattr(decoder, name, None), nn.Module):
            setattr(decoder, name, nn.Identity())
    # Inputs per layer (Gemma 3n, Gemma 4) are cut out of one tensor by the full number of layers.
    if read_field(decoder.config, "hidden_size_per_layer_input"):
        return
    # A copy: the wrapper and the caller share this config, and to them it still describes the whole target.
    config = copy.deepcopy(decoder.config)
    if vars(config).get("layer_types"):  # In some configs (Falcon-H1) a property of the number of layers.
        config.layer_types = list(config.layer_types[:num_kept])
    config.num_hidden_layers = num_kept
    decoder.config = config


def _rope_switch_length(config: Any) -> int | None:
    """Length above which a LongRoPE target changes its frequencies for the whole batch, None for other targets."""
    parameters = read_field(config, "rope_parameters")
    if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
        return parameters.get("original_max_position_embeddings")
    return None


@contextmanager
def _no_packed_sequence_probe() -> Iterator[None]:
    """Keep Transformers from looking, in each mask it builds, whether the position ids restart within a row.

    They never do here, and the look reads a device value: a synchronisation per forward that would stall the loop.
    """
    original = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original
