"""Every kind of loss, alone and mixed, against a dense fp64 twin written from the definitions, gradients included."""

import math

import pytest
import torch
from helpers_drafter import (
    LargestTensor,
    dense_dpace_weight,
    dense_logits,
    dense_terms,
    small_micro_batch,
    small_shape,
    small_vocabulary,
)

from dflash.batch import TargetVocabulary
from dflash.drafter import head
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import Teacher, frozen_head_losses, teacher_tokens
from dflash.drafter.metrics import MetricSums
from dflash.drafter.objective import ObjectiveSettings, TrainedSlots, objective_sums
from dflash.drafter.terms import Terms, row_terms

LENGTHS = [13, 2, 25]
ANCHORS = [30, 0, 9, 12, 13, 14, 22, 39, 15, 30]
SCALINGS = [{}, {"logit_multiplier": 1.7, "logit_softcap": 5.0}]
OFF = {"ce_weight": 0.0}
ALL = {"ce_weight": 0.3, "kl_weight": 0.5, "tv_weight": 0.9, "cap_weight": 0.2}
KINDS = {
    "ce": {},
    "half a ce": {"ce_weight": 0.5},
    "kl": {**OFF, "kl_weight": 1.0},
    "soft kl": {**OFF, "kl_weight": 0.7, "kl_temperature": 2.5},
    "tv": {**OFF, "tv_weight": 1.0},
    "cap": {**OFF, "cap_weight": 1.0},
    "ce and cap": {"cap_weight": 0.4},
    "ce and tv": {"ce_weight": 0.1, "tv_weight": 0.9},
    "all": ALL,
    "all, soft": {**ALL, "kl_temperature": 0.6},
    "dpace": {"dpace_alpha": 0.5},
    "dpace and cap": {"dpace_alpha": 0.25, "ce_weight": 0.8, "cap_weight": 0.4},
    "dpace and all": {**ALL, "dpace_alpha": 0.0, "kl_temperature": 1.5},
    "dpace of ones": {"dpace_alpha": 1.0, "tv_weight": 0.2},
}


def _settings(gamma: float, kind: str, labels: str = "data") -> ObjectiveSettings:
    """One kind, decaying unless it is D-PACE, which has weights of its own."""
    decay = {} if "dpace_alpha" in KINDS[kind] else {"gamma": gamma}
    return ObjectiveSettings(labels=labels, **decay, **KINDS[kind])


def _case(settings: ObjectiveSettings, block_size: int = 5, **scalings):
    """Hidden states that get about half of the tokens right, so that CAP has something to act on."""
    shape = small_shape(block_size=block_size)
    batch, vocabulary = small_micro_batch(LENGTHS, share=0.8), small_vocabulary(shape, **scalings)
    blocks = Blocks.at(torch.tensor(ANCHORS), batch.lengths, block_size)
    decay = settings.decay(block_size)
    slots = TrainedSlots.of(blocks, batch.input_ids, batch.loss_mask, decay, needs_teacher=settings.needs_teacher)
    generator = torch.Generator().manual_seed(4)
    size = (len(ANCHORS), block_size, shape.hidden_size)
    hidden = 0.2 * torch.randn(size, generator=generator, dtype=torch.float64)
    teacher = 0.3 * torch.randn(sum(LENGTHS), shape.hidden_size, generator=generator, dtype=torch.float64)
    for n, a in enumerate(ANCHORS):
        for k in range(0, block_size, 2):
            place = min(a + k, sum(LENGTHS) - 1)
            token = batch.input_ids[place]
            if settings.labels == "target":
                token = dense_logits(teacher[max(place - 1, 0)], vocabulary).argmax()
            hidden[n, k] += 0.3 * vocabulary.head[token]
    return batch, slots, hidden.requires_grad_(), teacher, vocabulary


