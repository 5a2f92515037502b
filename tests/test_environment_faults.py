"""Full disks, vanished files, a port in use and a clock that jumps, met by real runs of the training command."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers_data import Build, token_rows, write_jsonl, write_parquet
from helpers_environment import WatchedRun, assert_same_weights, has_namespaces, in_namespace
from helpers_run import ROOT, make_rows, make_target, metrics, overrides

from dflash.data.corpus import open_corpus
from dflash.profiling.files import AppendFile

MORE = {
    "train__max_steps": 8,
    "train__micro_batches_per_step": 2,
    "checkpoint__interval_steps": 4,
    "pipeline__queue__depth": 1,
    "pipeline__queue__min_ready": 1,
}
Arguments = Callable[..., list[str]]
needs_namespaces = pytest.mark.skipif(not has_namespaces(), reason="mounting takes user and mount namespaces")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return make_target(folder / "target"), make_rows(folder / "rows.jsonl", 60)


@pytest.fixture(scope="module")
def arguments(sources: tuple[Path, Path]) -> Arguments:
    def make(run_dir: Path, rows: Path = sources[1], **more: Any) -> list[str]:
        return overrides(sources[0], rows, run_dir, **{**MORE, **more})

    return make


@pytest.fixture(scope="module")
def undisturbed(arguments: Arguments, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "launch"
    with WatchedRun(folder, arguments(folder / "run")) as run:
        assert run.end() == [0, 0]
    return folder / "run"


def assert_same_run(one: Path, other: Path) -> None:
    assert_same_weights(one, other)
    assert metrics(one) == metrics(other) and metrics(one, "eval") == metrics(other, "eval")


def test_a_clock_that_jumps_changes_nothing(arguments: Arguments, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "launch" / "run"
    with WatchedRun(tmp_path / "launch", arguments(run_dir), clock_jumps=True) as run:
        assert run.end() == [0, 0]
    assert_same_run(run_dir, undisturbed)
    for name in ("target-0", "drafter-1"):
        last = (run_dir / "logs" / f"{name}.log").read_text().splitlines()[-1]
        seconds = float(last.split(f"whole run: {name} ")[1].split(" s:")[0])
        assert 0 < seconds < 600, last
    for record in (run_dir / "metrics.jsonl").read_text().splitlines():
        assert '"tokens_per_s": -' not in record


@needs_namespaces
def test_a_full_disk_under_logs_and_charts_costs_lines_and_no_step(
    arguments: Arguments, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "launch" / "run"
    full = "; ".join(
        f"mount -t tmpfs -o size=4k tmpfs {run_dir}/{folder} && head -c 4096 /dev/zero > {run_dir}/{folder}/filler"
        for folder in ("logs", "tensorboard")
    )
    before = in_namespace(f"mkdir -p {run_dir}/logs {run_dir}/tensorboard; {full}")
    with WatchedRun(tmp_path / "launch", arguments(run_dir), before=before) as run:
        assert run.end() == [0, 0]
        for rank in (0, 1):
            warnings = run.lines(rank, "warning: ")
            assert len(warnings) == 2, warnings  # one for the log, one for the charts
            for warning in warnings:
                assert "No space left on device; training goes on" in warning
    assert_same_run(run_dir, undisturbed)


def test_files_that_vanish_during_the_run_are_not_missed_before_the_next_launch(
    arguments: Arguments, sources: tuple[Path, Path], undisturbed: Path, tmp_path: Path
) -> None:
    rows, run_dir = tmp_path / "rows.jsonl", tmp_path / "launch" / "run"
    shutil.copy(sources[1], rows)
    with WatchedRun(tmp_path / "launch", arguments(run_dir, rows)) as run:
        run.wait_for_step(run_dir, 2)
        rows.unlink()
        shutil.rmtree(run_dir.parent / "corpora")
        assert run.end() == [0, 0]
    assert_same_run(run_dir, undisturbed)

    def resumed(name: str) -> str:
        again = [*arguments(run_dir, rows), "resume=auto", "pipeline=colocated"]
        with WatchedRun(tmp_path / name, again, num_ranks=1) as run:
            assert run.end() == [1]
            (told,) = run.lines(0)
        return told

    assert resumed("vanished").startswith(f"error: {rows}: no such data file")
    make_rows(rows, 60, seed=1)
    changed = resumed("changed")
    assert changed.startswith("error: resume: the training data")


def test_a_run_folder_that_is_moved_away_costs_no_step(arguments: Arguments, undisturbed: Path, tmp_path: Path) -> None:
    run_dir, away = tmp_path / "launch" / "run", tmp_path / "away"
    with WatchedRun(tmp_path / "launch", arguments(run_dir)) as run:
        run.wait_for_step(run_dir, 2)
        run_dir.rename(away)
        assert run.end() == [0, 0]
    assert_same_weights(run_dir, undisturbed)  # the folder of checkpoints is made anew
    assert metrics(away) == metrics(undisturbed)  # what was open goes with the folder


@needs_namespaces
def test_a_read_only_run_folder_is_refused_before_anything_is_trained(arguments: Arguments, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    more = {"data__cache_dir": tmp_path / "corpora"}
    before = in_namespace(f"mount -t tmpfs -o ro tmpfs {place}")
    single = [*arguments(place / "run", **more), "pipeline=colocated"]
    with WatchedRun(tmp_path / "launch", single, num_ranks=1, before=before) as run:
        assert run.end() == [1]
        (told,) = run.lines(0)
    assert told.startswith("error: ") and str(place / "run") in told and "Read-only file system" in told


def test_a_master_port_in_use_is_named(arguments: Arguments, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        order = arguments(tmp_path / "run")
        environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "dflash.train", *order]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    (told,) = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 1 and told.startswith("error: ")
    assert f"MASTER_ADDR 127.0.0.1, MASTER_PORT {port}: another program listens on that port" in told


@needs_namespaces
def test_a_full_disk_while_saving_keeps_the_last_checkpoint(
    arguments: Arguments, undisturbed: Path, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in undisturbed.glob("checkpoints/step-000004/*"))
    run_dir, kept = tmp_path / "launch" / "run", tmp_path / "kept"
    folder = run_dir / "checkpoints"
    # Room for one checkpoint and a half; what is there at the end outlives the namespace as a copy.
    script = f"mkdir -p {folder}; mount -t tmpfs -o size={size * 3 // 2} tmpfs {folder}"
    keep = f'"$@"; cp -r {folder} {kept}; exit 0; : '
    with WatchedRun(tmp_path / "launch", arguments(run_dir), before=in_namespace(f"{script}; {keep}")) as run:
        codes = run.end()
        assert 0 not in codes
        (told,) = run.lines(1, "error: ")
    assert "step-000008" in told and "No space left on device" in told
    for path in kept.glob("step-*"):
        shutil.copytree(path, folder / path.name)
    assert [path.name for path in folder.glob("step-*")] == ["step-000004"]
    with WatchedRun(tmp_path / "again", [*arguments(run_dir), "resume=auto"]) as run:
        assert run.end() == [0, 0]
    assert_same_run(run_dir, undisturbed)


# What follows needs no run.


@needs_namespaces
def test_pieces_wait_for_room_and_are_never_cut_in_two(tmp_path: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from dflash.profiling.files import AppendFile
folder = Path({str(tmp_path)!r})
file = AppendFile(folder / "lines.txt")
filler = folder / "filler"
filler.write_bytes(bytes(60 * 1024))
for number in range(100):
    file.line(f"{{number}} " + "x" * 100)
text = (folder / "lines.txt").read_text()
assert text.endswith("x\\n") and 20 < len(text.splitlines()) < 50, text
filler.unlink()
file.line("100 " + "x" * 100)
file.close()
lines = (folder / "lines.txt").read_text().splitlines()
assert [int(line.split()[0]) for line in lines] == list(range(101))
assert {{len(line.split()[1]) for line in lines}} == {{100}}
"""
    command = [*in_namespace(f"mount -t tmpfs -o size=64k tmpfs {tmp_path}"), sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(f"warning: {tmp_path}/lines.txt cannot be written: No space left on device")


def test_a_file_that_is_deleted_is_begun_anew_and_a_lost_folder_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = AppendFile(tmp_path / "logs" / "a.log")
    file.line("one")
    (tmp_path / "logs" / "a.log").unlink()
    file.line("two")
    assert (tmp_path / "logs" / "a.log").read_text() == "two\n" and capsys.readouterr().err == ""
    shutil.rmtree(tmp_path / "logs")
    file.line("three")
    file.line("four")
    (tmp_path / "logs").mkdir()
    file.close()
    assert (tmp_path / "logs" / "a.log").read_text() == "three\nfour\n"
    assert capsys.readouterr().err.count("warning: ") == 1


def test_a_console_on_a_full_disk_costs_no_run() -> None:
    script = (
        "import sys\n"
        "from dflash.profiling.files import protect_console\n"
        "protect_console()\n"
        "for _ in range(1000): print('x' * 100); print('y' * 100, file=sys.stderr, flush=True)\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=full, stderr=full, timeout=120)
    assert done.returncode == 0


def test_a_corpus_that_is_cut_in_place_is_named(tmp_path: Path) -> None:
    corpus = Build(tmp_path)(write_jsonl(tmp_path / "a.jsonl", token_rows(50)))
    before = corpus.document(0)[0].tolist()
    path = corpus.folder / "input_ids.bin"
    os.truncate(path, 64)
    with pytest.raises(ValueError, match=r"input_ids.bin: has only 64 bytes, it was cut after it had been opened"):
        corpus.document(49)
    corpus = Build(tmp_path)(tmp_path / "a.jsonl")  # the next launch builds it anew
    assert corpus.document(0)[0].tolist() == before
    shutil.rmtree(corpus.folder)
    assert corpus.document(49)[0].tolist()


def test_what_changed_in_the_data_is_named(tmp_path: Path) -> None:
    build = Build(tmp_path)
    first = build(write_jsonl(tmp_path / "a.jsonl", token_rows(5)))
    other = build(write_jsonl(tmp_path / "a.jsonl", token_rows(5, seed=1)), max_length=30)
    told = other.what_changed_since(first.fingerprint)
    assert told == f"data.max_length was 1000, is 30; {tmp_path}/a.jsonl has other contents than {tmp_path}/a.jsonl had"
    shutil.rmtree(first.folder)
    assert other.what_changed_since(first.fingerprint) == ""


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_read_makes_no_corpus(kind: str, tmp_path: Path) -> None:
    build, path = Build(tmp_path), tmp_path / f"a.{kind}"
    write = write_jsonl if kind == "jsonl" else write_parquet
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]} for _ in range(10)]
    write(path, [*rows, {"input_ids": [1, 999], "loss_mask": [1, 1]}])

    def touch(line: str) -> None:  # is told of the bad row while the file is read
        with path.open("ab") as file:
            file.write(b"\n")

    with pytest.raises(ValueError, match=f"{path}: changed while it was read; run again"):
        build.folder(path, max_bad_fraction=0.5, report=touch)
    assert list(build.cache_dir.iterdir()) == []


