"""Backpressure at every speed and bound: what a witness outside the queue sees, and the real command's footprint."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_backpressure import EXTREMES, Timeline, check_random, edge_name, play, size_of
from helpers_run import launch, make_target, metrics, overrides, scalars
from helpers_transport import Spec
from soak.flat import COLUMNS, MICRO_BATCHES_PER_STEP, command, judge, table, watch

from dflash.groups import Topology

SLOW_S = 0.015
TOPOLOGIES = [Topology(1, 1), Topology(1, 3), Topology(3, 1), Topology(2, 2), Topology(2, 3), Topology(5, 3)]
SPEEDS = ["even", "slow drafter", "slow target", "slow edge"]


def split(topology: Topology) -> str:
    return f"{topology.num_targets}+{topology.num_drafters}"


def slowed(topology: Topology, spec: Spec, speed: str) -> Spec:
    """The last of the drafters, of the targets or of the edges is slow, the others are as fast as they can be."""
    target, drafter = topology.edges[-1]
    edge = edge_name(topology, topology.target_rank(target), topology.drafter_rank(drafter))
    names = {
        "even": [],
        "slow drafter": [topology.name(topology.world_size - 1)],
        "slow target": [topology.name(topology.num_targets - 1)],
        "slow edge": [edge],
    }
    return replace(spec, seconds=dict.fromkeys(names[speed], SLOW_S))


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=split)
def test_the_bound_holds_on_every_split_at_every_speed(topology: Topology, speed: str) -> None:
    """43 micro-batches, a prime number, of 1 to 300 tokens; the last step is short."""
    spec = slowed(topology, Spec(43, depth=3, micro_batches_per_step=2 * topology.num_drafters), speed)
    play(topology, spec).check()


BOUNDS = {
    "depth 1": Spec(29, depth=1),
    "depth 1, min_ready above it": Spec(29, depth=1, min_ready=4),
    "min_ready = depth": Spec(41, depth=5, min_ready=5, num_buffers=4),
    "min_ready > depth": Spec(41, depth=4, min_ready=9, num_buffers=4),
    "min_ready > all": Spec(13, depth=20, min_ready=17),
    "one buffer": Spec(41, depth=6, num_buffers=1),
    "more ranks than micro-batches": Spec(2, depth=3, min_ready=3),
    "one micro-batch": Spec(1, depth=1, min_ready=2),
    "max_bytes below one": Spec(31, depth=6, max_bytes=1, min_ready=6),
    "max_bytes exactly one": Spec(
        31, depth=6, max_bytes=size_of(1, Spec(31, max_tokens=EXTREMES)), max_tokens=EXTREMES
    ),
    "max_bytes one short of one": Spec(31, depth=6, max_bytes=size_of(1, Spec(31, max_tokens=EXTREMES)) - 1),
    "max_bytes odd": Spec(53, depth=9, max_bytes=30_011, min_ready=3),
    "1 token and 7,920 by turns": Spec(37, depth=4, max_tokens=EXTREMES, num_buffers=3),
    "1 token each": Spec(61, depth=7, max_tokens=1),
}


@pytest.mark.parametrize("topology", [Topology(1, 3), Topology(2, 3)], ids=split)
@pytest.mark.parametrize("name", BOUNDS)
def test_every_kind_of_bound_holds(name: str, topology: Topology) -> None:
    """With one slow drafter of three, so that windows fill and everything waits for everything."""
    spec = replace(BOUNDS[name], micro_batches_per_step=6, seconds={topology.name(topology.num_targets + 1): 0.004})
    timeline = play(topology, spec)
    timeline.check()
    peaks = [timeline.peak(drafter) for drafter in range(3)]
    if name in ("depth 1", "max_bytes below one"):
        assert max(peaks) == 1
    for drafter, report in enumerate(timeline.drafter_reports):
        if spec.max_bytes is None and report["taken"]:
            first_taken = timeline.times("taken", drafter=drafter)[0]
            num_there = sum(time_ns < first_taken for time_ns in timeline.times("arrived", drafter=drafter))
            assert num_there >= min(spec.min_ready, spec.depth, len(report["taken"]))


@pytest.mark.parametrize("kind", ["depth", "bytes"])
def test_the_witness_sees_a_window_that_admits_one_too_many(kind: str) -> None:
    topology = Topology(2, 1)
    spec = Spec(40, depth=2 if kind == "depth" else 9, max_bytes=None if kind == "depth" else 20_000, num_buffers=6)
    spec = replace(spec, seconds={"drafter-2": 0.005})
    assert play(topology, spec).excesses() == []
    found = play(topology, replace(spec, victim=f"leak {kind}")).excesses()
    assert found and any(("depth" if kind == "depth" else "max_bytes") in line for line in found)


def last(timeline: Timeline, what: str, drafters: list[int]) -> int:
    return max(timeline.times(what, drafter=drafter)[-1] for drafter in drafters)


@pytest.mark.parametrize("num_buffers", [12, 2])
def test_a_slow_edge_holds_up_the_others_only_once_it_has_all_buffers(num_buffers: int) -> None:
    """All in one step; with a buffer for everything that waits for the slow edge, the other drafters run ahead."""
    topology = Topology(1, 3)
    spec = Spec(30, depth=10, num_buffers=num_buffers, micro_batches_per_step=30)
    timeline = play(topology, replace(spec, seconds={edge_name(topology, 0, 2): 0.15}))
    timeline.check()
    slow_arrivals = timeline.times("arrived", edge=(0, 1))
    if num_buffers == 12:
        assert last(timeline, "consumed", [0, 2]) < slow_arrivals[6]
    else:
        assert last(timeline, "sent", [0, 2]) > slow_arrivals[6]


def test_the_edges_beside_a_slow_one_fill_the_window_meanwhile() -> None:
    topology = Topology(3, 1)
    spec = Spec(15, depth=9, micro_batches_per_step=15, seconds={edge_name(topology, 1, 3): 0.8})
    timeline = play(topology, spec)
    timeline.check()
    slow_arrived = timeline.times("arrived", edge=(1, 0))[0]
    sent = [time_ns for edge in ((0, 0), (2, 0)) for time_ns in timeline.times("sent", edge=edge)]
    # g 0 has been trained on, so the window reaches to g 9: 0, 2, 3, 5, 6, 8, 9 are the fast edges'.
    assert sum(time_ns < slow_arrived for time_ns in sent) == 7


def test_a_slow_drafter_among_three_holds_up_the_others_no_sooner_than_buffers_and_the_step_do() -> None:
    topology = Topology(2, 3)
    spec = Spec(30, depth=4, num_buffers=12, micro_batches_per_step=30, seconds={"drafter-3": 0.1})
    timeline = play(topology, spec)
    timeline.check()
    assert last(timeline, "consumed", [0, 2]) < timeline.times("consumed", drafter=1)[6]
    assert timeline.peak(1) == 4  # the bound is reached, not only kept


@pytest.mark.parametrize("asking", ["target-1", "drafter-4", "drafter-2"])
@pytest.mark.parametrize("at_step", [0, 2])
def test_a_stop_within_a_step_drops_what_is_under_way_within_the_bound(asking: str, at_step: int) -> None:
    """Each drafter ends behind its own last micro-batch; far beyond nothing is sent."""
    topology = Topology(2, 3)
    place = {"target-1": 7, "drafter-4": 5, "drafter-2": 3}[asking]
    spec = Spec(10_000, depth=3, micro_batches_per_step=12, asks_to_stop=asking, at=12 * at_step + place)
    timeline = play(topology, replace(spec, seconds={"drafter-3": 0.004}))
    timeline.check()
    assert all(len(report["taken"]) < 30 for report in timeline.drafter_reports)
    assert max(index for _, what, index in timeline.events if what == "sent") < 100


@pytest.mark.parametrize("seed", range(12))
def test_random_ranks_bounds_sizes_speeds_and_ends(seed: int) -> None:
    check_random(seed)


def test_the_real_command_stays_flat_on_the_shortest_and_the_longest_documents(tmp_path: Path) -> None:
    """Queue depth 1, documents of 2 tokens and of the most, with evaluations and checkpoints: 400 micro-batches."""
    write_extremes(tmp_path / "rows.jsonl")
    make_target(tmp_path / "target")
    num_steps, run_dir = 400 // MICRO_BATCHES_PER_STEP, tmp_path / "run"
    bounds = {"pipeline__queue__depth": 1, "train__log_interval_steps": 1, "checkpoint__interval_steps": 10}
    arguments = command(1, 1, tmp_path, num_steps, **bounds, train__eval_interval_steps=10)
    code, output, samples = watch(arguments, run_dir, interval_s=0.1)
    assert code == 0, output
    assert "1 document(s) were without two supervised tokens side by side" in output
    assert f"{tmp_path}/rows.jsonl:1" in output
    verdicts = [judge(name, samples[name], num_steps, slack_mib=12) for name in sorted(samples)]
    shown = table([COLUMNS, *(verdict.row for verdict in verdicts)])
    assert len(verdicts) == 2 and not any(verdict.problems for verdict in verdicts), shown + str(verdicts)
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, num_steps + 1))
    assert scalars(run_dir, "drafter-1")["queue/max_depth"][-1][1] == 1


def write_extremes(path: Path, longest: int = 32) -> None:
    """Documents of 2 tokens and of `longest`, behind one of a single token, which nothing can be learnt from."""
    lengths = [1] + [2, longest, 2, 2] * 150
    rows = [{"input_ids": [(3 * i + n) % 90 for i in range(n)], "loss_mask": [1] * n} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_documents_of_one_token_alone_are_refused_with_the_reason(tmp_path: Path) -> None:
    """A drafter predicts what follows an anchor, and after one token nothing does."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input_ids": [5], "loss_mask": [1]}\n' * 3, encoding="utf-8")
    target, run_dir = make_target(tmp_path / "target"), tmp_path / "run"
    done = launch(1, overrides(target, path, run_dir), check=False)
    assert done.returncode == 1 and not run_dir.exists()
    assert "no row of the data can be trained on" in done.stderr
    assert "3 document(s) were without two supervised tokens side by side" in done.stderr
