"""Saving beside the training: a copy between two steps, then files, hashes and one rename in a thread of DCP's."""

import shutil
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from dflash.checkpoints.finding import checkpoint_folder, list_checkpoints, partial_folder, remove, replaced_folder
from dflash.checkpoints.manifest import read_meta, sync, write_manifest
from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.staging import HostCopy


class CheckpointSaver:
    """Writes `<run_dir>/checkpoints/step-NNNNNN` while the training goes on, one checkpoint at a time.

    Every rank of `group` has one and starts and finishes the same saves; the group's first rank publishes and keeps
    the newest `keep`. All that the ranks say to one another they say in DCP's thread, over `group`, which nothing else
    may use; None saves without any process group.
    """

    def __init__(self, run_dir: Path, group: dist.ProcessGroup | None, keep: int) -> None:
        self._run_dir, self._group, self._keep = run_dir, group, keep
        self._host_copy = HostCopy()
        self._saving: tuple[Path, Future[Metadata]] | None = None
        if group is None:
            # Said in DCP's thread, where no context manager of ours could silence it; one process: as intended.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def reserve(self, state: dict[str, Any]) -> None:
        """Get the host memory for states like this one ahead of the first save, which is otherwise the slowest."""
        assert self._saving is None, "the buffers are being written"
        self._host_copy.stage(state)

    def start(self, meta: CheckpointMeta, state: dict[str, Any]) -> None:
        """Copy the state to host memory and begin to write it; it may be changed once this returns.

        Waits for no other rank. Every rank of the group must come here, since the writing waits for all.
        """
        assert self._saving is None, "finish the save before this one first"
        folder = checkpoint_folder(self._run_dir, meta.step)
        future = dcp.async_save(
            state,
            storage_writer=_PublishingWriter(folder, meta, self._run_dir, self._keep),
            process_group=self._group,
            async_stager=self._host_copy,
            no_dist=self._group is None,
        )
        assert isinstance(future, Future)
        self._saving = folder, future

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once; true too when nothing is under way."""
        return self._saving is None or self._saving[1].done()

    def finish(self) -> Path | None:
        """Wait for the save under way; returns the checkpoint that was published, None if nothing was under way.

        Raises ValueError on every rank when a rank could not write or publish its part, and then a later save may
        succeed. What is raised when the ranks lost one another is the process group's own error.
        """
        if self._saving is None:
            return None
        folder, future = self._saving
        self._saving = None
        error = future.exception()
        if error is None:
            return folder
        if not isinstance(error, CheckpointException):
            raise error
        if self._is_leader:
            # No rank is writing any more: each has told the others that it is through. Gives a full disk some room.
            shutil.rmtree(partial_folder(folder), ignore_errors=True)
        raise ValueError(
            f"{folder} cannot be written: {self._reason(error)} ({_free_mib(folder)} MiB are free); "
            "earlier checkpoints are kept"
        ) from error

    @property
    def _is_leader(self) -> bool:
        return self._group is None or dist.get_rank(self._group) == 0

    def _reason(self, error: CheckpointException) -> str:
        """What went wrong on which rank, without the tracebacks."""
        told = {rank: str(cause) or type(cause).__name__ for rank, (cause, _) in error.failures.items()}
        if self._group is None:
            return told[0]
        return "; ".join(f"rank {dist.get_global_rank(self._group, rank)}: {text}" for rank, text in told.items())


class _PublishingWriter(FileSystemWriter):
    """Writes into a folder of another name, which its coordinator makes a checkpoint once all ranks have written.

    DCP calls `prepare_local_plan` and `write_data` on every rank, the other two on the coordinator between and after
    these, and tells all ranks of an exception in any of them.
    """

    def __init__(self, folder: Path, meta: CheckpointMeta, run_dir: Path, keep: int) -> None:
        # Nothing to copy ahead from a GPU, which would also make a CUDA context on the first one.
        super().__init__(partial_folder(folder), sync_files=True, per_thread_copy_ahead=0)
        self._folder, self._meta, self._run_dir, self._keep = folder, meta, run_dir, keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # The folder is not made yet, unlike in the base class: after a failed save it may just be in removal.
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The moment when every rank has come to this save and none has begun to write: what an earlier save of this
        # step left in the folder can go.
        self.path.mkdir(parents=True, exist_ok=True)
        for path in self.path.iterdir():
            path.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return super().write_data(plan, planner)
        except Exception as error:
            # On a full disk torch's serialiser ends with an error of its own, which names no reason and may not be
            # sendable to the other ranks.
            raise _os_error_behind(error) or RuntimeError(f"{type(error).__name__}: {error}") from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        for name in sorted({result.storage_data.relative_path for of_rank in results for result in of_rank}):
            if not (self.path / name).exists():
                raise ValueError(f"another rank's {name} is not here; run_dir must be the same folder on all machines")
        write_manifest(self.path, self._meta)
        self._publish()
        # Later ones are left over from before a resume that passed them over; the run will replace them.
        checkpoints = [path for path in list_checkpoints(self._run_dir) if read_meta(path).step <= self._meta.step]
        for old in checkpoints[: -self._keep]:
            remove(old)

    def _publish(self) -> None:
        """Give the folder its name; of two saves of one step there is always one in place."""
        folder, replaced = self._folder, replaced_folder(self._folder)
        if folder.exists():
            if replaced.exists():
                remove(replaced)
            folder.rename(replaced)
        self.path.rename(folder)
        sync(folder.parent)
        if replaced.exists():
            remove(replaced)


def _os_error_behind(error: BaseException) -> OSError | None:
    """The first error of the operating system that led to this one."""
    found, cause = None, error
    while cause is not None:
        found = cause if isinstance(cause, OSError) else found
        cause = cause.__cause__ or cause.__context__
    return found


def _free_mib(folder: Path) -> int:
    """Free space where a folder is, or was."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free >> 20