def _naive(settings: ObjectiveSettings, batch, hidden, teacher, vocabulary):
    """Loss sum, denominator, and per supervised slot v, the terms and whether it is right: slot by slot."""
    ends = [sum(LENGTHS[: d + 1]) for d, length in enumerate(LENGTHS) for _ in range(length)]
    block_size = hidden.shape[1]
    loss, denominator, found = torch.zeros((), dtype=torch.float64), 0.0, []
    for n, a in enumerate(ANCHORS):
        block = {}
        for k in range(1, block_size):
            if a + k < ends[a] and batch.loss_mask[a + k]:
                theirs = dense_logits(teacher[a + k - 1], vocabulary)
                label = int(batch.input_ids[a + k]) if settings.labels == "data" else int(theirs.argmax())
                ours = dense_logits(hidden[n, k], vocabulary)
                terms = dense_terms(ours, theirs, label, settings.kl_temperature)
                block[k] = (terms, int(ours.argmax()) == label)
        confidences = {k: math.exp(-float(terms["ce"].detach())) for k, (terms, _) in block.items()}
        for k, (terms, is_right) in block.items():
            v = math.exp(-(k - 1) / settings.gamma) if settings.dpace_alpha is None else 1.0
            ce_weight = v
            if settings.dpace_alpha is not None:
                ce_weight = dense_dpace_weight(confidences, k, settings.dpace_alpha)
            rest = settings.kl_weight * terms["kl"] + settings.tv_weight * terms["tv"]
            rest = rest + settings.cap_weight * terms["cap"]
            loss = loss + settings.ce_weight * ce_weight * terms["ce"] + v * rest
            denominator += v
            found.append((v, {name: float(value.detach()) for name, value in terms.items()}, is_right))
    return loss, denominator, found


@pytest.mark.parametrize("labels", ["data", "target"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "tile_rows", "scalings"), [(7, 3, 1), (None, 2, 0), (1, 1, 1)])
def test_sums_and_gradient_equal_the_loops(kind, labels, chunk, tile_rows, scalings, monkeypatch):
    monkeypatch.setitem(head._TILE_BYTES, "cpu", tile_rows * 4 * 37)
    settings = _settings(3.0, kind, labels)
    batch, slots, hidden, teacher, vocabulary = _case(settings, **SCALINGS[scalings])
    sums = objective_sums(hidden, slots, vocabulary, settings, teacher, chunk)
    loss, denominator, found = _naive(settings, batch, hidden, teacher, vocabulary)
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-6, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(3 * sums.loss_sum, hidden), torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max())
    assert theirs.any() and not ours[:, 0].any()

    assert sums.metrics.values[:2].tolist() == pytest.approx([float(loss.detach()), denominator], rel=1e-6)
    num_right = sum(is_right for *_, is_right in found)
    assert 0 < num_right < len(found)
    expected = {}
    for name in ("ce", "kl", "tv", "cap"):
        if getattr(settings, f"{name}_weight") > 0:
            expected[name] = sum(v * terms[name] for v, terms, _ in found) / denominator
    if "cap" in expected:
        expected["entropy"] = sum(terms["entropy"] for _, terms, _ in found) / len(found)
        expected["cap_share"] = num_right / len(found)
    assert sums.metrics.read_terms() == ({} if kind == "ce" else pytest.approx(expected, rel=1e-6))
    assert sums.metrics.read().accuracy == pytest.approx(num_right / len(found))


@pytest.mark.parametrize("block_size", [2, 8, 11])
def test_other_block_sizes(block_size):
    for kind in ("dpace and all", "all"):
        settings = _settings(1.3, kind)
        batch, slots, hidden, teacher, vocabulary = _case(settings, block_size)
        loss, *_ = _naive(settings, batch, hidden, teacher, vocabulary)
        ours = objective_sums(hidden, slots, vocabulary, settings, teacher, 5).loss_sum
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scalings", SCALINGS)
@pytest.mark.parametrize(
    "terms",
    [
        Terms(0.0, kl=1.3),
        Terms(0.0, kl=1.3, kl_temperature=2.0),
        Terms(0.0, tv=0.8),
        Terms(0.0, cap=0.6),
        Terms(0.3, 0.5, 0.9, 0.2),
        Terms(0.3, 0.5, 0.9, 0.2, 0.5),
    ],
)
def test_frozen_head_passes_gradcheck(terms, scalings):
    settings = ObjectiveSettings(gamma=3.0)
    *_, hidden, teacher_TH, vocabulary = _case(settings, **scalings)
    rows = hidden.detach().flatten(0, 1)[:4].requires_grad_()
    teacher = Teacher(teacher_TH, torch.tensor([3, 3, 0, 39]))
    labels = dense_logits(rows.detach(), vocabulary).argmax(-1)
    labels[3] = (labels[3] + 1) % 37
    for given, separate in ((labels, False), (labels, True), (None, False)):

        def losses(hidden_MH, given=given, separate=separate):
            found = frozen_head_losses(
                hidden_MH, given, vocabulary, terms, teacher, separate_ce=separate, chunk_slots=3
            )
            return (found.mixture_M, found.ce_M) if separate else found.mixture_M

        assert torch.autograd.gradcheck(losses, rows)


