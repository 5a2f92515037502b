"""The loop of a drafter rank: take hidden states in order, accumulate, reduce, step."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import distributed as dist

from dflash.batch import PackedHiddenStates, PackedLayout
from dflash.data.plan import PlanEntry
from dflash.drafter.metrics import MetricSums
from dflash.profiling.report import RankReport
from dflash.profiling.stats import ProfileStats
from dflash.roles.console import Console
from dflash.roles.peers import LOADING_S, connected
from dflash.roles.setup import Run
from dflash.roles.trainer import DrafterTrainer
from dflash.transport.process_groups import ProcessGroups
from dflash.transport.queue import HiddenStateQueue

SAVING_S = 600.0  # how long a rank may be silent while it writes a checkpoint


class HiddenStateSource(Protocol):
    """Where a drafter's micro-batches come from: the queue, or the target in the same process."""

    @property
    def depth(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def take(self, index: int) -> PackedHiddenStates: ...
    def consumed(self, packed: PackedHiddenStates) -> None: ...
    def pump(self) -> None: ...
    def busy(self, seconds: float) -> AbstractContextManager[None]: ...
    def wait(self, work: dist.Work) -> None: ...


class QueuedHiddenStates:
    """The queue, with the time spent on it under its names."""

    def __init__(self, queue: HiddenStateQueue, stats: ProfileStats) -> None:
        self._queue, self._stats = queue, stats
        self.wait, self.busy = queue.wait, queue.control.busy

    @property
    def depth(self) -> int:
        return self._queue.depth

    @property
    def num_bytes(self) -> int:
        return self._queue.num_bytes

    def take(self, index: int) -> PackedHiddenStates:
        with self._stats.stage("starved"):
            return self._queue.take(index)

    def consumed(self, packed: PackedHiddenStates) -> None:
        with self._stats.stage("receive"):
            self._queue.consumed(packed)

    def pump(self) -> None:
        with self._stats.stage("receive"):
            self._queue.pump()


def run_drafter(run: Run, groups: ProcessGroups, report: RankReport) -> None:
    """Train on this drafter's micro-batches, in order of g, to the end of the plan."""
    bounds = run.config.pipeline.queue
    with connected(run, groups) as control:
        with control.busy(LOADING_S), report.stats.stage("load"):
            trainer = DrafterTrainer.load(run, groups, report.stats)
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
            on_wait=report.poll,
        )
        train_drafter(run, trainer, QueuedHiddenStates(queue, report.stats), report)
        report.scalars({"queue/max_depth": queue.max_depth_seen}, run.last_step)
        with report.stats.stage("starved"):
            queue.finish()


def own_entries(run: Run, entries: list[PlanEntry]) -> list[PlanEntry]:
    """Those of `entries` that this rank trains on."""
    if run.topology.colocated:
        return entries
    place = run.topology.index_in_group(run.rank)
    return [entry for entry in entries if run.topology.drafter_of(entry.index) == place]


def schedule_of(run: Run, drafter: int) -> Iterator[tuple[int, PackedLayout]]:
    """(g, layout) of all that one drafter will train on or evaluate, as the queue takes it."""
    return ((e.index, run.layout(e)) for e in run.entries() if run.topology.drafter_of(e.index) == drafter)


def train_drafter(run: Run, trainer: DrafterTrainer, source: HiddenStateSource, report: RankReport) -> None:
    """The training loop, whatever the source."""
    stats, loop, checkpoint = report.stats, run.config.train, run.config.checkpoint
    with Console(run, trainer.is_leader, report) as console:
        for step in range(run.first_step, run.last_step + 1):
            entries = run.plan.step_entries(step)
            for entry in own_entries(run, entries):
                hidden = source.take(entry.index)
                # The first of them compiles on CUDA.
                with source.busy(LOADING_S) if step == run.first_step else nullcontext():
                    trainer.accumulate(hidden, entry, source.pump)
                source.consumed(hidden)
            with stats.stage("gradient_sync"):
                if (work := trainer.reduce(trainer.flat.buffer)) is not None:
                    source.wait(work)
            with stats.stage("optimizer"):
                grad_norm = trainer.step(step)
            with stats.stage("metrics"):
                console.add(trainer.flat.extras, sum(run.num_tokens(entry) for entry in entries))
                trainer.flat.zero()
                if step % loop.log_interval_steps == 0 or step == run.last_step:
                    console.log(step, grad_norm, trainer.learning_rate(step), source.depth, source.num_bytes)
            if held_out := run.plan.eval_entries(step):
                console.log_evaluation(step, evaluate(run, trainer, source, held_out))
            if step == run.last_step or (checkpoint.interval_steps and step % checkpoint.interval_steps == 0):
                with stats.stage("checkpoint"), source.busy(SAVING_S):
                    trainer.save(step)
            report.poll(step)


def evaluate(run: Run, trainer: DrafterTrainer, source: HiddenStateSource, held_out: list[PlanEntry]) -> MetricSums:
    """Metric sums over the held-out micro-batches of all drafters."""
    total = MetricSums.zeros(run.drafter_shape.block_size, run.device)
    for entry in own_entries(run, held_out):
        hidden = source.take(entry.index)
        total.add_(trainer.evaluate(hidden, entry, source.pump))
        source.consumed(hidden)
    if (work := trainer.reduce(total.values)) is not None:
        source.wait(work)
    return total
