"""The loop of a target rank: run the frozen target over its micro-batches and send what it captured."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from dflash.batch import MicroBatch, PackedHiddenStates, PackedLayout
from dflash.data.plan import PlanEntry
from dflash.profiling.edges import EdgeTimes
from dflash.profiling.report import RankReport
from dflash.profiling.side import SideTimes
from dflash.profiling.stats import ProfileStats
from dflash.roles.peers import LOADING_S, connected
from dflash.roles.reporting import move_window
from dflash.roles.setup import Run
from dflash.roles.stopping import StopRequest
from dflash.target.capture import FrozenTarget
from dflash.target.loading import load_causal_lm
from dflash.target.packing import BufferPool, HiddenStatePacker
from dflash.target.vocabulary import check_vocabulary, vocabulary_of
from dflash.transport.process_groups import ProcessGroups
from dflash.transport.sender import HiddenStateSender


@dataclass(frozen=True, slots=True)
class Producer:
    """The frozen target, and the pool and packer for what its hooks capture."""

    target: FrozenTarget
    pool: BufferPool
    packer: HiddenStatePacker

    @classmethod
    def load(cls, run: Run, num_buffers: int) -> "Producer":
        model = load_causal_lm(run.config.model.target.path, run.feature_dtype, run.device)
        if run.rank == 0:  # one rank is enough to find out that drafters would misread this architecture
            check_vocabulary(model, vocabulary_of(model))
        target = FrozenTarget(model, run.drafter_shape.target_layer_ids, keep_final_norm=run.objective.needs_teacher)
        pool = BufferPool(num_buffers, _largest_num_bytes(run), run.device)
        return cls(target, pool, HiddenStatePacker(pool, run.feature_dtype, run.device))

    def report_side(self, run: Run, report: RankReport) -> None:
        """Let the report tell of the packer's own stream, on CUDA: the stage `pack` only launches its work."""
        if self.packer.stream is not None and report.stats.is_on:
            role = run.topology.role(run.rank).value
            side = SideTimes("pack", role, run.device, self.packer.stream, report.spans)
            self.packer.timed = side.timed
            report.sources.append(side.take_interval)

    def produce(self, micro_batch: MicroBatch, buffer: Tensor, stats: ProfileStats) -> PackedHiddenStates:
        """Hidden states of one micro-batch in a buffer of the pool; on CUDA the work is only enqueued."""
        with stats.stage("host_to_device"):
            staged = self.target.stage(micro_batch)
        with stats.stage("forward"):
            captured = self.target.run(staged)
        with stats.stage("pack"):
            return self.packer.pack(captured, micro_batch, buffer)


def run_target(run: Run, groups: ProcessGroups, report: RankReport, stop: StopRequest) -> int | None:
    """Serve this target's micro-batches in order of g, until the plan ends or the drafters say stop.

    Returns the number of the signal that ended the run early. A stop asked of a target is passed on to the drafters,
    who agree on the end; until then it goes on serving.
    """
    stats = report.stats
    with connected(run, groups, stats) as control:
        with control.busy(LOADING_S), stats.stage("load"):
            producer = Producer.load(run, run.config.pipeline.num_send_buffers)
            producer.report_side(run, report)
        pool, packer = producer.pool, producer.packer

        def on_wait() -> None:
            report.poll()
            if stop.signal_number is not None:
                sender.ask_to_stop(stop.signal_number)

        edges = EdgeTimes(report.spans)
        report.sources.append(edges.take_interval)
        sender = HiddenStateSender(
            run.topology,
            run.rank,
            control,
            groups.edges,
            device=run.device,
            release=lambda packed: pool.release(packed.buffer),
            on_wait=on_wait,
            on_delivered=edges.on_delivered,
        )
        stop.listen()
        for entry, micro_batch in stats.each("data", own_micro_batches(run), lambda own: (own[0].index, own[0].step)):
            if sender.is_over(entry.index):
                break
            step = entry.step
            move_window(report, step, control.busy)
            with stats.stage("blocked"):
                buffer = sender.wait_for_buffer(pool.acquire)
            if sender.is_moot(entry.index):
                pool.release(buffer)
                continue
            # The first forward may compile on CUDA.
            is_compiling = step <= run.first_step and run.device.type == "cuda"
            with control.busy(LOADING_S) if is_compiling else nullcontext():
                packed = producer.produce(micro_batch, buffer, stats)
            # On CUDA the isend must follow the packing, not the next forward, so it joins the packer's stream.
            with stats.stage("send"), packer.on_stream():
                sender.send(packed, entry.index)
            packer.raise_if_bad()
            report.count("throughput/tokens_per_s", micro_batch.num_tokens)
            on_wait()
            report.poll(step)
        with stats.stage("blocked"):
            sender.finish(groups.start_barrier)
        packer.raise_if_bad(wait=True)
        return sender.stop_signal if sender.was_stopped else None


def own_micro_batches(run: Run) -> Iterator[tuple[PlanEntry, MicroBatch]]:
    """What this target serves, in order of g."""
    place = run.topology.index_in_group(run.rank)
    for entry in run.entries():
        if run.topology.target_of(entry.index) == place:
            yield entry, run.micro_batch(entry)


def _largest_num_bytes(run: Run) -> int:
    """Bound on a packed micro-batch: as many tokens as may be; a document has at least two."""
    num_tokens = run.config.data.tokens_per_micro_batch
    return PackedLayout(num_tokens, num_tokens // 2 + 1, run.feature_width, run.feature_dtype).num_bytes
