"""A drafter in training: gradients of one micro-batch at a time, then one optimizer step for all drafters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from dflash.batch import PackedHiddenStates, TargetVocabulary
from dflash.checkpoints.loading import load_checkpoint, training_state
from dflash.config import INIT_FROM_TARGET
from dflash.data.plan import PlanEntry
from dflash.drafter.anchors import draw_anchors
from dflash.drafter.initial import locate_served, source_layer_ids, start_from_served, start_from_target
from dflash.drafter.metrics import MetricSums
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.objective import ObjectiveSums, TrainedSlots, objective_sums
from dflash.drafter.optimizer import DrafterOptimizer, FlatGradients
from dflash.drafter.schedule import learning_rate
from dflash.profiling.stats import ProfileStats
from dflash.roles.setup import Run
from dflash.roles.votes import PendingOutcome, Votes, fault_code
from dflash.target.layers import load_layers
from dflash.target.vocabulary import load_vocabulary
from dflash.transport.process_groups import ProcessGroups


@dataclass(frozen=True, slots=True)
class DrafterTrainer:
    """Model, optimizer and gradients of one drafter rank; all ranks hold the same parameters, always.

    `flat.extras` holds the step's MetricSums and Votes, so that one all-reduce carries gradients, denominator, metrics
    and agreements.
    """

    run: Run
    groups: ProcessGroups | None
    stats: ProfileStats
    drafter: DFlashDrafter
    vocabulary: TargetVocabulary
    optimizer: DrafterOptimizer
    flat: FlatGradients
    metrics: MetricSums  # of the step under way
    votes: Votes
    gradients_ok: Tensor  # 0-d bool on the device: whether this rank's gradients are finite so far
    logging_state: Tensor  # the console's, as this launch found it

    @classmethod
    def load(cls, run: Run, groups: ProcessGroups | None, stats: ProfileStats) -> "DrafterTrainer":
        """The drafter at the start of this launch: drawn from the seed, or as its checkpoint left it."""
        optim = run.config.optim
        drafter = DFlashDrafter(run.drafter_shape).initialize(run.config.seed)
        init_from = run.config.model.drafter.init_from
        if run.resume_from is None and init_from == INIT_FROM_TARGET:
            layer_ids = source_layer_ids(run.drafter_shape)
            start_from_target(drafter, load_layers(run.config.model.target.path, layer_ids))
        elif run.resume_from is None and init_from is not None:
            start_from_served(drafter, locate_served(init_from))
        drafter.to(run.device)
        momentum = {} if optim.momentum is None else {"momentum": optim.momentum}
        optimizer = DrafterOptimizer(
            drafter, name=optim.name, weight_decay=optim.weight_decay, betas=tuple(optim.betas), **momentum
        )
        terms = run.objective.metric_terms
        num_metrics = MetricSums.width(run.drafter_shape.block_size, terms)
        logging_state = torch.zeros(num_metrics + 1, dtype=torch.float64)
        if run.resume_from is not None:
            load_checkpoint(run.resume_from, drafter, optimizer.parts, logging_state)
        # After the checkpoint: while states are loaded, no parameter may have a gradient.
        num_votes = Votes.width(run.config.train.micro_batches_per_step)
        flat = FlatGradients(drafter.parameters(), num_metrics + num_votes)
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
            metrics=MetricSums(flat.extras[:num_metrics], terms),
            votes=Votes(flat.extras[num_metrics:]),
            gradients_ok=torch.ones((), dtype=torch.bool, device=run.device),
            logging_state=logging_state,
        )

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for all drafters: console, metrics, publishing checkpoints."""
        return self.run.topology.colocated or self.run.topology.index_in_group(self.run.rank) == 0

    @property
    def is_alone(self) -> bool:
        return self.run.topology.num_drafters == 1

    def state(self, logging_state: Tensor) -> dict[str, Any]:
        """What a checkpoint holds."""
        return training_state(self.drafter, self.optimizer.parts, logging_state)

    def accumulate(self, hidden: PackedHiddenStates, entry: PlanEntry, place: int, pump: Callable[[], None]) -> None:
        """Add a micro-batch's gradients and metric sums to the step's, in which it has the given place.

        `pump` is called between its parts: transfers go on while this rank computes only if it looks after them.
        """
        sums = self._sums(hidden, entry, pump)
        pump()
        with self.stats.stage("backward"):
            sums.loss_sum.backward()
        with self.stats.stage("metrics"):
            self.metrics.add_(sums.metrics)
            # A sum shows NaN and infinity in one pass over the gradients and without another buffer of their size.
            gradients_ok = torch.isfinite(self.flat.gradients.sum())
            # Gradients that were bad before this micro-batch are not its fault.
            loss_ok = torch.isfinite(sums.loss_sum)
            code = fault_code(_is_finite(hidden.features), loss_ok, gradients_ok | ~self.gradients_ok)
            self.votes.accuse(place, code)
            self.gradients_ok.copy_(gradients_ok)

    @torch.no_grad()
    def evaluate(
        self, hidden: PackedHiddenStates, entry: PlanEntry, pump: Callable[[], None]
    ) -> tuple[MetricSums, Tensor]:
        """Metric sums of a held-out micro-batch, whose anchors are the same in every evaluation, and its fault code.

        The sums are zero where the code is not.
        """
        sums = self._sums(hidden, entry, pump)
        code = fault_code(
            _is_finite(hidden.features), torch.isfinite(sums.loss_sum), torch.ones_like(self.gradients_ok)
        )
        return MetricSums(torch.where(code == 0, sums.metrics.values, 0.0), sums.metrics.terms), code

    def reduce(self, tensor: Tensor) -> dist.Work:
        """Start the sum of `tensor`, in place, over all drafters, of which there are several."""
        assert self.groups is not None and not self.is_alone
        return dist.all_reduce(tensor, group=self.groups.drafters, async_op=True)

    def step(self, step: int) -> tuple[Tensor, PendingOutcome]:
        """Update the parameters from the reduced gradients, unless the votes have spoilt the step.

        Returns the gradient norm before clipping, 0-d, and what the drafters agreed on: on CUDA both are on their way
        while the update runs.
        """
        optim = self.run.config.optim
        denominator = self.metrics.denominator
        norm = self.flat.scale_and_clip(denominator, optim.clip_norm)
        self.votes.note_overflow(~torch.isfinite(norm))
        outcome = self.votes.to_host()
        self.optimizer.step(self.learning_rate(step), skip=(denominator <= 0) | self.votes.is_spoilt)
        return norm, outcome

    def clear(self) -> None:
        """Empty gradients, metrics and votes for the next step."""
        self.flat.zero()
        self.gradients_ok.fill_(True)

    def learning_rate(self, step: int) -> float:
        optim = self.run.config.optim
        return learning_rate(
            step,
            peak=optim.lr,
            total_steps=self.run.plan.num_steps,
            warmup_ratio=optim.warmup_ratio,
            schedule=optim.schedule,
            decay_ratio=optim.decay_ratio,
        )

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
            gamma = run.objective.decay(shape.block_size)
            slots = TrainedSlots.of(
                blocks, micro_batch.input_ids, micro_batch.loss_mask, gamma, run.objective.needs_teacher
            )
            anchor_tokens = micro_batch.input_ids[blocks.anchors]
            blocks, slots = blocks.to(run.device), slots.to(run.device)
            anchor_tokens = anchor_tokens.to(run.device, non_blocking=True)
        with stats.stage("mask"):
            plan = self.drafter.plan(blocks)
        with stats.stage("context_projection"):
            context_TH = self.drafter.project_context(hidden.features[:, : shape.feature_width])
        with stats.stage("layers"):
            embeddings = embed_blocks(self.vocabulary, anchor_tokens, shape.mask_token_id, shape.block_size)
            hidden_NBH = self.drafter.run_layers(context_TH, embeddings, plan)
        pump()
        with stats.stage("head_and_loss"):
            # The teacher's hidden state, where the objective needs one, travels behind the drafter's features.
            teacher_TH = hidden.features[:, shape.feature_width :] if run.objective.needs_teacher else None
            return objective_sums(hidden_NBH, slots, self.vocabulary, run.objective, teacher_TH)


def _is_finite(features: Tensor) -> Tensor:
    """0-d bool: extremes show NaN and infinity, in one pass and without a mask of the features' size."""
    return torch.isfinite(torch.stack(torch.aminmax(features))).all()
