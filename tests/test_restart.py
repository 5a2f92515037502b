"""launch/train.sh: a job that loses a rank starts again by itself and ends as if nothing had happened."""

import socket
import subprocess
from pathlib import Path

import pytest
from helpers_restart import TRAIN, assert_same_result, environment, free_port, started, wait_for
from helpers_run import launch, make_rows, make_target, overrides

MORE = {"train__max_steps": 24, "train__eval_interval_steps": 8, "checkpoint__interval_steps": 2}


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The key=value part of the command, without the run folder."""
    folder = tmp_path_factory.mktemp("inputs")
    target, rows = make_target(folder / "target"), make_rows(folder / "rows.jsonl", 120)
    return overrides(target, rows, folder / "run", **MORE)[1:]


@pytest.fixture(scope="module")
def undisturbed(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    launch(2, [f"run_dir={run_dir}", *arguments])
    return run_dir


def refused(*arguments: str, **more: str) -> str:
    """The one line with which train.sh refuses a command."""
    done = subprocess.run([TRAIN, *arguments], env=environment(**more), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0].removeprefix("error: ")


def test_a_job_whose_rank_is_killed_ends_in_the_same_bits(
    arguments: list[str], undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "a run"  # a space: quoted for the shell and for Hydra
    options = ["--max-restarts", "1", "--profile-interval", "17"]
    with started(run_dir, arguments, nproc=2, options=options) as job:
        job.wait_for_step(2)
        variables = [rank.environment() for rank in job.ranks()]
        job.kill(1)
        assert job.finish() == [0], job.console()
        assert len(variables) == 2
        for given in variables:
            assert given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
            assert given["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
            assert given["OMP_NUM_THREADS"] == "1"
            assert given["DFLASH_PROFILE_INTERVAL"] == "17"
        (resumed,) = job.resumed_after()
        assert 2 <= resumed < MORE["train__max_steps"]
    assert_same_result(run_dir, undisturbed)
    attempts = sorted(run_dir.glob("logs/node-0/*/attempt_*"))
    assert [path.name for path in attempts] == ["attempt_0", "attempt_1"]
    for attempt in attempts:
        assert "plan: " in (attempt / "0" / "stdout.log").read_text()
        assert "train: " in (attempt / "1" / "stderr.log").read_text()
    assert "lost drafter-1" in (attempts[0] / "0" / "stderr.log").read_text()
    assert "[0] plan: " in job.console() and "[0] error: target-0: lost drafter-1" in job.console()


def test_two_agents_start_again_together(arguments: list[str], undisturbed: Path, tmp_path: Path) -> None:
    """One rank on each of two agents, as on two machines; the rank of the one that holds no meeting point dies."""
    run_dir = tmp_path / "run"
    with started(run_dir, arguments, nproc=1, num_agents=2, options=["--max-restarts", "1"]) as job:
        job.wait_for_step(2)
        job.kill(1)
        assert job.finish() == [0, 0], job.console()
        assert len(job.resumed_after()) == 1
    assert_same_result(run_dir, undisturbed)
    assert {path.name for path in run_dir.glob("logs/*")} >= {"node-0", "node-1"}


def test_a_job_without_restarts_left_ends_with_1_and_leaves_nobody(arguments: list[str], tmp_path: Path) -> None:
    with started(tmp_path / "run", arguments, nproc=2, options=["--max-restarts", "0"]) as job:
        job.wait_for_step(2)
        ranks = job.ranks()
        job.kill(0)
        assert job.finish() == [1]
        wait_for("end of all ranks", lambda: not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks))
    assert "error: drafter-1: lost target-0" in job.console()


def test_help_names_every_option_and_the_exit_codes() -> None:
    done = subprocess.run([TRAIN, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    told = ("--nproc", "--nnodes", "--node-rank", "--endpoint", "--max-restarts", "--run-dir", "--profile-interval")
    for option in (*told, "--job-id", "--join-timeout", "NPROC", "MAX_RESTARTS", "Exit code", "143"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("--nprocs 2", "--nprocs: no such option; see --help"),
        ("--nproc", "--nproc: needs a value"),
        ("--nproc 0", "--nproc: 0 must be a whole number, 1 or more"),
        ("--max-restarts=-1", "--max-restarts: -1 must be a whole number, 0 or more"),
        ("--profile-interval soon", "--profile-interval: soon must be a number"),
        ("train", "train: expected an option or key=value"),
        ("resume=runs/a/checkpoints/step-000002", "resume=runs/a/checkpoints/step-000002: train.sh goes on with"),
        ("--nnodes 2", "--endpoint: must be given with --nnodes 2"),
        ("--nnodes 2 --endpoint a:1 --run-dir a", "--node-rank: must be given"),
        ("--nnodes 2 --endpoint a:1 --node-rank 2 --run-dir a", "--node-rank: 2 must be below --nnodes 2"),
        ("--nnodes 2 --endpoint a:1 --node-rank 0", "--run-dir: must be given with --nnodes 2"),
        ("--nnodes 2 --endpoint a:x --node-rank 0 --run-dir a", "--endpoint: a:x must be HOST:PORT"),
        ("--nproc 2 train.max_stepz=1", "train.max_stepz: no such key; did you mean train.max_steps?"),
        ("--nproc 2 pipeline.num_target_ranks=2", "pipeline.num_target_ranks: 2 must be between 1 and 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_starts(command: str, expected: str) -> None:
    assert refused(*command.split()).startswith(expected)


def test_an_endpoint_that_is_taken_is_named_on_machine_0() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        meeting = ["--nnodes", "2", "--node-rank", "0", "--endpoint", f"127.0.0.1:{port}", "--run-dir", "unused"]
        assert refused(*meeting).startswith(f"--endpoint: port {port} is in use by another program on machine 0")


def test_an_endpoint_that_nobody_opens_is_named_on_the_others() -> None:
    port = free_port()
    meeting = ["--nnodes", "2", "--node-rank", "1", "--endpoint", f"127.0.0.1:{port}", "--run-dir", "unused"]
    told = refused(*meeting, JOIN_TIMEOUT="1")
    assert told.startswith(f"--endpoint: machine 0 did not answer at 127.0.0.1 port {port} within 1 s")
