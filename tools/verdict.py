"""Say which group of ranks limits a run, by how much, where to look first, and what another split would give.

python tools/verdict.py RUN_DIR [--json FILE]

Reads the figures that every rank writes per interval (RUN_DIR/profile/), of a run that goes on or has ended. A rank is
busy when it neither waits for input (starved) nor for credit (blocked) nor for a core nor warms up. With b busy
rank-seconds per token a group of n ranks can do n/b tokens per second, and the slower group sets the pace, unless all
ranks together would need more cores than there are: with c CPU-seconds per token, k cores carry k/c. For another split,
- what drafters do once per step (optimizer, checkpoint) is not divided among them,
- micro-batches go round, so the slowest rank sets its group's pace: as much slower than the mean as it is now,
- the summing of gradients grows as (D-1)/D does. What it costs is seen by the drafter that comes last; the others wait
  for it. One drafter alone does not show it, so for more of them the prediction is an upper bound there,
- the share that the present split falls short of this arithmetic is taken off all splits.
"""

import argparse
import json
import math
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verdict_run import ASIDE, WAITING, WARM_UP, Interval, RankRun, RunFigures, read_run

TARGET_STAGES = ("data", "host_to_device", "forward", "pack", "send")  # of a process that plays both roles
PER_STEP = ("optimizer", "checkpoint")
SYNC = "gradient_sync"
_T_95 = {1: 12.7, 2: 4.3, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23}
_BOTH_WAIT = 0.1
_ALIKE = 0.05
_UNKNOWN_DOUBT = 0.25  # one interval holds many micro-batches, and is hardly further off than that


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Busy rank-seconds per token of one group, split by how they change with the number of its ranks."""

    num_ranks: int
    divided: float  # shared out among the ranks, the mean of them
    slowness: float  # of the slowest rank, against the mean
    per_step: float  # done by each rank, per token of the whole group
    sync: float  # as per_step, but for the summing of gradients
    uncertainty: float  # half-width of the 95 % interval, relative; NaN when it cannot be known

    def pace(self, num_ranks: int) -> float:
        """Tokens per second that so many ranks can do when they never wait."""
        here = (self.num_ranks - 1) / self.num_ranks
        sync = self.sync * ((num_ranks - 1) / num_ranks) / here if here else 0.0
        slowness = self.slowness if num_ranks > 1 else 1.0
        seconds = self.divided * slowness / num_ranks + self.per_step + sync
        return 1 / seconds if seconds > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Split:
    """A division of the ranks and what it would give."""

    num_targets: int
    num_drafters: int
    tokens_per_s: float
    limited_by: str  # target, drafter or cores
    not_allowed: str | None  # why the trainer would refuse it
    is_upper_bound: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """All that can be said of a run; shares are of the time of the group's ranks."""

    num_targets: int
    num_drafters: int
    is_colocated: bool
    tokens_per_s: float
    limited_by: str  # target, drafter, cores, balanced, or uncertain
    other_group_could: float  # times the pace of the slower group
    num_cores: float | None
    cores_could: float | None  # tokens per second that the cores carry; None where it is not known
    waiting: dict[str, float]
    waiting_for_one_another: float  # drafters in the summing of gradients, beyond the last one's time for it
    shortfall: float  # how far the run stays below the pace of its slower group
    look_first: dict[str, Any]
    stages: dict[str, dict[str, float]]
    slowest_rank: dict[str, dict[str, Any]]
    slowest_edge: dict[str, Any] | None
    queue: dict[str, float]
    core_waits: float | None
    splits: list[Split]  # of the same ranks
    one_more: list[Split]  # of one rank more, on either side
    confidence: str
    reasons: list[str]


def busy_stages(interval: Interval, role: str, is_colocated: bool) -> dict[str, float]:
    """Busy seconds by stage of one role."""
    if not is_colocated:
        return interval.busy
    return {s: seconds for s, seconds in interval.busy.items() if (s in TARGET_STAGES) == (role == "target")}


