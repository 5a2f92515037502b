"""Shows where the time of one or many ranks goes, from what py-spy recorded.

    py-spy record -f raw --threads -d 30 -p PID -o target-0.raw 2>&1 | tee target-0.raw.log
    python tools/pyspy_report.py target-0.raw [drafter-1.raw ...] [--against EARLIER.raw ...] [--top 15] [--json OUT]

Shares are of samples: by function, by file, by thread, and by pipeline stage as `dflash/profiling` names them, with
Wilson's 95 % interval. "exclusive" counts the samples in which a function is the leaf, "inclusive" those in whose
stack it is at all, once each however deep it recurs. Several files are shown side by side and merged. `-` is standard
input. What py-spy said (it fell behind, it could not read stacks) is looked for in FILE.log, FILE.err, FILE.stderr and
among the lines of FILE. `--against` shows how shares have changed since other profiles, and which changes are more than
chance (5 % level; * holds for one row looked at, ** for all rows of the table together, after Holm). py-spy leaves out
threads that wait unless it was started with --idle.

Exit code: 0, 1 when a file was not usable (the others are shown), 2 when an argument is wrong.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The other half of this tool lies beside it, also when this file is imported.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from pyspy_raw import RawProfile, read_profile
from pyspy_shares import ENOUGH_SAMPLES, TABLES, Tables, count_profile, differences, merge, table_json, wilson
from pyspy_stages import StageMap
from pyspy_text import comparison_text, side_by_side_text, single_text

VERSION = 1
SOURCE = Path(__file__).resolve().parents[1] / "dflash"
_MAX_BAD_LINES_SHOWN = 5
_MAX_ERROR_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Ranked:
    """One file's profile, counted, under a short name."""

    name: str
    profile: RawProfile
    tables: Tables

    @property
    def num_samples(self) -> int:
        return self.profile.num_samples


def load(paths: list[str], stages: StageMap) -> tuple[list[Ranked], list[str]]:
    """Profiles of the usable files, and an error for each of the others."""
    profiles, errors = [], []
    for path in paths:
        try:
            profiles.append(read_profile(path))
        except ValueError as error:
            errors.append(str(error))
    names = short_names([profile.path for profile in profiles])
    counted = (count_profile(profile, stages) for profile in profiles)
    return [Ranked(*each) for each in zip(names, profiles, counted, strict=True)], errors


def short_names(paths: list[str]) -> list[str]:
    """File names without `.raw`; with their folders where these alone tell files apart."""
    names = [Path(path).name.removesuffix(".raw") if path != "-" else "stdin" for path in paths]
    if len(set(names)) == len(names):
        return names
    return [path.removesuffix(".raw") for path in paths]


