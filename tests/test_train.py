"""The real command on several ranks over Gloo: the split changes nothing, resuming changes nothing, bounds hold."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers_run import ROOT, VOCAB_SIZE, launch, make_rows, make_target, metrics, overrides, scalars, share
from hydra import compose, initialize_config_dir

from dflash.checkpoints.finding import list_checkpoints
from dflash.checkpoints.loading import load_drafter
from dflash.cli import one_line
from dflash.config import config_folder, register_schema, to_train_config
from dflash.groups import Launch
from dflash.train import train


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 120)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_drafter(run_dir).state_dict()


@pytest.fixture(scope="module")
def one_and_one(target: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps of one target and one drafter rank, never interrupted."""
    run_dir = tmp_path_factory.mktemp("one_and_one") / "run"
    launch(2, overrides(target, rows, run_dir, train__eval_interval_steps=10))
    return run_dir


@pytest.fixture(scope="module")
def two_and_two(target: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("two_and_two") / "run"
    launch(4, overrides(target, rows, run_dir, train__eval_interval_steps=10, pipeline__num_target_ranks=2))
    return run_dir


@pytest.mark.parametrize("num_ranks", [1, 4, 8])
def test_the_split_of_ranks_changes_no_loss(
    num_ranks: int, target: Path, rows: Path, one_and_one: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run_dir = request.getfixturevalue("two_and_two") if num_ranks == 4 else tmp_path / "run"
    if num_ranks != 4:
        launch(num_ranks, overrides(target, rows, run_dir, train__eval_interval_steps=10))
    for kind, count in (("train", 20), ("eval", 2)):
        ours, theirs = metrics(run_dir, kind), metrics(one_and_one, kind)
        assert len(ours) == len(theirs) == count
        for mine, other in zip(ours, theirs, strict=True):
            assert mine["step"] == other["step"]
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert metrics(run_dir)[-1]["loss"] < metrics(run_dir)[0]["loss"]


def test_the_same_command_gives_the_same_bits(target: Path, rows: Path, two_and_two: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    launch(4, overrides(target, rows, run_dir, train__eval_interval_steps=10, pipeline__num_target_ranks=2))
    assert metrics(run_dir) == metrics(two_and_two)
    assert metrics(run_dir, "eval") == metrics(two_and_two, "eval")
    for (name, mine), other in zip(weights(run_dir).items(), weights(two_and_two).values(), strict=True):
        assert torch.equal(mine, other), name


def test_a_resumed_run_ends_in_the_same_bits(target: Path, rows: Path, one_and_one: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = overrides(target, rows, run_dir, train__eval_interval_steps=10, checkpoint__interval_steps=3)
    launch(2, [*arguments, "train.stop_at_step=7"])
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-000006", "step-000007"]
    again = launch(2, arguments, check=False)
    assert again.returncode != 0 and "run_dir:" in again.stderr and "resume=auto" in again.stderr
    (run_dir / "checkpoints" / "step-000099").mkdir()  # cut off before it was whole: not taken
    cut = shutil.copytree(run_dir / "checkpoints" / "step-000007", run_dir / "checkpoints" / "step-000098")
    largest = max(cut.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with (run_dir / "metrics.jsonl").open("a") as file:  # what a run that went on and was killed would leave
        file.write('{"step": 8, "kind": "train", "loss": 0.0}\n{"step": 9, "ki')
    resumed = launch(2, [*arguments, "resume=auto"])
    assert "resuming after step 7" in resumed.stdout
    assert "step-000098 is damaged" in resumed.stdout
    assert not cut.exists() and (cut.parent / "damaged-step-000098").exists()
    assert metrics(run_dir) == metrics(one_and_one)
    assert metrics(run_dir, "eval") == metrics(one_and_one, "eval")
    for (name, mine), other in zip(weights(run_dir).items(), weights(one_and_one).values(), strict=True):
        assert torch.equal(mine, other), name
    done = launch(2, [*arguments, "resume=auto"])
    assert "nothing left to train: 20 of 20 steps are done" in done.stdout
    changed = refusal([*arguments, "resume=auto", "seed=5", "train.micro_batches_per_step=3"])
    assert changed.startswith("resume: seed was 0, is 5; train.micro_batches_per_step was 6, is 3;")
    older = refusal([*arguments, f"resume={run_dir}/checkpoints/step-000018"])
    assert older.startswith("resume: run_dir holds later checkpoints than step-000018")


def test_what_a_run_leaves_behind(one_and_one: Path) -> None:
    drafter = scalars(one_and_one, "drafter-1")
    for tag in (
        "train/loss",
        "train/accept_length",
        "train/accuracy",
        "train/grad_norm",
        "train/learning_rate",
        "train/tokens_per_s",
        "throughput/tokens_per_s",
        "queue/depth",
        "queue/bytes",
        "eval/loss",
        "eval/accept_length",
        "eval_slot/7",
        "stage/drafter/starved_ms",
        "share/drafter/backward",
    ):
        assert tag in drafter, sorted(drafter)
    logged = metrics(one_and_one)
    assert [step for step, _ in drafter["train/loss"]] == [record["step"] for record in logged] == list(range(1, 21))
    assert drafter["train/loss"][4][1] == pytest.approx(logged[4]["loss"], rel=1e-6)
    assert "share/target/forward" in scalars(one_and_one, "target-0")
    shares = [value[-1][1] for tag, value in drafter.items() if tag.startswith("share/drafter/")]
    assert math.fsum(shares) == pytest.approx(1.0, abs=1e-6)
    assert (one_and_one / "config.yaml").read_text().startswith("run_dir:")


def test_a_slow_drafter_blocks_the_target_and_the_queue_keeps_its_bound(target: Path, tmp_path: Path) -> None:
    rows, run_dir = make_rows(tmp_path / "rows.jsonl", 400), tmp_path / "run"
    heavy = {"model__drafter__num_layers": 8, "model__drafter__intermediate_size": 2048, "anchors__per_token": 1.0}
    more = {"pipeline__queue__depth": 4, "pipeline__queue__min_ready": 2, "train__max_steps": 15}
    launch(2, overrides(target, rows, run_dir, **heavy, **more))
    depths = [depth for _, depth in scalars(run_dir, "drafter-1")["queue/depth"]]
    assert max(depths) <= 4 and sum(depths) / len(depths) > 2
    assert scalars(run_dir, "drafter-1")["queue/max_depth"][-1][1] <= 4
    assert share(run_dir, "target-0", "blocked") > share(run_dir, "target-0", "forward")


def test_a_slow_target_starves_the_drafter(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", num_layers=12, intermediate_size=16384)
    rows, run_dir = make_rows(tmp_path / "rows.jsonl", 400), tmp_path / "run"
    light = {"model__drafter__num_layers": 1, "model__drafter__intermediate_size": 32, "anchors__per_token": 0.01}
    launch(2, overrides(target, rows, run_dir, train__max_steps=15, **light))
    assert share(run_dir, "drafter-1", "starved") > share(run_dir, "drafter-1", "backward")
    assert share(run_dir, "target-0", "forward") > share(run_dir, "target-0", "blocked")


def test_a_window_of_bytes_and_sliding_layers(target: Path, rows: Path, tmp_path: Path) -> None:
    """3 + 2 ranks, a byte bound below one micro-batch, sliding layers, a short last step: still every document once."""
    run_dir = tmp_path / "run"
    sliding = "[sliding_attention,full_attention]"
    more = {"train__max_steps": "null", "train__num_epochs": 1, "pipeline__queue__max_bytes": 1000}
    layers = {"model__drafter__layer_types": sliding, "model__drafter__sliding_window": 12}
    done = launch(5, overrides(target, rows, run_dir, **more, **layers, pipeline__num_target_ranks=3))
    steps = metrics(run_dir)
    assert steps[-1]["step"] == len(steps) and f"{len(steps)} steps of 6 micro-batches" in done.stdout
    assert all(math.isfinite(record["loss"]) for record in steps)


GOOD_ROW = json.dumps({"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}) + "\n"


def refusal(arguments: list[str]) -> str:
    """What one process answers to a run it cannot begin, on one line."""
    register_schema()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", overrides=[*arguments, "pipeline=colocated"])
    with pytest.raises((ValueError, OSError)) as caught:
        train(to_train_config(composed), Launch(0, 0, 1))
    return one_line(caught.value)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (None, "no such data file"),
        ("", "rows.jsonl: "),
        (GOOD_ROW + "{broken\n", "rows.jsonl:2"),
        (json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n", "rows.jsonl:1"),
        (json.dumps({"prompt": "hello", "response": "world"}) + "\n", "tokenizer"),
        (json.dumps({"input_ids": [1, VOCAB_SIZE], "loss_mask": [1, 1]}) + "\n", "rows.jsonl:1"),
    ],
    ids=["missing", "empty", "no_json", "no_assistant", "text_without_tokenizer", "outside_vocabulary"],
)
def test_bad_data_is_refused_and_leaves_no_run_folder(
    contents: str | None, expected: str, target: Path, tmp_path: Path
) -> None:
    path, run_dir = tmp_path / "rows.jsonl", tmp_path / "run"
    if contents is not None:
        path.write_text(contents)
    assert expected in refusal(overrides(target, path, run_dir))
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.drafter.mask_token_id=96", "model.drafter.mask_token_id: 96 must be a token of the target's"),
        ("model.drafter.mask_token_id=null", "model.drafter.mask_token_id: None must be a token"),
        ("model.drafter.target_layer_ids=[1,2,5]", "model.drafter.target_layer_ids: 5 is the target's last layer"),
        ("model.drafter.target_layer_ids=[1,2,9]", "model.drafter.target_layer_ids: the target has no layer 9"),
        (
            "model.drafter.num_layers=9 model.drafter.target_layer_ids=null",
            "model.drafter.target_layer_ids: a target of 6 layers is too shallow",
        ),
        ("model.drafter.block_size=6", "objective.gamma: must be given for block size 6"),
        ("model.drafter.num_key_value_heads=3", "model.drafter.num_key_value_heads: 3 must divide"),
        ("model.target.path=/nowhere", "/nowhere"),
        ("resume=/nowhere", "resume: /nowhere is no checkpoint"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_runs(
    override: str, expected: str, target: Path, rows: Path, tmp_path: Path
) -> None:
    assert expected in refusal([*overrides(target, rows, tmp_path / "run"), *override.split()])
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_on_one_line(target: Path, tmp_path: Path) -> None:
    done = launch(1, overrides(target, tmp_path / "rows.jsonl", tmp_path / "run"), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line] == [
        f"error: {tmp_path}/rows.jsonl: no such data file; check data.train_path and data.eval_path"
    ]


def test_micro_batches_must_divide_among_drafters(target: Path, rows: Path, tmp_path: Path) -> None:
    more = {"pipeline__num_target_ranks": 1, "train__micro_batches_per_step": 4}
    done = launch(4, overrides(target, rows, tmp_path / "run", **more), check=False)
    told = [line for line in done.stderr.splitlines() if "error: train.micro_batches_per_step" in line]
    assert done.returncode != 0 and len(told) == 1
    assert "4 must be divisible by the number of drafter ranks (3)" in told[0]


def test_the_repository_stays_clean(one_and_one: Path) -> None:
    """A run writes into its own folder and the cache alone."""
    assert not list(ROOT.glob("*.log")) and not (ROOT / "outputs").exists()
