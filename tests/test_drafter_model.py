"""The drafter against its dense twin, and its decoding path against its training path."""

import pytest
import torch
from helpers_drafter import dense_drafter, randomize, small_micro_batch, small_shape, small_vocabulary

from dflash.config import LayerType
from dflash.drafter.blocks import Blocks
from dflash.drafter.model import DFlashDrafter, RMSNorm, embed_blocks

LENGTHS = [13, 2, 25]
ANCHORS = [30, 0, 12, 13, 14, 22, 39, 15, 30]

SHAPES = {
    "mixed": {},
    "full": {"layer_types": ("full_attention",) * 2},
    "narrow window": {"sliding_window": 3, "block_size": 6},
    "non-causal": {"layer_types": ("sliding_attention",) * 2, "sliding_is_causal": False, "sliding_window": 4},
    "one key head": {"num_key_value_heads": 1, "num_attention_heads": 5, "rope_theta": 1e6, "block_size": 2},
    "no groups": {"num_key_value_heads": 3, "num_attention_heads": 3, "target_layer_ids": (3,)},
}


def _drafter(**changes) -> DFlashDrafter:
    drafter = DFlashDrafter(small_shape(**changes)).double()
    randomize(drafter)
    return drafter


def _inputs(drafter: DFlashDrafter) -> tuple[torch.Tensor, torch.Tensor]:
    shape = drafter.shape
    generator = torch.Generator().manual_seed(5)
    features_TF = torch.randn(sum(LENGTHS), shape.feature_width, generator=generator, dtype=torch.float64)
    tokens = small_micro_batch(LENGTHS).input_ids[torch.tensor(ANCHORS)]
    return features_TF, embed_blocks(small_vocabulary(shape), tokens, shape.mask_token_id, shape.block_size)


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_drafter_equals_its_dense_twin_with_gradients(changes):
    drafter = _drafter(**changes)
    features_TF, embeddings_NBH = _inputs(drafter)
    features_TF.requires_grad_(), embeddings_NBH.requires_grad_()
    blocks = Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), drafter.shape.block_size)
    hidden = drafter(features_TF, embeddings_NBH, blocks)
    weights = dict(drafter.named_parameters())
    twin = dense_drafter(weights, drafter.shape, features_TF, embeddings_NBH, ANCHORS, LENGTHS)
    torch.testing.assert_close(hidden, twin, rtol=0, atol=1e-5)
    grad = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    inputs = [*weights.values(), features_TF, embeddings_NBH]
    for ours, theirs in zip(
        torch.autograd.grad(hidden, inputs, grad), torch.autograd.grad(twin, inputs, grad), strict=True
    ):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("pieces", [(25,), (1, 7, 2, 15), (3,) * 8 + (1,)])
def test_decoding_equals_training_at_every_anchor(changes, pieces):
    drafter = _drafter(**changes)
    shape = drafter.shape
    length = sum(pieces)
    features_TF = torch.randn(
        length, shape.feature_width, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    )
    anchors = torch.arange(length)
    tokens = torch.randint(0, shape.vocab_size, (length,), generator=torch.Generator().manual_seed(9))
    embeddings = embed_blocks(small_vocabulary(shape), tokens, shape.mask_token_id, shape.block_size)
    trained = drafter(features_TF, embeddings, Blocks.at(anchors, torch.tensor([length]), shape.block_size))
    cache = drafter.new_cache(capacity=2)
    torch.testing.assert_close(drafter.draft_hidden(embeddings[0], cache, 0), trained[0], rtol=0, atol=1e-6)
    done = 0
    for piece in pieces:
        drafter.append_context(cache, features_TF[done : done + piece])
        done += piece
        for position in range(done):
            decoded = drafter.draft_hidden(embeddings[position], cache, position)
            torch.testing.assert_close(decoded, trained[position], rtol=0, atol=1e-6)


