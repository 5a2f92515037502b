"""The verdict's arithmetic, from records whose figures are known exactly."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers_run import ROOT

START_S = 1_000_000.0
INTERVAL_S = 10.0
TWO = ("target-0", "drafter-1")
THREE = ("target-0", "drafter-1", "drafter-2")


def stage(total_s: float, count: int = 10, launch_s: float | None = None) -> dict[str, float]:
    launch_s = total_s if launch_s is None else launch_s
    return {
        "count": count,
        "total_s": total_s,
        "launch_s": launch_s,
        "mean_s": total_s / max(count, 1),
        "max_s": total_s,
        "p95_s": total_s,
    }


def write_rank(
    run_dir: Path,
    name: str,
    shares: dict[str, float],
    tokens_per_s: float,
    num_intervals: int = 6,
    gauges: dict[str, float] | None = None,
    started_s: float = START_S,
    has_ended: bool = True,
    ranks: tuple[str, ...] = TWO,
    cores: str = "0-1",
) -> None:
    """A warm-up interval, intervals of `shares` each, and one in which the run ends."""
    machine = {"host": "here", "cores": cores, "core_quota": None, "ranks": ranks}
    lines: list[dict[str, Any]] = [{"kind": "launch", "time": started_s, "first_step": 1, **machine}]
    role = name.split("-")[0]
    courses = [{"load": 0.8, "other": 0.2}, *[shares] * num_intervals]
    if has_ended:
        courses.append({"blocked" if role == "target" else "starved": 1.0})
    for place, course in enumerate(courses):
        stages = {path: stage(share * INTERVAL_S) for path, share in course.items()}
        rate = tokens_per_s if course is shares else 0.0
        lines.append(
            {
                "kind": "interval",
                "time": started_s + (place + 1) * INTERVAL_S,
                "step": place,
                "stages": stages,
                "rates": {"throughput/tokens_per_s": rate},
                "gauges": gauges or {},
            }
        )
    if has_ended:
        lines.append({"kind": "run", "time": started_s, "step": 9, "stages": {}})
    path = run_dir / "profile" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"name": name, "role": role, **line}) + "\n" for line in lines)


def verdict(run_dir: Path) -> tuple[dict[str, Any], str]:
    """All figures of the tool, and what it says."""
    output = run_dir / "verdict.json"
    command = [sys.executable, "tools/verdict.py", str(run_dir), "--json", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def write_three(run_dir: Path) -> None:
    """One target that could do 1000 tokens/s and two drafters that do 200 each, 80 % of their time."""
    write_rank(run_dir, "target-0", {"forward": 0.38, "other": 0.02, "blocked": 0.6}, 400, ranks=THREE)
    course = {"layers": 0.5, "head_and_loss": 0.3, "optimizer": 0.1, "gradient_sync": 0.05, "starved": 0.05}
    for name in ("drafter-1", "drafter-2"):
        write_rank(run_dir, name, course, 200, ranks=THREE)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"train": {"micro_batches_per_step": 12}}))


def test_the_arithmetic_of_splits(tmp_path: Path) -> None:
    write_three(tmp_path)
    found, text = verdict(tmp_path)
    assert found["tokens_per_s"] == pytest.approx(400) and found["limited_by"] == "drafter"
    # 0.8 s of 200 tokens are shared out, 0.15 s stay with each drafter: 1 / (0.004 / 2 + (0.1 + 0.05) / 400).
    drafters = 1 / (0.004 / 2 + 0.15 / 400)
    assert found["shortfall"] == pytest.approx(1 - 400 / drafters)
    assert found["other_group_could"] == pytest.approx(1000 / drafters)
    by_split = {(s["num_targets"], s["num_drafters"]): s for s in found["splits"]}
    assert by_split.keys() == {(1, 2), (2, 1)}
    assert by_split[1, 2]["tokens_per_s"] == pytest.approx(400)
    # One drafter has no gradients to sum, and no second one to share the optimizer's time with.
    alone = 1 / (0.004 + 0.1 / 400)
    assert by_split[2, 1]["tokens_per_s"] == pytest.approx(alone * 400 / drafters)
    more = {(s["num_targets"], s["num_drafters"]): s["tokens_per_s"] for s in found["one_more"]}
    # A third drafter has 2/3 of the others' ring to pass, where a second one has 1/2.
    third = 1 / (0.004 / 3 + (0.1 + 0.05 * (2 / 3) / (1 / 2)) / 400)
    assert more == pytest.approx({(2, 2): 400, (1, 3): third * 400 / drafters})
    assert found["look_first"]["stage"] == "layers" and found["look_first"]["role"] == "drafter"
    assert found["waiting"] == pytest.approx({"target": 0.6, "drafter": 0.05})
    assert found["confidence"] == "good"
    assert "The drafters limit" in text and "<- the present split, best" in text and "how sure: good" in text


def test_the_slowest_rank_edge_and_the_queue(tmp_path: Path) -> None:
    gauges = {"edge/drafter-2/transfer_ms": 4.0, "edge/drafter-3/transfer_ms": 12.0}
    ranks = ("target-0", "target-1", "drafter-2", "drafter-3")
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 100, gauges=gauges, ranks=ranks)
    write_rank(tmp_path, "target-1", {"forward": 0.5, "blocked": 0.5}, 100, ranks=ranks)
    queue = {"queue/ready_at_take": 0.25, "queue/empty_at_take": 0.75}
    # What the quick one waits for in the sum of gradients is not its work.
    write_rank(
        tmp_path, "drafter-2", {"layers": 0.2, "gradient_sync": 0.4, "starved": 0.4}, 100, gauges=queue, ranks=ranks
    )
    write_rank(
        tmp_path, "drafter-3", {"layers": 0.6, "gradient_sync": 0.0, "starved": 0.4}, 100, gauges=queue, ranks=ranks
    )
    found, text = verdict(tmp_path)
    assert found["slowest_rank"]["target"]["rank"] == "target-0"
    assert found["slowest_rank"]["target"]["times_mean"] == pytest.approx(4 / 3)
    assert found["slowest_rank"]["drafter"]["rank"] == "drafter-3"
    assert found["slowest_edge"]["edge"] == "target-0 -> drafter-3"
    assert found["queue"] == {"ready_at_take": 0.25, "empty_at_take": 0.75}
    assert "none 75% of the time" in text
    # target-0 works all the time, and what the others do is no doubt about that.
    assert found["limited_by"] == "target" and found["confidence"] == "good" and found["shortfall"] == pytest.approx(0)
    assert "target-0 has 1.33 times the mean work per token" in text
    assert found["waiting_for_one_another"] == pytest.approx(0.2) and "waited for one another 20%" in text


def test_a_launch_bound_stage_is_told(tmp_path: Path) -> None:
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 100)
    write_rank(tmp_path, "drafter-1", {"layers": 0.5, "starved": 0.5}, 100)
    path = tmp_path / "profile" / "target-0.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if "forward" in record.get("stages", {}):
            record["stages"]["forward"]["launch_s"] *= 0.97
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found, text = verdict(tmp_path)
    assert found["look_first"]["host_share"] == pytest.approx(0.97) and "launches limit it" in text
    assert found["limited_by"] == "target" and found["other_group_could"] == pytest.approx(2)


def test_both_groups_waiting_is_no_stages_fault(tmp_path: Path) -> None:
    write_rank(tmp_path, "target-0", {"forward": 0.6, "blocked": 0.4}, 100)
    write_rank(tmp_path, "drafter-1", {"layers": 0.7, "starved": 0.3}, 100)
    found, text = verdict(tmp_path)
    assert found["look_first"]["both_groups_wait"] and "pipeline.queue.depth" in text
    assert found["shortfall"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("busy", "wobble", "expected"), [(0.97, 0.0, "balanced"), (0.8, 0.0, "target"), (0.8, 0.6, "uncertain")]
)
def test_who_limits_is_said_only_when_it_is_known(tmp_path: Path, busy: float, wobble: float, expected: str) -> None:
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 100)
    write_rank(tmp_path, "drafter-1", {"layers": busy, "starved": 1 - busy}, 100)
    path = tmp_path / "profile" / "drafter-1.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for place, record in enumerate(r for r in records if "layers" in r.get("stages", {})):
        record["rates"]["throughput/tokens_per_s"] *= 1 + wobble * (-1) ** place
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found, text = verdict(tmp_path)
    assert found["limited_by"] == expected
    assert ("not certain" in text) == (expected == "uncertain")


def test_cores_bound_every_split(tmp_path: Path) -> None:
    # 0.4 cores for 400 tokens/s of the target, 0.9 for those of the drafter: two cores carry 2 * 400 / 1.3 of both.
    write_rank(tmp_path, "target-0", {"forward": 0.4, "blocked": 0.6}, 400, gauges={"process/cpu_percent": 40})
    write_rank(tmp_path, "drafter-1", {"layers": 1.0}, 400, gauges={"process/cpu_percent": 90})
    found, text = verdict(tmp_path)
    assert found["limited_by"] == "drafter" and found["cores_could"] == pytest.approx(800 / 1.3)
    more = {(s["num_targets"], s["num_drafters"]): s for s in found["one_more"]}
    assert more[1, 2]["tokens_per_s"] == pytest.approx(800 / 1.3) and more[1, 2]["limited_by"] == "cores"
    assert more[2, 1]["tokens_per_s"] == pytest.approx(400) and more[2, 1]["limited_by"] == "drafter"
    assert "limited by the cores" in text


def test_ranks_that_share_too_few_cores_are_told_so(tmp_path: Path) -> None:
    """Three ranks compute 4 core-seconds each per 1,000 tokens; each has a core for two thirds of the time."""
    gauges = {"process/cpu_percent": 200 / 3, "process/main_thread_waits_for_core_percent": 100 / 3}
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 500 / 3, gauges=gauges, ranks=THREE)
    for name in ("drafter-1", "drafter-2"):
        write_rank(tmp_path, name, {"layers": 1.0}, 500 / 6, gauges=gauges, ranks=THREE)
    found, text = verdict(tmp_path)
    assert found["limited_by"] == "cores" and "The 2 cores limit" in text
    assert found["cores_could"] == pytest.approx(500 / 3) and found["shortfall"] == pytest.approx(0)
    assert found["other_group_could"] == pytest.approx(1), "the wait for a core is no work"
    assert {s["limited_by"] for s in found["splits"]} <= {"cores", "drafter"}


def test_pinned_ranks_have_cores_of_their_own(tmp_path: Path) -> None:
    for name, cores, shares in (("target-0", "0,2", {"forward": 1.0}), ("drafter-1", "1,3-4", {"layers": 1.0})):
        write_rank(tmp_path, name, shares, 100, gauges={"process/cpu_percent": 100}, cores=cores)
    found, _ = verdict(tmp_path)
    assert found["num_cores"] == 5 and found["cores_could"] == pytest.approx(250)


def test_a_wait_for_a_core_lies_in_the_work(tmp_path: Path) -> None:
    """Half of the target's 20 % was such a wait: on a core of its own it could do ten times as much."""
    gauges = {"process/main_thread_waits_for_core_percent": 10.0}
    write_rank(tmp_path, "target-0", {"forward": 0.2, "blocked": 0.8}, 100, gauges=gauges)
    write_rank(tmp_path, "drafter-1", {"layers": 1.0}, 100, gauges=gauges)
    found, text = verdict(tmp_path)
    assert found["other_group_could"] == pytest.approx(9)  # a tenth of the drafter's work was such a wait, too
    assert found["look_first"]["host_share"] is None and "launching" not in text, "nothing but the host's clock"


