"""Packed rows from end to end: every document draws its own share, and no block sees what is not its own."""

import itertools
import math
import random

import pytest
import torch
from helpers_drafter import randomize, small_shape, small_vocabulary, visible_mask
from torch import Tensor

from dflash.batch import MicroBatch
from dflash.drafter.anchors import draw_anchors
from dflash.drafter.blocks import Blocks
from dflash.drafter.model import DFlashDrafter, embed_blocks

Document = tuple[int, list[int]]  # its id, and its loss mask

PER_TOKEN = 1 / 6
MAX_PER_DOCUMENT = 40


def _documents(draw: random.Random, count: int) -> list[Document]:
    """Mostly short ones, some a hundred times as long, with masks from empty to full."""
    documents = []
    for document_id in draw.sample(range(10**12), count):
        length = draw.choice([draw.randint(1, 9), draw.randint(2, 60), draw.randint(200, 700)])
        share = draw.choice([0.0, 0.3, 0.8, 1.0, 1.0])
        documents.append((document_id, [int(draw.random() < share) for _ in range(length)]))
    return documents


def _micro_batch(documents: list[Document]) -> MicroBatch:
    mask = [value for _, values in documents for value in values]
    return MicroBatch(
        index=0,
        document_ids=torch.tensor([document_id for document_id, _ in documents]),
        lengths=torch.tensor([len(values) for _, values in documents], dtype=torch.int32),
        input_ids=torch.zeros(len(mask), dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
    )


def _draw(documents: list[Document], epoch: int = 0) -> dict[int, tuple[int, ...]]:
    """Document id to the places of its anchors within it, for documents of one packed row."""
    settings = {"per_token": PER_TOKEN, "max_per_document": MAX_PER_DOCUMENT, "seed": 5, "epoch": epoch}
    anchors = draw_anchors(_micro_batch(documents), block_size=8, **settings).anchors.tolist()
    starts = itertools.accumulate((len(values) for _, values in documents), initial=0)
    return {
        document_id: tuple(a - start for a in anchors if start <= a < start + len(values))
        for (document_id, values), start in zip(documents, starts, strict=False)
    }


def _share(mask: list[int]) -> int:
    num_eligible = sum(a and b for a, b in itertools.pairwise(mask))
    wanted = max(1, math.ceil(round(PER_TOKEN * sum(mask), 9)))
    return min(wanted, MAX_PER_DOCUMENT, num_eligible)


def _packed(documents: list[Document], num_tokens: int) -> list[list[Document]]:
    """First fit in the given order: rows of at most `num_tokens`, or of one document."""
    rows: list[list[Document]] = []
    for document in documents:
        if rows and sum(len(values) for _, values in [*rows[-1], document]) <= num_tokens:
            rows[-1].append(document)
        else:
            rows.append([document])
    return rows


@pytest.mark.parametrize("seed", range(25))
def test_every_document_gets_its_share_in_any_packing(seed: int) -> None:
    """The count is the document's own, and so are the anchors: alone, in any row, order, and split over ranks."""
    draw = random.Random(seed)
    documents = _documents(draw, draw.randint(2, 40))
    alone = {document_id: places for document in documents for document_id, places in _draw([document]).items()}
    for document_id, mask in documents:
        assert len(alone[document_id]) == _share(mask)
        assert all(mask[place] and mask[place + 1] for place in alone[document_id])
    for num_tokens in (1, 64, 1024, 10**6):
        rows = _packed(draw.sample(documents, len(documents)), num_tokens)
        found: dict[int, tuple[int, ...]] = {}
        for row in rows:
            found |= _draw(row)
        assert found == alone
    for num_ranks in (1, 2, 3):
        found = {}
        for rank in range(num_ranks):
            for row in rows[rank::num_ranks]:
                found |= _draw(row)
        assert found == alone


@pytest.mark.parametrize("seed", range(10))
def test_a_neighbour_takes_nothing_away(seed: int) -> None:
    """Whatever the other documents of the row become, longer, shorter, unsupervised, a document's draw stays."""
    draw = random.Random(100 + seed)
    documents = _documents(draw, 12)
    kept = draw.randrange(12)
    own, places = documents[kept][0], _draw(documents)[documents[kept][0]]
    for _ in range(8):
        others = _documents(draw, 12)
        assert _draw([*others[:kept], documents[kept], *others[kept + 1 :]])[own] == places


def test_short_documents_beside_a_long_one_get_theirs() -> None:
    """A draw over the whole row would leave most of the short ones without an anchor: they hold 3 % of its tokens."""
    shorts: list[Document] = [(document_id, [1] * 3) for document_id in range(30)]
    row = [*shorts[:15], (99, [1] * 3000), *shorts[15:]]
    for epoch in range(20):
        drawn = _draw(row, epoch)
        assert all(len(drawn[document_id]) == 1 for document_id, _ in shorts)
        assert len(drawn[99]) == MAX_PER_DOCUMENT


# What a block sees, through the whole drafter

LENGTHS = [23, 2, 41, 5, 3, 30]
KINDS = {
    "full": {"layer_types": ("full_attention",) * 2},
    "sliding causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6},
    "sliding non-causal": {
        "layer_types": ("sliding_attention",) * 2,
        "sliding_window": 6,
        "sliding_is_causal": False,
    },
    "mixed": {},
}


class Row:
    """A drafter and a packed row with blocks on drawn anchors; short documents have theirs."""

    def __init__(self, changes: dict) -> None:
        self.drafter = DFlashDrafter(small_shape(**changes))
        randomize(self.drafter)
        shape, generator = self.drafter.shape, torch.Generator().manual_seed(3)
        self.window = shape.sliding_window
        documents = [(7 * d, [1] * length) for d, length in enumerate(LENGTHS)]
        self.blocks = draw_anchors(
            _micro_batch(documents), block_size=shape.block_size, per_token=0.3, max_per_document=9, seed=1, epoch=0
        )
        self.document_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        self.document_N = self.document_T[self.blocks.anchors]
        assert self.document_N.unique().numel() == len(LENGTHS)
        self.features_TF = torch.randn(sum(LENGTHS), shape.feature_width, generator=generator)
        self.tokens_N = torch.randint(0, 30, (self.blocks.num_blocks,), generator=generator)

    def hidden(self, features_TF: Tensor | None = None, tokens_N: Tensor | None = None) -> Tensor:
        """Hidden states [N, B, H], in places of the row's own features and anchor tokens with those given."""
        shape = self.drafter.shape
        tokens_N = self.tokens_N if tokens_N is None else tokens_N
        embeddings = embed_blocks(small_vocabulary(shape), tokens_N, shape.mask_token_id, shape.block_size)
        features_TF = self.features_TF if features_TF is None else features_TF
        return self.drafter(features_TF, embeddings.float(), self.blocks)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
@torch.no_grad()
def test_what_is_not_a_blocks_own_does_not_show_in_a_bit(changes: dict) -> None:
    """Other features and tokens in all other documents; other tokens under all other blocks."""
    row = Row(changes)
    hidden = row.hidden()
    for document in range(len(LENGTHS)):
        elsewhere = row.document_T != document
        for scale in (1.0, -50.0, 1e4):
            features_TF = torch.where(elsewhere[:, None], scale * row.features_TF.flip(0), row.features_TF)
            tokens_N = torch.where(row.document_N != document, 36 - row.tokens_N, row.tokens_N)
            other = row.hidden(features_TF, tokens_N)
            own = row.document_N == document
            assert torch.equal(other[own], hidden[own])
            assert not (other[~own] == hidden[~own]).all(dim=(1, 2)).any(), "the change is one that shows where it may"
    for block in range(row.blocks.num_blocks):
        tokens_N = 36 - row.tokens_N
        tokens_N[block] = row.tokens_N[block]
        other = row.hidden(tokens_N=tokens_N)
        assert torch.equal(other[block], hidden[block])
        rest = torch.arange(row.blocks.num_blocks) != block
        assert not (other[rest] == hidden[rest]).all(dim=(1, 2)).any()


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())
@torch.no_grad()
def test_the_anchors_own_features_and_later_ones_do_not_show(changes: dict) -> None:
    row = Row(changes)
    hidden = row.hidden()
    for block, anchor in enumerate(row.blocks.anchors.tolist()):
        features_TF = row.features_TF.clone()
        features_TF[anchor:] = -3.0 * features_TF[anchor:].flip(0)
        assert torch.equal(row.hidden(features_TF)[block], hidden[block])


