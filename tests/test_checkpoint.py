"""A checkpoint that cannot be written costs nothing that was there before."""

import resource
from pathlib import Path

import pytest
import torch
from helpers_drafter import small_shape

from dflash.checkpoint import CheckpointMeta, list_checkpoints, load_drafter, save_checkpoint
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.optimizer import DrafterOptimizer


def save(run_dir: Path, drafter: DFlashDrafter, step: int) -> None:
    meta = CheckpointMeta(step=step, next_index=0, fingerprint="f", shape=drafter.shape, config={})
    optimizer = DrafterOptimizer(drafter).adamw
    save_checkpoint(run_dir, meta, drafter, optimizer, group=None, is_leader=True, keep=2)


def test_a_write_that_fails_is_named_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    drafter = DFlashDrafter(small_shape()).initialize(0)
    save(tmp_path, drafter, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # every longer file fails, as on a full disk
    try:
        with pytest.raises(ValueError, match="step-000002 cannot be written: .* earlier checkpoints are kept"):
            save(tmp_path, drafter, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000001"]
    for name, tensor in load_drafter(tmp_path).state_dict().items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name
    save(tmp_path, drafter, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".")] == []
