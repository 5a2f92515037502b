"""Typed schema of a training run, and the checks that need nothing but the schema itself."""

import os
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from dflash.bounds import require_at_least, require_positive, require_share

INIT_FROM_TARGET = "target"


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(Enum):
    """`auto` is bfloat16 on CUDA and float32 on CPU."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class LayerType(StrEnum):
    """Kinds of drafter layers, spelt as Transformers' `layer_types` spells them."""

    full_attention = "full_attention"
    sliding_attention = "sliding_attention"


class Labels(StrEnum):
    """Which tokens are right."""

    data = "data"
    target = "target"  # the argmax of the target's logits


class OptimizerName(StrEnum):
    adamw = "adamw"
    muon = "muon"  # for matrices; norms keep AdamW


class Schedule(StrEnum):
    """What the learning rate does after its warm-up."""

    cosine = "cosine"
    linear = "linear"
    wsd = "wsd"  # stable, then a linear decay over optim.decay_ratio of the steps


class Overlong(Enum):
    """What happens to a document longer than `data.max_length`."""

    cut = "cut"
    skip = "skip"


class OnNonfinite(Enum):
    """What happens when features, loss or gradients of a step are NaN or infinite."""

    stop = "stop"  # save the step before, and end
    skip = "skip"  # leave the step out, and count it


class ProfilingLevel(Enum):
    """How much is kept of where the time goes."""

    off = "off"
    summary = "summary"  # stages, summed up per interval
    full = "full"  # every occurrence of a stage, too


@dataclass(slots=True)
class TargetConfig:
    path: str = MISSING  # a hub name, a folder, or a GGUF file
    dtype: Dtype = Dtype.auto


@dataclass(slots=True)
class DrafterConfig:
    """What is null follows the drafter of `init_from`, else the target: see `dflash.roles.setup.drafter_shape`."""

    num_layers: int | None = None  # null: as many as layer_types, else 5
    block_size: int | None = None  # null: 16
    layer_types: list[LayerType] | None = None  # null: all full
    sliding_window: int | None = None
    sliding_is_causal: bool | None = None  # null: true; false needs layer_types to be all sliding
    target_layer_ids: list[int] | None = None  # null: num_layers of them, evenly spaced
    mask_token_id: int | None = None  # must be given; a token of the target's vocabulary that no text holds
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    rope_theta: float | None = None
    init_from: str | None = None  # null: from noise; target: from its last layers; a folder or hub name: served

    @property
    def starts_from_served(self) -> bool:
        """Whether `init_from` names a drafter in the served layout."""
        return self.init_from not in (None, INIT_FROM_TARGET)


@dataclass(slots=True)
class ModelConfig:
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)


@dataclass(slots=True)
class DataConfig:
    train_path: str = MISSING
    eval_path: str | None = None  # null: a held-out share of train_path
    eval_fraction: float = 0.02
    eval_max_documents: int = 256
    max_length: int = 4096
    overlong: Overlong = Overlong.cut
    tokens_per_micro_batch: int = 4096
    max_bad_fraction: float = 0.01
    cache_dir: str = MISSING


@dataclass(slots=True)
class QueueConfig:
    """Bounds of the hidden-state queue, per drafter but for min_ready."""

    depth: int = 20
    min_ready: int = 10  # over all drafters, gates the start only
    max_bytes: int | None = None


@dataclass(slots=True)
class PipelineConfig:
    colocated: bool = False
    num_target_ranks: int | None = None
    num_send_buffers: int = 3
    peer_timeout_s: float = 120.0
    queue: QueueConfig = field(default_factory=QueueConfig)


@dataclass(slots=True)
class AnchorsConfig:
    per_token: float = 1 / 6
    max_per_document: int = 512


@dataclass(slots=True)
class CrossEntropyConfig:
    weight: float = 1.0


@dataclass(slots=True)
class DivergenceConfig:
    """Forward KL to the target's distribution, both at `temperature`."""

    weight: float = 0.0
    temperature: float = 1.0


@dataclass(slots=True)
class TotalVariationConfig:
    weight: float = 0.0


@dataclass(slots=True)
class ConfidenceConfig:
    """CAP: the entropy of slots that are right."""

    weight: float = 0.0


@dataclass(slots=True)
class DpaceConfig:
    alpha: float | None = None  # null: off


