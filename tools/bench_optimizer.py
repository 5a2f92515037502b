"""Measures the optimizer's step: AdamW against Muon, and what it costs that either can be skipped on the device.

    python tools/bench_optimizer.py [--hidden-size 576] [--layers 3] [--features 5] [--repeats 9] [--device cpu]

The default is the drafter of conf/model/smollm2.yaml. All ways to step are timed in turn in every repeat, each on a
drafter of its own with the same weights and gradients. "plain" is torch's optimizer, which cannot be skipped.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_timing import timed

from dflash.config import LayerType
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.optimizer import DrafterOptimizer, FlatGradients
from dflash.drafter.shape import DrafterShape

LR = 1e-4


def make_shape(hidden_size: int, num_layers: int, num_features: int) -> DrafterShape:
    """A drafter with the proportions of SmolLM2's layers."""
    num_key_value_heads = max(1, hidden_size // 192)
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_attention_heads=3 * num_key_value_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        max_position_embeddings=8192,
        vocab_size=49152,
        block_size=8,
        mask_token_id=16,
        target_layer_ids=tuple(range(num_features)),
        num_target_layers=num_features + 1,
        layer_types=(LayerType.full_attention,) * num_layers,
    )


def make_drafter(shape: DrafterShape, device: torch.device) -> DFlashDrafter:
    """A drafter whose gradients are there, views of one buffer as in training."""
    drafter = DFlashDrafter(shape).initialize(0).to(device)
    flat = FlatGradients(drafter.parameters(), 0)
    flat.gradients.normal_(generator=torch.Generator(device).manual_seed(1))
    return drafter


def make_steps(shape: DrafterShape, device: torch.device) -> dict[str, Callable[[], None]]:
    """The ways to step, by name."""
    no_skip, skip = torch.zeros((), device=device), torch.ones((), device=device)
    steps: dict[str, Callable[[], None]] = {}
    for name in ("adamw", "muon"):
        optimizer = DrafterOptimizer(make_drafter(shape, device), name=name)
        steps[name] = lambda optimizer=optimizer: optimizer.step(LR, no_skip)
        steps[f"{name}, skipped"] = lambda optimizer=optimizer: optimizer.step(LR, skip)
    for name in ("adamw", "muon"):
        # The same groups, stepped as torch would.
        parts = DrafterOptimizer(make_drafter(shape, device), name=name).parts
        for part in parts:
            for group in part.param_groups:
                group["lr"] = LR
        steps[f"{name}, plain"] = lambda parts=parts: step_plainly(parts)
    return steps


def step_plainly(parts: tuple[torch.optim.Optimizer, ...]) -> None:
    for part in parts:
        part.step()


def measure(steps: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each repeat by way to step."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(-2, repeats):  # the first two make states and warm up
        for name, step in steps.items():
            taken_s = timed(step, device)
            if repeat >= 0:
                seconds[name].append(taken_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--features", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    shape = make_shape(arguments.hidden_size, arguments.layers, arguments.features)
    num_parameters = sum(parameter.numel() for parameter in DFlashDrafter(shape).parameters())
    seconds = measure(make_steps(shape, arguments.device), arguments.repeats, arguments.device)
    threads = f", {torch.get_num_threads()} threads" if arguments.device.type == "cpu" else ""
    print(f"{num_parameters / 1e6:.1f} M parameters on {arguments.device}{threads}, median of {arguments.repeats}")
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median_s in medians.items():
        # Ratios within a repeat, since a shared machine changes its speed from one repeat to the next.
        plain = seconds[f"{name.split(',')[0]}, plain"]
        to_adamw, to_plain = (
            statistics.median(own / other for own, other in zip(seconds[name], others, strict=True))
            for others in (seconds["adamw"], plain)
        )
        low, high = min(seconds[name]), max(seconds[name])
        print(
            f"{name:<16}{median_s * 1e3:9.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})"
            f"  {to_adamw:7.2f} x adamw  {to_plain:6.2f} x plain"
        )


if __name__ == "__main__":
    main()
