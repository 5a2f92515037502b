"""Gauges agree with what is known of this process, cost little, and leave out what a system does not tell."""

import ctypes
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.profiling.gauges import Gauges, _read, cuda_levels, machine_facts, network_bytes, thread_cpu
from dflash.profiling.nvml import GpuGauges

needs_proc = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads Linux's /proc")

STAT = "{tid} ({name}) S 1 1 1 0 -1 4194304 128 0 0 0 {user} {system} 0 0 20 0 1 0 99 1636896 390"


def write_thread(proc: Path, tid: int, name: str, user: int, system: int) -> None:
    folder = proc / "self" / "task" / str(tid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(STAT.format(tid=tid, name=name, user=user, system=system))


def test_threads_are_gathered_by_name(tmp_path: Path) -> None:
    write_thread(tmp_path, os.getpid(), "target-0", 150, 50)
    write_thread(tmp_path, 7, "pt_autograd_0", 10, 0)
    write_thread(tmp_path, 8, "pt_autograd_1", 20, 5)
    write_thread(tmp_path, 9, "odd) R (name 3", 1, 1)
    (tmp_path / "self" / "task" / "10").mkdir()  # it ended while we looked
    ticks = os.sysconf("SC_CLK_TCK")
    assert thread_cpu(tmp_path / "self" / "task") == {
        "process/thread_cpu_percent/main": 200 / ticks * 100,
        "process/thread_cpu_percent/pt_autograd": 35 / ticks * 100,
        "process/thread_cpu_percent/odd_R_name": 2 / ticks * 100,
    }


def test_counters_are_told_per_second_since_the_last_sample(tmp_path: Path) -> None:
    now_s = 50.0
    write_thread(tmp_path, os.getpid(), "target-0", 0, 0)
    (tmp_path / "self" / "statm").write_text("1000 300 100 1 0 200 0\n")
    (tmp_path / "self" / "schedstat").write_text("1000000000 2000000000 17\n")
    gauges = Gauges(proc=tmp_path, clock=lambda: now_s)
    write_thread(tmp_path, os.getpid(), "target-0", os.sysconf("SC_CLK_TCK"), 0)
    (tmp_path / "self" / "schedstat").write_text("1000000000 3000000000 17\n")
    now_s = 54.0
    scalars = gauges.sample()
    assert scalars["process/thread_cpu_percent/main"] == 25
    assert scalars["process/main_thread_waits_for_core_percent"] == 25
    assert scalars["memory/resident_bytes"] == 300 * os.sysconf("SC_PAGE_SIZE")
    assert not any(tag.startswith(("network/", "gpu/")) for tag in scalars)
    now_s = 55.0
    assert gauges.sample()["process/thread_cpu_percent/main"] == 0


@needs_proc
def test_a_busy_thread_shows_under_its_name(tmp_path: Path) -> None:
    gauges = Gauges()
    is_over = threading.Event()

    def burn() -> None:
        ctypes.CDLL(None).prctl(15, b"burner-3", 0, 0, 0)
        while not is_over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burn)
    thread.start()
    time.sleep(0.5)
    scalars = gauges.sample()
    is_over.set()
    thread.join()
    assert scalars["process/thread_cpu_percent/burner"] > 10
    assert scalars["process/cpu_percent"] >= scalars["process/thread_cpu_percent/burner"] - 5
    assert {"process/thread_cpu_percent/main", "memory/resident_bytes"} <= scalars.keys()


@needs_proc
def test_resident_memory_follows_what_is_touched() -> None:
    gauges = Gauges()
    before = gauges.sample()
    held = torch.ones(32 << 20, dtype=torch.uint8)
    after = gauges.sample()
    assert 30 << 20 < after["memory/resident_bytes"] - before["memory/resident_bytes"] < 40 << 20
    if "memory/heap_used_bytes" in before and "memory/heap_used_bytes" in after:
        assert after["memory/heap_used_bytes"] - before["memory/heap_used_bytes"] >= held.numel()
        assert 0 <= after["memory/heap_fragmentation"] <= 1


@needs_proc
def test_a_sample_takes_less_than_a_millisecond() -> None:
    gauges = Gauges()
    times_s = []
    for _ in range(30):
        started_s = time.perf_counter()
        gauges.sample()
        times_s.append(time.perf_counter() - started_s)
    assert min(times_s) < 1e-3


def test_network_bytes_keep_loopback_apart() -> None:
    text = (
        "Inter-|   Receive                   |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo: 500 1 0 0 0 0 0 0 500 1 0 0 0 0 0 0\n"
        "  eth0:4102 10 0 0 0 0 0 0 56 7 0 0 0 0 0 0\n"
        "  eth1: 8 10 0 0 0 0 0 0 4 7 0 0 0 0 0 0\n"
    )
    assert network_bytes(text) == {
        "network/loopback_bytes_per_s": 500,
        "network/received_bytes_per_s": 4110,
        "network/sent_bytes_per_s": 60,
    }


