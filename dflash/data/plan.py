"""The plan of a run: which documents make up which micro-batch, step and evaluation, the same on every rank."""

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from dflash.data.keys import keyed_hash

# Documents are sorted by length within windows of this many micro-batches: enough that those of one micro-batch are
# about as long, few enough that the company a document is in differs from epoch to epoch.
_WINDOW_MICRO_BATCHES = 32
_NUM_CACHED_EPOCHS = 2
# Salts that keep the two draws of one (seed, epoch) apart.
_DOCUMENT_SALT, _MICRO_BATCH_SALT = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class DocumentSet:
    """Documents that a plan orders: `ids` i64 [N] in their corpus, `lengths` i32 [N] in tokens."""

    ids: np.ndarray
    lengths: np.ndarray

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class PlanEntry:
    """One micro-batch of the plan: its place `index` (g), and `document_ids` i64 [N] in their order.

    `step` is the optimizer step it trains, from 1; for an evaluation entry the step it comes after, and `epoch` is
    then 0, so that whatever is drawn by epoch is drawn alike in every evaluation.
    """

    index: int
    step: int
    epoch: int
    is_eval: bool
    document_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Packing:
    """Documents cut into micro-batches: number k holds `ids[starts[order[k]] : starts[order[k] + 1]]`."""

    ids: np.ndarray
    starts: np.ndarray
    order: np.ndarray

    @property
    def num_micro_batches(self) -> int:
        return len(self.order)

    def document_ids(self, number: int) -> np.ndarray:
        piece = self.order[number]
        return self.ids[self.starts[piece] : self.starts[piece + 1]]


