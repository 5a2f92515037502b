"""What a checkpoint says of itself, and whether a run may go on from it."""

from dataclasses import asdict, dataclass
from typing import Any

from dflash.drafter.shape import DrafterShape

# What decides which documents, anchors and held-out share a step meets and how it weighs them, or is read back from
# the checkpoint (betas and weight decay lie in the optimizer state), so that another value would silently not count.
# Length limits are part of the data's fingerprint too; here they are named.
_DECISIVE_KEYS = (
    "seed",
    "data.max_length",
    "data.overlong",
    "data.tokens_per_micro_batch",
    "data.eval_fraction",
    "data.eval_max_documents",
    "train.micro_batches_per_step",
    "anchors.per_token",
    "anchors.max_per_document",
    "objective.labels",
    "objective.gamma",
    "objective.ce.weight",
    "objective.kl.weight",
    "objective.kl.temperature",
    "objective.tv.weight",
    "objective.cap.weight",
    "objective.dpace.alpha",
    "optim.name",
    "optim.momentum",
    "optim.betas",
    "optim.weight_decay",
)
# What a user may have good reason to change when going on: the run then differs from one that never stopped, by
# intent (schedule, clipping, evaluations) or in rounding (device, split of ranks), and is told so.
_FREE_KEYS = (
    "device",
    "model.target.path",
    "model.target.dtype",
    "pipeline.colocated",
    "pipeline.num_target_ranks",
    "optim.lr",
    "optim.schedule",
    "optim.decay_ratio",
    "optim.warmup_ratio",
    "optim.clip_norm",
    "train.max_steps",
    "train.num_epochs",
    "train.eval_interval_steps",
    "train.on_nonfinite",
)
_UNSET = "unset"


@dataclass(frozen=True, slots=True)
class CheckpointMeta:
    """What a checkpoint says of itself: the last finished step and what it was trained on.

    `next_index` is the g that comes next, which is that of an evaluation as long as the one after `step` is owed.
    `num_micro_batches` have been trained on, which is fewer than whole steps hold where a plan ended with a short one.
    `eval_fingerprint` is None where the held-out documents are a share of the training data.
    """

    step: int
    owes_evaluation: bool
    next_index: int
    num_micro_batches: int
    fingerprint: str
    eval_fingerprint: str | None
    shape: DrafterShape
    config: dict[str, Any]

    def check_matches(
        self, shape: DrafterShape, fingerprint: str, eval_fingerprint: str | None, config: dict[str, Any]
    ) -> list[str]:
        """One line for the user per option that changed since the checkpoint was written and may have.

        Raises ValueError naming all that changed and would change what is learnt or measured, with old and new value.
        """
        refused = _changes(asdict(self.shape), asdict(shape))
        refused += _changes(_values(self.config, _DECISIVE_KEYS), _values(config, _DECISIVE_KEYS))
        data = "the training data (by fingerprint)", "the evaluation data (by fingerprint)"
        own = self.eval_fingerprint or "held out of it"
        others = eval_fingerprint or "held out of it"
        refused += _changes({data[0]: self.fingerprint, data[1]: own}, {data[0]: fingerprint, data[1]: others})
        if refused:
            raise ValueError(f"resume: {'; '.join(refused)}; go on with what was there, or start a new run")
        changed = _changes(_values(self.config, _FREE_KEYS), _values(config, _FREE_KEYS))
        return [f"changed since step {self.step}: {change}" for change in changed]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{key} was {before[key]}, is {now[key]}" for key in now if now[key] != before[key]]


def _values(config: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: _look_up(config, key) for key in keys}


def _look_up(config: dict[str, Any], dotted: str) -> Any:
    """An option's value, or "unset" where the program that wrote the checkpoint did not have it."""
    value: Any = config
    for name in dotted.split("."):
        value = value.get(name, _UNSET) if isinstance(value, dict) else _UNSET
    return value
