"""Hold the verdict's predictions against reality: predict 1+2 and 2+1 from a run with 1+1, run them, and compare.

python tools/check_verdict.py OUTPUT_DIR [--case NAME] [--seconds N] [--json FILE]

Small models on CPU, made deliberately unequal. In the cases "computed ..." all ranks compute, so that three of them may
want more cores than there are. In the others ranks mostly sleep, as long as a device of their own would compute: the
target `forward_ms` per 1,000 tokens, the drafter `train_ms` per 1,000 tokens and `step_ms` per step; all else
(transfers, queue, credits, gradient sums, the work that is left on the core) is the real program. What other programs
take of the cores meanwhile is in the figures: see the waits for a core that tools/verdict.py tells of each run folder.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verdict import Split, judge
from verdict_run import read_run

ROOT = Path(__file__).resolve().parents[1]
AS_RANK = "--as-rank"
MICRO_BATCHES_PER_STEP = 6
VOCAB_SIZE = 96
INTERVAL_S = 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """How long the devices would take, or where ranks compute, about how long that takes."""

    forward_ms: float  # per 1,000 tokens
    train_ms: float  # per 1,000 tokens
    step_ms: float
    sleeps: bool = True
    hidden_size: int = 32
    target_layers: int = 6
    drafter_layers: int = 2
    tokens_per_micro_batch: int = 96


CASES = {
    "computed, slow drafter": Case(
        *(150, 500, 40), sleeps=False, hidden_size=256, target_layers=6, drafter_layers=4, tokens_per_micro_batch=384
    ),
    "computed, slow target": Case(
        *(500, 150, 20), sleeps=False, hidden_size=256, target_layers=24, drafter_layers=1, tokens_per_micro_batch=384
    ),
    "slow drafter": Case(forward_ms=600, train_ms=1800, step_ms=200),
    "slow target": Case(forward_ms=1800, train_ms=600, step_ms=200),
    "alike": Case(forward_ms=1200, train_ms=1000, step_ms=200),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prediction and what came of it, in tokens per second; `error` is relative to the latter."""

    case: str
    split: str
    predicted: float
    measured: float
    is_upper_bound: bool
    error: float


def slow_down(case: Case) -> None:
    """Make this process's target and drafter sleep as long as their devices would compute."""
    from dflash.drafter.model import DFlashDrafter
    from dflash.roles.trainer import DrafterTrainer
    from dflash.target.capture import FrozenTarget

    def after(owner: type, name: str, seconds: Callable[..., float]) -> None:
        method = getattr(owner, name)

        def slowed(self: Any, *arguments: Any, **named: Any) -> Any:
            result = method(self, *arguments, **named)
            time.sleep(seconds(*arguments))
            return result

        setattr(owner, name, slowed)

    after(FrozenTarget, "run", lambda staged: staged.token_slots_T.numel() / 1e6 * case.forward_ms)
    after(DFlashDrafter, "run_layers", lambda context_TH, *rest: len(context_TH) / 1e6 * case.train_ms)
    after(DrafterTrainer, "step", lambda step: case.step_ms / 1e3)


def play_rank(case: Case, overrides: list[str]) -> None:
    """Be one rank of the training command, slowed down."""
    from dflash import train

    if case.sleeps:
        slow_down(case)
    sys.argv = ["dflash.train", *overrides]
    train.cli()


