"""Figures of stages for people: a line per rank and interval, a table per group at the end of a run."""

from collections.abc import Iterable, Mapping

from dflash.profiling.records import RankFigures
from dflash.profiling.totals import StageTotals, shares, top_level, wall_s

_LAUNCHING = 1.05  # the host's part of a stage, against the device's, from which on it is no launching but waiting
_LEAST_SHARE = 0.001  # what a line leaves out


def summary_line(
    name: str, totals: Mapping[str, StageTotals], rates: Mapping[str, float] | None = None, has_launches: bool = False
) -> str:
    """One line: each top-level stage's share of the time, its mean, p95 and count, the largest first; then rates.

    `has_launches` adds what the host spent in a stage, where that is another thing than the time the device spent.
    """
    found, part_of = dict(totals), shares(dict(totals))
    parts = []
    for path, stage in sorted(top_level(found).items(), key=lambda item: -item[1].total_s):
        if part_of.get(path, 0.0) < _LEAST_SHARE:
            continue
        times = f"{_ms(stage.mean_s)} ms x {stage.count}, p95 {_ms(stage.p95_s)}" if stage.count else "under way"
        # Longer than the device took: there the host waited for the device, and that is no launching.
        if has_launches and 0 < stage.launch_s <= _LAUNCHING * stage.total_s:
            times += f", host {min(stage.launch_s / stage.total_s, 1.0):.0%}"
        parts.append(f"{path} {part_of[path]:.1%} ({times})")
    line = f"{name} {wall_s(found):.1f} s: " + ", ".join(parts)
    return line + "".join(f"; {tag.rpartition('/')[2]} {rate:.6g}" for tag, rate in (rates or {}).items())


def group_tables(ranks: Iterable[RankFigures], missing: Iterable[str] = ()) -> str:
    """A table for each group of ranks: shares over all of them and the range from rank to rank, times, the slowest."""
    groups: dict[str, list[RankFigures]] = {}
    for figures in ranks:
        groups.setdefault(figures.role, []).append(figures)
    text = "\n\n".join(_table(role, members) for role, members in groups.items())
    absent = ", ".join(missing)
    return f"{text}\nno figures came from {absent}" if absent else text


def _table(role: str, members: list[RankFigures]) -> str:
    longest_s = max(wall_s(member.stages) for member in members)
    names = f"{len(members)} ranks" if len(members) > 1 else members[0].name
    header = (
        f"{'stage':<22}{'share':>7}{'from rank to rank':>19}{'mean ms':>10}{'p95 ms':>10}{'max ms':>10}{'count':>9}"
    )
    rows = [f"where the {role} group's time went ({names}, {longest_s:.1f} s)", f"{header}  longest on"]
    part_of = {member.name: shares(member.stages) for member in members}
    paths = {path for member in members for path in member.stages}
    mean_share = {p: sum(of_rank.get(p, 0.0) for of_rank in part_of.values()) / len(members) for p in paths}
    # Each stage with what lies in it below: by its own share, then by name.
    order = sorted(paths, key=lambda path: (-mean_share[path.partition("/")[0]], path))
    for path in order:
        rows.append(_row(path, members, mean_share[path], [of_rank.get(path, 0.0) for of_rank in part_of.values()]))
    return "\n".join(rows)


def _row(path: str, members: list[RankFigures], share: float, by_rank: list[float]) -> str:
    stages = {member.name: member.stages[path] for member in members if path in member.stages}
    count = sum(stage.count for stage in stages.values())
    mean_s = sum(stage.mean_s * stage.count for stage in stages.values()) / max(count, 1)
    p95_s, max_s = (max(getattr(stage, name) for stage in stages.values()) for name in ("p95_s", "max_s"))
    longest = max(stages, key=lambda name: stages[name].total_s)
    outer, _, inner = path.rpartition("/")
    label = "  " * path.count("/") + (inner or outer)
    # A share is of the wall time, and of top-level stages alone: those add up to the whole.
    of_all = "" if outer else f"{share:.1%}"
    spread = "" if outer or len(members) == 1 else f"{min(by_rank):.1%} to {max(by_rank):.1%}"
    times = f"{_ms(mean_s):>10}{_ms(p95_s):>10}{_ms(max_s):>10}"
    return f"{label:<22}{of_all:>7}{spread:>19}{times}{count:>9}  {longest}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"
