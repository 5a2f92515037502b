"""Regenerating answers: greedy and batched alike, resumable to the byte, and strict about where rows come from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dflash.regenerate
from dflash.config import Device, Dtype
from dflash.regenerate import RegenerateConfig, main, regenerate
from dflash.target.loading import load_causal_lm, load_tokenizer

NUM_PROMPTS = 11
MAX_NEW_TOKENS = 9
STOP_ID = 2
SHAPE = {
    "vocab_size": 12,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": STOP_ID,
    "pad_token_id": None,
    # Wide enough for answers that differ, and for some to end early.
    "initializer_range": 0.5,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {{ message['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
WORDS = ["<unk>", "<pad>", "<end>", "<user>", "<assistant>", "one", "two", "three", "four", "five", "six", "seven"]


def save_target(folder: Path, kind: str = "llama", chat: bool | None = None, seed: int = 0) -> Path:
    """Save a random target; chat: None for no tokenizer at all, else whether its tokenizer has a chat template."""
    torch.manual_seed(seed)
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SHAPE))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    # Sampling and penalties of the target must not reach a greedy answer.
    model.generation_config = GenerationConfig(
        eos_token_id=[STOP_ID], do_sample=True, temperature=2.0, top_k=3, repetition_penalty=1.5
    )
    model.save_pretrained(folder)
    if chat is not None:
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")
        tokenizer.chat_template = CHAT_TEMPLATE if chat else None
        tokenizer.save_pretrained(folder)
    return folder


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def random_prompts(file: Path, num_prompts: int = NUM_PROMPTS) -> Path:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 14, (num_prompts,), generator=generator).tolist()
    vocab_size = SHAPE["vocab_size"]
    return write_rows(
        file, [{"input_ids": torch.randint(0, vocab_size, (n,), generator=generator).tolist()} for n in lengths]
    )


def config_of(target: Path, prompts: Path, output: Path, **changes: Any) -> RegenerateConfig:
    values = {"max_new_tokens": MAX_NEW_TOKENS, "batch_size": 3, "dtype": Dtype.float32, **changes}
    return RegenerateConfig(target=str(target), prompts=str(prompts), output=str(output), device=Device.cpu, **values)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.inference_mode()
def naive_answer(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Take the argmax token by token, without a cache, a batch or generate()."""
    input_ids = list(prompt)
    while len(input_ids) < len(prompt) + max_new_tokens:
        input_ids.append(int(model(torch.tensor([input_ids])).logits[0, -1].argmax()))
        if input_ids[-1] == STOP_ID:
            break
    return input_ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 4, 32])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_answers_are_greedy_in_any_batch(tmp_path: Path, kind: str, batch_size: int) -> None:
    target = save_target(tmp_path / "target", kind)
    prompts = random_prompts(tmp_path / "prompts.jsonl")
    regenerate(config_of(target, prompts, tmp_path / "out.jsonl", batch_size=batch_size))
    model = load_causal_lm(str(target), torch.float32, torch.device("cpu"))
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in rows] == list(range(NUM_PROMPTS))
    answers = []
    for row, prompt in zip(rows, read_rows(prompts), strict=True):
        assert set(row) == {"id", "input_ids", "loss_mask"}
        answer = naive_answer(model, prompt["input_ids"], MAX_NEW_TOKENS)
        assert row["input_ids"] == prompt["input_ids"] + answer
        assert row["loss_mask"] == [0] * len(prompt["input_ids"]) + [1] * len(answer)
        answers.append(answer)
    assert {len(answer) < MAX_NEW_TOKENS for answer in answers} == {True, False}, "both ends must be covered"


