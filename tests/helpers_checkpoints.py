"""Trainers to save and load, and what processes of their own do with them in the tests of checkpoints."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helpers_drafter import small_shape
from helpers_transport import Spec
from torch import Tensor

from dflash.checkpoints.finding import list_checkpoints
from dflash.checkpoints.loading import load_checkpoint, training_state
from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.saving import CheckpointSaver
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.optimizer import DrafterOptimizer
from dflash.groups import Role, Topology
from dflash.transport.process_groups import ProcessGroups, join

NUM_METRICS = 12
CONFIG: dict[str, Any] = {
    "seed": 0,
    "device": "cpu",
    "data": {"max_length": 64, "eval_fraction": 0.02},
    "optim": {"lr": 6e-4, "betas": [0.9, 0.95]},
    "train": {"max_steps": 20, "num_epochs": None, "micro_batches_per_step": 6},
}


@dataclass(frozen=True, slots=True)
class Trained:
    """A drafter, its optimizer and sums in the middle of a run."""

    drafter: DFlashDrafter
    optimizer: DrafterOptimizer
    metrics: Tensor

    @classmethod
    def fresh(cls, seed: int = 0, hidden_size: int = 20) -> "Trained":
        drafter = DFlashDrafter(small_shape(hidden_size=hidden_size)).initialize(seed)
        return cls(drafter, DrafterOptimizer(drafter), torch.zeros(NUM_METRICS, dtype=torch.float64))

    @classmethod
    def after(cls, num_steps: int, seed: int = 0, hidden_size: int = 20) -> "Trained":
        trained = cls.fresh(seed, hidden_size)
        for step in range(1, num_steps + 1):
            trained.step(step)
        return trained

    def step(self, step: int) -> None:
        """Changes every parameter, moment and sum in place, by draws that depend on the step alone."""
        generator = torch.Generator().manual_seed(step)
        for parameter in self.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step(1e-3, torch.tensor(0.0))
        self.drafter.zero_grad(set_to_none=True)
        self.metrics.add_(torch.randn(NUM_METRICS, generator=generator, dtype=torch.float64))

    @property
    def state(self) -> dict[str, Any]:
        return training_state(self.drafter, self.optimizer.adamw, self.metrics)

    def meta(self, step: int) -> CheckpointMeta:
        return CheckpointMeta(
            step=step,
            owes_evaluation=False,
            next_index=6 * step,
            num_micro_batches=6 * step,
            fingerprint="train",
            eval_fingerprint=None,
            shape=self.drafter.shape,
            config=CONFIG,
        )

    def save(self, saver: CheckpointSaver, step: int) -> Path | None:
        saver.start(self.meta(step), self.state)
        return saver.finish()

    @classmethod
    def loaded(cls, folder: Path, hidden_size: int = 20) -> "Trained":
        trained = cls.fresh(seed=99, hidden_size=hidden_size)
        load_checkpoint(folder, trained.drafter, trained.optimizer.adamw, trained.metrics)
        return trained


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a state by their path."""
    if isinstance(state, dict):
        pairs = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        pairs = [(str(place), value) for place, value in enumerate(state)]
    else:
        return {path: state}
    return {name: leaf for key, value in pairs for name, leaf in flat(value, f"{path}/{key}").items()}


def assert_same(actual: Trained, expected: Trained) -> None:
    """The same bits in masters, optimizer and sums."""
    ours, theirs = flat(actual.state), flat(expected.state)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        same = torch.equal(ours[name], value) if isinstance(value, Tensor) else ours[name] == value
        assert same, name


@contextmanager
def full_disk(num_bytes: int = 4096) -> Iterator[None]:
    """Every longer file that this process writes fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def failure(act: Callable[[], Any]) -> str:
    """Text of the ValueError that `act` raises, empty when it raises none."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def _on_drafters(body: Callable[[ProcessGroups, int, Path], Any], topology: Topology, rank: int, spec: Spec) -> Any:
    groups = join(topology, rank, torch.device("cpu"), timeout_s=60)
    place = topology.index_in_group(rank)
    seen = body(groups, place, Path(spec.note)) if topology.role(rank) is Role.DRAFTER else None
    groups.barrier(60)
    return seen


