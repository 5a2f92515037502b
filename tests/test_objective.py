"""The objective against plain loops: which slots count, their weights, the frozen head's gradient, the metrics."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers_drafter import LargestTensor, small_micro_batch, small_shape, small_vocabulary

from dflash.batch import TargetVocabulary
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import frozen_head_cross_entropy, vocabulary_logits
from dflash.drafter.metrics import MetricSums
from dflash.drafter.objective import TrainedSlots, decay_gamma, objective_sums

LENGTHS = [13, 2, 25]
ANCHORS = [30, 0, 9, 12, 13, 14, 22, 39, 15, 30]
SCALINGS = [{}, {"logit_multiplier": 0.4}, {"logit_softcap": 2.5}, {"logit_multiplier": 1.7, "logit_softcap": 5.0}]


def _case(block_size: int = 5, gamma: float = 3.0, **scalings):
    shape = small_shape(block_size=block_size)
    batch = small_micro_batch(LENGTHS, share=0.8)
    blocks = Blocks.at(torch.tensor(ANCHORS), batch.lengths, block_size)
    slots = TrainedSlots.of(blocks, batch.input_ids, batch.loss_mask, gamma)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(len(ANCHORS), block_size, shape.hidden_size, generator=generator, dtype=torch.float64)
    return batch, slots, hidden.requires_grad_(), small_vocabulary(shape, **scalings)


def _logits(hidden, vocabulary):
    logits = hidden @ vocabulary.head.T * vocabulary.logit_multiplier
    cap = vocabulary.logit_softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _naive(batch, hidden, vocabulary, block_size, gamma):
    """Loss sum, denominator, right and counted per slot, accept lengths: slot by slot."""
    ends = [sum(LENGTHS[: d + 1]) for d, length in enumerate(LENGTHS) for _ in range(length)]
    loss, denominator, right, counted, accepts = 0.0, 0.0, [0] * (block_size - 1), [0] * (block_size - 1), []
    for n, a in enumerate(ANCHORS):
        hits = []
        for k in range(1, block_size):
            if a + k >= ends[a] or not batch.loss_mask[a + k]:
                continue
            label = int(batch.input_ids[a + k])
            logits = _logits(hidden[n, k], vocabulary)
            weight = math.exp(-(k - 1) / gamma)
            loss = loss + weight * F.cross_entropy(logits[None], torch.tensor([label]))
            denominator += weight
            hits.append(int(logits.argmax()) == label)
            right[k - 1] += hits[-1]
            counted[k - 1] += 1
        if len(hits) == block_size - 1:
            accepts.append(1 + (hits + [False]).index(False))
    return loss, denominator, right, counted, accepts


@pytest.mark.parametrize("scalings", SCALINGS)
@pytest.mark.parametrize(("block_size", "gamma"), [(2, 1.0), (5, 3.0), (8, 4.0), (11, 0.7)])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_sums_and_gradient_equal_the_loops(block_size, gamma, chunk, scalings):
    batch, slots, hidden, vocabulary = _case(block_size, gamma, **scalings)
    sums = objective_sums(hidden, slots, vocabulary, chunk_slots=chunk)
    loss, denominator, right, counted, accepts = _naive(batch, hidden, vocabulary, block_size, gamma)
    torch.testing.assert_close(sums.loss_sum, loss, rtol=1e-6, atol=0)
    (ours,), (theirs,) = torch.autograd.grad(3 * sums.loss_sum, hidden), torch.autograd.grad(3 * loss, hidden)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * theirs.abs().max())
    assert not ours[:, 0].any()
    values = sums.metrics.values.tolist()
    loss = float(loss.detach())
    assert values[:2] == pytest.approx([loss, denominator], rel=1e-6)
    assert slots.denominator == pytest.approx(denominator, rel=1e-12)
    assert values[2:4] == [sum(accepts), len(accepts)]
    assert values[4 : 3 + block_size] == right and values[3 + block_size :] == counted
    metrics = sums.metrics.read()
    assert metrics.loss == pytest.approx(loss / denominator, rel=1e-6)
    assert metrics.accuracy == pytest.approx(sum(right) / sum(counted))
    if accepts:
        assert metrics.accept_length == pytest.approx(sum(accepts) / len(accepts))


def test_accept_length_counts_leading_right_slots_of_whole_blocks():
    """Hidden states that point at their labels: a wrong slot ends the run, an unsupervised one drops the block."""
    block_size, vocabulary = 5, TargetVocabulary(torch.eye(9), torch.eye(9))
    labels = torch.tensor([[0, 1, 2, 3, 4]] * 5)
    supervised = torch.ones(5, block_size, dtype=torch.bool)
    supervised[4, 3] = False
    hidden = F.one_hot(labels, 9).float()
    hidden[1, 1] = hidden[2, 3] = hidden[3, 4] = F.one_hot(torch.tensor(8), 9).float()
    slots = TrainedSlots.labelled(supervised, labels, 4.0)
    values = objective_sums(hidden, slots, vocabulary).metrics.values.tolist()
    assert values[2:4] == [5 + 1 + 3 + 4, 4]
    assert values[4:8] == [4, 5, 3, 4] and values[8:] == [5, 5, 4, 5]


def test_means_of_nothing_are_nan_and_sums_add_up():
    total = MetricSums.zeros(5)
    assert total.values.numel() == MetricSums.width(5)
    empty = total.read()
    assert math.isnan(empty.accept_length) and math.isnan(empty.loss) and math.isnan(empty.accuracy_per_slot[3])
    _, slots, hidden, vocabulary = _case()
    sums = objective_sums(hidden, slots, vocabulary).metrics
    total.add_(sums)
    # What an fp32 all-reduce returns adds up as well.
    total.add_(MetricSums(sums.values.float()))
    assert total.read().accuracy == sums.read().accuracy
    assert total.read().loss == pytest.approx(sums.read().loss)


def test_nothing_supervised_gives_zero_loss_and_zero_gradient():
    batch, _, hidden, vocabulary = _case()
    blocks = Blocks.at(torch.tensor(ANCHORS), batch.lengths, 5)
    slots = TrainedSlots.of(blocks, batch.input_ids, torch.zeros_like(batch.loss_mask), 3.0)
    sums = objective_sums(hidden, slots, vocabulary)
    (grad,) = torch.autograd.grad(sums.loss_sum, hidden)
    assert slots.denominator == 0 and float(sums.loss_sum.detach()) == 0 and not grad.any()
    assert not sums.metrics.values.any()


def test_the_loss_of_a_step_is_one_sum_over_one_denominator():
    """Two micro-batches with unequal counts: gradients of sums, divided once, equal those of the joint loss."""
    batch, slots, hidden, vocabulary = _case()
    loss, denominator, *_ = _naive(batch, hidden, vocabulary, 5, 3.0)
    (joint,) = torch.autograd.grad(loss / denominator, hidden)
    parts, sums = [slice(0, 3), slice(3, None)], torch.zeros_like(hidden)
    total = 0.0
    for part in parts:
        blocks = Blocks.at(torch.tensor(ANCHORS[part]), batch.lengths, 5)
        some = TrainedSlots.of(blocks, batch.input_ids, batch.loss_mask, 3.0)
        (grad,) = torch.autograd.grad(objective_sums(hidden[part], some, vocabulary).loss_sum, hidden)
        sums, total = sums + grad, total + some.denominator
    torch.testing.assert_close(sums / total, joint, rtol=0, atol=1e-7 * joint.abs().max())


@pytest.mark.parametrize("scalings", SCALINGS)
def test_frozen_head_passes_gradcheck(scalings):
    _, slots, hidden, vocabulary = _case(**scalings)
    rows = hidden.detach().flatten(0, 1)[:6].requires_grad_()
    labels = torch.arange(6)
    assert torch.autograd.gradcheck(lambda h: frozen_head_cross_entropy(h, labels, vocabulary, 4)[0], rows)


def test_chunks_change_no_slot():
    _, _, hidden, vocabulary = _case()
    rows, labels = hidden.detach().flatten(0, 1), torch.arange(50) % 37
    whole, predicted = frozen_head_cross_entropy(rows, labels, vocabulary, 50)
    for chunk in (1, 3, 49, 1000):
        losses, tokens = frozen_head_cross_entropy(rows, labels, vocabulary, chunk)
        torch.testing.assert_close(losses, whole, rtol=1e-12, atol=1e-12)
        assert torch.equal(tokens, predicted)


def test_large_logits_neither_overflow_nor_lose_the_small_share():
    head = torch.eye(4, 4) * 1.0
    rows = torch.tensor([[500.0, -500.0, 0.0, 0.0], [3e4, 0.0, 0.0, 0.0]], requires_grad=True)
    losses, predicted = frozen_head_cross_entropy(rows, torch.tensor([1, 0]), TargetVocabulary(head, head))
    assert losses.tolist() == [1000.0, 0.0] and predicted.tolist() == [0, 0]
    (grad,) = torch.autograd.grad(losses.sum(), rows)
    assert grad.tolist() == [[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_a_half_precision_head_is_accumulated_in_fp32():
    _, _, hidden, vocabulary = _case()
    half = TargetVocabulary(vocabulary.embedding.bfloat16(), vocabulary.head.bfloat16())
    wide = TargetVocabulary(half.embedding.float(), half.head.float())
    labels = torch.arange(50) % 37
    for dtype in (torch.float32, torch.bfloat16):
        rows = hidden.detach().flatten(0, 1).to(dtype).requires_grad_()
        losses, _ = frozen_head_cross_entropy(rows, labels, half)
        twin = F.cross_entropy(rows.float() @ wide.head.T, labels, reduction="none")
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, twin, rtol=1e-5, atol=1e-5)
        (ours,), (theirs,) = torch.autograd.grad(losses.sum(), rows), torch.autograd.grad(twin.sum(), rows)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-5)
        torch.testing.assert_close(vocabulary_logits(rows.detach(), half), rows.detach().float() @ wide.head.T)


def test_tied_vocabularies_get_no_gradient():
    _, slots, hidden, vocabulary = _case()
    head = vocabulary.head.clone().requires_grad_()
    objective_sums(hidden, slots, TargetVocabulary(head, head)).loss_sum.backward()
    assert head.grad is None and hidden.grad is not None


def test_evaluation_makes_no_gradient():
    _, slots, hidden, vocabulary = _case()
    with torch.no_grad():
        assert not objective_sums(hidden, slots, vocabulary).loss_sum.requires_grad
    assert not objective_sums(hidden.detach(), slots, vocabulary).loss_sum.requires_grad


def test_the_whole_vocabulary_never_exists_for_all_slots():
    head = torch.randn(1000, 8)
    rows = torch.randn(300, 8, requires_grad=True)
    with LargestTensor() as largest:
        losses, _ = frozen_head_cross_entropy(rows, torch.arange(300), TargetVocabulary(head, head), 16)
        losses.sum().backward()
    assert largest.numel == 16 * 1000


def test_gamma_defaults_and_errors():
    assert [decay_gamma(size, None) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert decay_gamma(12, 3.5) == 3.5 and decay_gamma(8, 9.0) == 9.0
    with pytest.raises(ValueError, match="objective.gamma: must be given for block size 12"):
        decay_gamma(12, None)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="objective.gamma"):
            decay_gamma(8, wrong)
