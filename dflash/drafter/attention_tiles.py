"""Attention of blocks in tiles of visible context: the path of CPU, exact and with bounded memory.

Blocks of one document are cut into runs of neighbouring anchors; a run reads one contiguous range of the context. Runs
of similar size are batched into tiles. Scores exist for one tile at a time, forward and backward.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from dflash.drafter.blocks import Blocks, Visibility

_SLOTS_PER_RUN = 128
_SCORES_PER_TILE = 1 << 21
_MAX_PADDING_RATIO = 1.4


@dataclass(frozen=True, slots=True)
class _Run:
    """Some blocks of one document and the context tokens [first, end) that they may see."""

    blocks: np.ndarray
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """R runs, padded to M blocks and L context tokens each.

    Shapes: `gather` i64 [R*M], block of every place (padding repeats block 0); `places` and `blocks` i64 [real], the
    real places and their blocks; `padding` i64, the other places; `tokens` i64 [R*L], clamped to the row; `unseen` bool
    [R, 1, M, 1, B or 1, L].
    """

    num_runs: int
    gather: Tensor
    places: Tensor
    blocks: Tensor
    padding: Tensor
    tokens: Tensor
    unseen: Tensor


class TiledAttend:
    """The plan of one micro-batch for one kind of layer, on CPU; call it once per layer."""

    def __init__(self, blocks: Blocks, visibility: Visibility, num_query_heads: int) -> None:
        self.block_size = blocks.block_size
        slots_B = torch.arange(blocks.block_size)
        unseen_BB = ~visibility.of_block(slots_B[:, None], slots_B)
        self.unseen_block_BB = unseen_BB if bool(unseen_BB.any()) else None
        scores_per_key = num_query_heads * blocks.block_size
        runs = _runs(blocks, visibility, scores_per_key)
        self.tiles = [_tile(group, blocks, visibility) for group in _groups(runs, blocks.block_size, scores_per_key)]

    def __call__(
        self, queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        if not self.tiles:
            return queries
        dtype = torch.promote_types(queries.dtype, torch.float32)
        inputs = (tensor.to(dtype) for tensor in (queries, context_keys, context_values, keys, values))
        return _TiledAttention.apply(self, *inputs).to(queries.dtype)


def _runs(blocks: Blocks, visibility: Visibility, scores_per_key: int) -> list[_Run]:
    """Cuts the blocks, ordered by document and anchor, into runs of even size that fit a tile."""
    anchors, starts = blocks.anchors.numpy(), blocks.starts.numpy()
    order = np.lexsort((anchors, starts))
    # A run of neighbouring anchors is what keeps its range short, on sliding layers and in long documents.
    documents = np.split(order, np.flatnonzero(np.diff(starts[order])) + 1) if order.size else []
    runs = []
    for members in documents:
        num_keys = int(anchors[members[-1]] - starts[members[0]]) + blocks.block_size
        limit = max(1, min(_SLOTS_PER_RUN // blocks.block_size, _SCORES_PER_TILE // (scores_per_key * num_keys)))
        for part in np.array_split(members, -(-members.size // limit)):
            first, end = int(starts[part[0]]), int(anchors[part[-1]])
            if visibility.window is not None:
                first = max(first, int(anchors[part[0]]) - visibility.window + 1)
            runs.append(_Run(part, min(first, end), end))
    return runs


def _groups(runs: list[_Run], block_size: int, scores_per_key: int) -> list[list[_Run]]:
    """Groups runs of similar range, so that a tile is neither mostly padding nor larger than its budget."""
    groups: list[list[_Run]] = []
    real = most_blocks = longest = 0
    for run in sorted(runs, key=lambda run: (run.end - run.first, run.blocks.size)):
        num_keys = run.end - run.first + block_size
        added = run.blocks.size * num_keys
        if groups:
            most, long = max(most_blocks, run.blocks.size), max(longest, num_keys)
            padded = (len(groups[-1]) + 1) * most * long
            if padded <= _MAX_PADDING_RATIO * (real + added) and padded * scores_per_key <= _SCORES_PER_TILE:
                groups[-1].append(run)
                real, most_blocks, longest = real + added, most, long
                continue
        groups.append([run])
        real, most_blocks, longest = added, run.blocks.size, num_keys
    return groups


def _tile(runs: list[_Run], blocks: Blocks, visibility: Visibility) -> _Tile:
    most_blocks = max(run.blocks.size for run in runs)
    # At least one key, unseen if need be: a run may consist of anchors that open their document.
    most_tokens = max(1, *(run.end - run.first for run in runs))
    places = np.full((len(runs), most_blocks), -1, dtype=np.int64)
    for row, run in enumerate(runs):
        places[row, : run.blocks.size] = run.blocks
    index_RM = torch.from_numpy(places)
    gather_RM = index_RM.clamp(min=0)
    first_R = torch.tensor([run.first for run in runs])
    tokens_RL = first_R[:, None] + torch.arange(most_tokens)
    seen = visibility.of_context(
        blocks.starts[gather_RM][:, :, None, None],
        blocks.anchors[gather_RM][:, :, None, None],
        torch.arange(blocks.block_size)[:, None],
        tokens_RL[:, None, None, :],
    )
    flat = index_RM.flatten()
    real_places = torch.nonzero(flat >= 0).flatten()
    return _Tile(
        num_runs=len(runs),
        gather=gather_RM.flatten(),
        places=real_places,
        blocks=flat[real_places],
        padding=torch.nonzero(flat < 0).flatten(),
        tokens=tokens_RL.clamp(max=blocks.num_tokens - 1).flatten(),
        unseen=~seen[:, None, :, None],
    )


class _TiledAttention(torch.autograd.Function):
    """Softmax attention that keeps inputs, outputs and log-sum-exps, and recomputes probabilities in backward.

    Source of the backward formulas: FlashAttention-2 (arXiv 2307.08691), section 2.3.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        plan: TiledAttend,
        queries: Tensor,
        context_keys: Tensor,
        context_values: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        scale = queries.shape[-1] ** -0.5
        rows = _rows(queries, keys.shape[2]) * scale
        keys, values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
        out, lse = torch.empty_like(rows), rows.new_empty(rows.shape[:3])
        for tile in plan.tiles:
            part = _TileScores(plan, tile, rows, context_keys, keys)
            context_lse, block_lse = part.context.logsumexp(-1), part.block.logsumexp(-1)
            tile_lse = torch.logaddexp(context_lse, block_lse.view_as(context_lse))
            part.to_probabilities(tile_lse)
            tile_out = torch.bmm(part.context, _gather_context(tile, context_values))
            tile_out.view(*part.block.shape[:2], -1).baddbmm_(part.block, _gather(tile, values))
            _scatter(tile, tile_out, out)
            _scatter(tile, tile_lse, lse)
        ctx.plan, ctx.scale, ctx.num_heads = plan, scale, queries.shape[2]
        ctx.save_for_backward(rows, context_keys, context_values, keys, values, out, lse)
        return _unrows(out, plan.block_size)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: TiledAttend = ctx.plan
        rows, context_keys, context_values, keys, values, out, lse = ctx.saved_tensors
        grad_rows_out = _rows(grad_out, keys.shape[1])
        delta = (grad_rows_out * out).sum(-1)
        grad_rows, grad_keys, grad_values = torch.empty_like(rows), torch.empty_like(keys), torch.empty_like(values)
        grad_context_keys, grad_context_values = torch.zeros_like(context_keys), torch.zeros_like(context_values)
        for tile in plan.tiles:
            part = _TileScores(plan, tile, rows, context_keys, keys)
            part.to_probabilities(_gather_rows(tile, lse[..., None]).squeeze(-1))
            tile_grad, tile_delta = (
                _gather_rows(tile, grad_rows_out, zero_padding=True),
                _gather_rows(tile, delta[..., None], zero_padding=True),
            )
            block_grad = tile_grad.view(*part.block.shape[:2], -1)
            _add_context(tile, torch.bmm(part.context.mT, tile_grad), grad_context_values)
            _scatter(tile, torch.bmm(part.block.mT, block_grad), grad_values)
            # Gradients of the scores, in place of the probabilities that they are made of.
            part.context.mul_(torch.bmm(tile_grad, _gather_context(tile, context_values).mT).sub_(tile_delta))
            block_delta = tile_delta.view(*part.block.shape[:2], 1)
            part.block.mul_(torch.bmm(block_grad, _gather(tile, values).mT).sub_(block_delta))
            tile_grad_rows = torch.bmm(part.context, part.context_keys)
            tile_grad_rows.view_as(block_grad).baddbmm_(part.block, part.block_keys)
            _scatter(tile, tile_grad_rows, grad_rows)
            _add_context(tile, torch.bmm(part.context.mT, part.rows), grad_context_keys)
            _scatter(tile, torch.bmm(part.block.mT, part.block_rows), grad_keys)
        grad_queries = _unrows(grad_rows.mul_(ctx.scale), plan.block_size)
        return (
            None,
            grad_queries,
            grad_context_keys,
            grad_context_values,
            grad_keys.transpose(1, 2),
            grad_values.transpose(1, 2),
        )


