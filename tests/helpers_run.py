"""Small targets and data made on the spot, and the real training command run on them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from transformers import Qwen3Config, Qwen3ForCausalLM

import dflash.train
from dflash.config import config_folder, register_schema, to_train_config
from dflash.groups import Launch

ROOT = Path(__file__).parent.parent
VOCAB_SIZE = 96
MASK_TOKEN = VOCAB_SIZE - 1


def make_target(folder: Path, num_layers: int = 6, hidden_size: int = 32, intermediate_size: int = 64) -> Path:
    """A random Qwen3 without a tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(path: Path, num_rows: int, seed: int = 0, longest: int = 60) -> Path:
    """Rows of input_ids: counting sequences, which a drafter can learn, of odd lengths, with holes in their masks."""
    generator = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            length = int(generator.integers(3, longest + 1))
            start, stride = (int(number) for number in generator.integers(1, 7, size=2))
            ids = [(start + stride * i) % (VOCAB_SIZE - 2) for i in range(length)]
            prompt = int(generator.integers(0, max(1, length // 2)))
            mask = [int(i >= prompt and (length < 20 or i % 17 != 0)) for i in range(length)]
            mask[-2:] = [1, 1]
            file.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def overrides(target: Path, data: Path, run_dir: Path, **more: Any) -> list[str]:
    """The command line of a small run; `more` has `__` for dots."""
    keys = {
        "run_dir": run_dir,
        "device": "cpu",
        "model.target.path": target,
        "model.drafter.num_layers": 2,
        "model.drafter.target_layer_ids": "[1,2,3]",
        "model.drafter.block_size": 8,
        "model.drafter.mask_token_id": MASK_TOKEN,
        "data.train_path": data,
        "data.cache_dir": run_dir.parent / "corpora",
        "data.max_length": 64,
        "data.tokens_per_micro_batch": 96,
        "data.eval_fraction": 0.1,
        "train.micro_batches_per_step": 6,
        "train.log_interval_steps": 1,
        "train.num_epochs": "null",
        "train.max_steps": 20,
        "optim.lr": 5e-3,
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [f"{key}={value}" for key, value in keys.items()]


def launch(num_ranks: int, arguments: list[str], check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the training command under torchrun, or alone for one rank."""
    command = [sys.executable, "-m", "dflash.train", *arguments]
    if num_ranks > 1:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks), "-m"]
    else:
        command.append("pipeline=colocated")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def run_here(arguments: list[str]) -> float:
    """The run, both roles, in this very process; returns the seconds that `train` took."""
    register_schema()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        composed = compose("config", overrides=[*arguments, "pipeline=colocated"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    config = to_train_config(composed)
    started_s = time.perf_counter()
    try:
        dflash.train.train(config, Launch(0, 0, 1))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return time.perf_counter() - started_s


def metrics(run_dir: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Logged records of one kind, without what depends on the clock."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in records if record["kind"] == kind]


def share(run_dir: Path, rank: str, stage: str) -> float:
    """Share of a stage in the whole run of a rank, from the last line of its log; 0 when it never occurred."""
    last = (run_dir / "logs" / f"{rank}.log").read_text().splitlines()[-1]
    assert "whole run" in last
    found = re.search(rf"[ ,]{stage} ([0-9.]+)%", last)
    return float(found.group(1)) / 100 if found else 0.0


def scalars(run_dir: Path, rank: str) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard scalars of a rank, read back from its event files: tag to (step, value) pairs."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard" / rank), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
