"""Reads what `py-spy record -f raw` writes, and what py-spy said while it wrote it."""

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

_LINE = re.compile(rb"(.*?)[ ]+([0-9]{1,18})", re.DOTALL)
_PROCESS = re.compile(r'process [0-9]+:"')
_THREAD = re.compile(r"thread \((?:0x[0-9A-Fa-f]+|[0-9]+)\)(?:: (?P<name>.*))?", re.DOTALL)
_LOCATION = re.compile(r"(.*):([0-9]{1,9})", re.DOTALL)
_MAX_PIECES = 200  # a name that holds more semicolons is none
# Brackets that do not open anything: C++ operators and arrows.
_NO_BRACKET = re.compile(r"operator\s*(?:<=>|<<=?|>>=?|<=?|>=?|->\*?|\(\)|\[\])|->")
_BEHIND = re.compile(r"([0-9.]+)\s*(ns|µs|us|ms|s) behind in sampling")
_RESULT = re.compile(r"Samples: ([0-9]+) Errors: ([0-9]+)")
_MESSAGE = re.compile(r"py-spy> |Sampling process [0-9]+ times|Wrote raw |[0-9.]+\s*\w*s behind in sampling|Error: ")
_UNITS_S = {"ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Frame:
    """A function and where it is; `file` is None where py-spy names none."""

    name: str
    file: str | None = None
    line: int | None = None

    @property
    def function(self) -> str:
        """The function whatever its line: `name (file)`."""
        return self.name if self.file is None else f"{self.name} ({self.file})"


@dataclass(frozen=True, slots=True)
class Stack:
    """Frames from the root to the leaf, seen `count` times; `processes` and `thread` are root frames as written."""

    processes: tuple[str, ...]
    thread: str | None
    frames: tuple[Frame, ...]
    count: int

    @property
    def thread_name(self) -> str | None:
        """The thread's name without its number, where py-spy knew it."""
        found = _THREAD.fullmatch(self.thread or "")
        return found["name"].strip('"') if found and found["name"] else None


@dataclass(frozen=True, slots=True)
class BadLine:
    number: int  # from 1
    text: str
    reason: str


@dataclass(slots=True)
class Messages:
    """What py-spy said of its own work."""

    num_behind: int = 0
    max_behind_s: float = 0.0
    num_errors: int = 0  # stacks that it could not read
    errors: list[str] = field(default_factory=list)

    def hear(self, text: str) -> None:
        """Take in one line of py-spy's own output."""
        for amount, unit in _BEHIND.findall(text):
            self.num_behind += 1
            try:
                self.max_behind_s = max(self.max_behind_s, float(amount) * _UNITS_S[unit])
            except ValueError:
                continue  # that it fell behind counts, whatever it wrote for the time
        for _, num_errors in _RESULT.findall(text):
            self.num_errors += int(num_errors[:18])
        if "Error: " in text:
            self.errors.append(text.strip())


@dataclass(slots=True)
class RawProfile:
    """One file: its stacks, its bad lines and py-spy's messages."""

    path: str
    stacks: list[Stack] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    messages: Messages = field(default_factory=Messages)

    @property
    def num_samples(self) -> int:
        return sum(stack.count for stack in self.stacks)


def read_profile(path: str) -> RawProfile:
    """The profile in a file, `-` for standard input, with py-spy's output beside it (see `log_paths`).

    Raises ValueError that names the file when it cannot be read or holds no sample.
    """
    profile = RawProfile(path)
    try:
        data = _read(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    for log in log_paths(path):
        try:
            text = log.read_bytes().decode("utf-8", "backslashreplace")
        except OSError:
            continue
        for line in re.split(r"[\r\n]+", text):
            profile.messages.hear(line)
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        _read_line(profile, number, line.strip(b" \t\r"))
    if profile.num_samples == 0:
        raise ValueError(f"{path}: {_why_nothing(profile, data)}")
    return profile


def log_paths(path: str) -> list[Path]:
    """Files beside a profile that hold what py-spy said: FILE.log, FILE.err, FILE.stderr, or so named for FILE's."""
    if path == "-":
        return []
    file = Path(path)
    stems = [file.name] if file.suffix in ("", ".log", ".err", ".stderr") else [file.name, file.stem]
    candidates = [file.with_name(stem + ending) for stem in stems for ending in (".log", ".err", ".stderr")]
    return [candidate for candidate in candidates if candidate.is_file()]


def split_frames(text: str) -> list[str]:
    """Frames of a stack, root first; a semicolon within brackets or in a process's command line parts nothing."""
    pieces = text.split(";")
    frames: list[str] = []
    start = 0
    while start < len(pieces):
        end = _end_of_frame(pieces, start)
        frames.append(";".join(pieces[start:end]))
        start = end
    return frames


@cache
def parse_frame(text: str) -> Frame:
    """A frame as py-spy writes it: `name (file:line)`, `name (file)` or `name`; names may contain all of these."""
    if not text.endswith(")"):
        return Frame(text)
    start = _opening_bracket(text)
    if start < 2 or text[start - 1] != " ":
        return Frame(text)
    name, inside = text[: start - 1], text[start + 1 : -1]
    if not inside:
        return Frame(text)
    found = _LOCATION.fullmatch(inside)
    return Frame(name, found[1], int(found[2])) if found and found[1] else Frame(name, inside)


def _read(path: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    with open(path, "rb") as file:
        return file.read()


def _why_nothing(profile: RawProfile, data: bytes) -> str:
    if not data.strip():
        reason = "is empty"
    elif profile.bad_lines:
        first = profile.bad_lines[0]
        more = f"{len(profile.bad_lines)} bad lines, the first is line {first.number} ({first.reason})"
        reason = f"has no sample: {more}: {first.text[:80]!r}"
    else:
        reason = "has no sample"
    return reason + (f"; {' '.join(profile.messages.errors[0].split())}" if profile.messages.errors else "")


def _read_line(profile: RawProfile, number: int, line: bytes) -> None:
    if not line:
        return
    text = line.decode("utf-8", "backslashreplace")
    if _MESSAGE.match(text):
        profile.messages.hear(text)
        return
    if "py-spy> " in text:  # both outputs in one file, a stack torn by a message
        profile.messages.hear(text)
        profile.bad_lines.append(BadLine(number, text, "a message of py-spy within a stack"))
        return
    found = _LINE.fullmatch(line)
    if found is None:
        profile.bad_lines.append(BadLine(number, text, "no count at its end"))
        return
    names = split_frames(found[1].decode("utf-8", "backslashreplace"))
    if not all(name.strip() for name in names):
        profile.bad_lines.append(BadLine(number, text, "a frame without a name" if found[1] else "no stack"))
        return
    profile.stacks.append(_stack(names, int(found[2])))


def _stack(names: list[str], count: int) -> Stack:
    first = 0
    while first < len(names) and _PROCESS.match(names[first]):
        first += 1
    processes, thread = tuple(names[:first]), None
    if first < len(names) and _THREAD.fullmatch(names[first]):
        thread = names[first]
        first += 1
    return Stack(processes, thread, tuple(parse_frame(name) for name in names[first:]), count)


def _end_of_frame(pieces: list[str], start: int) -> int:
    """Index behind the last piece of the frame that begins at `start`."""
    piece = pieces[start]
    if _PROCESS.match(piece):
        closing = (i for i in range(start, len(pieces)) if pieces[i].endswith('"'))
        return next((i + 1 for i in closing if i > start or piece.count('"') > 1), start + 1)
    depths = _depths(piece)
    if max(depths) <= 0:
        return start + 1
    for end in range(start + 1, min(start + _MAX_PIECES, len(pieces))):
        depths = tuple(map(sum, zip(depths, _depths(pieces[end]), strict=True)))
        if not any(depths):
            return end + 1
    return start + 1  # never closed: an odd name, not a semicolon within it


@cache
def _depths(piece: str) -> tuple[int, ...]:
    """Brackets of each kind that are left open."""
    text = _NO_BRACKET.sub("", piece)
    return tuple(text.count(opening) - text.count(closing) for opening, closing in ("()", "[]", "{}", "<>"))


def _opening_bracket(text: str) -> int:
    """Index of the bracket that the last one closes, -1 where there is none."""
    depth = 0
    for i in range(len(text) - 1, -1, -1):
        depth += (text[i] == ")") - (text[i] == "(")
        if depth == 0:
            return i
    return text.rfind(" (") + 1 if " (" in text else -1
