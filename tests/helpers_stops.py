"""What a stopped run owes: its last finished step on disk, in time, and a resumed run that ends as if undisturbed."""

import warnings
from pathlib import Path
from typing import Any

import torch
from helpers_faults import Launched
from helpers_run import metrics
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dflash.checkpoints.finding import list_checkpoints
from dflash.groups import Topology

SAVED_WITHIN_S = 20.0  # torchrun kills after 30
TOPOLOGY = Topology(2, 2)
OPTIONS = {  # intervals that divide neither one another nor the end, so that stops meet all of them half-way
    "train__max_steps": 14,
    "train__log_interval_steps": 3,
    "train__eval_interval_steps": 4,
    "checkpoint__interval_steps": 5,
    "pipeline__queue__depth": 2,
}


def saved_after_s(launched: Launched, run_dir: Path) -> float:
    """Seconds from the signal to the publishing of the newest checkpoint."""
    assert launched.done_s is not None
    return list_checkpoints(run_dir)[-1].stat().st_ctime - launched.done_s  # the rename of a folder is its last change


def stop_complaints(launched: Launched, run_dir: Path, exit_code: int) -> list[str]:
    """What is wrong with a run that was asked to stop."""
    wrong = []
    if launched.done_s is None:
        return [f"nobody was asked to stop: {[(rank.exit_code, rank.stderr[-600:]) for rank in launched.ranks]}"]
    for rank in launched.ranks:
        if rank.exit_code != exit_code or rank.told or "Traceback" in rank.stderr:
            wrong.append(f"{rank.name} ended with {rank.exit_code} instead of {exit_code}: {rank.stderr[-3000:]}")
    if not list_checkpoints(run_dir):
        wrong.append("nothing was saved")
    elif (after_s := saved_after_s(launched, run_dir)) > SAVED_WITHIN_S:
        wrong.append(f"saved only after {after_s:.1f} s")
    return wrong + [f"left running: {command}" for command in launched.left_over]


def differences(run_dir: Path, undisturbed: Path) -> list[str]:
    """Where two finished runs differ: logged metrics, and every bit of the last checkpoint."""
    wrong = [
        f"metrics of kind {kind}: {metrics(run_dir, kind)} instead of {metrics(undisturbed, kind)}"
        for kind in ("train", "eval")
        if metrics(run_dir, kind) != metrics(undisturbed, kind)
    ]
    ours, theirs = list_checkpoints(run_dir)[-1], list_checkpoints(undisturbed)[-1]
    if ours.name != theirs.name:
        return [*wrong, f"ended with {ours.name} instead of {theirs.name}"]
    mine, expected = whole_state(ours), whole_state(theirs)
    if mine.keys() != expected.keys():
        return [*wrong, f"other keys: {sorted(mine.keys() ^ expected.keys())}"]
    return wrong + [f"{key} differs" for key, value in mine.items() if not is_same(value, expected[key])]


def whole_state(checkpoint: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is unavailable")  # one process: as intended
        return leaves(_load_state_dict_from_keys(checkpoint_id=checkpoint))


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries and lists by their path."""
    if isinstance(state, dict | list | tuple):
        items = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: leaf for name, value in items for key, leaf in leaves(value, f"{path}/{name}").items()}
    return {path: state}


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
