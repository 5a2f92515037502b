"""Both attention paths against a dense twin: values, gradients, visibility, memory."""

import itertools
import warnings

import pytest
import torch
from helpers_drafter import LargestTensor, dense_attention, visible_mask

from dflash.drafter import attention_tiles
from dflash.drafter.attention import plan_attention
from dflash.drafter.attention_flex import FlexAttend
from dflash.drafter.attention_tiles import TiledAttend
from dflash.drafter.blocks import Blocks, Visibility

LENGTHS = [17, 1, 40, 3, 29]
# Unsorted, repeated, first and last tokens of documents, blocks that hang over their document's end.
ANCHORS = [70, 5, 16, 0, 17, 18, 57, 30, 31, 5, 58, 61, 89, 71, 72]

# window, causal, block size, query heads, key heads, head dim
SETTINGS = [
    (None, True, 5, 6, 2, 8),
    (7, True, 5, 6, 2, 8),
    (3, True, 6, 4, 4, 16),
    (9, False, 5, 3, 1, 8),
    (3, False, 7, 6, 3, 8),
    (1, True, 4, 2, 1, 8),
    (200, True, 2, 2, 2, 4),
    (None, True, 16, 4, 1, 12),
]


def _inputs(num_blocks: int, num_tokens: int, block_size: int, heads: int, key_heads: int, dim: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (num_blocks, block_size, heads, dim),
        (num_tokens, key_heads, dim),
        (num_tokens, key_heads, dim),
        (num_blocks, block_size, key_heads, dim),
        (num_blocks, block_size, key_heads, dim),
    ]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize(("window", "causal", "block_size", "heads", "key_heads", "dim"), SETTINGS)
def test_tiles_equal_dense_attention_with_gradients(window, causal, block_size, heads, key_heads, dim):
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), block_size)
    inputs = _inputs(len(ANCHORS), sum(LENGTHS), block_size, heads, key_heads, dim)
    mask = visible_mask(ANCHORS, LENGTHS, block_size, window, causal)
    out = plan_attention(blocks, Visibility(window, causal), heads)(*inputs)
    twin = dense_attention(*inputs, mask)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(out, twin, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(twin, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "causal", "block_size", "heads", "key_heads", "dim"), SETTINGS)
def test_flex_equals_dense_attention(window, causal, block_size, heads, key_heads, dim):
    """FlexAttention runs eagerly on CPU, forward only: its mask code is executed as it is on CUDA."""
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), block_size)
    inputs = _inputs(len(ANCHORS), sum(LENGTHS), block_size, heads, key_heads, dim)
    mask = visible_mask(ANCHORS, LENGTHS, block_size, window, causal)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = FlexAttend(blocks, Visibility(window, causal))(*inputs)
        torch.testing.assert_close(out, dense_attention(*inputs, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "causal"), [(None, True), (4, True), (1, True), (4, False), (9, False)])
def test_flex_block_mask_equals_the_text(window, causal):
    """The dense form of FlexAttention's mask, bit for bit, over several tiles and with padding on both sides."""
    block_size = 3
    lengths, anchors = [90, 61], sorted(range(0, 151, 3), key=lambda a: (a * 37) % 101)
    blocks = Blocks.at(torch.tensor(anchors), torch.tensor(lengths), block_size)
    plan = FlexAttend(blocks, Visibility(window, causal))
    num_queries, num_tokens = len(anchors) * block_size, sum(lengths)
    query, key = torch.arange(num_queries)[:, None], torch.arange(num_tokens + plan.context_padding + num_queries)
    dense = plan.mask.mask_mod(None, None, query, key)
    assert not dense[:, num_tokens : num_tokens + plan.context_padding].any()
    kept = torch.cat((dense[:, :num_tokens], dense[:, num_tokens + plan.context_padding :]), dim=1)
    assert torch.equal(kept, visible_mask(anchors, lengths, block_size, window, causal).flatten(0, 1))


@pytest.mark.parametrize("window", [None, 6])
def test_small_tiles_change_nothing(window, monkeypatch):
    """Runs cut short and tiles of one run give the same attention: how blocks are grouped never shows."""
    block_size, heads = 4, 4
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), block_size)
    inputs = _inputs(len(ANCHORS), sum(LENGTHS), block_size, heads, 2, 8)
    whole = TiledAttend(blocks, Visibility(window), heads)
    monkeypatch.setattr(attention_tiles, "_SLOTS_PER_RUN", 2 * block_size)
    monkeypatch.setattr(attention_tiles, "_SCORES_PER_TILE", 700)
    cut = TiledAttend(blocks, Visibility(window), heads)
    assert len(cut.tiles) > len(whole.tiles)
    one, other = whole(*inputs), cut(*inputs)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
    grad = torch.ones_like(one)
    for a, b in zip(torch.autograd.grad(one, inputs, grad), torch.autograd.grad(other, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5, 7, 10])
