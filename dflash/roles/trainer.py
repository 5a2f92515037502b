"""A drafter in training: gradients of one micro-batch at a time, then one optimizer step for all drafters."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from dflash.batch import PackedHiddenStates, TargetVocabulary
from dflash.checkpoint import CheckpointMeta, load_checkpoint, save_checkpoint
from dflash.config import INIT_FROM_TARGET, plain_config
from dflash.data.plan import PlanEntry
from dflash.drafter.anchors import draw_anchors
from dflash.drafter.initial import source_layer_ids, start_from_target
from dflash.drafter.metrics import MetricSums
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.objective import ObjectiveSums, TrainedSlots, decay_gamma, objective_sums
from dflash.drafter.optimizer import DrafterOptimizer, FlatGradients, learning_rate
from dflash.profiling.stats import ProfileStats
from dflash.roles.setup import Run
from dflash.target.layers import load_layers
from dflash.target.vocabulary import load_vocabulary
from dflash.transport.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class DrafterTrainer:
    """Model, optimizer and gradients of one drafter rank; all ranks hold the same parameters, always.

    `flat.extras` holds the step's MetricSums, so that one all-reduce carries gradients, denominator and metrics.
    """

    run: Run
    groups: ProcessGroups | None
    stats: ProfileStats
    drafter: DFlashDrafter
    vocabulary: TargetVocabulary
    optimizer: DrafterOptimizer
    flat: FlatGradients
    gamma: float

    @classmethod
    def load(cls, run: Run, groups: ProcessGroups | None, stats: ProfileStats) -> "DrafterTrainer":
        """The drafter at the start of this launch: drawn from the seed, or as its checkpoint left it."""
        optim = run.config.optim
        drafter = DFlashDrafter(run.drafter_shape).initialize(run.config.seed)
        if run.resume_from is None and run.config.model.drafter.init_from == INIT_FROM_TARGET:
            layer_ids = source_layer_ids(run.drafter_shape)
            start_from_target(drafter, load_layers(run.config.model.target.path, layer_ids))
        drafter.to(run.device)
        optimizer = DrafterOptimizer(drafter, weight_decay=optim.weight_decay, betas=tuple(optim.betas))
        if run.resume_from is not None:
            load_checkpoint(run.resume_from, drafter, optimizer.adamw)
        # After the checkpoint: while states are loaded, no parameter may have a gradient.
        flat = FlatGradients(drafter.parameters(), MetricSums.width(run.drafter_shape.block_size))
        # float16 would overflow in the head's gradient, whatever the target computes in.
        is_cpu = run.device.type == "cpu"
        return cls(
            run=run,
            groups=groups,
            stats=stats,
            drafter=drafter,
            vocabulary=load_vocabulary(
                run.config.model.target.path, torch.float32 if is_cpu else torch.bfloat16, run.device
            ),
            optimizer=optimizer,
            flat=flat,
            gamma=decay_gamma(run.drafter_shape.block_size, run.config.objective.gamma),
        )

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for all drafters: console, metrics, publishing checkpoints."""
        return self.run.topology.colocated or self.run.topology.index_in_group(self.run.rank) == 0

    @property
    def is_alone(self) -> bool:
        return self.run.topology.num_drafters == 1

    def accumulate(self, hidden: PackedHiddenStates, entry: PlanEntry, pump: Callable[[], None]) -> None:
        """Add a micro-batch's gradients and metric sums to the step's.

        `pump` is called between its parts: transfers go on while this rank computes only if it looks after them.
        """
        sums = self._sums(hidden, entry, pump)
        pump()
        with self.stats.stage("backward"):
            sums.loss_sum.backward()
        self.flat.extras.add_(sums.metrics.values)

    @torch.no_grad()
    def evaluate(self, hidden: PackedHiddenStates, entry: PlanEntry, pump: Callable[[], None]) -> MetricSums:
        """Metric sums of a held-out micro-batch, whose anchors are the same in every evaluation."""
        return self._sums(hidden, entry, pump).metrics

    def reduce(self, tensor: Tensor) -> dist.Work | None:
        """Start the sum of `tensor`, in place, over all drafters; None when there is only one."""
        if self.is_alone:
            return None
        assert self.groups is not None
        return dist.all_reduce(tensor, group=self.groups.drafters, async_op=True)

    def step(self, step: int) -> Tensor:
        """Update the parameters from the reduced gradients; returns the gradient norm before clipping, 0-d."""
        optim = self.run.config.optim
        denominator = MetricSums(self.flat.extras).denominator
        norm = self.flat.scale_and_clip(denominator, optim.clip_norm)
        self.optimizer.step(self.learning_rate(step), skip=denominator <= 0)
        return norm

    def learning_rate(self, step: int) -> float:
        optim = self.run.config.optim
        return learning_rate(step, peak=optim.lr, total_steps=self.run.plan.num_steps, warmup_ratio=optim.warmup_ratio)

    def save(self, step: int) -> None:
        """Write the checkpoint of a finished step; all drafters call it."""
        run = self.run
        meta = CheckpointMeta(
            step=step,
            next_index=run.plan.first_entry_of_step(step + 1),
            fingerprint=run.train_corpus.fingerprint,
            shape=run.drafter_shape,
            config=plain_config(run.config),
        )
        group = None if self.groups is None else self.groups.checkpoint
        keep = run.config.checkpoint.keep
        save_checkpoint(run.run_dir, meta, self.drafter, self.optimizer.adamw, group, self.is_leader, keep)

    def _sums(self, hidden: PackedHiddenStates, entry: PlanEntry, pump: Callable[[], None]) -> ObjectiveSums:
        run, shape, anchors, stats = self.run, self.run.drafter_shape, self.run.config.anchors, self.stats
        with stats.stage("anchors"):
            # Drawn on the host, from the host's copy of the tokens: nothing is read back from the device.
            micro_batch = run.micro_batch(entry)
            blocks = draw_anchors(
                micro_batch,
                block_size=shape.block_size,
                per_token=anchors.per_token,
                max_per_document=anchors.max_per_document,
                seed=run.config.seed,
                epoch=entry.epoch,
            )
            slots = TrainedSlots.of(blocks, micro_batch.input_ids, micro_batch.loss_mask, self.gamma)
            anchor_tokens = micro_batch.input_ids[blocks.anchors]
            blocks, slots = blocks.to(run.device), slots.to(run.device)
            anchor_tokens = anchor_tokens.to(run.device, non_blocking=True)
        with stats.stage("layers"):
            embeddings = embed_blocks(self.vocabulary, anchor_tokens, shape.mask_token_id, shape.block_size)
            hidden_NBH = self.drafter(hidden.features, embeddings, blocks)
        pump()
        with stats.stage("head_and_loss"):
            return objective_sums(hidden_NBH, slots, self.vocabulary)