@pytest.mark.parametrize("num_bytes_a_read", [1, 4096, 1 << 20])
def test_files_that_come_in_pieces_are_read_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes_a_read: int
) -> None:
    """The kernel tells of many interfaces a page at a time; beyond 64 KiB no number is cut in two."""
    line = "  veth{}: 8 10 0 0 0 0 0 0 4 7 0 0 0 0 0 0\n"
    text = "".join(line.format(number) for number in range(200))
    (tmp_path / "self").mkdir()
    file = tmp_path / "self" / "net" / "dev"
    file.parent.mkdir()
    file.write_text(text)
    original = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, size: original(descriptor, min(size, num_bytes_a_read)))
    assert len(text) > 4096 and _read(file) == text
    now_s = 50.0
    gauges = Gauges(proc=tmp_path, clock=lambda: now_s)
    file.write_text(text.replace(" 8 ", " 9 "))
    now_s = 51.0
    assert gauges.sample()["network/received_bytes_per_s"] == 200
    file.write_text("x" * (1 << 16) + "more")
    assert _read(file) == "x" * (1 << 16)
    for end in range(len(line)):
        counters = network_bytes(text + line[:end])
        assert counters == {"network/received_bytes_per_s": 1600, "network/sent_bytes_per_s": 800}


@needs_proc
def test_a_long_file_of_the_kernel_is_read_to_its_end() -> None:
    maps = _read("/proc/self/maps")
    assert len(maps) == 1 << 16 or (len(maps) > 4096 and maps.endswith("\n"))


def test_fragmentation_is_what_is_reserved_and_not_allocated() -> None:
    stats = {
        "allocated_bytes.all.current": 600,
        "allocated_bytes.all.peak": 700,
        "reserved_bytes.all.current": 800,
        "segment.all.current": 4,
    }
    assert cuda_levels(stats)["memory/fragmentation"] == 0.25
    assert cuda_levels({**stats, "reserved_bytes.all.current": 0})["memory/fragmentation"] == 0
    assert cuda_levels({}) == {}


class FakeNvml:
    """A driver's library, of which some GPUs refuse to tell their power."""

    def __init__(self, tells_power: bool = True) -> None:
        self._tells_power = tells_power

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        return 0 if uuid == b"GPU-1234" else 6

    def nvmlDeviceGetUtilizationRates(self, handle: Any, answer: Any) -> int:
        ctypes.memmove(answer, (ctypes.c_uint * 2)(87, 40), 8)
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, answer: Any) -> int:
        ctypes.memmove(answer, (ctypes.c_ulonglong * 3)(1000, 300, 700), 24)
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, answer: Any) -> int:
        ctypes.memmove(answer, (ctypes.c_uint * 1)(412_500), 4)
        return 0 if self._tells_power else 3


def test_a_gpu_tells_what_it_can() -> None:
    gpu = GpuGauges.open("GPU-1234", FakeNvml())
    assert gpu is not None and gpu.sample() == {
        "gpu/utilization_percent": 87,
        "gpu/memory_busy_percent": 40,
        "gpu/memory_used_bytes": 700,
        "gpu/memory_total_bytes": 1000,
        "gpu/power_watts": 412.5,
    }
    silent = GpuGauges.open("GPU-1234", FakeNvml(tells_power=False))
    assert silent is not None and "gpu/power_watts" not in silent.sample()
    assert GpuGauges.open("GPU-5678", FakeNvml()) is None
    assert GpuGauges.open("GPU-1234", object()) is None, "a library that lacks the functions is no library"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reads torch's CUDA allocator and the driver")
def test_a_real_gpu_is_read_without_waiting_for_it() -> None:
    device = torch.device("cuda", 0)
    gauges = Gauges(device)
    held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    scalars = gauges.sample()
    assert scalars["memory/allocated_bytes"] >= held.numel()
    assert scalars["memory/segments_mapped"] >= 1 and gauges.sample()["memory/segments_mapped"] == 0
    assert 0 <= scalars["memory/fragmentation"] < 1
    assert scalars.get("gpu/memory_used_bytes", held.numel()) >= held.numel()


@pytest.mark.parametrize(("quota", "expected"), [("max 100000\n", None), ("250000 100000\n", 2.5), (None, None)])
def test_where_a_rank_runs(tmp_path: Path, quota: str | None, expected: float | None) -> None:
    (tmp_path / "self").mkdir()
    status = "Name:\tdrafter-1\nCpus_allowed:\t107\nCpus_allowed_list:\t0-2,8\nThreads: 4\n"
    (tmp_path / "self" / "status").write_text(status)
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    facts = machine_facts(tmp_path, tmp_path / "cpu.max")
    assert facts == {"host": socket.gethostname(), "cores": "0-2,8", "core_quota": expected}
    assert machine_facts(tmp_path / "nowhere", tmp_path / "cpu.max")["cores"] is None
    here = machine_facts()["cores"]
    assert here is not None and max(os.sched_getaffinity(0)) == int(here.rpartition(",")[2].rpartition("-")[2])
