"""Both roles in one process: the same drafter loop, its hidden states made on demand."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from dflash.batch import PackedHiddenStates
from dflash.profiling.report import RankReport
from dflash.profiling.stats import ProfileStats
from dflash.roles.drafter import StopAgreed, train_drafter
from dflash.roles.setup import Run
from dflash.roles.stopping import StopRequest
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer
from dflash.transport.endpoint import Work

_POLL_S = 1e-3


class LocalHiddenStates:
    """Takes the queue's place: `take` runs the target, `consumed` frees the one buffer."""

    depth = 0  # nothing ever waits
    num_bytes = 0

    def __init__(self, run: Run, producer: Producer, stats: ProfileStats, stop: StopRequest) -> None:
        self._run, self._producer, self._stats, self._stop = run, producer, stats, stop

    @property
    def stop_signal(self) -> int | None:
        return self._stop.signal_number

    def take(self, index: int) -> PackedHiddenStates | None:
        """Hidden states of micro-batch g, or None once a stop was asked for.

        Work enqueued on the current stream comes after their packing.
        """
        if self.stop_signal is not None:
            return None
        with self._stats.stage("data"):
            micro_batch = self._run.micro_batch(self._run.plan.entry(index))
        buffer = self._producer.pool.acquire()
        assert buffer is not None, "one micro-batch at a time"
        packed = self._producer.produce(micro_batch, buffer, self._stats)
        if self._producer.packer.packed_event is not None:
            self._producer.packer.packed_event.wait()
        return packed

    def consumed(self, packed: PackedHiddenStates) -> None:
        self._producer.pool.release(packed.buffer)
        self._producer.packer.raise_if_bad()

    def pump(self) -> None:
        """There are no transfers to look after."""

    def busy(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()

    def complete(self, start: Callable[[], Work]) -> None:
        start().wait()

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            time.sleep(_POLL_S)


def run_colocated(run: Run, groups: None, report: RankReport, stop: StopRequest) -> int | None:
    """Train in this process alone to the end of the plan; returns the number of the signal that ended it early."""
    with report.stats.stage("load"):
        producer = Producer.load(run, num_buffers=1)
        producer.report_side(run, report)
        trainer = DrafterTrainer.load(run, None, report.stats)
    stop.listen()
    try:
        train_drafter(run, trainer, LocalHiddenStates(run, producer, report.stats, stop), report)
    except StopAgreed:
        return stop.signal_number
    producer.packer.raise_if_bad(wait=True)
    return None
