"""Tiny tokenizers with chat templates of every kind, and data files made of rows."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash.config import Overlong
from dflash.data.build import build_corpus
from dflash.data.corpus import TokenCorpus, open_corpus

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<s>", "</s>"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}" + CHATML
)
# An empty <think> block in the generation prompt that no rendering of an answer has.
EMPTY_THINK = CHATML.replace(
    "'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif"
)
# DeepSeek-R1: the generation prompt opens the thinking, which the answer holds too.
OPEN_THINK = CHATML.replace("'<|im_start|>assistant\\n' }}{% endif", "'<|im_start|>assistant\\n<think>\\n' }}{% endif")
# Qwen3: the answer to the last question has a <think> block, an empty one if need be; earlier ones lose theirs.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{% set content = m.content %}"
    "{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content.lstrip('\\n') + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3_NO_THINKING = QWEN3.replace(
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}",
)
# Phi-3: a rendering that asks for nothing ends with an EOS of the whole text.
CLOSED = CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
# Llama 2: no generation prompt, and no header before an answer.
LLAMA2 = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' </s>' }}{% endif %}{% endfor %}"
)
NO_GENERATION_PROMPT = CHATML.split("{% if add_generation_prompt")[0]
# No token ends a turn: plain text does, or nothing.
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)
PLAIN_ENDED = PLAIN.replace("'\\n\\n' }}", "' [END]\\n\\n' }}")
NOTHING_BEHIND = PLAIN.replace(" + '\\n\\n' }}", " }}")
_MARKED_LOOP = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}BEFORE{% generation %}INSIDE{% endgeneration %}AFTER"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def marked(before: str, inside: str, after: str) -> str:
    """Chat template with generation markers around part of an answer; CONTENT stands for its content."""
    parts = {"BEFORE": before, "INSIDE": inside, "AFTER": after}
    template = _MARKED_LOOP
    for name, text in parts.items():
        template = template.replace(name, text.replace("CONTENT", "{{ m['content'] }}").replace("\n", "{{ '\\n' }}"))
    return template


def bytes_tokenizer(chat_template: str | None, trained_on: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE; without text to train on each byte is a token, so that no token straddles anything."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300 if trained_on else 256 + len(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    backend.train_from_iterator([trained_on], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=chat_template, bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>"
    )


def words_tokenizer(chat_template: str, words: str) -> PreTrainedTokenizerFast:
    """One token per word or punctuation mark; white space belongs to no token."""
    vocabulary = ["<unk>", *SPECIAL_TOKENS, *dict.fromkeys(words.split())]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=chat_template, unk_token="<unk>", eos_token="<|im_end|>"
    )


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    """Messages of alternating roles."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """JSONL file; a row that is text or bytes already is written as it stands."""
    lines = [
        row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode() for row in rows
    ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> Path:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def token_rows(num_rows: int, seed: int = 0, vocab_size: int = 97, longest: int = 40) -> list[dict[str, Any]]:
    """Rows of tokens: a prompt that is not supervised, an answer of two or more tokens that is."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        length = int(rng.integers(3, longest + 1))
        prompt = int(rng.integers(1, length - 1))
        ids = rng.integers(0, vocab_size, size=length).tolist()
        rows.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (length - prompt)})
    return rows


class Build:
    """Builds corpora in one cache folder and keeps what was reported."""

    def __init__(self, folder: Path) -> None:
        self.cache_dir = folder / "cache"
        self.lines: list[str] = []

    def folder(self, paths: Any, tokenizer: Any = None, **changes: Any) -> Path:
        arguments: dict[str, Any] = {
            "max_length": 1000,
            "overlong": Overlong.cut,
            "max_bad_fraction": 0.0,
            "vocab_size": 400,
            "cache_dir": self.cache_dir,
        }
        self.lines = []
        return build_corpus(paths, tokenizer, **{"report": self.lines.append, **arguments, **changes})

    def __call__(self, paths: Any, tokenizer: Any = None, **changes: Any) -> TokenCorpus:
        return open_corpus(self.folder(paths, tokenizer, **changes))
