"""The manifest of a checkpoint folder: its meta data, and size and hash of every file, checked when it is read."""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash.checkpoints.meta import CheckpointMeta
from dflash.drafter.shape import DrafterShape

META_FILE = "meta.json"
_FORMAT = 2
_HASH = "sha256"  # twice as fast as blake2b on a CPU with SHA instructions; either lets other threads run


def read_meta(folder: Path) -> CheckpointMeta:
    """What a checkpoint says of itself; compares the files' sizes, not their contents.

    Raises ValueError naming the folder and what is wrong with it.
    """
    return _to_meta(folder, _read_manifest(folder))


def verify(folder: Path) -> CheckpointMeta:
    """Like `read_meta`, but reads and hashes every file, so that a changed byte is found.

    Raises ValueError naming the folder and the damaged file.
    """
    contents = _read_manifest(folder)
    meta = _to_meta(folder, contents)
    for name, expected in contents["files"].items():
        try:
            actual = _hash_file(folder / name)
        except OSError as error:
            raise _damaged(folder, f"{name} cannot be read: {error.strerror}") from error
        if actual != expected[_HASH]:
            raise _damaged(folder, f"the contents of {name} are not those that were written")
    return meta


def write_manifest(folder: Path, meta: CheckpointMeta) -> None:
    """Bring all files of a new checkpoint to disk for good, and describe them in a last one."""
    files = {}
    for path in sorted(folder.iterdir()):
        # Also those that were synced by their writer: DCP syncs its index without flushing it first.
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, _HASH: _hash_file(path)}
    contents = {**asdict(meta), "files": files}
    text = json.dumps({"format": _FORMAT, _HASH: _hash_of(contents), **contents}, indent=1)
    path = folder / META_FILE
    path.write_text(text, encoding="utf-8")
    sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Make a file's contents, or a folder's entries, outlast a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest's contents, once it agrees with its own hash and the files have the sizes it tells."""
    try:
        contents = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        found = contents.pop("format")
    except FileNotFoundError:
        raise _damaged(folder, f"{META_FILE} is missing") from None
    except OSError as error:
        raise _damaged(folder, f"{META_FILE} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # no text, no JSON, or JSON of another kind
        raise _damaged(folder, f"{META_FILE} is no manifest: {error}") from error
    if found != _FORMAT:
        raise ValueError(f"{folder}: was written by another version of this program")
    if contents.pop(_HASH, None) != _hash_of(contents):
        raise _damaged(folder, f"the contents of {META_FILE} are not those that were written")
    for name, expected in contents["files"].items():
        try:
            num_bytes = (folder / name).stat().st_size
        except FileNotFoundError:
            raise _damaged(folder, f"{name} is missing") from None
        except OSError as error:
            raise _damaged(folder, f"{name} cannot be read: {error.strerror}") from error
        if num_bytes != expected["bytes"]:
            raise _damaged(folder, f"{name} has {num_bytes} bytes, not the {expected['bytes']} that were written")
    return contents


def _to_meta(folder: Path, contents: dict[str, Any]) -> CheckpointMeta:
    fields = {key: value for key, value in contents.items() if key != "files"}
    try:
        return CheckpointMeta(**{**fields, "shape": DrafterShape(**fields["shape"])})
    except (LookupError, TypeError) as error:
        raise _damaged(folder, f"{META_FILE} is no manifest: {error}") from error


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(f"{folder} is damaged: {what}")


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, _HASH).hexdigest()


def _hash_of(contents: dict[str, Any]) -> str:
    return hashlib.new(_HASH, json.dumps(contents, sort_keys=True).encode()).hexdigest()
