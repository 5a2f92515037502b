"""Let a target answer prompts greedily, so that a drafter trains on what the target itself would say.

    python -m dflash.regenerate target=DIR_OR_NAME prompts=FILE.jsonl output=FILE.jsonl max_new_tokens=N

A stopped run goes on where it stopped when the same command is given again.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.cli import parse_cli, run_cli
from dflash.config import Device, Dtype
from dflash.data.prompts import prompt_ids
from dflash.data.rows import Place, RowError, read_json_lines
from dflash.decoding import check_room, cut_at_stop, max_positions
from dflash.roles.setup import choose_device, resolve_dtype
from dflash.target.loading import load_causal_lm, load_tokenizer, stop_token_ids

MAX_REPORTED_BAD_ROWS = 20
NUM_FINGERPRINT_VALUES = 64


@dataclass(slots=True)
class RegenerateConfig:
    """Command line of `dflash.regenerate`."""

    target: str = MISSING
    prompts: str = MISSING
    output: str = MISSING
    max_new_tokens: int = MISSING
    batch_size: int = 16
    device: Device = Device.auto
    dtype: Dtype = Dtype.auto
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered: `id` is its 0-based line, `fields` are what its answered row repeats of it."""

    id: int
    input_ids: list[int]
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """What decides the answers; an output file is only ever continued under the same one."""

    prompts_sha256: str
    target_sha256: str
    max_new_tokens: int


def regenerate(config: RegenerateConfig) -> None:
    """Answer every prompt that `config.output` lacks, batch by batch, and leave the file sorted by id.

    Raises ValueError for anything the user can mend.
    """
    for name in ("max_new_tokens", "batch_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name}={getattr(config, name)}: must be at least 1")
    if config.limit is not None and config.limit < 1:
        raise ValueError(f"limit={config.limit}: must be at least 1, or null for all prompts")
    prompts_file, output = Path(config.prompts), Path(config.output)
    if not prompts_file.is_file():
        raise ValueError(f"prompts {prompts_file}: no such file")

    device = choose_device(config.device, local_rank=0)
    model = load_causal_lm(config.target, resolve_dtype(config.dtype, device), device)
    tokenizer = load_tokenizer(config.target)
    stop_ids = stop_token_ids(model, tokenizer)
    requests = read_requests(prompts_file, model, tokenizer, config.max_new_tokens, config.limit)

    origin = Origin(file_sha256(prompts_file), target_sha256(model), config.max_new_tokens)
    claim_output(output, origin, config.target)
    written = repair_output(output)
    with output.open("ab") as stream, progress_bar(requests, written) as bar:
        num_new_tokens, start_s = 0, time.monotonic()
        for batch in plan_batches(requests, config.batch_size):
            if all(request.id in written for request in batch):
                continue
            # A half-written batch runs whole again: another batch shape may round otherwise.
            answers = generate(model, [request.input_ids for request in batch], config.max_new_tokens, stop_ids)
            answered = [pair for pair in zip(batch, answers, strict=True) if pair[0].id not in written]
            stream.write(b"".join(encode_row(request, answer, tokenizer, stop_ids) for request, answer in answered))
            stream.flush()
            num_new_tokens += sum(len(answer) for answer in answers)
            bar.set_postfix_str(f"{num_new_tokens / (time.monotonic() - start_s):.0f} tok/s", refresh=False)
            bar.update(len(answered))
    sort_output(output)


def read_requests(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_new_tokens: int,
    limit: int | None,
) -> list[Request]:
    """Read and tokenize the first `limit` rows of a prompts file.

    Bad rows are reported with file, line and reason, counted and skipped; raises ValueError when none is good.
    """
    num_positions = max_positions(model)
    vocab_size = model.get_input_embeddings().num_embeddings
    requests: list[Request] = []
    num_bad = 0
    for line, record in islice(read_json_lines(file), limit):
        try:
            if isinstance(record, RowError):
                raise record
            input_ids = prompt_ids(record, tokenizer, vocab_size)
            check_room(num_positions, len(input_ids), max_new_tokens)
        except ValueError as error:
            num_bad += 1
            if num_bad <= MAX_REPORTED_BAD_ROWS:
                print(f"{Place(file, line)}: skipped: {error}", file=sys.stderr)
            continue
        requests.append(Request(line - 1, input_ids, repeated_fields(record, tokenizer)))
    if num_bad:
        print(f"{file}: {num_bad} of {num_bad + len(requests)} rows skipped", file=sys.stderr)
    if not requests:
        raise ValueError(f"prompts {file}: no usable row; each needs messages, prompt or input_ids")
    return requests


def repeated_fields(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """Return what the answered row shows of a good prompt row besides tokens: its turns, its text or nothing."""
    if (messages := record.get("messages")) is not None:
        # A last assistant turn is the answer that is written anew.
        return {"messages": messages[:-1] if messages[-1]["role"] == "assistant" else messages}
    if (text := record.get("prompt")) is not None:
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        return {"messages": [{"role": "user", "content": text}]} if has_template else {"prompt": text}
    return {}


def plan_batches(requests: list[Request], batch_size: int) -> list[list[Request]]:
    """Cut the requests into batches of like length, longest first, so that what does not fit fails at once."""
    ordered = sorted(requests, key=lambda request: (-len(request.input_ids), request.id))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]


