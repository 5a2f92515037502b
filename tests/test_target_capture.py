"""Captured features of right-padded sub-batches against each document alone, and what truncation leaves."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers_target import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    VOCAB_SIZE,
    buffer_bytes,
    features_alone,
    forward,
    micro_batch_of,
    tiny_target,
)
from torch import Tensor, nn
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, PreTrainedModel, masking_utils

from dflash.batch import MicroBatch
from dflash.target.capture import FrozenTarget, plan_sub_batches
from dflash.target.packing import BufferPool, HiddenStatePacker

ODD_LENGTHS = [65, 1, 63, 2, 130, 64, 7, 3, 65, 31]
CPU = torch.device("cpu")
ARCHITECTURES = ["llama", "qwen3", "qwen3_sliding", "gemma2", "gemma3", "granite", "qwen3_5"]


def packed_features(target: FrozenTarget, micro_batch: MicroBatch) -> Tensor:
    pool = BufferPool(1, buffer_bytes(micro_batch, target), CPU)
    packer = HiddenStatePacker(pool, target.feature_dtype, CPU)
    return packer.pack(forward(target, micro_batch), micro_batch, pool.acquire()).features


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("overhead_tokens", [1, 20, 10_000])
def test_features_equal_those_of_each_document_alone(name: str, overhead_tokens: int):
    ids = [0, 2, 4]
    micro_batch = micro_batch_of(ODD_LENGTHS)
    expected = features_alone(tiny_target(name), micro_batch, ids)
    target = FrozenTarget(tiny_target(name), ids)
    target._overhead_tokens = overhead_tokens  # from a sub-batch per length to one for all
    assert_close(packed_features(target, micro_batch), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_single_token_documents_and_repeated_use(name: str):
    target = FrozenTarget(tiny_target(name), [1, 3])
    for seed, lengths in enumerate(([1], [1, 1, 1], [64], [2, 1])):
        micro_batch = micro_batch_of(lengths, seed=seed)
        assert_close(packed_features(target, micro_batch), features_alone(tiny_target(name), micro_batch, [1, 3]))


def test_the_final_normed_state_is_one_more_feature():
    micro_batch = micro_batch_of([5, 9, 2])
    expected = features_alone(tiny_target("qwen3"), micro_batch, [1, 3, NUM_LAYERS - 1])  # Transformers norms the last
    target = FrozenTarget(tiny_target("qwen3"), [1, 3], keep_final_norm=True)
    assert target.feature_width == 3 * HIDDEN_SIZE
    assert_close(packed_features(target, micro_batch), expected)


def test_bfloat16_features():
    model = tiny_target("llama").bfloat16()
    micro_batch = micro_batch_of(ODD_LENGTHS)
    expected = features_alone(model, micro_batch, [1, 4])
    target = FrozenTarget(model, [1, 4])
    features = packed_features(target, micro_batch)
    assert target.feature_dtype == features.dtype == torch.bfloat16
    assert_close(features.float(), expected.float(), tolerance=0.02)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
def test_truncation_frees_layers_norm_and_head(name: str):
    model = tiny_target(name, tie_word_embeddings=False)
    decoder = model.get_decoder()
    dropped = [weakref.ref(p) for layer in decoder.layers[3:] for p in layer.parameters()]
    dropped += [weakref.ref(decoder.norm.weight), weakref.ref(model.get_output_embeddings().weight)]
    kept = num_parameters(decoder.embed_tokens) + sum(num_parameters(layer) for layer in decoder.layers[:3])
    target = FrozenTarget(model, [0, 2])
    gc.collect()
    assert all(reference() is None for reference in dropped)
    assert num_parameters(model) == kept
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert decoder.config.num_hidden_layers == 3
    assert model.config.num_hidden_layers == NUM_LAYERS, "to others the config still describes the whole target"
    del target


def test_multimodal_wrapper_keeps_only_its_text_layers():
    text = tiny_target("gemma3")
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(
        text_config=text.config.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_id=VOCAB_SIZE - 1,
        boi_token_id=VOCAB_SIZE - 2,
        eoi_token_id=VOCAB_SIZE - 3,
    )
    model = Gemma3ForConditionalGeneration(config).eval()
    model.get_decoder().load_state_dict(text.get_decoder().state_dict())
    micro_batch = micro_batch_of([4, 11])
    expected = features_alone(text, micro_batch, [1, 2])
    decoder = model.get_decoder()
    target = FrozenTarget(model, [1, 2])
    assert num_parameters(model) == num_parameters(decoder)
    assert_close(packed_features(target, micro_batch), expected)


def test_no_mask_is_built_for_full_attention_and_no_position_is_read(monkeypatch: pytest.MonkeyPatch):
    target = FrozenTarget(tiny_target("llama"), [1])
    masks: list[object] = []
    attention = target._decoder.layers[0].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )

    def probe(position_ids: Tensor) -> None:
        raise AssertionError("this look at the position ids synchronises the device")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", probe)
    forward(target, micro_batch_of([3, 5]))
    assert masks == [None]
    assert masking_utils.find_packed_sequence_indices is probe, "put back after the forward"


def test_wrong_layer_ids_and_unknown_architectures_are_value_errors():
    with pytest.raises(ValueError, match=r"model\.drafter\.target_layer_ids: 5 is the target's last layer"):
        FrozenTarget(tiny_target("llama"), [2, 5])
    model = tiny_target("llama")
    model.model.more_layers = nn.ModuleList(nn.Identity() for _ in range(NUM_LAYERS))
    with pytest.raises(ValueError, match="has 2 lists of 6 layers"):
        FrozenTarget(model, [2])


def test_layers_that_give_no_hidden_state_per_token_are_a_value_error():
    model: PreTrainedModel = tiny_target("llama")
    model.model.layers[1].register_forward_hook(lambda module, args, output: output[None])
    with pytest.raises(ValueError, match="not one hidden state of 32 per token"):
        forward(FrozenTarget(model, [1]), micro_batch_of([3]))


def cheapest_split(lengths: list[int], overhead: int) -> int:
    """Naive twin: every way to cut the sorted documents."""
    lengths = sorted(lengths)
    best = None
    for cuts in range(2 ** (len(lengths) - 1)):
        cost, rows = 0, 0
        for place, length in enumerate(lengths):
            rows += 1
            if place == len(lengths) - 1 or cuts >> place & 1:
                cost, rows = cost + rows * length + overhead, 0
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("overhead", [1, 7, 20, 300])
def test_the_split_is_the_cheapest_there_is(overhead: int):
    generator = np.random.default_rng(overhead)
    for _ in range(20):
        lengths = generator.integers(1, 60, generator.integers(1, 10))
        plan = plan_sub_batches(lengths, overhead)
        cost = sum(rows * length + overhead for rows, length in plan.shapes)
        assert cost == cheapest_split(lengths.tolist(), overhead)
        assert plan.num_slots == sum(rows * length for rows, length in plan.shapes)


def test_token_slots_are_the_places_of_a_naive_layout():
    lengths = np.array(ODD_LENGTHS, dtype=np.int32)
    for overhead in (1, 20, 1000):
        plan = plan_sub_batches(lengths, overhead)
        flat = np.full(plan.num_slots, -1)
        token_of = np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1])
        documents = iter(sorted(token_of, key=len))
        start = 0
        for rows, length in plan.shapes:
            for _ in range(rows):
                document = next(documents)
                flat[start : start + len(document)] = document
                start += length
        assert np.array_equal(flat[plan.token_slots_T], np.arange(lengths.sum()))


def test_no_sub_batch_crosses_the_rope_boundary():
    plan = plan_sub_batches(np.array([9, 10, 11, 12, 3]), 10_000, boundary=10)
    assert plan.shapes == ((3, 10), (2, 12))
    assert plan_sub_batches(np.array([9, 3]), 10_000, boundary=10).shapes == ((2, 9),)


def test_longrope_documents_keep_their_own_frequencies():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    }
    model = tiny_target("llama", rope_parameters=rope)
    micro_batch = micro_batch_of([20, 16, 3, 17])
    expected = features_alone(model, micro_batch, [1, 4])
    assert_close(packed_features(FrozenTarget(model, [1, 4]), micro_batch), expected)
