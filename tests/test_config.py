"""A wrong key, type or combination ends in one line that names the key and what is allowed."""

import subprocess
import sys
from pathlib import Path

import hydra
import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import OmegaConfBaseException

from dflash.cli import one_line
from dflash.config import TrainConfig, config_folder, register_schema, to_train_config
from dflash.groups import Launch, Topology, choose_topology, default_num_target_ranks

ROOT = Path(__file__).parent.parent


def composed(*overrides: str) -> TrainConfig:
    register_schema()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return to_train_config(compose("config", overrides=list(overrides)))


def error_of(*overrides: str) -> str:
    with pytest.raises((ValueError, OmegaConfBaseException, hydra.errors.HydraException)) as caught:
        composed(*overrides)
    line = one_line(caught.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_step=3", "train.max_step: no such key; did you mean train.max_steps?"),
        ("+trian.max_steps=3", "trian: no such key; did you mean train?"),
        ("+model.drafter.block=8", "model.drafter.block: no such key; did you mean model.drafter.block_size?"),
        ("train.max_steps=soon", "train.max_steps: Value 'soon' of type 'str' could not be converted to Integer"),
        ("data.max_length=1.5", "data.max_length: Value '1.5'"),
        ("device=gpu", "device: Invalid value 'gpu', expected one of [auto, cpu, cuda]"),
        ("data.overlong=drop", "data.overlong: Invalid value 'drop', expected one of [cut, skip]"),
        ("model.target.dtype=fp8", "model.target.dtype: Invalid value 'fp8', expected one of [auto, float32,"),
        ("model=gpt9", "Could not find 'model/gpt9' Available options in 'model': default"),
        ("optim.lr=-1", "optim.lr: -1.0 must be a number above 0"),
        ("optim.lr=nan", "optim.lr: nan must be a number above 0"),
        ("optim.betas=[0.9]", "optim.betas: [0.9] must be two numbers"),
        ("anchors.per_token=0", "anchors.per_token: 0.0 must be above 0 and at most 1"),
        ("anchors.per_token=1e30", "anchors.per_token: 1e+30 must be above 0 and at most 1"),
        ("model.drafter.block_size=1", "model.drafter.block_size: 1 must be at least 2"),
        ("pipeline.queue.depth=0", "pipeline.queue.depth: 0 must be at least 1"),
        ("data.max_bad_fraction=1.5", "data.max_bad_fraction: 1.5 must be at least 0 and below 1"),
        ("data.max_length=4096", "data.max_length: 4096 must not exceed data.tokens_per_micro_batch (512)"),
        ("train.num_epochs=null", "train.max_steps: must be given when train.num_epochs is null"),
        ("model.drafter.layer_types=[full_attention]", "model.drafter.layer_types: has 1 entries, but model.drafter"),
        ("model.drafter.sliding_window=64", "model.drafter.sliding_window: must be null when"),
        ("model.drafter.sliding_is_causal=false", "model.drafter.sliding_is_causal: may be false only when"),
        ("seed=100000000000000000000", "seed: "),
        ("resume=auto", "run_dir: must be given with resume=auto"),
        ("data.train_path=???", "data.train_path: must be given"),
    ],
)
def test_a_mistake_names_its_key_on_one_line(override: str, expected: str) -> None:
    assert error_of(override).removeprefix("In 'config': ").startswith(expected)


def test_sliding_layers_need_a_window() -> None:
    layers = "model.drafter.layer_types=[sliding_attention,full_attention,full_attention]"
    assert error_of(layers).startswith("model.drafter.sliding_window: must be given")
    assert composed(layers, "model.drafter.sliding_window=64").model.drafter.sliding_window == 64


def test_default_composition_is_the_demo() -> None:
    config = composed()
    assert config.model.drafter.block_size == 8
    assert config.data.train_path == "tools/demo_data/stdlib_answers.jsonl"
    assert (ROOT / config.data.train_path).exists()
    assert not config.pipeline.colocated
    assert composed("pipeline=colocated").pipeline.colocated


def test_an_experiment_overrides_every_group_and_the_root() -> None:
    config = composed("experiment=quickstart")
    assert (config.train.num_epochs, config.train.micro_batches_per_step) == (1, 1)
    assert config.model.drafter.init_from == "target" and config.optim.lr == 1e-3
    assert composed("experiment=quickstart", "train.num_epochs=2").train.num_epochs == 2


def test_profile_interval_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "7.5")
    assert composed().profiling.interval_s == 7.5
    for nothing in ("", " "):
        monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", nothing)
        assert composed().profiling.interval_s == 60
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "soon")
    with pytest.raises(OmegaConfBaseException, match="DFLASH_PROFILE_INTERVAL: soon must be a number above 0"):
        composed()
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "-1")
    with pytest.raises(ValueError, match="profiling.interval_s: -1.0 must be"):
        composed()


@pytest.mark.parametrize(("world_size", "expected"), [(2, 1), (3, 2), (4, 3), (5, 3), (8, 5), (16, 10), (64, 40)])
def test_default_split_is_five_eighths(world_size: int, expected: int) -> None:
    assert default_num_target_ranks(world_size) == expected
    topology = choose_topology(world_size, colocated=False, num_target_ranks=None)
    assert (topology.num_targets, topology.num_drafters) == (expected, world_size - expected)


@pytest.mark.parametrize(
    ("world_size", "colocated", "num_target_ranks", "expected"),
    [
        (1, False, None, "pipeline.colocated: is false, which needs at least two ranks"),
        (2, True, None, "pipeline.colocated: true needs exactly one rank, but 2 were launched"),
        (1, True, 1, "pipeline.num_target_ranks: must be null when pipeline.colocated is true"),
        (4, False, 4, "pipeline.num_target_ranks: 4 must be between 1 and 3"),
    ],
)
def test_ranks_that_do_not_fit(world_size: int, colocated: bool, num_target_ranks: int | None, expected: str) -> None:
    with pytest.raises(ValueError, match="pipeline") as caught:
        choose_topology(world_size, colocated=colocated, num_target_ranks=num_target_ranks)
    assert str(caught.value).startswith(expected)


def test_ranks_names_and_edges() -> None:
    topology = Topology(5, 3)
    assert [topology.name(rank) for rank in (0, 4, 5, 7)] == ["target-0", "target-4", "drafter-5", "drafter-7"]
    assert [topology.index_in_group(rank) for rank in (0, 4, 5, 7)] == [0, 4, 0, 2]
    assert len(set(topology.edges)) == 15
    assert Topology(2, 2).edges == ((0, 0), (1, 1))
    assert Launch.from_environment({"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}).node_leader == 8


def test_the_command_says_one_line_and_composes() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dflash.train", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    wrong = run("train.max_step=3")
    assert wrong.returncode == 1 and wrong.stdout == ""
    assert wrong.stderr.startswith("error: train.max_step: no such key") and wrong.stderr.count("\n") == 1
    alone = run()
    assert alone.returncode == 1 and alone.stderr.startswith("error: pipeline.colocated: is false")
    assert alone.stderr.count("\n") == 1
    printed = run("--cfg", "job", "optim.lr=3e-4")
    assert printed.returncode == 0 and "lr: 0.0003" in printed.stdout and "block_size: 8" in printed.stdout
