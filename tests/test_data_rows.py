"""Rows of JSONL and Parquet: their three shapes, and every kind of bad one with its place and reason."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_data import turns, write_jsonl, write_parquet

from dflash.data.rows import ConversationRow, RowError, TokenRow, find_files, parse_row, read_rows

TALK = turns("q", "a")


def read(path: Path, vocab_size: int = 100) -> dict[int, Any]:
    """Rows by line: token rows as a pair of lists, conversations as their messages, bad rows as their reason."""
    rows: dict[int, Any] = {}
    for place, row in read_rows(path, vocab_size):
        assert place.path == path and str(place) == f"{path}:{place.line}"
        if isinstance(row, TokenRow):
            assert row.input_ids.dtype == np.int32 and row.loss_mask.dtype == np.uint8
            rows[place.line] = (row.input_ids.tolist(), row.loss_mask.tolist())
        else:
            rows[place.line] = row.messages if isinstance(row, ConversationRow) else str(row)
    return rows


def test_three_shapes_and_their_order(tmp_path: Path) -> None:
    tokens = {"input_ids": [5, 0, 99], "loss_mask": [0, 1, True]}
    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            {"messages": TALK, "prompt": "no", "response": "no", "id": 7},
            {"prompt": "p", "response": "r", "score": None},
            {**tokens, "messages": TALK},
            {"input_ids": [1], "messages": TALK},
            {"input_ids": None, "loss_mask": None, "messages": None, "prompt": "p", "response": ""},
            {"messages": [{**TALK[0], "name": None}, {**TALK[1], "tool_calls": []}]},
        ],
    )
    assert read(path) == {
        1: TALK,
        2: turns("p", "r"),
        3: ([5, 0, 99], [0, 1, 1]),
        4: TALK,
        5: turns("p", ""),
        6: [TALK[0], {**TALK[1], "tool_calls": []}],
    }


def test_lines_bytes_and_blanks(tmp_path: Path) -> None:
    """BOM, CRLF, blank lines, line separators inside a string, no newline at the end."""
    path = tmp_path / "a.json"
    inside = '{"prompt": "a\u2028b\u0085c", "response": "\\u00e9 é 🦜"}'.encode()
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "p", "response": "r"}\r\n\r\n   \t\n' + inside + b"\r\n\xff\n" + inside[:-1]
    )
    rows = read(path)
    assert list(rows) == [1, 4, 5, 6]
    assert rows[1] == turns("p", "r") and rows[4] == turns("a\u2028b\u0085c", "é é 🦜")
    assert rows[5] == "not UTF-8: invalid start byte at byte 1"
    assert rows[6].startswith("not JSON: Expecting ',' delimiter at column ")


BAD = {
    "no JSON": (b"{messages}", "not JSON: Expecting property name enclosed in double quotes at column 2"),
    "two values": (b"{} {}", "not JSON: Extra data at column 4"),
    "null": ("null", "a row must be a JSON object, this is null"),
    "list": ("[1, 2]", "a row must be a JSON object, this is a list"),
    "text": ('"text"', "a row must be a JSON object, this is the text 'text'"),
    "nan": ("NaN", "a row must be a JSON object, this is the number nan"),
    "nested without end": (b"[" * 100_000, "not usable JSON: "),
    "a number without end": (b"1" * 10_000, "not usable JSON: "),
    "no key": ({}, "needs input_ids and loss_mask, or messages, or prompt and response; it has no key"),
    "other keys": ({"text": "t"}, "it has 'text'"),
    "nulls": ({"messages": None, "x": 1}, "it has 'messages', 'x' (messages null)"),
    "half a pair": ({"prompt": "p"}, "it has 'prompt'"),
    "ids alone": ({"input_ids": [1, 2]}, "it has 'input_ids'"),
    "prompt is messages": ({"prompt": TALK, "response": "r"}, "prompt must be text, it is a list"),
    "response is a number": ({"prompt": "p", "response": 3}, "response must be text, it is the number 3"),
    "messages is text": ({"messages": "[]"}, "messages must be a list, it is the text '[]'"),
    "messages is empty": ({"messages": []}, "messages is empty"),
    "message is text": ({"messages": ["hi"]}, "message 1 must be an object with role and content, it is the text 'hi'"),
    "no role": ({"messages": [{"content": "c"}]}, "message 1: role must be text, it is missing"),
    "no content": ({"messages": [TALK[0], {"role": "assistant"}]}, "message 2: content must be text, it is missing"),
    "content null": (
        {"messages": [TALK[0], {"role": "assistant", "content": None}]},
        "message 2: content must be text, it is null",
    ),
    "content list": (
        {"messages": [{"role": "user", "content": [{}]}]},
        "message 1: content must be text, it is a list",
    ),
    "content nan": ('{"messages": [{"role": "user", "content": NaN}]}', "content must be text, it is the number nan"),
    "system only": ({"messages": [{"role": "system", "content": "s"}]}, "the conversation has no assistant turn"),
    "user only": ({"messages": TALK[:1]}, "the conversation has no assistant turn"),
    "ids text": ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "input_ids[1] must be an integer, it is the text '2'"),
    "ids float": ({"input_ids": [1.0], "loss_mask": [1]}, "input_ids[0] must be an integer, it is the number 1.0"),
    "ids nan": (
        '{"input_ids": [1, NaN], "loss_mask": [1, 1]}',
        "input_ids[1] must be an integer, it is the number nan",
    ),
    "ids bool": ({"input_ids": [True], "loss_mask": [1]}, "input_ids[0] must be an integer, it is true"),
    "ids null": ({"input_ids": [None], "loss_mask": [1]}, "input_ids[0] must be an integer, it is null"),
    "ids nested": ({"input_ids": [[1]], "loss_mask": [1]}, "input_ids[0] must be an integer, it is a list"),
    "ids not a list": ({"input_ids": "1 2", "loss_mask": [1]}, "input_ids must be a list, it is the text '1 2'"),
    "ids empty": ({"input_ids": [], "loss_mask": []}, "input_ids is empty"),
    "lengths": ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids has 2 entries, loss_mask 1; they must agree"),
    "id too large": (
        {"input_ids": [1, 100], "loss_mask": [1, 1]},
        "input_ids[1] is 100, outside the target's vocabulary of 100 tokens",
    ),
    "id negative": ({"input_ids": [-1], "loss_mask": [1]}, "input_ids[0] is -1, outside"),
    "id beyond all integers": ({"input_ids": [10**40], "loss_mask": [1]}, "outside the target's vocabulary"),
    "mask 2": ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "loss_mask[1] is 2, it must be 0 or 1"),
    "mask -1": ({"input_ids": [1], "loss_mask": [-1]}, "loss_mask[0] is -1, it must be 0 or 1"),
    "mask float": ({"input_ids": [1], "loss_mask": [0.5]}, "loss_mask[0] must be an integer, it is the number 0.5"),
    "mask text": ({"input_ids": [1], "loss_mask": ["1"]}, "loss_mask[0] must be an integer, it is the text '1'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows(case: str, tmp_path: Path) -> None:
    row, reason = BAD[case]
    good = {"messages": TALK}
    rows = read(write_jsonl(tmp_path / "a.jsonl", [good, "", row, good]))
    assert list(rows) == [1, 3, 4] and rows[1] == rows[4] == TALK
    assert reason in rows[3] and len(rows[3]) < 300


def test_parquet_equals_jsonl(tmp_path: Path) -> None:
    rows = [
        {"messages": TALK},
        {"messages": [{"role": "system", "content": "s"}, *turns("q", "a é", "b")]},
        {"prompt": "p", "response": "r"},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "messages": TALK},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1]},
        {"input_ids": [1, 200], "loss_mask": [1, 1], "extra": 3.5},
        {"messages": [{"role": "assistant", "content": None}]},
        {"extra": 2.0},
        {"messages": []},
    ]
    by_line = read(write_jsonl(tmp_path / "a.jsonl", rows))
    parquet = read(write_parquet(tmp_path / "b.parquet", rows))
    assert list(parquet) == list(by_line) == list(range(1, 10))
    # A Parquet row has all columns, so that a reason which lists the keys of a row differs.
    assert {line: row for line, row in parquet.items() if line != 8} == {
        line: row for line, row in by_line.items() if line != 8
    }
    assert "null" in parquet[8]


def test_parquet_of_other_columns_or_no_parquet(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"b\.parquet: has no column of .*; its columns are: text"):
        read(write_parquet(tmp_path / "b.parquet", [{"text": "t"}]))
    broken = tmp_path / "c.parquet"
    broken.write_bytes(b"PAR1 nothing of the kind")
    with pytest.raises(ValueError, match=r"c\.parquet: cannot be read as Parquet"):
        read(broken)
    whole = write_parquet(tmp_path / "d.parquet", [{"prompt": "p", "response": "r"}] * 50).read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"c\.parquet: cannot be read as Parquet"):
        read(broken)


def test_empty_files(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", b""), ("b.jsonl", b"\n \r\n\n"), ("c.json", b"\xef\xbb\xbf\n")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: the data file is empty"):
            read(path)
    empty = write_parquet(tmp_path / "d.parquet", [{"prompt": "p", "response": "r"}][:0])
    with pytest.raises(ValueError, match="d.parquet"):
        read(empty)


def test_find_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.parquet", "sub/deep/d.json", ".hidden/e.jsonl", "notes.md", "x[1].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def names(paths: Any) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in find_files(paths)]

    assert names(tmp_path / "b.jsonl") == ["b.jsonl"]
    assert names([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"]) == ["b.jsonl", "a.jsonl"]
    assert names(f"{tmp_path}/?.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/x[1].jsonl") == ["x[1].jsonl"]
    assert names(f"{tmp_path}/**/*.json*") == ["a.jsonl", "b.jsonl", "sub/deep/d.json", "x[1].jsonl"]
    assert names(str(tmp_path)) == ["a.jsonl", "b.jsonl", "sub/c.parquet", "sub/deep/d.json", "x[1].jsonl"]
    monkeypatch.chdir(tmp_path)
    assert find_files("a.jsonl") == [Path("a.jsonl")]


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").touch()
    for paths, reason in (
        (f"{tmp_path}/none.jsonl", "none.jsonl: no such data file; check data.train_path"),
        ([f"{tmp_path}/notes.md"], "notes.md: unknown kind of data file"),
        (f"{tmp_path}/*.jsonl", "no such data file"),
        (f"{tmp_path}/empty", "holds no data file"),
        ("", "path of a data file is empty"),
        ([], "no data file is given"),
    ):
        with pytest.raises(ValueError, match=reason.replace(".", r"\.")):
            find_files(paths)


def test_a_row_error_is_a_value_error() -> None:
    with pytest.raises(RowError):
        parse_row(3, 10)
    assert issubclass(RowError, ValueError)