def test_chunks_and_tiles_change_no_slot(monkeypatch):
    *_, hidden, teacher_TH, vocabulary = _case(ObjectiveSettings(gamma=3.0))
    rows, labels = hidden.detach().flatten(0, 1), torch.arange(50) % 37
    teacher, terms = Teacher(teacher_TH, torch.arange(50) % 40), Terms(0.3, 0.5, 0.9, 0.2, 0.5)
    whole = frozen_head_losses(rows, labels, vocabulary, terms, teacher, chunk_slots=50)
    tokens = teacher_tokens(teacher, vocabulary)
    for chunk, tile_rows in ((1, 9), (3, 2), (49, 5), (1000, 50)):
        monkeypatch.setitem(head._TILE_BYTES, "cpu", tile_rows * 4 * 37)
        part = frozen_head_losses(rows, labels, vocabulary, terms, teacher, chunk_slots=chunk)
        torch.testing.assert_close(part.mixture_M, whole.mixture_M, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(part.values, whole.values, rtol=1e-12, atol=1e-12)
        assert torch.equal(part.predicted_M, whole.predicted_M)
        assert torch.equal(teacher_tokens(teacher, vocabulary, chunk), tokens)
    few = Teacher(teacher_TH, torch.tensor([5, 39, 5]))
    assert torch.equal(teacher_tokens(few, vocabulary, 2), tokens[[5, 39, 5]])


def _row_gradient(terms, logits, teacher, label):
    gradient = torch.empty_like(logits)
    labels = torch.full((logits.shape[0],), label)
    found = row_terms(terms, logits.clone(), teacher.clone(), labels, gradient)
    return found.values, gradient


@pytest.mark.parametrize("terms", [Terms(0, tv=1.0), Terms(0.4, 0.3, 0.7, 0.2), Terms(0, kl=1.0), Terms(0, cap=1.0)])
def test_ties_have_the_subgradient_of_minimum(terms):
    """Shares that are equal in some tokens, in none, and in all; the twin's is autograd's through torch.minimum."""
    # exp(-100) is lost in a sum of ones, so the shares of the first row are exact whatever the order of summation.
    logits = torch.tensor([[0.0, 0.0, -100.0, -100.0], [0.3, 5.0, 0.0, 5.5], [1.0, 2.0, 3.0, 4.0]]).double()
    teacher = torch.tensor([[-100.0, 0.0, 0.0, -100.0], [0.0, 0.2, 5.0, 5.0], [1.0, 2.0, 3.0, 4.0]]).double()
    assert (logits.softmax(-1) == teacher.softmax(-1)).sum(-1).tolist() == [2, 0, 4]
    _, gradient = _row_gradient(terms, logits, teacher, 3)
    for row in range(3):
        leaf = logits[row].clone().requires_grad_()
        values = dense_terms(leaf, teacher[row], 3)
        loss = sum(getattr(terms, name) * values[name] for name in ("ce", "kl", "tv", "cap"))
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(gradient[row], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_extremes_stay_finite_and_exact_in_fp32(temperature):
    """Confident, flat and opposite distributions, logits of 80 either way, against the same rows in fp64."""
    spike = torch.full((3001,), -80.0)
    spike[7] = 80.0
    other, flat = -spike, torch.zeros(3001)
    slope = torch.linspace(-80, 80, 3001)
    rows = [(spike, spike), (spike, flat), (flat, spike), (spike, other), (other, spike), (slope, -slope), (flat, flat)]
    logits, teacher = (torch.stack(side) for side in zip(*rows, strict=True))
    for terms in (Terms(0.3, 0.5, 0.9, 0.2, temperature), Terms(0.0, tv=1.0), Terms(0.0, cap=1.0)):
        values, gradient = _row_gradient(terms, logits, teacher, 7)
        wide_values, wide_gradient = _row_gradient(terms, logits.double(), teacher.double(), 7)
        for name, value in values.items():
            torch.testing.assert_close(value.double(), wide_values[name], rtol=2e-5, atol=2e-5)
        assert gradient.isfinite().all()
        torch.testing.assert_close(gradient.double(), wide_gradient, rtol=2e-5, atol=2e-6)
        leaf = logits[5].double().requires_grad_()
        twin = dense_terms(leaf, teacher[5].double(), 7, temperature)
        loss = sum(getattr(terms, name) * twin[name] for name in ("ce", "kl", "tv", "cap"))
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(wide_gradient[5], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_supervised_and_one_supervised_slot(kind):
    settings = _settings(3.0, kind)
    batch, slots, hidden, teacher, vocabulary = _case(settings)
    supervised = torch.zeros(len(ANCHORS), 5, dtype=torch.bool)
    labels, places = torch.zeros(len(ANCHORS), 5, dtype=torch.int64), torch.full((len(ANCHORS), 5), 6)
    none = TrainedSlots.labelled(supervised, labels, settings.decay(5), places)
    sums = objective_sums(hidden, none, vocabulary, settings, teacher)
    (grad,) = torch.autograd.grad(sums.loss_sum, hidden)
    assert float(sums.loss_sum.detach()) == 0 and not grad.any() and not sums.metrics.values.any()
    assert all(math.isnan(value) for value in sums.metrics.read_terms().values())

    supervised[2, 3] = True
    label = int(dense_logits(hidden[2, 3].detach(), vocabulary).argmax())
    one = TrainedSlots.labelled(supervised, labels + label, settings.decay(5), places)
    sums = objective_sums(hidden, one, vocabulary, settings, teacher)
    terms = dense_terms(
        dense_logits(hidden[2, 3], vocabulary), dense_logits(teacher[6], vocabulary), label, settings.kl_temperature
    )
    if settings.dpace_alpha is None:
        v = w = math.exp(-2 / 3.0)
    else:
        v, w = 1.0, (1 - settings.dpace_alpha) * math.exp(-float(terms["ce"].detach())) + settings.dpace_alpha
    loss = settings.ce_weight * w * terms["ce"]
    loss = loss + v * sum(getattr(settings, f"{name}_weight") * terms[name] for name in ("kl", "tv", "cap"))
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-6, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(sums.loss_sum, hidden), torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max())


@pytest.mark.parametrize("kind", ["all", "dpace and cap", "dpace and all"])
def test_evaluation_gives_the_same_values_without_a_gradient(kind):
    settings = _settings(3.0, kind)
    _, slots, hidden, teacher, vocabulary = _case(settings)
    trained = objective_sums(hidden, slots, vocabulary, settings, teacher)
    with torch.no_grad():
        evaluated = objective_sums(hidden, slots, vocabulary, settings, teacher)
    assert trained.loss_sum.requires_grad and not evaluated.loss_sum.requires_grad
    assert torch.equal(trained.metrics.values, evaluated.metrics.values)


def test_the_teacher_and_the_head_get_no_gradient():
    settings = ObjectiveSettings(gamma=3.0, labels="target", **KINDS["all"])
    _, slots, hidden, teacher, vocabulary = _case(settings)
    weight, teacher = vocabulary.head.clone().requires_grad_(), teacher.requires_grad_()
    objective_sums(hidden, slots, TargetVocabulary(weight, weight), settings, teacher).loss_sum.backward()
    assert weight.grad is None and teacher.grad is None and hidden.grad is not None


@pytest.mark.parametrize("separate", [False, True])
def test_the_whole_vocabulary_never_exists_for_all_slots(separate):
    weight, teacher_TH = torch.randn(1000, 8), torch.randn(90, 8)
    rows, teacher = torch.randn(300, 8, requires_grad=True), Teacher(teacher_TH, torch.arange(300) % 90)
    with LargestTensor() as largest:
        terms = Terms(0.3, 0.5, 0.9, 0.2, 0.5)
        vocabulary = TargetVocabulary(weight, weight, logit_softcap=3.0)
        found = frozen_head_losses(rows, None, vocabulary, terms, teacher, separate_ce=separate, chunk_slots=16)
        (found.mixture_M.sum() + (found.ce_M.sum() if separate else 0)).backward()
    assert largest.numel == 16 * 1000


def test_a_half_precision_head_and_teacher_are_accumulated_in_fp32():
    *_, hidden, teacher_TH, vocabulary = _case(ObjectiveSettings(gamma=3.0))
    half = TargetVocabulary(vocabulary.embedding.bfloat16(), vocabulary.head.bfloat16())
    wide = TargetVocabulary(half.embedding.float(), half.head.float())
    rows, teacher_TH = hidden.detach().flatten(0, 1).bfloat16(), teacher_TH.bfloat16()
    places, terms = torch.arange(50) % 40, Terms(0.3, 0.5, 0.9, 0.2)
    found = []
    for vocab, dtype in ((half, torch.bfloat16), (wide, torch.float32)):
        leaf = rows.to(dtype).requires_grad_()
        losses = frozen_head_losses(leaf, None, vocab, terms, Teacher(teacher_TH.to(dtype), places))
        (grad,) = torch.autograd.grad(losses.mixture_M.sum(), leaf)
        assert losses.mixture_M.dtype == torch.float32 and grad.dtype == dtype
        found.append((losses.mixture_M, grad.float()))
    torch.testing.assert_close(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-4)


def test_sums_of_terms_add_up_and_say_what_they_are():
    settings = ObjectiveSettings(gamma=3.0, **KINDS["all"])
    _, slots, hidden, teacher, vocabulary = _case(settings)
    sums = objective_sums(hidden, slots, vocabulary, settings, teacher).metrics
    names = settings.metric_terms
    assert names == ("ce", "kl", "tv", "cap", "entropy")
    total = MetricSums.zeros(5, terms=names)
    assert total.values.shape == sums.values.shape == (MetricSums.width(5, names),)
    assert all(math.isnan(value) for value in total.read_terms().values())
    total.add_(sums)
    total.add_(MetricSums(sums.values.float(), names))
    assert total.read_terms() == pytest.approx(sums.read_terms())
    assert total.read().accuracy == sums.read().accuracy
    assert ObjectiveSettings().metric_terms == () and ObjectiveSettings(**KINDS["kl"]).metric_terms == ("kl",)
    assert MetricSums.zeros(5).read_terms() == {}


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"labels": "teacher"}, "objective.labels: 'teacher' must be one of data, target"),
        ({"ce_weight": -1.0}, "objective.ce.weight: -1.0"),
        ({"kl_weight": math.nan}, "objective.kl.weight: nan"),
        ({"tv_weight": math.inf}, "objective.tv.weight: inf"),
        ({"cap_weight": -0.1}, "objective.cap.weight: -0.1"),
        ({"ce_weight": 0.0}, "objective.ce.weight: .* all 0"),
        ({"kl_weight": 1.0, "kl_temperature": 0.0}, "objective.kl.temperature: 0.0"),
        ({"kl_weight": 1.0, "kl_temperature": math.inf}, "objective.kl.temperature: inf"),
        ({"kl_temperature": 2.0}, "objective.kl.temperature: 2.0 has no effect"),
        ({"dpace_alpha": -0.1}, "objective.dpace.alpha: -0.1"),
        ({"dpace_alpha": 1.1}, "objective.dpace.alpha: 1.1"),
        ({"dpace_alpha": math.nan}, "objective.dpace.alpha: nan"),
        ({"dpace_alpha": 0.5, "ce_weight": 0.0, "kl_weight": 1.0}, "objective.dpace.alpha: .*objective.ce.weight is 0"),
    ],
)
def test_settings_out_of_range_or_senseless_are_named(wrong, key):
    with pytest.raises(ValueError, match=key):
        ObjectiveSettings(**wrong)


def test_what_settings_ask_for():
    needing = [kind for kind, settings in KINDS.items() if ObjectiveSettings(**settings).needs_teacher]
    assert needing == [
        "kl",
        "soft kl",
        "tv",
        "ce and tv",
        "all",
        "all, soft",
        "dpace and all",
        "dpace of ones",
    ]
    assert ObjectiveSettings(labels="target").needs_teacher
    assert ObjectiveSettings().decay(8) == 4.0 and ObjectiveSettings(gamma=2.0).decay(6) == 2.0
    assert ObjectiveSettings(dpace_alpha=0.5).decay(6) == math.inf
    with pytest.raises(ValueError, match="objective.gamma"):
        ObjectiveSettings().decay(6)
    with pytest.raises(ValueError, match="objective.gamma: 2.0 has no effect with objective.dpace.alpha"):
        ObjectiveSettings(gamma=2.0, dpace_alpha=0.5)
