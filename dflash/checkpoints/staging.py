"""A copy of the training state in host memory, taken between two steps, that a thread can write at leisure."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager

_Path = tuple[str | int, ...]


class HostCopy(AsyncStager):
    """Copies a state into host buffers that every later copy uses again, page-locked for tensors of a GPU.

    Unlike DCP's DefaultStager it waits for its own copies alone: a synchronisation of the whole device would also wait
    for a receive in flight.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._buffers: dict[_Path, Tensor] = {}
        self._devices: set[torch.device] = set()  # those that copies under way come from

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state with a buffer in place of each tensor; the buffers are good until the next call."""
        buffers: dict[_Path, Tensor] = {}
        staged = self._copy(state_dict, (), buffers)
        self._buffers = buffers
        for device in self._devices:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
            copied.synchronize()
        self._devices.clear()
        return staged

    def close(self) -> None:
        self._buffers = {}

    def _copy(self, value: Any, path: _Path, buffers: dict[_Path, Tensor]) -> Any:
        if isinstance(value, Tensor):
            buffer = self._buffers.get(path)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            buffers[path] = buffer
            if value.is_cuda:
                self._devices.add(value.device)
            return buffer.copy_(value, non_blocking=value.is_cuda)
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key), buffers) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*path, place), buffers) for place, item in enumerate(value))
        assert value is None or isinstance(value, bool | int | float | str), f"{path}: the thread would share {value}"
        return value
