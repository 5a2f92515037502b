"""Rows of JSONL and Parquet files, told apart by their keys and checked, each with its file and line."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_JSON_SUFFIXES = (".jsonl", ".json")
_PARQUET_SUFFIXES = (".parquet",)
_KEYS = ("input_ids", "loss_mask", "messages", "prompt", "response")
# Rows of a Parquet file are turned into Python objects a few at a time: one of them may be a document of 100k tokens.
_PARQUET_BATCH_ROWS = 64


class RowError(ValueError):
    """One row that cannot be used, and why; it is counted and skipped, the run goes on."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: its line in a JSONL file, its row number in a Parquet file, both counted from 1."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """A document that is tokens already: `input_ids` i32 [T], `loss_mask` u8 [T] of 0 and 1."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """A conversation with at least one assistant turn; each message has a `role` and a `content`, both text."""

    messages: list[dict[str, Any]]


def find_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """Data files behind paths, folders (searched through) and globs, in the order given, each sorted by name.

    Raises ValueError for a path that leads to no file, or to a file that is neither JSONL nor Parquet.
    """
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ValueError("no data file is given; set data.train_path")
    files = [file for path in given for file in _expand(str(path))]
    for file in files:
        if file.suffix.lower() not in _JSON_SUFFIXES + _PARQUET_SUFFIXES:
            known = ", ".join(_JSON_SUFFIXES + _PARQUET_SUFFIXES)
            raise ValueError(f"{file}: unknown kind of data file; its name must end in one of {known}")
    return files


def _expand(path: str) -> list[Path]:
    if not path.strip():
        raise ValueError("the path of a data file is empty; set data.train_path, and data.eval_path if one is used")
    # A path that exists is taken as it is, although it may hold the characters of a glob.
    literal = Path(path).expanduser()
    found = (
        [literal] if literal.exists() else [Path(match) for match in sorted(glob.glob(str(literal), recursive=True))]
    )
    files = []
    for entry in found:
        files += _files_of_folder(entry) if entry.is_dir() else [entry]
    if not found:
        raise ValueError(f"{path}: no such data file; check data.train_path and data.eval_path")
    if not files:
        raise ValueError(f"{path}: holds no data file; its files must end in .jsonl, .json or .parquet")
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    """Data files anywhere below a folder; hidden ones (a download's cache, say) are no data."""
    suffixes = _JSON_SUFFIXES + _PARQUET_SUFFIXES
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and file.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def read_rows(path: Path, vocab_size: int) -> Iterator[tuple[Place, TokenRow | ConversationRow | RowError]]:
    """Rows of one file in its order, a bad one as the error that says what is wrong with it.

    Raises ValueError when the file cannot be read or holds no row.
    """
    is_parquet = path.suffix.lower() in _PARQUET_SUFFIXES
    num_rows = 0
    for line, record in _read_parquet(path) if is_parquet else read_json_lines(path):
        num_rows += 1
        row: TokenRow | ConversationRow | RowError
        if isinstance(record, RowError):
            row = record
        else:
            try:
                row = parse_row(record, vocab_size)
            except RowError as error:
                row = error
        yield Place(path, line), row
    if num_rows == 0:
        raise ValueError(f"{path}: the data file is empty; it must hold at least one row")


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Line numbers, from 1, and JSON values of a file's lines that are not blank; a RowError for what is no JSON."""
    try:
        # Split at b"\n" alone: text mode would also split where a string holds a lone carriage return.
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                raw = raw.removeprefix(b"\xef\xbb\xbf").strip()
                if raw:
                    yield line, _parse_json(raw)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse_json(raw: bytes) -> Any:
    try:
        # Decoded here, since json.loads(bytes) would guess at UTF-16 and UTF-32.
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return RowError(f"not UTF-8: {error.reason} at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return RowError(f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets nested without end
        return RowError(f"not usable JSON: {error}")


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    # Imported here because it is slow to load and most ranks only open a finished corpus.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in _KEYS]
            if not columns:
                has = ", ".join(file.schema_arrow.names) or "none"
                raise ValueError(f"{path}: has no column of {', '.join(_KEYS)}; its columns are: {has}")
            line = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns):
                for record in batch.to_pylist():
                    line += 1
                    yield line, record
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {error}") from error


def parse_row(record: Any, vocab_size: int) -> TokenRow | ConversationRow:
    """Row of a parsed JSON value; tokens win over `messages`, and those over `prompt` and `response`.

    A null counts as absent, since in Parquet every row has every column. Raises RowError.
    """
    if not isinstance(record, dict):
        raise RowError(f"a row must be a JSON object, this is {_kind(record)}")
    present = {key for key in _KEYS if record.get(key) is not None}
    if {"input_ids", "loss_mask"} <= present:
        return _token_row(record["input_ids"], record["loss_mask"], vocab_size)
    if "messages" in present:
        return ConversationRow(_checked_messages(record["messages"]))
    if {"prompt", "response"} <= present:
        for key in ("prompt", "response"):
            if not isinstance(record[key], str):
                raise RowError(f"{key} must be text, it is {_kind(record[key])}")
        turns = (("user", record["prompt"]), ("assistant", record["response"]))
        return ConversationRow([{"role": role, "content": content} for role, content in turns])
    has = ", ".join(repr(key) for key in list(record)[:8]) or "no key"
    nulls = [key for key in _KEYS if key in record and record[key] is None]
    note = f" ({', '.join(nulls)} null)" if nulls else ""
    raise RowError(f"needs input_ids and loss_mask, or messages, or prompt and response; it has {has}{note}")


def _token_row(input_ids: Any, loss_mask: Any, vocab_size: int) -> TokenRow:
    for name, values, allowed in (("input_ids", input_ids, (int,)), ("loss_mask", loss_mask, (int, bool))):
        if not isinstance(values, list):
            raise RowError(f"{name} must be a list, it is {_kind(values)}")
        if not set(map(type, values)) <= set(allowed):
            place, value = next((i, value) for i, value in enumerate(values) if type(value) not in allowed)
            raise RowError(f"{name}[{place}] must be an integer, it is {_kind(value)}")
    if not input_ids:
        raise RowError("input_ids is empty")
    if len(input_ids) != len(loss_mask):
        raise RowError(f"input_ids has {len(input_ids)} entries, loss_mask {len(loss_mask)}; they must agree")
    if min(input_ids) < 0 or max(input_ids) >= vocab_size:
        place, value = next((i, value) for i, value in enumerate(input_ids) if not 0 <= value < vocab_size)
        raise RowError(f"input_ids[{place}] is {value}, outside the target's vocabulary of {vocab_size} tokens")
    if min(loss_mask) < 0 or max(loss_mask) > 1:
        place, value = next((i, value) for i, value in enumerate(loss_mask) if value not in (0, 1))
        raise RowError(f"loss_mask[{place}] is {value}, it must be 0 or 1")
    return TokenRow(np.array(input_ids, dtype=np.int32), np.array(loss_mask, dtype=np.uint8))


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise RowError(f"messages must be a list, it is {_kind(messages)}")
    if not messages:
        raise RowError("messages is empty")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RowError(f"message {number} must be an object with role and content, it is {_kind(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                problem = f"is {_kind(message[key])}" if key in message else "is missing"
                raise RowError(f"message {number}: {key} must be text, it {problem}")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowError("the conversation has no assistant turn")
    # What else a message holds (tool calls, say) is the template's to render. In Parquet all messages have all keys,
    # those that one has not being null, and templates ask whether a key is there.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _kind(value: Any) -> str:
    """How a JSON value is called in an error: its kind, and the value itself where that is short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return (
        f"the text {shown}"
        if isinstance(value, str)
        else f"the number {shown}"
        if isinstance(value, int | float)
        else shown
    )
