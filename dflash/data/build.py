"""Builds a corpus: rows to tokens, streamed to disk by one process, once for all runs on the same data."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.config import Overlong
from dflash.data.cache import building_folder, explain, file_state, remove_abandoned, remove_folder, sync
from dflash.data.chat import ConversationEncoder, Rendering
from dflash.data.corpus import ARRAYS, META_FILE, read_meta
from dflash.data.keys import content_key
from dflash.data.rows import ConversationRow, Place, RowError, TokenRow, find_files, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Raised when the same rows would give other documents than before, so that an old cache is not taken for a new one.
_FORMAT_VERSION = 1
BAD_ROWS_FILE = "bad_rows.txt"
_NUM_BAD_ROWS_SAID = 20
_NUM_BAD_ROWS_IN_ERROR = 5
# The tokenizer works through this many rows at once, on all cores, or fewer if they hold this many characters and
# tokens together; no more than that is held in memory.
_ROWS_AT_ONCE = 256
_SIZE_AT_ONCE = 4_000_000
_PROGRESS_INTERVAL_S = 15.0


@dataclass(slots=True)
class _Counts:
    """What became of the rows; a conversation may become several documents."""

    num_rows: int = 0
    num_bad_rows: int = 0
    num_split_rows: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    num_supervised_tokens: int = 0
    num_cut: int = 0
    num_overlong_skipped: int = 0
    num_without_pair: int = 0
    first_split: str = ""
    first_overlong: str = ""
    first_without_pair: str = ""


def build_corpus(
    paths: str | Path | Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase | None",
    *,
    max_length: int,
    overlong: Overlong,
    max_bad_fraction: float,
    vocab_size: int,
    cache_dir: Path | str,
    report: Callable[[str], None],
) -> Path:
    """Folder of the corpus for `open_corpus`, built unless the cache has it; what was found is said either way.

    `paths` are files, folders and globs; `max_length` in tokens; ids must lie below `vocab_size`. Several processes
    may build the same corpus at once: each writes a folder of its own, and the first to finish gives its one the name.
    Raises ValueError for what makes the data useless: no rows, too many bad ones, text without a chat template.
    """
    files = find_files(paths)
    states = [file_state(file) for file in files]
    made_of = _made_of(files, tokenizer, max_length, overlong, vocab_size)
    fingerprint = _fingerprint(made_of)
    folder = Path(cache_dir) / fingerprint
    try:
        if folder.exists() and not _is_whole(folder):
            report(f"data: the cached corpus {folder} is damaged; it is built anew")
            remove_folder(folder)
        if not folder.exists():
            remove_abandoned(folder)
            with building_folder(folder) as building:
                builder = _Builder(building, tokenizer, max_length, overlong, vocab_size, report)
                lines = builder.build(files, max_bad_fraction, folder)
                for file, state in zip(files, states, strict=True):
                    if file_state(file) != state:
                        raise ValueError(f"{file}: changed while it was read; run again once it is complete")
                _write_meta(building, fingerprint, made_of, builder.counts, lines)
                try:
                    building.rename(folder)
                except OSError:
                    if not _is_whole(folder):
                        raise
            for line in lines:
                report(line)
            return folder
    except OSError as error:  # what cannot be read of the data is a ValueError that names its file
        raise ValueError(f"data.cache_dir: {folder.parent} cannot be written: {explain(error, folder)}") from error
    meta = read_meta(folder)
    for line in _bad_rows(folder, _NUM_BAD_ROWS_SAID):
        report(f"data: bad row {line}")
    _check_bad_fraction(folder, meta["num_bad_rows"], meta["num_rows"], max_bad_fraction)
    for line in meta["lines"]:
        report(line)
    report(f"data: tokenised before, reused from {folder}")
    return folder


class _Builder:
    """Writes the arrays of a corpus into a folder, document by document."""

    def __init__(
        self,
        folder: Path,
        tokenizer: "PreTrainedTokenizerBase | None",
        max_length: int,
        overlong: Overlong,
        vocab_size: int,
        report: Callable[[str], None],
    ) -> None:
        assert max_length >= 1 and vocab_size >= 1
        self.counts = _Counts()
        self._folder = folder
        self._tokenizer = tokenizer
        self._encoder: ConversationEncoder | None = None
        self._max_length = max_length
        self._overlong = overlong
        self._vocab_size = vocab_size
        self._report = report
        # Rows in their order, each with its key and what it becomes: tokens, or text still to be tokenised.
        self._waiting: list[tuple[Place, int, TokenRow | list[Rendering]]] = []
        self._size = 0

    def build(self, files: list[Path], max_bad_fraction: float, named: Path) -> list[str]:
        """Reads all files and returns the lines that say what was found; `named` is the folder's name to be."""
        said_s = time.monotonic()
        with ExitStack() as stack:
            self._files = {name: stack.enter_context((self._folder / f"{name}.bin").open("wb")) for name in ARRAYS}
            self._bad_rows = stack.enter_context((self._folder / BAD_ROWS_FILE).open("w", encoding="utf-8"))
            self._files["offsets"].write(np.int64(0).tobytes())
            for file in files:
                for place, row in read_rows(file, self._vocab_size):
                    self._take(place, row)
                    if time.monotonic() - said_s > _PROGRESS_INTERVAL_S:
                        said_s = time.monotonic()
                        self._report(f"data: {self.counts.num_rows:,} rows read, now at {place}")
            self._flush()
            for file in self._files.values():
                sync(file)
        counts = self.counts
        _check_bad_fraction(self._folder, counts.num_bad_rows, counts.num_rows, max_bad_fraction)
        lines = _summary(counts, self._max_length, named)
        if counts.num_documents == 0:
            raise ValueError("no row of the data can be trained on; " + "; ".join(lines))
        return lines

    def _take(self, place: Place, row: TokenRow | ConversationRow | RowError) -> None:
        self.counts.num_rows += 1
        if isinstance(row, RowError):
            self._bad(place, row)
        elif isinstance(row, TokenRow):
            supervised = np.flatnonzero(row.loss_mask)
            prompt = row.input_ids[: supervised[0] if len(supervised) else None]
            self._waiting.append((place, content_key((prompt if len(prompt) else row.input_ids).tobytes()), row))
            self._size += len(row.input_ids)
        else:
            try:
                renderings = self._encoder_for(place).render(row.messages)
            except RowError as error:
                self._bad(place, error)
            else:
                self._waiting.append((place, _conversation_key(row), renderings))
                self._size += sum(len(rendering.text) for rendering in renderings)
        if len(self._waiting) >= _ROWS_AT_ONCE or self._size >= _SIZE_AT_ONCE:
            self._flush()

    def _encoder_for(self, place: Place) -> ConversationEncoder:
        if self._encoder is None:
            try:
                self._encoder = ConversationEncoder(self._tokenizer)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
        return self._encoder

    def _flush(self) -> None:
        """Tokenise what waits and write it, in the order of the rows."""
        texts = [rendering for _, _, held in self._waiting if isinstance(held, list) for rendering in held]
        tokenised = iter(self._encoder.tokenize(texts)) if texts and self._encoder is not None else iter(())
        for place, key, held in self._waiting:
            rows = [next(tokenised) for _ in held] if isinstance(held, list) else [held]
            largest = max((int(row.input_ids.max()) for row in rows if len(row.input_ids)), default=0)
            if largest >= self._vocab_size:
                told = f"the tokenizer gives token id {largest}, but the target's vocabulary has {self._vocab_size}"
                self._bad(place, RowError(told))
                continue
            if len(rows) > 1:
                self.counts.num_split_rows += 1
                self.counts.first_split = self.counts.first_split or str(place)
            for row in rows:
                self._write(place, key, row)
        self._waiting.clear()
        self._size = 0

    def _write(self, place: Place, key: int, row: TokenRow) -> None:
        counts, input_ids, loss_mask = self.counts, row.input_ids, row.loss_mask
        is_overlong = len(input_ids) > self._max_length
        if is_overlong:
            counts.first_overlong = counts.first_overlong or str(place)
            if self._overlong is Overlong.skip:
                counts.num_overlong_skipped += 1
                return
            counts.num_cut += 1
            input_ids, loss_mask = input_ids[: self._max_length], loss_mask[: self._max_length]
        # No anchor fits without two supervised tokens side by side: the anchor's own, and the first it predicts.
        if not (loss_mask[:-1] & loss_mask[1:]).any():
            counts.num_without_pair += 1
            counts.first_without_pair = counts.first_without_pair or str(place)
            return
        counts.num_documents += 1
        counts.num_tokens += len(input_ids)
        counts.num_supervised_tokens += int(loss_mask.sum(dtype=np.int64))
        self._files["input_ids"].write(input_ids.tobytes())
        self._files["loss_mask"].write(loss_mask.tobytes())
        self._files["offsets"].write(np.int64(counts.num_tokens).tobytes())
        self._files["keys"].write(np.int64(key).tobytes())

    def _bad(self, place: Place, error: RowError) -> None:
        self.counts.num_bad_rows += 1
        line = " ".join(f"{place}: {error}".split()).encode("utf-8", "replace").decode("utf-8")
        self._bad_rows.write(line + "\n")
        if self.counts.num_bad_rows <= _NUM_BAD_ROWS_SAID:
            self._report(f"data: bad row {line}")