def test_waits_of_the_warm_up_and_time_on_a_core_are_no_waits_of_the_work(tmp_path: Path) -> None:
    """Waits as long as all work there was: a rank that computed had a core meanwhile."""
    waits, computed = "process/main_thread_waits_for_core_percent", "process/thread_cpu_percent/main"
    shares = {"forward": 0.2, "blocked": 0.8}
    write_rank(tmp_path, "target-0", shares, 100, gauges={waits: 25.0, computed: 15.0})
    write_rank(tmp_path, "drafter-1", {"layers": 1.0}, 100)
    assert verdict(tmp_path)[0]["other_group_could"] == pytest.approx(1 / 0.15)
    short = tmp_path / "short"
    for name, course in (("target-0", shares), ("drafter-1", {"layers": 1.0})):
        write_rank(short, name, course, 100, num_intervals=1, has_ended=False, gauges={waits: 25.0})
        path = short / "profile" / f"{name}.jsonl"
        launch, _, line = path.read_text().splitlines()
        record = json.loads(line)
        record["stages"]["load"] = stage(INTERVAL_S)
        path.write_text(f"{launch}\n{json.dumps(record)}\n")
    found, _ = verdict(short)
    # Of 20 s the target waited 5 for a core, and loaded for 10 of the 12 in which it could have used one.
    assert found["other_group_could"] == pytest.approx((1 - 5 / 20) / (0.2 * (1 - 5 / 12)))


