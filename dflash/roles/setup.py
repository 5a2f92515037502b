"""What every rank works out before the first micro-batch: device, run folder, data, plan and the drafter's shape."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from omegaconf import OmegaConf

from dflash.batch import MicroBatch, PackedLayout, TargetShape
from dflash.checkpoints.finding import clean_up, find_checkpoint, restore_replaced
from dflash.checkpoints.manifest import read_meta
from dflash.checkpoints.meta import CheckpointMeta
from dflash.config import (
    INIT_FROM_TARGET,
    Device,
    DrafterConfig,
    Dtype,
    LayerType,
    ObjectiveConfig,
    TrainConfig,
    plain_config,
)
from dflash.data.build import build_corpus
from dflash.data.corpus import TokenCorpus, open_corpus, sample_documents, split_documents
from dflash.data.plan import Plan, PlanEntry
from dflash.drafter.initial import check_start, locate_served, shape_to_start_from, source_layer_ids
from dflash.drafter.objective import ObjectiveSettings
from dflash.drafter.served import check_served_weights
from dflash.drafter.shape import DrafterShape
from dflash.groups import Launch, Topology
from dflash.roles.agreement import Agreement, OwnError
from dflash.target.layers import check_layers
from dflash.target.loading import load_tokenizer
from dflash.target.shape import check_target_layer_ids, default_target_layer_ids, read_target_shape

CONFIG_FILE = "config.yaml"
DEFAULT_NUM_LAYERS, DEFAULT_BLOCK_SIZE = 5, 16


@dataclass(frozen=True)
class Run:
    """One launch as all its ranks see it."""

    config: TrainConfig
    topology: Topology
    rank: int
    device: torch.device
    run_dir: Path
    drafter_shape: DrafterShape
    feature_dtype: torch.dtype
    train_corpus: TokenCorpus
    eval_corpus: TokenCorpus
    plan: Plan
    resume_from: Path | None
    first_step: int
    owes_evaluation: bool  # the launch before stopped between its last step and the evaluation that follows it

    @property
    def eval_fingerprint(self) -> str | None:
        """Fingerprint of the held-out documents where they are data of their own, not a share of the training's."""
        return None if self.config.data.eval_path is None else self.eval_corpus.fingerprint

    @cached_property
    def objective(self) -> ObjectiveSettings:
        return objective_settings(self.config.objective)

    @property
    def feature_width(self) -> int:
        """Columns of the features that travel: the drafter's, and the target's final hidden state for a teacher."""
        shape = self.drafter_shape
        return shape.feature_width + (shape.hidden_size if self.objective.needs_teacher else 0)

    @property
    def name(self) -> str:
        return self.topology.name(self.rank)

    @property
    def last_step(self) -> int:
        """The step after which this launch ends: the plan's last, or `train.stop_at_step` if that comes first."""
        stop = self.config.train.stop_at_step
        return self.plan.num_steps if stop is None else min(stop, self.plan.num_steps)

    @property
    def is_done(self) -> bool:
        return self.first_step > self.last_step and not self.owes_evaluation

    def num_tokens(self, entry: PlanEntry) -> int:
        corpus = self.eval_corpus if entry.is_eval else self.train_corpus
        return int(corpus.lengths[entry.document_ids].sum())

    def micro_batch(self, entry: PlanEntry) -> MicroBatch:
        corpus = self.eval_corpus if entry.is_eval else self.train_corpus
        return corpus.micro_batch(entry.index, entry.document_ids)

    def layout(self, entry: PlanEntry) -> PackedLayout:
        return PackedLayout(
            num_tokens=self.num_tokens(entry),
            num_documents=len(entry.document_ids),
            feature_width=self.feature_width,
            feature_dtype=self.feature_dtype,
        )

    def entries(self) -> Iterator[PlanEntry]:
        """This launch's entries in order of g: each step's micro-batches, then the evaluation that follows it."""
        for step in range(self.first_step - self.owes_evaluation, self.last_step + 1):
            if step >= self.first_step:
                yield from self.plan.step_entries(step)
            yield from self.plan.eval_entries(step)


def choose_device(device: Device, local_rank: int) -> torch.device:
    """Device of one rank; `auto` takes CUDA where there is one. Raises ValueError when CUDA is asked for in vain."""
    available = torch.cuda.is_available()
    if device is Device.cuda and not available:
        raise ValueError("device: is cuda, but torch sees no CUDA device; allowed here: cpu, auto")
    if device is Device.cpu or not available:
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ValueError(f"device: local rank {local_rank} has no GPU of its own, this machine has {count}")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def resolve_dtype(dtype: Dtype, device: torch.device) -> torch.dtype:
    if dtype is Dtype.auto:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, dtype.value)


def objective_settings(config: ObjectiveConfig) -> ObjectiveSettings:
    """What the drafter is trained on; raises ValueError that names the key for what is senseless."""
    return ObjectiveSettings(
        gamma=config.gamma,
        labels=config.labels,
        ce_weight=config.ce.weight,
        kl_weight=config.kl.weight,
        kl_temperature=config.kl.temperature,
        tv_weight=config.tv.weight,
        cap_weight=config.cap.weight,
        dpace_alpha=config.dpace.alpha,
    )