def test_messages_and_prompts(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", chat=True)
    turns = [{"role": "user", "content": "one two"}]
    answered = [*turns, {"role": "assistant", "content": "three"}]
    longer = [*answered, {"role": "user", "content": "four"}]
    prompts = write_rows(
        tmp_path / "prompts.jsonl",
        [{"messages": turns}, {"messages": answered}, {"prompt": "one two"}, {"messages": longer}],
    )
    regenerate(config_of(target, prompts, tmp_path / "out.jsonl"))
    tokenizer = load_tokenizer(str(target))
    first, second, third, fourth = read_rows(tmp_path / "out.jsonl")
    assert {**second, "id": 0} == first
    assert {**third, "id": 0} == first
    assert fourth["messages"][:-1] == longer
    for row, shown in ((first, "<user> one two <end> <assistant>"), (fourth, None)):
        num_prompt_tokens = row["loss_mask"].index(1)
        if shown is not None:
            assert row["input_ids"][:num_prompt_tokens] == tokenizer(shown)["input_ids"]
        answer = row["input_ids"][num_prompt_tokens:]
        answer = answer[:-1] if answer[-1] == STOP_ID else answer
        assert row["messages"][-1] == {
            "role": "assistant",
            "content": tokenizer.decode(answer, skip_special_tokens=True),
        }


def test_raw_prompts_without_a_template(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", chat=False)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "one two three"}])
    regenerate(config_of(target, prompts, tmp_path / "out.jsonl"))
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert set(row) == {"id", "prompt", "response", "input_ids", "loss_mask"}
    assert row["prompt"] == "one two three"
    assert row["input_ids"][:3] == [5, 6, 7]
    assert row["loss_mask"][:4] == [0, 0, 0, 1]


def stop_after(monkeypatch: pytest.MonkeyPatch, num_batches: int) -> None:
    """Let the run die when it begins its next batch."""
    genuine, calls = dflash.regenerate.generate, []

    def generate(*arguments: Any) -> list[list[int]]:
        calls.append(arguments)
        if len(calls) > num_batches:
            raise KeyboardInterrupt
        return genuine(*arguments)

    monkeypatch.setattr(dflash.regenerate, "generate", generate)


@pytest.mark.parametrize("num_cut_bytes", [0, 1, 25, 150])
def test_a_stopped_run_goes_on_to_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cut_bytes: int
) -> None:
    target = save_target(tmp_path / "target")
    prompts = random_prompts(tmp_path / "prompts.jsonl")
    regenerate(config_of(target, prompts, tmp_path / "whole.jsonl"))
    stopped = config_of(target, prompts, tmp_path / "stopped.jsonl")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(patch, num_batches=2)
        regenerate(stopped)
    output = tmp_path / "stopped.jsonl"
    assert len(read_rows(output)) == 6
    output.write_bytes(output.read_bytes()[: output.stat().st_size - num_cut_bytes])
    regenerate(stopped)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_finished_run_has_nothing_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompts = save_target(tmp_path / "target"), random_prompts(tmp_path / "prompts.jsonl")
    config = config_of(target, prompts, tmp_path / "out.jsonl")
    regenerate(config)
    finished = (tmp_path / "out.jsonl").read_bytes()
    stop_after(monkeypatch, num_batches=0)
    target.rename(tmp_path / "moved")  # the same target under another path is the same target
    config.target = str(tmp_path / "moved")
    regenerate(config)
    assert (tmp_path / "out.jsonl").read_bytes() == finished


def test_limit_can_be_raised(tmp_path: Path) -> None:
    target, prompts = save_target(tmp_path / "target"), random_prompts(tmp_path / "prompts.jsonl")
    output = tmp_path / "out.jsonl"
    regenerate(config_of(target, prompts, output, limit=4))
    assert [row["id"] for row in read_rows(output)] == [0, 1, 2, 3]
    regenerate(config_of(target, prompts, output))
    regenerate(config_of(target, prompts, tmp_path / "whole.jsonl"))
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_an_output_of_something_else_is_refused(tmp_path: Path) -> None:
    target, prompts = save_target(tmp_path / "target"), random_prompts(tmp_path / "prompts.jsonl")
    output = tmp_path / "out.jsonl"
    regenerate(config_of(target, prompts, output))
    content = output.read_bytes()
    other_target = save_target(tmp_path / "other", seed=5)
    other_prompts = random_prompts(tmp_path / "fewer.jsonl", NUM_PROMPTS - 1)
    for config, reason in [
        (config_of(target, prompts, output, max_new_tokens=5), "another max_new_tokens"),
        (config_of(other_target, prompts, output), "another target"),
        (config_of(target, prompts, output, dtype=Dtype.bfloat16), "another target"),
        (config_of(target, other_prompts, output), "another prompts"),
    ]:
        with pytest.raises(ValueError, match=reason):
            regenerate(config)
    (tmp_path / "out.jsonl.meta.json").write_text("{}")
    with pytest.raises(ValueError, match="is damaged"):
        regenerate(config_of(target, prompts, output))
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(ValueError, match="cannot be continued"):
        regenerate(config_of(target, prompts, output))
    assert output.read_bytes() == content


def test_a_damaged_line_in_the_output_is_named(tmp_path: Path) -> None:
    target, prompts = save_target(tmp_path / "target"), random_prompts(tmp_path / "prompts.jsonl")
    output = tmp_path / "out.jsonl"
    regenerate(config_of(target, prompts, output))
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join([*lines[:2], b"{}\n", *lines[3:]]))
    with pytest.raises(ValueError, match=r"out\.jsonl:3: "):
        regenerate(config_of(target, prompts, output))