def test_the_present_split_is_best_unless_another_gives_more(tmp_path: Path) -> None:
    gauges = {"process/cpu_percent": 100.0}
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 100, gauges=gauges, ranks=THREE)
    for name in ("drafter-1", "drafter-2"):
        write_rank(tmp_path, name, {"layers": 1.0}, 50, gauges=gauges, ranks=THREE, cores="0")
    _, text = verdict(tmp_path)
    (best,) = [line for line in text.splitlines() if line.endswith("best")]
    assert "1+2" in best and "the present split, best" in best


@pytest.mark.parametrize("value", ['"x"', "null", "Infinity", "NaN", "-1", "1e400", "[]"])
def test_a_damaged_value_costs_its_line(tmp_path: Path, value: str) -> None:
    write_three(tmp_path)
    path = tmp_path / "profile" / "target-0.jsonl"
    lines = path.read_text().splitlines()
    for place, key in enumerate(('"total_s": ', '"count": ', '"throughput/tokens_per_s": ', '"time": '), start=2):
        before, after = lines[place].split(key, 1)
        lines[place] = f"{before}{key}{value}{after[min(after.find(end) for end in ',}' if end in after) :]}"
    path.write_text("\n".join(lines) + "\n")
    found, _ = verdict(tmp_path)
    assert any("4 lines" in reason for reason in found["reasons"]) and found["tokens_per_s"] == pytest.approx(400)


