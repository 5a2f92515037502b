"""The loop of a drafter rank: take hidden states in order, accumulate, reduce, step."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from dflash.batch import PackedHiddenStates, PackedLayout
from dflash.config import OnNonfinite
from dflash.data.plan import PlanEntry
from dflash.drafter.metrics import MetricSums
from dflash.profiling.edges import QueueLevels
from dflash.profiling.report import RankReport
from dflash.profiling.stats import ProfileStats
from dflash.roles.console import Console
from dflash.roles.peers import LOADING_S, connected
from dflash.roles.reporting import move_window
from dflash.roles.saving import Progress, Saving
from dflash.roles.setup import Run
from dflash.roles.stopping import StopRequest
from dflash.roles.trainer import DrafterTrainer
from dflash.roles.votes import Outcome, Votes
from dflash.transport.endpoint import Work
from dflash.transport.process_groups import ProcessGroups
from dflash.transport.queue import HiddenStateQueue


class StopAgreed(Exception):
    """All drafters have agreed to end the run early; what is finished is saved."""


class NonFinite(ValueError):
    """All drafters have met a step that is not finite and must not be skipped; what is finished is saved."""


class HiddenStateSource(Protocol):
    """Where a drafter's micro-batches come from: the queue, or the target in the same process."""

    @property
    def depth(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def stop_signal(self) -> int | None: ...
    def take(self, index: int) -> PackedHiddenStates | None: ...
    def consumed(self, packed: PackedHiddenStates) -> None: ...
    def pump(self) -> None: ...
    def busy(self, seconds: float) -> AbstractContextManager[None]: ...
    def complete(self, start: Callable[[], Work]) -> None: ...
    def wait_until(self, is_done: Callable[[], bool]) -> None: ...


class QueuedHiddenStates:
    """The queue, with the time spent on it under its names, and with an ear for this process's stop signals."""

    def __init__(self, queue: HiddenStateQueue, stats: ProfileStats, stop: StopRequest, levels: QueueLevels) -> None:
        self._queue, self._stats, self._stop, self._levels = queue, stats, stop, levels
        self.complete, self.wait_until, self.busy = queue.complete, queue.pump_until, queue.control.busy

    @property
    def depth(self) -> int:
        return self._queue.depth

    @property
    def num_bytes(self) -> int:
        return self._queue.num_bytes

    @property
    def stop_signal(self) -> int | None:
        if self._stop.signal_number is not None:
            self._queue.ask_to_stop(self._stop.signal_number)
        return self._queue.stop_signal

    def take(self, index: int) -> PackedHiddenStates | None:
        self._levels.on_take(self._queue.num_ready)
        with self._stats.stage("starved"):
            return None if self.stop_signal is not None else self._queue.take(index)

    def consumed(self, packed: PackedHiddenStates) -> None:
        with self._stats.stage("receive"):
            self._queue.consumed(packed)

    def pump(self) -> None:
        with self._stats.stage("receive"):
            self._queue.pump()


def run_drafter(run: Run, groups: ProcessGroups, report: RankReport, stop: StopRequest) -> int | None:
    """Train on this drafter's micro-batches, in order of g, to the end of the plan or of all drafters' patience.

    Returns the number of the signal that ended the run early.
    """
    bounds, stats = run.config.pipeline.queue, report.stats
    with connected(run, groups, stats) as control:
        with control.busy(LOADING_S), stats.stage("load"):
            trainer = DrafterTrainer.load(run, groups, stats)

        def on_wait() -> None:
            report.poll()
            if stop.signal_number is not None:
                queue.ask_to_stop(stop.signal_number)

        queue = HiddenStateQueue(
            run.topology,
            run.rank,
            control,
            groups.edges,
            lambda drafter: schedule_of(run, drafter),
            depth=bounds.depth,
            max_bytes=bounds.max_bytes,
            min_ready=math.ceil(bounds.min_ready / run.topology.num_drafters),
            device=run.device,
            on_wait=on_wait,
        )
        levels = QueueLevels()
        report.sources.append(levels.take_interval)
        report.sources.append(lambda: {"queue/depth": queue.depth, "queue/bytes": queue.num_bytes})
        stop.listen()
        is_stopped = False
        try:
            train_drafter(run, trainer, QueuedHiddenStates(queue, stats, stop, levels), report)
        except StopAgreed:
            is_stopped = True
            queue.stop()
        report.scalars({"queue/max_depth": queue.max_depth_seen}, report.step)
        with stats.stage("starved"):
            queue.finish(groups.start_barrier)
        # Only now: the votes may have come here before the word that tells the signal, which precedes the goodbyes.
        return queue.stop_signal if is_stopped else None


def own_entries(run: Run, entries: list[PlanEntry]) -> list[tuple[int, PlanEntry]]:
    """Those of `entries` that this rank trains on, each with its place in the step."""
    placed = list(enumerate(entries))
    if run.topology.colocated:
        return placed
    own = run.topology.index_in_group(run.rank)
    return [(place, entry) for place, entry in placed if run.topology.drafter_of(entry.index) == own]


def schedule_of(run: Run, drafter: int) -> Iterator[tuple[int, PackedLayout]]:
    """(g, layout) of all that one drafter will train on or evaluate, as the queue takes it."""
    return ((e.index, run.layout(e)) for e in run.entries() if run.topology.drafter_of(e.index) == drafter)


def train_drafter(run: Run, trainer: DrafterTrainer, source: HiddenStateSource, report: RankReport) -> None:
    """The training loop, whatever the source.

    Raises StopAgreed or NonFinite, on all drafters at the same place, once all that is finished has been saved.
    """
    stats = report.stats
    with Console(run, trainer.is_leader, report) as console:
        console.restore(trainer.logging_state)
        saving = Saving(run, trainer, console, source.complete)
        try:
            for step in range(run.first_step - run.owes_evaluation, run.last_step + 1):
                with stats.stage("data"):
                    held_out = run.plan.eval_entries(step)
                move_window(report, step, source.busy)
                if step >= run.first_step:
                    outcome = train_step(run, trainer, source, console, step)
                    saving.progress = Progress(step, owes_evaluation=bool(held_out))
                    if step == run.first_step:
                        with stats.stage("checkpoint"):
                            saving.reserve()
                    raise_if_stopping(outcome)
                if held_out:
                    outcome = evaluate(run, trainer, source, console, step)
                    saving.progress = Progress(step)
                    raise_if_stopping(outcome)
                if saving.is_due:
                    with stats.stage("checkpoint"):
                        saving.start()
                report.poll(step)
        except StopAgreed:
            with stats.stage("checkpoint"):
                saving.finish()
            raise
        except NonFinite as fault:
            try:
                with stats.stage("checkpoint"):
                    saving.finish()
            except ValueError as error:
                raise ValueError(f"{fault}; {error}") from error
            raise NonFinite(f"{fault}; all steps before are saved") from fault
        with stats.stage("checkpoint"):
            saving.finish()


def train_step(run: Run, trainer: DrafterTrainer, source: HiddenStateSource, console: Console, step: int) -> Outcome:
    """Gradients of this drafter's micro-batches, one reduction, one update; returns what all drafters agreed on.

    Raises StopAgreed when the step was cut off, and NonFinite when it went bad: neither has changed anything.
    """
    stats = trainer.stats
    with stats.stage("data"):
        entries = run.plan.step_entries(step)
    for place, entry in own_entries(run, entries):
        stats.subject = (entry.index, step)
        hidden = source.take(entry.index)
        if hidden is None:
            trainer.votes.stop(is_unfinished=True)
            break
        # The first of them compiles on CUDA.
        is_compiling = step == run.first_step and run.device.type == "cuda"
        with source.busy(LOADING_S) if is_compiling else nullcontext():
            trainer.accumulate(hidden, entry, place, source.pump)
        source.consumed(hidden)
        console.computed(run.num_tokens(entry))
    if source.stop_signal is not None:
        trainer.votes.stop(is_unfinished=False)
    stats.subject = (-1, step)
    with stats.stage("gradient_sync"):
        if not trainer.is_alone:
            source.complete(lambda: trainer.reduce(trainer.flat.buffer))
    with stats.stage("optimizer"):
        grad_norm, pending = trainer.step(step)
        source.wait_until(pending.is_there)
    with stats.stage("metrics"):
        outcome = pending.read()
        raise_if_lost(run, outcome, entries, f"step {step}")
        if outcome.is_bad:
            console.skip(step, outcome.describe(entries))
        else:
            console.add(trainer.metrics, sum(run.num_tokens(entry) for entry in entries))
        trainer.clear()
        if step % run.config.train.log_interval_steps == 0 or step == run.last_step or outcome.is_stopping:
            console.log(step, grad_norm, trainer.learning_rate(step), source.depth, source.num_bytes)
    return outcome


def evaluate(run: Run, trainer: DrafterTrainer, source: HiddenStateSource, console: Console, step: int) -> Outcome:
    """Show metrics over the held-out micro-batches of all drafters; returns and raises as `train_step` does."""
    stats, terms = trainer.stats, run.objective.metric_terms
    with stats.stage("data"):
        entries = run.plan.eval_entries(step)
    num_metrics = MetricSums.width(run.drafter_shape.block_size, terms)
    total = torch.zeros(num_metrics + Votes.width(len(entries)), dtype=torch.float64, device=run.device)
    metrics, votes = MetricSums(total[:num_metrics], terms), Votes(total[num_metrics:])
    for place, entry in own_entries(run, entries):
        stats.subject = (entry.index, step)
        hidden = source.take(entry.index)
        if hidden is None:
            votes.stop(is_unfinished=True)
            break
        # Waiting for hidden states stays apart: a rank that waits is starved, whatever it waits to do.
        # Without gradients it compiles anew on CUDA, at some step of each launch.
        is_compiling = run.device.type == "cuda"
        with stats.stage("evaluate"), source.busy(LOADING_S) if is_compiling else nullcontext():
            sums, code = trainer.evaluate(hidden, entry, source.pump)
            metrics.add_(sums)
            votes.accuse(place, code)
        source.consumed(hidden)
        console.computed(run.num_tokens(entry))
    if source.stop_signal is not None:
        votes.stop(is_unfinished=False)
    stats.subject = (-1, step)
    with stats.stage("evaluate"):
        with stats.stage("gradient_sync"):
            if not trainer.is_alone:
                source.complete(lambda: trainer.reduce(total))
        with stats.stage("metrics"):
            pending = votes.to_host()
            source.wait_until(pending.is_there)
            outcome = pending.read()
            raise_if_lost(run, outcome, entries, f"the evaluation after step {step}")
            if outcome.is_bad:
                console.warn(f"left out of the evaluation after step {step}: {outcome.describe(entries)}")
            console.log_evaluation(step, metrics)
    return outcome


def raise_if_lost(run: Run, outcome: Outcome, entries: list[PlanEntry], where: str) -> None:
    """Raises StopAgreed or NonFinite when what was just reduced must not count."""
    if outcome.is_unfinished:
        raise StopAgreed
    if outcome.is_bad and run.config.train.on_nonfinite is OnNonfinite.stop:
        raise NonFinite(
            f"{where}: {outcome.describe(entries)}; look at these documents and at model.target.dtype (float16 "
            "overflows easily), or go on with resume=auto train.on_nonfinite=skip"
        )


def raise_if_stopping(outcome: Outcome) -> None:
    if outcome.is_stopping:
        raise StopAgreed
