"""Ranks of the training command, forked as forked_ranks.py does it, each under a watch on what it reads of its device.

Takes the same order. Each rank's reads go to `<its name>.reads` in the order's folder; on each way between the ranks
there is one planted, which the watch has to find.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import forked_ranks
from helpers_syncs import DeviceReads, drafter_roots, target_roots
from torch import Tensor

import dflash.train
from dflash.batch import PackedHiddenStates
from dflash.profiling.report import RankReport
from dflash.roles.setup import Run
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer
from dflash.transport.payload import PayloadChannel
from dflash.transport.queue import HiddenStateQueue
from dflash.transport.sender import HiddenStateSender

Loop = Callable[..., int | None]


def planted(tensor: Tensor) -> None:
    """A read where none belongs."""
    float(tensor.flatten()[0])


def plant() -> None:
    """Have what goes between ranks read on its way."""
    original_send, original_take = HiddenStateSender.send, HiddenStateQueue.take
    original_consumed, original_reduce = HiddenStateQueue.consumed, DrafterTrainer.reduce

    def send(self: HiddenStateSender, packed: PackedHiddenStates, index: int) -> None:
        planted(packed.features)
        original_send(self, packed, index)

    def take(self: HiddenStateQueue, index: int) -> PackedHiddenStates | None:
        packed = original_take(self, index)
        assert packed is not None
        planted(packed.features)
        return packed

    def consumed(self: HiddenStateQueue, packed: PackedHiddenStates) -> None:
        planted(packed.features)
        original_consumed(self, packed)

    def reduce(self: DrafterTrainer, tensor: Tensor) -> Any:
        planted(tensor)
        return original_reduce(self, tensor)

    HiddenStateSender.send, HiddenStateQueue.take = send, take
    HiddenStateQueue.consumed, DrafterTrainer.reduce = consumed, reduce


def mark_loaded(owner: type, roots_of: Callable[[Any], list[Tensor]], reads: DeviceReads) -> None:
    """What `owner.load` returns lies on the device."""
    original = owner.load.__func__

    def load(cls: type, *arguments: Any, **more: Any) -> Any:
        loaded = original(cls, *arguments, **more)
        reads.mark(*roots_of(loaded))
        return loaded

    owner.load = classmethod(load)


def mark_received(reads: DeviceReads) -> None:
    """What a rank receives lies on the device."""
    receive = PayloadChannel.receive

    def received(self: PayloadChannel, packed: PackedHiddenStates, free: None) -> None:
        reads.mark(packed.buffer)
        receive(self, packed, free)

    PayloadChannel.receive = received


def watched(loop: Loop, folder: Path) -> Loop:
    def watch(run: Run, groups: Any, report: RankReport, stop: Any) -> int | None:
        reads = DeviceReads(report.stats)
        mark_loaded(Producer, target_roots, reads)
        mark_loaded(DrafterTrainer, drafter_roots, reads)
        mark_received(reads)
        with reads:
            signal_number = loop(run, groups, report, stop)
        (folder / f"{run.name}.reads").write_text(json.dumps([astuple(read) for read in reads.found]))
        return signal_number

    return watch


def main() -> None:
    folder = Path(json.loads(sys.argv[1])["folder"])
    plant()
    dflash.train.run_target = watched(dflash.train.run_target, folder)
    dflash.train.run_drafter = watched(dflash.train.run_drafter, folder)
    forked_ranks.main()


if __name__ == "__main__":
    main()
