"""The tokenised documents of one data set, in flat files that every rank reads for itself."""

import json
import os
import weakref
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
    names contents, tokenizer and limits, and so stands for the data set in a checkpoint. The files stay open, so that
    a cache that is deleted while a run goes on does not end it.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder that `build_corpus` made; raises ValueError when it is not a whole one."""
        meta = read_meta(folder)
        self.folder = folder
        self.fingerprint: str = meta["fingerprint"]
        self.num_documents: int = meta["num_documents"]
        self.num_tokens: int = meta["num_tokens"]
        self.num_supervised_tokens: int = meta["num_supervised_tokens"]
        self._input_ids = _OpenArray(folder, "input_ids")
        self._loss_mask = _OpenArray(folder, "loss_mask")
        self._offsets = _OpenArray(folder, "offsets").read(0, self.num_documents + 1)
        self._keys = _OpenArray(folder, "keys")
        self.lengths = np.diff(self._offsets).astype(np.int32)

    def document(self, document_id: int) -> tuple[np.ndarray, np.ndarray]:
        """One document, read only: `input_ids` i32 [T] and `loss_mask` u8 [T].

        Raises ValueError naming the file when it was cut or cannot be read any more.
        """
        assert 0 <= document_id < self.num_documents
        start, end = self._offsets[document_id : document_id + 2].tolist()
        return self._input_ids.read(start, end), self._loss_mask.read(start, end)

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

    def what_changed_since(self, fingerprint: str) -> str:
        """What distinguishes this corpus from an earlier one, as far as the cache still tells; may be empty."""
        try:
            before = json.loads((self.folder.parent / fingerprint / META_FILE).read_text(encoding="utf-8"))["made_of"]
            now = json.loads((self.folder / META_FILE).read_text(encoding="utf-8"))["made_of"]
        except (OSError, ValueError, KeyError):
            return ""
        old, new = before.pop("files"), now.pop("files")
        changed = [f"{key} was {before.get(key)}, is {value}" for key, value in now.items() if before.get(key) != value]
        if len(old) != len(new):
            changed.append(f"{len(new)} data files instead of {len(old)}")
        else:
            pairs = zip(old, new, strict=True)
            changed += [f"{now[0]} has other contents than {was[0]} had" for was, now in pairs if was[1] != now[1]]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return "; ".join(changed[:3]) + more

    def source_keys(self) -> np.ndarray:
        """i64 [D] hash of what each document answers: its conversation before the first supervised turn."""
        return self._keys.read(0, self.num_documents)


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


class _OpenArray:
    """An array's open file.

    Not mapped into memory: a page of a map that cannot be read, because the file was cut or the disk fails, kills the
    process with SIGBUS and names nothing, while a read says what is wrong. The page cache is shared either way.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path, self._dtype = folder / f"{name}.bin", np.dtype(ARRAYS[name])
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ValueError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, start: int, end: int) -> np.ndarray:
        """Elements `start` to `end`, read only."""
        position, last = start * self._dtype.itemsize, end * self._dtype.itemsize
        pieces = []
        while position < last:
            try:
                piece = os.pread(self._descriptor, last - position, position)  # 2 GiB at most
            except OSError as error:
                raise ValueError(f"{self._path}: cannot be read: {error.strerror or error}") from error
            if not piece:
                size = os.fstat(self._descriptor).st_size
                raise ValueError(
                    f"{self._path}: has only {size:,} bytes, it was cut after it had been opened; run again, which "
                    "builds the corpus anew"
                )
            pieces.append(piece)
            position += len(piece)
        return np.frombuffer(pieces[0] if len(pieces) == 1 else b"".join(pieces), dtype=self._dtype)