def _summary(counts: _Counts, max_length: int, folder: Path) -> list[str]:
    lines = [
        f"data: {counts.num_rows:,} rows gave {counts.num_documents:,} documents with {counts.num_tokens:,} tokens, "
        f"{counts.num_supervised_tokens:,} of them supervised"
    ]
    if counts.num_bad_rows:
        share = counts.num_bad_rows / counts.num_rows
        lines.append(
            f"data: {counts.num_bad_rows:,} of {counts.num_rows:,} rows are bad ({share:.2%}) and were skipped; "
            f"all are listed in {folder / BAD_ROWS_FILE}"
        )
    for number, first, what in (
        (counts.num_cut, counts.first_overlong, f"longer than data.max_length={max_length} tokens and were cut"),
        (
            counts.num_overlong_skipped,
            counts.first_overlong,
            f"longer than data.max_length={max_length} tokens and were skipped",
        ),
        (
            counts.num_without_pair,
            counts.first_without_pair,
            "without two supervised tokens side by side, which training takes, and were skipped",
        ),
    ):
        if number:
            lines.append(f"data: {number:,} document(s) were {what} (first: {first})")
    if counts.num_split_rows:
        lines.append(
            f"data: {counts.num_split_rows:,} conversation(s) were cut into one row per assistant turn, since the chat "
            f"template rewrites their earlier turns (first: {counts.first_split})"
        )
    return lines


