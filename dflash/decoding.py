"""Decode one prompt with a target alone, or with a drafter whose blocks the target verifies."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from dflash.batch import TargetVocabulary
from dflash.drafter.head import vocabulary_logits
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.target.capture import decoder_layers
from dflash.target.shape import read_field


@dataclass(frozen=True, slots=True)
class SpeculativeResult:
    """What one prompt became, and how each verification of it went.

    `output_ids` are the new tokens, a stop token included. Per verification: `starts` the anchor's absolute
    position, `drafts` the block_size - 1 drafted tokens, `acceptance_lengths` the tokens gained and kept, so that
    1 + sum(acceptance_lengths) = len(output_ids); the first token comes from the prompt's own forward. `accepted`
    counts the leading drafts that were verified, right and kept: all that was gained but for the bonus token.
    """

    output_ids: list[int]
    starts: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@torch.inference_mode()
def greedy_decode(
    target: PreTrainedModel, input_ids: Sequence[int], *, max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """Continue a prompt with the target's most likely tokens, one forward each.

    Returns the new tokens, up to and including the first of `stop_ids`. Raises ValueError as `check_room` does.
    """
    check_room(max_positions(target), len(input_ids), max_new_tokens)
    runner = CachedTarget(target)
    chosen_T, _ = runner.prefill(_on_device(input_ids, target))
    output_ids = chosen_T.tolist()
    while not _is_over(output_ids, max_new_tokens, stop_ids):
        chosen_T, _ = runner.forward(chosen_T)
        output_ids += chosen_T.tolist()
    return output_ids


@torch.inference_mode()
def speculative_decode(
    target: PreTrainedModel,
    drafter: DFlashDrafter,
    vocabulary: TargetVocabulary,
    input_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> SpeculativeResult:
    """Continue a prompt as `greedy_decode` would, by blocks that the drafter fills and the target verifies.

    Each turn: the last known token, whose hidden state nobody has yet, is the anchor of a block; the drafter sees the
    hidden states of everything before it; the target reads anchor and drafts in one forward; its own choices say how
    many drafts are right and add one token more. Raises ValueError as `check_room` does.
    """
    check_room(max_positions(target), len(input_ids), max_new_tokens)
    runner = CachedTarget(target, drafter.shape.target_layer_ids, can_roll_back=True)
    drafting = Drafting(drafter, vocabulary)
    chosen_T, features_TF = runner.prefill(_on_device(input_ids, target))
    result = SpeculativeResult(output_ids=chosen_T.tolist())
    output_ids = result.output_ids
    num_kept = len(input_ids)
    while not _is_over(output_ids, max_new_tokens, stop_ids):
        runner.keep(num_kept)
        drafting.extend(features_TF[:num_kept])
        room = max_new_tokens - len(output_ids)
        anchor_1 = _on_device(output_ids[-1:], target)
        start = len(input_ids) + len(output_ids) - 1
        draft_K = drafting.draft(anchor_1, start)
        # What lies beyond the last token that may be kept needs no verification, and might exceed the positions.
        chosen_T, features_TF = runner.forward(torch.cat((anchor_1, draft_K[: room - 1])))
        draft, chosen = _to_host(draft_K, chosen_T)
        num_kept = num_leading_matches(draft, chosen[:-1]) + 1
        gained = cut_at_stop(chosen[:num_kept], stop_ids)
        output_ids += gained
        result.starts.append(start)
        result.drafts.append(draft)
        result.acceptance_lengths.append(len(gained))
        # Not read off the output: there the bonus token may equal, by chance, a draft that nobody verified.
        result.accepted.append(min(num_kept - 1, len(gained)))
    return result


def num_leading_matches(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def cut_at_stop(token_ids: list[int], stop_ids: Collection[int]) -> list[int]:
    """Drop what follows the first stop token."""
    end = next((i + 1 for i, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return token_ids[:end]


def max_positions(target: PreTrainedModel) -> int | None:
    """How many positions the target knows, None where it sets no limit."""
    return read_field(target.config.get_text_config(decoder=True), "max_position_embeddings")


def check_room(num_positions: int | None, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise ValueError unless the prompt has tokens and fits into the target's positions with its continuation."""
    if num_prompt_tokens < 1:
        raise ValueError("the prompt has no tokens; give at least one")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: {max_new_tokens} must be at least 1")
    if num_positions is not None and num_prompt_tokens + max_new_tokens > num_positions:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens and max_new_tokens={max_new_tokens} exceed the target's "
            f"{num_positions} positions; shorten the prompt or lower max_new_tokens"
        )


