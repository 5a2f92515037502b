"""The demo's real target and data through the real commands: a few steps, then speculative decoding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_run import ROOT, launch, metrics

CACHE = Path(os.environ.get("DFLASH_CACHE", Path.home() / ".cache" / "dflash"))
TARGET = CACHE / "smollm2-135m-instruct"

pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason="tools/demo_target.py has not made the demo target")


def run_module(*arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_few_steps_on_real_input_and_a_lossless_decode(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    small = ["train.max_steps=8", "train.eval_interval_steps=4", "data.eval_max_documents=2", "optim.lr=3e-4"]
    paths = [f"run_dir={run_dir}", f"model.target.path={TARGET}", f"data.cache_dir={tmp_path / 'corpora'}"]
    done = launch(1, ["experiment=quickstart", *paths, *small])
    assert "1,500 documents" in done.stdout
    # The drafter starts from the target's last layers: far better than an even guess among 49,152 tokens (10.8 nats).
    early, late = metrics(run_dir, "eval")
    assert late["loss"] < early["loss"] < 10.8

    prompts, result = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Name three colours."}]}) + "\n")
    decode = [f"drafter={run_dir}", f"target={TARGET}", f"prompts={prompts}", "max_new_tokens=12", f"output={result}"]
    run_module("dflash.evaluate", *decode)
    (prompt,) = json.loads(result.read_text())["prompts"]
    assert prompt["lossless"] and prompt["output_ids"] == prompt["greedy_ids"]
    assert sum(prompt["acceptance_lengths"]) == len(prompt["output_ids"]) - 1

    run_module("dflash.export", f"checkpoint={run_dir}", f"output={tmp_path / 'served'}")
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 16, "target_layer_ids": [1, 8, 14, 20, 27]}
