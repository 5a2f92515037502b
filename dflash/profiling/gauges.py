"""What the operating system, the allocators and the GPU say about one rank, read when asked."""

import ctypes
import os
import re
import resource
import socket
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dflash.profiling.nvml import GpuGauges

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_FILE_BYTES = 1 << 16
_MAX_HEAP_S = 0.3e-3
# Counters that only grow, of torch.cuda.memory_stats; under expandable segments the first two count the mapping and
# unmapping of pages into a segment, otherwise cudaMalloc and cudaFree, which may stop all work of the device.
_CUDA_COUNTERS = {
    "num_device_alloc": "memory/segments_mapped",
    "num_device_free": "memory/segments_unmapped",
    "num_alloc_retries": "memory/alloc_retries",
    "num_ooms": "memory/out_of_memory",
}
_MALLINFO_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS]


class Gauges:
    """Scalars of this process, its allocators, its GPU and its machine's network.

    `sample` runs in the caller's thread, takes a millisecond at most, unless there are hundreds of threads, and never
    waits for the device. Counters are told per second, or per interval where they should be 0, since the sample before.
    What a system does not tell is left out, and so is the C heap once telling about it has taken longer than 0.3 ms.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        *,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc, self._clock = proc, clock
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._gpu = None if self._cuda is None else GpuGauges.open(_uuid(self._cuda))
        self._mallinfo2 = _find_mallinfo2()
        self._sampled_s = clock()
        self._before = self._counters()

    def sample(self) -> dict[str, float]:
        """`memory/*`, `process/*`, `gpu/*` and `network/*` now, and since the sample before."""
        now_s, counters = self._clock(), self._counters()
        seconds = max(now_s - self._sampled_s, 1e-9)
        scalars = self._levels()
        for tag, value in counters.items():
            # A thread that was not there before had used nothing; one that has gone leaves a smaller sum behind.
            change = max(value - self._before.get(tag, 0.0), 0.0)
            scalars[tag] = change if tag in _CUDA_COUNTERS.values() else change / seconds
        self._sampled_s, self._before = now_s, counters
        return scalars

    def _levels(self) -> dict[str, float]:
        scalars: dict[str, float] = {}
        if statm := _read(self._proc / "self/statm"):
            scalars["memory/resident_bytes"] = float(int(statm.split()[1]) * _PAGE_BYTES)
        if self._mallinfo2 is not None:
            started_s = time.thread_time()  # not the time in which others had the core
            heap = self._mallinfo2()
            if time.thread_time() - started_s > _MAX_HEAP_S:
                self._mallinfo2 = None  # it walks all free pieces, and this heap has too many: once was enough
            scalars["memory/heap_used_bytes"] = float(heap.uordblks + heap.hblkhd)
            scalars["memory/heap_free_bytes"] = float(heap.fordblks)
            scalars["memory/heap_fragmentation"] = heap.fordblks / max(heap.arena, 1)
        if self._cuda is not None:
            scalars |= cuda_levels(torch.cuda.memory_stats(self._cuda))
        if self._gpu is not None:
            scalars |= self._gpu.sample()
        return scalars

    def _counters(self) -> dict[str, float]:
        """What only grows, under the tag of its growth."""
        counters = thread_cpu(self._proc / "self/task")
        usage = resource.getrusage(resource.RUSAGE_SELF)
        counters["process/cpu_percent"] = (usage.ru_utime + usage.ru_stime) * 100
        counters["process/involuntary_switches_per_s"] = float(usage.ru_nivcsw)
        # Pages that the allocator has given back and gets anew; those of files that lie on a disk.
        counters["memory/minor_faults_per_s"] = float(usage.ru_minflt)
        counters["memory/major_faults_per_s"] = float(usage.ru_majflt)
        if schedstat := _read(self._proc / "self/schedstat"):
            # Runnable but not running: the main thread would have worked, had there been a core.
            counters["process/main_thread_waits_for_core_percent"] = int(schedstat.split()[1]) / 1e9 * 100
        counters |= network_bytes(_read(self._proc / "self/net/dev"))
        if self._cuda is not None:
            stats = torch.cuda.memory_stats(self._cuda)
            counters |= {tag: float(stats.get(key, 0)) for key, tag in _CUDA_COUNTERS.items()}
        return counters


def machine_facts(proc: Path = Path("/proc"), quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> dict[str, Any]:
    """Where this process runs: `host`, the `cores` it may run on ("0-3,8"), and the `core_quota` of its control group.

    The last two are None where the system does not tell, the quota also where there is none.
    """
    cores = re.search(r"^Cpus_allowed_list:\s*(\S+)", _read(proc / "self/status"), re.MULTILINE)
    limit, _, period = _read(quota).partition(" ")
    return {
        "host": socket.gethostname(),
        "cores": cores[1] if cores else None,
        "core_quota": int(limit) / int(period) if limit.isdigit() else None,
    }


def thread_cpu(folder: Path) -> dict[str, float]:
    """CPU time of a process's threads so far, in hundredths of seconds, so that its growth per second is a percentage.

    Threads of one name are added up, numbers at its end left out (what `top -H` shows, gathered); the main thread,
    which bears the process's name, is `main`. The kernel counts in steps of 10 ms.
    """
    sums: dict[str, float] = {}
    main_thread = str(os.getpid())
    try:
        threads = os.listdir(folder)
    except OSError:
        return sums
    for thread in threads:
        stat = _read(f"{folder}/{thread}/stat")  # strings: there may be a hundred of them, and paths are slow
        if not stat:  # it has ended since
            continue
        # The name stands in parentheses and may hold any character, parentheses too.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        fields = rest.split(maxsplit=13)
        tag = "process/thread_cpu_percent/main" if thread == main_thread else _thread_tag(name)
        sums[tag] = sums.get(tag, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS_PER_S * 100
    return sums


def network_bytes(text: str) -> dict[str, float]:
    """Bytes the machine's network interfaces have carried; they know nothing of ranks, nor of RDMA."""
    counters: dict[str, float] = {}
    for line in text[: text.rfind("\n") + 1].splitlines():  # a last line without an end has been cut off
        interface, colon, numbers = line.partition(":")
        if not colon:
            continue
        fields = numbers.split()
        if interface.strip() == "lo":
            counters["network/loopback_bytes_per_s"] = float(fields[8])
            continue
        for tag, field in (("network/received_bytes_per_s", 0), ("network/sent_bytes_per_s", 8)):
            counters[tag] = counters.get(tag, 0.0) + float(fields[field])
    return counters


