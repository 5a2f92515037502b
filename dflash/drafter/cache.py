"""Keys and values of the context of one sequence, kept per layer while decoding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash.drafter.blocks import Visibility


@dataclass(slots=True)
class DrafterCache:
    """Context keys and values per layer, each [capacity, Hkv, D], of which the first `length` tokens are filled.

    All tokens are kept: a sliding layer looks at the last ones through `view`.
    """

    num_layers: int
    capacity: int
    length: int = 0
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def append(self, keys_values: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Appends per layer (keys, values), each [T, Hkv, D], turned to their positions."""
        assert len(keys_values) == self.num_layers
        new_length = self.length + keys_values[0][0].shape[0]
        self._reserve(new_length, keys_values)
        for layer, (keys, values) in enumerate(keys_values):
            self.keys[layer][self.length : new_length] = keys
            self.values[layer][self.length : new_length] = values
        self.length = new_length

    def view(self, visibility: Visibility, position: int, slots_B: Tensor) -> "CacheView":
        """What a block of slots `slots_B` anchored at `position` reads on one kind of layer."""
        first = 0 if visibility.window is None else max(0, position - visibility.window + 1)
        if visibility.window is None:
            return CacheView(self, first, position, None)
        tokens = torch.arange(first, position, device=slots_B.device)
        start, anchor = torch.zeros_like(slots_B[:1]), torch.full_like(slots_B[:1], position)
        seen_context = visibility.of_context(start, anchor, slots_B[:, None], tokens)
        seen_block = visibility.of_block(slots_B[:, None], slots_B)
        return CacheView(self, first, position, torch.cat((seen_context, seen_block), dim=1))

    def _reserve(self, length: int, like: Sequence[tuple[Tensor, Tensor]]) -> None:
        if self.keys and length <= self.capacity:
            return
        # Doubling keeps the copies of a growing sequence linear in its length.
        self.capacity = max(length, self.capacity if not self.keys else 2 * self.capacity)
        for kept, new in ((self.keys, [k for k, _ in like]), (self.values, [v for _, v in like])):
            grown = [tensor.new_empty((self.capacity, *tensor.shape[1:])) for tensor in new]
            for old, fresh in zip(kept, grown, strict=False):
                fresh[: self.length] = old[: self.length]
            kept[:] = grown


@dataclass(frozen=True, slots=True)
class CacheView:
    """The cached tokens [first, position) as context of one block, with the mask of a sliding layer."""

    cache: DrafterCache
    first: int
    position: int
    visible: Tensor | None

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor]:
        if not self.cache.keys:
            empty = torch.empty(0)
            return empty, empty
        span = slice(self.first, self.position)
        return self.cache.keys[layer][span], self.cache.values[layer][span]

    def attend(
        self, queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attended values [B, Hq, D] of one block's queries [B, Hq, D] over context and block."""
        if context_keys.numel():
            keys, values = torch.cat((context_keys, keys)), torch.cat((context_values, values))
        attended = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=self.visible,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)
