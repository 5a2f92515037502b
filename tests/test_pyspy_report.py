"""The py-spy report: parsing, shares, intervals and differences against independent counts."""

import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from pyspy_raw import Frame, parse_frame, read_profile, split_frames  # noqa: E402
from pyspy_shares import Table, differences, wilson  # noqa: E402
from pyspy_stages import OTHER  # noqa: E402

MAIN = "thread (7): MainThread"


def run_tool(*arguments: Any, stdin: bytes = b"", code: int = 0) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(ROOT / "tools" / "pyspy_report.py"), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=60)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert b"Traceback" not in done.stderr
    return done


def numbers(tmp_path: Path, *arguments: Any, code: int = 0) -> dict[str, Any]:
    out = tmp_path / "numbers.json"
    run_tool(*arguments, "--json", out, code=code)
    return json.loads(out.read_text())


def rows(tables: dict[str, Any], name: str) -> dict[str, tuple[int, int]]:
    """(inclusive, exclusive) by key."""
    return {row["key"]: (row["inclusive"], row["exclusive"]) for row in tables["tables"][name]["rows"]}


@pytest.mark.parametrize(
    ("text", "frames"),
    [
        ("a;b;c", ["a", "b", "c"]),
        ("<module> (t.py:3);A.f.<locals>.<lambda> (t.py:4)", ["<module> (t.py:3)", "A.f.<locals>.<lambda> (t.py:4)"]),
        ("f (a.py:1);<[u8; 16] as X>::g (lib.so)", ["f (a.py:1)", "<[u8; 16] as X>::g (lib.so)"]),
        ("f (a.py:1);g(int; x)::h (lib.so);k", ["f (a.py:1)", "g(int; x)::h (lib.so)", "k"]),
        ("operator< (l.so);b (x.py:1)", ["operator< (l.so)", "b (x.py:1)"]),
        ("A::operator->() (l.so);b", ["A::operator->() (l.so)", "b"]),
        ("odd(name;b (x.py:1);c", ["odd(name", "b (x.py:1)", "c"]),
        ('process 3:"sh -c a; b";thread (4): x;f', ['process 3:"sh -c a; b"', "thread (4): x", "f"]),
        ('process 3:"a";process 4:"b;c";f', ['process 3:"a"', 'process 4:"b;c"', "f"]),
        ('process 3:"never closed;f', ['process 3:"never closed', "f"]),
    ],
)
def test_split_frames(text: str, frames: list[str]) -> None:
    assert split_frames(text) == frames


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ("f (a/b.py:12)", Frame("f", "a/b.py", 12)),
        ("f (a/b.py)", Frame("f", "a/b.py")),
        ("f (my dir (x)/a b.py:3)", Frame("f", "my dir (x)/a b.py", 3)),
        ("<module> (<string>:1)", Frame("<module>", "<string>", 1)),
        ("<frozen importlib._bootstrap> (x:1)", Frame("<frozen importlib._bootstrap>", "x", 1)),
        ("std::function<void (int)>::operator() (lib.so)", Frame("std::function<void (int)>::operator()", "lib.so")),
        ("at::add(at::Tensor const&) const (torch.so)", Frame("at::add(at::Tensor const&) const", "torch.so")),
        ("(anonymous namespace)::f(int)", Frame("(anonymous namespace)::f(int)")),
        ("0x7f711ce4524a (libc.so.6)", Frame("0x7f711ce4524a", "libc.so.6")),
        ("f (C:\\x\\a.py:4)", Frame("f", "C:\\x\\a.py", 4)),
        ("f ()", Frame("f ()")),
        ("plain", Frame("plain")),
    ],
)  # fmt: skip
def test_parse_frame(text: str, frame: Frame) -> None:
    assert parse_frame(text) == frame


def test_recursion_counts_once(tmp_path: Path) -> None:
    """A function deep in itself counts each sample once, whatever its lines."""
    raw = tmp_path / "a.raw"
    raw.write_text(
        "m (a.py:1);r (a.py:2);r (a.py:3);r (a.py:2) 10\nm (a.py:1);r (a.py:2);s (b.py:1);r (a.py:9) 5\nm (a.py:8) 1\n"
    )
    found = numbers(tmp_path, raw)["merged"]
    assert found["samples"] == 16
    assert rows(found, "function") == {"m (a.py)": (16, 1), "r (a.py)": (15, 15), "s (b.py)": (5, 0)}
    assert rows(found, "file") == {"a.py": (16, 16), "b.py": (5, 0)}
    assert rows(found, "thread") == {"m (a.py)": (16, 16)}