def group_cost(ranks: list[RankRun], role: str) -> GroupCost:
    """Cost per token of the ranks that play a role, from all their intervals; raises ValueError without any work."""
    is_colocated = ranks[0].role == "colocated"
    tokens = sum(i.num_tokens for rank in ranks for i in rank.intervals)
    if tokens <= 0:
        raise ValueError(
            f"the {role} ranks have counted no tokens in the intervals that can be used; let it run longer"
        )
    divided_s, per_step_s, costs, syncs, samples = 0.0, 0.0, [], [], []
    for rank in ranks:
        works = [(i.num_tokens, *_work_of(i, role, is_colocated)) for i in rank.intervals]
        rank_s, rank_tokens = sum(divided for _, divided, _, _ in works), sum(work[0] for work in works)
        divided_s += rank_s
        per_step_s += sum(per_step for _, _, per_step, _ in works)
        syncs.append(sum(sync for *_, sync in works))
        if rank_s > 0 and rank_tokens > 0:
            costs.append(rank_s / rank_tokens)
            samples += [divided / count / costs[-1] for count, divided, _, _ in works if count > 0]
    if not costs:
        raise ValueError(f"the {role} ranks did not work in the intervals that can be used: they only waited")
    return GroupCost(
        num_ranks=len(ranks),
        divided=divided_s / tokens,
        slowness=max(costs) / statistics.fmean(costs),
        per_step=per_step_s / len(ranks) / tokens,
        sync=min(syncs) / tokens,
        uncertainty=relative_error(samples),
    )


def _work_of(interval: Interval, role: str, is_colocated: bool) -> tuple[float, float, float]:
    """Busy seconds of one role that its ranks share out, that each spends per step, and in summing gradients."""
    busy = busy_stages(interval, role, is_colocated)
    if role == "target":
        return sum(busy.values()), 0.0, 0.0
    sync, per_step = busy.get(SYNC, 0.0), sum(busy.get(stage, 0.0) for stage in PER_STEP)
    return sum(busy.values()) - sync - per_step, per_step, sync


def relative_error(samples: list[float]) -> float:
    """Half-width of the 95 % interval of a mean, relative to it; NaN from fewer than two samples."""
    if len(samples) < 2:
        return math.nan
    factor = _T_95.get(len(samples) - 1, 2.0)
    return factor * statistics.stdev(samples) / math.sqrt(len(samples)) / statistics.fmean(samples)


def waits_for_one_another(ranks: list[RankRun]) -> float:
    """Share of the drafters' time in which they waited in the summing of gradients for the one that came last."""
    syncs = [sum(i.busy.get(SYNC, 0.0) for i in rank.intervals) for rank in ranks]
    whole_s = sum(i.wall_s - i.warm_up_s for rank in ranks for i in rank.intervals)
    return sum(sync - min(syncs) for sync in syncs) / max(whole_s, 1e-9)


def cores_pace(figures: RunFigures) -> float:
    """Tokens per second at which all cores are in use; infinite when some rank did not tell its part."""
    if figures.num_cores is None:
        return math.inf
    seconds = 0.0
    for role in {rank.role for rank in figures.ranks}:
        intervals = [i for rank in figures.group(role) for i in rank.intervals]
        used = [i.cpu_s for i in intervals if i.cpu_s is not None]
        if len(used) < len(intervals):
            return math.inf
        seconds += sum(used) / max(sum(i.num_tokens for i in intervals), 1e-9)
    return figures.num_cores / seconds if seconds > 0 else math.inf


def actual_pace(figures: RunFigures, role: str) -> float:
    """Tokens per second of a group as it ran, warm-up left out."""
    return sum(
        sum(i.num_tokens for i in rank.intervals) / max(sum(i.wall_s - i.warm_up_s for i in rank.intervals), 1e-9)
        for rank in figures.group(role)
    )


def stage_shares(ranks: list[RankRun]) -> dict[str, float]:
    """Share of each stage in the ranks' time after the warm-up, the largest first."""
    sums: dict[str, float] = {}
    for rank in ranks:
        for interval in rank.intervals:
            for stage, seconds in interval.stages.items():
                if stage not in WARM_UP + ASIDE:
                    sums[stage] = sums.get(stage, 0.0) + seconds
    whole = sum(sums.values()) or 1.0
    return {stage: seconds / whole for stage, seconds in sorted(sums.items(), key=lambda item: -item[1])}


