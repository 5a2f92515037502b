"""Checkpoints: saved beside the training, whole or not there, bit for bit, and damage found before it is used."""

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers_checkpoints
import pytest
import torch
from helpers_checkpoints import CONFIG, Trained, assert_same, failure, flat, full_disk
from helpers_transport import Spec, run_ranks

from dflash.checkpoints.finding import (
    checkpoint_folder,
    clean_up,
    find_checkpoint,
    list_checkpoints,
    restore_replaced,
)
from dflash.checkpoints.loading import load_checkpoint, load_drafter
from dflash.checkpoints.manifest import read_meta, verify
from dflash.checkpoints.saving import CheckpointSaver
from dflash.groups import Topology

TWO_DRAFTERS = Topology(num_targets=1, num_drafters=2)


@pytest.fixture
def saver(tmp_path: Path) -> CheckpointSaver:
    return CheckpointSaver(tmp_path, None, keep=2)


def names(run_dir: Path) -> list[str]:
    """Everything in the run's folder of checkpoints, whole or not."""
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def save_steps(run_dir: Path, *steps: int, keep: int = 9) -> dict[int, Trained]:
    """A checkpoint per step, and what was saved in each."""
    saver = CheckpointSaver(run_dir, None, keep)
    saved = {step: Trained.after(step) for step in steps}
    for step, trained in saved.items():
        trained.save(saver, step)
    return saved


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def found(run_dir: Path, resume: str = "auto") -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return find_checkpoint(resume, run_dir, said.append), said


# Saving and loading


def test_what_is_loaded_has_the_bits_that_were_saved(tmp_path: Path, saver: CheckpointSaver) -> None:
    trained = Trained.after(5)
    folder = trained.save(saver, 5)
    assert folder == checkpoint_folder(tmp_path, 5) and names(tmp_path) == ["step-000005"]
    assert read_meta(folder) == verify(folder) == trained.meta(5)
    loaded = Trained.loaded(folder)
    assert_same(loaded, trained)
    trained.step(6)
    loaded.step(6)
    assert_same(loaded, trained)
    for source in (folder, tmp_path):
        for name, tensor in load_drafter(source).state_dict().items():
            assert torch.equal(tensor, Trained.after(5).drafter.state_dict()[name]), name


def test_training_on_after_start_does_not_reach_the_file(saver: CheckpointSaver) -> None:
    trained, as_saved = Trained.after(2, hidden_size=640), Trained.after(2, hidden_size=640)
    saver.start(trained.meta(2), trained.state)
    for tensor in flat(trained.state).values():
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(7)
    for group in trained.optimizer.adamw.param_groups:
        group["lr"] = 7.0
    folder = saver.finish()
    assert folder is not None
    assert_same(Trained.loaded(folder, hidden_size=640), as_saved)


def test_one_save_at_a_time(saver: CheckpointSaver) -> None:
    assert saver.is_done and saver.finish() is None
    trained = Trained.after(1)
    saver.start(trained.meta(1), trained.state)
    with pytest.raises(AssertionError, match="finish the save before"):
        saver.start(trained.meta(2), trained.state)
    while not saver.is_done:
        time.sleep(0.001)
    assert saver.finish() is not None and saver.finish() is None


def test_memory_reserved_early_is_what_a_save_uses(saver: CheckpointSaver) -> None:
    trained = Trained.after(1)
    saver.reserve(trained.state)
    trained.step(2)
    folder = trained.save(saver, 2)
    assert folder is not None
    assert_same(Trained.loaded(folder), trained)