class Drafting:
    """A drafter with the context of one growing sequence."""

    def __init__(self, drafter: DFlashDrafter, vocabulary: TargetVocabulary) -> None:
        self._drafter, self._vocabulary = drafter, vocabulary
        self._cache = drafter.new_cache()

    def extend(self, features_TF: Tensor) -> None:
        """Append the target's features [T, F] of the tokens that follow those known so far."""
        self._drafter.append_context(self._cache, features_TF)

    def draft(self, anchor_1: Tensor, start: int) -> Tensor:
        """Most likely tokens i64 [block_size - 1] behind the anchor [1] at position `start`, all from one pass."""
        shape = self._drafter.shape
        block_BH = embed_blocks(self._vocabulary, anchor_1, shape.mask_token_id, shape.block_size)[0]
        hidden_BH = self._drafter.draft_hidden(block_BH, self._cache, start)
        return vocabulary_logits(hidden_BH[1:], self._vocabulary).argmax(dim=-1)


class CachedTarget:
    """A target with the cache of one growing sequence, which can be taken back to where a draft went wrong."""

    def __init__(
        self, target: PreTrainedModel, target_layer_ids: Sequence[int] = (), *, can_roll_back: bool = False
    ) -> None:
        self._target = target
        layers = decoder_layers(target.get_decoder()) if target_layer_ids else []
        self._captured_layers = [layers[i] for i in target_layer_ids]
        self._can_roll_back = can_roll_back
        self._cache: Cache | None = None
        self._last_ids_T = torch.empty(0, dtype=torch.int64)
        self._snapshots: dict[int, Any] = {}

    def prefill(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Read the prompt, i64 [T]; returns the token that follows it, i64 [1], and the prompt's features [T, F]."""
        chosen_1, features_TF = self._forward(ids_T, num_logits=1)
        if self._cache is None:
            raise ValueError(f"target {type(self._target).__name__} keeps no cache, so it cannot decode step by step")
        if self._can_roll_back:
            # Recording from the start would keep the whole prompt in layers that only need its last tokens.
            for layer in self._cache.layers:
                if _is_croppable(layer) and hasattr(layer, "activate_past_recording"):
                    layer.activate_past_recording()
        return chosen_1, features_TF

    def forward(self, ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Read more tokens, i64 [T]; returns what the target would choose after each, i64 [T], and features [T, F]."""
        if self._can_roll_back and ids_T.numel() > 1:
            self._snapshots = {
                i: copy.deepcopy(layer) for i, layer in enumerate(self._cache.layers) if not _is_croppable(layer)
            }
        return self._forward(ids_T, num_logits=ids_T.numel())

    def keep(self, num_kept: int) -> None:
        """Forget all but the first `num_kept` of the tokens read last.

        Layers whose state is a running sum (linear attention, state spaces) cannot forget: they go back to how they
        were before these tokens, and all layers read the kept ones again.
        """
        num_read = self._last_ids_T.numel()
        reread = bool(self._snapshots) and num_kept < num_read
        self._crop(num_read if reread else num_read - num_kept)
        if reread:
            kept_T = self._last_ids_T[:num_kept]
            for i, layer in self._snapshots.items():
                self._cache.layers[i] = layer
            self._forward(kept_T, num_logits=1)
            self._crop(0)
        self._snapshots = {}

    def _crop(self, num_removed: int) -> None:
        for layer in self._cache.layers:
            if _is_croppable(layer):
                layer.crop(-num_removed)  # 0 counts as well: sliding layers drop what they kept for going back

    def _forward(self, ids_T: Tensor, num_logits: int) -> tuple[Tensor, Tensor]:
        self._last_ids_T = ids_T
        captured: dict[int, Tensor] = {}

        def capture(place: int) -> Any:
            def hook(_module: Any, _args: Any, output: Tensor | tuple[Tensor, ...]) -> None:
                captured[place] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [layer.register_forward_hook(capture(k)) for k, layer in enumerate(self._captured_layers)]
        try:
            output = self._target(input_ids=ids_T[None], cache=self._cache, use_cache=True, logits_to_keep=num_logits)
        finally:
            for handle in handles:
                handle.remove()
        self._cache = output.cache
        logits_TV = output.logits[0, -num_logits:]
        features = [captured[k][0] for k in range(len(self._captured_layers))]
        features_TF = torch.cat(features, dim=-1) if features else logits_TV.new_empty(ids_T.numel(), 0)
        return logits_TV.argmax(dim=-1), features_TF


def _is_over(output_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]) -> bool:
    return len(output_ids) >= max_new_tokens or output_ids[-1] in stop_ids


def _is_croppable(layer: Any) -> bool:
    """Whether a layer's cache can drop its last tokens; linear attention knows it only after the first ones."""
    return bool(getattr(layer, "is_croppable", False))


def _on_device(ids: Sequence[int], target: PreTrainedModel) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=target.device)


def _to_host(*tensors_T: Tensor) -> list[list[int]]:
    """Read several one-dimensional tensors with one device synchronisation."""
    values = torch.cat(tensors_T).tolist()
    lists = []
    for tensor in tensors_T:
        lists.append(values[: tensor.numel()])
        values = values[tensor.numel() :]
    return lists
