"""The real command: every second of a rank's life has its stage, on each side and whatever the rank does."""

import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_profiling import read_spans
from helpers_run import launch, make_rows, make_target, overrides, run_here, scalars

import dflash.train
from dflash.profiling.records import record_path
from dflash.profiling.spans import span_files
from dflash.profiling.totals import OTHER, StageTotals, wall_s
from dflash.profiling.window import ProfilerWindow
from dflash.roles.agreement import OwnError
from dflash.roles.trainer import DrafterTrainer

TARGET_STAGES = {"prepare", "connect", "load", "data", "blocked", "host_to_device", "forward", "pack", "send", OTHER}
COMPUTING = {"anchors", "mask", "context_projection", "layers", "head_and_loss", "backward", "metrics"}
DRAFTER_STAGES = COMPUTING | {
    "prepare",
    "connect",
    "load",
    "data",
    "starved",
    "receive",
    "gradient_sync",
    "optimizer",
    "checkpoint",
    "evaluate",
    OTHER,
}
NONE = StageTotals(0, 0.0, 0.0, 0.0, 0.0, 0.0)


def records(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record_path(run_dir, name).read_text().splitlines()]


def totals_of(record: dict[str, Any]) -> dict[str, StageTotals]:
    return {path: StageTotals.from_json(stage) for path, stage in record["stages"].items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A target and a drafter that evaluate and save in between and wait for one another; folder and console."""
    folder = tmp_path_factory.mktemp("stages")
    # The target is slow and starves the drafter; a queue of two blocks it while the drafter evaluates and saves.
    target = make_target(folder / "target", num_layers=8, intermediate_size=2048)
    arguments = overrides(
        target,
        make_rows(folder / "rows.jsonl", 120),
        folder / "run",
        train__max_steps=16,
        train__eval_interval_steps=8,
        checkpoint__interval_steps=6,
        pipeline__queue__depth=2,
        pipeline__queue__min_ready=1,
        profiling__interval_s=0.5,
    )
    done = launch(2, [*arguments, "profiling=full"])
    return folder / "run", done.stdout


@pytest.mark.parametrize(("name", "stages"), [("target-0", TARGET_STAGES), ("drafter-1", DRAFTER_STAGES)])
def test_stages_sum_to_the_wall_time(finished: tuple[Path, str], name: str, stages: set[str]) -> None:
    first, *intervals, last = records(finished[0], name)
    assert (first["kind"], last["kind"], {record["kind"] for record in intervals}) == ("launch", "run", {"interval"})
    run = totals_of(last)
    assert {path for path in run if "/" not in path} == stages
    # The day's clock, read when a line is written, against the stages' own. A rank may lose its core in between.
    prepared_s = run["prepare"].total_s
    assert wall_s(run) - prepared_s == pytest.approx(last["time"] - first["time"], rel=0.01, abs=0.1)
    assert sum(wall_s(totals_of(record)) for record in intervals) == pytest.approx(wall_s(run), rel=1e-4)
    assert len(intervals) >= 3
    accounted_s = -prepared_s
    for record in intervals:
        # From the beginning on, so that time lost or counted twice adds up, and a moment's delay does not.
        accounted_s += wall_s(totals_of(record))
        assert accounted_s == pytest.approx(record["time"] - first["time"], abs=0.5)
    assert run[OTHER].total_s < 0.05 * wall_s(run), "time between stages is not to hide anything"
    for path, stage in run.items():
        inner_s = sum(
            inner.total_s for other, inner in run.items() if other.rpartition("/")[0] == path and other != path
        )
        assert inner_s <= stage.total_s * (1 + 1e-6)
        assert 0 <= stage.mean_s <= stage.max_s and stage.p95_s <= stage.max_s


def test_each_part_of_a_step_counts_as_often_as_it_is_done(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    target, drafter = (totals_of(records(run_dir, name)[-1]) for name in ("target-0", "drafter-1"))
    num_trained, num_evaluated = drafter["backward"].count, drafter["evaluate/layers"].count
    assert num_trained == 16 * 6 and num_evaluated > 0 and num_evaluated % 2 == 0  # behind steps 8 and 16
    for stage in COMPUTING - {"metrics"}:
        assert drafter[stage].count == num_trained
    assert (drafter["optimizer"].count, drafter["gradient_sync"].count) == (16, 16)
    for stage in ("forward", "pack", "host_to_device", "send"):
        assert target[stage].count == num_trained + num_evaluated
    assert drafter["starved"].count == num_trained + num_evaluated + 1  # and the end
    assert target["data"].count == num_trained + num_evaluated + 1
    assert target["prepare"].count == drafter["prepare"].count == 1


def test_every_second_from_the_launch_on_has_its_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the time that `train` takes, with a preparation that would be missed."""
    prepare = dflash.train.prepare

    def prepare_slowly(*arguments: Any) -> Any:
        time.sleep(5.0)
        return prepare(*arguments)

    monkeypatch.setattr(dflash.train, "prepare", prepare_slowly)
    target, rows = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60)
    keys = overrides(target, rows, tmp_path / "run", train__max_steps=4, profiling__interval_s=0.5)
    seconds = run_here([*keys, "profiling=full"])
    run = totals_of(records(tmp_path / "run", "colocated-0")[-1])
    assert wall_s(run) == pytest.approx(seconds, rel=0.01)
    assert run["prepare"].count == 1 and 5.0 <= run["prepare"].total_s < wall_s(run)
    ((_, spans),) = read_spans(span_files(tmp_path / "run")[0])
    prepared = spans[0]
    assert (prepared.name, prepared.duration_ns / 1e9) == ("prepare", pytest.approx(run["prepare"].total_s, abs=1e-5))


