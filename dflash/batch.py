"""The types that cross borders: what data, target, transport and drafter say to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_SECTION_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some whole documents laid end to end, on the host.

    Shapes: `document_ids` i64 [N], `lengths` i32 [N], `input_ids` i32 [T], `loss_mask` u8 [T]; T = lengths.sum().
    `index` is the micro-batch's place g in the plan, the same number on every rank.
    """

    index: int
    document_ids: Tensor
    lengths: Tensor
    input_ids: Tensor
    loss_mask: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_documents(self) -> int:
        return self.lengths.numel()


@dataclass(frozen=True)
class PackedLayout:
    """Where each section of one packed micro-batch lies in its byte buffer, derived from counts alone.

    Sections, each aligned to 16 bytes: features [T, F] | input_ids i32 [T] | loss_mask u8 [T] | lengths i32 [N] |
    document_ids i64 [N] | trailer i64 [2] (edge sequence number, g). The trailer is last, so its arrival means that
    everything before it has arrived.
    """

    num_tokens: int
    num_documents: int
    feature_width: int
    feature_dtype: torch.dtype

    @cached_property
    def sections(self) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        """Section name to (byte offset, dtype, shape)."""
        tokens, documents = self.num_tokens, self.num_documents
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "features": (self.feature_dtype, (tokens, self.feature_width)),
            "input_ids": (torch.int32, (tokens,)),
            "loss_mask": (torch.uint8, (tokens,)),
            "lengths": (torch.int32, (documents,)),
            "document_ids": (torch.int64, (documents,)),
            "trailer": (torch.int64, (2,)),
        }
        sections, offset = {}, 0
        for name, (dtype, shape) in shapes.items():
            sections[name] = (offset, dtype, shape)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            offset += -(-num_bytes // _SECTION_ALIGNMENT) * _SECTION_ALIGNMENT
        return sections

    @cached_property
    def num_bytes(self) -> int:
        offset, dtype, shape = self.sections["trailer"]
        return offset + dtype.itemsize * torch.Size(shape).numel()


class PackedHiddenStates:
    """One micro-batch's hidden states with the tokens they belong to, as views of one contiguous byte buffer."""

    __slots__ = ("buffer", "document_ids", "features", "input_ids", "layout", "lengths", "loss_mask", "trailer")

    features: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    document_ids: Tensor
    trailer: Tensor

    def __init__(self, layout: PackedLayout, buffer: Tensor) -> None:
        """Views `buffer`, u8 [layout.num_bytes or more], on any device; the rest of it stays unused."""
        assert buffer.dtype == torch.uint8 and buffer.is_contiguous() and buffer.numel() >= layout.num_bytes
        self.layout = layout
        self.buffer = buffer[: layout.num_bytes]
        for name, (offset, dtype, shape) in layout.sections.items():
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            setattr(self, name, self.buffer[offset : offset + num_bytes].view(dtype).view(shape))

    def void(self) -> None:
        """Lets go of the buffer, whose memory is then its owner's alone; only the layout may still be asked for."""
        for name in ("buffer", *self.layout.sections):
            delattr(self, name)


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What the rest of the program must know of a target before (or without) loading its weights."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """The target's frozen embedding and LM head, with the scalings its architecture puts around them.

    Shapes: `embedding` [V, H], `head` [V, H] (the same tensor when tied).
    Embeds as `embedding[ids] * embedding_scale`; logits are `softcap * tanh(z / softcap)` (z itself without a cap)
    of `z = (hidden @ head.T) * logit_multiplier`.
    """

    embedding: Tensor
    head: Tensor
    embedding_scale: float = 1.0
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class TargetLayers:
    """Weights of some target layers by their names below the layer, and of the final norm; fp32, on the CPU.

    Norm weights are what the normed hidden state is multiplied by, whatever the architecture stores.
    """

    layers: tuple[Mapping[str, Tensor], ...]
    final_norm: Tensor