def cuda_levels(stats: dict[str, Any]) -> dict[str, float]:
    """What torch's allocator holds; fragmentation is the share of its memory that no tensor lives in."""
    if not stats:  # nothing was allocated yet
        return {}
    allocated, reserved = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
    return {
        "memory/allocated_bytes": float(allocated),
        "memory/reserved_bytes": float(reserved),
        "memory/peak_allocated_bytes": float(stats["allocated_bytes.all.peak"]),
        "memory/num_segments": float(stats["segment.all.current"]),
        "memory/fragmentation": 1 - allocated / reserved if reserved else 0.0,
    }


@cache
def _thread_tag(name: str) -> str:
    """Tag of the kind of threads that one with this name belongs to."""
    kind = re.sub(r"[^\w.-]+", "_", name.rstrip("0123456789").rstrip("_-#:/ ") or name)
    return f"process/thread_cpu_percent/{kind}"


def _read(path: Path | str) -> str:
    """Text of a small file of /proc, at most 64 KiB; empty where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        data = b""
        # Files that the kernel makes up as they are read come in pieces of about a page, whatever is asked for.
        while len(data) < _MAX_FILE_BYTES and (piece := os.read(descriptor, _MAX_FILE_BYTES - len(data))):
            data += piece
        return data.decode("utf-8", "replace")
    except OSError:  # the thread it is about has ended
        return ""
    finally:
        os.close(descriptor)


def _find_mallinfo2() -> Callable[[], Any] | None:
    """glibc's mallinfo2 (2.33 and newer); None where the C library has none."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.argtypes, function.restype = [], _Mallinfo2
    return function


def _uuid(device: torch.device) -> str:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