@dataclass(slots=True)
class ObjectiveConfig:
    labels: Labels = Labels.data
    gamma: float | None = None  # null: 7, 5, 4 for block sizes 16, 10, 8
    ce: CrossEntropyConfig = field(default_factory=CrossEntropyConfig)
    kl: DivergenceConfig = field(default_factory=DivergenceConfig)
    tv: TotalVariationConfig = field(default_factory=TotalVariationConfig)
    cap: ConfidenceConfig = field(default_factory=ConfidenceConfig)
    dpace: DpaceConfig = field(default_factory=DpaceConfig)


@dataclass(slots=True)
class OptimConfig:
    name: OptimizerName = OptimizerName.adamw
    lr: float = 6e-4
    schedule: Schedule = Schedule.cosine
    decay_ratio: float | None = None  # of all steps; wsd only
    momentum: float | None = None  # muon only
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.0
    warmup_ratio: float = 0.04
    clip_norm: float = 1.0


@dataclass(slots=True)
class LoopConfig:
    max_steps: int | None = None
    num_epochs: int | None = 1
    stop_at_step: int | None = None
    micro_batches_per_step: int = 12
    log_interval_steps: int = 10
    eval_interval_steps: int | None = None  # null: at the end only
    on_nonfinite: OnNonfinite = OnNonfinite.stop


@dataclass(slots=True)
class CheckpointConfig:
    interval_steps: int | None = 500  # null: at the end only
    keep: int = 2


@dataclass(slots=True)
class TorchProfilerConfig:
    start_step: int | None = None  # null: torch.profiler is off
    num_steps: int = 3
    ranks: list[int] | None = None  # null: all


@dataclass(slots=True)
class ProfilingConfig:
    level: ProfilingLevel = ProfilingLevel.summary
    interval_s: float = 60.0
    torch: TorchProfilerConfig = field(default_factory=TorchProfilerConfig)


@dataclass(slots=True)
class TrainConfig:
    run_dir: str | None = None  # null: runs/<date>_<time>
    resume: str = "no"  # no | auto | a checkpoint folder
    seed: int = 0
    device: Device = Device.auto
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


def register_schema() -> None:
    """Make the schema known to Hydra as `schema`, the first entry of conf/config.yaml's defaults."""
    ConfigStore.instance().store(name="schema", node=TrainConfig)
    OmegaConf.register_new_resolver("profile_interval", _profile_interval, replace=True)


def _profile_interval() -> float:
    """Seconds that the environment sets; 60 where it sets none."""
    text = os.environ.get("DFLASH_PROFILE_INTERVAL", "").strip() or "60"
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"DFLASH_PROFILE_INTERVAL: {text} must be a number above 0") from error


