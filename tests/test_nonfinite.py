"""NaN and infinity are named by micro-batch and documents, agreed on by all drafters, and cost no finished step."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_run import VOCAB_SIZE, launch, make_rows, make_target, metrics, overrides, run_here, scalars
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.checkpoints.finding import list_checkpoints
from dflash.checkpoints.loading import load_drafter
from dflash.drafter.objective import ObjectiveSums
from dflash.roles import trainer
from dflash.roles.votes import Outcome, Votes, fault_code

POISON = VOCAB_SIZE - 2  # no row of make_rows holds it


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose hidden states are not finite wherever the poisonous token has been."""
    folder = make_target(tmp_path_factory.mktemp("target"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def poisoned_rows(path: Path, num_rows: int = 60) -> Path:
    make_rows(path, num_rows)
    with path.open("a") as file:
        file.write(json.dumps({"input_ids": [POISON, *range(1, 30)], "loss_mask": [0] * 10 + [1] * 20}) + "\n")
    return path


def arguments(target: Path, rows: Path, run_dir: Path, **more: object) -> list[str]:
    epochs = {"train__num_epochs": 2, "train__max_steps": "null", "data__eval_fraction": 0.0}
    return overrides(target, rows, run_dir, **(epochs | more))


@pytest.fixture(scope="module")
def skipped(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on two and two ranks, the steps with the poisoned document left out."""
    folder = tmp_path_factory.mktemp("skipped")
    rows = poisoned_rows(folder / "rows.jsonl")
    more = {"train__on_nonfinite": "skip", "pipeline__num_target_ranks": 2}
    done = launch(4, arguments(target, rows, folder / "run", **more))
    warnings = [line for line in done.stderr.splitlines() if "warning: step" in line]
    assert len(warnings) == 2, done.stderr
    for line in warnings:
        assert "is left out: the hidden states are not finite in micro-batch" in line
        assert "whose documents are [" in line and "60" in line.split("documents are")[1]
    return folder


def test_skipped_steps_are_counted_and_leave_no_trace(skipped: Path) -> None:
    records = metrics(skipped / "run")
    counts = [record["skipped_steps"] for record in records]
    assert counts[-1] == 2 and counts == sorted(counts)
    left_out = [i for i, record in enumerate(records) if record["loss"] is None]
    assert len(left_out) == 2 and all(counts[i] == counts[i - 1] + 1 for i in left_out if i)
    assert all(torch.isfinite(tensor).all() for tensor in load_drafter(skipped / "run").state_dict().values())
    assert scalars(skipped / "run", "drafter-2")["train/skipped_steps"][-1][1] == 2


def test_another_split_skips_the_same_steps(target: Path, skipped: Path, tmp_path: Path) -> None:
    run_here(arguments(target, skipped / "rows.jsonl", tmp_path / "run", train__on_nonfinite="skip"))
    ours, theirs = metrics(tmp_path / "run"), metrics(skipped / "run")
    assert [record["skipped_steps"] for record in ours] == [record["skipped_steps"] for record in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        if other["loss"] is None:
            assert mine["loss"] is None
        else:
            assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_bad_step_ends_the_run_after_saving_the_one_before(target: Path, skipped: Path, tmp_path: Path) -> None:
    """And with skip it goes on from there to the same bits as a run that skipped from the start."""
    first_bad = next(record["step"] for record in metrics(skipped / "run") if record["loss"] is None)
    run_dir = tmp_path / "run"
    command = arguments(target, skipped / "rows.jsonl", run_dir, pipeline__num_target_ranks=2)
    done = launch(4, command, check=False)
    assert done.returncode != 0 and "Traceback (most recent call last)" not in done.stderr.split("error:")[0]
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert told and all(f"step {first_bad}: the hidden states are not finite in micro-batch" in line for line in told)
    assert all("train.on_nonfinite=skip" in line for line in told)
    assert [path.name for path in list_checkpoints(run_dir)] == [f"step-{first_bad - 1:06d}"]
    launch(4, [*command, "resume=auto", "train.on_nonfinite=skip"])
    assert metrics(run_dir) == metrics(skipped / "run")
    for (name, mine), other in zip(
        load_drafter(run_dir).state_dict().items(), load_drafter(skipped / "run").state_dict().values(), strict=True
    ):
        assert torch.equal(mine, other), name


def test_a_bad_evaluation_names_the_micro_batch(target: Path, skipped: Path, tmp_path: Path) -> None:
    rows = make_rows(tmp_path / "train.jsonl", 60)
    more = {"data__eval_path": skipped / "rows.jsonl", "train__max_steps": 2}
    with pytest.raises(ValueError, match="the evaluation after step 2: the hidden states are not finite"):
        run_here(arguments(target, rows, tmp_path / "run", **more))
    run_here([*arguments(target, rows, tmp_path / "run", **more), "resume=auto", "train.on_nonfinite=skip"])
    (record,) = metrics(tmp_path / "run", "eval")
    assert record["step"] == 2 and record["loss"] is not None


def _infinite_loss(sums: ObjectiveSums) -> ObjectiveSums:
    return ObjectiveSums(sums.loss_sum * torch.inf, sums.metrics)


def _infinite_gradients(sums: ObjectiveSums) -> ObjectiveSums:
    class Explode(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, loss: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * torch.inf

    return ObjectiveSums(Explode.apply(sums.loss_sum), sums.metrics)


@pytest.mark.parametrize(
    ("spoil", "what"), [(_infinite_loss, "loss is"), (_infinite_gradients, "gradients are")], ids=["loss", "gradients"]
)
def test_the_first_micro_batch_that_goes_bad_is_blamed_alone(
    spoil: Callable[[ObjectiveSums], ObjectiveSums],
    what: str,
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, calls = trainer.objective_sums, []

    def objective_sums(*given: object) -> ObjectiveSums:
        calls.append(given)
        sums = honest(*given)
        return spoil(sums) if len(calls) == 9 else sums  # the third micro-batch of the second step, g = 8

    monkeypatch.setattr(trainer, "objective_sums", objective_sums)
    rows = make_rows(tmp_path / "rows.jsonl", 60)
    with pytest.raises(ValueError, match=f" step 2: the {what} not finite in micro-batch 8, whose [^;]*; look at"):
        run_here(arguments(target, rows, tmp_path / "run"))
    assert [path.name for path in list_checkpoints(tmp_path / "run")] == ["step-000001"]


def test_votes_survive_a_sum_over_drafters() -> None:
    yes, no = torch.tensor(True), torch.tensor(False)
    ranks = [Votes(torch.zeros(Votes.width(4))) for _ in range(3)]
    ranks[0].accuse(0, fault_code(yes, yes, yes))
    ranks[1].accuse(1, fault_code(no, no, no))
    ranks[2].accuse(2, fault_code(yes, no, no))
    ranks[0].accuse(3, fault_code(yes, yes, no))
    ranks[1].stop(is_unfinished=True)
    ranks[2].stop(is_unfinished=False)
    total = Votes(torch.stack([votes.values for votes in ranks]).sum(0))
    assert bool(total.is_spoilt)
    assert total.to_host().read() == Outcome(True, True, False, {1: 1, 2: 2, 3: 3})
    asked = Votes(torch.zeros(Votes.width(2)))
    asked.stop(is_unfinished=False)
    assert not bool(asked.is_spoilt) and asked.to_host().read() == Outcome(True, False, False, {})


def test_a_sum_that_overflows_leaves_the_step_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are finite in every micro-batch and whose norm is not."""
    honest = trainer.objective_sums

    def objective_sums(*given: object) -> ObjectiveSums:
        sums = honest(*given)
        return ObjectiveSums(sums.loss_sum * 1e22, sums.metrics)

    monkeypatch.setattr(trainer, "objective_sums", objective_sums)
    rows = make_rows(tmp_path / "rows.jsonl", 60)
    with pytest.raises(ValueError, match="step 1: the sum of gradients is not finite over micro-batches 0 to 5; look"):
        run_here(arguments(target, rows, tmp_path / "run"))
    assert list_checkpoints(tmp_path / "run") == []
