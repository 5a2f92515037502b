"""Attention of blocks over their context and themselves: one call, a path per kind of device."""

from typing import Protocol

from torch import Tensor

from dflash.drafter.attention_flex import FlexAttend
from dflash.drafter.attention_tiles import TiledAttend
from dflash.drafter.blocks import Blocks, Visibility


class Attend(Protocol):
    """Attention with a visibility already planned, so that every layer of one kind shares the plan."""

    def __call__(
        self, queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attended values [N, B, Hq, D].

        Shapes: `queries` [N, B, Hq, D]; context keys and values [T, Hkv, D]; block keys and values [N, B, Hkv, D].
        Query head h reads key head h // (Hq / Hkv); scores are scaled by D^-0.5. Differentiable in all five.
        """
        ...


def plan_attention(blocks: Blocks, visibility: Visibility, num_query_heads: int) -> Attend:
    """Plans one micro-batch for one kind of layer: FlexAttention, or tiles on CPU where that has no backward."""
    if blocks.anchors.device.type == "cpu":
        return TiledAttend(blocks, visibility, num_query_heads)
    return FlexAttend(blocks, visibility)