class _TileScores:
    """Masked scores of one tile: `context` [R*Hkv, M*G*B, L] and `block` [R*Hkv*M, G*B, B]."""

    __slots__ = ("block", "block_keys", "block_rows", "context", "context_keys", "rows")

    def __init__(self, plan: TiledAttend, tile: _Tile, rows: Tensor, context_keys: Tensor, keys: Tensor) -> None:
        num_key_heads, rows_per_block = rows.shape[1:3]
        group = (rows_per_block // plan.block_size, plan.block_size)
        self.rows = _gather_rows(tile, rows)
        self.block_rows = self.rows.view(-1, rows_per_block, rows.shape[-1])
        self.context_keys, self.block_keys = _gather_context(tile, context_keys), _gather(tile, keys)
        self.context = torch.bmm(self.rows, self.context_keys.mT)
        by_slot = self.context.view(tile.num_runs, num_key_heads, -1, *group, self.context.shape[-1])
        by_slot.masked_fill_(tile.unseen, -torch.inf)
        self.block = torch.bmm(self.block_rows, self.block_keys.mT)
        if plan.unseen_block_BB is not None:
            self.block.view(-1, *group, plan.block_size).masked_fill_(plan.unseen_block_BB, -torch.inf)

    def to_probabilities(self, lse: Tensor) -> None:
        """Turns scores into probabilities in place; `lse` [R*Hkv, M*G*B] spans context and block."""
        self.context.sub_(lse[..., None]).exp_()
        self.block.sub_(lse.reshape(*self.block.shape[:2], 1)).exp_()


def _rows(queries_NBHD: Tensor, num_key_heads: int) -> Tensor:
    """[N, B, Hq, D] to [N, Hkv, G*B, D]: the query rows that read one key head lie together."""
    num_blocks, block_size, num_heads, head_dim = queries_NBHD.shape
    grouped = queries_NBHD.view(num_blocks, block_size, num_key_heads, num_heads // num_key_heads, head_dim)
    return grouped.permute(0, 2, 3, 1, 4).reshape(num_blocks, num_key_heads, -1, head_dim)


def _unrows(rows: Tensor, block_size: int) -> Tensor:
    """[N, Hkv, G*B, D] back to [N, B, Hq, D]."""
    num_blocks, num_key_heads, _, head_dim = rows.shape
    grouped = rows.view(num_blocks, num_key_heads, -1, block_size, head_dim)
    return grouped.permute(0, 3, 1, 2, 4).reshape(num_blocks, block_size, -1, head_dim)


def _gather(tile: _Tile, per_block: Tensor) -> Tensor:
    """[N, Hkv, X, D] to [R*Hkv*M, X, D]."""
    picked = per_block.index_select(0, tile.gather).unflatten(0, (tile.num_runs, -1)).transpose(1, 2)
    return picked.reshape(-1, *per_block.shape[2:])


def _gather_rows(tile: _Tile, rows: Tensor, zero_padding: bool = False) -> Tensor:
    """[N, Hkv, G*B, D] to [R*Hkv, M*G*B, D]."""
    picked = rows.index_select(0, tile.gather)
    if zero_padding and tile.padding.numel():
        picked.index_fill_(0, tile.padding, 0.0)
    return (
        picked.unflatten(0, (tile.num_runs, -1))
        .transpose(1, 2)
        .reshape(tile.num_runs * rows.shape[1], -1, rows.shape[-1])
    )


def _gather_context(tile: _Tile, context: Tensor) -> Tensor:
    """[T, Hkv, D] to [R*Hkv, L, D]."""
    picked = context.index_select(0, tile.tokens).unflatten(0, (tile.num_runs, -1)).transpose(1, 2)
    return picked.reshape(-1, *picked.shape[2:])


def _scatter(tile: _Tile, part: Tensor, per_block: Tensor) -> None:
    """Writes a tile's [R*Hkv(*M), …] into its blocks of `per_block` [N, Hkv, …]; every block is in one tile only."""
    num_key_heads = per_block.shape[1]
    by_place = part.view(tile.num_runs, num_key_heads, -1, *per_block.shape[2:]).transpose(1, 2).flatten(0, 1)
    if tile.padding.numel():
        by_place = by_place.index_select(0, tile.places)
    per_block.index_copy_(0, tile.blocks, by_place)


def _add_context(tile: _Tile, part: Tensor, context: Tensor) -> None:
    """Adds a tile's [R*Hkv, L, D] to `context` [T, Hkv, D], where the ranges of runs overlap."""
    by_token = part.view(tile.num_runs, context.shape[1], -1, context.shape[2]).transpose(1, 2).flatten(0, 1)
    context.index_add_(0, tile.tokens, by_token)