def save_together(topology: Topology, rank: int, spec: Spec) -> Any:
    return _on_drafters(_save_together, topology, rank, spec)


def _save_together(groups: ProcessGroups, place: int, run_dir: Path) -> dict[str, Any]:
    """The first drafter starts to save long before the last, which waits for it to go on; then a second save."""
    saver = CheckpointSaver(run_dir, groups.checkpoint, keep=2)
    trained = Trained.after(3)
    if place == 1:
        groups.store.wait(["went_on"])
    saver.start(trained.meta(3), trained.state)
    trained.step(4)
    is_done_early = saver.is_done
    if place == 0:
        groups.store.set("went_on", "1")
    published = [saver.finish(), trained.save(saver, 4)]
    return {"is_done_early": is_done_early, "published": published, "is_done": saver.is_done}


def fail_on_one(topology: Topology, rank: int, spec: Spec) -> Any:
    return _on_drafters(_fail_on_one, topology, rank, spec)


def _fail_on_one(groups: ProcessGroups, place: int, run_dir: Path) -> dict[str, Any]:
    """The disk of either drafter is full in turn, and then of neither."""
    saver = CheckpointSaver(run_dir, groups.checkpoint, keep=2)
    trained = Trained.after(1)
    trained.save(saver, 1)
    told = []
    for full in (0, 1):
        trained.step(2)
        with full_disk() if place == full else full_disk(1 << 30):
            told.append(failure(lambda: trained.save(saver, 2)))
    return {"told": told, "published": trained.save(saver, 2)}


def fail_to_publish(topology: Topology, rank: int, spec: Spec) -> Any:
    return _on_drafters(_fail_to_publish, topology, rank, spec)


def _fail_to_publish(groups: ProcessGroups, place: int, run_dir: Path) -> dict[str, Any]:
    """What every rank has written cannot be published by the first, which a file hinders that nobody expects."""
    saver = CheckpointSaver(run_dir, groups.checkpoint, keep=2)
    trained = Trained.after(1)
    first = trained.save(saver, 1)
    replaced, obstacle = (
        run_dir / "checkpoints" / name for name in ("step-000001-replaced", ".partial-removed-step-000001-replaced")
    )
    if place == 0:
        replaced.mkdir()
        obstacle.write_text("in the way")
    told = failure(lambda: trained.save(saver, 1))
    if place == 0:
        assert list_checkpoints(run_dir) == [first]
        obstacle.unlink()
    return {"told": told, "published": trained.save(saver, 1)}


def lose_a_peer(topology: Topology, rank: int, spec: Spec) -> Any:
    """The last drafter dies after the first has begun to save what the last has not."""
    groups = join(topology, rank, torch.device("cpu"), timeout_s=60)
    if topology.role(rank) is Role.TARGET:
        groups.store.wait(["seen"])  # the store lives in this process
        return None
    saver = CheckpointSaver(Path(spec.note), groups.checkpoint, keep=2)
    trained = Trained.after(1)
    trained.save(saver, 1)
    if topology.index_in_group(rank) == 1:
        groups.store.wait(["begun"])
        os.kill(os.getpid(), signal.SIGKILL)
    saver.start(trained.meta(2), trained.state)
    groups.store.set("begun", "1")
    started_s, error = time.monotonic(), ""
    try:
        saver.finish()
    except Exception as caught:
        error = type(caught).__name__
    groups.store.set("seen", "1")
    return {"error": error, "waited_s": time.monotonic() - started_s}


def save_until_killed(run_dir: Path, kill_when: str) -> None:
    """Saves again and again; is killed by its own hand as soon as the folder of a save holds what is named."""
    saver = CheckpointSaver(run_dir, None, keep=2)
    trained = Trained.after(1, hidden_size=320)
    trained.save(saver, 1)
    for step in range(2, 100):
        trained.step(step)
        saver.start(trained.meta(step), trained.state)
        partial = run_dir / "checkpoints" / f".partial-step-{step:06d}" / kill_when
        while not saver.is_done:
            if partial.exists():
                os.kill(os.getpid(), signal.SIGKILL)
        saver.finish()


if __name__ == "__main__":
    save_until_killed(Path(sys.argv[1]), sys.argv[2])
