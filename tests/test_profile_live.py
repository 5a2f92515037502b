"""Profiling a live run: ranks found among processes, what is said when it cannot be done, and a real run."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers_run import ROOT, make_rows, make_target, overrides

sys.path.insert(0, str(ROOT / "tools"))

from pyspy_process import find_ranks, thread_times, used_between  # noqa: E402
from pyspy_stages import OTHER, StageMap  # noqa: E402

SCRIPT = ROOT / "tools" / "profile_live.sh"
PYSPY = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
# Takes a rank's name, says that it is there, and waits; `also` may open files or start threads.
_RANK = """import sys, time
open('/proc/self/comm', 'w').write(sys.argv[1])
{also}
print('up', flush=True)
time.sleep(120)
"""
# A child that has the rank's name and its files, and ends when it does.
_FORK = """import os
rank = os.getpid()
if os.fork() == 0:
    while os.getppid() == rank: time.sleep(.05)
    os._exit(0)"""
StartRank = Callable[..., int]


@pytest.fixture
def start_rank() -> Iterator[StartRank]:
    """Starts processes that look like ranks, and ends them."""
    running = []

    def start(name: str, *arguments: str, also: str = "", cwd: Path | None = None) -> int:
        command = [sys.executable, "-c", _RANK.format(also=also), name, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=cwd)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        return process.pid

    yield start
    for process in running:
        process.kill()
        process.wait()


def profile_live(*arguments: object, path: str | None = None, python: Path | None = None, code: int = 0) -> list[str]:
    """Lines of the command's standard output, or of its errors where `code` is not 0."""
    environment = {**os.environ, "VIRTUAL_ENV": str(python or Path(sys.executable).parent.parent)}
    if path is not None:
        environment["PATH"] = path
    done = subprocess.run(
        [str(SCRIPT), *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return (done.stderr if code else done.stdout).splitlines()


@pytest.fixture
def can_attach() -> None:
    """Skips where py-spy cannot look into a process of this user."""
    if PYSPY is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        time.sleep(0.5)
        done = subprocess.run([PYSPY, "dump", "--pid", str(process.pid)], capture_output=True, text=True, timeout=60)
        process.kill()
    if done.returncode:
        pytest.skip(f"py-spy cannot attach here: {done.stderr.strip()}")


def test_ranks_are_found(tmp_path: Path, start_rank: StartRank) -> None:
    """By their argument, quoted or not, absolute or not, or by an open log; not those of other runs, nor forks."""
    run_dir, other = tmp_path / "it's a run", tmp_path / "other"
    (run_dir / "logs").mkdir(parents=True)
    other.mkdir()
    quoted = str(run_dir).replace("'", "\\'")
    log = run_dir / "logs" / "drafter-10.log"
    expected = {
        "target-0": start_rank("target-0", f"run_dir={run_dir}"),
        "target-1": start_rank("target-1", f"run_dir='{quoted}'"),
        "drafter-2": start_rank("drafter-2", f"run_dir={run_dir.name}", cwd=tmp_path),
        "drafter-10": start_rank("drafter-10", also=f"file = open({str(log)!r}, 'a')\n{_FORK}"),
    }
    elsewhere = start_rank("target-3", f"run_dir={other}", also=f"file = open({str(log)!r}, 'a')")
    start_rank("targets-9", f"run_dir={run_dir}")
    ranks, others = find_ranks(run_dir)
    assert [(rank.name, rank.pid) for rank in ranks] == list(expected.items())
    assert elsewhere in [rank.pid for rank in others]
    assert find_ranks(tmp_path)[0] == []


def test_use_of_threads(start_rank: StartRank) -> None:
    """A thread that spins and one that naps, by their names."""
    code = """
import threading
def spin():
    open('/proc/thread-self/comm', 'w').write('spinner')
    while True: pass
def nap():
    open('/proc/thread-self/comm', 'w').write('napper (1) x')
    while True: time.sleep(.01)
for work in (spin, nap, nap): threading.Thread(target=work, daemon=True).start()
time.sleep(.3)"""
    pid = start_rank("target-0", also=code)
    started_s = time.monotonic()
    before = thread_times(pid)
    time.sleep(1)
    used = {each.name: each for each in used_between(before, thread_times(pid))}
    elapsed_s = time.monotonic() - started_s
    assert set(used) == {"target-0", "spinner", "napper (1) x"}
    spinner, napper = used["spinner"], used["napper (1) x"]
    assert napper.num_threads == 2 and napper.num_waits > 10
    # The kernel counts in steps of 10 ms, user's and system's apart.
    assert spinner.user_s > 5 * napper.user_s and 0.05 < spinner.user_s + spinner.system_s < elapsed_s + 0.04
    assert thread_times(1 << 30) == {}


def test_errors_are_one_line(tmp_path: Path, start_rank: StartRank) -> None:
    missing = profile_live(tmp_path / "no", code=1)
    assert missing == [f"error: {tmp_path / 'no'}: no such folder"]
    idle = profile_live(tmp_path, code=1)
    assert len(idle) == 1 and "no rank of this run is running on this machine" in idle[0]
    assert "must be a whole number" in profile_live(tmp_path, "0", code=2)[-1]

    rank = start_rank("target-0", f"run_dir={tmp_path}")
    python = tmp_path / "environment"
    (python / "bin").mkdir(parents=True)
    (python / "bin" / "python").symlink_to(sys.executable)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    assert profile_live(tmp_path, 1, path=str(tools), python=python, code=1) == [
        "error: py-spy is not installed: pip install py-spy"
    ]
    fake = tools / "py-spy"
    fake.write_text("#!/bin/bash\necho 'Error: Permission Denied: Try running again with sudo' >&2\nexit 1\n")
    fake.chmod(0o755)
    denied = profile_live(tmp_path, 1, path=str(tools), python=python, code=1)
    assert len(denied) == 1 and f"target-0 (process {rank})" in denied[0] and "SYS_PTRACE" in denied[0]
    assert not (tmp_path / "profiles").exists()


def test_a_pass_that_fails_costs_no_other(tmp_path: Path, start_rank: StartRank) -> None:
    """What py-spy says of one rank is told; the other rank is reported; a rank without a sample is named."""
    for name in ("target-0", "drafter-1"):
        start_rank(name, f"run_dir={tmp_path}")
    pid = find_ranks(tmp_path)[0][1].pid
    tools = tmp_path / "tools"
    tools.mkdir()
    fake = tools / "py-spy"
    fake.write_text(
        "#!/bin/bash\n"
        f"[[ $1 != record || ! $* =~ --pid\\ {pid}.*--native ]] || {{ echo 'Error: no unwind table' >&2; exit 1; }}\n"
        'while [ $# -gt 1 ]; do [ "$1" != --output ] || out=$2; shift; done\n'
        '[ -n "$out" ] || exit 0\n'
        '[[ $out =~ drafter-1.gil ]] && : >"$out" || echo "f (a.py:1) 400" >"$out"\n'
    )
    fake.chmod(0o755)
    report = Path(profile_live(tmp_path, 1, path=f"{tools}:{os.environ['PATH']}")[-1])
    text = report.read_text()
    assert "- drafter-1: no unwind table" in text and "- drafter-1: no sample" in text
    assert "- target-0: the lock was held in 100% of the samples" in text
    native = json.loads((report.parent / "native.json").read_text())
    assert [(each["name"], each["samples"]) for each in native["profiles"]] == [("target-0.native", 400)]


@pytest.mark.usefixtures("can_attach")
def test_a_real_run(tmp_path: Path) -> None:
    """Both ranks of a run under torchrun: threads, all three passes, and stages under their names; the run goes on."""
    target, rows, run_dir = make_target(tmp_path / "target"), make_rows(tmp_path / "rows.jsonl", 40), tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    command += ["dflash.train", *overrides(target, rows, run_dir, train__max_steps=100_000)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "out.log").open("wb") as log:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(lambda: num_steps(run_dir) > 2, run, tmp_path / "out.log")
        report = Path(profile_live(run_dir, 2, "--rate", 50)[-1])
        before = num_steps(run_dir)
        wait_for(lambda: num_steps(run_dir) > before, run, tmp_path / "out.log")
    finally:
        run.terminate()
        run.wait(120)
    assert report.parent.parent == run_dir / "profiles"
    text = report.read_text()
    for words in (
        "- target-0: process",
        "- drafter-1: process",
        "  drafter-1 ",
        "Where the time goes",
        "native",
        "lock",
    ):
        assert words in text, words
    names = StageMap(ROOT / "dflash").names | {OTHER}
    wall = json.loads((report.parent / "wall.json").read_text())
    assert [each["name"] for each in wall["profiles"]] == ["target-0.wall", "drafter-1.wall"]
    for profile, own in zip(wall["profiles"], ({"forward", "blocked"}, {"backward", "layers"}), strict=True):
        assert profile["num_bad_lines"] == 0
        shares = {row["key"]: row["inclusive_share"] for row in profile["tables"]["main_thread_stage"]["rows"]}
        assert {part for key in shares for part in key.split("/")} <= names
        assert own & set(shares)
        # The loop is in a stage but for short moments; without its lines it would be in none.
        assert shares.get(OTHER, 0.0) < 0.3
    assert (report.parent / "native.json").is_file() and list(report.parent.glob("*.gil.raw.log"))


def num_steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"train"') if file.is_file() else 0


def wait_for(is_done: Callable[[], bool], run: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 150
    while not is_done():
        assert run.poll() is None and time.monotonic() < deadline, log.read_text("utf-8", "replace")
        time.sleep(0.2)