class Plan:
    """Order of a run's micro-batches g = 0, 1, 2 ... across epochs, evaluations included; nothing else decides it.

    Each epoch shuffles the training documents by (seed, epoch), sorts them by length within windows, packs whole
    documents into micro-batches of at most `tokens_per_micro_batch` tokens, and shuffles the micro-batches of each
    window. Micro-batches flow across epoch ends into steps of `micro_batches_per_step`, so that only the last step
    may be short. The evaluation documents follow, in an order that never changes, every `eval_interval_steps`-th step
    (None: no step) and the last one. Rank counts do not enter.

    num_steps                       optimizer steps in all; step s is the s-th, from 1
    num_entries                     micro-batches in all, evaluation included
    num_micro_batches               training micro-batches in all
    num_eval_micro_batches          micro-batches of one evaluation, 0 without evaluation documents
    """

    def __init__(
        self,
        train: DocumentSet,
        evaluation: DocumentSet | None = None,
        *,
        tokens_per_micro_batch: int,
        micro_batches_per_step: int,
        num_epochs: int | None,
        max_steps: int | None,
        eval_interval_steps: int | None,
        seed: int,
    ) -> None:
        """Ends with `num_epochs` or `max_steps`, whichever is first; one of them may be None.

        Raises ValueError when neither is given, there is no training document, or one is longer than a micro-batch.
        """
        if num_epochs is None and max_steps is None:
            raise ValueError("train.num_epochs and train.max_steps are both null; give one of them")
        for name, value in (
            ("data.tokens_per_micro_batch", tokens_per_micro_batch),
            ("train.micro_batches_per_step", micro_batches_per_step),
            ("train.num_epochs", num_epochs),
            ("train.max_steps", max_steps),
            ("train.eval_interval_steps", eval_interval_steps),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} must be at least 1")
        if len(train.ids) == 0:
            raise ValueError("there is no document to train on; give more data, or a smaller data.eval_fraction")
        _check_fits(train, tokens_per_micro_batch)
        self.train = train
        self.tokens_per_micro_batch = tokens_per_micro_batch
        self.micro_batches_per_step = micro_batches_per_step
        self._seed = seed
        self._packings: OrderedDict[int, _Packing] = OrderedDict()
        self._epoch_starts = [0]  # number of the first micro-batch of each epoch looked at so far, and of the next

        most = None if max_steps is None else max_steps * micro_batches_per_step
        self.num_micro_batches = self._count_micro_batches(num_epochs, most)
        self.num_steps = -(-self.num_micro_batches // micro_batches_per_step)

        self._evaluation: _Packing | None = None
        if evaluation is not None and len(evaluation.ids) > 0:
            _check_fits(evaluation, tokens_per_micro_batch)
            self._evaluation = _pack_in_order(evaluation, tokens_per_micro_batch)
        self.num_eval_micro_batches = self._evaluation.num_micro_batches if self._evaluation is not None else 0
        # With the interval at the last step, or beyond it, the evaluation after that step is the only one.
        self._eval_interval = min(eval_interval_steps or self.num_steps, self.num_steps)
        self._num_evals = -(-self.num_steps // self._eval_interval)
        self.num_entries = self.num_micro_batches + self._num_evals * self.num_eval_micro_batches

    def entry(self, index: int) -> PlanEntry:
        """Entry g = `index`, in any order of asking; epochs are packed when first needed and the latest kept."""
        assert 0 <= index < self.num_entries
        first_of_last_eval = self.num_entries - self.num_eval_micro_batches
        if index >= first_of_last_eval:
            return self._eval_entry(index, self.num_steps, index - first_of_last_eval)
        # Before that all is a repetition of `eval_interval` whole steps and one evaluation.
        num_train = self._eval_interval * self.micro_batches_per_step
        cycle, place = divmod(index, num_train + self.num_eval_micro_batches)
        if place >= num_train:
            return self._eval_entry(index, (cycle + 1) * self._eval_interval, place - num_train)
        number = cycle * num_train + place
        epoch, place = self._locate(number)
        document_ids = self._packing(epoch).document_ids(place)
        return PlanEntry(index, number // self.micro_batches_per_step + 1, epoch, False, document_ids)

    def first_entry_of_step(self, step: int) -> int:
        """g of the first training micro-batch of a step; for the step after the last, the number of entries.

        What comes before it is all that step - 1 steps leave behind, their evaluations included: it is the next g of
        a run that has done step - 1 of them.
        """
        assert 1 <= step <= self.num_steps + 1
        if step > self.num_steps:
            return self.num_entries
        num_evals = (step - 1) // self._eval_interval
        return (step - 1) * self.micro_batches_per_step + num_evals * self.num_eval_micro_batches

    def step_entries(self, step: int) -> list[PlanEntry]:
        """Training entries of a step."""
        assert 1 <= step <= self.num_steps
        first = self.first_entry_of_step(step)
        return [self.entry(first + i) for i in range(self._num_in_step(step))]

    def eval_entries(self, step: int) -> list[PlanEntry]:
        """Evaluation entries that follow a step, none after most of them."""
        end_of_training = self.first_entry_of_step(step) + self._num_in_step(step)
        return [self.entry(index) for index in range(end_of_training, self.first_entry_of_step(step + 1))]

    def num_micro_batches_until(self, step: int) -> int:
        """Training micro-batches of the steps 1 to `step`."""
        return min(step * self.micro_batches_per_step, self.num_micro_batches)

    def describe(self) -> str:
        """One line for the console."""
        num_tokens, num_packed = self.train.num_tokens, self._epoch_starts[1]
        fill = num_tokens / (num_packed * self.tokens_per_micro_batch)
        num_epochs = self.num_micro_batches / num_packed
        parts = [
            f"plan: {len(self.train.ids):,} documents, {num_tokens:,} tokens, {num_packed:,} micro-batches in the "
            f"first epoch ({fill:.0%} full)",
            f"{self.num_steps:,} steps of {self.micro_batches_per_step} micro-batches over {num_epochs:,.1f} epochs",
        ]
        if self._evaluation is not None:
            parts.append(
                f"{len(self._evaluation.ids):,} held-out documents in {self.num_eval_micro_batches:,} micro-batches, "
                f"evaluated {self._num_evals:,} time(s)"
            )
        return "; ".join(parts)

    def _num_in_step(self, step: int) -> int:
        return min(self.micro_batches_per_step, self.num_micro_batches - (step - 1) * self.micro_batches_per_step)

    def _eval_entry(self, index: int, step: int, number: int) -> PlanEntry:
        assert self._evaluation is not None
        return PlanEntry(index, step, 0, True, self._evaluation.document_ids(number))

    def _count_micro_batches(self, num_epochs: int | None, most: int | None) -> int:
        """Training micro-batches in all; with no bound on epochs that takes no look beyond the first."""
        self._packing(0)
        if num_epochs is None:
            assert most is not None
            return most
        while len(self._epoch_starts) <= num_epochs and (most is None or self._epoch_starts[-1] < most):
            self._packing(len(self._epoch_starts) - 1)
        return self._epoch_starts[-1] if most is None else min(self._epoch_starts[-1], most)

    def _locate(self, number: int) -> tuple[int, int]:
        """Epoch of a training micro-batch and its place in it."""
        while self._epoch_starts[-1] <= number:
            self._packing(len(self._epoch_starts) - 1)
        epoch = bisect_right(self._epoch_starts, number) - 1
        return epoch, number - self._epoch_starts[epoch]

    def _packing(self, epoch: int) -> _Packing:
        if epoch in self._packings:
            self._packings.move_to_end(epoch)
            return self._packings[epoch]
        packing = _pack_epoch(self.train, self.tokens_per_micro_batch, self._seed, epoch)
        if epoch == len(self._epoch_starts) - 1:
            self._epoch_starts.append(self._epoch_starts[-1] + packing.num_micro_batches)
        self._packings[epoch] = packing
        if len(self._packings) > _NUM_CACHED_EPOCHS:
            self._packings.popitem(last=False)
        return packing


def _check_fits(documents: DocumentSet, tokens_per_micro_batch: int) -> None:
    longest = int(documents.lengths.argmax())
    length = int(documents.lengths[longest])
    if length > tokens_per_micro_batch:
        raise ValueError(
            f"document {documents.ids[longest]} has {length} tokens, more than data.tokens_per_micro_batch="
            f"{tokens_per_micro_batch}; raise that to at least {length}, or lower data.max_length"
        )


def _pack_epoch(documents: DocumentSet, tokens_per_micro_batch: int, seed: int, epoch: int) -> _Packing:
    """Micro-batches of one training epoch, keyed by (seed, epoch)."""
    # By id before anything else, so that the plan does not depend on how the caller lists the documents.
    by_id = np.argsort(documents.ids, kind="stable")
    hashes = keyed_hash(documents.ids[by_id], seed, epoch, _DOCUMENT_SALT)
    shuffled = by_id[np.argsort(hashes, kind="stable")]
    lengths = documents.lengths[shuffled].astype(np.int64)
    windows = (np.cumsum(lengths) - lengths) // (_WINDOW_MICRO_BATCHES * tokens_per_micro_batch)
    # Stable, so that documents of one length stay shuffled.
    by_length = np.argsort(windows * (tokens_per_micro_batch + 1) + lengths, kind="stable")
    starts = _cut(lengths[by_length], windows, tokens_per_micro_batch)
    num_micro_batches = len(starts) - 1
    hashes = keyed_hash(np.arange(num_micro_batches), seed, epoch, _MICRO_BATCH_SALT)
    return _Packing(
        ids=documents.ids[shuffled[by_length]],
        starts=starts,
        order=np.lexsort((hashes, windows[starts[:-1]])),
    )


def _pack_in_order(documents: DocumentSet, tokens_per_micro_batch: int) -> _Packing:
    """Micro-batches of an evaluation: by length, then by id."""
    order = np.lexsort((documents.ids, documents.lengths))
    lengths = documents.lengths[order].astype(np.int64)
    starts = _cut(lengths, np.zeros(len(lengths), dtype=np.int64), tokens_per_micro_batch)
    return _Packing(documents.ids[order], starts, np.arange(len(starts) - 1))


def _cut(lengths: np.ndarray, windows: np.ndarray, tokens_per_micro_batch: int) -> np.ndarray:
    """First document of each micro-batch, i64 [M + 1] with the number of documents at the end.

    Each micro-batch takes documents in their order until the next would not fit or lies in another window; windows,
    i64 [N], never fall.
    """
    ends = np.cumsum(lengths)
    # For every document, where a micro-batch that begins with it ends; following these from 0 gives the cuts.
    no_longer_fits = np.searchsorted(ends, ends - lengths + tokens_per_micro_batch, side="right")
    end_of_window = np.searchsorted(windows, windows, side="right")
    following = np.minimum(no_longer_fits, end_of_window).tolist()
    starts = [0]
    while starts[-1] < len(following):
        starts.append(following[starts[-1]])
    return np.array(starts, dtype=np.int64)
