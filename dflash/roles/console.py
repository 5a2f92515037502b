"""What a run shows while it trains: a progress bar, TensorBoard scalars, and a line of JSON per log interval."""

import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dflash.drafter.metrics import Metrics, MetricSums
from dflash.profiling.charts import WHOLE_PLACE, Charts
from dflash.profiling.files import AppendFile
from dflash.profiling.report import RankReport
from dflash.roles.setup import Run

METRICS_FILE = "metrics.jsonl"
_LINE_INTERVAL_S = 10.0  # between lines of progress where they are not drawn over one another


class Console:
    """Adds up metrics on the device and reads them once per log interval; one rank shows them.

    The other drafters only report their own queue.
    """

    def __init__(self, run: Run, is_leader: bool, report: RankReport) -> None:
        self._run, self._is_leader, self._report = run, is_leader, report
        self._sums = MetricSums.zeros(run.drafter_shape.block_size, run.device, run.objective.metric_terms)
        self._num_tokens, self._since = 0, time.monotonic()
        self.num_skipped_steps = 0
        self._is_terminal = sys.stderr.isatty()
        self._metrics_file = open_metrics(run.run_dir / METRICS_FILE, run) if is_leader else None
        # A run of its own, so that the whole overlays the ranks in the chart of one tag.
        folder = run.run_dir / "tensorboard" / "all"
        self._whole = Charts(folder, run.first_step, WHOLE_PLACE) if is_leader else None
        self._bar = tqdm(
            total=run.plan.num_steps,
            initial=run.first_step - 1,
            disable=not is_leader,
            desc="train",
            unit="step",
            file=sys.stderr if self._is_terminal else _Lines(),
            mininterval=1.0 if self._is_terminal else _LINE_INTERVAL_S,
            dynamic_ncols=True,
        )

    def __enter__(self) -> "Console":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._metrics_file is not None:
            self._metrics_file.close()
        if self._whole is not None:
            self._whole.close()

    @property
    def state(self) -> Tensor:
        """What a checkpoint keeps, fp64: the sums of the interval under way, and the number of skipped steps."""
        skipped = self._sums.values.new_full((1,), self.num_skipped_steps)
        return torch.cat((self._sums.values, skipped))

    def restore(self, state: Tensor) -> None:
        """Go on where the launch before left off."""
        self._sums.values.copy_(state[:-1])
        self.num_skipped_steps = int(state[-1])

    def add(self, sums: MetricSums, num_tokens: int) -> None:
        """Add a step's reduced metric sums; nothing is read."""
        self._sums.add_(sums)
        self._num_tokens += num_tokens
        self._bar.update(1)

    def computed(self, num_tokens: int) -> None:
        """Count a micro-batch of this rank's own, trained on or evaluated, and end the interval if it is over."""
        self._report.count("throughput/tokens_per_s", num_tokens)
        self._report.poll()

    def skip(self, step: int, faults: str) -> None:
        """Count a step that was left out, and say why."""
        self.num_skipped_steps += 1
        self._bar.update(1)
        self.warn(f"step {step} is left out: {faults}")

    def warn(self, text: str) -> None:
        """A line that the user should see, once, and this rank's log keeps."""
        self._report.line(text)
        if self._is_leader:
            self._bar.write(f"warning: {text}", file=sys.stderr)

    def log(self, step: int, grad_norm: Tensor, learning_rate: float, queue_depth: int, queue_bytes: int) -> None:
        """Read the interval's metrics and show them; starts a new interval, unless this one is not over."""
        is_partial = step % self._run.config.train.log_interval_steps != 0
        self._report.scalars({"queue/depth": queue_depth, "queue/bytes": queue_bytes}, step)
        if self._is_leader:
            metrics = self._sums.read()  # the one wait for the device per interval
            norm = float(grad_norm)
            now = time.monotonic()
            tokens_per_s = self._num_tokens / max(now - self._since, 1e-9)
            scalars = {
                **self._sums.read_terms(),
                "grad_norm": norm,
                "learning_rate": learning_rate,
                "skipped_steps": self.num_skipped_steps,
                "tokens_per_s": tokens_per_s,
            }
            self._show("train", step, metrics, scalars, is_partial)
            assert self._whole is not None
            self._whole.add("throughput/tokens_per_s", tokens_per_s, step)
            self._whole.flush()
            skipped = f", {self.num_skipped_steps} steps skipped" if self.num_skipped_steps else ""
            self._bar.set_postfix_str(
                f"loss {metrics.loss:.3f}, accept length {metrics.accept_length:.2f}, "
                f"{tokens_per_s:.0f} tok/s{skipped}",
                refresh=self._is_terminal,
            )
            self._since = now
        self._num_tokens = 0
        if not is_partial:
            self._sums.values.zero_()

    def log_evaluation(self, step: int, sums: MetricSums) -> None:
        if not self._is_leader:
            return
        metrics = sums.read()
        self._show("eval", step, metrics, sums.read_terms(), is_partial=False)
        self._bar.write(
            f"step {step}: held-out loss {metrics.loss:.4f}, accept length {metrics.accept_length:.3f}, "
            f"accuracy {metrics.accuracy:.3f}"
        )

    def _show(self, kind: str, step: int, metrics: Metrics, scalars: dict[str, float], is_partial: bool) -> None:
        values: dict[str, Any] = {**asdict(metrics), **scalars}
        per_slot = values.pop("accuracy_per_slot")
        self._report.scalars({f"{kind}/{name}": value for name, value in values.items()}, step)
        if kind == "eval":
            self._report.scalars({f"eval_slot/{k}": value for k, value in enumerate(per_slot, 1)}, step)
        record = {"step": step, "kind": kind, **values, "accuracy_per_slot": per_slot}
        if is_partial:
            record["partial"] = True  # its steps come again in the record of the whole interval, if the run goes on
        assert self._metrics_file is not None
        self._metrics_file.line(json.dumps(_without_nan(record)))


class _Lines:
    """Turns a bar's redraws into whole lines, for files and for torchrun, which shows lines of many ranks."""

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            sys.stderr.write(line + "\n")

    def flush(self) -> None:
        sys.stderr.flush()


def open_metrics(path: Path, run: Run) -> AppendFile:
    """The file to append records to, without those that this launch will write again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = [line for line in lines if _is_kept(line, run)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
    return AppendFile(path)


def _is_kept(line: str, run: Run) -> bool:
    """Whether a line is a whole record that will not come again; a loss of power may leave anything."""
    try:
        record = json.loads(line)
        step, is_owed = record["step"], record["kind"] == "eval" and run.owes_evaluation
    except (ValueError, LookupError, TypeError):
        return False
    return line.endswith("\n") and not record.get("partial") and step < run.first_step - is_owed


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what was not counted is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
