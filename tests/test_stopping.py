"""Stop signals to ranks of the real training command, wherever they are, and what a resumed run makes of it.

The whole matrix of signals, moments and victims is tests/soak/stop_matrix.py.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers_faults import SERVER, Setting, launch_direct, launch_torchrun
from helpers_stops import OPTIONS, TOPOLOGY, differences, stop_complaints

from dflash.checkpoints.finding import list_checkpoints


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    yield Setting.make(tmp_path_factory.mktemp("stopping"))
    SERVER.close()


@pytest.fixture(scope="module")
def undisturbed(setting: Setting) -> Path:
    run_dir = setting.new_run()
    launched = launch_direct(TOPOLOGY, setting.arguments(TOPOLOGY, run_dir, **OPTIONS))
    assert [rank.exit_code for rank in launched.ranks] == [0] * 4, launched
    return run_dir


@pytest.mark.parametrize(
    ("number", "fault", "step"),
    [
        (signal.SIGTERM, "term drafter-2 forward 20", 6),  # the second of its three micro-batches of step 7
        (signal.SIGINT, "int target-1 forward 9", None),
        (signal.SIGTERM, "term drafter-3 idle 5; sleep=0.1 target-1 forward 1+", None),  # starved
        (signal.SIGTERM, "term target-0 idle 5; sleep=0.1 drafter-3 forward 1+", None),  # blocked
        (signal.SIGHUP, "hup drafter-3 allreduce 4", None),
        (signal.SIGTERM, "term drafter-2 evaluate 2", 4),  # whose evaluation is still owed
        (signal.SIGINT, "int drafter-2 save 1", None),
    ],
    ids=lambda value: value.split(";")[0].replace(" ", "_") if isinstance(value, str) else "",
)
def test_a_stop_signal_loses_no_finished_step(
    number: int, fault: str, step: int | None, setting: Setting, undisturbed: Path
) -> None:
    run_dir = setting.new_run()
    arguments = setting.arguments(TOPOLOGY, run_dir, **OPTIONS)
    stopped = launch_direct(TOPOLOGY, arguments, fault, limit_s=60.0)
    assert not stop_complaints(stopped, run_dir, 128 + number)
    last = list_checkpoints(run_dir)[-1]
    assert step is None or last.name == f"step-{step:06d}"
    assert_goes_on_as_if_never_stopped(arguments, run_dir, undisturbed)


def test_torchrun_passes_a_stop_signal_on(setting: Setting, undisturbed: Path) -> None:
    run_dir = setting.new_run()
    arguments = setting.arguments(TOPOLOGY, run_dir, **OPTIONS)
    stopped = launch_torchrun(
        TOPOLOGY, arguments, "note drafter-3 allreduce 4", on_note=lambda pid: os.kill(pid, signal.SIGTERM)
    )
    assert stopped.torchrun_code != 0 and not stopped.left_over
    assert not [rank.told for rank in stopped.ranks if rank.told]
    assert list_checkpoints(run_dir)
    assert_goes_on_as_if_never_stopped(arguments, run_dir, undisturbed)


def assert_goes_on_as_if_never_stopped(arguments: list[str], run_dir: Path, undisturbed: Path) -> None:
    resumed = launch_direct(TOPOLOGY, [*arguments, "resume=auto"])
    assert [rank.exit_code for rank in resumed.ranks] == [0] * 4, resumed
    assert "resuming after step" in resumed.ranks[0].stdout
    assert not differences(run_dir, undisturbed)
