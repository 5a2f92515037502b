"""No hidden synchronisation: neither role's hot path lets the host wait for a value of the device.

On a CPU the real loop runs a few steps of a real plan under a watch on every operation; reads that are meant to be
there are listed below with their reason, and each of them has to turn up. On CUDA, torch's own sync debug mode watches.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_environment import WatchedRun
from helpers_profiling import read_spans
from helpers_run import make_rows, make_target, overrides
from helpers_syncs import DeviceReads, Read, drafter_roots, target_roots
from hydra import compose, initialize_config_dir

from dflash.config import config_folder, register_schema, to_train_config
from dflash.drafter.metrics import MetricSums
from dflash.drafter.model import DFlashDrafter
from dflash.groups import Launch, choose_topology
from dflash.profiling.report import RankReport
from dflash.roles.agreement import Agreement
from dflash.roles.colocated import LocalHiddenStates
from dflash.roles.console import Console
from dflash.roles.drafter import train_drafter, train_step
from dflash.roles.reporting import open_report, start_stats
from dflash.roles.setup import Run, choose_device, prepare
from dflash.roles.stopping import StopRequest
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer
from dflash.roles.votes import PendingOutcome
from dflash.target.packing import BufferPool, HiddenStatePacker, _Verdict

# Where a device's values reach the host on purpose.
ALLOWED = {
    # On CUDA neither blocks: the value comes over in pinned memory and is read when its event has passed; for the
    # outcome of a step the loop goes on looking after its edges until then.
    "votes.py:read": "the outcome of a step, which the host has to know before the next one",
    "packing.py:_raise_on": "whether a micro-batch's features were all zero",
    # On the rank that shows them, and after no other steps than these.
    "console.py:log": "metrics of the interval",
    "console.py:log_evaluation": "metrics of an evaluation",
}
STEPS = {"train__max_steps": 5, "train__log_interval_steps": 2, "train__eval_interval_steps": 3}
SHOWN = {"console.py:log": {2, 4, 5}, "console.py:log_evaluation": {3, 5}}
OUTCOMES = [1, 2, 3, 3, 4, 5, 5]  # the steps of all outcomes: one of each step, one of each evaluation
# Between ranks, too: on CUDA the trailer comes over in pinned memory as well, and is looked at behind its event.
ALLOWED_BETWEEN_RANKS = {
    "payload.py:has_arrived": "Gloo tells an arrival by the trailer alone",
    "payload.py:finish_receive": "which payload it is",
}
# Stages that come at intervals of their own, and copy what they need to the host.
ALLOWED_STAGES = {"checkpoint"}
PLANTED = "watched_ranks.py:planted"


class Parts:
    """Both roles in this process, as `run_colocated` puts them together."""

    def __init__(self, folder: Path, *more: str, device: str = "cpu") -> None:
        register_schema()
        arguments = overrides(
            make_target(folder / "target"),
            make_rows(folder / "rows.jsonl", 80),
            folder / "run",
            device=device,
            **STEPS,
        )
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = to_train_config(compose("config", [*arguments, "pipeline=colocated", *more]))
        topology = choose_topology(1, colocated=True, num_target_ranks=None)
        launch = Launch(rank=0, local_rank=0, world_size=1)
        self.run: Run = prepare(config, topology, launch, choose_device(config.device, 0), Agreement(None, 0))
        self.stats = start_stats(config.profiling, self.run.device)
        self.report: RankReport = open_report(self.run, self.stats)
        self.producer = Producer.load(self.run, num_buffers=1)
        self.producer.report_side(self.run, self.report)
        self.trainer = DrafterTrainer.load(self.run, None, self.stats)
        self.source = LocalHiddenStates(self.run, self.producer, self.stats, StopRequest())

    def train(self) -> None:
        train_drafter(self.run, self.trainer, self.source, self.report)

    def watch(self) -> DeviceReads:
        return DeviceReads(self.stats, [*drafter_roots(self.trainer), *target_roots(self.producer)])


def unexpected(found: list[Read], allowed: Iterable[str] = ALLOWED) -> list[Read]:
    """Reads in places where none belongs, or at steps at which nothing is shown."""
    elsewhere = [
        read
        for read in found
        if read.stage.partition("/")[0] not in ALLOWED_STAGES and not any(read.is_in(site) for site in allowed)
    ]
    return elsewhere + [
        read for site, steps in SHOWN.items() for read in found if read.is_in(site) and read.step not in steps
    ]


def steps_of(found: list[Read], site: str) -> list[int]:
    """The step of each read in a function."""
    return [read.step for read in found if read.is_in(site)]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["objective=kl"],
        [
            "optim=muon",
            "model.drafter.layer_types=[sliding_attention,full_attention]",
            "model.drafter.sliding_window=12",
        ],
    ],
    ids=["default", "kl", "muon-sliding"],
)
def test_no_step_reads_the_device_outside_the_log_interval(tmp_path: Path, more: list[str]) -> None:
    parts = Parts(tmp_path, *more)
    with parts.watch() as reads:
        parts.train()
    assert unexpected(reads.found) == []
    for site in ALLOWED:
        assert steps_of(reads.found, site), f"{site} is allowed, but no longer there"
    assert {site: set(steps_of(reads.found, site)) for site in SHOWN} == SHOWN
    assert steps_of(reads.found, "votes.py:read") == OUTCOMES
    logs = {read.stage for read in reads.found if read.is_in("console.py:log")}
    assert logs == {"metrics"}, "the log is read in its own stage"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets and two drafters over Gloo, all watched; reads are planted in sender, queue and reduction."""
    folder = tmp_path_factory.mktemp("four_ranks")
    target, rows = make_target(folder / "target"), make_rows(folder / "rows.jsonl", 80)
    keys = [*overrides(target, rows, folder / "run", **STEPS, pipeline__num_target_ranks=2), "profiling=full"]
    with WatchedRun(folder / "launch", keys, num_ranks=4, program="watched_ranks.py") as run:
        assert run.end() == [0] * 4, run.everything()
    return folder


