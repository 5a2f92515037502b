"""Buffers lent and returned, packed sections, bad features named."""

import pytest
import torch
from helpers_target import buffer_bytes, features_alone, forward, micro_batch_of, tiny_target

from dflash.batch import PackedHiddenStates
from dflash.target.capture import CapturedHiddenStates, FrozenTarget
from dflash.target.packing import BufferPool, HiddenStatePacker

CPU = torch.device("cpu")
IDS = [0, 3]


def test_pool_lends_each_buffer_once():
    pool = BufferPool(2, 48, CPU)
    first, second = pool.acquire(), pool.acquire()
    assert first.numel() == second.numel() == 48
    assert first.data_ptr() != second.data_ptr()
    assert pool.acquire() is None and pool.num_free == 0
    pool.release(first[:16])
    assert pool.acquire().data_ptr() == first.data_ptr()
    assert pool.acquire() is None


def test_releasing_twice_or_a_foreign_buffer_is_our_mistake():
    pool = BufferPool(1, 8, CPU)
    buffer = pool.acquire()
    pool.release(buffer)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(buffer)
    with pytest.raises(AssertionError, match="never acquired"):
        pool.release(torch.empty(8, dtype=torch.uint8))


def test_every_section_is_written_in_the_documents_own_order():
    target = FrozenTarget(tiny_target("llama"), IDS)
    target._overhead_tokens = 1
    micro_batch = micro_batch_of([40, 3, 17, 3, 1], index=11)
    captured = forward(target, micro_batch)
    assert len(captured.hidden) > 1, "several sub-batches, or the order is not put to the test"
    pool = BufferPool(1, buffer_bytes(micro_batch, target) + 100, CPU)
    buffer = pool.acquire()
    buffer.fill_(0xAB)
    packed = HiddenStatePacker(pool, target.feature_dtype, CPU).pack(captured, micro_batch, buffer)
    for name in ("input_ids", "loss_mask", "lengths", "document_ids"):
        assert torch.equal(getattr(packed, name), getattr(micro_batch, name))
        assert getattr(packed, name).dtype == getattr(micro_batch, name).dtype
    expected = features_alone(tiny_target("llama"), micro_batch, IDS)
    assert (packed.features - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert packed.trailer.view(torch.uint8).eq(0xAB).all(), "the trailer is the transport's to write"
    assert buffer[packed.layout.num_bytes :].eq(0xAB).all()


def test_packing_copies_the_captured_bits():
    target = FrozenTarget(tiny_target("llama").bfloat16(), IDS)
    micro_batch = micro_batch_of([6, 6, 6])
    captured = forward(target, micro_batch)
    pool = BufferPool(1, buffer_bytes(micro_batch, target), CPU)
    packed = HiddenStatePacker(pool, target.feature_dtype, CPU).pack(captured, micro_batch, pool.acquire())
    assert torch.equal(packed.features, torch.cat([hidden.flatten(0, 1) for hidden in captured.hidden[0]], dim=-1))


def test_a_reused_buffer_holds_only_the_newer_micro_batch():
    target = FrozenTarget(tiny_target("qwen3"), IDS)
    large, small = micro_batch_of([30, 21]), micro_batch_of([4, 9, 1], index=1, seed=5)
    pool = BufferPool(1, buffer_bytes(large, target), CPU)
    packer = HiddenStatePacker(pool, target.feature_dtype, CPU)
    first = packer.pack(forward(target, large), large, pool.acquire())
    pool.release(first.buffer)
    second = packer.pack(forward(target, small), small, pool.acquire())
    assert second.buffer.data_ptr() == first.buffer.data_ptr()
    expected = features_alone(tiny_target("qwen3"), small, IDS)
    assert (second.features - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_packed_features_can_be_trained_on():
    target = FrozenTarget(tiny_target("qwen3"), IDS)
    micro_batch = micro_batch_of([4, 9])
    pool = BufferPool(1, buffer_bytes(micro_batch, target), CPU)
    packed = HiddenStatePacker(pool, target.feature_dtype, CPU).pack(
        forward(target, micro_batch), micro_batch, pool.acquire()
    )
    weight = torch.ones(target.feature_width, 2, requires_grad=True)
    (packed.features @ weight).sum().backward()
    torch.testing.assert_close(weight.grad[:, 0], packed.features.sum(0))


def test_a_micro_batch_too_large_for_the_buffers_is_our_mistake():
    target = FrozenTarget(tiny_target("llama"), IDS)
    micro_batch = micro_batch_of([8])
    pool = BufferPool(1, buffer_bytes(micro_batch, target) - 1, CPU)
    with pytest.raises(AssertionError, match="micro-batch 0 needs"):
        HiddenStatePacker(pool, target.feature_dtype, CPU).pack(
            forward(target, micro_batch), micro_batch, pool.acquire()
        )


def pack_values(value: float, at: int | None = None) -> PackedHiddenStates:
    micro_batch = micro_batch_of([2, 3], index=42)
    hidden = torch.zeros(2, 3, 4)
    hidden.view(-1)[slice(None) if at is None else at] = value
    captured = CapturedHiddenStates(((hidden, hidden),), torch.tensor([0, 1, 3, 4, 5]))
    pool = BufferPool(1, 4096, CPU)
    packer = HiddenStatePacker(pool, torch.float32, CPU)
    packed = packer.pack(captured, micro_batch, pool.acquire())
    packer.raise_if_bad(wait=True)
    return packed


def test_zero_features_name_the_documents():
    with pytest.raises(ValueError, match=r"micro-batch 42 are all zero.*\[1000, 1007\]"):
        pack_values(0.0)


@pytest.mark.parametrize(("value", "at"), [(float("nan"), 21), (float("nan"), None), (float("-inf"), 5)])
def test_what_is_not_finite_goes_on_to_the_drafters(value: float, at: int | None):
    assert not torch.isfinite(pack_values(value, at).features).all()


def test_one_nonzero_feature_is_enough_and_padding_does_not_count():
    pack_values(-1.0, at=0)
    pack_values(2.0)
    padding_slot = 2 * 4  # the third token of the first, two-token document
    with pytest.raises(ValueError, match="all zero"):
        pack_values(1.0, at=padding_slot)


def test_a_broken_target_is_found_through_its_features():
    model = tiny_target("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    target = FrozenTarget(model, IDS)
    micro_batch = micro_batch_of([5, 1])
    pool = BufferPool(1, buffer_bytes(micro_batch, target), CPU)
    with pytest.raises(ValueError, match=r"all zero.*\[1000, 1007\]"):
        HiddenStatePacker(pool, target.feature_dtype, CPU).pack(
            forward(target, micro_batch), micro_batch, pool.acquire()
        )
