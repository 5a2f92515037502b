"""Corpora: what is written and said, reuse, fingerprints, limits, and the held-out split."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_data import CHATML, QWEN3, Build, bytes_tokenizer, token_rows, turns, write_jsonl, write_parquet

from dflash.config import Overlong
from dflash.data import build as build_module
from dflash.data.corpus import TokenCorpus, open_corpus, sample_documents, split_documents


@pytest.fixture
def build(tmp_path: Path) -> Build:
    return Build(tmp_path)


def contents(corpus: TokenCorpus) -> list[tuple[list[int], list[int]]]:
    documents = [corpus.document(i) for i in range(corpus.num_documents)]
    return [(input_ids.tolist(), loss_mask.tolist()) for input_ids, loss_mask in documents]


def test_documents_of_token_rows(build: Build, tmp_path: Path) -> None:
    rows = token_rows(700)  # more than are tokenised at once
    corpus = build(write_jsonl(tmp_path / "a.jsonl", rows))
    assert contents(corpus) == [(row["input_ids"], row["loss_mask"]) for row in rows]
    assert corpus.num_documents == 700 and corpus.lengths.dtype == np.int32
    assert corpus.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert corpus.num_tokens == corpus.lengths.sum()
    assert corpus.num_supervised_tokens == sum(sum(row["loss_mask"]) for row in rows)
    assert corpus.folder.name == corpus.fingerprint and corpus.folder.parent == build.cache_dir
    input_ids, loss_mask = corpus.document(3)
    assert (input_ids.dtype, loss_mask.dtype) == (np.int32, np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        input_ids[0] = 1


def test_micro_batch(build: Build, tmp_path: Path) -> None:
    rows = token_rows(20)
    corpus = build(write_jsonl(tmp_path / "a.jsonl", rows))
    batch = corpus.micro_batch(17, np.array([7, 0, 19]))
    assert batch.index == 17 and batch.document_ids.tolist() == [7, 0, 19]
    assert batch.lengths.tolist() == [len(rows[i]["input_ids"]) for i in (7, 0, 19)]
    assert batch.input_ids.tolist() == [token for i in (7, 0, 19) for token in rows[i]["input_ids"]]
    assert batch.loss_mask.tolist() == [value for i in (7, 0, 19) for value in rows[i]["loss_mask"]]
    tensors = (batch.document_ids, batch.lengths, batch.input_ids, batch.loss_mask)
    assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.int32, torch.int32, torch.uint8]
    batch.input_ids.zero_()  # a copy: the corpus stays as it is
    assert contents(corpus)[7][0] == rows[7]["input_ids"]


def test_text_and_tokens_keep_the_order_of_rows(build: Build, tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(CHATML)
    rows: list[Any] = []
    for i in range(300):
        rows.append({"input_ids": [i], "loss_mask": [1]} if i % 50 == 49 else {"prompt": f"q{i}", "response": f"a{i}"})
        rows.append({"input_ids": [i, i], "loss_mask": [1, 1]})
    corpus = build(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    kept = [row for row in rows if len(row.get("input_ids", "..")) > 1]
    assert corpus.num_documents == len(kept) == 594
    for row, (input_ids, loss_mask) in zip(kept, contents(corpus), strict=True):
        if "prompt" in row:
            messages = turns(row["prompt"], row["response"])
            assert tokenizer.decode(input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)
            own = [token for token, is_on in zip(input_ids, loss_mask, strict=True) if is_on]
            assert tokenizer.decode(own) == row["response"] + "<|im_end|>"
        else:
            assert (input_ids, loss_mask) == (row["input_ids"], row["loss_mask"])
    assert any("6 document(s) were without two supervised tokens side by side" in line for line in build.lines)
    assert any(f"first: {tmp_path}/a.jsonl:99)" in line for line in build.lines)


def test_parquet_and_jsonl_give_the_same_documents(build: Build, tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(QWEN3)
    rows = [{"messages": turns(f"q{i}", f"<think>\nt\n</think>\n\na{i}", "more", "b")} for i in range(9)]
    from_jsonl = build(write_jsonl(tmp_path / "a.jsonl", rows), tokenizer)
    from_parquet = build(write_parquet(tmp_path / "a.parquet", rows), tokenizer)
    assert contents(from_jsonl) == contents(from_parquet) and from_jsonl.num_documents == 18
    assert from_jsonl.fingerprint != from_parquet.fingerprint
    assert any("9 conversation(s) were cut into one row per assistant turn" in line for line in build.lines)


def test_bad_rows_are_said_listed_and_skipped(build: Build, tmp_path: Path) -> None:
    rows: list[Any] = token_rows(100)
    rows[3], rows[60] = "oops", {"messages": [{"role": "user", "content": "q"}]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    said = [
        f"data: bad row {path}:4: not JSON: Expecting value at column 1",
        f"data: bad row {path}:61: the conversation has no assistant turn",
    ]
    corpus = build(path, max_bad_fraction=0.02)
    assert build.lines[:2] == said and corpus.num_documents == 98
    assert any("2 of 100 rows are bad (2.00%)" in line for line in build.lines)
    listed = (corpus.folder / "bad_rows.txt").read_text().splitlines()
    assert [f"data: bad row {line}" for line in listed] == said
    first_lines = build.lines
    build(path, max_bad_fraction=0.5)
    assert build.lines[:-1] == first_lines and "reused" in build.lines[-1]


def test_too_many_bad_rows_end_the_run(build: Build, tmp_path: Path) -> None:
    rows: list[Any] = token_rows(100)
    for i in range(10, 70, 10):
        rows[i] = {"input_ids": [1, 2], "loss_mask": [1]}
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    wrong = rf"6 of 100 rows .*\(6.00%\).*max_bad_fraction=0.05.*{path}:11: input_ids has 2 .*{path}:51: .*; \.\.\.$"
    with pytest.raises(ValueError, match=wrong):
        build(path, max_bad_fraction=0.05)
    assert list(build.cache_dir.iterdir()) == []  # nothing half done is left
    build(path, max_bad_fraction=0.06)
    with pytest.raises(ValueError, match=wrong):  # a stricter limit holds for a corpus that exists, too
        build(path, max_bad_fraction=0.05)
    build(path, max_bad_fraction=0.06)


def test_more_bad_rows_than_are_said(build: Build, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["bad"] * 50 + token_rows(50))
    corpus = build(path, max_bad_fraction=0.5)
    assert sum("data: bad row" in line for line in build.lines) == 20
    assert len((corpus.folder / "bad_rows.txt").read_text().splitlines()) == 50


def test_overlong_documents_are_cut_or_skipped(build: Build, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 1, 1, 1]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 0, 1]},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 0, 1, 1]},
    ]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    cut = build(path, max_length=4)
    assert contents(cut) == [([1, 2, 3, 4], [0, 0, 1, 1])] * 2
    assert any(
        f"3 document(s) were longer than data.max_length=4 tokens and were cut (first: {path}:1)" in line
        for line in build.lines
    )
    assert any(
        "2 document(s) were without two supervised tokens side by side" in line and f"{path}:2" in line
        for line in build.lines
    )
    skipped = build(path, max_length=4, overlong=Overlong.skip)
    assert contents(skipped) == [([1, 2, 3, 4], [0, 0, 1, 1])]
    assert any(
        "3 document(s) were longer than data.max_length=4 tokens and were skipped" in line for line in build.lines
    )
    assert not any("side by side" in line for line in build.lines)


def test_a_corpus_without_documents_is_an_error(build: Build, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]}])
    with pytest.raises(ValueError, match="no row of the data can be trained on.*1 rows gave 0 documents.*side by side"):
        build(path)
    assert list(build.cache_dir.iterdir()) == []


def test_text_needs_a_tokenizer_and_tokens_do_not(build: Build, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*token_rows(3), {"prompt": "p", "response": "r"}])
    with pytest.raises(ValueError, match=f"{path}:4: the target has no tokenizer, but the data holds text"):
        build(path, None)
    with pytest.raises(ValueError, match=f"{path}:4: the target's tokenizer has no chat template"):
        build(path, bytes_tokenizer(None))
    assert build(path, bytes_tokenizer(CHATML)).num_documents == 4
    assert build(write_jsonl(tmp_path / "b.jsonl", token_rows(3)), bytes_tokenizer(None)).num_documents == 3


def test_token_ids_beyond_the_vocabulary_are_bad_rows(build: Build, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "response": "r"}])
    with pytest.raises(ValueError, match=f"{path}:1: the tokenizer gives token id .* vocabulary has 40"):
        build(path, bytes_tokenizer(CHATML), vocab_size=40)


def test_fingerprint_follows_contents_tokenizer_and_limits(build: Build, tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "response": f"r{i}"} for i in range(4)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    tokenizer = bytes_tokenizer(CHATML)
    first = build.folder(path, tokenizer)
    assert not any("reused" in line for line in build.lines)
    tokenizer(
        ["a", "abc"], padding=True, truncation=True, max_length=2
    )  # leaves traces in the tokenizer, but no others
    moved = write_jsonl(tmp_path / "b.jsonl", rows)
    assert build.folder(path, tokenizer) == build.folder([moved], bytes_tokenizer(CHATML)) == first
    assert any("reused" in line for line in build.lines)
    halves = [write_jsonl(tmp_path / f"h{i}.jsonl", rows[2 * i : 2 * i + 2]) for i in range(2)]
    others = [
        build.folder(write_jsonl(tmp_path / "c.jsonl", rows[::-1]), tokenizer),
        build.folder(halves, tokenizer),
        build.folder(halves[::-1], tokenizer),
        build.folder(path, bytes_tokenizer(CHATML + " ")),
        build.folder(path, bytes_tokenizer(CHATML, trained_on="p1 p2 r1 r2" * 9)),
        build.folder(path, tokenizer, max_length=999),
        build.folder(path, tokenizer, overlong=Overlong.skip),
        build.folder(path, tokenizer, vocab_size=401),
    ]
    assert len({first, *others}) == 1 + len(others)


def test_a_damaged_corpus_is_built_anew(build: Build, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(5))
    corpus = build(path)
    before, folder = contents(corpus), corpus.folder
    (folder / "loss_mask.bin").write_bytes(b"\1")
    with pytest.raises(
        ValueError, match=r"is not a whole corpus \(loss_mask.bin has 1 bytes, not .*delete that folder"
    ):
        open_corpus(folder)
    assert contents(build(path)) == before and "is damaged; it is built anew" in build.lines[0]
    (folder / "meta.json").unlink()
    assert contents(build(path)) == before
    assert [entry.name for entry in build.cache_dir.iterdir()] == [folder.name]
    with pytest.raises(ValueError, match="is not a whole corpus"):
        open_corpus(tmp_path / "nowhere")


def test_two_builds_at_once(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to finish takes the first one's folder; neither leaves anything behind."""
    path = write_jsonl(tmp_path / "a.jsonl", token_rows(5))
    both_built = threading.Barrier(2, timeout=30)
    write_meta = build_module._write_meta
    monkeypatch.setattr(build_module, "_write_meta", lambda *args: write_meta(*args) or both_built.wait())
    folders: list[Path] = []
    builds = [threading.Thread(target=lambda: folders.append(Build(tmp_path).folder(path))) for _ in range(2)]
    for thread in builds:
        thread.start()
    for thread in builds:
        thread.join()
    assert len(folders) == 2 and folders[0] == folders[1]
    assert list(build.cache_dir.iterdir()) == [folders[0]] and open_corpus(folders[0]).num_documents == 5