def drafter_shape(config: DrafterConfig, target: TargetShape) -> DrafterShape:
    """Shape of a drafter that starts afresh: the config's values, the target's where the config has null.

    Raises ValueError that names the key for what the target cannot serve.
    """
    num_layers = config.num_layers or len(config.layer_types or ()) or DEFAULT_NUM_LAYERS
    if config.target_layer_ids is not None:
        layer_ids = tuple(config.target_layer_ids)
    else:
        layer_ids = default_target_layer_ids(target.num_layers, num_layers)
    check_target_layer_ids(layer_ids, target.num_layers)
    mask_token_id = config.mask_token_id
    if mask_token_id is None or not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(
            f"model.drafter.mask_token_id: {mask_token_id} must be a token of the target's vocabulary, "
            f"0 to {target.vocab_size - 1}, that its texts do not use"
        )
    heads = config.num_attention_heads or target.num_attention_heads
    kv_heads = config.num_key_value_heads or min(target.num_key_value_heads, heads)
    if heads % kv_heads:
        raise ValueError(
            f"model.drafter.num_key_value_heads: {kv_heads} must divide model.drafter.num_attention_heads ({heads})"
        )
    head_dim = config.head_dim or target.head_dim
    if head_dim % 2:
        raise ValueError(f"model.drafter.head_dim: {head_dim} must be even, since RoPE rotates pairs")
    types = config.layer_types or [LayerType.full_attention] * num_layers
    return DrafterShape(
        hidden_size=target.hidden_size,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        layer_types=tuple(types),
        sliding_window=config.sliding_window,
        sliding_is_causal=config.sliding_is_causal is not False,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=config.rope_theta or target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        vocab_size=target.vocab_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_target_layers=target.num_layers,
    )


def served_drafter_shape(config: DrafterConfig, target: TargetShape, resumed: Path | None) -> DrafterShape:
    """Shape of a drafter that starts from a served one: the folder's, or the checkpoint's where one is resumed.

    Raises ValueError naming the key or the tensors for what does not fit.
    """
    assert config.init_from is not None
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "init_from"}
    given = {key: value for key, value in given.items() if value is not None}
    if resumed is not None:
        # The folder has done its part, and may be gone.
        shape = read_meta(resumed).shape
        check_start(shape, resumed, given, target)
        return shape
    folder = locate_served(config.init_from)
    shape = shape_to_start_from(folder, given, target)
    check_served_weights(folder, shape)
    return shape


def choose_run_dir(config: TrainConfig) -> Path:
    """Folder of this run; raises ValueError when it holds another run and resume is `no`."""
    run_dir = Path(config.run_dir or time.strftime("runs/%Y-%m-%d_%H-%M-%S")).expanduser().absolute()
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir: {run_dir} is a file; name a folder")
    if (run_dir / CONFIG_FILE).exists() and config.resume == "no":
        raise ValueError(
            f"run_dir: {run_dir} holds another run; choose another folder, or set resume=auto to go on with it"
        )
    return run_dir


def find_start(config: TrainConfig, run_dir: Path, say: Callable[[str], None]) -> str:
    """The checkpoint to go on from, empty to begin."""
    if config.resume != "no":
        try:
            restore_replaced(run_dir)
        except OSError as error:
            raise _unwritable(run_dir, error) from error
    return str(find_checkpoint(config.resume, run_dir, say) or "")


def claim_run_dir(run_dir: Path, config: TrainConfig, resumed: Path | None) -> str:
    """Make the run folder and mark it as this run's, once nothing more can be wrong with the configuration."""
    probe = run_dir / "checkpoints" / ".writable"
    partial = run_dir / f".{CONFIG_FILE}.partial"
    try:
        # A folder that takes no checkpoint is better known now than after the first hours.
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        clean_up(run_dir, resumed)
        partial.write_text(OmegaConf.to_yaml(OmegaConf.structured(config)), encoding="utf-8")
        partial.replace(run_dir / CONFIG_FILE)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return "claimed"


def _unwritable(run_dir: Path, error: OSError) -> ValueError:
    return ValueError(f"run_dir: {run_dir} cannot be written: {error.strerror or error}")


def check_goes_on(
    meta: CheckpointMeta, config: TrainConfig, shape: DrafterShape, train_corpus: TokenCorpus, eval_corpus: TokenCorpus
) -> list[str]:
    """Lines on what changed since a checkpoint and may; raises ValueError on what changed and must not."""
    eval_fingerprint = None if config.data.eval_path is None else eval_corpus.fingerprint
    try:
        return meta.check_matches(shape, train_corpus.fingerprint, eval_fingerprint, plain_config(config))
    except ValueError as error:
        details = train_corpus.what_changed_since(meta.fingerprint)
        raise ValueError(f"{error}{f' ({details})' if details else ''}") from error


