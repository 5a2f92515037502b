"""When checkpoints are written: beside the training, one at a time, and the last one before a run ends."""

from collections.abc import Callable
from dataclasses import dataclass

from dflash.checkpoints.meta import CheckpointMeta
from dflash.checkpoints.saving import CheckpointSaver
from dflash.config import plain_config
from dflash.roles.console import Console
from dflash.roles.setup import Run
from dflash.roles.trainer import DrafterTrainer
from dflash.transport.endpoint import Work


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: its last finished step, and whether the evaluation behind it is still to be done."""

    step: int
    owes_evaluation: bool = False


class _Save:
    """A save under way as something to wait for, whose failure may mean that a drafter is gone."""

    def __init__(self, saver: CheckpointSaver) -> None:
        self._saver = saver

    def is_completed(self) -> bool:
        return self._saver.is_done

    def wait(self) -> None:
        self._saver.finish()


class Saving:
    """One drafter's part in the checkpoints of a run; all drafters save at the same steps."""

    def __init__(
        self, run: Run, trainer: DrafterTrainer, console: Console, complete: Callable[[Callable[[], Work]], None]
    ) -> None:
        self._run, self._trainer, self._console, self._complete = run, trainer, console, complete
        group = None if trainer.groups is None else trainer.groups.checkpoint
        self._saver = CheckpointSaver(run.run_dir, group, run.config.checkpoint.keep)
        self._saved = self.progress = Progress(run.first_step - 1, run.owes_evaluation)

    @property
    def is_due(self) -> bool:
        interval = self._run.config.checkpoint.interval_steps
        return interval is not None and self.progress.step % interval == 0

    def reserve(self) -> None:
        """Get the host memory that saves need, once there is a state to save, so that none of them gets it in haste."""
        self._saver.reserve(self._trainer.state(self._console.state))

    def start(self) -> None:
        """Copy the state to the host and have it written while the training goes on."""
        self._settle(is_last=False)
        run, progress = self._run, self.progress
        meta = CheckpointMeta(
            step=progress.step,
            owes_evaluation=progress.owes_evaluation,
            next_index=self._next_index(progress),
            num_micro_batches=run.plan.num_micro_batches_until(progress.step),
            fingerprint=run.train_corpus.fingerprint,
            eval_fingerprint=run.eval_fingerprint,
            shape=run.drafter_shape,
            config=plain_config(run.config),
        )
        self._saver.start(meta, self._trainer.state(self._console.state))
        self._saved = progress

    def finish(self) -> None:
        """Wait for what is being written, and save what is not saved yet. Raises ValueError when that fails."""
        is_saved = self.progress == self._saved
        self._settle(is_last=is_saved)
        if not is_saved:
            self.start()
            self._settle(is_last=True)

    def _settle(self, is_last: bool) -> None:
        """End the save that is under way; one that fails while there will be others costs no finished step."""
        try:
            self._complete(lambda: _Save(self._saver))
        except ValueError as error:
            if is_last:
                raise
            self._console.warn(f"{error}; training goes on, and the next checkpoint is tried when it is due")

    def _next_index(self, progress: Progress) -> int:
        plan = self._run.plan
        if progress.owes_evaluation:
            return plan.eval_entries(progress.step)[0].index
        return plan.first_entry_of_step(progress.step + 1)
