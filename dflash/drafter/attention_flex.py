"""Attention of blocks with FlexAttention and a block mask: the path of CUDA."""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dflash.drafter.blocks import Blocks, Visibility

_TILE = 128


class FlexAttend:
    """FlexAttention over keys laid out as [context | padding | slots of all blocks | padding].

    Both parts are padded to whole tiles of 128: kernels are specialised on whether lengths are multiples of a tile, and
    a recompilation per micro-batch would soon reach Dynamo's limit. Padding needs no mask of its own: no anchor lies
    behind a padding token, and padding queries form blocks that see only themselves.
    """

    def __init__(self, blocks: Blocks, visibility: Visibility) -> None:
        self.num_slots = blocks.num_blocks * blocks.block_size
        self.context_padding = -blocks.num_tokens % _TILE
        self.slot_padding = -self.num_slots % _TILE
        self.mask = self._mask(blocks, visibility) if self.num_slots else None

    def __call__(
        self, queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        if self.mask is None:
            return queries
        attended = _attention(queries.device.type)(
            self._rows(queries.flatten(0, 1), self.slot_padding),
            self._all(context_keys, keys),
            self._all(context_values, values),
            block_mask=self.mask,
            enable_gqa=True,
        )
        return attended[0, :, : self.num_slots].transpose(0, 1).reshape(queries.shape)

    def _all(self, context: Tensor, block: Tensor) -> Tensor:
        context, block = self._rows(context, self.context_padding), self._rows(block.flatten(0, 1), self.slot_padding)
        return torch.cat((context, block), dim=2)

    @staticmethod
    def _rows(heads_LHD: Tensor, padding: int) -> Tensor:
        return F.pad(heads_LHD, (0, 0, 0, 0, 0, padding)).transpose(0, 1)[None]

    def _mask(self, blocks: Blocks, visibility: Visibility) -> BlockMask:
        device, block_size = blocks.anchors.device, blocks.block_size
        num_queries = self.num_slots + self.slot_padding
        num_context = blocks.num_tokens + self.context_padding
        num_padding_blocks = -(-num_queries // block_size) - blocks.num_blocks
        anchors, starts = F.pad(blocks.anchors, (0, num_padding_blocks)), F.pad(blocks.starts, (0, num_padding_blocks))
        # A tensor, not an int: Dynamo guards on the values of captured ints and would recompile for each length.
        context_end = torch.full((), num_context, dtype=torch.int64, device=device)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, slot = query // block_size, query % block_size
            in_context = key < context_end
            key_slot = key - context_end
            seen_context = visibility.of_context(starts[block], anchors[block], slot, key)
            seen_block = (key_slot // block_size == block) & visibility.of_block(slot, key_slot % block_size)
            return (in_context & seen_context) | (~in_context & seen_block)

        return _mask_builder(device.type)(
            visible, None, None, num_queries, num_context + num_queries, device=device, BLOCK_SIZE=_TILE
        )


@cache
def _attention(device_type: str) -> Callable[..., Tensor]:
    # Only the compiled kernel skips empty tiles; eager FlexAttention is a dense reference, which CPU tests want.
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention


@cache
def _mask_builder(device_type: str) -> Callable[..., BlockMask]:
    # Compiled, the dense mask is reduced to tiles on the fly and never stored.
    return torch.compile(create_block_mask, dynamic=True) if device_type == "cuda" else create_block_mask