@pytest.mark.parametrize("kind", ["full", "sliding causal", "sliding non-causal"])
def test_gradients_reach_what_a_slot_sees_and_nothing_else(kind: str) -> None:
    """Exactly zero outside the text's mask, and nonzero inside it: features of every token, inputs of every slot."""
    row = Row({**KINDS[kind], "layer_types": KINDS[kind]["layer_types"][:1]})
    shape, anchors = row.drafter.shape, row.blocks.anchors.tolist()
    num_blocks = len(anchors)
    mask = visible_mask(anchors, LENGTHS, shape.block_size, row.window, shape.sliding_is_causal)
    features_TF = row.features_TF.clone().requires_grad_()
    inputs_NBH = torch.randn(num_blocks, shape.block_size, shape.hidden_size, requires_grad=True)
    hidden = row.drafter(features_TF, inputs_NBH, row.blocks)
    for block in range(0, num_blocks, 3):
        for slot in range(shape.block_size):
            weights = torch.linspace(-1, 1, shape.hidden_size)
            grads = torch.autograd.grad(hidden[block, slot] @ weights, (features_TF, inputs_NBH), retain_graph=True)
            reached = torch.cat([(grad != 0).any(-1).flatten() for grad in grads])
            assert torch.equal(reached, mask[block, slot])


@torch.no_grad()
def test_where_other_documents_hang_their_blocks_hardly_shows() -> None:
    """Another grouping of blocks into tiles sums in another order, and that is all."""
    row = Row(KINDS["mixed"])
    hidden, shape = row.hidden(), row.drafter.shape
    own = row.document_N == 2
    elsewhere = torch.tensor([*range(0, 20, 2), 24, *range(70, 100, 3)])
    anchors = torch.cat((elsewhere, row.blocks.anchors[own]))
    tokens_N = torch.cat((torch.zeros_like(elsewhere), row.tokens_N[own]))
    row.blocks = Blocks.at(anchors, torch.tensor(LENGTHS), shape.block_size)
    torch.testing.assert_close(row.hidden(tokens_N=tokens_N)[len(elsewhere) :], hidden[own], rtol=1e-5, atol=1e-5)