def test_thirty_saves_leave_memory_files_and_threads_as_they_were(tmp_path: Path, saver: CheckpointSaver) -> None:
    trained = Trained.after(1, hidden_size=640)
    num_bytes = sum(leaf.nbytes for leaf in flat(trained.state).values() if isinstance(leaf, torch.Tensor))
    assert num_bytes > 15 << 20, "a leak of states must show"

    def resources() -> tuple[int, int, int]:
        gc.collect()
        deadline_s = time.monotonic() + 10
        while (num_threads := len(os.listdir("/proc/self/task"))) > threads and time.monotonic() < deadline_s:
            time.sleep(0.01)  # the last thread is ending
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return num_threads, len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    threads = len(os.listdir("/proc/self/task"))
    for step in range(1, 6):
        trained.save(saver, step)
    before = resources()
    for step in range(6, 36):
        trained.save(saver, step)
    after = resources()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < num_bytes
    assert names(tmp_path) == ["step-000034", "step-000035"]


# Several ranks


def test_ranks_save_together_and_none_waits_for_another_to_start(tmp_path: Path) -> None:
    outcomes = run_ranks(helpers_checkpoints.save_together, TWO_DRAFTERS, Spec(0, note=str(tmp_path)), timeout_s=120)
    assert not any(outcome.error for outcome in outcomes), outcomes
    first, last = (outcome.value for outcome in outcomes[1:])
    assert first["is_done_early"] is False, "it had changed its state before the other rank had begun"
    for seen in (first, last):
        assert seen["published"] == [checkpoint_folder(tmp_path, step) for step in (3, 4)] and seen["is_done"]
    assert names(tmp_path) == ["step-000003", "step-000004"]
    for step in (3, 4):
        folder = checkpoint_folder(tmp_path, step)
        verify(folder)
        assert {path.name for path in folder.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
        assert_same(Trained.loaded(folder), Trained.after(step))


def test_a_rank_that_cannot_write_is_named_to_all_and_the_next_save_succeeds(tmp_path: Path) -> None:
    outcomes = run_ranks(helpers_checkpoints.fail_on_one, TWO_DRAFTERS, Spec(0, note=str(tmp_path)), timeout_s=120)
    assert not any(outcome.error for outcome in outcomes), outcomes
    for outcome in outcomes[1:]:
        for rank, told in enumerate(outcome.value["told"], start=1):
            assert told.startswith(f"{checkpoint_folder(tmp_path, 2)} cannot be written: rank {rank}: ")
            assert "File too large" in told and told.endswith(" MiB are free); earlier checkpoints are kept")
        assert outcome.value["published"] == checkpoint_folder(tmp_path, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    for step in (1, 2):
        verify(checkpoint_folder(tmp_path, step))
    assert_same(Trained.loaded(checkpoint_folder(tmp_path, 1)), Trained.after(1))


def test_a_failure_to_publish_reaches_all_ranks_and_keeps_the_old(tmp_path: Path) -> None:
    outcomes = run_ranks(helpers_checkpoints.fail_to_publish, TWO_DRAFTERS, Spec(0, note=str(tmp_path)), timeout_s=120)
    assert not any(outcome.error for outcome in outcomes), outcomes
    for outcome in outcomes[1:]:
        assert "step-000001 cannot be written: rank 1: " in outcome.value["told"]
        assert "Not a directory" in outcome.value["told"]
        assert outcome.value["published"] == checkpoint_folder(tmp_path, 1)
    assert names(tmp_path) == ["step-000001"]
    verify(checkpoint_folder(tmp_path, 1))


def test_a_rank_that_dies_during_a_save_hangs_no_other(tmp_path: Path) -> None:
    outcomes = run_ranks(helpers_checkpoints.lose_a_peer, TWO_DRAFTERS, Spec(0, note=str(tmp_path)), timeout_s=120)
    assert outcomes[2].exit_code == -signal.SIGKILL
    assert not outcomes[1].error, outcomes[1]
    assert outcomes[1].value["error"] not in ("", "ValueError"), "it is the lost peer's fault, not the disk's"
    assert outcomes[1].value["waited_s"] < 30, "half of the group's timeout"
    assert found(tmp_path) == (checkpoint_folder(tmp_path, 1), [])


# Failures of one process


def test_a_full_disk_is_named_costs_nothing_and_the_next_save_succeeds(tmp_path: Path, saver: CheckpointSaver) -> None:
    trained = Trained.after(1)
    trained.save(saver, 1)
    trained.step(2)
    with full_disk():
        told = failure(lambda: trained.save(saver, 2))
    assert told.startswith(f"{checkpoint_folder(tmp_path, 2)} cannot be written: [Errno 27] File too large (")
    assert told.endswith(" MiB are free); earlier checkpoints are kept")
    assert saver.is_done and saver.finish() is None
    assert names(tmp_path) == ["step-000001"], "what was written of the other is gone"
    assert_same(Trained.loaded(checkpoint_folder(tmp_path, 1)), Trained.after(1))
    trained.save(saver, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert_same(Trained.loaded(checkpoint_folder(tmp_path, 2)), trained)


def test_a_folder_that_vanished_is_made_again(tmp_path: Path, saver: CheckpointSaver) -> None:
    trained = Trained.after(1)
    trained.save(saver, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    assert trained.save(saver, 2) == checkpoint_folder(tmp_path, 2)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, saver: CheckpointSaver) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trained = Trained.after(1)
    told = failure(lambda: trained.save(saver, 1))
    assert "step-000001 cannot be written: [Errno " in told and str(tmp_path / "checkpoints") in told
    (tmp_path / "checkpoints").unlink()
    assert trained.save(saver, 1) == checkpoint_folder(tmp_path, 1)


@pytest.mark.parametrize("kill_when", ["__0_0.distcp", ".metadata", "meta.json"])
def test_a_kill_during_a_save_leaves_the_one_before(kill_when: str, tmp_path: Path) -> None:
    script = Path(helpers_checkpoints.__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(script), str(tmp_path), kill_when]
    killed = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder, said = found(tmp_path)
    assert folder is not None and not said
    step = read_meta(folder).step
    assert_same(Trained.loaded(folder, hidden_size=320), Trained.after(step, hidden_size=320))
    clean_up(tmp_path, folder)
    assert names(tmp_path) == [path.name for path in list_checkpoints(tmp_path)], "whole ones alone are left"
    saver = CheckpointSaver(tmp_path, None, keep=1)
    assert Trained.after(1).save(saver, step + 1) == checkpoint_folder(tmp_path, step + 1)
    assert names(tmp_path) == [f"step-{step + 1:06d}"]


# Which are kept


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    saver = CheckpointSaver(tmp_path, None, keep=9)
    trained = Trained.after(3)
    trained.save(saver, 2)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    assert_same(Trained.loaded(checkpoint_folder(tmp_path, 2)), trained)


@pytest.mark.parametrize("is_published", [False, True])
def test_a_kill_between_two_saves_of_one_step_leaves_one(is_published: bool, tmp_path: Path) -> None:
    """The states on disk before and after the last of the two renames."""
    save_steps(tmp_path, 1, 2)
    folder = checkpoint_folder(tmp_path, 2)
    old = folder.with_name(f"{folder.name}-replaced")
    folder.rename(old)
    if is_published:
        shutil.copytree(old, folder)
    expected = folder if is_published else old
    assert list_checkpoints(tmp_path) == [checkpoint_folder(tmp_path, 1), expected]
    assert found(tmp_path) == (expected, [])
    restore_replaced(tmp_path)
    assert found(tmp_path) == (folder, [])
    clean_up(tmp_path, folder)
    assert names(tmp_path) == ["step-000001", "step-000002"] and found(tmp_path) == (folder, [])
    assert_same(Trained.loaded(folder), Trained.after(2))


def test_what_was_passed_over_is_set_aside_and_does_not_count_as_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    flip_a_byte(checkpoint_folder(tmp_path, 3) / "__0_0.distcp")
    folder, said = found(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 2) and len(said) == 1
    clean_up(tmp_path, folder)
    assert names(tmp_path) == ["damaged-step-000003", "step-000001", "step-000002"]
    Trained.after(4).save(CheckpointSaver(tmp_path, None, keep=2), 4)
    assert names(tmp_path) == ["damaged-step-000003", "step-000002", "step-000004"]


def test_leftovers_go_at_launch_and_never_during_a_save(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    left_over = tmp_path / "checkpoints" / ".partial-step-000007"
    shutil.copytree(checkpoint_folder(tmp_path, 1), left_over)
    save_steps(tmp_path, 2)
    assert left_over.exists(), "another rank might be writing it"
    assert found(tmp_path) == (checkpoint_folder(tmp_path, 2), [])
    clean_up(tmp_path, None)
    assert names(tmp_path) == ["step-000001", "step-000002"]
    clean_up(tmp_path / "no run yet", None)


def test_what_an_earlier_save_of_the_step_left_does_not_get_into_the_next(tmp_path: Path) -> None:
    left_over = tmp_path / "checkpoints" / ".partial-step-000001"
    left_over.mkdir(parents=True)
    (left_over / "__7_0.distcp").write_text("of a run with more drafters")
    save_steps(tmp_path, 1)
    assert names(tmp_path) == ["step-000001"]
    assert not (checkpoint_folder(tmp_path, 1) / "__7_0.distcp").exists()


def test_pruning_counts_no_later_damaged_checkpoint(tmp_path: Path) -> None:
    """After a resume that passed a damaged one over, the run's own checkpoints are kept, not that one alone."""
    save_steps(tmp_path, 1, 2, 9)
    flip_a_byte(checkpoint_folder(tmp_path, 9) / "__0_0.distcp")
    save_steps(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-000003", "step-000009"]
    assert found(tmp_path)[0] == checkpoint_folder(tmp_path, 3)
    save_steps(tmp_path, 9, keep=1)
    assert names(tmp_path) == ["step-000009"] and found(tmp_path) == (checkpoint_folder(tmp_path, 9), [])


# Damage


def truncate(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def change_the_step(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 8'))


def write_an_older_format(folder: Path) -> None:
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))


DAMAGES: dict[str, tuple[Any, str]] = {
    "flipped_data": (
        lambda folder: flip_a_byte(folder / "__0_0.distcp"),
        "the contents of __0_0.distcp are not those that were written",
    ),
    "flipped_index": (
        lambda folder: flip_a_byte(folder / ".metadata"),
        "the contents of .metadata are not those that were written",
    ),
    "flipped_manifest": (change_the_step, "the contents of meta.json are not those that were written"),
    "truncated": (truncate, "__0_0.distcp has "),
    "missing_file": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "missing_manifest": (lambda folder: (folder / "meta.json").unlink(), "meta.json is missing"),
    "empty_manifest": (lambda folder: (folder / "meta.json").write_text(""), "meta.json is no manifest"),
    "binary_manifest": (lambda folder: (folder / "meta.json").write_bytes(b"\xff\xfe"), "meta.json is no manifest"),
    "list_as_manifest": (lambda folder: (folder / "meta.json").write_text("[1]"), "meta.json is no manifest"),
    "other_version": (write_an_older_format, "was written by another version of this program"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(kind: str, tmp_path: Path) -> None:
    saved = save_steps(tmp_path, 1, 2, 3)
    damage, reason = DAMAGES[kind]
    last = checkpoint_folder(tmp_path, 3)
    damage(last)
    folder, said = found(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 2)
    assert len(said) == 1 and said[0].startswith(f"passed over: {last}") and reason in said[0]
    assert_same(Trained.loaded(folder), saved[2])
    with pytest.raises(ValueError, match="resume: .*step-000003"):
        found(tmp_path, str(last))
    if kind != "missing_manifest":
        with pytest.raises(ValueError) as caught:
            load_drafter(last)
        assert str(last) in str(caught.value) and reason in str(caught.value)


def test_sizes_alone_do_not_show_a_flipped_byte_but_the_hash_does(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    last = checkpoint_folder(tmp_path, 2)
    flip_a_byte(last / "__0_0.distcp")
    assert read_meta(last).step == 2 and list_checkpoints(tmp_path)[-1] == last
    with pytest.raises(ValueError, match="__0_0.distcp"):
        verify(last)


def test_several_damaged_ones_are_all_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4)
    truncate(checkpoint_folder(tmp_path, 4))
    for step in (2, 3):
        flip_a_byte(checkpoint_folder(tmp_path, step) / ".metadata")
    (tmp_path / "checkpoints" / "step-000099").mkdir()
    folder, said = found(tmp_path)
    assert folder == checkpoint_folder(tmp_path, 1)
    assert sorted(int(text.split("step-")[1][:6]) for text in said) == [2, 3, 4, 99]


def test_damaged_checkpoints_alone_are_no_reason_to_start_from_nothing(tmp_path: Path) -> None:
    assert found(tmp_path) == (None, []) and found(tmp_path, "no") == (None, [])
    save_steps(tmp_path, 1)
    truncate(checkpoint_folder(tmp_path, 1))
    with pytest.raises(ValueError, match="resume: all 1 checkpoints in .* are damaged, .*__0_0.distcp has .* bytes"):
        found(tmp_path)


def test_a_named_checkpoint_must_be_the_newest_whole_one_of_its_run(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    older = checkpoint_folder(tmp_path, 1)
    with pytest.raises(ValueError, match="resume: run_dir holds later checkpoints than step-000001"):
        found(tmp_path, str(older))
    assert found(tmp_path / "new run", str(older)) == (older, [])
    flip_a_byte(checkpoint_folder(tmp_path, 2) / "__0_0.distcp")
    folder, said = found(tmp_path, str(older))
    assert folder == older and len(said) == 1
    for absent in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ValueError, match="is no checkpoint; allowed here: no, auto, or a checkpoint folder"):
            found(tmp_path, str(absent))


def test_damage_after_the_check_is_named_when_loading(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    folder = checkpoint_folder(tmp_path, 1)
    trained = Trained.fresh()
    truncate(folder)
    with pytest.raises(ValueError, match="step-000001 is damaged: .*; use the checkpoint before it"):
        load_checkpoint(folder, trained.drafter, trained.optimizer.adamw, trained.metrics)


# What may change between a checkpoint and the run that goes on from it


def changed(**options: Any) -> dict[str, Any]:
    """The configuration with options changed, `__` for dots."""
    config = copy.deepcopy(CONFIG)
    for key, value in options.items():
        *groups, name = key.split("__")
        node = config
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return config


def test_nothing_changed_is_nothing_said() -> None:
    trained = Trained.fresh()
    shape = trained.drafter.shape
    assert trained.meta(1).check_matches(shape, "train", None, changed()) == []
    unrelated = changed(run_dir="elsewhere", train__stop_at_step=5, checkpoint__keep=1)
    assert trained.meta(1).check_matches(shape, "train", None, unrelated) == []


def test_what_would_change_what_is_learnt_is_refused_all_at_once() -> None:
    trained = Trained.fresh()
    shape = replace(trained.drafter.shape, block_size=4)
    config = changed(seed=5, optim__betas=[0.9, 0.99], anchors__per_token=0.5, optim__lr=1.0)
    with pytest.raises(ValueError) as caught:
        trained.meta(1).check_matches(shape, "other", "eval", config)
    assert str(caught.value) == (
        "resume: block_size was 5, is 4; seed was 0, is 5; anchors.per_token was unset, is 0.5; "
        "optim.betas was [0.9, 0.95], is [0.9, 0.99]; the training data (by fingerprint) was train, is other; "
        "the evaluation data (by fingerprint) was held out of it, is eval; "
        "go on with what was there, or start a new run"
    )


def test_what_may_change_is_told_line_by_line() -> None:
    trained = Trained.fresh()
    config = changed(optim__lr=1e-3, train__max_steps=40, train__on_nonfinite="skip", device="cuda")
    assert trained.meta(7).check_matches(trained.drafter.shape, "train", None, config) == [
        "changed since step 7: device was cpu, is cuda",
        "changed since step 7: optim.lr was 0.0006, is 0.001",
        "changed since step 7: train.max_steps was 20, is 40",
        "changed since step 7: train.on_nonfinite was unset, is skip",
    ]
