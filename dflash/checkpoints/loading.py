"""What a checkpoint holds of a trainer, and putting it back in place."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from dflash.checkpoints.finding import list_checkpoints
from dflash.checkpoints.manifest import META_FILE, verify
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import SERVED_CONFIG, load_served

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def training_state(drafter: DFlashDrafter, optimizers: Optimizers, metrics: Tensor) -> dict[str, Any]:
    """What a checkpoint holds: masters, optimizer state by parameter name, and sums not yet logged (fp64, 1-d).

    The tensors are the trainer's own, not copies.
    """
    assert metrics.dtype == torch.float64 and metrics.dim() == 1
    return {
        "model": drafter.state_dict(),
        "optimizer": get_optimizer_state_dict(drafter, optimizers),
        "metrics": metrics,
    }


def load_checkpoint(folder: Path, drafter: DFlashDrafter, optimizers: Optimizers, metrics: Tensor) -> None:
    """Put a checkpoint's masters, optimizer state and sums in place; gradients must not be allocated yet.

    Raises ValueError naming the folder and the reason when it cannot be read; `find_checkpoint` has verified it.
    """
    state = training_state(drafter, optimizers, metrics)
    _load(state, folder)
    drafter.load_state_dict(state["model"])
    set_optimizer_state_dict(drafter, optimizers, state["optimizer"])


def load_drafter(folder: Path) -> DFlashDrafter:
    """Drafter (fp32, on the CPU) of an export, of a checkpoint, or of the newest checkpoint of a run folder.

    Raises ValueError when the folder is none of these, and naming the file when the checkpoint is damaged.
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
    drafter = DFlashDrafter(verify(folder).shape)
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
            # Its last line is the cause, after the tracebacks.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ValueError(f"{folder} is damaged: {reason}; use the checkpoint before it") from error
