"""Both roles in one process: the same drafter loop, its hidden states made on demand."""

from contextlib import AbstractContextManager, nullcontext

from torch import distributed as dist

from dflash.batch import PackedHiddenStates
from dflash.profiling.report import RankReport
from dflash.profiling.stats import ProfileStats
from dflash.roles.drafter import train_drafter
from dflash.roles.setup import Run
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer


class LocalHiddenStates:
    """Takes the queue's place: `take` runs the target, `consumed` frees the one buffer."""

    depth = 0  # nothing ever waits
    num_bytes = 0

    def __init__(self, run: Run, producer: Producer, stats: ProfileStats) -> None:
        self._run, self._producer, self._stats = run, producer, stats

    def take(self, index: int) -> PackedHiddenStates:
        """Hidden states of micro-batch g; work enqueued on the current stream comes after their packing."""
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

    def wait(self, work: dist.Work) -> None:
        work.wait()


def run_colocated(run: Run, groups: None, report: RankReport) -> None:
    """Train to the end of the plan in this process alone."""
    with report.stats.stage("load"):
        producer = Producer.load(run, num_buffers=1)
        trainer = DrafterTrainer.load(run, None, report.stats)
    train_drafter(run, trainer, LocalHiddenStates(run, producer, report.stats), report)
    producer.packer.raise_if_bad(wait=True)
