"""Flat gradients, clipping, AdamW, Muon and the skipped step, against plain torch."""

import copy
from pathlib import Path

import pytest
import torch
from helpers_drafter import randomize, small_micro_batch, small_shape, small_vocabulary
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash.checkpoints.loading import load_checkpoint, training_state
from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.saving import CheckpointSaver
from dflash.drafter.anchors import draw_anchors
from dflash.drafter.attention_tiles import TiledAttend
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.optimizer import DrafterOptimizer, FlatGradients
from dflash.drafter.schedule import learning_rate

NAMES = ("adamw", "muon")
SETTINGS = {"weight_decay": 0.1, "betas": (0.9, 0.95)}


def _drafter(seed: int = 0) -> DFlashDrafter:
    drafter = DFlashDrafter(small_shape())
    randomize(drafter, seed)
    return drafter


def _fill(drafter: DFlashDrafter, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        grad = torch.randn(parameter.shape, generator=generator) * scale
        (parameter * grad.to(parameter.device)).sum().backward()


class Trained:
    """A drafter with flat gradients and an optimizer, stepped by draws that depend on the step alone."""

    def __init__(self, name: str, device: str = "cpu", **settings) -> None:
        self.drafter = _drafter().to(device)
        self.optimizer = DrafterOptimizer(self.drafter, name=name, **{**SETTINGS, **settings})
        self.flat = FlatGradients(self.drafter.parameters(), 0)

    def step(self, step: int, lr: float = 1e-2, skip: Tensor | None = None, spoilt: float | None = None) -> None:
        self.flat.zero()
        _fill(self.drafter, step)
        if spoilt is not None:
            self.flat.gradients[::7] = spoilt
        no_skip = torch.zeros((), device=self.flat.buffer.device)
        self.optimizer.step(lr, no_skip if skip is None else skip)

    def bits(self) -> dict[str, Tensor]:
        """Weights and optimizer state, as integers, so that NaN and the sign of zero count."""
        parameters = dict(self.drafter.named_parameters())
        found = {name: parameter.detach() for name, parameter in parameters.items()}
        for part in self.optimizer.parts:
            for name, parameter in parameters.items():
                found |= {f"{name}/{key}": value for key, value in part.state.get(parameter, {}).items()}
        assert all(tensor.dtype == torch.float32 for tensor in found.values())
        return {name: tensor.clone().view(torch.int32) for name, tensor in found.items()}

    def assert_same(self, expected: dict[str, Tensor]) -> None:
        ours = self.bits()
        assert ours.keys() == expected.keys()
        assert not [name for name in ours if not torch.equal(ours[name], expected[name])]


def _split(drafter: DFlashDrafter) -> tuple[list[Tensor], list[Tensor]]:
    parameters = list(drafter.parameters())
    return [p for p in parameters if p.dim() == 2], [p for p in parameters if p.dim() == 1]


# Gradients and clipping


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


def test_division_and_clipping_are_one_scaling_of_the_flat_buffer():
    seen: list[str] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(isinstance(a, Tensor) and a.numel() == flat.gradients.numel() for a in args):
                seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    drafter = _drafter()
    flat = FlatGradients(drafter.parameters(), num_extras=1)
    _fill(drafter, 3)
    with Noted():
        flat.scale_and_clip(torch.tensor(17.5), 1.0)
    assert seen == ["linalg_vector_norm", "mul_"]


# Steps that equal torch's


@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_bits_of_plain_torch(name):
    """The same kernels, the groups written out: norms are never decayed."""
    trained, twin = Trained(name), _drafter()
    matrices, norms = _split(twin)
    adamw = {"lr": 1.0, "betas": (0.9, 0.95), "fused": True}
    if name == "adamw":
        plain = [torch.optim.AdamW(matrices, weight_decay=0.1, **adamw)]
    else:
        plain = [torch.optim.Muon(matrices, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")]
    plain.append(torch.optim.AdamW(norms, weight_decay=0.0, **adamw))
    for step in range(1, 7):
        lr = learning_rate(step, peak=1e-2, total_steps=6, warmup_ratio=0.4)
        trained.step(step, lr)
        twin.zero_grad()
        _fill(twin, step)
        for optimizer in plain:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        for ours, theirs in zip(trained.drafter.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), step


def test_steps_equal_the_formula_of_adamw():
    """Algorithm 2 of arXiv 1711.05101 in fp64, with torch's reading of the decay: lr * weight_decay."""
    trained = Trained("adamw")
    weights = [p.detach().double() for p in trained.drafter.parameters()]
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, 6):
        lr = 1e-2 / step
        trained.step(step, lr)
        for i, parameter in enumerate(trained.drafter.parameters()):
            grad = parameter.grad.double()
            first[i] = 0.9 * first[i] + 0.1 * grad
            second[i] = 0.95 * second[i] + 0.05 * grad**2
            decay = 0.1 if parameter.dim() == 2 else 0.0
            update = first[i] / (1 - 0.9**step) / ((second[i] / (1 - 0.95**step)).sqrt() + 1e-8)
            weights[i] = weights[i] - lr * (update + decay * weights[i])
            torch.testing.assert_close(parameter.detach().double(), weights[i], rtol=1e-5, atol=1e-6)


def test_steps_equal_the_formula_of_muon():
    """Momentum, Nesterov and five Newton-Schulz steps in fp64; torch orthogonalises in bfloat16, so roughly."""
    trained = Trained("muon")
    matrices, _ = _split(trained.drafter)
    momenta = [torch.zeros_like(w, dtype=torch.float64) for w in matrices]
    for step in range(1, 5):
        before = [w.detach().double() for w in matrices]
        trained.step(step, lr=1e-2)
        for i, matrix in enumerate(matrices):
            grad = matrix.grad.double()
            momenta[i] = 0.95 * momenta[i] + 0.05 * grad
            x = 0.05 * grad + 0.95 * momenta[i]
            x = x / x.norm()
            for _ in range(5):
                x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
            update = (before[i] * (1 - 1e-3) - matrix.detach().double()) / 1e-2
            expected = 0.2 * max(matrix.shape) ** 0.5 * x
            assert (update - expected).norm() < 0.05 * expected.norm()


def test_one_learning_rate_serves_both_kinds_of_parameters():
    """Muon's updates are as large as AdamW's, 0.2 to 1 times the learning rate by root mean square, for any shape."""
    trained = Trained("muon", weight_decay=0.0)
    for step in range(1, 4):
        before = [p.detach().clone() for p in trained.drafter.parameters()]
        trained.step(step, lr=1e-3)
        for old, new in zip(before, trained.drafter.parameters(), strict=True):
            size = float((new.detach() - old).square().mean().sqrt()) / 1e-3
            assert 0.1 < size < 1.1, (tuple(new.shape), size)


# The skipped step


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoilt", [None, torch.nan, torch.inf, -torch.inf, 1e38])
@pytest.mark.parametrize("skip", [torch.tensor(True), torch.tensor(3.0), torch.tensor(-2)])
def test_a_skipped_step_leaves_every_bit(name, spoilt, skip):
    """The first step, one in the middle and one of two in a row, against an optimizer that never saw them."""
    skipping, twin = Trained(name), Trained(name)
    skipping.step(90, skip=skip, spoilt=spoilt)
    assert all(torch.equal(a, b) for a, b in zip(skipping.drafter.parameters(), _drafter().parameters(), strict=True))
    for step in (1, 2, 3):
        skipping.step(step), twin.step(step)
        skipping.assert_same(twin.bits())
        for again in range(step):
            skipping.step(90 + again, lr=0.5, skip=skip, spoilt=spoilt)
            skipping.assert_same(twin.bits())
    skipping.step(4, lr=1e-3), twin.step(4, lr=1e-3)
    skipping.assert_same(twin.bits())


@pytest.mark.parametrize("name", NAMES)
def test_the_sign_of_zero_survives_a_skip(name):
    trained = Trained(name)
    with torch.no_grad():
        for parameter in trained.drafter.parameters():
            parameter.view(-1)[::2] = -0.0
    trained.step(1)
    for part in trained.optimizer.parts:
        for state in part.state.values():
            for key in state.keys() & {"momentum_buffer", "exp_avg"}:
                state[key].view(-1)[::3] = -0.0
    before = trained.bits()
    trained.step(2, skip=torch.tensor(True), spoilt=torch.nan)
    trained.assert_same(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_without_denominator_changes_nothing(name):
    trained, twin = Trained(name), Trained(name)
    for step in (1, 2, 3):
        denominator = torch.tensor(0.0 if step == 2 else 5.0)
        for one in (trained, twin) if step != 2 else (trained,):
            one.flat.zero()
            _fill(one.drafter, step)
            norm = one.flat.scale_and_clip(denominator, 1.0)
            assert torch.isfinite(norm) and torch.isfinite(one.flat.gradients).all()
            one.optimizer.step(1e-2, skip=denominator <= 0)
        trained.assert_same(twin.bits())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_read_back_from_the_device(name):
    """No value of a tensor decides, on the host, what is computed next."""

    class NoReading(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"), func
            return func(*args, **(kwargs or {}))

    trained = Trained(name)
    _fill(trained.drafter, 1)
    for skip in (torch.tensor(True), torch.tensor(False)):
        with NoReading():
            norm = trained.flat.scale_and_clip(torch.tensor(4.0), 1.0)
            trained.optimizer.step(1e-2, skip | ~torch.isfinite(norm))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_cuda_waits_for_nothing_and_skips_alike(name):
    trained, twin = Trained(name, "cuda"), Trained(name, "cuda")
    trained.step(1), twin.step(1)  # the first makes the state
    skip, no_skip = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    trained.flat.gradients.fill_(torch.nan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trained.optimizer.step(1e-2, skip)
        twin.optimizer.step(1e-2, no_skip)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trained.step(1, skip=no_skip)
    trained.assert_same(twin.bits())


# State


@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_from_state_dicts_goes_on_with_the_same_bits(name):
    trained = Trained(name)
    for step in (1, 2, 3):
        trained.step(step, skip=torch.tensor(step == 2))
    states = [copy.deepcopy(part.state_dict()) for part in trained.optimizer.parts]
    other = Trained(name)
    other.drafter.load_state_dict(trained.drafter.state_dict())
    for part, state in zip(other.optimizer.parts, states, strict=True):
        part.load_state_dict(state)
    other.assert_same(trained.bits())
    for step in (4, 5):
        trained.step(step), other.step(step)
        other.assert_same(trained.bits())


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_holds_all_parts(name, tmp_path: Path):
    """Through the files of a checkpoint: a run that never stopped, and one that did after a skipped step."""
    trained, metrics = Trained(name), torch.zeros(1, dtype=torch.float64)
    for step in (1, 2, 3):
        trained.step(step, skip=torch.tensor(step == 3))
    state = training_state(trained.drafter, trained.optimizer.parts, metrics)
    assert state["optimizer"]["state"].keys() == dict(trained.drafter.named_parameters()).keys()
    saver = CheckpointSaver(tmp_path, None, keep=1)
    saver.start(CheckpointMeta(3, False, 3, 3, "data", None, trained.drafter.shape, {}), state)
    folder = saver.finish()
    assert folder is not None
    drafter = DFlashDrafter(small_shape())
    other = Trained(name)
    other.drafter, other.optimizer = drafter, DrafterOptimizer(drafter, name=name, weight_decay=0.7, momentum=0.5)
    load_checkpoint(folder, drafter, other.optimizer.parts, metrics)
    other.flat = FlatGradients(drafter.parameters(), 0)
    other.assert_same(trained.bits())
    for step in (4, 5):
        trained.step(step), other.step(step)
        other.assert_same(trained.bits())


# Masters


@pytest.mark.parametrize("name", NAMES)
def test_a_norm_weight_near_one_moves_at_a_learning_rate_of_1e_5(name, monkeypatch):
    """Through a backward under bf16 autocast into fp32 masters; the same step leaves bf16 weights where they are."""
    # Attention on CPU is fp32 inside, whatever comes in; bf16 is for the projections, as on CUDA.
    without_autocast = torch.autocast("cpu", enabled=False)
    monkeypatch.setattr(TiledAttend, "__call__", without_autocast(TiledAttend.__call__))
    drafter = DFlashDrafter(small_shape()).initialize(0)
    shape, flat = drafter.shape, FlatGradients(drafter.parameters(), 0)
    optimizer = DrafterOptimizer(drafter, name=name)
    batch = small_micro_batch([40, 23], vocab_size=shape.vocab_size)
    blocks = draw_anchors(batch, block_size=shape.block_size, per_token=0.3, max_per_document=99, seed=0, epoch=0)
    tokens = batch.input_ids[blocks.anchors]
    embeddings = embed_blocks(small_vocabulary(shape), tokens, shape.mask_token_id, shape.block_size)
    features = torch.randn(batch.num_tokens, shape.feature_width, generator=torch.Generator().manual_seed(1))
    dtypes: set[torch.dtype] = set()
    for layer in drafter.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, inputs, out: dtypes.add(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = drafter(features, embeddings, blocks)
    (hidden.float() * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    assert dtypes == {torch.bfloat16} and flat.gradients.dtype == torch.float32
    _, norms = _split(drafter)
    assert all((norm == 1).all() for norm in norms)
    in_bf16 = [torch.nn.Parameter(norm.detach().bfloat16()) for norm in norms]
    for norm, small in zip(norms, in_bf16, strict=True):
        small.grad = norm.grad.bfloat16()
    optimizer.step(1e-5, torch.zeros(()))
    torch.optim.AdamW(in_bf16, lr=1e-5, weight_decay=0.0).step()
    for norm, small in zip(norms, in_bf16, strict=True):
        has_gradient = norm.grad.abs() > 1e-6
        assert has_gradient.any()
        moved = (norm.detach() - 1)[has_gradient]
        assert torch.equal(moved.sign(), -norm.grad[has_gradient].sign())
        torch.testing.assert_close(moved.abs(), torch.full_like(moved, 1e-5), rtol=0.05, atol=0)
        assert (small == 1).all(), "bf16 weights near 1 are 2^-8 apart"


def test_masters_must_be_fp32():
    with pytest.raises(AssertionError, match="masters are fp32"):
        FlatGradients(_drafter().bfloat16().parameters(), 0)