def test_a_rank_that_fails_does_not_wait_for_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ending torch.profiler's window waits for the device without a bound."""
    ended = []
    monkeypatch.setattr(ProfilerWindow, "move", lambda self, step: None)
    monkeypatch.setattr(ProfilerWindow, "close", lambda self: ended.append(self))
    keys = overrides(make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60), tmp_path / "run")
    keys += ["train.max_steps=1", "profiling.torch.start_step=1"]
    run_here(keys)
    assert len(ended) == 1, "it ends where all goes well"

    def fail(*arguments: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(DrafterTrainer, "accumulate", fail)
    with pytest.raises(OwnError, match="planted"):
        run_here([*keys, f"run_dir={tmp_path / 'failed'}"])
    assert len(ended) == 1


def test_a_peer_lost_while_clocks_are_compared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(rank: int, world_size: int) -> None:
        raise ConnectionError("a rank was lost")

    monkeypatch.setattr("dflash.roles.reporting.measure_offset", lose)
    keys = overrides(make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60), tmp_path / "run")
    with pytest.raises(OwnError, match="colocated-0: a rank was lost"):
        run_here([*keys, "profiling=full"])


def test_no_step_and_no_evaluation_holds_an_interval_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step and one evaluation, each of some forty micro-batches of 50 ms or more, in intervals of 0.2 s."""

    def slowed(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            time.sleep(0.05)
            return method(*arguments)

        return wrapped

    for name in ("accumulate", "evaluate"):
        monkeypatch.setattr(DrafterTrainer, name, slowed(getattr(DrafterTrainer, name)))
    more = {"train__max_steps": 1, "train__micro_batches_per_step": 40, "data__eval_fraction": 0.5}
    target, rows = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 250)
    run_here(overrides(target, rows, tmp_path / "run", **more, profiling__interval_s=0.2))
    _, *intervals, last = records(tmp_path / "run", "colocated-0")
    run, each = totals_of(last), [totals_of(record) for record in intervals]
    assert run["backward"].count == 40 and run["evaluate/layers"].count >= 30
    for part in ("backward", "evaluate/layers"):
        # What comes before the first micro-batch and the saving are one piece each.
        during = [totals for totals in each if part in totals and "load" not in totals]
        lengths = [wall_s(totals) - totals.get("checkpoint", NONE).total_s for totals in during]
        assert len(lengths) >= 4 and max(lengths) < 0.2 + sum(lengths) / 4, (part, lengths)


def test_charts_lines_and_tables_of_both_groups(finished: tuple[Path, str]) -> None:
    run_dir, console = finished
    drafter, target = scalars(run_dir, "drafter-1"), scalars(run_dir, "target-0")
    for stage in ("backward", "mask", "context_projection", "evaluate", "evaluate/layers", "checkpoint"):
        for suffix in ("ms", "max_ms", "p95_ms"):
            assert f"stage/drafter/{stage}_{suffix}" in drafter
    assert {"queue/depth", "queue/bytes", "throughput/tokens_per_s"} <= drafter.keys()
    assert list(scalars(run_dir, "all")) == ["throughput/tokens_per_s"]
    assert {"memory/resident_bytes", "process/cpu_percent"} <= target.keys() & drafter.keys()
    assert "stage/target/host_to_device_ms" in target and "throughput/tokens_per_s" in target
    for name, scalars_of in (("target-0", target), ("drafter-1", drafter)):
        lines = (run_dir / "logs" / f"{name}.log").read_text().splitlines()
        assert len(lines) == len(records(run_dir, name)) - 1
        num_points = len(scalars_of[f"share/{name[:-2]}/other"])
        assert num_points <= len(lines) - 1
    stacked = scalars(run_dir, "stack/target/forward")
    assert len(stacked["stack/target"]) >= 2
    assert all(0 <= edge <= 1 + 1e-6 for _, edge in stacked["stack/target"])
    assert re.search(r"where the target group's time went \(target-0, [0-9.]+ s\)", console)
    table = console[console.index("where the drafter group's") :]
    assert all(stage in table for stage in DRAFTER_STAGES) and "no figures came" not in console


def test_the_full_level_keeps_each_occurrence(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    for path in span_files(run_dir):
        ((head, spans),) = read_spans(path)
        run = totals_of(records(run_dir, head.rank_name)[-1])
        kept = [span for span in spans if not span.name.startswith("edge/")]
        assert {span.name for span in kept} == set(run) - {OTHER}
        assert len(kept) == sum(stage.count for stage_path, stage in run.items() if stage_path != OTHER)
        work = "forward" if head.role == "target" else "layers"
        subjects = [(span.index, span.step) for span in kept if span.name == work]
        assert subjects == sorted(set(subjects)) and subjects[0] == (0, 1)


def test_off_leaves_only_what_training_says(tmp_path: Path) -> None:
    target, rows = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60)
    done = launch(1, [*overrides(target, rows, tmp_path / "run", train__max_steps=2), "profiling=off"])
    assert "time went" not in done.stdout
    written = scalars(tmp_path / "run", "colocated-0")
    assert "train/loss" in written and not any(tag.startswith(("stage/", "share/", "memory/")) for tag in written)
    assert not (tmp_path / "run" / "profile").exists()


def test_torch_profiler_records_the_steps_and_ranks_it_is_given(tmp_path: Path) -> None:
    target, rows = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 60)
    keys = [*overrides(target, rows, tmp_path / "run", train__max_steps=4), "profiling.torch.num_steps=1"]
    launch(2, [*keys, "profiling.torch.start_step=3", "profiling.torch.ranks=[1]"])
    (path,) = (tmp_path / "run" / "torch_profiler").iterdir()
    assert path.name == "drafter-1.json.gz"
    with gzip.open(path, "rt") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"]]
    # One backward pass for each of the step's six micro-batches, and the step itself.
    num_gradients = names.count("torch::autograd::AccumulateGrad")
    assert num_gradients > 0 and num_gradients % 6 == 0
    assert sum("Optimizer.step" in name for name in names) == 1
    log = (tmp_path / "run" / "logs" / "drafter-1.log").read_text()
    assert "torch.profiler records from step 3 up to step 3" in log and f"torch.profiler wrote {path}" in log
    elsewhere = [*keys, f"run_dir={tmp_path / 'other'}"]
    refused = launch(2, [*elsewhere, "profiling.torch.start_step=3", "profiling.torch.ranks=[1,2]"], check=False)
    assert refused.returncode != 0 and "profiling.torch.ranks: 2 is no rank; allowed here: 0 to 1" in refused.stderr
