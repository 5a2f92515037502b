"""One optimizer step: flat gradients that one all-reduce carries, clipping, and AdamW or Muon on fp32 masters."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim._muon import muon


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


class SkippableMuon(torch.optim.Muon):
    """torch.optim.Muon that can leave out a step without asking the host, by the protocol of torch's fused AdamW.

    Where the 0-d tensor `found_inf` is nonzero, `step` leaves weights and momentum as they are, to the bit and whatever
    the gradients hold; None steps always. Another step is that of torch.optim.Muon to the bit.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """Steps every matrix by itself, so that what a skipped step falls back on is a copy of one matrix at a time."""
        assert closure is None, "gradients are there before the step"
        for group in self.param_groups:
            weights: list[Tensor] = []
            gradients: list[Tensor] = []
            momenta: list[Tensor] = []
            has_complex = self._init_group(group, weights, gradients, momenta)
            # torch's own function, so that there is one Muon; only `params` is no option of it.
            options = {name: value for name, value in group.items() if name != "params"}
            for changed in zip(weights, gradients, momenta, strict=True):
                weight, gradient, momentum = changed
                before = None if self.found_inf is None else (weight.clone(), momentum.clone())
                muon([weight], [gradient], [momentum], has_complex=has_complex, **options)
                if before is not None:
                    _restore(self.found_inf != 0, before, (weight, momentum))


def _restore(is_skipped: Tensor, before: Iterable[Tensor], after: Iterable[Tensor]) -> None:
    """Puts `before` back in place of `after` where 0-d `is_skipped`; selecting, unlike arithmetic, heals NaN too."""
    for old, new in zip(before, after, strict=True):
        torch.where(is_skipped, old, new, out=new)


class DrafterOptimizer:
    """AdamW (arXiv 1711.05101), or Muon (arXiv 2502.16982) for matrices and AdamW for the rest, on fp32 masters.

    Norms, the one-dimensional parameters, are not decayed. `parts` are the torch optimizers whose states, together, are
    this one's state; their parameters do not overlap.
    """

    def __init__(
        self,
        drafter: nn.Module,
        *,
        name: str = "adamw",
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        assert name in ("adamw", "muon"), name
        matrices = [parameter for parameter in drafter.parameters() if parameter.dim() > 1]
        norms = [parameter for parameter in drafter.parameters() if parameter.dim() == 1]
        groups = [{"params": norms, "weight_decay": 0.0}]
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        if name == "adamw":
            groups.insert(0, {"params": matrices, "weight_decay": weight_decay})
        else:
            # Scaled so that an update has the root mean square of AdamW's: one learning rate serves matrices and norms,
            # and what was tuned for AdamW stays good. The drafter trains neither embedding nor head, the matrices that
            # Muon is not for.
            self.parts = (
                SkippableMuon(
                    matrices,
                    lr=0.0,
                    weight_decay=weight_decay,
                    momentum=momentum,
                    adjust_lr_fn="match_rms_adamw",
                ),
            )
        # The fused kernel is one pass over memory on either device, and can skip a step without asking the host.
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.parts += (self.adamw,)

    def step(self, lr: float, skip: Tensor) -> None:
        """Steps with `lr`, unless the 0-d tensor `skip` is nonzero: then weights, moments and step count stay.

        Skipping is decided on the device, since the denominator that decides it has just been reduced there.
        """
        # AdamW's kernels compare with 1, and not with 0.
        found_inf = (skip != 0).to(torch.float32)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.grad_scale, part.found_inf = None, found_inf
            part.step()
