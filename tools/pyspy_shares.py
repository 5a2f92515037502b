"""Counts the samples of py-spy profiles by function, file, thread and stage, and says how sure the shares are."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pyspy_raw import RawProfile, Stack
from pyspy_stages import StageMap

Z_95 = 1.959963984540054  # two-sided 95 % of the normal distribution
TABLES = ("function", "file", "thread", "thread_name", "process", "stage", "main_thread_stage", "own_line")
NO_FRAME, NO_FILE, NO_THREAD = "(no frame)", "(no file)", "(no thread frame)"
MAIN_THREAD = "MainThread"
# From here on a share, whatever it is, is known to 5 points either way.
ENOUGH_SAMPLES = 385
_MIN_EXPECTED = 5.0  # the usual bound below which the normal approximation of a count says nothing


@dataclass(slots=True)
class Count:
    """Samples in whose stack a key is, each counted once however often it recurs, and samples it is the leaf of."""

    inclusive: int = 0
    exclusive: int = 0


class Table:
    """Counts by key, out of `num_samples`."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.counts: dict[str, Count] = {}

    def add(self, keys: Iterable[str], leaf: str, count: int) -> None:
        """Add `count` samples whose stacks hold `keys` and end in `leaf`, which is one of them."""
        self.num_samples += count
        for key in set(keys):
            self.counts.setdefault(key, Count()).inclusive += count
        self.counts[leaf].exclusive += count

    def merge(self, other: "Table") -> None:
        self.num_samples += other.num_samples
        for key, count in other.counts.items():
            own = self.counts.setdefault(key, Count())
            own.inclusive += count.inclusive
            own.exclusive += count.exclusive

    def count(self, key: str) -> Count:
        return self.counts.get(key, Count())

    def sorted_keys(self) -> list[str]:
        """All keys, those with the most exclusive samples first, then inclusive, then by name."""
        return sorted(self.counts, key=lambda key: (-self.counts[key].exclusive, -self.counts[key].inclusive, key))


Tables = dict[str, Table]


def count_profile(profile: RawProfile, stages: StageMap) -> Tables:
    """All tables of one profile."""
    tables = {name: Table() for name in TABLES}
    for stack in profile.stacks:
        if stack.count:
            _add_stack(tables, stack, stages)
    return tables


def merge(all_tables: Sequence[Tables]) -> Tables:
    """Sum over several profiles; a profile weighs as much as it has samples."""
    merged = {name: Table() for name in TABLES}
    for tables in all_tables:
        for name in TABLES:
            merged[name].merge(tables[name])
    return merged


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share, between 0 and 1; `total` is at least 1.

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, 1927.
    """
    share, z2 = successes / total, Z_95**2
    center = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == total else min(1.0, center + half)
    return low, high


def is_few(successes: int, total: int) -> bool:
    """Whether a share is known no better than to half of itself."""
    low, high = wilson(successes, total)
    return high - low > successes / total


def table_json(table: Table) -> dict[str, Any]:
    """A table with its shares and their intervals, the largest exclusive share first."""
    rows = []
    for key in table.sorted_keys():
        row: dict[str, Any] = {"key": key}
        for kind in ("inclusive", "exclusive"):
            successes = getattr(table.counts[key], kind)
            row[kind] = successes
            row[f"{kind}_share"] = successes / table.num_samples
            row[f"{kind}_ci"] = list(wilson(successes, table.num_samples))
        rows.append({**row, "few": is_few(table.counts[key].inclusive, table.num_samples)})
    return {"samples": table.num_samples, "rows": rows}


@dataclass(frozen=True, slots=True)
class Difference:
    """A key's share in one profile (`now`) less that in another (`before`)."""

    key: str
    kind: str  # inclusive, exclusive
    now: int
    before: int
    now_share: float
    before_share: float
    difference: float
    low: float
    high: float
    p_value: float
    p_holm: float  # over all rows of this kind in the table, so that of many rows none stands out by chance
    is_significant: bool

    def json(self) -> dict[str, Any]:
        return {
            "now": self.now,
            "before": self.before,
            "now_share": self.now_share,
            "before_share": self.before_share,
            "difference": self.difference,
            "ci": [self.low, self.high],
            "p_value": self.p_value,
            "p_holm": self.p_holm,
            "significant": self.is_significant,
        }


