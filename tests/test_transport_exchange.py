"""Whole exchanges between real processes over Gloo: what arrives, in what order, within which bounds."""

import os

import pytest
from helpers_transport import Outcome, Spec, exchange, joining_time, layout_of, run_ranks, wait_and_be_stopped

from dflash.groups import Topology


def values(outcomes: list[Outcome]) -> list[dict]:
    assert all(not outcome.error for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


def check(topology: Topology, spec: Spec, outcomes: list[Outcome]) -> tuple[list[dict], list[dict]]:
    """Everything that holds for every exchange; contents are verified where they arrive."""
    seen = values(outcomes)
    targets, drafters = seen[: topology.num_targets], seen[topology.num_targets :]
    last = spec.num_entries - 1 if spec.stop_after is None else spec.stop_after
    sizes = [layout_of(index, spec.max_tokens).num_bytes for index in range(spec.num_entries)]
    tokens = [layout_of(index, spec.max_tokens).num_tokens for index in range(last + 1)]
    steps = range(0, last + 1, spec.micro_batches_per_step)
    for drafter, report in enumerate(drafters):
        assert report["taken"] == list(range(drafter, last + 1, topology.num_drafters))
        assert report["sums"] == [sum(tokens[first : first + spec.micro_batches_per_step]) for first in steps]
        assert report["max_depth"] <= spec.depth and report["held"] == 0
        if spec.max_bytes is not None:
            assert report["allocated"] <= max(spec.max_bytes, max(sizes)) * 9 / 8 + 16
        assert report["resources"] == report["resources_at_end"]
    for target, report in enumerate(targets):
        assert set(range(target, last + 1, topology.num_targets)) <= set(report["sent"])
    return targets, drafters


@pytest.mark.parametrize(
    ("topology", "spec"),
    [
        (Topology(1, 1), Spec(25)),
        (Topology(2, 1), Spec(31, depth=3, min_ready=3)),
        (Topology(1, 2), Spec(20, depth=2, num_buffers=1, micro_batches_per_step=2)),
        (Topology(2, 3), Spec(50, depth=8, min_ready=4, micro_batches_per_step=9)),
        (Topology(2, 3), Spec(41, depth=1, max_bytes=1, min_ready=5)),
        (Topology(2, 2), Spec(17, depth=3, max_bytes=10_000, min_ready=3, micro_batches_per_step=4)),
        (Topology(5, 3), Spec(400, max_tokens=40)),
        (Topology(3, 2), Spec(1)),
    ],
    ids=lambda value: f"{value.num_targets}+{value.num_drafters}" if isinstance(value, Topology) else "",
)
def test_everything_arrives_in_order_and_undamaged(topology: Topology, spec: Spec) -> None:
    check(topology, spec, run_ranks(exchange, topology, spec))


def test_slow_drafter_blocks_the_targets_at_the_bound() -> None:
    topology, spec = Topology(2, 1), Spec(24, depth=3, seconds={"drafter-2": 0.03})
    targets, drafters = check(topology, spec, run_ranks(exchange, topology, spec))
    assert drafters[0]["max_depth"] == 3
    assert min(report["blocked_s"] for report in targets) > 0.3
    assert drafters[0]["starved_s"] < 0.3


def test_slow_target_starves_the_drafters() -> None:
    topology, spec = Topology(1, 2), Spec(24, depth=3, seconds={"target-0": 0.03})
    targets, drafters = check(topology, spec, run_ranks(exchange, topology, spec))
    assert min(report["starved_s"] for report in drafters) > 0.4
    assert targets[0]["blocked_s"] < 0.2


def test_start_waits_for_min_ready() -> None:
    topology, spec = Topology(2, 1), Spec(24, depth=10, min_ready=6, num_buffers=4, seconds={"target-1": 0.02})
    _, drafters = check(topology, spec, run_ranks(exchange, topology, spec))
    assert drafters[0]["ready_at_start"] >= 6


@pytest.mark.parametrize("topology", [Topology(2, 3), Topology(2, 2)], ids=["2+3", "2+2"])
def test_stop_serves_through_the_last_and_drops_the_rest(topology: Topology) -> None:
    spec = Spec(10_000, depth=3, stop_after=17)
    targets, _ = check(topology, spec, run_ranks(exchange, topology, spec))
    assert max(index for report in targets for index in report["sent"]) < 60


def test_a_signal_ends_every_wait() -> None:
    outcomes = run_ranks(wait_and_be_stopped, Topology(1, 2), Spec(8))
    assert -0.05 < values(outcomes)[1] < 0.3


def test_eight_ranks_join_in_moments() -> None:
    seconds = max(values(run_ranks(joining_time, Topology(5, 3), Spec(1))))
    assert seconds < 10 * max(1, os.getloadavg()[0] / 2)