def test_split_is_a_partition_keyed_by_seed(build: Build, tmp_path: Path) -> None:
    rows = token_rows(400, longest=30)
    corpus = build(write_jsonl(tmp_path / "a.jsonl", rows))
    train, held_out = split_documents(corpus, 0.1, seed=1)
    assert train.dtype == held_out.dtype == np.int64
    assert sorted([*train, *held_out]) == list(range(400)) and 36 <= len(held_out) <= 44
    assert np.array_equal(train, np.sort(train)) and np.array_equal(held_out, np.sort(held_out))
    assert np.array_equal(split_documents(corpus, 0.1, seed=1)[1], held_out)
    assert not np.array_equal(split_documents(corpus, 0.1, seed=2)[1], held_out)
    assert len(split_documents(corpus, 0.1, seed=1, max_eval_documents=7)[1]) <= 7
    assert len(split_documents(corpus, 0.0, seed=1)[1]) == 0 and len(split_documents(corpus, 0.0001, seed=1)[1]) == 1
    with pytest.raises(ValueError, match="eval_fraction: 1.0"):
        split_documents(corpus, 1.0, seed=1)
    # Keyed per document: nearly all held out of the whole are held out of its first part as well, at the same share.
    part = build(write_jsonl(tmp_path / "b.jsonl", rows[:300]))
    common = set(split_documents(part, 0.1, seed=1)[1]) & set(held_out)
    assert len(common) >= 0.7 * len([i for i in held_out if i < 300])


