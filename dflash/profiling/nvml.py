"""Utilisation, memory and power of one GPU through NVIDIA's management library, where there is one."""

import ctypes
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"  # comes with the driver, so a binding of its own would be one dependency more
_SUCCESS = 0


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]  # percent of the driver's last sample period


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class GpuGauges:
    """Scalars of one GPU, by its UUID: NVML numbers all GPUs of the machine, torch only those it is shown."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @classmethod
    def open(cls, uuid: str, library: Any = None) -> "GpuGauges | None":
        """Gauges of the GPU with this UUID (`GPU-...`); None where the library, the GPU or the permission lacks."""
        try:
            library = library or ctypes.CDLL(_LIBRARY)
            handle = ctypes.c_void_p()
            is_found = (
                library.nvmlInit_v2() == _SUCCESS
                and library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == _SUCCESS
            )
        except (OSError, AttributeError):  # no such library, or one that lacks a function
            return None
        return cls(library, handle) if is_found else None

    def sample(self) -> dict[str, float]:
        """`gpu/*`, as far as this GPU tells; utilisation is the driver's mean over its last second or less."""
        scalars = {}
        utilization, memory, milliwatts = _Utilization(), _Memory(), ctypes.c_uint()
        if self._ask("nvmlDeviceGetUtilizationRates", utilization):
            scalars["gpu/utilization_percent"] = float(utilization.gpu)
            scalars["gpu/memory_busy_percent"] = float(utilization.memory)
        if self._ask("nvmlDeviceGetMemoryInfo", memory):
            scalars["gpu/memory_used_bytes"] = float(memory.used)
            scalars["gpu/memory_total_bytes"] = float(memory.total)
        if self._ask("nvmlDeviceGetPowerUsage", milliwatts):
            scalars["gpu/power_watts"] = milliwatts.value / 1e3
        return scalars

    def _ask(self, function: str, answer: Any) -> bool:
        return getattr(self._library, function)(self._handle, ctypes.byref(answer)) == _SUCCESS
