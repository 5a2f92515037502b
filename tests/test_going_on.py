"""What a run that goes on meets when its plan, its evaluations or its files are not what they were."""

import json
from pathlib import Path

import pytest
from helpers_run import launch, make_rows, make_target, metrics, overrides


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("inputs")
    target, rows = make_target(folder / "target"), make_rows(folder / "rows.jsonl", 60)
    plan = {"train__num_epochs": 1, "train__max_steps": "null", "train__log_interval_steps": 3}
    return overrides(target, rows, folder / "run", **plan)


def test_a_longer_plan_and_a_torn_file_of_metrics(command: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [*command, f"run_dir={run_dir}"]
    launch(1, command)
    whole = metrics(run_dir)
    assert whole[-1]["partial"] and "partial" not in whole[0]
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"\x00" * 64 + b'\n{"step": 3}\n[1]\n')
    done = launch(1, [*command, "resume=auto", "train.num_epochs=2"])
    assert "train.num_epochs was 1, is 2" in done.stdout
    last = whole[-1]["step"]
    assert f"step {last} ended a shorter plan: " in done.stdout and "are left out" in done.stdout
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    records = metrics(run_dir)
    assert records[-1]["step"] > last and [r["step"] for r in records] == sorted({r["step"] for r in records})
    assert len(steps) == len(records) + len(metrics(run_dir, "eval"))