def test_against_an_independent_count(tmp_path: Path) -> None:
    """Random stacks of two ranks, counted here in the simplest way from what they were made of."""
    generator = random.Random(5)
    functions = [f"{name} ({file}.py:%d)" for name in ("f", "A.g", "<lambda>", "h h") for file in ("x", "y/z")]
    functions += ["void at::native::k<int, (anonymous)>(int) (lib.so)", "Trait<[u8; 4]>::m (lib.so)"]
    threads = [MAIN, "thread (8): pt_autograd_0"]
    inclusive: dict[str, Counter[str]] = {"function": Counter(), "file": Counter()}
    exclusive: dict[str, Counter[str]] = {"function": Counter(), "file": Counter()}
    by_thread: Counter[str] = Counter()
    paths = []
    for rank in range(2):
        lines = []
        for _ in range(200):
            frames = [generator.choice(functions) for _ in range(generator.randint(1, 9))]
            thread, count = generator.choice(threads), generator.randint(1, 50)
            written = [frame % generator.randint(1, 400) if "%d" in frame else frame for frame in frames]
            lines.append(f"{thread};{';'.join(written)} {count}\n")
            keys = [frame.replace(":%d", "") for frame in frames]
            by_thread[thread] += count
            for kind, names in (("function", keys), ("file", [key[key.rindex("(") + 1 : -1] for key in keys])):
                exclusive[kind][names[-1]] += count
                for name in set(names):
                    inclusive[kind][name] += count
        paths.append(tmp_path / f"rank-{rank}.raw")
        paths[-1].write_text("".join(lines))
    found = numbers(tmp_path, *paths)
    assert sum(profile["samples"] for profile in found["profiles"]) == found["merged"]["samples"] == by_thread.total()
    for kind in ("function", "file"):
        assert rows(found["merged"], kind) == {k: (n, exclusive[kind][k]) for k, n in inclusive[kind].items()}
    assert rows(found["merged"], "thread") == {key: (n, n) for key, n in by_thread.items()}
    assert rows(found["merged"], "thread_name").keys() == {"MainThread", "pt_autograd_0"}
    for row in found["merged"]["tables"]["function"]["rows"]:
        assert row["inclusive_share"] == row["inclusive"] / by_thread.total()


def test_bad_lines_are_counted_and_shown(tmp_path: Path) -> None:
    raw = tmp_path / "a.raw"
    raw.write_bytes(
        b"\xef\xbb\xbff (a.py:1) 3\r\n\ng (caf\xe9.py:2) 4\nno count\nh 1.5\nh -3\n 7\nf;;g 2\nh "
        + b"9" * 400
        + b"\nx y z 2\n"
        b"\xe2\x80\xa8sep (a.py:1) 1"
    )
    found = numbers(tmp_path, raw)
    profile = found["profiles"][0]
    assert profile["num_bad_lines"] == 6
    assert [line["line"] for line in profile["bad_lines"]] == [4, 5, 6, 7, 8, 9]
    assert rows(profile, "function") == {
        "f (a.py)": (3, 3),
        "g (caf\\xe9.py)": (4, 4),
        "x y z": (2, 2),
        "\u2028sep (a.py)": (1, 1),
    }
    text = run_tool(raw).stdout.decode()
    assert "6 bad lines" in text and "line 4" in text and "'no count'" in text


def test_unusable_files_are_one_line_each(tmp_path: Path) -> None:
    good, empty, bad = tmp_path / "good.raw", tmp_path / "empty.raw", tmp_path / "bad.raw"
    good.write_text("f (a.py:1) 3\n")
    empty.write_text("")
    bad.write_text("nothing to see\nhere\n")
    done = run_tool(good, empty, bad, tmp_path / "missing.raw", tmp_path, code=1)
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 4 and all(line.startswith("error: ") for line in errors)
    assert "empty.raw: is empty" in errors[0] and "2 bad lines" in errors[1]
    assert "No such file" in errors[2] and "directory" in errors[3]
    assert b"good: 3 samples" in done.stdout
    only = run_tool(empty, code=1)
    assert only.stdout == b"" and len(only.stderr.splitlines()) == 1
    assert b"--top" in run_tool(good, "--top", 0, code=2).stderr


