"""The learning rate of every step, a pure function of its number."""

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    total_steps: int,
    warmup_ratio: float,
    schedule: str = "cosine",
    decay_ratio: float | None = None,
) -> float:
    """Learning rate of step `step` (from 1): linear warm-up that ends at `peak`, then the schedule's own course.

    `cosine` and `linear` fall over all steps after the warm-up, `wsd` (warm-up, stable, decay: arXiv 2404.06395) stays
    at `peak` and falls linearly over the last `decay_ratio` of all steps. A fall begins at `peak` and ends one step
    above zero, so that no step is without effect.
    """
    assert 1 <= step <= total_steps
    num_warmup_steps = _share_of(total_steps, warmup_ratio)
    if step <= num_warmup_steps:
        return peak * step / num_warmup_steps
    num_falling_steps = total_steps - num_warmup_steps
    if schedule == "wsd":
        assert decay_ratio is not None, "wsd needs a decay_ratio"
        num_falling_steps = min(num_falling_steps, _share_of(total_steps, decay_ratio))
    num_steps_left = total_steps - step + 1
    if num_steps_left >= num_falling_steps:
        return peak
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * (1.0 - num_steps_left / num_falling_steps)))
    assert schedule in ("linear", "wsd"), schedule
    return peak * num_steps_left / num_falling_steps


def _share_of(total_steps: int, ratio: float) -> int:
    # A product that is a whole number up to rounding is that number: 0.29 of 100 steps is 29, whatever the float says.
    return int(ratio * total_steps * (1.0 + 1e-12))