@pytest.mark.parametrize("name", ["target-0", "target-1", "drafter-2", "drafter-3"])
def test_no_rank_of_a_real_run_reads_the_device_outside_the_log_interval(name: str, four_ranks: Path) -> None:
    lines = json.loads((four_ranks / "launch" / f"{name}.reads").read_text())
    reads = [Read(*values, tuple(sites)) for *values, sites in lines]
    seen = [read for read in reads if read.is_in(PLANTED)]
    planted = {(read.sites[read.sites.index(PLANTED) + 1], read.stage) for read in seen}
    found = [read for read in reads if read not in seen]
    assert unexpected(found, [*ALLOWED, *ALLOWED_BETWEEN_RANKS]) == []
    assert set(seen) <= set(unexpected(reads))
    if name.startswith("target"):
        assert planted == {("watched_ranks.py:send", "send")}
        assert {site for site in ALLOWED if steps_of(found, site)} == {"packing.py:_raise_on"}
        return
    assert planted == {
        ("watched_ranks.py:take", "starved"),
        ("watched_ranks.py:consumed", "receive"),
        ("watched_ranks.py:reduce", "gradient_sync"),
        ("watched_ranks.py:reduce", "evaluate/gradient_sync"),
    }
    assert steps_of(found, "votes.py:read") == OUTCOMES
    assert all(steps_of(found, site) for site in ALLOWED_BETWEEN_RANKS)
    shown = {site: set(steps_of(found, site)) for site in SHOWN}
    assert shown == (SHOWN if name == "drafter-2" else dict.fromkeys(SHOWN, set())), "one drafter shows for all"


@pytest.mark.parametrize("name", ["target-0", "target-1"])
def test_a_targets_data_are_its_own_micro_batches(name: str, four_ranks: Path) -> None:
    """One occurrence of the stage for each, that of its g, and a last one that finds the end."""
    ((_, spans),) = read_spans(four_ranks / "run" / "spans" / f"{name}.spans")
    data, forwards = (
        [(span.index, span.step) for span in spans if span.name == stage] for stage in ("data", "forward")
    )
    assert len(forwards) > 5 and {index % 2 for index, _ in forwards} == {int(name[-1])}
    assert data == [*forwards, (-1, -1)]