def warnings_of(ranked: Ranked) -> list[str]:
    """What should keep a reader from trusting a profile too much, one line each."""
    profile, messages, found = ranked.profile, ranked.profile.messages, []
    if messages.num_behind:
        found.append(
            f"py-spy fell behind, by up to {messages.max_behind_s:.2f} s ({messages.num_behind} times): samples are "
            "missing where the process was busiest to read; record again with a lower --rate or without --native"
        )
    num_tried = profile.num_samples + messages.num_errors
    if messages.num_errors > _MAX_ERROR_SHARE * num_tried:
        share = messages.num_errors / num_tried
        found.append(f"py-spy could not read {messages.num_errors} of {num_tried} stacks ({share:.1%})")
    found += [f"py-spy said: {' '.join(error.split())}" for error in messages.errors]
    if ranked.num_samples < ENOUGH_SAMPLES:
        low, high = wilson(ranked.num_samples // 2, ranked.num_samples)
        found.append(
            f"too few samples to trust a share: of {ranked.num_samples}, one that shows as about half is anywhere from "
            f"{low:.0%} to {high:.0%} (95 %); {ENOUGH_SAMPLES} give 5 points either way"
        )
    if profile.bad_lines:
        found.append(f"{len(profile.bad_lines)} bad lines are left out:")
        found += [
            f"  line {line.number}, {line.reason}: {line.text[:80]!r}"
            for line in profile.bad_lines[:_MAX_BAD_LINES_SHOWN]
        ]
        if len(profile.bad_lines) > _MAX_BAD_LINES_SHOWN:
            found.append("  ...")
    return found


def report_text(now: list[Ranked], before: list[Ranked], stages: StageMap, top: int) -> str:
    """The whole report for a reader."""
    lines = []
    for which, group in (("", now), (", before", before)):  # a rank's files most often have one name in both
        for ranked in group:
            lines.append(f"{ranked.name}{which}: {ranked.num_samples} samples, {len(ranked.profile.stacks)} stacks")
            lines += [f"  {'' if text.startswith(' ') else 'warning: '}{text}" for text in warnings_of(ranked)]
    lines += [f"warning: {text}; its samples count as the stage around it" for text in stages.unclear]
    if stages.num_drifted:
        lines.append(
            f"warning: in {stages.num_drifted} stacks lines do not fit the code, which has changed since; their stages "
            "are told by the names of functions (--source names other code)"
        )
    if not stages.names:
        lines.append("warning: no stage is known: the code was not found, see --source")
    merged = merge([ranked.tables for ranked in now])
    parts = ["\n".join(lines)]
    if len(now) == 1:
        parts.append(single_text(merged, top))
    else:
        columns = [(ranked.name, ranked.tables) for ranked in now]
        parts.append(side_by_side_text([*columns, ("merged", merged)], top))
        parts.append("merged\n\n" + single_text(merged, top))
    if before:
        parts.append(comparison_text(merged, merge([ranked.tables for ranked in before]), top))
    return "\n\n".join(parts) + "\n"


def report_json(now: list[Ranked], before: list[Ranked], stages: StageMap, errors: list[str]) -> dict[str, Any]:
    """The same numbers, complete, for a program."""
    merged = merge([ranked.tables for ranked in now])
    whole: dict[str, Any] = {
        "version": VERSION,
        "stage_names": sorted(stages.names),
        "drifted_stacks": stages.num_drifted,
        "errors": errors,
        "profiles": [_profile_json(ranked) for ranked in now],
        "merged": _tables_json(merged),
    }
    if before:
        merged_before = merge([ranked.tables for ranked in before])
        whole["against"] = {
            "profiles": [_profile_json(ranked) for ranked in before],
            "merged": _tables_json(merged_before),
            "differences": {name: _difference_json(merged, merged_before, name) for name in TABLES},
        }
    return whole


def _profile_json(ranked: Ranked) -> dict[str, Any]:
    profile, messages = ranked.profile, ranked.profile.messages
    return {
        "name": ranked.name,
        "path": profile.path,
        "stacks": len(profile.stacks),
        "num_bad_lines": len(profile.bad_lines),
        "bad_lines": [
            {"line": line.number, "reason": line.reason, "text": line.text[:200]} for line in profile.bad_lines[:100]
        ],
        "behind": {"times": messages.num_behind, "max_s": messages.max_behind_s},
        "pyspy_errors": messages.num_errors,
        "too_few_samples": ranked.num_samples < ENOUGH_SAMPLES,
        "warnings": warnings_of(ranked),
        **_tables_json(ranked.tables),
    }


def _tables_json(tables: Tables) -> dict[str, Any]:
    return {
        "samples": tables["function"].num_samples,
        "tables": {name: table_json(table) for name, table in tables.items()},
    }


def _difference_json(now: Tables, before: Tables, name: str) -> list[dict[str, Any]]:
    exclusive = differences(now[name], before[name], "exclusive")
    inclusive = {row.key: row.json() for row in differences(now[name], before[name], "inclusive")}
    return [{"key": row.key, "exclusive": row.json(), "inclusive": inclusive[row.key]} for row in exclusive]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE", help="what `py-spy record -f raw` wrote; - is stdin")
    parser.add_argument("--against", nargs="+", default=[], metavar="OTHER", help="profiles to compare with")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="rows of each table (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all numbers there, too")
    parser.add_argument("--source", type=Path, default=SOURCE, help="package that was running (%(default)s)")
    arguments = parser.parse_args()
    if arguments.top < 1:
        parser.error(f"--top: {arguments.top} must be 1 or more")
    if [*arguments.files, *arguments.against].count("-") > 1:
        parser.error("-: standard input can be read once")
    stages = StageMap(arguments.source)
    now, errors = load(arguments.files, stages)
    before, errors_before = load(arguments.against, stages)
    errors += errors_before
    if now and (before or not arguments.against):
        if arguments.json is not None:
            whole = json.dumps(report_json(now, before, stages, errors), indent=1, ensure_ascii=False, allow_nan=False)
            try:
                arguments.json.write_text(whole + "\n", encoding="utf-8")
            except OSError as error:
                errors.append(f"{arguments.json}: {error.strerror or error}")
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        print(report_text(now, before, stages, arguments.top), end="", flush=True)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
