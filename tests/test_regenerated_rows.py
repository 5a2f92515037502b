"""Rows that `dflash.regenerate` writes reach training token by token, whatever text stands beside the tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_data import Build
from test_regenerate import config_of, random_prompts, read_rows, save_target, write_rows

from dflash.regenerate import regenerate
from dflash.target.loading import load_tokenizer

SEED = 3  # of a target that answers most of these with more than a stop token
CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "one two"}]},
    {"prompt": "three  four "},
    {
        "messages": [
            {"role": "user", "content": "five"},
            {"role": "assistant", "content": "six"},
            {"role": "user", "content": "seven seven"},
        ]
    },
]


@pytest.mark.parametrize("chat", [None, False, True])
def test_a_micro_batch_holds_exactly_what_was_written(tmp_path: Path, chat: bool | None) -> None:
    target = save_target(tmp_path / "target", chat=chat, seed=SEED)
    prompts = random_prompts(tmp_path / "prompts.jsonl", 5)
    if chat is not None:
        rows = CONVERSATIONS if chat else [{"prompt": "one two three"}, {"prompt": "three  four "}]
        write_rows(prompts, [*read_rows(prompts), *rows])
    regenerate(config_of(target, prompts, tmp_path / "out.jsonl"))
    rows = read_rows(tmp_path / "out.jsonl")
    assert len(rows) == len(read_rows(prompts))
    # A single supervised token trains nothing, since it is an anchor at most: such documents are skipped.
    rows = [row for row in rows if sum(row["loss_mask"]) > 1]
    assert len(rows) > 4 and {"messages" in row for row in rows} == ({True, False} if chat else {False})
    assert any(row.get("response") for row in rows) == (chat is False)

    build = Build(tmp_path)
    corpus = build(str(tmp_path / "out.jsonl"), load_tokenizer(str(target)), vocab_size=12)
    assert corpus.num_documents == len(rows), build.lines
    order = np.random.default_rng(0).permutation(len(rows))
    batch = corpus.micro_batch(0, order)
    for name in ("input_ids", "loss_mask"):
        written = torch.tensor([value for i in order for value in rows[i][name]])
        assert torch.equal(getattr(batch, name).long(), written), name
    assert batch.lengths.tolist() == [len(rows[i]["input_ids"]) for i in order]
