"""Whether a job survives one killed rank after another: `python tests/soak/restart.py`.

Runs launch/train.sh on 2 + 2 ranks, once under one agent and once under two, kills ranks at random moments and in the
middle of saves, prints what happened when, and exits with 1 unless both jobs end in the bits of an undisturbed run.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers_restart import Job, assert_same_result, started  # noqa: E402
from helpers_run import launch, make_rows, make_target, overrides  # noqa: E402

NUM_RANKS = 4
LEADER = 2  # the first drafter: it publishes checkpoints
MORE = {
    "pipeline__num_target_ranks": 2,
    "train__max_steps": 60,
    "train__eval_interval_steps": 8,
    "checkpoint__interval_steps": 2,
}


def wait_for_save(job: Job) -> None:
    """Returns while a checkpoint is being written."""
    folder = job.run_dir / "checkpoints"
    while not any(folder.glob(".partial-*")):
        assert all(agent.poll() is None for agent in job.agents), "the job ended before a save was seen"
        time.sleep(1e-3)


def wait_for_moment(job: Job, draw: random.Random) -> None:
    time.sleep(draw.uniform(0.0, 1.5))
    assert all(agent.poll() is None for agent in job.agents), "the job ended before the next kill"


def disturb(job: Job, kills: list[tuple[int, Callable[[], None]]]) -> None:
    """Kill a rank in each attempt but the last, once it has saved something of its own."""
    for rank, moment in kills:
        job.wait_for_step(job.newest_step() + 2)
        moment()
        job.kill(rank)
        since_s, before = time.monotonic(), job.newest_step()
        partial = [path.name for path in (job.run_dir / "checkpoints").glob(".partial-*")]
        job.wait_for_step(before + 2)
        took_s = time.monotonic() - since_s
        cut = f", cutting off {', '.join(partial)}" if partial else ""
        print(f"  rank {rank} killed after the checkpoint of step {before}{cut}; the next one {took_s:.1f} s later")


def run(folder: Path, arguments: list[str], undisturbed: Path, draw: random.Random, *, num_agents: int) -> None:
    """One job, killed three times."""
    run_dir = folder / f"agents-{num_agents}" / "run"
    run_dir.parent.mkdir()
    print(f"{num_agents} agent(s), {NUM_RANKS // num_agents} ranks each")
    options = ["--max-restarts", "4"]
    with started(run_dir, arguments, nproc=NUM_RANKS // num_agents, num_agents=num_agents, options=options) as job:
        at_random = [(draw.randrange(NUM_RANKS), lambda: wait_for_moment(job, draw)) for _ in range(2)]
        disturb(job, [*at_random, (LEADER, lambda: wait_for_save(job))])
        codes = job.finish()
        assert codes == [0] * num_agents, f"exit codes {codes}\n{job.console()}"
        print(f"  went on after steps {job.resumed_after()}")
    assert_same_result(run_dir, undisturbed)
    print("  same weights and metrics as the undisturbed run")


def main() -> None:
    sys.stdout.reconfigure(line_buffering=True)
    seed = random.SystemRandom().randrange(10_000)
    draw = random.Random(seed)
    print(f"seed {seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, rows = make_target(folder / "target"), make_rows(folder / "rows.jsonl", 120)
        undisturbed = folder / "undisturbed" / "run"
        arguments = overrides(target, rows, undisturbed, **MORE)[1:]
        launch(NUM_RANKS, [f"run_dir={undisturbed}", *arguments])
        try:
            for num_agents in (1, 2):
                run(folder, arguments, undisturbed, draw, num_agents=num_agents)
        except AssertionError as error:
            print(f"failed: {error}")
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