def test_the_filling_of_the_queue_is_no_steady_state(tmp_path: Path) -> None:
    """A drafter that has yet to start is starved, while targets have not been blocked once."""
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 100)
    write_rank(tmp_path, "drafter-1", {"starved": 1.0}, 0, num_intervals=2, has_ended=False)
    path = tmp_path / "profile" / "drafter-1.jsonl"
    filling = path.read_text()
    path.unlink()
    write_rank(tmp_path, "drafter-1", {"layers": 0.8, "starved": 0.2}, 100, num_intervals=4)
    launch, _, *rest = path.read_text().splitlines(keepends=True)
    later = []
    for line in rest:
        record = json.loads(line)
        later.append(json.dumps(record | {"time": record["time"] + 2 * INTERVAL_S}) + "\n")
    path.write_text(filling + "".join(later))
    found, _ = verdict(tmp_path)
    assert found["waiting"]["drafter"] == pytest.approx(0.2) and found["limited_by"] == "target"


def pipeline(
    num_targets: int, num_drafters: int, target_s: float, drafter_s: float, per_drafter: int
) -> dict[str, tuple[dict[str, float], float]]:
    """Shares and micro-batches per second by rank of the trainer's own order of work, steps of `per_drafter` each.

    Micro-batch g goes from target g mod T to drafter g mod D, with credit for 20 of a drafter's own; every step ends
    when its last drafter does.
    """
    num_steps, depth = 300, 20
    per_step = per_drafter * num_drafters
    targets = [{"forward": 0.0, "blocked": 0.0} for _ in range(num_targets)]
    drafters = [{"layers": 0.0, "starved": 0.0, "gradient_sync": 0.0} for _ in range(num_drafters)]
    target_free, drafter_free = [0.0] * num_targets, [0.0] * num_drafters
    consumed: list[float] = []
    for step in range(num_steps):
        for g in range(step * per_step, (step + 1) * per_step):
            t, d = g % num_targets, g % num_drafters
            credit = consumed[g - depth * num_drafters] if g >= depth * num_drafters else 0.0
            targets[t]["blocked"] += max(credit - target_free[t], 0.0)
            targets[t]["forward"] += target_s
            target_free[t] = max(target_free[t], credit) + target_s
            drafters[d]["starved"] += max(target_free[t] - drafter_free[d], 0.0)
            drafters[d]["layers"] += drafter_s
            drafter_free[d] = max(drafter_free[d], target_free[t]) + drafter_s
            consumed.append(drafter_free[d])
        for d in range(num_drafters):
            drafters[d]["gradient_sync"] += max(drafter_free) - drafter_free[d]
        drafter_free = [max(drafter_free)] * num_drafters
    wall_s, total = drafter_free[0], num_steps * per_step
    for stages in targets:
        stages["blocked"] += wall_s - sum(stages.values())
    ranks = {f"target-{t}": (stages, total / num_targets / wall_s) for t, stages in enumerate(targets)}
    ranks |= {f"drafter-{num_targets + d}": (s, total / num_drafters / wall_s) for d, s in enumerate(drafters)}
    return {name: ({stage: s / wall_s for stage, s in stages.items()}, rate) for name, (stages, rate) in ranks.items()}


