"""Which tokens blocks hang on: a draw per document that depends on (seed, epoch, document id) alone."""

import numpy as np
import torch

from dflash.batch import MicroBatch
from dflash.drafter.blocks import Blocks


def draw_anchors(
    micro_batch: MicroBatch, *, block_size: int, per_token: float, max_per_document: int, seed: int, epoch: int
) -> Blocks:
    """Draws each document's anchors without replacement and returns their blocks, on the host, in packed order.

    A token is eligible iff it and the next token of its document are supervised. A document draws
    ceil(per_token * supervised tokens) of them, at least 1, at most `max_per_document`, or all where it has fewer.
    Source: design section 3.
    """
    lengths = micro_batch.lengths.numpy().astype(np.int64)
    document_T = np.repeat(np.arange(lengths.size), lengths)
    supervised_T = micro_batch.loss_mask.numpy() != 0
    followed_T = np.zeros_like(supervised_T)
    followed_T[:-1] = supervised_T[1:] & (document_T[1:] == document_T[:-1])
    eligible = np.flatnonzero(supervised_T & followed_T)
    document = document_T[eligible]

    num_supervised = np.bincount(document_T[supervised_T], minlength=lengths.size)
    quota = np.clip(_ceil(per_token * num_supervised), 1, max_per_document)

    # Every eligible token draws a key that depends on its document and place in it; the smallest keys win. That is a
    # uniform draw without replacement, in one sort, and no document knows of the others in its micro-batch.
    ids = micro_batch.document_ids.numpy().astype(np.uint64)
    place = (eligible - (np.cumsum(lengths) - lengths)[document]).astype(np.uint64)
    keys = _mix(_mix(_mix(_mix(_words(seed)) ^ _words(epoch)) ^ ids)[document] ^ place)
    order = np.lexsort((keys, document))
    document = document[order]
    first = np.searchsorted(document, document, side="left")
    chosen = order[np.arange(order.size) - first < quota[document]]
    anchors = torch.from_numpy(np.sort(eligible[chosen]))
    return Blocks.at(anchors, micro_batch.lengths, block_size)


def _ceil(values: np.ndarray) -> np.ndarray:
    # A product that is a whole number up to rounding is that number: 1/6 of 6k tokens is k, whatever the float says.
    return np.ceil(values * (1.0 - 1e-12)).astype(np.int64)


def _words(value: int) -> np.ndarray:
    return np.array([value & (2**64 - 1)], dtype=np.uint64)


def _mix(words: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele, Lea, Flood 2014): a bijection that scatters neighbouring integers."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
