"""Lays out the shares of py-spy profiles as text tables."""

from collections.abc import Sequence

from pyspy_shares import Difference, Table, Tables, differences, is_few, wilson

TITLES = {
    "main_thread_stage": "by pipeline stage, main thread only",
    "own_line": "by the program's own line, whatever that calls",
    "stage": "by pipeline stage, all threads",
    "function": "by leaf function",
    "file": "by file",
    "thread": "by thread root",
    "thread_name": "by thread name",
    "process": "by process",
}
_MAX_KEY_LENGTH = 100
_MAX_COLUMNS = 8


def single_text(tables: Tables, top: int) -> str:
    """Tables of one profile, each row with its intervals."""
    shown = [name for name in TITLES if _is_shown(tables, name)]
    if tables["thread_name"].counts == tables["thread"].counts:
        shown = [name for name in shown if name != "thread_name"]
    return "\n\n".join(_single(tables[name], TITLES[name], top) for name in shown)


def side_by_side_text(columns: Sequence[tuple[str, Tables]], top: int) -> str:
    """The same tables for several profiles, of which the last is their sum: exclusive and inclusive shares."""
    merged, parts = columns[-1][1], []
    for name, title in TITLES.items():
        if name != "thread" and _is_shown(merged, name):  # thread numbers of different ranks have nothing in common
            for kind in ("exclusive",) if _is_flat(merged[name]) else ("exclusive", "inclusive"):
                parts.append(_side_by_side([(label, tables[name]) for label, tables in columns], title, kind, top))
    return "\n\n".join(parts)


def comparison_text(now: Tables, before: Tables, top: int) -> str:
    """Changes of shares, the largest first."""
    parts = ["now against before: difference in points [95 %]; * p < 0.05, ** also after Holm over the table's rows"]
    for name, title in TITLES.items():
        # The same code has another line once something above it has changed; functions stay.
        if name in ("thread", "own_line") or not (_is_shown(now, name) and _is_shown(before, name)):
            continue
        for kind in ("exclusive",) if _is_flat(now[name]) and _is_flat(before[name]) else ("exclusive", "inclusive"):
            rows = [_difference(row) for row in differences(now[name], before[name], kind)[:top]]
            header = f"{'now':>7}  {'before':>7}  {'change':>7}  {'95 %':<16} {'p':>8}     {title}, {kind}"
            parts.append("\n".join([header, *rows]))
    return "\n\n".join(parts)


def printable(key: str) -> str:
    """A key without control characters and of bounded length."""
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in key)
    if len(text) <= _MAX_KEY_LENGTH:
        return text
    half = _MAX_KEY_LENGTH // 2
    return f"{text[: half - 1]}…{text[-half:]}"  # the end has the file


def _is_shown(tables: Tables, name: str) -> bool:
    return tables[name].num_samples > 0


def _is_flat(table: Table) -> bool:
    """Whether exclusive and inclusive are the same, as for threads."""
    return all(count.inclusive == count.exclusive for count in table.counts.values())


def _single(table: Table, title: str, top: int) -> str:
    lines = [f"{'exclusive':>9}  {'95 %':<14} {'inclusive':>9}  {'95 %':<14} {'samples':>8}   {title}"]
    keys = table.sorted_keys()
    for key in keys[:top]:
        count = table.counts[key]
        mark = "?" if is_few(count.inclusive, table.num_samples) else " "
        cells = [_share(successes, table.num_samples) for successes in (count.exclusive, count.inclusive)]
        lines.append(f"{cells[0]}  {cells[1]}  {count.inclusive:>8} {mark} {printable(key)}")
    return "\n".join(lines + _rest(len(keys), top))


def _share(successes: int, total: int) -> str:
    low, high = wilson(successes, total)
    return f"{successes / total:>9.1%}  {f'{low * 100:.1f} - {high * 100:.1f}':<13}"


def _rest(num_keys: int, top: int) -> list[str]:
    return [f"  ... and {num_keys - top} more (--top)"] if num_keys > top else []


def _side_by_side(columns: Sequence[tuple[str, Table]], title: str, kind: str, top: int) -> str:
    """One table; many ranks are wrapped into several blocks, each with the sum at its end."""
    merged = columns[-1][1]
    keys = sorted(merged.counts, key=lambda key: (-getattr(merged.counts[key], kind), key))
    if kind == "inclusive":
        keys = _without_entry(merged, keys)
    shown = [key for key in keys if getattr(merged.counts[key], kind)][:top]
    blocks = []
    for start in range(0, len(columns) - 1, _MAX_COLUMNS):
        block = [*columns[start : min(start + _MAX_COLUMNS, len(columns) - 1)], columns[-1]]
        widths = [max(7, min(len(label), 24)) for label, _ in block]
        header = "  ".join(f"{label[-24:]:>{width}}" for (label, _), width in zip(block, widths, strict=True))
        lines = [f"{header}   {title}, {kind}"]
        for key in shown:
            cells = [_cell(table, key, kind, width) for (_, table), width in zip(block, widths, strict=True)]
            lines.append(f"{'  '.join(cells)}   {printable(key)}")
        blocks.append("\n".join(lines + _rest(len(keys), top)))
    return "\n\n".join(blocks)


def _without_entry(table: Table, keys: list[str]) -> list[str]:
    """`keys` without what leads to the program's loop: it lies around all samples alike, and would fill the table."""
    most = max((count.inclusive for count in table.counts.values()), default=0)
    within = [key for key in keys if table.counts[key].inclusive < most or table.counts[key].exclusive]
    return within or keys


def _cell(table: Table, key: str, kind: str, width: int) -> str:
    if not table.num_samples:
        return f"{'-':>{width}}"
    return f"{getattr(table.count(key), kind) / table.num_samples:>{width}.1%}"


def _difference(row: Difference) -> str:
    mark = ""
    if row.is_significant:
        mark = "**" if row.p_holm < 0.05 else "*"
    interval = f"{row.low * 100:+.1f} to {row.high * 100:+.1f}"
    shares = f"{row.now_share:>7.1%}  {row.before_share:>7.1%}  {row.difference * 100:>+7.1f}"
    return f"{shares}  {interval:<16} {row.p_value:>8.2g} {mark:<2}  {printable(row.key)}"
