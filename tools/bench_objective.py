"""Measures the frozen head's losses: what each kind costs next to plain cross entropy, forward and backward.

    python tools/bench_objective.py [--slots 256] [--hidden-size 576] [--vocabularies 49152 151936] [--repeats 7]
                                    [--device cpu] [--against FILE]

All kinds take turns within each repeat, so that a machine's moods meet them alike. `--against` names another version of
dflash/drafter/head.py, whose plain cross entropy takes turns with the others, under the name "ce, other version".
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from dflash.batch import TargetVocabulary
from dflash.drafter.head import Teacher, frozen_head_cross_entropy, frozen_head_losses, teacher_tokens
from dflash.drafter.terms import Terms

KINDS = {
    "ce + cap": Terms(1.0, cap=0.1),
    "kl": Terms(0.0, kl=1.0),
    "kl, temperature 2": Terms(0.0, kl=1.0, kl_temperature=2.0),
    "tv": Terms(0.0, tv=1.0),
    "0.1 ce + 0.9 tv": Terms(0.1, tv=0.9),
    "ce + kl + tv + cap": Terms(1.0, 1.0, 1.0, 0.1),
}


def cases(
    num_slots: int, hidden_size: int, vocab_size: int, device: torch.device, other: Path | None
) -> dict[str, Callable[[], Tensor]]:
    """What to time by name: each gives the losses [M] to go back from."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    weight = randn(vocab_size, hidden_size).mul_(hidden_size**-0.5)
    vocabulary = TargetVocabulary(weight, weight)
    hidden_MH = (2 * randn(num_slots, hidden_size)).requires_grad_()
    labels_M = torch.randint(0, vocab_size, (num_slots,), generator=generator, device=device)
    teacher = Teacher(2 * randn(num_slots, hidden_size), torch.arange(num_slots, device=device))
    found = {"ce": lambda: frozen_head_cross_entropy(hidden_MH, labels_M, vocabulary)[0]}
    if other is not None:
        spec = importlib.util.spec_from_file_location("other_head", other)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found["ce, other version"] = lambda: module.frozen_head_cross_entropy(hidden_MH, labels_M, vocabulary)[0]
    found["ce, target's labels"] = lambda: frozen_head_cross_entropy(
        hidden_MH, teacher_tokens(teacher, vocabulary), vocabulary
    )[0]
    for name, terms in KINDS.items():
        needed = teacher if terms.needs_teacher else None
        found[name] = lambda terms=terms, needed=needed: (
            frozen_head_losses(hidden_MH, labels_M, vocabulary, terms, needed).mixture_M
        )

    def separately() -> Tensor:
        losses = frozen_head_losses(hidden_MH, labels_M, vocabulary, KINDS["ce + cap"], None, separate_ce=True)
        return losses.mixture_M + losses.ce_M

    found["d-pace + cap"] = separately
    return found


def timed(losses: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of one forward and backward pass; on CPU the processor's, over all threads."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # What this process used: on a CPU that others use too, the wall clock would measure them.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    started_s = clock()
    losses().sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--hidden-size", type=int, default=576)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--against", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    for vocab_size in arguments.vocabularies:
        kinds = cases(arguments.slots, arguments.hidden_size, vocab_size, arguments.device, arguments.against)
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for repeat in range(-1, arguments.repeats):  # the first only gets memory
            for name, losses in kinds.items():
                elapsed_s = timed(losses, arguments.device)
                if repeat >= 0:
                    seconds[name].append(elapsed_s)
        print(f"{arguments.slots} slots of {arguments.hidden_size}, V = {vocab_size}, median of {arguments.repeats}")
        for name, values in seconds.items():
            ratios = [value / base for value, base in zip(values, seconds["ce"], strict=True)]
            print(
                f"{name:<22}{statistics.median(values) * 1e3:9.1f} ms  ({min(values) * 1e3:.1f} to "
                f"{max(values) * 1e3:.1f})  {statistics.median(ratios):6.2f} x ce"
            )


if __name__ == "__main__":
    main()