def make_inputs(folder: Path, case: Case) -> None:
    """A small random target, and rows of counting sequences."""
    import numpy as np
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    sizes = {"hidden_size": case.hidden_size, "intermediate_size": 2 * case.hidden_size, "num_attention_heads": 4}
    more = {"num_hidden_layers": case.target_layers, "num_key_value_heads": 2, "head_dim": case.hidden_size // 4}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, max_position_embeddings=512, tie_word_embeddings=False, **sizes, **more)
    Qwen3ForCausalLM(config).save_pretrained(folder / "target")
    generator = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(400):
            start, length = int(generator.integers(1, 7)), int(generator.integers(20, 61))
            ids = [(start + place) % (VOCAB_SIZE - 2) for place in range(length)]
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")


def run_split(folder: Path, case: Case, num_targets: int, num_drafters: int, seconds: float) -> Path:
    """Train with one split for about so many seconds; returns the run folder."""
    run_dir = folder / f"{num_targets}+{num_drafters}"
    if (run_dir / "done").exists():
        return run_dir
    # What the slower group takes for a step, to know how many steps fill the time.
    step_tokens = MICRO_BATCHES_PER_STEP * case.tokens_per_micro_batch * 0.8
    target_s = step_tokens / 1e6 * case.forward_ms / num_targets
    drafter_s = step_tokens / 1e6 * case.train_ms / num_drafters + case.step_ms / 1e3
    keys = {
        "run_dir": run_dir,
        "device": "cpu",
        "model.target.path": folder / "target",
        "model.drafter.num_layers": case.drafter_layers,
        "model.drafter.target_layer_ids": f"[1,2,{case.target_layers - 3}]",
        "model.drafter.block_size": 8,
        "model.drafter.mask_token_id": VOCAB_SIZE - 1,
        "data.train_path": folder / "rows.jsonl",
        "data.cache_dir": folder / "corpora",
        "data.max_length": 64,
        "data.tokens_per_micro_batch": case.tokens_per_micro_batch,
        "train.micro_batches_per_step": MICRO_BATCHES_PER_STEP,
        "train.num_epochs": "null",
        "train.max_steps": round(seconds / max(target_s, drafter_s)) + 1,
        "train.eval_interval_steps": "null",
        "checkpoint.interval_steps": "null",
        "pipeline.num_target_ranks": num_targets,
        "pipeline.queue.depth": 6,
        "pipeline.queue.min_ready": 2,
        "profiling.interval_s": INTERVAL_S,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(num_targets + num_drafters), __file__, AS_RANK, json.dumps(asdict(case))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    overrides = [f"{key}={value}" for key, value in keys.items()]
    done = subprocess.run([*command, *overrides], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: the run of {run_dir.name} failed\n{done.stderr[-3000:]}")
    (run_dir / "done").touch()
    return run_dir


def compare(folder: Path, name: str, seconds: float) -> list[Comparison]:
    """Predict from 1+1, with each of its ranks given to one more of either kind, and measure."""
    case, folder = CASES[name], folder / name.replace(", ", "-").replace(" ", "-")
    if not (folder / "rows.jsonl").exists():
        folder.mkdir(exist_ok=True)
        make_inputs(folder, case)
    base = judge(read_run(run_split(folder, case, 1, 1, seconds)))
    found = [Comparison(name, "1+1", base.tokens_per_s, base.tokens_per_s, False, 0.0)]
    predictions = {(s.num_targets, s.num_drafters): s for s in base.one_more}
    for num_targets, num_drafters in ((1, 2), (2, 1)):
        split: Split = predictions[num_targets, num_drafters]
        measured = judge(read_run(run_split(folder, case, num_targets, num_drafters, seconds)))
        error = split.tokens_per_s / measured.tokens_per_s - 1
        label = f"{num_targets}+{num_drafters}"
        found.append(Comparison(name, label, split.tokens_per_s, measured.tokens_per_s, split.is_upper_bound, error))
    return found


def main() -> None:
    if sys.argv[1:2] == [AS_RANK]:
        play_rank(Case(**json.loads(sys.argv[2])), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="what is there already is not run again")
    parser.add_argument("--case", choices=CASES, help="default: all of them")
    parser.add_argument("--seconds", type=float, default=45.0, help="length of each run, about (default: 45)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    print("| case | split | predicted tokens/s | measured | error |\n|---|---|---|---|---|", flush=True)
    comparisons: list[Comparison] = []
    for name in [arguments.case] if arguments.case else CASES:
        for c in compare(folder, name, arguments.seconds):
            comparisons.append(c)
            bound = "at most " if c.is_upper_bound else ""
            error = "(measured from)" if c.split == "1+1" else f"{c.error:+.1%}"
            print(f"| {c.case} | {c.split} | {bound}{c.predicted:.0f} | {c.measured:.0f} | {error} |", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(c) for c in comparisons], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