def prepare(config: TrainConfig, topology: Topology, launch: Launch, device: torch.device, agreement: Agreement) -> Run:
    """Work out the whole run, the first rank saying what it found on the console.

    Raises ValueError for what the user can mend, AgreedError when another rank tells it.
    """

    def say(text: str) -> None:
        if launch.rank == launch.node_leader:
            print(text, flush=True)

    target_shape = read_target_shape(config.model.target.path)
    run_dir = Path(agreement.once("run_dir", lambda: str(choose_run_dir(config))))
    resume_from = agreement.once("resume", lambda: find_start(config, run_dir, say))
    resumed = Path(resume_from) if resume_from else None
    if config.model.drafter.starts_from_served:
        shape = served_drafter_shape(config.model.drafter, target_shape, resumed)
    else:
        shape = drafter_shape(config.model.drafter, target_shape)
    # What could fail only when the drafter is loaded is tried now, before a run folder is made.
    if config.model.drafter.init_from == INIT_FROM_TARGET:
        check_layers(config.model.target.path, source_layer_ids(shape))
    objective_settings(config.objective).decay(shape.block_size)
    if config.train.micro_batches_per_step % topology.num_drafters:
        raise ValueError(
            f"train.micro_batches_per_step: {config.train.micro_batches_per_step} must be divisible by the number of "
            f"drafter ranks ({topology.num_drafters})"
        )
    if strangers := [rank for rank in config.profiling.torch.ranks or () if not 0 <= rank < topology.world_size]:
        raise ValueError(
            f"profiling.torch.ranks: {strangers[0]} is no rank; allowed here: 0 to {launch.world_size - 1}"
        )
    train_corpus, eval_corpus, plan = _read_data(config, target_shape, launch.node_leader, agreement, say)
    fingerprint = agreement.once("fingerprint", lambda: train_corpus.fingerprint)
    if train_corpus.fingerprint != fingerprint:
        raise OwnError(f"data.train_path: rank {launch.rank} reads other data than rank 0 does; copy the same files")
    first_step, owes_evaluation = 1, False
    if resumed is not None:
        meta = read_meta(resumed)
        changes = check_goes_on(meta, config, shape, train_corpus, eval_corpus)
        first_step = meta.step + 1
        if meta.step <= plan.num_steps:
            owes_evaluation = meta.owes_evaluation and bool(plan.eval_entries(meta.step))
            if left_out := plan.num_micro_batches_until(meta.step) - meta.num_micro_batches:
                changes.append(f"step {meta.step} ended a shorter plan: {left_out} of its micro-batches are left out")
        say(f"resuming after step {meta.step} from {resumed}")
        for change in changes:
            say(change)
    agreement.once("claim", lambda: claim_run_dir(run_dir, config, resumed))
    run = Run(
        config=config,
        topology=topology,
        rank=launch.rank,
        device=device,
        run_dir=run_dir,
        drafter_shape=shape,
        feature_dtype=resolve_dtype(config.model.target.dtype, device),
        train_corpus=train_corpus,
        eval_corpus=eval_corpus,
        plan=plan,
        resume_from=resumed,
        first_step=first_step,
        owes_evaluation=owes_evaluation,
    )
    say(plan.describe())
    return run


def _read_data(
    config: TrainConfig, target: TargetShape, node_leader: int, agreement: Agreement, say: Callable[[str], None]
) -> tuple[TokenCorpus, TokenCorpus, Plan]:
    data, loop = config.data, config.train

    def corpus(key: str, path: str) -> TokenCorpus:
        folder = agreement.once(
            f"{key}/{node_leader}",
            lambda: str(
                build_corpus(
                    path,
                    load_tokenizer(config.model.target.path),
                    max_length=data.max_length,
                    overlong=data.overlong,
                    max_bad_fraction=data.max_bad_fraction,
                    vocab_size=target.vocab_size,
                    cache_dir=Path(data.cache_dir).expanduser(),
                    report=say,
                )
            ),
            worker=node_leader,
        )
        return open_corpus(Path(folder))

    train_corpus = corpus("data.train_path", data.train_path)
    if data.eval_path is not None:
        eval_corpus = corpus("data.eval_path", data.eval_path)
        train_ids = None
        eval_ids = sample_documents(eval_corpus, data.eval_max_documents, config.seed)
    else:
        eval_corpus = train_corpus
        train_ids, eval_ids = split_documents(train_corpus, data.eval_fraction, config.seed, data.eval_max_documents)
    plan = Plan(
        train_corpus.documents(train_ids),
        eval_corpus.documents(eval_ids),
        tokens_per_micro_batch=data.tokens_per_micro_batch,
        micro_batches_per_step=loop.micro_batches_per_step,
        num_epochs=loop.num_epochs,
        max_steps=loop.max_steps,
        eval_interval_steps=loop.eval_interval_steps,
        seed=config.seed,
    )
    return train_corpus, eval_corpus, plan
