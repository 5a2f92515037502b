"""Measures how long the training waits for a checkpoint, against a copy to host memory and against a whole save.

    python tools/bench_checkpoint.py [--hidden-size 1024] [--layers 5] [--repeats 5] [--device cpu] [--folder DIR]

Each repeat times, one after the other on the same state: a copy of every tensor into host memory that is there
already, the same into new memory, `CheckpointSaver.start`, and all of the save until it is published.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_timing import timed
from torch import Tensor

from dflash.checkpoints.loading import training_state
from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.saving import CheckpointSaver
from dflash.config import LayerType
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.optimizer import DrafterOptimizer
from dflash.drafter.shape import DrafterShape


def make_shape(hidden_size: int, num_layers: int) -> DrafterShape:
    """A drafter with the proportions of a Qwen3 target's."""
    return DrafterShape(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_attention_heads=max(1, hidden_size // 128) * 2,
        num_key_value_heads=max(1, hidden_size // 128),
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=4096,
        vocab_size=1024,
        block_size=16,
        mask_token_id=1023,
        target_layer_ids=tuple(range(5)),
        num_target_layers=36,
        layer_types=(LayerType.full_attention,) * num_layers,
    )


def tensors_of(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def measure(
    shape: DrafterShape, repeats: int, device: torch.device, run_dir: Path
) -> tuple[int, dict[str, list[float]]]:
    """Bytes of a state, and the seconds of each repeat by what was done."""
    drafter = DFlashDrafter(shape).initialize(0).to(device)
    optimizer = DrafterOptimizer(drafter)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1e-3, torch.zeros((), device=device))
    metrics = torch.zeros(34, dtype=torch.float64, device=device)
    tensors = tensors_of(training_state(drafter, optimizer.adamw, metrics))
    is_cuda = device.type == "cuda"
    host = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda) for tensor in tensors]
    saver = CheckpointSaver(run_dir, None, keep=1)

    def copy() -> None:
        for buffer, tensor in zip(host, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=is_cuda)

    def copy_to_new() -> None:
        for tensor in tensors:
            new.append(tensor.to("cpu", copy=True))

    def start(step: int) -> None:
        meta = CheckpointMeta(step, False, step, step, "data", None, shape, {})
        saver.start(meta, training_state(drafter, optimizer.adamw, metrics))

    seconds: dict[str, list[float]] = {name: [] for name in ("copy", "copy to new memory", "start", "whole save")}
    for repeat in range(-1, repeats):  # the first only gets memory
        new: list[Tensor] = []
        copy_s, new_s = timed(copy, device), timed(copy_to_new, device)
        start_s = timed(lambda step=repeat + 2: start(step), device)
        save_s = start_s + timed(saver.finish, device)
        if repeat >= 0:
            for name, value in zip(seconds, (copy_s, new_s, start_s, save_s), strict=True):
                seconds[name].append(value)
    return sum(tensor.nbytes for tensor in tensors), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    arguments = parser.parse_args()
    shape = make_shape(arguments.hidden_size, arguments.layers)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        num_bytes, seconds = measure(shape, arguments.repeats, arguments.device, Path(folder))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"state of {num_bytes / 1e6:.0f} MB on {arguments.device}, median of {arguments.repeats}")
    for name, median_s in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(
            f"{name:<20}{median_s * 1e3:9.1f} ms  ({low * 1e3:.1f} to {high * 1e3:.1f})"
            f"  {median_s / medians['copy']:8.2f} x copy  {median_s / medians['whole save']:7.3f} x whole save"
        )


if __name__ == "__main__":
    main()
