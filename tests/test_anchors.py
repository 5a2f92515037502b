"""The anchor draw against a plain reading of the rule, and its independence from packing."""

import math

import pytest
import torch
from helpers_drafter import small_micro_batch

from dflash.batch import MicroBatch
from dflash.drafter.anchors import draw_anchors

LENGTHS = [40, 1, 2, 75, 3, 120, 33]


def _draw(batch: MicroBatch, **changes):
    settings = dict(block_size=8, per_token=1 / 6, max_per_document=512, seed=11, epoch=2)
    return draw_anchors(batch, **{**settings, **changes})


def _by_document(batch: MicroBatch, anchors: torch.Tensor) -> dict[int, list[int]]:
    """Document id to the places of its anchors within the document."""
    found, start = {}, 0
    for name, length in zip(batch.document_ids.tolist(), batch.lengths.tolist(), strict=True):
        found[name] = [a - start for a in anchors.tolist() if start <= a < start + length]
        start += length
    return found


def _eligible(mask: list[int]) -> list[int]:
    return [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


@pytest.mark.parametrize("per_token", [1 / 6, 0.5, 0.01, 2.0])
@pytest.mark.parametrize("max_per_document", [1, 7, 512])
def test_counts_and_eligibility_follow_the_rule(per_token, max_per_document):
    batch = small_micro_batch(LENGTHS)
    blocks = _draw(batch, per_token=per_token, max_per_document=max_per_document)
    assert torch.equal(blocks.anchors, blocks.anchors.unique())
    drawn, start = _by_document(batch, blocks.anchors), 0
    for name, length in zip(batch.document_ids.tolist(), LENGTHS, strict=True):
        mask = batch.loss_mask[start : start + length].tolist()
        eligible = _eligible(mask)
        wanted = min(max(1, math.ceil(per_token * sum(mask) - 1e-9)), max_per_document, len(eligible))
        assert len(drawn[name]) == wanted and set(drawn[name]) <= set(eligible)
        start += length


def test_whole_products_are_not_rounded_up():
    for supervised in range(6, 3073, 6):
        batch = MicroBatch(
            0,
            torch.tensor([3]),
            torch.tensor([supervised], dtype=torch.int32),
            torch.zeros(supervised, dtype=torch.int32),
            torch.ones(supervised, dtype=torch.uint8),
        )
        assert _draw(batch).num_blocks == min(supervised // 6, supervised - 1)
        assert _draw(batch, per_token=0.1).num_blocks == math.ceil(supervised / 10)


def test_a_document_draws_the_same_anchors_in_any_company():
    batch = small_micro_batch(LENGTHS)
    whole = _by_document(batch, _draw(batch).anchors)
    tokens, masks = batch.input_ids.split(LENGTHS), batch.loss_mask.split(LENGTHS)
    for order in ([6, 3, 0], [5], [2, 1, 3, 4, 5, 0, 6]):
        other = MicroBatch(
            9,
            batch.document_ids[order],
            batch.lengths[order],
            torch.cat([tokens[i] for i in order]),
            torch.cat([masks[i] for i in order]),
        )
        for name, anchors in _by_document(other, _draw(other).anchors).items():
            assert anchors == whole[name]


def test_seed_epoch_and_document_each_change_the_draw():
    batch = small_micro_batch([400], share=1.0)
    other = MicroBatch(0, batch.document_ids + 1, batch.lengths, batch.input_ids, batch.loss_mask)
    draws = [_draw(batch), _draw(batch, seed=12), _draw(batch, epoch=3), _draw(other)]
    draws += [_draw(batch, epoch=12), _draw(batch, seed=2, epoch=11)]
    for i, one in enumerate(draws):
        assert torch.equal(one.anchors, _draw(batch).anchors) == (i == 0)


def test_the_draw_is_uniform():
    """Each of 30 eligible tokens is drawn in a sixth of many epochs, and pairs are drawn independently."""
    batch = small_micro_batch([31], share=1.0)
    num_epochs = 4000
    counts, pairs = torch.zeros(31), torch.zeros(31, 31)
    for epoch in range(num_epochs):
        chosen = torch.zeros(31)
        chosen[_draw(batch, epoch=epoch).anchors] = 1
        counts += chosen
        pairs += chosen[:, None] * chosen
    share = 6 / 30
    assert counts[30] == 0
    deviation = math.sqrt(num_epochs * share * (1 - share))
    assert ((counts[:30] - num_epochs * share).abs() < 4.5 * deviation).all()
    joint = num_epochs * share * 5 / 29
    off = pairs[:30, :30][~torch.eye(30, dtype=torch.bool)]
    assert ((off - joint).abs() < 5 * math.sqrt(joint)).all()


@pytest.mark.parametrize("mask", [[0, 0, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1], [1], []])
def test_documents_without_an_eligible_token_draw_nothing(mask):
    lengths = [len(mask)] if mask else []
    batch = MicroBatch(
        0,
        torch.arange(len(lengths)),
        torch.tensor(lengths, dtype=torch.int32),
        torch.zeros(len(mask), dtype=torch.int32),
        torch.tensor(mask, dtype=torch.uint8),
    )
    assert _draw(batch).num_blocks == 0


def test_the_last_token_of_a_document_does_not_borrow_from_the_next():
    batch = MicroBatch(
        0,
        torch.arange(2),
        torch.tensor([3, 3], dtype=torch.int32),
        torch.zeros(6, dtype=torch.int32),
        torch.tensor([0, 0, 1, 1, 0, 0], dtype=torch.uint8),
    )
    assert _draw(batch).num_blocks == 0
