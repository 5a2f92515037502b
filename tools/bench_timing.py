"""The clock of the benchmarks."""

import time
from collections.abc import Callable
from typing import Any

import torch


def timed(act: Callable[[], Any], device: torch.device) -> float:
    """Seconds until `act` is through, on the device too."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s
