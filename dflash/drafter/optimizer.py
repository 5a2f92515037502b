"""One optimizer step: flat gradients that one all-reduce carries, clipping, AdamW, and the learning rate."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def learning_rate(step: int, *, peak: float, total_steps: int, warmup_ratio: float) -> float:
    """Learning rate of step `step` (from 1): linear warm-up to `peak`, then half a cosine that ends just above zero."""
    assert 1 <= step <= total_steps
    num_warmup_steps = int(warmup_ratio * total_steps)
    if step <= num_warmup_steps:
        return peak * step / num_warmup_steps
    progress = (step - 1 - num_warmup_steps) / (total_steps - num_warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


class FlatGradients:
    """All gradients in one fp32 buffer, of which every parameter's `grad` is a view, with room for sums at its end.

    `buffer` is what an all-reduce carries; `gradients` and `extras` are views of its two parts.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], num_extras: int) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        num_gradients = sum(parameter.numel() for parameter in self.parameters)
        device = self.parameters[0].device
        self.buffer = torch.zeros(num_gradients + num_extras, dtype=torch.float32, device=device)
        self.gradients, self.extras = self.buffer[:num_gradients], self.buffer[num_gradients:]
        offset = 0
        for parameter in self.parameters:
            assert parameter.dtype == torch.float32, "gradients are views of an fp32 buffer: masters are fp32"
            parameter.grad = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    def zero(self) -> None:
        """Empties gradients and extras; the optimizer's own `zero_grad` would drop the views."""
        self.buffer.zero_()

    def scale_and_clip(self, denominator: Tensor, clip_norm: float) -> Tensor:
        """Divides by `denominator` once, clips the global norm, and returns that norm before clipping (0-d).

        With denominator 0 nothing was supervised, and the gradients are set to zero.
        """
        counted = denominator > 0
        factor = torch.where(counted, 1.0 / torch.where(counted, denominator, 1.0), 0.0).to(torch.float32)
        norm = torch.linalg.vector_norm(self.gradients) * factor
        self.gradients.mul_(factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


class DrafterOptimizer:
    """AdamW (arXiv 1711.05101) on fp32 masters; norms, the one-dimensional parameters, are not decayed."""

    def __init__(
        self,
        drafter: nn.Module,
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
        norms = [parameter for parameter in drafter.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": norms, "weight_decay": 0.0}]
        # The fused kernel is one pass over memory on either device, and can skip a step without asking the host.
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def step(self, lr: float, skip: Tensor) -> None:
        """Steps with `lr`, unless the 0-d tensor `skip` is nonzero: then weights, moments and step count stay.

        Skipping is decided on the device, since the denominator that decides it has just been reduced there.
        """
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.grad_scale = None
        self.adamw.found_inf = skip.to(torch.float32)
        self.adamw.step()