def test_bad_rows_are_reported_and_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target", chat=True)
    user = {"role": "user", "content": "one"}
    bad_rows = [
        ('{"messages": ', "not JSON"),
        ("[1]", "a JSON object"),
        ({"text": "one"}, "needs messages, prompt or input_ids"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "role and a content"),
        ({"messages": [{"role": "assistant", "content": "one"}]}, "nothing but an assistant turn"),
        ({"prompt": 3}, "prompt must be text"),
        ({"input_ids": [1, "2"]}, "list of integers"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [1, 12]}, "outside the target's vocabulary of 12"),
        ({"input_ids": [1] * 56}, "exceed the target's 64 positions"),
    ]
    prompts = write_rows(tmp_path / "prompts.jsonl", ["", {"messages": [user]}, *[row for row, _ in bad_rows]])
    regenerate(config_of(target, prompts, tmp_path / "out.jsonl"))
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [1]
    printed = capsys.readouterr().err
    for number, (_, reason) in enumerate(bad_rows, start=3):
        (line,) = [line for line in printed.splitlines() if f"prompts.jsonl:{number}: " in line]
        assert reason in line
    assert f"{len(bad_rows)} of {len(bad_rows) + 1} rows skipped" in printed


def test_messages_need_a_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"messages": [{"role": "user", "content": "one"}]}])
    for name, chat, reason in (("bare", None, "no tokenizer"), ("raw", False, "need a chat template")):
        target = save_target(tmp_path / name, chat=chat)
        with pytest.raises(ValueError, match="no usable row"):
            regenerate(config_of(target, prompts, tmp_path / "out.jsonl"))
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target, prompts = save_target(tmp_path / "target"), random_prompts(tmp_path / "prompts.jsonl")
    output = tmp_path / "folder" / "out.jsonl"
    arguments = [f"target={target}", f"prompts={prompts}", f"output={output}", "max_new_tokens=2", "device=cpu"]

    def run(*more: str) -> None:
        monkeypatch.setattr("sys.argv", ["regenerate", *arguments, *more])
        main()

    run("batch_size=4", "limit=3")
    assert len(read_rows(output)) == 3
    capsys.readouterr()
    for more, code, key in [
        (["batch_size=0"], 1, "batch_size"),
        (["batch_size=2", "limit=0"], 1, "limit"),
        (["batch_size=2", "prompts=absent.jsonl"], 1, "absent.jsonl"),
        (["batch_size=2", f"target={tmp_path}"], 1, "config.json"),
        (["max_new_tokens=???"], 2, "max_new_tokens"),
        (["batch_size=two"], 2, "batch_size"),
        (["batch_size=2", "batchsize=2"], 2, "batchsize"),
    ]:
        with pytest.raises(SystemExit) as caught:
            run(*more)
        assert caught.value.code == code
        printed = capsys.readouterr().err
        assert printed.startswith("error: ")
        assert key in printed
        assert printed.count("\n") == 1