class Far:
    """An event that the device has not come to."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pytest.fail("waits for the device")


def test_what_is_still_on_its_way_is_not_read() -> None:
    """The reads that are allowed at every step: neither touches a value before its event has passed."""
    with pytest.raises(AssertionError):
        PendingOutcome(torch.zeros(3), Far()).read()
    packer = HiddenStatePacker(BufferPool(1, 64, torch.device("cpu")), torch.float32, torch.device("cpu"))
    packer._verdicts.append(_Verdict(7, torch.tensor([1]), torch.zeros(2), Far()))
    packer.raise_if_bad()
    packer._verdicts[0] = replace(packer._verdicts[0], arrived=None)
    with pytest.raises(ValueError, match="micro-batch 7 are all zero"):
        packer.raise_if_bad()


def test_a_log_at_every_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Console.add

    def add(self: Console, sums: MetricSums, num_tokens: int) -> None:
        original(self, sums, num_tokens)
        self.log(1, torch.zeros(()), 0.0, 0, 0)

    monkeypatch.setattr(Console, "add", add)
    parts = Parts(tmp_path)
    with parts.watch() as reads:
        parts.train()
    found = unexpected(reads.found)
    assert {read.step for read in found} == {1, 3} and all(read.is_in("console.py:log") for read in found)


def plant_item(monkeypatch: pytest.MonkeyPatch) -> None:
    original = MetricSums.add_
    monkeypatch.setattr(MetricSums, "add_", lambda self, other: (other.values.sum().item(), original(self, other))[1])


def plant_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DrafterTrainer.clear

    def clear(self: DrafterTrainer) -> None:
        if self.gradients_ok:
            original(self)

    monkeypatch.setattr(DrafterTrainer, "clear", clear)


def plant_in_target(operation: Callable[[torch.Tensor], object]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Producer.load.__func__

        def load(cls: type[Producer], run: Run, num_buffers: int) -> Producer:
            producer = original(cls, run, num_buffers)
            layer = producer.target._decoder.layers[0]
            layer.register_forward_hook(lambda module, args, output: (operation(output), None)[1])
            return producer

        monkeypatch.setattr(Producer, "load", classmethod(load))

    return plant


def plant_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    original = DFlashDrafter.project_context

    def project_context(self: DFlashDrafter, features_TF: torch.Tensor) -> torch.Tensor:
        context_TH = original(self, features_TF)
        if context_TH.requires_grad:
            context_TH.register_hook(lambda gradient: (float(gradient.sum()), None)[1])
        return context_TH

    monkeypatch.setattr(DFlashDrafter, "project_context", project_context)


def first(output: object) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    ("plant", "operation", "stage"),
    [
        (plant_item, "aten::_local_scalar_dense", "metrics"),
        (plant_branch, "aten::_local_scalar_dense", "metrics"),
        (plant_in_backward, "aten::_local_scalar_dense", "backward"),
        (plant_in_target(lambda output: first(output).nonzero()), "aten::nonzero", "forward"),
        (plant_in_target(lambda output: first(output)[first(output) > 0]), "aten::index.Tensor", "forward"),
        (plant_in_target(lambda output: first(output).cpu()), "Tensor.cpu", "forward"),
        (plant_in_target(lambda output: first(output).to("cpu")), "Tensor.to", "forward"),
        (plant_in_target(lambda output: first(output)[0, 0].tolist()), "Tensor.tolist", "forward"),
    ],
    ids=["item", "branch", "backward", "nonzero", "mask", "cpu", "to-cpu", "tolist"],
)
def test_a_planted_read_is_found_with_its_stage(
    plant: Callable[[pytest.MonkeyPatch], None],
    operation: str,
    stage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    parts = Parts(tmp_path, "train.max_steps=1")
    with parts.watch() as reads:
        parts.train()
    assert (operation, stage) in {(read.operation, read.stage) for read in unexpected(reads.found)}


@pytest.fixture
def sync_errors() -> Iterator[None]:
    """torch raises where a call would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:
    parts = Parts(tmp_path, "train.log_interval_steps=100", device="cuda")
    with Console(parts.run, True, parts.report) as console:
        for step in (1, 2):  # what compiles may wait
            train_step(parts.run, parts.trainer, parts.source, console, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in (3, 4):
                outcome = train_step(parts.run, parts.trainer, parts.source, console, step)
                parts.report.poll(step)
                assert not outcome.is_bad and not outcome.is_stopping, "the step was whole"
            assert torch.cuda.get_sync_debug_mode() == 2, "or else nothing would have raised"
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_sync_debug_mode_finds_a_planted_read(sync_errors: None) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device="cuda").item()