@torch.inference_mode()
def generate(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, stop_ids: tuple[int, ...]
) -> list[list[int]]:
    """Continue each prompt greedily as one left-padded batch; an answer ends with its stop token if it came to one."""
    width = max(len(prompt) for prompt in prompts)
    pad_id = stop_ids[0] if stop_ids else 0
    input_ids_BT = torch.tensor([[pad_id] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # A target's own generation config may sample or penalise repetition, and generate() merges it into ours.
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(stop_ids) or None,
        pad_token_id=pad_id,
    )
    try:
        output_BT = model.generate(input_ids_BT.to(model.device), attention_mask=mask_BT.to(model.device))
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(
            f"out of GPU memory with {len(prompts)} prompts of {width} tokens; lower batch_size"
        ) from error
    # Padding follows the stop token of the answers that end before the longest.
    return [cut_at_stop(answer, stop_ids) for answer in output_BT[:, width:].tolist()]


def encode_row(
    request: Request, answer: list[int], tokenizer: PreTrainedTokenizerBase | None, stop_ids: tuple[int, ...]
) -> bytes:
    """Write an answered prompt as one JSON line; the ids are what was generated, the text is for readers."""
    row: dict[str, Any] = {"id": request.id, **request.fields}
    if request.fields:
        assert tokenizer is not None, "a prompt made of text was tokenized"
        body = answer[:-1] if answer[-1] in stop_ids else answer
        text = tokenizer.decode(body, skip_special_tokens=True)
        if "messages" in row:
            row["messages"] = [*row["messages"], {"role": "assistant", "content": text}]
        else:
            row["response"] = text
    row["input_ids"] = request.input_ids + answer
    row["loss_mask"] = [0] * len(request.input_ids) + [1] * len(answer)
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def file_sha256(file: Path) -> str:
    """Return the hex SHA-256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def target_sha256(model: PreTrainedModel) -> str:
    """Fingerprint a loaded target by the beginning of each parameter, whatever path it came from."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()[:NUM_FINGERPRINT_VALUES].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def claim_output(output: Path, origin: Origin, target: str) -> None:
    """Write down where the output's rows come from, or check it against what is written down.

    Raises ValueError when the file was made from something else.
    """
    meta = output.with_name(output.name + ".meta.json")
    remedy = "remove it or name another output"
    if meta.is_file():
        try:
            found = json.loads(meta.read_bytes())
            made_with = {key: found[key] for key in asdict(origin)}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"output {output}: {meta} is damaged; {remedy}") from error
        if changed := [key for key, value in asdict(origin).items() if made_with[key] != value]:
            raise ValueError(f"output {output}: was made with another {', '.join(changed)}; {remedy}")
        return
    if output.exists() and output.stat().st_size:
        raise ValueError(f"output {output}: exists without {meta.name}, so it cannot be continued; {remedy}")
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(meta, [json.dumps({**asdict(origin), "target": target}, indent=2).encode() + b"\n"])


def repair_output(output: Path) -> set[int]:
    """Cut off a last line that was not written to its end, and return the ids that are there.

    Raises ValueError when another line is damaged.
    """
    if not output.exists():
        return set()
    num_whole_bytes = 0
    written: set[int] = set()
    with output.open("r+b") as stream:
        for number, line in enumerate(stream):
            if not line.endswith(b"\n"):
                stream.truncate(num_whole_bytes)
                break
            num_whole_bytes += len(line)
            try:
                written.add(int(json.loads(line)["id"]))
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"output {output}:{number + 1}: not a row of ours; remove it or the file") from error
    return written


def sort_output(output: Path) -> None:
    """Order the finished file by id, so that its order does not hang on the batches; holds one line at a time."""
    with output.open("rb") as stream:
        starts: list[tuple[int, int]] = []
        start = 0
        for line in stream:
            starts.append((json.loads(line)["id"], start))
            start += len(line)
        if starts == sorted(starts):
            return

        def lines() -> Iterator[bytes]:
            for _, start in sorted(starts):
                stream.seek(start)
                yield stream.readline()

        replace_file(output, lines())


def replace_file(file: Path, chunks: Iterable[bytes]) -> None:
    """Write a file under another name and rename it, so that it is whole or absent."""
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("wb") as stream:
        stream.writelines(chunks)
    os.replace(temporary, file)


def progress_bar(requests: list[Request], written: set[int]) -> tqdm:
    """Return a bar over prompts that starts at what an earlier run answered."""
    num_done = sum(request.id in written for request in requests)
    return tqdm(total=len(requests), initial=num_done, unit="prompt", desc="regenerate")


def main() -> None:
    run_cli(lambda: regenerate(parse_cli(RegenerateConfig, sys.argv[1:], __doc__ or "")))


if __name__ == "__main__":
    main()
