"""Folders that are made whole or not at all, by several processes at once, on a disk that may fill."""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_LOCK_SUFFIX = ".lock"


@contextmanager
def building_folder(folder: Path) -> Iterator[Path]:
    """A folder to build in, beside the one it is to become; gone at the end unless it was renamed.

    A file beside it stays locked meanwhile, so that others can tell it from what a killed build left.
    """
    building = folder.with_name(f".{folder.name}.building-{os.getpid()}-{secrets.token_hex(4)}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new_lock, lock_path = (building.with_name(building.name + suffix) for suffix in (".new", _LOCK_SUFFIX))
    try:
        with new_lock.open("w") as lock:
            with suppress(OSError):  # a file system without locks: then nothing abandoned is ever removed
                fcntl.flock(lock, fcntl.LOCK_EX)
                new_lock.rename(lock_path)  # only now do others look at it
            building.mkdir()
            yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)  # there still after a failure, or if another was first
        for path in (new_lock, lock_path):
            with suppress(OSError):
                path.unlink()


def remove_abandoned(folder: Path) -> None:
    """Remove what builds of this corpus left that were killed; those under way, on any machine, hold their locks."""
    for lock_path in folder.parent.glob(f".{folder.name}.building-*{_LOCK_SUFFIX}"):
        with suppress(OSError), lock_path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.with_name(lock_path.name.removesuffix(_LOCK_SUFFIX)), ignore_errors=True)
            lock_path.unlink()


def remove_folder(folder: Path) -> None:
    """Take a folder away under another name first, so that nobody finds half of it."""
    damaged = folder.with_name(f".{folder.name}.damaged-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):  # another run may have found it first
        folder.rename(damaged)
    shutil.rmtree(damaged, ignore_errors=True)


def explain(error: OSError, folder: Path) -> str:
    """The reason, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        with suppress(OSError):
            reason += f" ({shutil.disk_usage(folder.parent).free >> 20} MiB are free)"
        return f"{reason}; make room, or name another folder"
    return f"{reason}; name a folder that can be written"


def file_state(file: Path) -> tuple[int, ...]:
    """What changes with a file's contents."""
    try:
        stat = file.stat()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror or error}") from error
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def sync(file: IO[Any]) -> None:
    """After a power cut, a folder's name may be there before the contents of its files, unless these came first."""
    file.flush()
    os.fsync(file.fileno())