@pytest.mark.parametrize("window", [None, 6])
def test_runs_of_unequal_length_have_the_dense_gradients(num_blocks, window, monkeypatch):
    """Runs of a tile are padded to the longest, with places whose gradient must vanish in every sum."""
    block_size, heads, lengths = 4, 4, [60, 25]
    anchors = [3 + 5 * n for n in range(num_blocks)] + [62, 70]
    monkeypatch.setattr(attention_tiles, "_SLOTS_PER_RUN", 3 * block_size)
    monkeypatch.setattr(attention_tiles, "_MAX_PADDING_RATIO", 100.0)  # all runs in one tile
    blocks = Blocks.at(torch.tensor(anchors), torch.tensor(lengths), block_size)
    inputs = _inputs(len(anchors), sum(lengths), block_size, heads, 2, 8)
    out = TiledAttend(blocks, Visibility(window), heads)(*inputs)
    twin = dense_attention(*inputs, visible_mask(anchors, lengths, block_size, window, True))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(out, twin, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(twin, inputs, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_every_block_is_in_one_tile_and_tiles_keep_their_budget():
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 300, (40,), generator=generator)
    anchors = torch.randint(0, int(lengths.sum()), (700,), generator=generator)
    heads, block_size = 9, 8
    for window in (None, 32):
        plan = TiledAttend(Blocks.at(anchors, lengths, block_size), Visibility(window), heads)
        assert torch.equal(torch.cat([tile.blocks for tile in plan.tiles]).sort().values, torch.arange(700))
        for tile in plan.tiles:
            num_keys = tile.tokens.numel() // tile.num_runs + block_size
            assert tile.gather.numel() * num_keys * block_size * heads <= attention_tiles._SCORES_PER_TILE


def test_no_dense_score_matrix_exists(monkeypatch):
    """The largest tensor made, forward and backward, stays far below [N*B, S + N*B] per head."""
    num_tokens, block_size, heads = 3000, 8, 2
    monkeypatch.setattr(attention_tiles, "_SCORES_PER_TILE", 1 << 16)
    anchors = torch.arange(0, num_tokens, 6)
    blocks = Blocks.at(anchors, torch.tensor([num_tokens]), block_size)
    inputs = _inputs(anchors.numel(), num_tokens, block_size, heads, 1, 4)
    dense = anchors.numel() * block_size * (num_tokens + anchors.numel() * block_size)
    for window in (None, 64):
        with LargestTensor() as largest:
            plan_attention(blocks, Visibility(window), heads)(*inputs).sum().backward()
        assert 0 < largest.numel * 10 < dense


def test_half_precision_is_computed_in_fp32():
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), 4)
    inputs = [tensor.detach().bfloat16() for tensor in _inputs(len(ANCHORS), sum(LENGTHS), 4, 2, 1, 8)]
    plan = TiledAttend(blocks, Visibility(), 2)
    assert torch.equal(plan(*inputs), plan(*[tensor.float() for tensor in inputs]).bfloat16())


def test_no_blocks_at_all():
    blocks = Blocks.at(torch.empty(0, dtype=torch.int64), torch.tensor([4, 3]), 4)
    inputs = _inputs(0, 7, 4, 2, 1, 8)
    for plan in (TiledAttend(blocks, Visibility(), 2), FlexAttend(blocks, Visibility())):
        assert plan(*inputs).shape == (0, 4, 2, 8)


@pytest.mark.parametrize(("window", "causal"), list(itertools.product([None, 1, 3, 8, 50], [True, False])))
def test_blocks_positions_and_ranges(window, causal):
    """The derived tensors of `Blocks`, one by one, and its visibility asked for every pair at once."""
    block_size = 4
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), block_size)
    starts = [sum(LENGTHS[:d]) for d, length in enumerate(LENGTHS) for _ in range(length)]
    ends = [sum(LENGTHS[: d + 1]) for d, length in enumerate(LENGTHS) for _ in range(length)]
    assert blocks.starts.tolist() == [starts[a] for a in ANCHORS]
    assert blocks.ends.tolist() == [ends[a] for a in ANCHORS]
    assert blocks.positions_NB.tolist() == [[a - starts[a] + j for j in range(block_size)] for a in ANCHORS]
    assert blocks.tokens_NB.tolist() == [[a + j for j in range(block_size)] for a in ANCHORS]
    assert blocks.in_document_NB.tolist() == [[a + j < ends[a] for j in range(block_size)] for a in ANCHORS]
    visibility, slots = Visibility(window, causal), torch.arange(block_size)
    seen = visibility.of_context(
        blocks.starts[:, None, None], blocks.anchors[:, None, None], slots[:, None], torch.arange(blocks.num_tokens)
    )
    mask = visible_mask(ANCHORS, LENGTHS, block_size, window, causal)
    assert torch.equal(seen.expand(-1, block_size, -1), mask[:, :, : blocks.num_tokens])
    own = mask[0, :, blocks.num_tokens : blocks.num_tokens + block_size]
    assert torch.equal(visibility.of_block(slots[:, None], slots), own)
