"""A run that starts from a served drafter: its shape and weights are the folder's, and resuming needs it no more."""

import shutil
from pathlib import Path

import torch
from helpers_drafter import randomize, small_shape
from helpers_run import MASK_TOKEN, VOCAB_SIZE, launch, make_rows, make_target, metrics, overrides

from dflash.checkpoints.loading import load_drafter
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.served import save_served

FOLLOW = {f"model__drafter__{key}": "null" for key in ("num_layers", "block_size", "target_layer_ids", "mask_token_id")}


def test_a_run_goes_on_from_a_served_drafter(tmp_path: Path) -> None:
    target, rows = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60)
    drafter = DFlashDrafter(
        small_shape(hidden_size=32, vocab_size=VOCAB_SIZE, mask_token_id=MASK_TOKEN, layer_types=("sliding_attention",))
    )
    randomize(drafter)
    save_served(drafter, tmp_path / "served", torch.float32)
    more = {**FOLLOW, "model__drafter__init_from": tmp_path / "served", "objective__gamma": 3, "optim__lr": 1e-5}
    more["train__max_steps"] = 4
    whole = overrides(target, rows, tmp_path / "whole", **more)
    launch(1, whole)
    trained = load_drafter(tmp_path / "whole")
    assert trained.shape == drafter.shape
    for one, other in zip(trained.parameters(), drafter.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-4 and not torch.equal(one, other)

    halves = overrides(target, rows, tmp_path / "halves", **more)
    launch(1, [*halves, "train.stop_at_step=2"])
    shutil.rmtree(tmp_path / "served")
    launch(1, [*halves, "resume=auto"])
    assert metrics(tmp_path / "halves") == metrics(tmp_path / "whole")
    resumed = load_drafter(tmp_path / "halves")
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), trained.parameters(), strict=True))

    refused = launch(1, [*halves, "resume=auto", "model.drafter.block_size=8"], check=False)
    assert refused.returncode == 1
    assert "model.drafter.block_size: 8 differs from 5" in refused.stderr