def test_a_shorter_block_equals_training_with_that_block_size():
    drafter = _drafter()
    shape = drafter.shape
    features_TF, _ = _inputs(drafter)
    embeddings = embed_blocks(small_vocabulary(shape), torch.tensor([4]), shape.mask_token_id, 3)
    trained = drafter(features_TF[:13], embeddings, Blocks.at(torch.tensor([9]), torch.tensor([13]), 3))
    cache = drafter.new_cache()
    drafter.append_context(cache, features_TF[:9])
    torch.testing.assert_close(drafter.draft_hidden(embeddings[0], cache, 9), trained[0], rtol=0, atol=1e-6)


def test_packing_does_not_show():
    """A document's blocks come out the same whether it is alone in its micro-batch or not."""
    drafter = _drafter()
    features_TF, embeddings_NBH = _inputs(drafter)
    together = drafter(
        features_TF, embeddings_NBH, Blocks.at(torch.tensor(ANCHORS), torch.tensor(LENGTHS), drafter.shape.block_size)
    )
    inside = [n for n, a in enumerate(ANCHORS) if a >= 15]
    alone = Blocks.at(torch.tensor([ANCHORS[n] - 15 for n in inside]), torch.tensor([25]), drafter.shape.block_size)
    torch.testing.assert_close(
        drafter(features_TF[15:], embeddings_NBH[inside], alone), together[inside], rtol=0, atol=1e-12
    )


def test_no_blocks_give_zero_gradients_not_none():
    drafter = _drafter()
    blocks = Blocks.at(torch.empty(0, dtype=torch.int64), torch.tensor(LENGTHS), drafter.shape.block_size)
    features_TF, embeddings_NBH = _inputs(drafter)
    drafter(features_TF, embeddings_NBH[:0], blocks).sum().backward()
    assert not drafter.norm.weight.grad.any()


def test_embed_blocks_scales_and_masks():
    shape = small_shape()
    vocabulary = small_vocabulary(shape, embedding_scale=3.0)
    embedded = embed_blocks(vocabulary, torch.tensor([4, 9], dtype=torch.int32), shape.mask_token_id, 4)
    rows = torch.tensor([[4, 36, 36, 36], [9, 36, 36, 36]])
    assert torch.equal(embedded, vocabulary.embedding[rows] * 3.0)


def test_norm_is_fp32_inside_whatever_comes_in():
    norm = RMSNorm(64, 1e-6)
    hidden = torch.randn(7, 64).bfloat16()
    out = norm(hidden)
    assert out.dtype == torch.bfloat16 and torch.equal(out, norm(hidden.float()).bfloat16())


def test_initialisation_depends_on_the_seed_alone():
    one, same, other = (DFlashDrafter(small_shape()).initialize(seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert all((p == 1).all() for p in one.parameters() if p.dim() == 1)
    assert 0.018 < one.fc.weight.std() < 0.022


def test_parameter_names_are_the_served_ones():
    layer = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    names = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    for i in range(3):
        names |= {f"layers.{i}.self_attn.{name}.weight" for name in layer}
        names |= {f"layers.{i}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
        names |= {f"layers.{i}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
    assert set(DFlashDrafter(small_shape()).state_dict()) == names


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"num_attention_heads": 5}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"mask_token_id": 37}, "mask_token_id=37"),
        ({"layer_types": ()}, "layer_types"),
        ({"layer_types": ("linear_attention",)}, "linear_attention"),
        ({"sliding_window": None}, "sliding_window"),
        ({"target_layer_ids": (1, 1)}, "each once"),
        ({"target_layer_ids": (5,)}, "target_layer_ids"),
        ({"hidden_size": 0}, "hidden_size=0"),
    ],
)
def test_impossible_shapes_are_named(changes, word):
    with pytest.raises(ValueError, match=word):
        small_shape(**changes)


def test_shapes_without_windows_have_one_spelling():
    layers = {"layer_types": ("full_attention",)}
    assert small_shape(**layers, sliding_window=9, sliding_is_causal=False) == small_shape(
        **layers, sliding_window=None
    )
    assert small_shape(**layers).layer_types == (LayerType.full_attention,)
