"""Finds, on a CPU, what would make the host wait for the device on CUDA: reads of values that the device computes.

Everything derived from a root (weights, hidden states, sums) lies on the device in a real run, so an operation that
brings such a value to Python, or makes a shape of it, waits there. What comes from the host's data alone (anchors,
labels, plans) lies on the host there, too, until `.to(device)`, and may be looked at.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash.profiling.stats import ProfileStats
from dflash.profiling.totals import OTHER
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer

# ATen operations whose result or shape the host has to know, whichever way Python or C++ came to them.
READING_OPERATIONS = {
    "aten::_local_scalar_dense",  # item, float, int, bool, if tensor
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
    "aten::is_nonzero",
    "aten::equal",
    "aten::repeat_interleave.Tensor",  # unless told its output's size
}
# Methods that reach the host without an ATen operation on a CPU.
READING_METHODS = {"tolist", "numpy", "cpu", "__array__"}


@dataclass(frozen=True, slots=True)
class Read:
    """One look at a device's value: by which operation, when, and from where, innermost function first."""

    operation: str
    stage: str
    step: int
    sites: tuple[str, ...]

    def is_in(self, site: str) -> bool:
        return site in self.sites


def target_roots(producer: Producer) -> list[Tensor]:
    """What lies on a target's device in a run on CUDA: weights and send buffers."""
    decoder = producer.target._decoder
    return [*decoder.parameters(), *decoder.buffers(), *producer.pool._free]


def drafter_roots(trainer: DrafterTrainer) -> list[Tensor]:
    """What lies on a drafter's device in a run on CUDA: weights, gradients and sums."""
    vocabulary = trainer.vocabulary
    own = [vocabulary.embedding, vocabulary.head, trainer.flat.buffer, trainer.gradients_ok]
    return [*trainer.drafter.parameters(), *own]


@dataclass
class DeviceReads:
    """Collects reads while entered: `with reads: ...`. Storages are kept, so that no address is used twice."""

    stats: ProfileStats  # of the rank: the stage and the step under way
    roots: Iterable[Tensor] = ()
    found: list[Read] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._storages: dict[int, Any] = {}
        self.mark(*self.roots)

    def __enter__(self) -> "DeviceReads":
        self._modes = (_Methods(self), _Operations(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def mark(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage

    def is_on_device(self, values: Any) -> bool:
        return any(
            isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self._storages for leaf in tree_leaves(values)
        )

    def note(self, operation: str) -> None:
        under_way = self.stats._open
        stage, (_, step) = under_way[-1].path if under_way else OTHER, self.stats.subject
        self.found.append(Read(operation, stage, step, tuple(_sites(sys._getframe(2)))))


def _sites(frame: FrameType | None) -> Iterable[str]:
    """Functions of the package on the stack, as file.py:function, innermost first."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/dflash/" in path or "/tests/" in path:
            yield f"{path.rpartition('/')[2]}:{frame.f_code.co_name}"
        frame = frame.f_back


class _Operations(TorchDispatchMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = self._reads
        is_on_device = reads.is_on_device((args, kwargs))
        if is_on_device and _reads(func, args, kwargs, reads):
            reads.note(func.name())
        result = func(*args, **kwargs)
        if is_on_device:
            # What an operation writes into is among its arguments or results; nothing of it was on the host.
            written = kwargs.get("out", ()), result, args[:1] if func.name().endswith("_") else ()
            for leaf in tree_leaves(written):
                if isinstance(leaf, Tensor):
                    reads.mark(leaf)
        return result


def _reads(func: Any, args: Any, kwargs: Any, reads: DeviceReads) -> bool:
    name = func.name()
    if name == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    if name.startswith(("aten::index.Tensor", "aten::index_put")):
        # A mask as an index is turned into numbers, of which there are as many as it says.
        masks = [index for index in args[1] if index is not None and index.dtype in (torch.bool, torch.uint8)]
        is_fill = name.startswith("aten::index_put") and len(args) > 2 and args[2].numel() == 1
        return reads.is_on_device(masks) and not is_fill
    return name in READING_OPERATIONS or name.partition(".")[0] in READING_OPERATIONS


class _Methods(TorchFunctionMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # A name, which is not how the run's own device is given, though that is the CPU here.
        is_to_host = name == "to" and "cpu" in [where for where in args[1:2] if isinstance(where, str)]
        if (is_to_host or name in READING_METHODS) and self._reads.is_on_device(args[:1]):
            self._reads.note(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))
