"""Measure a drafter by speculative decoding: how many tokens each verification of the target gains.

    python -m dflash.evaluate drafter=DIR target=DIR_OR_NAME prompts=FILE.jsonl max_new_tokens=N output=FILE.json

drafter is a checkpoint, a run folder (its newest checkpoint) or an export. Each line of the prompts file is an object
with messages, prompt or input_ids. Decoding is greedy, so its output must equal the target's own: `lossless`.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import MISSING
from tqdm import tqdm
from transformers import PreTrainedModel

from dflash.batch import TargetShape, TargetVocabulary
from dflash.checkpoints.loading import load_drafter
from dflash.cli import parse_cli, run_cli
from dflash.config import Device, Dtype
from dflash.data.prompts import Prompt, read_prompts
from dflash.decoding import SpeculativeResult, check_room, greedy_decode, speculative_decode
from dflash.drafter.model import DFlashDrafter
from dflash.drafter.shape import DrafterShape
from dflash.roles.setup import choose_device, resolve_dtype
from dflash.target.loading import load_causal_lm, load_tokenizer, stop_token_ids
from dflash.target.shape import read_target_shape
from dflash.target.vocabulary import check_vocabulary, vocabulary_of

T = TypeVar("T")
_NUM_WARM_UP_BLOCKS = 3


@dataclass(slots=True)
class EvaluateConfig:
    drafter: str = MISSING  # a checkpoint, a run folder or an export
    target: str = MISSING  # a hub name, a folder or a GGUF file
    prompts: str = MISSING
    output: str = MISSING
    max_new_tokens: int = 256
    limit: int | None = None  # null: all prompts
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt decoded both ways, with the seconds each way took."""

    input_ids: list[int]
    speculative: SpeculativeResult
    greedy_ids: list[int]
    speculative_s: float
    greedy_s: float

    @property
    def tau(self) -> float | None:
        """Mean accept length; None where the first token was the last one too, so that nothing was verified."""
        lengths = self.speculative.acceptance_lengths
        return statistics.fmean(lengths) if lengths else None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter, ready to decode on one device."""

    target: PreTrainedModel
    drafter: DFlashDrafter
    vocabulary: TargetVocabulary
    stop_ids: Collection[int]

    def decode(self, prompt: Prompt, max_new_tokens: int) -> PromptResult:
        limits = {"max_new_tokens": max_new_tokens, "stop_ids": self.stop_ids}
        speculative, speculative_s = self._timed(
            lambda: speculative_decode(self.target, self.drafter, self.vocabulary, prompt.input_ids, **limits)
        )
        greedy_ids, greedy_s = self._timed(lambda: greedy_decode(self.target, prompt.input_ids, **limits))
        return PromptResult(prompt.input_ids, speculative, greedy_ids, speculative_s, greedy_s)

    def _timed(self, decode: Callable[[], T]) -> tuple[T, float]:
        self._synchronize()
        start_s = time.perf_counter()
        result = decode()
        self._synchronize()
        return result, time.perf_counter() - start_s

    def _synchronize(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def evaluate(config: EvaluateConfig) -> dict[str, Any]:
    """Decode all prompts both ways, write the report to `config.output` and return it; raises ValueError."""
    output = Path(config.output).expanduser()
    _check(config, output)
    drafter = load_drafter(Path(config.drafter).expanduser())
    target_shape = read_target_shape(config.target)
    check_fits(drafter.shape, target_shape, config)
    tokenizer = load_tokenizer(config.target)
    prompts = read_prompts(Path(config.prompts).expanduser(), tokenizer, target_shape.vocab_size, config.limit)
    for prompt in prompts:
        try:
            check_room(target_shape.max_position_embeddings, len(prompt.input_ids), config.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{prompt.place}: {error}") from error

    device = choose_device(config.device, local_rank=0)
    dtype = resolve_dtype(config.dtype, device)
    target = load_causal_lm(config.target, dtype, device)
    vocabulary = vocabulary_of(target)
    check_vocabulary(target, vocabulary)
    drafter = drafter.to(device=device, dtype=dtype).requires_grad_(False).eval()
    pair = Pair(target, drafter, vocabulary, frozenset(stop_token_ids(target, tokenizer)))

    # The first forwards of each way allocate, choose kernels and fill caches of the libraries: no speed of either.
    pair.decode(prompts[0], min(config.max_new_tokens, _NUM_WARM_UP_BLOCKS * drafter.shape.block_size))
    results = [pair.decode(prompt, config.max_new_tokens) for prompt in tqdm(prompts, desc="evaluate", unit="prompt")]
    run = {
        "drafter": config.drafter,
        "target": config.target,
        "prompts": config.prompts,
        "max_new_tokens": config.max_new_tokens,
        "block_size": drafter.shape.block_size,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
    }
    report = {"run": run, **summarize(results, drafter.shape.block_size)}
    write_report(report, output)
    print(describe(report, output))
    return report


def check_fits(drafter: DrafterShape, target: TargetShape, config: EvaluateConfig) -> None:
    """Raise ValueError unless the drafter reads what this target gives and speaks its vocabulary."""
    problems = []
    if drafter.hidden_size != target.hidden_size:
        problems.append(f"its hidden size is {drafter.hidden_size}, the target's {target.hidden_size}")
    if drafter.num_target_layers != target.num_layers:
        problems.append(f"it reads a target of {drafter.num_target_layers} layers, this one has {target.num_layers}")
    if drafter.mask_token_id >= target.vocab_size:
        problems.append(f"its mask token {drafter.mask_token_id} is outside the vocabulary of {target.vocab_size}")
    if problems:
        raise ValueError(f"drafter {config.drafter} does not fit target {config.target}: {'; '.join(problems)}")


def summarize(results: list[PromptResult], block_size: int) -> dict[str, Any]:
    """Figures over all prompts, then what each prompt became; what no verification tells is None.

    `accept_rate_per_slot[k]` is the share of verifications in which slot k was verified, right and its token kept;
    slot 0 is the anchor, so it is 1.
    """
    lengths = [length for result in results for length in result.speculative.acceptance_lengths]
    accepted = [count for result in results for count in result.speculative.accepted]
    taus = [result.tau for result in results if result.tau is not None]
    rates = [sum(count >= k for count in accepted) / len(accepted) if accepted else None for k in range(block_size)]
    num_tokens = {
        "speculative": sum(len(result.speculative.output_ids) for result in results),
        "greedy": sum(len(result.greedy_ids) for result in results),
    }
    return {
        "tau_mean_of_prompts": statistics.fmean(taus) if taus else None,
        "tau_pooled": statistics.fmean(lengths) if lengths else None,
        "accept_rate_per_slot": rates,
        "tokens_per_second": {
            "speculative": num_tokens["speculative"] / sum(result.speculative_s for result in results),
            "greedy": num_tokens["greedy"] / sum(result.greedy_s for result in results),
        },
        "num_prompts": len(results),
        "num_lossless": sum(result.speculative.output_ids == result.greedy_ids for result in results),
        "prompts": [
            {
                "input_ids": result.input_ids,
                "greedy_ids": result.greedy_ids,
                "lossless": result.speculative.output_ids == result.greedy_ids,
                "tau": result.tau,
                **asdict(result.speculative),
            }
            for result in results
        ],
    }


def describe(report: dict[str, Any], output: Path) -> str:
    """A few lines for people."""
    speed = report["tokens_per_second"]
    pooled, mean = (_rounded(report[key]) for key in ("tau_pooled", "tau_mean_of_prompts"))
    return "\n".join(
        (
            f"accept length (tau): {pooled} pooled, {mean} mean of prompts",
            f"accept rate per slot: {' '.join(_rounded(rate) for rate in report['accept_rate_per_slot'])}",
            f"tokens per second: {speed['speculative']:.1f} speculative, {speed['greedy']:.1f} greedy "
            f"({speed['speculative'] / speed['greedy']:.2f} times)",
            f"lossless: {report['num_lossless']} of {report['num_prompts']} prompts",
            f"written to {output}",
        )
    )


def write_report(report: dict[str, Any], output: Path) -> None:
    """Write one line per key and per prompt; the file is whole or absent."""
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in report.items() if key != "prompts"
    ]
    prompts = ",\n".join(json.dumps(prompt, allow_nan=False) for prompt in report["prompts"])
    text = "{\n" + ",\n".join((*lines, f'"prompts": [\n{prompts}\n]')) + "\n}\n"
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


def _check(config: EvaluateConfig, output: Path) -> None:
    """Find out now what would otherwise be found out after hours of decoding."""
    for key in ("max_new_tokens", "limit"):
        value = getattr(config, key)
        if value is not None and value < 1:
            raise ValueError(f"{key}: {value} must be at least 1")
    if output.is_dir():
        raise ValueError(f"output: {output} is a folder; give the name of a .json file")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise ValueError(f"output: {output.parent} cannot be written to")


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    evaluate(parse_cli(EvaluateConfig, sys.argv[1:], __doc__ or ""))


if __name__ == "__main__":
    run_cli(main)
