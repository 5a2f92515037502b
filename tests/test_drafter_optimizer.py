"""Flat gradients, clipping, the skipped step and the schedule, against plain torch."""

import copy
import math

import pytest
import torch
from helpers_drafter import randomize, small_shape

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.optimizer import DrafterOptimizer, FlatGradients, learning_rate


def _drafter(seed: int = 0) -> DFlashDrafter:
    drafter = DFlashDrafter(small_shape())
    randomize(drafter, seed)
    return drafter


def _fill(drafter: DFlashDrafter, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        grad = torch.randn(parameter.shape, generator=generator) * scale
        (parameter * grad).sum().backward()


def test_gradients_are_views_of_one_buffer_and_accumulate():
    drafter = _drafter()
    flat = FlatGradients(drafter.parameters(), num_extras=5)
    assert flat.gradients.numel() == sum(p.numel() for p in drafter.parameters()) and flat.extras.numel() == 5
    flat.extras.fill_(2.0)
    _fill(drafter, 1), _fill(drafter, 2)
    pieces = torch.cat([p.grad.flatten() for p in drafter.parameters()])
    assert torch.equal(pieces, flat.gradients) and flat.gradients.any()
    assert torch.equal(flat.buffer, torch.cat((pieces, torch.full((5,), 2.0))))
    flat.zero()
    assert not any(p.grad.any() for p in drafter.parameters()) and not flat.extras.any()
    assert all(
        p.grad.untyped_storage().data_ptr() == flat.buffer.untyped_storage().data_ptr() for p in drafter.parameters()
    )


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 1e9])
def test_division_and_clipping_equal_torch(clip_norm):
    drafter, twin = _drafter(), _drafter()
    flat = FlatGradients(drafter.parameters(), num_extras=1)
    _fill(drafter, 3), _fill(twin, 3)
    denominator = torch.tensor(17.5)
    norm = flat.scale_and_clip(denominator, clip_norm)
    for parameter in twin.parameters():
        parameter.grad /= 17.5
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip_norm)
    torch.testing.assert_close(norm, expected)
    for ours, theirs in zip(drafter.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_steps_equal_plain_adamw_with_decay_on_matrices_only():
    drafter, twin = _drafter(), _drafter()
    flat, optimizer = FlatGradients(drafter.parameters(), 0), DrafterOptimizer(drafter, weight_decay=0.1)
    groups = [
        {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    plain = torch.optim.AdamW(groups, lr=1.0, foreach=False, fused=False)
    for step in range(1, 6):
        lr = learning_rate(step, peak=1e-2, total_steps=5, warmup_ratio=0.4)
        flat.zero(), plain.zero_grad()
        _fill(drafter, step), _fill(twin, step)
        optimizer.step(lr, skip=torch.zeros(()))
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
    for ours, theirs in zip(drafter.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_step_without_denominator_changes_nothing():
    drafter, twin = _drafter(), _drafter()
    optimizers = []
    for model, skips in ((drafter, True), (twin, False)):
        flat, optimizer = FlatGradients(model.parameters(), 0), DrafterOptimizer(model)
        for step in (1, 2, 3):
            denominator = torch.tensor(0.0 if step == 2 else 5.0)
            if step == 2 and not skips:
                continue
            flat.zero()
            _fill(model, step)
            norm = flat.scale_and_clip(denominator, 1.0)
            assert torch.isfinite(norm) and torch.isfinite(flat.gradients).all()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step(1e-2, skip=denominator == 0)
            changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert changed == (step != 2)
        optimizers.append(optimizer.adamw)
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters(), strict=True))
    for ours, theirs in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_state_survives_a_round_trip_bit_for_bit():
    drafter, twin = _drafter(), _drafter()
    flat, optimizer = FlatGradients(drafter.parameters(), 0), DrafterOptimizer(drafter)
    _fill(drafter, 1)
    optimizer.step(1e-2, torch.zeros(()))
    state = copy.deepcopy(optimizer.adamw.state_dict())
    twin.load_state_dict(drafter.state_dict())
    other_flat, other = FlatGradients(twin.parameters(), 0), DrafterOptimizer(twin)
    other.adamw.load_state_dict(state)
    for one, grads, model in ((optimizer, flat, drafter), (other, other_flat, twin)):
        grads.zero()
        _fill(model, 2)
        one.step(3e-3, torch.zeros(()))
    assert all(torch.equal(a, b) for a, b in zip(drafter.parameters(), twin.parameters(), strict=True))


def test_learning_rate_warms_up_and_ends_above_zero():
    rates = [learning_rate(s, peak=2.0, total_steps=20, warmup_ratio=0.25) for s in range(1, 21)]
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0]) and rates[5] == 2.0
    assert all(a > b > 0 for a, b in zip(rates[5:], rates[6:], strict=False))
    for step in range(6, 21):
        assert rates[step - 1] == pytest.approx(1 + math.cos(math.pi * (step - 6) / 15))
    assert learning_rate(1, peak=3.0, total_steps=1, warmup_ratio=0.0) == 3.0
    assert learning_rate(1, peak=3.0, total_steps=1, warmup_ratio=1.0) == 3.0