def test_split_keeps_the_turns_of_a_conversation_together(build: Build, tmp_path: Path) -> None:
    rows = [{"messages": turns(f"q{i}", "a", "more", "b", "more", "c")} for i in range(60)]
    corpus = build(write_jsonl(tmp_path / "a.jsonl", rows), bytes_tokenizer(QWEN3))
    assert corpus.num_documents == 180
    for seed in range(5):
        train, held_out = split_documents(corpus, 0.1, seed)
        assert not {i // 3 for i in train} & {i // 3 for i in held_out} and 15 <= len(held_out) <= 21


def test_split_of_documents_that_are_all_the_same(build: Build, tmp_path: Path) -> None:
    corpus = build(write_jsonl(tmp_path / "a.jsonl", token_rows(1) * 50))
    train, held_out = split_documents(corpus, 0.1, seed=0)
    assert (len(train), len(held_out)) == (45, 5)
    single = build(write_jsonl(tmp_path / "b.jsonl", token_rows(1)))
    assert [len(ids) for ids in split_documents(single, 0.5, seed=0)] == [1, 0]


def test_sample_documents(build: Build, tmp_path: Path) -> None:
    corpus = build(write_jsonl(tmp_path / "a.jsonl", token_rows(30)))
    assert sample_documents(corpus, 30, 0).tolist() == list(range(30))
    ids = sample_documents(corpus, 8, 0)
    assert len(set(ids.tolist())) == 8 and ids.tolist() == sorted(ids.tolist())
    assert not np.array_equal(ids, sample_documents(corpus, 8, 1))
    assert corpus.documents(ids).lengths.tolist() == corpus.lengths[ids].tolist()
    assert corpus.documents().ids.tolist() == list(range(30))