def judge(figures: RunFigures) -> Verdict:
    """The verdict on a run."""
    is_colocated = bool(figures.group("colocated"))
    roles = {role: figures.group("colocated" if is_colocated else role) for role in ("target", "drafter")}
    costs = {role: group_cost(ranks, role) for role, ranks in roles.items()}
    paces = {role: cost.pace(cost.num_ranks) for role, cost in costs.items()}
    limiting, cores = min(paces, key=lambda role: paces[role]), cores_pace(figures)
    ratio = max(paces.values()) / paces[limiting]
    doubt = sum(_UNKNOWN_DOUBT if math.isnan(cost.uncertainty) else cost.uncertainty for cost in costs.values())
    tokens_per_s = actual_pace(figures, "colocated" if is_colocated else "drafter")
    # One process does one thing after the other: nothing is lost by waiting, and a split would gain.
    efficiency = 1.0 if is_colocated else min(tokens_per_s / min(paces[limiting], cores), 1.0)
    shares = {role: stage_shares(ranks) for role, ranks in roles.items()}
    waiting = {role: sum(of_role.get(stage, 0.0) for stage in WAITING) for role, of_role in shares.items()}
    confidence, reasons = how_sure(figures, costs)
    num_ranks = max(len(figures.ranks), 2)  # one process in both roles is asked what two would do
    here = (costs["target"].num_ranks, costs["drafter"].num_ranks)
    larger = predict(figures, costs, cores, efficiency, num_ranks + 1)
    return Verdict(
        num_targets=here[0],
        num_drafters=here[1],
        is_colocated=is_colocated,
        tokens_per_s=tokens_per_s,
        limited_by="cores" if cores < paces[limiting] * (1 - _ALIKE) else who_limits(limiting, ratio, doubt),
        other_group_could=ratio,
        num_cores=figures.num_cores,
        cores_could=None if math.isinf(cores) else cores,
        waiting=waiting,
        waiting_for_one_another=waits_for_one_another(roles["drafter"]),
        shortfall=1 - efficiency,
        look_first=look_first(roles[limiting], limiting, is_colocated, waiting),
        stages={"both": shares["drafter"]} if is_colocated else shares,
        slowest_rank={role: slowest_rank(ranks, role) for role, ranks in roles.items() if len(ranks) > 1},
        slowest_edge=slowest_edge(figures),
        queue=queue_levels(figures),
        core_waits=mean_gauge(figures.ranks, "process/main_thread_waits_for_core_percent"),
        splits=predict(figures, costs, cores, efficiency, num_ranks),
        one_more=[s for s in larger if (s.num_targets - here[0], s.num_drafters - here[1]) in ((0, 1), (1, 0))],
        confidence=confidence,
        reasons=reasons,
    )


def who_limits(slower: str, ratio: float, doubt: float) -> str:
    """The slower group, unless the faster one could do only `ratio` times as much with so much doubt about it."""
    if ratio - 1 > max(doubt, _ALIKE):
        return slower
    return "balanced" if ratio - 1 <= 2 * _ALIKE and doubt <= 2 * _ALIKE else "uncertain"


def predict(
    figures: RunFigures, costs: dict[str, GroupCost], cores: float, efficiency: float, num_ranks: int
) -> list[Split]:
    """Every split of so many ranks."""
    per_step = figures.config.get("train", {}).get("micro_batches_per_step")
    splits = []
    for num_targets in range(1, num_ranks):
        num_drafters = num_ranks - num_targets
        paces = {
            "target": costs["target"].pace(num_targets),
            "drafter": costs["drafter"].pace(num_drafters),
            "cores": cores,
        }
        limiting = min(paces, key=lambda role: paces[role])
        refused = None
        if per_step and per_step % num_drafters:
            refused = f"train.micro_batches_per_step={per_step} is not divisible by {num_drafters}"
        is_bound = limiting == "drafter" and num_drafters > 1 and costs["drafter"].num_ranks == 1
        splits.append(Split(num_targets, num_drafters, paces[limiting] * efficiency, limiting, refused, is_bound))
    return splits


