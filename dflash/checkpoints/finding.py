"""Where a run's checkpoints lie, which of them are whole, which one to go on from, and what is cleared away."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dflash.checkpoints.manifest import META_FILE, read_meta, verify

_PARTIAL = ".partial-"  # folders that are being written, or being removed
_DAMAGED = "damaged-"  # folders that a resumed run has passed over
_REPLACED = "-replaced"  # a checkpoint whose step was saved again, for the moment until the new one has its name


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:06d}"


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole."""
    return folder.with_name(_PARTIAL + folder.name)


def replaced_folder(folder: Path) -> Path:
    """What a checkpoint of the same step is called while a new one takes its name: it is found there too."""
    return folder.with_name(folder.name + _REPLACED)


def list_checkpoints(run_dir: Path, report: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Checkpoints of a run whose files are there in full size, oldest first; `report` is told of the others."""
    whole: dict[int, Path] = {}
    # In this order the folder that a step was saved to again is met after the one that it replaces.
    for path in sorted((run_dir / "checkpoints").glob("step-*"), key=lambda path: not path.name.endswith(_REPLACED)):
        try:
            whole[read_meta(path).step] = path
        except ValueError as error:
            report(f"passed over: {error}")
    return [whole[step] for step in sorted(whole)]


def find_checkpoint(resume: str, run_dir: Path, report: Callable[[str], None]) -> Path | None:
    """Checkpoint that `resume` (no | auto | a checkpoint folder) names, every file verified; None: from nothing.

    `auto` takes the newest whole one and reports the damaged ones that it passed over. Raises ValueError when it finds
    damaged ones alone, and for a named folder that is damaged, is no checkpoint or is not the run's newest whole one.
    """
    if resume == "no":
        return None
    if resume == "auto":
        return _newest_whole(run_dir, report)
    folder = Path(resume).expanduser().absolute()
    if not (folder / META_FILE).exists():
        raise ValueError(f"resume: {folder} is no checkpoint; allowed here: no, auto, or a checkpoint folder")
    try:
        verify(folder)
    except ValueError as error:
        raise ValueError(f"resume: {error}; name another checkpoint, or set resume=auto") from error
    if folder.parent == run_dir / "checkpoints" and folder != _newest_whole(run_dir, report):
        raise ValueError(f"resume: run_dir holds later checkpoints than {folder.name}; go on from it in a new run_dir")
    return folder


def restore_replaced(run_dir: Path) -> None:
    """Give a checkpoint its name back that a kill left without: one rank calls it, before any looks for checkpoints."""
    for path in (run_dir / "checkpoints").glob(f"step-*{_REPLACED}"):
        published = path.with_name(path.name.removesuffix(_REPLACED))
        if not published.exists():
            path.rename(published)


def clean_up(run_dir: Path, resumed: Path | None) -> None:
    """Remove what an interrupted save or removal left; one rank calls it, before any rank saves.

    Folders beyond the checkpoint that the run goes on from were passed over as damaged. They are renamed, so that they
    are not taken for the newest ones when old checkpoints are removed.
    """
    folder = run_dir / "checkpoints"
    for path in folder.glob(f"step-*{_REPLACED}"):
        remove(path)
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
    if resumed is not None and resumed.parent == folder:
        for path in folder.glob("step-*"):
            if _step_of(path) > _step_of(resumed):
                aside = path.with_name(_DAMAGED + path.name)
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)


def remove(folder: Path) -> None:
    """Remove a checkpoint such that a kill halfway leaves nothing that looks like a damaged one."""
    doomed = partial_folder(folder.with_name(f"removed-{folder.name}"))
    with suppress(FileNotFoundError):
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _step_of(folder: Path) -> int:
    """The step that a checkpoint's name tells; -1 for other names."""
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1


def _newest_whole(run_dir: Path, report: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies, `report` being told of the damaged ones."""
    damaged: list[str] = []

    def pass_over(text: str) -> None:
        damaged.append(text)
        report(text)

    for path in reversed(list_checkpoints(run_dir, pass_over)):
        try:
            verify(path)
        except ValueError as error:
            pass_over(f"passed over: {error}")
        else:
            return path
    if damaged:
        raise ValueError(
            f"resume: all {len(damaged)} checkpoints in {run_dir / 'checkpoints'} are damaged, the last of them: "
            f"{damaged[-1].removeprefix('passed over: ')}; remove them, or set another run_dir, to start from nothing"
        )
    return None
