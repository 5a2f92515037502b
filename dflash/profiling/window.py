"""torch.profiler over a window of steps."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

FOLDER = "torch_profiler"


class ProfilerWindow:
    """Runs torch.profiler from the beginning of one step to the end of another, and writes its trace once.

    What it records costs a multiple of the step, and its trace is written where the window ends: the rank does
    nothing else meanwhile, so tell the peers before, and look at shares of the window only in the trace itself.
    """

    def __init__(self, run_dir: Path, rank_name: str, device: torch.device, start_step: int, num_steps: int) -> None:
        self._path = run_dir / FOLDER / f"{rank_name}.json.gz"
        self._device = device
        self._start_step, self._end_step = start_step, start_step + num_steps
        self._profiler: profile | None = None
        self._is_over = False

    def is_due(self, step: int) -> bool:
        """Whether `move(step)` has something to do; costs nothing worth naming."""
        if self._is_over:
            return False
        return step >= self._end_step if self._profiler is not None else step >= self._start_step

    def move(self, step: int) -> str | None:
        """Start, or end and write, before the first work of a step; returns a line on what was done, if anything.

        A launch that starts behind the window records nothing.
        """
        if not self.is_due(step):
            return None
        if self._profiler is not None:
            return self._write()
        if step >= self._end_step:
            self._is_over = True
            return f"torch.profiler recorded nothing: this rank comes to step {step} after its window"
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()
        return f"torch.profiler records from step {step} up to step {self._end_step - 1}"

    def close(self) -> str | None:
        """End and write a window that the run's end has cut short; returns a line on it."""
        if self._profiler is not None:
            return self._write()
        if self._is_over:
            return None
        return f"torch.profiler recorded nothing: the run ended before step {self._start_step}"

    def _write(self) -> str:
        assert self._profiler is not None
        profiler, self._profiler, self._is_over = self._profiler, None, True
        profiler.stop()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:  # a full disk costs the trace, not the run
            return f"warning: {self._path} cannot be written: {error}"
        return f"torch.profiler wrote {self._path}"
