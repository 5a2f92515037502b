"""Rotary position embedding of Qwen3: tables built once for many heads and layers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """Cosine and sine of the angles of some positions, fp32, each [..., 1, D] to broadcast over heads."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, theta: float) -> "Rotary":
        """Tables for integer `positions` [...]; angles are position * theta^(-2i/D) (arXiv 2104.09864)."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
        angles = positions[..., None].float() * (1.0 / theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        # The sign of rotate_half lives in the table, so turning is a roll, two products and a sum.
        return cls(torch.cat((cos, cos), -1)[..., None, :], torch.cat((-sin, sin), -1)[..., None, :])

    def turn(self, heads: Tensor) -> Tensor:
        """Turns `heads` [..., heads, D], pairs being its two halves; in fp32 at least, returned in its own dtype."""
        wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
        return (wide * self.cos + wide.roll(heads.shape[-1] // 2, -1) * self.sin).to(heads.dtype)
