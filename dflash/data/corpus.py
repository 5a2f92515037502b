"""The tokenised documents of one data set, in flat files that every rank maps into memory."""

import json
from pathlib import Path

import numpy as np
import torch

from dflash.batch import MicroBatch
from dflash.data.keys import keyed_hash
from dflash.data.plan import DocumentSet

# Name of each array's file and its element type; meta.json holds the counts that their sizes are checked against.
ARRAYS = {"input_ids": np.int32, "loss_mask": np.uint8, "offsets": np.int64, "keys": np.int64}
META_FILE = "meta.json"


class TokenCorpus:
    """Documents as tokens and loss masks, read only, in the order of their rows.

    `lengths` i32 [D] tokens of each document; `num_supervised_tokens` counts those of all documents; `fingerprint`
    names contents, tokenizer and limits, and so stands for the data set in a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Maps a folder that `build_corpus` made; raises ValueError when it is not a whole one."""
        meta = read_meta(folder)
        self.folder = folder
        self.fingerprint: str = meta["fingerprint"]
        self.num_documents: int = meta["num_documents"]
        self.num_tokens: int = meta["num_tokens"]
        self.num_supervised_tokens: int = meta["num_supervised_tokens"]
        self._input_ids = _map(folder, "input_ids")
        self._loss_mask = _map(folder, "loss_mask")
        self._offsets = np.array(_map(folder, "offsets"))
        self._keys = _map(folder, "keys")
        self.lengths = np.diff(self._offsets).astype(np.int32)

    def document(self, document_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Views of one document: `input_ids` i32 [T] and `loss_mask` u8 [T]."""
        assert 0 <= document_id < self.num_documents
        span = slice(self._offsets[document_id], self._offsets[document_id + 1])
        return self._input_ids[span], self._loss_mask[span]

    def micro_batch(self, index: int, document_ids: np.ndarray) -> MicroBatch:
        """Micro-batch `index` of the plan: the documents end to end, in the order given, copied to host tensors."""
        assert len(document_ids) > 0
        documents = [self.document(document_id) for document_id in document_ids.tolist()]
        return MicroBatch(
            index=index,
            document_ids=torch.from_numpy(document_ids.astype(np.int64)),
            lengths=torch.from_numpy(self.lengths[document_ids]),
            input_ids=torch.from_numpy(np.concatenate([input_ids for input_ids, _ in documents])),
            loss_mask=torch.from_numpy(np.concatenate([loss_mask for _, loss_mask in documents])),
        )

    def documents(self, document_ids: np.ndarray | None = None) -> DocumentSet:
        """The documents with these ids, or all of them, as a plan takes them."""
        ids = np.arange(self.num_documents, dtype=np.int64) if document_ids is None else document_ids
        return DocumentSet(ids, self.lengths[ids])

    def source_keys(self) -> np.ndarray:
        """i64 [D] hash of what each document answers: its conversation before the first supervised turn."""
        return np.array(self._keys)


def open_corpus(folder: Path | str) -> TokenCorpus:
    """Corpus in a folder that `build_corpus` returned; raises ValueError when it is not a whole one."""
    return TokenCorpus(Path(folder))


def split_documents(
    corpus: TokenCorpus, eval_fraction: float, seed: int, max_eval_documents: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids to train on and ids held out, both i64 and ascending, keyed per document by (seed, what it answers).

    Held out is the share `eval_fraction` of the documents, at least one and at most `max_eval_documents`, and never
    all of them; nothing is held out at a share of 0. Documents that answer the same (several answers to one prompt,
    the turns of one conversation) share a key and so a side, unless that would double or halve the held-out share.
    """
    if not 0.0 <= eval_fraction < 1.0:
        raise ValueError(f"data.eval_fraction: {eval_fraction} must be at least 0 and below 1")
    num_documents = corpus.num_documents
    ids = np.arange(num_documents, dtype=np.int64)
    num_held_out = max(1, round(eval_fraction * num_documents)) if eval_fraction > 0 else 0
    limit = num_documents - 1 if max_eval_documents is None else min(num_documents - 1, max_eval_documents)
    num_held_out = min(num_held_out, limit)
    if num_held_out == 0:
        return ids, ids[:0]
    hashes = keyed_hash(corpus.source_keys(), seed)
    order = np.argsort(hashes, kind="stable")
    # Places where one source ends and the next begins; the nearest one that keeps about the share is the cut.
    borders = np.flatnonzero(np.diff(hashes[order])) + 1
    borders = borders[(borders * 2 >= num_held_out) & (borders <= min(2 * num_held_out, limit))]
    cut = int(borders[np.argmin(np.abs(borders - num_held_out))]) if len(borders) else num_held_out
    return np.sort(order[cut:]).astype(np.int64), np.sort(order[:cut]).astype(np.int64)


def sample_documents(corpus: TokenCorpus, max_documents: int, seed: int) -> np.ndarray:
    """Ids, i64 and ascending, of at most `max_documents` documents, drawn by (seed, document id)."""
    ids = np.arange(corpus.num_documents, dtype=np.int64)
    if corpus.num_documents <= max_documents:
        return ids
    return np.sort(np.argsort(keyed_hash(ids, seed), kind="stable")[:max_documents]).astype(np.int64)


def read_meta(folder: Path) -> dict:
    """Contents of a corpus folder's meta.json; raises ValueError when a file is missing or of a wrong size."""
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        num_documents, num_tokens = meta["num_documents"], meta["num_tokens"]
        counts = (num_tokens, num_tokens, num_documents + 1, num_documents)
        for (name, dtype), count in zip(ARRAYS.items(), counts, strict=True):
            num_bytes = (folder / f"{name}.bin").stat().st_size
            if num_bytes != count * np.dtype(dtype).itemsize:
                raise ValueError(f"{name}.bin has {num_bytes} bytes, not {count * np.dtype(dtype).itemsize}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: is not a whole corpus ({error}); delete that folder and run again") from error
    return meta


def _map(folder: Path, name: str) -> np.ndarray:
    return np.memmap(folder / f"{name}.bin", dtype=ARRAYS[name], mode="r")
