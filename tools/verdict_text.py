"""A verdict in words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verdict import Split, Verdict

_SHOWN_STAGES = 6
_SLOW = 1.1
_LAUNCHING = 1.05  # beyond it the host does not launch but waits for the device


def describe(verdict: "Verdict") -> str:
    """All that can be said of a run, the answer first."""
    names = {"target": "the targets", "drafter": "the drafters"}
    split = f"{verdict.num_targets}+{verdict.num_drafters} (targets+drafters)"
    ranks = "one process in both roles" if verdict.is_colocated else split
    here = f"{ranks}, {verdict.tokens_per_s:.0f} tokens/s"
    lines = [f"verdict on {here}:"]
    if verdict.limited_by == "cores":
        lines.append(
            f"  The {verdict.num_cores:g} cores limit: they carry {verdict.cores_could:.0f} tokens/s, whichever way "
            "ranks are split. Fewer threads a rank, or more cores, come before another split."
        )
    elif verdict.limited_by == "uncertain":
        lines.append(
            f"  Which group limits is not certain: on the face of it {names[verdict.look_first['role']]}, since the "
            f"other could do {verdict.other_group_could:.2f} times as much, but see below how sure that is."
        )
    elif verdict.limited_by == "balanced":
        lines.append(
            f"  Neither group limits: the faster could do {verdict.other_group_could:.2f} times what the other can."
        )
    else:
        other = names["drafter" if verdict.limited_by == "target" else "target"]
        lines.append(
            f"  {names[verdict.limited_by].capitalize()} limit: {other} could do "
            f"{verdict.other_group_could:.2f} times as much."
        )
    if not verdict.is_colocated:
        together = verdict.waiting_for_one_another
        waited = f" and waited for one another {together:.0%}" if together > 0.01 else ""
        lines.append(
            f"  Targets were blocked {verdict.waiting['target']:.0%} of the time, drafters starved "
            f"{verdict.waiting['drafter']:.0%}{waited}; the run is {verdict.shortfall:.0%} below what its slower group "
            "can do."
        )
    slowest = verdict.slowest_rank.get(verdict.look_first["role"])
    if slowest is not None and slowest["times_mean"] > _SLOW:
        lines.append(
            f"  {slowest['rank']} has {slowest['times_mean']:.2f} times the mean work per token of its group, and "
            "micro-batches go round: it alone sets the group's pace."
        )
    lines += ["  " + line for line in _where_to_look(verdict)]
    lines += ["", *_stages(verdict), *_ranks_and_queue(verdict), "", *_splits(verdict), ""]
    lines.append(f"how sure: {verdict.confidence}")
    lines += [f"  - {reason}" for reason in verdict.reasons]
    return "\n".join(lines)


def _where_to_look(verdict: "Verdict") -> list[str]:
    look = verdict.look_first
    if look["both_groups_wait"]:
        lines = [
            "Both groups wait for one another by turns, so no stage is to blame first: raise pipeline.queue.depth, "
            "look at pipeline.queue.max_bytes and at the transfers."
        ]
    else:
        lines = []
    stage = f"the {look['role']}'s `{look['stage']}`, {look['share_of_work']:.0%} of its work, {look['ms']:.1f} ms each"
    lines.append(f"Look first at {stage}.")
    if look["host_share"] is not None and 0.9 < look["host_share"] <= _LAUNCHING:
        lines.append(
            f"The host is busy launching it {look['host_share']:.0%} of that time: launches limit it, not the GPU."
        )
    if verdict.core_waits is not None and verdict.core_waits > 5:
        lines.append(
            f"Ranks waited {verdict.core_waits:.0f} % of the time for a CPU core, which is not counted as their work: "
            "other programs, or other ranks, had it."
        )
    return lines


def _stages(verdict: "Verdict") -> list[str]:
    lines = ["where the time goes (after the warm-up, mean of the group's ranks):"]
    for role, shares in verdict.stages.items():
        parts = [f"{stage} {share:.1%}" for stage, share in list(shares.items())[:_SHOWN_STAGES]]
        lines.append(f"  {role:<8} {', '.join(parts)}")
    return lines


def _ranks_and_queue(verdict: "Verdict") -> list[str]:
    lines = [
        f"slowest {role}: {found['rank']}, {found['times_mean']:.2f} times the mean work per token"
        for role, found in verdict.slowest_rank.items()
    ]
    if verdict.slowest_edge is not None:
        edge = verdict.slowest_edge
        lines.append(
            f"slowest edge: {edge['edge']}, {edge['transfer_ms']:.1f} ms until a transfer is confirmed, "
            + (f"{edge['times_mean']:.2f} times the mean" if edge["of"] > 1 else "the only one")
            + " (what the target did before it looked is in it)"
        )
    queue = verdict.queue
    if "ready_at_take" in queue:
        lines.append(
            f"queue: {queue['ready_at_take']:.1f} micro-batches ready when one is taken, "
            f"none {queue['empty_at_take']:.0%} of the time"
        )
    return lines


def _splits(verdict: "Verdict") -> list[str]:
    here = [s for s in verdict.splits if (s.num_targets, s.num_drafters) == (verdict.num_targets, verdict.num_drafters)]
    # The present split first: another one is better only if it gives more.
    allowed = [s for s in [*here, *verdict.splits] if s.not_allowed is None]
    best = max(allowed, key=lambda s: s.tokens_per_s, default=None)
    lines = ["what other splits would give (targets+drafters, predicted):"]
    lines += ["  " + _split(split, verdict, split is best and len(verdict.splits) > 1) for split in verdict.splits]
    lines.append("and with one rank more:")
    return lines + ["  " + _split(split, verdict, False) for split in verdict.one_more]


def _split(split: "Split", verdict: "Verdict", is_best: bool) -> str:
    bound = "at most " if split.is_upper_bound else ""
    text = f"{split.num_targets}+{split.num_drafters}: {bound}{split.tokens_per_s:.0f} tokens/s"
    if verdict.tokens_per_s > 0:
        text += (
            f" ({split.tokens_per_s / verdict.tokens_per_s:.2f}x), limited by the {split.limited_by.removesuffix('s')}s"
        )
    notes = []
    here = (verdict.num_targets, verdict.num_drafters)
    if not verdict.is_colocated and (split.num_targets, split.num_drafters) == here:
        notes.append("the present split")
    if is_best:
        notes.append("best")
    if split.not_allowed is not None:
        notes.append(f"not possible: {split.not_allowed}")
    return text + (f"  <- {', '.join(notes)}" if notes else "")
