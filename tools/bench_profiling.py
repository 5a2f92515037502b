"""Measures what profiling costs: a stage by itself, and steps of a real run, with it and without it in turns.

    python tools/bench_profiling.py [--steps 20] [--hidden-size 128] [--layers 6] [--tokens 256]
                                     [--device cpu] [--interval 60]

Both roles train in this process on a random target and random rows, made on the spot. Steps take turns between
profiling=summary and profiling=off, so that a machine's moods meet both alike. Where turns differ by more than what
profiling could cost, the first figure is the sharper one: the cost of a step's stages, each measured by itself many
times over, against the step.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.config import TrainConfig, config_folder, register_schema, to_train_config
from dflash.groups import Launch, choose_topology
from dflash.profiling.stats import ProfileStats
from dflash.roles.agreement import Agreement
from dflash.roles.colocated import LocalHiddenStates
from dflash.roles.console import Console
from dflash.roles.drafter import train_step
from dflash.roles.reporting import open_report
from dflash.roles.setup import Run, choose_device, prepare
from dflash.roles.stopping import StopRequest
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer

_VOCAB_SIZE = 1024
_NUM_STAGES = 50_000
_STAGES_PER_CUT = 5_000


def configure(folder: Path, arguments: argparse.Namespace) -> TrainConfig:
    """A run on a random target and random rows in `folder`."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=_VOCAB_SIZE,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden_size // 4,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder / "target")
    generator = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for length in generator.integers(arguments.tokens // 8, arguments.tokens // 2, 400).tolist():
            ids = generator.integers(0, _VOCAB_SIZE - 1, length).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")
    register_schema()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose(
            "config",
            [
                "pipeline=colocated",
                f"run_dir={folder / 'run'}",
                f"device={arguments.device}",
                f"model.target.path={folder / 'target'}",
                "model.drafter.num_layers=2",
                "model.drafter.target_layer_ids=[1,2]",
                f"model.drafter.mask_token_id={_VOCAB_SIZE - 1}",
                f"data.train_path={folder / 'rows.jsonl'}",
                f"data.cache_dir={folder / 'corpora'}",
                f"data.max_length={arguments.tokens}",
                f"data.tokens_per_micro_batch={arguments.tokens}",
                "train.num_epochs=null",
                "train.max_steps=100000",
                "train.log_interval_steps=100000",
                f"profiling.interval_s={arguments.interval}",
            ],
        )
    return to_train_config(composed)


def stage_cost_s(stats: ProfileStats) -> float:
    """Seconds that one stage costs, everything included that becomes of it before an interval is written."""
    started = time.perf_counter()
    for number in range(_NUM_STAGES):
        with stats.stage("forward"):
            pass
        if number % _STAGES_PER_CUT == 0:
            stats.cut()
            stats.take_intervals()
    return (time.perf_counter() - started) / _NUM_STAGES


def timed_steps(run: Run, num_steps: int) -> tuple[list[float], list[float], int]:
    """Seconds of steps with profiling and without, and the number of stages in a step."""
    producer = Producer.load(run, num_buffers=1)
    reports = [open_report(run, ProfileStats(run.device, is_on=is_on)) for is_on in (True, False)]
    trainer = DrafterTrainer.load(run, None, reports[0].stats)
    seconds: list[list[float]] = [[], []]
    # What this process used: on a CPU that others use too, the wall clock would measure them.
    clock = time.perf_counter if run.device.type == "cuda" else time.process_time
    with ExitStack() as stack:
        sides = [
            (
                replace(trainer, stats=report.stats),
                LocalHiddenStates(run, producer, report.stats, StopRequest()),
                stack.enter_context(Console(run, False, report)),
            )
            for report in reports
        ]
        for step in range(1, 2 * num_steps + 3):
            # Each side goes first as often as the other.
            side = (step + step // 2) % 2
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
            started = clock()
            train_step(run, *sides[side], step)
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)
            if step > 2:  # the first ones get memory, and compile
                seconds[side].append(clock() - started)
    for report in reports:
        report.close()
    totals = reports[0].stats.run_totals()
    num_stages = sum(stage.count for path, stage in totals.items() if path != "other")
    return seconds[0], seconds[1], round(num_stages / totals["optimizer"].count)


def interval_cost_s(run: Run) -> float:
    """Seconds that the end of an interval costs: charts, log, records, gauges."""
    at_each_poll = replace(run.config.profiling, interval_s=0.0)
    run = replace(run, config=replace(run.config, profiling=at_each_poll))
    report, seconds = open_report(run, ProfileStats(run.device)), []
    for _ in range(20):
        with report.stats.stage("forward"):
            pass
        started = time.perf_counter()
        report.poll()
        seconds.append(time.perf_counter() - started)
    report.close()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each side")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--interval", type=float, default=60.0, metavar="SECONDS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), arguments)
        topology = choose_topology(1, colocated=True, num_target_ranks=None)
        device = choose_device(config.device, 0)
        run = prepare(config, topology, Launch(0, 0, 1), device, Agreement(None, 0))
        with_it, without, num_stages = timed_steps(run, arguments.steps)
        per_interval_s = interval_cost_s(run)
        on_s, off_s = stage_cost_s(ProfileStats(device)), stage_cost_s(ProfileStats(device, is_on=False))
    step_s = statistics.median(without)
    cost_s = num_stages * on_s + per_interval_s * step_s / arguments.interval
    ratios = [one / other for one, other in zip(with_it, without, strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    print(f"a stage costs {on_s * 1e6:.2f} us, {off_s * 1e6:.2f} us when profiling is off")
    print(f"the end of an interval costs {per_interval_s * 1e3:.1f} ms, every {arguments.interval:g} s")
    print(f"a step of {step_s * 1e3:.1f} ms has {num_stages} stages: profiling is {cost_s / step_s:.3%} of it")
    print(f"when off: {num_stages * off_s / step_s:.4%}")
    print(
        f"steps in turns, with and without: {statistics.median(with_it) * 1e3:.1f} and {step_s * 1e3:.1f} ms, "
        f"ratio {quarters[1]:.4f} ({quarters[0]:.4f} to {quarters[2]:.4f}, quartiles of {len(ratios)})"
    )


if __name__ == "__main__":
    main()