@pytest.mark.parametrize(
    ("num_targets", "num_drafters", "target_s", "drafter_s", "per_drafter"),
    [(1, 2, 1.0, 0.2, 1), (1, 3, 1.0, 0.2, 4), (1, 3, 1.0, 2.0, 1), (2, 2, 1.0, 1.5, 2), (3, 1, 1.0, 0.8, 6)],
)
def test_predictions_hold_for_the_order_in_which_ranks_work(
    tmp_path: Path, num_targets: int, num_drafters: int, target_s: float, drafter_s: float, per_drafter: int
) -> None:
    """A drafter that has its micro-batches early waits for the others in the gradients' sum, not for input."""
    ranks = pipeline(num_targets, num_drafters, target_s, drafter_s, per_drafter)
    for name, (shares, rate) in ranks.items():
        write_rank(tmp_path, name, shares, rate, ranks=tuple(ranks))
    found, _ = verdict(tmp_path)
    could = {"target": num_targets / target_s, "drafter": num_drafters / drafter_s}
    assert found["limited_by"] == min(could, key=lambda role: could[role])
    assert found["other_group_could"] == pytest.approx(max(could.values()) / min(could.values()), rel=0.02)
    for split in found["splits"] + found["one_more"]:
        other = pipeline(split["num_targets"], split["num_drafters"], target_s, drafter_s, per_drafter)
        reached = sum(rate for name, (_, rate) in other.items() if name.startswith("drafter"))
        assert split["tokens_per_s"] == pytest.approx(reached, rel=0.04), split


def test_what_slows_ranks_down_for_the_check_still_fits_them() -> None:
    program = "import check_verdict; check_verdict.slow_down(check_verdict.CASES['alike'])"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_process_is_told_what_two_would_give(tmp_path: Path) -> None:
    write_rank(tmp_path, "colocated-0", {"forward": 0.25, "layers": 0.75}, 300, ranks=("colocated-0",))
    found, text = verdict(tmp_path)
    (split,) = found["splits"]
    assert (split["num_targets"], split["num_drafters"]) == (1, 1)
    assert split["tokens_per_s"] == pytest.approx(400) and split["limited_by"] == "drafter"
    assert found["tokens_per_s"] == pytest.approx(300) and found["stages"].keys() == {"both"}


