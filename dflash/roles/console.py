"""What a run shows while it trains: a progress bar, TensorBoard scalars, and a line of JSON per log interval."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from torch import Tensor
from tqdm import tqdm

from dflash.drafter.metrics import Metrics, MetricSums
from dflash.profiling.report import RankReport
from dflash.roles.setup import Run

METRICS_FILE = "metrics.jsonl"


class Console:
    """Adds up metrics on the device and reads them once per log interval; one rank shows them.

    The other drafters only report their own queue.
    """

    def __init__(self, run: Run, is_leader: bool, report: RankReport) -> None:
        self._run, self._is_leader, self._report = run, is_leader, report
        self._sums = MetricSums.zeros(run.drafter_shape.block_size, run.device)
        self._num_tokens, self._since = 0, time.monotonic()
        self._metrics_file = open_metrics(run.run_dir / METRICS_FILE, run.first_step) if is_leader else None
        self._bar = tqdm(
            total=run.plan.num_steps,
            initial=run.first_step - 1,
            disable=not is_leader,
            desc="train",
            unit="step",
            mininterval=1.0,
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

    def add(self, extras: Tensor, num_tokens: int) -> None:
        """Add a step's reduced metric sums; nothing is read."""
        self._sums.values.add_(extras)
        self._num_tokens += num_tokens
        self._bar.update(1)

    def log(self, step: int, grad_norm: Tensor, learning_rate: float, queue_depth: int, queue_bytes: int) -> None:
        """Read the interval's metrics and show them; starts a new interval."""
        self._report.scalars({"queue/depth": queue_depth, "queue/bytes": queue_bytes}, step)
        if self._is_leader:
            metrics = self._sums.read()  # the one wait for the device per interval
            norm = float(grad_norm)
            now = time.monotonic()
            tokens_per_s = self._num_tokens / max(now - self._since, 1e-9)
            scalars = {"grad_norm": norm, "learning_rate": learning_rate, "tokens_per_s": tokens_per_s}
            self._show("train", step, metrics, scalars)
            self._report.scalars({"throughput/tokens_per_s": tokens_per_s}, step)
            self._bar.set_postfix_str(
                f"loss {metrics.loss:.3f}, accept length {metrics.accept_length:.2f}, {tokens_per_s:.0f} tok/s"
            )
            self._since = now
        self._sums.values.zero_()
        self._num_tokens = 0

    def log_evaluation(self, step: int, sums: MetricSums) -> None:
        if not self._is_leader:
            return
        metrics = sums.read()
        self._show("eval", step, metrics, {})
        self._bar.write(
            f"step {step}: held-out loss {metrics.loss:.4f}, accept length {metrics.accept_length:.3f}, "
            f"accuracy {metrics.accuracy:.3f}"
        )

    def _show(self, kind: str, step: int, metrics: Metrics, scalars: dict[str, float]) -> None:
        values: dict[str, Any] = {**asdict(metrics), **scalars}
        per_slot = values.pop("accuracy_per_slot")
        self._report.scalars({f"{kind}/{name}": value for name, value in values.items()}, step)
        if kind == "eval":
            self._report.scalars({f"eval_slot/{k}": value for k, value in enumerate(per_slot, 1)}, step)
        record = {"step": step, "kind": kind, **values, "accuracy_per_slot": per_slot}
        assert self._metrics_file is not None
        self._metrics_file.write(json.dumps(_without_nan(record)) + "\n")
        self._metrics_file.flush()


def open_metrics(path: Path, first_step: int) -> TextIO:
    """The file to append records to, without those that an earlier launch wrote from `first_step` on."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
    return path.open("a", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: what was not counted is null."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