def test_what_a_killed_build_left_is_never_used_and_goes_with_the_next(tmp_path: Path) -> None:
    build, path = Build(tmp_path), write_jsonl(tmp_path / "a.jsonl", [*token_rows(400), "bad"])
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "from helpers_data import Build\n"
        f"build = Build(Path({str(tmp_path)!r}))\n"
        "class Deadly(list):\n"
        "    def append(self, line): os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build.folder({str(path)!r}, max_bad_fraction=0.5, report=Deadly().append)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120)
    assert done.returncode == -9
    left = sorted(entry.name for entry in build.cache_dir.iterdir())
    assert len(left) == 2 and left[0].startswith(".") and left[1] == left[0] + ".lock"
    folder = build.folder(path, max_bad_fraction=0.5)
    assert list(build.cache_dir.iterdir()) == [folder] and open_corpus(folder).num_documents == 400


@needs_namespaces
@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system; name a folder"), ("size=16k", "No space left on device .*make room")],
    ids=["read_only", "full"],
)
def test_a_cache_that_cannot_be_written_is_named(options: str, reason: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(2000))
    cache = tmp_path / "cache"
    cache.mkdir()
    script = (
        "import sys\n"
        "sys.path.insert(0, 'tests')\n"
        "from pathlib import Path\n"
        "import pytest\n"
        "from helpers_data import Build\n"
        f"with pytest.raises(ValueError, match=r'data.cache_dir: {cache} cannot be written: {reason}'):\n"
        f"    Build(Path({str(tmp_path)!r})).folder({str(path)!r})\n"
        f"assert list(Path({str(cache)!r}).iterdir()) == []\n"
    )
    command = [*in_namespace(f"mount -t tmpfs -o {options} tmpfs {cache}"), sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
