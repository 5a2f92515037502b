"""Saving and resuming: drafter masters, optimizer state and the run's position, published by one rename."""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import SERVED_CONFIG, load_served
from dflash.drafter.shape import DrafterShape

META_FILE = "meta.json"
# Keys that decide which documents, anchors and held-out share a step meets, and how it weighs them.
_DECISIVE_KEYS = (
    "seed",
    "data.tokens_per_micro_batch",
    "data.eval_fraction",
    "data.eval_max_documents",
    "train.micro_batches_per_step",
    "anchors.per_token",
    "anchors.max_per_document",
    "objective.gamma",
    "optim.betas",
    "optim.weight_decay",
)
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """What a checkpoint says of itself: the last finished step and what it was trained on."""

    step: int
    next_index: int  # the next g
    fingerprint: str
    shape: DrafterShape
    config: dict[str, Any]

    def check_matches(self, shape: DrafterShape, fingerprint: str, config: dict[str, Any]) -> None:
        """Raises ValueError naming what changed since the checkpoint was written and would change what is learnt."""
        before, now = asdict(self.shape), asdict(shape)
        for key in _DECISIVE_KEYS:
            before[key], now[key] = _look_up(self.config, key), _look_up(config, key)
        changed = [f"{key} was {before[key]}, is {now[key]}" for key in now if now[key] != before[key]]
        if changed:
            raise ValueError(f"resume: {'; '.join(changed)}; go on with the old values, or start a new run")
        if fingerprint != self.fingerprint:
            raise ValueError(
                "resume: the training data changed since the checkpoint was written "
                f"(fingerprint {self.fingerprint}, now {fingerprint}); use the same data, or start a new run"
            )


def save_checkpoint(
    run_dir: Path,
    meta: CheckpointMeta,
    drafter: DFlashDrafter,
    optimizer: torch.optim.Optimizer,
    group: torch.distributed.ProcessGroup | None,
    is_leader: bool,
    keep: int,
) -> None:
    """Write `<run_dir>/checkpoints/step-NNNNNN`; every rank of `group` calls it, the leader publishes and prunes.

    `group` None saves without any process group.
    """
    folder = checkpoint_folder(run_dir, meta.step)
    partial = folder.with_name(f".partial-{folder.name}")
    if is_leader:
        for left_over in folder.parent.glob(".partial-*"):
            shutil.rmtree(left_over, ignore_errors=True)
    state = {"model": drafter.state_dict(), "optimizer": get_optimizer_state_dict(drafter, optimizer)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process: as intended
        try:
            dcp.save(state, checkpoint_id=partial, process_group=group, no_dist=group is None)
        except (Exception, CheckpointException) as error:
            free = shutil.disk_usage(run_dir).free >> 20
            raise ValueError(
                f"{folder} cannot be written: {_reason(error)} ({free} MiB are free); earlier checkpoints are kept"
            ) from error
    if not is_leader:
        return
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    _write_durably(partial / META_FILE, json.dumps({"format": _FORMAT, "files": files, **asdict(meta)}, indent=1))
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    _sync_folder(folder.parent)
    for old in list_checkpoints(run_dir)[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, drafter: DFlashDrafter, optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's masters and optimizer state in place; gradients must not be allocated yet."""
    state = {"model": drafter.state_dict(), "optimizer": get_optimizer_state_dict(drafter, optimizer)}
    _load(state, folder)
    drafter.load_state_dict(state["model"])
    set_optimizer_state_dict(drafter, optimizer, state["optimizer"])


def load_drafter(folder: Path) -> DFlashDrafter:
    """Drafter (fp32, on the CPU) of an export, of a checkpoint, or of the newest checkpoint of a run folder.

    Raises ValueError when the folder is none of these.
    """
    if not folder.is_dir():
        raise ValueError(f"drafter {folder}: no such folder; give a checkpoint, a run folder or an export")
    if (folder / SERVED_CONFIG).is_file():
        return load_served(folder)
    if not (folder / META_FILE).exists():
        newest = list_checkpoints(folder)
        if not newest:
            raise ValueError(f"drafter {folder}: is neither a checkpoint, nor a run folder with one, nor an export")
        folder = newest[-1]
    drafter = DFlashDrafter(read_meta(folder).shape)
    state = {"model": drafter.state_dict()}
    _load(state, folder)
    drafter.load_state_dict(state["model"])
    return drafter


def _load(state: dict[str, Any], folder: Path) -> None:
    """Fill `state` in place; every rank reads for itself, so no group is needed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is no Exception; all mean "cannot be read"
            raise ValueError(f"{folder} is damaged: {_reason(error)}; use the checkpoint before it") from error


def _reason(error: BaseException) -> str:
    """Last line of an error that carries the tracebacks of many ranks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def read_meta(folder: Path) -> CheckpointMeta:
    try:
        meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        if meta.pop("format") != _FORMAT:
            raise ValueError(f"{folder}: was written by another version of this program")
        for name, num_bytes in meta.pop("files").items():
            if (folder / name).stat().st_size != num_bytes:
                raise ValueError(f"{folder} is damaged: {name} has not the {num_bytes} bytes that were written")
        shape = {key: tuple(value) if isinstance(value, list) else value for key, value in meta.pop("shape").items()}
        return CheckpointMeta(shape=DrafterShape(**shape), **meta)
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is damaged: {error}") from error


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(run_dir: Path, report: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Whole checkpoints of a run, oldest first; `report` is told of the others."""
    whole = []
    for path in (run_dir / "checkpoints").glob("step-*"):
        try:
            whole.append((read_meta(path).step, path))
        except ValueError as error:
            report(f"passed over: {error}")
    return [path for _, path in sorted(whole)]


def find_checkpoint(resume: str, run_dir: Path, report: Callable[[str], None]) -> Path | None:
    """Checkpoint that `resume` (no | auto | a checkpoint folder) names; None means to start from nothing.

    `auto` takes the newest whole one and reports those it passed over.
    """
    if resume == "no":
        return None
    if resume == "auto":
        found = list_checkpoints(run_dir, report)
        return found[-1] if found else None
    folder = Path(resume).expanduser().absolute()
    if not (folder / META_FILE).exists():
        raise ValueError(f"resume: {folder} is no checkpoint; allowed here: no, auto, or a checkpoint folder")
    if folder.parent == run_dir / "checkpoints" and folder != list_checkpoints(run_dir)[-1]:
        raise ValueError(f"resume: run_dir holds later checkpoints than {folder.name}; go on from it in a new run_dir")
    return folder


def _look_up(config: dict[str, Any], dotted: str) -> Any:
    value: Any = config
    for name in dotted.split("."):
        value = value[name]
    return value


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
