"""Where the blocks of a packed row lie, and the one definition of what their query slots see."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a block's query slots see on one kind of layer: `window` None is a full layer.

    Both questions are pure functions of integer tensors that broadcast, so every attention path asks them: tile by tile
    on CPU, through vmap in FlexAttention's masks, in one row when decoding. Source: design section 3.
    """

    window: int | None = None
    causal: bool = True

    def of_context(self, start: Tensor, anchor: Tensor, slot: Tensor, token: Tensor) -> Tensor:
        """Whether slot `slot` of the block at `anchor` sees context token `token`.

        `start` is the first token of the anchor's document; start, anchor and token are indices in one packed row, in
        which a document is contiguous, so start <= token < anchor says "same document and before the anchor".
        """
        seen = (start <= token) & (token < anchor)
        if self.window is None:
            return seen
        return seen & (anchor + slot - token < self.window)

    def of_block(self, query_slot: Tensor, key_slot: Tensor) -> Tensor:
        """Whether slot `query_slot` sees slot `key_slot` of its own block; a slot always sees itself."""
        if self.window is None:
            return (query_slot >= 0) & (key_slot >= 0)
        behind = query_slot - key_slot
        if self.causal:
            return (behind >= 0) & (behind < self.window)
        return behind.abs() < self.window


@dataclass(frozen=True, slots=True)
class Blocks:
    """N blocks of B slots hung on anchors of one packed row of T tokens.

    Shapes: `anchors` i64 [N], indices in the packed row; `ends` i64 [N], one past the last token of each anchor's
    document; `token_positions` i64 [T], the place of every token of the row within its document.
    """

    anchors: Tensor
    ends: Tensor
    token_positions: Tensor
    block_size: int

    @classmethod
    def at(cls, anchors: Tensor, lengths: Tensor, block_size: int) -> "Blocks":
        """Blocks at given packed indices `anchors` [N] (any order, repeats allowed) of documents of `lengths` [D]."""
        lengths = lengths.long()
        ends_D = lengths.cumsum(0)
        num_tokens = int(lengths.sum())
        anchors = anchors.long()
        assert anchors.numel() == 0 or (int(anchors.min()) >= 0 and int(anchors.max()) < num_tokens)
        ends_T = torch.repeat_interleave(ends_D, lengths, output_size=num_tokens)
        starts_T = torch.repeat_interleave(ends_D - lengths, lengths, output_size=num_tokens)
        positions_T = torch.arange(num_tokens) - starts_T
        return cls(anchors=anchors, ends=ends_T[anchors], token_positions=positions_T, block_size=block_size)

    @property
    def num_blocks(self) -> int:
        return self.anchors.numel()

    @property
    def num_tokens(self) -> int:
        return self.token_positions.numel()

    @property
    def starts(self) -> Tensor:
        """First token of each anchor's document, packed index, i64 [N]."""
        return self.anchors - self.token_positions[self.anchors]

    @property
    def positions_NB(self) -> Tensor:
        """Position of every slot within its document; slots may hang over the document's end."""
        return self.token_positions[self.anchors][:, None] + self._slots_B

    @property
    def tokens_NB(self) -> Tensor:
        """Packed index of the token each slot stands for; meaningful where `in_document_NB`."""
        return self.anchors[:, None] + self._slots_B

    @property
    def in_document_NB(self) -> Tensor:
        """Whether a slot lies before its document's end."""
        return self.tokens_NB < self.ends[:, None]

    def to(self, device: torch.device | str) -> "Blocks":
        """The same blocks on `device`; from pinned memory the copy does not block."""
        return Blocks(
            anchors=self.anchors.to(device, non_blocking=True),
            ends=self.ends.to(device, non_blocking=True),
            token_positions=self.token_positions.to(device, non_blocking=True),
            block_size=self.block_size,
        )

    @property
    def _slots_B(self) -> Tensor:
        return torch.arange(self.block_size, device=self.anchors.device)