def test_a_split_that_the_trainer_refuses_is_not_best(tmp_path: Path) -> None:
    ranks = (*THREE, "drafter-3")
    write_rank(tmp_path, "target-0", {"forward": 0.1, "blocked": 0.9}, 100, ranks=ranks)
    for rank in (1, 2, 3):
        write_rank(tmp_path, f"drafter-{rank}", {"layers": 1.0}, 100 / 3, ranks=ranks)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"train": {"micro_batches_per_step": 4}}))
    found, text = verdict(tmp_path)
    refused = {s["num_drafters"]: s["not_allowed"] for s in found["splits"]}
    assert refused[1] is None and refused[2] is None and "not divisible by 3" in refused[3]
    (best,) = [line for line in text.splitlines() if line.endswith("best")]
    assert best.strip().startswith("2+2")


def test_only_the_last_launch_counts(tmp_path: Path) -> None:
    before = START_S - 100  # resumed at once, from 2+1 to 1+1: rank 1 was a target
    ranks = ("target-0", "target-1", "drafter-2")
    write_rank(tmp_path, "target-0", {"forward": 0.1, "blocked": 0.9}, 50, started_s=before, ranks=ranks)
    write_rank(tmp_path, "target-1", {"forward": 0.1, "blocked": 0.9}, 50, started_s=before, ranks=ranks)
    write_rank(tmp_path, "drafter-2", {"layers": 1.0}, 50, started_s=before, ranks=ranks)
    write_rank(tmp_path, "target-0", {"forward": 1.0}, 80)
    write_rank(tmp_path, "drafter-1", {"layers": 0.5, "starved": 0.5}, 80)
    found, _ = verdict(tmp_path)
    assert (found["num_targets"], found["num_drafters"]) == (1, 1)
    assert found["limited_by"] == "target" and found["tokens_per_s"] == pytest.approx(80)


def test_a_short_run_is_not_trusted(tmp_path: Path) -> None:
    write_rank(tmp_path / "short", "target-0", {"forward": 1.0}, 80, num_intervals=0)
    write_rank(tmp_path / "short", "drafter-1", {"layers": 1.0}, 80, num_intervals=0)
    done = subprocess.run(
        [sys.executable, "tools/verdict.py", str(tmp_path / "short")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1 and "counted no tokens" in done.stderr and done.stderr.count("\n") == 1
    for name, course in (("target-0", {"forward": 1.0}), ("drafter-1", {"layers": 1.0})):
        write_rank(tmp_path / "one", name, course, 80, num_intervals=1, has_ended=False)
    assert verdict(tmp_path / "one")[0]["confidence"] == "fair"
    assert any("one interval only" in reason for reason in verdict(tmp_path / "one")[0]["reasons"])


@pytest.mark.parametrize("what", ["missing", "empty", "no intervals", "one group", "garbage", "only waits"])
def test_a_bad_folder_is_told_in_one_line(tmp_path: Path, what: str) -> None:
    run_dir = tmp_path / "run"
    if what != "missing":
        (run_dir / "profile").mkdir(parents=True)
    path = run_dir / "profile" / "target-0.jsonl"
    if what == "no intervals":
        path.write_text(
            '{"kind": "launch", "name": "target-0", "role": "target", "time": 5, '
            '"ranks": ["target-0"], "host": "here", "cores": null, "core_quota": null}\n'
        )
    elif what == "one group":
        write_rank(run_dir, "target-0", {"forward": 1.0}, 10)
    elif what == "only waits":
        write_rank(run_dir, "target-0", {"blocked": 1.0}, 10)
        write_rank(run_dir, "drafter-1", {"gradient_sync": 1.0}, 10)
    elif what == "garbage":
        path.write_bytes(b'\xff\x00{"kind": 3}\n[]\n{"kind": "interval"}\n"x"\n')
    done = subprocess.run(
        [sys.executable, "tools/verdict.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr.startswith("error: ")
        and done.stderr.count("\n") == 1
        and (what == "only waits" or str(run_dir) in done.stderr)
    )


def test_bad_lines_are_counted(tmp_path: Path) -> None:
    write_three(tmp_path)
    with (tmp_path / "profile" / "target-0.jsonl").open("a") as file:
        file.write('{"kind": "interval", "time": 5\n')
    found, _ = verdict(tmp_path)
    assert any("1 lines" in reason for reason in found["reasons"]) and found["tokens_per_s"] == pytest.approx(400)