def config_folder() -> Path:
    """Folder of the YAML groups: inside the package in a wheel, beside it in a checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"


def to_train_config(composed: DictConfig) -> TrainConfig:
    """Typed object of a composed config, checked; raises ValueError that names the key and what is allowed."""
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(f"{missing[0]}: must be given")
    # Hydra's `+key=value` adds keys behind the schema's back; merged onto the schema they are refused by name.
    plain = OmegaConf.to_container(composed)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), plain))
    assert isinstance(config, TrainConfig)
    _check(config)
    return config


def plain_config(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON can hold it."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    assert isinstance(plain, dict)
    return plain


def _check(config: TrainConfig) -> None:
    drafter, data, queue, loop = config.model.drafter, config.data, config.pipeline.queue, config.train
    require_at_least(
        1,
        {
            "model.drafter.num_layers": drafter.num_layers,
            "model.drafter.sliding_window": drafter.sliding_window,
            "model.drafter.num_attention_heads": drafter.num_attention_heads,
            "model.drafter.num_key_value_heads": drafter.num_key_value_heads,
            "model.drafter.head_dim": drafter.head_dim,
            "model.drafter.intermediate_size": drafter.intermediate_size,
            "data.eval_max_documents": data.eval_max_documents,
            "data.tokens_per_micro_batch": data.tokens_per_micro_batch,
            "pipeline.num_target_ranks": config.pipeline.num_target_ranks,
            "pipeline.num_send_buffers": config.pipeline.num_send_buffers,
            "pipeline.queue.depth": queue.depth,
            "pipeline.queue.min_ready": queue.min_ready,
            "pipeline.queue.max_bytes": queue.max_bytes,
            "anchors.max_per_document": config.anchors.max_per_document,
            "train.max_steps": loop.max_steps,
            "train.num_epochs": loop.num_epochs,
            "train.stop_at_step": loop.stop_at_step,
            "train.micro_batches_per_step": loop.micro_batches_per_step,
            "train.log_interval_steps": loop.log_interval_steps,
            "train.eval_interval_steps": loop.eval_interval_steps,
            "checkpoint.interval_steps": config.checkpoint.interval_steps,
            "checkpoint.keep": config.checkpoint.keep,
            "profiling.torch.start_step": config.profiling.torch.start_step,
            "profiling.torch.num_steps": config.profiling.torch.num_steps,
        },
    )
    if config.profiling.torch.ranks == []:
        raise ValueError("profiling.torch.ranks: names no rank; null takes all of them")
    require_at_least(2, {"model.drafter.block_size": drafter.block_size, "data.max_length": data.max_length})
    if not 0 <= config.seed < 2**63:
        raise ValueError(f"seed: {config.seed} must be at least 0 and below 2**63")
    if config.resume == "auto" and config.run_dir is None:
        raise ValueError("run_dir: must be given with resume=auto: it is the folder of the run to go on with")
    require_at_least(0, {"optim.weight_decay": config.optim.weight_decay})
    require_positive(
        {
            "model.drafter.rope_theta": drafter.rope_theta,
            "objective.gamma": config.objective.gamma,
            "optim.lr": config.optim.lr,
            "optim.clip_norm": config.optim.clip_norm,
            "pipeline.peer_timeout_s": config.pipeline.peer_timeout_s,
            "profiling.interval_s": config.profiling.interval_s,
        }
    )
    require_share(
        {
            "data.eval_fraction": data.eval_fraction,
            "data.max_bad_fraction": data.max_bad_fraction,
            "optim.warmup_ratio": config.optim.warmup_ratio,
        }
    )
    _check_optim(config.optim)
    if not 0.0 < config.anchors.per_token <= 1.0:
        raise ValueError(f"anchors.per_token: {config.anchors.per_token} must be above 0 and at most 1")
    if data.max_length > data.tokens_per_micro_batch:
        raise ValueError(
            f"data.max_length: {data.max_length} must not exceed data.tokens_per_micro_batch "
            f"({data.tokens_per_micro_batch}), since a micro-batch holds whole documents"
        )
    if loop.max_steps is None and loop.num_epochs is None:
        raise ValueError("train.max_steps: must be given when train.num_epochs is null")
    _check_layers(drafter)


def _check_optim(optim: OptimConfig) -> None:
    if len(optim.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in optim.betas):
        raise ValueError(f"optim.betas: {optim.betas} must be two numbers, each at least 0 and below 1")
    is_wsd, is_muon = optim.schedule is Schedule.wsd, optim.name is OptimizerName.muon
    if is_wsd and optim.decay_ratio is None:
        raise ValueError("optim.decay_ratio: must be given with optim.schedule=wsd (0.1 to 0.2 is usual)")
    if optim.decay_ratio is not None:
        if not is_wsd:
            raise ValueError("optim.decay_ratio: must be null unless optim.schedule is wsd")
        if not 0.0 < optim.decay_ratio <= 1.0 - optim.warmup_ratio:
            raise ValueError(
                f"optim.decay_ratio: {optim.decay_ratio} must be above 0 and leave room for optim.warmup_ratio "
                f"({optim.warmup_ratio})"
            )
    if is_muon and optim.momentum is None:
        raise ValueError("optim.momentum: must be given with optim.name=muon (0.95), as optim=muon does")
    if optim.momentum is not None and not is_muon:
        raise ValueError("optim.momentum: must be null unless optim.name is muon")
    if optim.momentum is not None and not 0.0 <= optim.momentum < 1.0:
        raise ValueError(f"optim.momentum: {optim.momentum} must be at least 0 and below 1")


def _check_layers(drafter: DrafterConfig) -> None:
    types = drafter.layer_types
    if types is not None and drafter.num_layers is not None and len(types) != drafter.num_layers:
        raise ValueError(
            f"model.drafter.layer_types: has {len(types)} entries, but model.drafter.num_layers is "
            f"{drafter.num_layers}; they must agree"
        )
    if drafter.starts_from_served:
        return  # the folder says what its layers are, and what is given here is held against it
    sliding = [kind is LayerType.sliding_attention for kind in types or []]
    if any(sliding) and drafter.sliding_window is None:
        raise ValueError("model.drafter.sliding_window: must be given when layer_types holds sliding_attention")
    if drafter.sliding_window is not None and not any(sliding):
        raise ValueError("model.drafter.sliding_window: must be null when layer_types holds no sliding_attention")
    if drafter.sliding_is_causal is False and not (sliding and all(sliding)):
        raise ValueError(
            "model.drafter.sliding_is_causal: may be false only when every layer is sliding_attention, "
            "since a served drafter has one is_causal key for all its layers"
        )