def test_what_pyspy_said(tmp_path: Path) -> None:
    """Among the lines, on standard input, or beside the file; none of it is taken for a stack."""
    behind = "py-spy> 1.53s behind in sampling, results may be inaccurate. Try reducing the sampling rate.\n"
    result = "py-spy> Wrote raw flamegraph data to 'a b.raw'. Samples: 400 Errors: 100\n"
    start = "py-spy> Sampling process 100 times a second for 4 seconds. Press Control-C to exit.\n\n"
    stack = "f (a.py:1) 400\n"
    raw = tmp_path / "in.raw"
    raw.write_text(start + stack + behind + result)
    beside = tmp_path / "beside.raw"
    beside.write_text(stack)
    (tmp_path / "beside.raw.log").write_text(
        start + behind.replace("1.53s", "2.5s").replace("\n", "\r") + behind + result
    )
    found = numbers(tmp_path, raw, beside)
    for profile, times, seconds in zip(found["profiles"], (1, 2), (1.53, 2.5), strict=True):
        assert profile["samples"] == 400 and profile["num_bad_lines"] == 0
        assert profile["behind"] == {"times": times, "max_s": seconds} and profile["pyspy_errors"] == 100
        assert any("fell behind" in text for text in profile["warnings"])
        assert any("100 of 500" in text for text in profile["warnings"])
    piped = run_tool("-", stdin=raw.read_bytes()).stdout.decode()
    assert "stdin: 400 samples" in piped and "fell behind, by up to 1.53 s" in piped
    torn = tmp_path / "torn.raw"
    torn.write_text("f (a.py:1);g (apy-spy> Wrote 'x'. Samples: 9 Errors: 0\n" + stack)
    profile = read_profile(str(torn))
    assert profile.num_samples == 400 and len(profile.bad_lines) == 1


def test_wilson() -> None:
    """Its ends are the shares from which the observed one lies 1.96 standard errors away."""
    for successes, total in ((0, 10), (1, 10), (5, 10), (10, 10), (37, 1000), (1, 100000)):
        low, high = wilson(successes, total)
        share = successes / total
        assert 0 <= low <= share <= high <= 1
        for end in {low, high} - {0.0, 1.0}:
            assert abs(share - end) / math.sqrt(end * (1 - end) / total) == pytest.approx(1.959964, abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=5e-5)  # as tabulated


def test_few_samples_are_told(tmp_path: Path) -> None:
    raw = tmp_path / "a.raw"
    raw.write_text("f (a.py:1) 380\ng (a.py:1) 4\n")
    found = numbers(tmp_path, raw)["profiles"][0]
    assert found["too_few_samples"] and any("too few samples" in text for text in found["warnings"])
    assert {row["key"]: row["few"] for row in found["tables"]["function"]["rows"]} == {
        "f (a.py)": False,
        "g (a.py)": True,
    }
    raw.write_text("f (a.py:1) 385\n")
    assert numbers(tmp_path, raw)["profiles"][0]["warnings"] == []


def test_differences(tmp_path: Path) -> None:
    now, before = tmp_path / "now.raw", tmp_path / "before.raw"
    now.write_text("m (a.py:1);f (a.py:2) 600\nm (a.py:1);g (a.py:3) 395\nm (a.py:1);new (a.py:9) 5\n")
    before.write_text("m (a.py:1);f (a.py:2) 400\nm (a.py:1);g (a.py:3) 596\nm (a.py:1);old (b.py:1) 4\n")
    found = numbers(tmp_path, now, "--against", before)["against"]["differences"]
    by_key = {row["key"]: row for row in found["function"]}
    f = by_key["f (a.py)"]["exclusive"]
    assert (f["now"], f["before"], f["significant"]) == (600, 400, True)
    assert f["difference"] == pytest.approx(0.2)
    z = 0.2 / math.sqrt(0.5 * 0.5 * 2 / 1000)
    assert f["p_value"] == pytest.approx(math.erfc(z / math.sqrt(2)), rel=1e-9)
    assert f["ci"][0] < 0.2 < f["ci"][1] and f["ci"] == pytest.approx([0.1568, 0.2420], abs=1e-3)
    new, m = by_key["new (a.py)"]["exclusive"], by_key["m (a.py)"]["inclusive"]
    # All five of them in one of two equal halves: 2 / 2**5, but for drawing without putting back.
    assert new["p_value"] == pytest.approx(2 / 32, rel=0.02) and not new["significant"]
    assert (m["difference"], m["p_value"], m["significant"]) == (0.0, 1.0, False)
    text = run_tool(now, "--against", before).stdout.decode()
    assert "\nbefore, before: 1000 samples" in text and text.startswith("now: 1000 samples")
    assert re.search(r"60\.0%\s+40\.0%\s+\+20\.0 .*\*\*\s+f \(a\.py\)", text)