def look_first(ranks: list[RankRun], role: str, is_colocated: bool, waiting: dict[str, float]) -> dict[str, Any]:
    """The stage in which the limiting group spends most of its work, and what is known of it."""
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    whole: dict[str, float] = {}
    launches: dict[str, float] = {}
    for interval in (i for rank in ranks for i in rank.intervals):
        for stage, spent in busy_stages(interval, role, is_colocated).items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
            counts[stage] = counts.get(stage, 0) + interval.counts[stage]
            whole[stage] = whole.get(stage, 0.0) + interval.stages[stage]
            launches[stage] = launches.get(stage, 0.0) + interval.launch_s[stage]
    stage = max(seconds, key=lambda name: seconds[name])
    return {
        "role": role,
        "stage": stage,
        "share_of_work": seconds[stage] / (sum(seconds.values()) or 1.0),
        "ms": seconds[stage] / max(counts[stage], 1) * 1e3,
        # Only where the device has a clock of its own is the host's part another number than the whole, of which
        # waits for a core are a part on either clock.
        "host_share": launches[stage] / whole[stage] if launches != whole and whole[stage] else None,
        "both_groups_wait": min(waiting.values()) > _BOTH_WAIT,
    }


def slowest_rank(ranks: list[RankRun], role: str) -> dict[str, Any]:
    """The rank with most work per token, and how it compares with its group; waiting for others is no work."""
    costs = {}
    for rank in ranks:
        tokens = sum(i.num_tokens for i in rank.intervals)
        busy_s = sum(sum(s for stage, s in i.busy.items() if stage != SYNC) for i in rank.intervals)
        if tokens > 0:
            costs[rank.name] = busy_s / tokens
    name = max(costs, key=lambda rank: costs[rank])
    return {"role": role, "rank": name, "times_mean": costs[name] / statistics.fmean(costs.values())}


def slowest_edge(figures: RunFigures) -> dict[str, Any] | None:
    """The edge on which a transfer takes longest; None when no rank told."""
    found = {}
    for rank in figures.ranks:
        tags = {tag for i in rank.intervals for tag in i.gauges if tag.startswith("edge/") and tag.endswith("_ms")}
        for tag in tags:
            transfer_ms = mean_gauge([rank], tag)
            assert transfer_ms is not None
            found[f"{rank.name} -> {tag.split('/')[1]}"] = transfer_ms
    if not found:
        return None
    name, mean_ms = max(found.items(), key=lambda edge: edge[1])
    times_mean = mean_ms / statistics.fmean(found.values())
    return {"edge": name, "of": len(found), "transfer_ms": mean_ms, "times_mean": times_mean}


def queue_levels(figures: RunFigures) -> dict[str, float]:
    """Means over the drafters of what they saw of their queues."""
    drafters = figures.group("drafter")
    tags = ("queue/ready_at_take", "queue/empty_at_take", "queue/depth", "queue/bytes")
    means = {tag.split("/")[1]: mean_gauge(drafters, tag) for tag in tags}
    return {name: mean for name, mean in means.items() if mean is not None}


def mean_gauge(ranks: list[RankRun], tag: str) -> float | None:
    values = [i.gauges[tag] for rank in ranks for i in rank.intervals if tag in i.gauges]
    return statistics.fmean(values) if values else None


def how_sure(figures: RunFigures, costs: dict[str, GroupCost]) -> tuple[str, list[str]]:
    """good, fair or poor, and why."""
    num_intervals = min(len(rank.intervals) for rank in figures.ranks)
    seconds = min(sum(i.wall_s for i in rank.intervals) for rank in figures.ranks)
    reasons = [f"{num_intervals} intervals, {seconds:.0f} s of each rank"]
    grade = 2
    if not figures.is_steady:
        grade = 0
        reasons.append(
            "no interval lies between the warm-up and the end: a longer run or a shorter interval tells more"
        )
    elif num_intervals < 3:
        grade = min(grade, 1)
        reasons.append("fewer than 3 intervals between the warm-up and the end")
    if figures.warm_up_share > 0.3:
        reasons.append(f"the warm-up took {figures.warm_up_share:.0%} of all time (left out)")
    for role, cost in costs.items():
        if math.isnan(cost.uncertainty):
            reasons.append(f"the {role} ranks' work per token is known from one interval only")
        else:
            reasons.append(f"the {role} ranks' work per token is known within {cost.uncertainty:.0%}")
            grade = min(grade, 2 if cost.uncertainty < 0.05 else 1 if cost.uncertainty < 0.2 else 0)
    if figures.num_bad_lines:
        reasons.append(f"{figures.num_bad_lines} lines of the records could not be read and were left out")
    return ("poor", "fair", "good")[grade], reasons


def main() -> None:
    from verdict_text import describe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
    try:
        verdict = judge(read_run(arguments.run_dir))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(asdict(verdict), indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(describe(verdict))


if __name__ == "__main__":
    main()