def differences(now: Table, before: Table, kind: str) -> list[Difference]:
    """Differences of all keys that either table has, the largest first; none where a table is empty."""
    if not now.num_samples or not before.num_samples:
        return []
    keys = sorted(now.counts.keys() | before.counts.keys())
    p_values = {key: _p_value(_numbers(now, before, key, kind)) for key in keys}
    adjusted = _holm(p_values)
    rows = []
    for key in keys:
        numbers = _numbers(now, before, key, kind)
        successes, total, successes_before, total_before = numbers
        share, share_before = successes / total, successes_before / total_before
        low, high = _newcombe(numbers)
        rows.append(
            Difference(
                key=key,
                kind=kind,
                now=successes,
                before=successes_before,
                now_share=share,
                before_share=share_before,
                difference=share - share_before,
                low=low,
                high=high,
                p_value=p_values[key],
                p_holm=adjusted[key],
                is_significant=p_values[key] < 0.05,
            )
        )
    return sorted(rows, key=lambda row: (-abs(row.difference), row.key))


_Numbers = tuple[int, int, int, int]  # successes and total of now, then of before


def _numbers(now: Table, before: Table, key: str, kind: str) -> _Numbers:
    return getattr(now.count(key), kind), now.num_samples, getattr(before.count(key), kind), before.num_samples


def _p_value(numbers: _Numbers) -> float:
    """Two-sided p-value of no difference: two proportions with a pooled variance, or exact where counts are small."""
    successes, total, successes_before, total_before = numbers
    pooled = (successes + successes_before) / (total + total_before)
    if min(total, total_before) * min(pooled, 1 - pooled) < _MIN_EXPECTED:
        return _fisher(numbers)
    variance = pooled * (1 - pooled) * (1 / total + 1 / total_before)
    return math.erfc(abs(successes / total - successes_before / total_before) / math.sqrt(2 * variance))


def _fisher(numbers: _Numbers) -> float:
    """Fisher's exact two-sided p-value: of all tables with these sums, those that are no more likely than this one."""
    successes, total, successes_before, total_before = numbers
    drawn = successes + successes_before
    logs = [
        _log_choose(total, k) + _log_choose(total_before, drawn - k)
        for k in range(max(0, drawn - total_before), min(drawn, total) + 1)
    ]
    whole = _log_choose(total + total_before, drawn)
    own = _log_choose(total, successes) + _log_choose(total_before, successes_before)
    # As likely but for rounding is as likely.
    return min(1.0, math.fsum(math.exp(each - whole) for each in logs if each <= own + 1e-7))


def _log_choose(total: int, chosen: int) -> float:
    return math.lgamma(total + 1) - math.lgamma(chosen + 1) - math.lgamma(total - chosen + 1)


def _newcombe(numbers: _Numbers) -> tuple[float, float]:
    """95 % interval of a difference of shares, from Wilson's of both.

    R. G. Newcombe, Interval estimation for the difference between independent proportions, 1998, method 10.
    """
    successes, total, successes_before, total_before = numbers
    share, share_before = successes / total, successes_before / total_before
    (low, high), (low_before, high_before) = wilson(successes, total), wilson(successes_before, total_before)
    difference = share - share_before
    return (
        difference - math.hypot(share - low, high_before - share_before),
        difference + math.hypot(high - share, share_before - low_before),
    )


def _holm(p_values: dict[str, float]) -> dict[str, float]:
    """P-values adjusted for their number. S. Holm, A simple sequentially rejective multiple test procedure, 1979."""
    adjusted, largest = {}, 0.0
    for rank, key in enumerate(sorted(p_values, key=lambda key: (p_values[key], key))):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[key]))
        adjusted[key] = largest
    return adjusted


def _add_stack(tables: Tables, stack: Stack, stages: StageMap) -> None:
    functions = [frame.function for frame in stack.frames] or [NO_FRAME]
    files = [frame.file or NO_FILE for frame in stack.frames] or [NO_FILE]
    tables["function"].add(functions, functions[-1], stack.count)
    tables["file"].add(files, files[-1], stack.count)
    # Without --threads py-spy names no thread; the outermost frame still tells threads of different kinds apart.
    thread = stack.thread or (functions[0] if stack.frames else NO_THREAD)
    tables["thread"].add([thread], thread, stack.count)
    name = stack.thread_name or thread
    tables["thread_name"].add([name], name, stack.count)
    if stack.processes:
        tables["process"].add([stack.processes[-1]], stack.processes[-1], stack.count)
    stage = stages.stage_of(stack.frames)
    parts = stage.split("/")
    around = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    tables["stage"].add(around, stage, stack.count)
    if stack.thread_name == MAIN_THREAD:
        tables["main_thread_stage"].add(around, stage, stack.count)
    own_line = stages.own_line(stack.frames)
    if own_line is not None:
        tables["own_line"].add([own_line], own_line, stack.count)