def _check_bad_fraction(folder: Path, num_bad: int, num_rows: int, max_bad_fraction: float) -> None:
    if num_bad <= max_bad_fraction * num_rows:
        return
    first = "; ".join(_bad_rows(folder, _NUM_BAD_ROWS_IN_ERROR))
    more = "; ..." if num_bad > _NUM_BAD_ROWS_IN_ERROR else ""
    raise ValueError(
        f"{num_bad} of {num_rows} rows of the data are bad ({num_bad / num_rows:.2%}), more than "
        f"data.max_bad_fraction={max_bad_fraction} allows; mend them or raise it: {first}{more}"
    )


def _bad_rows(folder: Path, most: int) -> list[str]:
    """The first of the bad rows listed in a corpus folder."""
    with (folder / BAD_ROWS_FILE).open(encoding="utf-8") as file:
        return [line.rstrip("\n") for line, _ in zip(file, range(most), strict=False)]


def _write_meta(folder: Path, fingerprint: str, made_of: dict[str, Any], counts: _Counts, lines: list[str]) -> None:
    meta = {"fingerprint": fingerprint, "made_of": made_of, "lines": lines, **asdict(counts)}
    with (folder / META_FILE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(meta, indent=1))
        sync(file)


def _is_whole(folder: Path) -> bool:
    try:
        read_meta(folder)
    except ValueError:
        return False
    return (folder / BAD_ROWS_FILE).exists()


def _conversation_key(row: ConversationRow) -> int:
    """Key of what a conversation's first answer answers, or of the whole of it where it begins with an answer."""
    first = next(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    return content_key(json.dumps(row.messages[:first] or row.messages, sort_keys=True, default=str).encode())


def _made_of(
    files: list[Path],
    tokenizer: "PreTrainedTokenizerBase | None",
    max_length: int,
    overlong: Overlong,
    vocab_size: int,
) -> dict[str, Any]:
    """All that a corpus is made of, long things as their hashes, under the names that users know."""
    identity = json.dumps(_tokenizer_identity(tokenizer), sort_keys=True, default=str)
    return {
        "format": _FORMAT_VERSION,
        "data.max_length": max_length,
        "data.overlong": overlong.value,
        "vocabulary size": vocab_size,
        "tokenizer": _hash(identity.encode()),
        "files": [[str(path), _hash_file(path)] for path in files],
    }


def _fingerprint(made_of: dict[str, Any]) -> str:
    """Contents in their order, not names; tokenizer; limits."""
    contents = [content for _, content in made_of["files"]]
    return _hash(json.dumps({**made_of, "files": contents}, sort_keys=True).encode())


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tokenizer_identity(tokenizer: "PreTrainedTokenizerBase | None") -> object:
    """All of a tokenizer that decides which tokens a conversation becomes, as a JSON value."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = tokenizer.get_vocab()
    else:
        state = json.loads(backend.to_str())
        # Set by whichever call came last, and set again by ours.
        del state["truncation"], state["padding"]
    return [type(tokenizer).__name__, state, tokenizer.chat_template, tokenizer.special_tokens_map]