def test_small_counts_are_compared_exactly() -> None:
    """Fisher's example of the lady and the tea, and a large difference in a small profile."""
    now, before = Table(), Table()
    for table, hits in ((now, 3), (before, 1)):
        table.add(["k"], "k", hits)
        table.add(["l"], "l", 4 - hits)
    p_value = {row.key: row.p_value for row in differences(now, before, "exclusive")}
    assert p_value["k"] == pytest.approx(34 / 70)


def test_several_ranks_side_by_side(tmp_path: Path) -> None:
    paths = []
    for rank in range(10):
        paths.append(tmp_path / f"target-{rank}.raw")
        paths[-1].write_text(f"f (a.py:1) {rank + 1}\ng (b.py:1) 1\n")
    text = run_tool(*paths, "--top", 1).stdout.decode()
    headers = [line for line in text.splitlines() if "by leaf function, exclusive" in line]
    assert len(headers) == 2 and all("merged" in line for line in headers) and "target-9" in headers[1]
    assert "and 1 more" in text


def test_stages_in_the_report(tmp_path: Path) -> None:
    """Shares by stage of one rank's main thread, beside a thread that is none of its loop."""
    file, function = "dflash/roles/target.py", "Producer.produce"
    lines = (ROOT / file).read_text().splitlines()
    line = 2 + next(number for number, text in enumerate(lines) if 'stage("forward")' in text)
    raw = tmp_path / "target-0.raw"
    raw.write_text(
        f"{MAIN};{function} ({file}:{line});mm (libtorch.so) 70\n{MAIN};{function} ({file}:{line}) 10\n"
        f"{MAIN};<module> (dflash/train.py:1) 20\nthread (9): writer;run (threading.py:3) 100\n"
    )
    found = numbers(tmp_path, raw)["merged"]
    assert rows(found, "stage") == {"forward": (80, 80), OTHER: (120, 120)}
    assert rows(found, "main_thread_stage") == {"forward": (80, 80), OTHER: (20, 20)}
    assert found["tables"]["main_thread_stage"]["samples"] == 100
    # What torch does is the line's that called it; a thread that never enters the program is left out.
    own = {f"{file}:{line} {function}": (80, 80), "dflash/train.py:1 <module>": (20, 20)}
    assert rows(found, "own_line") == own and found["tables"]["own_line"]["samples"] == 100
    assert rows(numbers(tmp_path, raw, "--source", tmp_path)["merged"], "stage") == {OTHER: (200, 200)}


def test_what_leads_to_the_loop_fills_no_table(tmp_path: Path) -> None:
    """Frames around all samples are left out where inclusive shares are ranked, but never all frames."""
    paths = [tmp_path / "target-0.raw", tmp_path / "drafter-1.raw"]
    for path, own in zip(paths, ("produce (dflash/t.py:1)", "step (dflash/d.py:1)"), strict=True):
        path.write_text(f"{MAIN};<module> (a.py:1);run (b.py:2);{own};leaf (c.py:3) 300\n")
    text = run_tool(*paths).stdout.decode()
    table = text.partition("by leaf function, inclusive")[2].partition("\n\n")[0]
    assert "produce (dflash/t.py)" in table and "step (dflash/d.py)" in table and "leaf (c.py)" in table
    assert "<module>" not in table and "run (b.py)" not in table
    for path in paths:
        path.write_text(f"{MAIN};<module> (a.py:1);run (b.py:2) 300\n")
    assert "run (b.py)" in run_tool(*paths).stdout.decode().partition("by leaf function, inclusive")[2]


def test_code_of_another_version_is_told(tmp_path: Path) -> None:
    package, raw = tmp_path / "pkg", tmp_path / "a.raw"
    package.mkdir()
    (package / "a.py").write_text("def one():\n    pass\ndef two():\n    pass\n")
    raw.write_text("one (pkg/a.py:4) 400\n")
    assert "in 1 stacks lines do not fit" in run_tool(raw, "--source", package).stdout.decode()
