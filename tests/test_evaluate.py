"""The evaluate command: figures, rows of every shape, and what is refused before anything is decoded."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers_decoding as helpers
import pytest
import torch
from transformers import PreTrainedModel

from dflash.cli import run_cli
from dflash.config import Device, Dtype
from dflash.data.prompts import prompt_ids
from dflash.data.rows import RowError
from dflash.decoding import SpeculativeResult, greedy_decode
from dflash.drafter.served import load_served, save_served
from dflash.evaluate import EvaluateConfig, PromptResult, check_fits, evaluate, main, summarize
from dflash.target.shape import target_shape

ROOT = Path(__file__).parent.parent
PAIR = Path(__file__).parent / "fixtures" / "served_pair"
EXPECTED = json.loads((PAIR / "expected.json").read_text())
BLOCK_SIZE = 8


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_config(folder: Path, rows: list[Any], **changes: Any) -> EvaluateConfig:
    config = EvaluateConfig(
        drafter=str(PAIR / "draft"),
        target=str(PAIR / "target"),
        prompts=str(write_rows(folder / "prompts.jsonl", rows)),
        output=str(folder / "report.json"),
        max_new_tokens=12,
        device=Device.cpu,
    )
    return replace(config, **changes)


def not_a_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.fixture(scope="module")
def served_report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("served")
    prompts = write_rows(folder / "prompts.jsonl", [{"input_ids": e["prompt"]} for e in EXPECTED["greedy_decoding"]])
    output = folder / "new" / "report.json"
    command = [sys.executable, "-m", "dflash.evaluate", f"drafter={PAIR / 'draft'}", f"target={PAIR / 'target'}"]
    command += [f"prompts={prompts}", f"output={output}", f"max_new_tokens={EXPECTED['max_new_tokens']}", "device=cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "lossless: 4 of 4 prompts" in done.stdout
    assert [path.name for path in output.parent.iterdir()] == ["report.json"], "no temporary file is left"
    return json.loads(output.read_text(), parse_constant=not_a_number)


def test_served_pair_through_the_command(served_report: dict[str, Any]) -> None:
    for prompt, expected in zip(served_report["prompts"], EXPECTED["greedy_decoding"], strict=True):
        assert prompt["input_ids"] == expected["prompt"]
        assert prompt["output_ids"] == expected["output"]
        assert prompt["greedy_ids"] == expected["greedy"]
        assert prompt["lossless"] is True
        assert prompt["starts"] == expected["starts"]
        assert prompt["acceptance_lengths"] == expected["acceptance_lengths"]
        end = len(expected["prompt"]) + EXPECTED["max_new_tokens"]
        num_whole = sum(start + BLOCK_SIZE <= end for start in expected["starts"])
        assert num_whole >= 6
        assert prompt["drafts"][:num_whole] == expected["drafts"][:num_whole]
        assert prompt["tau"] == pytest.approx(expected["tau"], rel=1e-12)


def test_figures_of_the_served_pair(served_report: dict[str, Any]) -> None:
    expected = EXPECTED["greedy_decoding"]
    lengths = [length for entry in expected for length in entry["acceptance_lengths"]]
    assert served_report["tau_pooled"] == pytest.approx(sum(lengths) / len(lengths), rel=1e-12)
    assert served_report["tau_mean_of_prompts"] == pytest.approx(sum(e["tau"] for e in expected) / 4, rel=1e-12)
    hits = [0] * BLOCK_SIZE
    for prompt in served_report["prompts"]:
        sequence = prompt["input_ids"] + prompt["output_ids"]
        verifications = zip(prompt["starts"], prompt["drafts"], prompt["acceptance_lengths"], strict=True)
        for start, draft, length in verifications:
            hits[0] += 1
            # The last position there is room for is the target's own; no draft for it was verified.
            last_verified = len(prompt["input_ids"]) + EXPECTED["max_new_tokens"] - 2
            for slot, token in enumerate(draft, start=1):
                if slot > length or start + slot > last_verified or sequence[start + slot] != token:
                    break
                hits[slot] += 1
    assert hits[1] > hits[7] > 0
    assert served_report["accept_rate_per_slot"] == pytest.approx([hit / len(lengths) for hit in hits], rel=1e-12)
    assert served_report["tokens_per_second"].keys() == {"speculative", "greedy"}
    assert all(value > 0 for value in served_report["tokens_per_second"].values())
    assert served_report["run"]["block_size"] == BLOCK_SIZE
    assert served_report["run"]["dtype"] == "float32"


def test_figures_of_known_results() -> None:
    decoded = [
        # 3 drafts right and the bonus token; then a stop token as the first draft, so that there is no bonus.
        SpeculativeResult([9, 1, 2, 3, 4, 5], [4, 8], [[1, 2, 3], [5, 0, 0]], [4, 1], [3, 1]),
        # Room for one token, the target's own, which an unverified draft happens to equal.
        SpeculativeResult([9, 1], [2], [[1, 2, 2]], [1], [0]),
        # The first token was a stop token.
        SpeculativeResult([9]),
    ]
    results = [PromptResult([7], result, result.output_ids, 0.5, 2.0) for result in decoded]
    results[1] = replace(results[1], greedy_ids=[9, 3])
    report = summarize(results, block_size=4)
    assert report["tau_mean_of_prompts"] == (2.5 + 1) / 2
    assert report["tau_pooled"] == 6 / 3
    assert report["accept_rate_per_slot"] == [1.0, 2 / 3, 1 / 3, 1 / 3]
    assert report["tokens_per_second"] == {"speculative": 9 / 1.5, "greedy": 9 / 6}
    assert [prompt["lossless"] for prompt in report["prompts"]] == [True, False, True]
    assert (report["num_prompts"], report["num_lossless"]) == (3, 2)
    assert [prompt["tau"] for prompt in report["prompts"]] == [2.5, 1.0, None]
    nothing = summarize([results[2]], block_size=3)
    assert nothing["tau_pooled"] is None and nothing["tau_mean_of_prompts"] is None
    assert nothing["accept_rate_per_slot"] == [None] * 3


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Path]:
    """A target with linear attention and a drafter for it, as folders."""
    folder = tmp_path_factory.mktemp("hybrid")
    target = helpers.random_target("linear_and_full")
    target.save_pretrained(folder / "target")
    save_served(helpers.random_drafter(target, block_size=3), folder / "draft", torch.float32)
    return target, folder / "target", folder / "draft"


def test_answer_that_ends_with_its_first_token(hybrid: tuple[PreTrainedModel, Path, Path], tmp_path: Path) -> None:
    target, target_folder, draft_folder = hybrid
    prompt = helpers.random_prompt(5)
    answer = greedy_decode(target, prompt, max_new_tokens=8, stop_ids=())
    folder = shutil.copytree(target_folder, tmp_path / "target")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [answer[0]]}))
    config = pair_config(tmp_path, [{"input_ids": prompt}], target=str(folder), drafter=str(draft_folder))
    evaluate(config)
    report = json.loads(Path(config.output).read_text(), parse_constant=not_a_number)
    assert report["prompts"][0]["output_ids"] == report["prompts"][0]["greedy_ids"] == answer[:1]
    assert report["tau_pooled"] is None and report["accept_rate_per_slot"] == [None] * 3
    assert report["prompts"][0]["acceptance_lengths"] == []


def test_target_without_generation_config_and_a_limit(
    hybrid: tuple[PreTrainedModel, Path, Path], tmp_path: Path
) -> None:
    _, target_folder, draft_folder = hybrid
    folder = shutil.copytree(target_folder, tmp_path / "target")
    (folder / "generation_config.json").unlink(missing_ok=True)
    rows = [{"input_ids": helpers.random_prompt(length)} for length in (1, 7, 3)]
    report = evaluate(pair_config(tmp_path, rows, target=str(folder), drafter=str(draft_folder), limit=2))
    assert [prompt["input_ids"] for prompt in report["prompts"]] == [row["input_ids"] for row in rows[:2]]
    assert report["num_lossless"] == 2
    assert all(len(prompt["output_ids"]) == 12 for prompt in report["prompts"])


def test_half_precision_is_accepted(tmp_path: Path) -> None:
    report = evaluate(pair_config(tmp_path, [{"input_ids": [5, 6]}], dtype=Dtype.bfloat16, max_new_tokens=3))
    assert report["run"]["dtype"] == "bfloat16"
    assert len(report["prompts"][0]["output_ids"]) == 3


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "prompts.jsonl: holds no prompt"),
        ([{"input_ids": [1]}, {"input_ids": []}], {}, "prompts.jsonl:2: the prompt has no tokens"),
        ([{"input_ids": [1]}, [2]], {}, "prompts.jsonl:2: a row must be a JSON object"),
        ([{"input_ids": [1, 64]}], {}, "prompts.jsonl:1: token 64 is outside the target's vocabulary of 64"),
        ([{"input_ids": [1.5]}], {}, "prompts.jsonl:1: input_ids must be a list of integers"),
        ([{"text": "x"}], {}, "prompts.jsonl:1: needs messages, prompt or input_ids; it has 'text'"),
        ([{"prompt": "x"}], {}, "prompts.jsonl:1: prompt is text, but the target has no tokenizer"),
        ([{"messages": [{"role": "user", "content": "x"}]}], {}, "prompts.jsonl:1: messages are text, but"),
        ([{"input_ids": [1] * 501}], {}, "prompts.jsonl:1: 501 prompt tokens and max_new_tokens=12 exceed .* 512"),
        ([{"input_ids": [1]}], {"prompts": "absent.jsonl"}, "absent.jsonl"),
        ([{"input_ids": [1]}], {"drafter": "absent"}, "drafter absent: no such folder"),
        ([{"input_ids": [1]}], {"drafter": str(PAIR)}, "served_pair"),
        ([{"input_ids": [1]}], {"target": "./absent"}, "target .*absent.*: no such folder"),
        ([{"input_ids": [1]}], {"max_new_tokens": 0}, "max_new_tokens: 0 must be at least 1"),
        ([{"input_ids": [1]}], {"limit": 0}, "limit: 0 must be at least 1"),
        ([{"input_ids": [1]}], {"output": str(PAIR)}, "output: .* is a folder"),
    ],
)
def test_refused_before_anything_is_decoded(
    rows: list[Any], changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the target's weights were loaded")

    monkeypatch.setattr("dflash.evaluate.load_causal_lm", never)
    with pytest.raises((ValueError, OSError), match=message):
        evaluate(pair_config(tmp_path, rows, **changes))
    assert not (tmp_path / "report.json").exists()


def test_line_that_is_no_json(tmp_path: Path) -> None:
    config = pair_config(tmp_path, [])
    Path(config.prompts).write_text('{"input_ids": [1]}\n\n{"input_ids": [1\n')
    with pytest.raises(ValueError, match=r"prompts.jsonl:3: not JSON"):
        evaluate(config)


def test_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["evaluate", "drafter=absent", "target=t", "prompts=p", f"output={tmp_path}/o"])
    with pytest.raises(SystemExit) as ended:
        run_cli(main)
    assert ended.value.code == 1
    message = "error: drafter absent: no such folder; give a checkpoint, a run folder or an export\n"
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "its hidden size is 32, the target's 128"),
        ({"num_layers": 9}, "it reads a target of 6 layers, this one has 9"),
        ({"vocab_size": 52}, "its mask token 52 is outside the vocabulary of 52"),
    ],
)
def test_drafter_of_another_target(change: dict[str, int], message: str) -> None:
    target = helpers.random_target("full")
    drafter, shape = helpers.random_drafter(target, 4).shape, target_shape(target.config)
    config = EvaluateConfig(drafter="D", target="T")
    check_fits(drafter, shape, config)
    with pytest.raises(ValueError, match=f"drafter D does not fit target T: {message}"):
        check_fits(drafter, replace(shape, **change), config)


CHAT = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'no' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
USER, ASSISTANT, SYSTEM, HELLO, YES, NO = range(2, 8)


@pytest.mark.parametrize(
    ("row", "chat", "plain"),
    [
        ({"messages": [{"role": "user", "content": "hello yes"}]}, [USER, HELLO, YES, ASSISTANT], "chat template"),
        (
            {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]},
            [USER, HELLO, ASSISTANT],
            "chat template",
        ),
        ({"prompt": "hello yes", "response": "no"}, [USER, HELLO, YES, ASSISTANT], [0, HELLO, YES]),
        ({"prompt": "hello", "messages": None}, [USER, HELLO, ASSISTANT], [0, HELLO]),
        ({"input_ids": [3, 1]}, [3, 1], [3, 1]),
        ({"messages": []}, "at least one message", "at least one message"),
        ({"messages": [{"role": "user"}]}, "message 1 needs a role and a content", "message 1 needs a role"),
        ({"messages": [{"role": "assistant", "content": "yes"}]}, "nothing but an assistant", "nothing but"),
        ({"messages": [{"role": "system", "content": "no"}]}, "template refuses it: no system", "chat template"),
        ({"prompt": 5}, "prompt must be text", "prompt must be text"),
    ],
)
def test_rows_of_text(row: dict[str, Any], chat: list[int] | str, plain: list[int] | str) -> None:
    for template, expected in ((CHAT, chat), (None, plain)):
        tokenizer = helpers.word_tokenizer(["<s>", "?", "user", "assistant", "system", "hello", "yes", "no"], template)
        if isinstance(expected, list):
            assert prompt_ids(row, tokenizer, vocab_size=8) == expected
        else:
            with pytest.raises(RowError, match=expected):
                prompt_ids(row, tokenizer, vocab_size=8)


def test_drafter_in_half_precision_runs_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_served(load_served(PAIR / "draft"), tmp_path / "draft", torch.bfloat16)
    report = evaluate(pair_config(tmp_path, [{"input_ids": [59, 3, 17]}], drafter=str(tmp_path / "draft")))
    assert report["run"]["dtype"] == "float32"
    assert report["num_lossless"] == 1
