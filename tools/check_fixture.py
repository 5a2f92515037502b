"""Computes fixture files of other trainers with this project's drafter and objective, and compares.

    python tools/check_fixture.py FILE...

Prints one JSON line per file. Exits with 0 when every file agrees, 1 when one does not or cannot be read, and 3 when
all that could be computed agree but a file asks for a loss that is not supported.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from dflash.batch import TargetVocabulary
from dflash.config import LayerType
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import vocabulary_logits
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.objective import ObjectiveSettings, TrainedSlots, objective_sums
from dflash.drafter.shape import DrafterShape

LOSS_TOLERANCE, TENSOR_TOLERANCE = 1e-5, 1e-4
EXIT_DISAGREES, EXIT_UNSUPPORTED = 1, 3


class UnsupportedError(Exception):
    """The file asks for a loss or a variant that this project does not compute."""


@dataclass(frozen=True)
class Case:
    """One fixture in this project's terms.

    Shapes: `features_TF` [T, n*H]; `blocks` N of B over the packed row; `slots` to train; `teacher_TH` [T, H], where
    `settings` need it; the family's loss is (loss sum) / `divisor`. `logits_NBV` are expected at `logit_slots`, bool
    [N, B], where the family has them.
    """

    family: str
    shape: DrafterShape
    weights: Mapping[str, Tensor]
    vocabulary: TargetVocabulary
    features_TF: Tensor
    input_ids_T: Tensor
    blocks: Blocks
    slots: TrainedSlots
    settings: ObjectiveSettings
    divisor: float
    expected: Mapping[str, float]
    gradients: Mapping[str, Tensor]
    teacher_TH: Tensor | None = None
    logits_NBV: Tensor | None = None
    logit_slots: Tensor | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    reports = []
    for path in parser.parse_args(arguments).files:
        reports.append(check(path))
        print(json.dumps(reports[-1]), flush=True)
    if not all(report.get("agrees", "unsupported" in report) for report in reports):
        return EXIT_DISAGREES
    return EXIT_UNSUPPORTED if any("unsupported" in report for report in reports) else 0


def check(path: Path) -> dict[str, Any]:
    """The report of one file: computed and expected numbers, worst errors, and whether they are within tolerance."""
    try:
        meta, tensors = read(path)
        case = padded_case(meta, tensors) if "cfg" not in meta else packed_case(meta["cfg"], meta["expected"], tensors)
        return {"file": str(path), "family": case.family, **case.notes, **compare(case)}
    except UnsupportedError as error:
        return {"file": str(path), "unsupported": str(error)}
    except Exception as error:  # Whatever is wrong with one file, the others are still to be compared.
        return {"file": str(path), "agrees": False, "error": f"{type(error).__name__}: {error}"}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if "meta" not in metadata:
            raise ValueError("no `meta` in the file's metadata: not a fixture of the padded or packed family")
        return json.loads(metadata["meta"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def compare(case: Case) -> dict[str, Any]:
    """Computes the case and compares it; the error of a tensor is its largest difference over its largest value."""
    drafter = DFlashDrafter(case.shape)
    drafter.load_state_dict(case.weights)
    embeddings = embed_blocks(
        case.vocabulary, case.input_ids_T[case.blocks.anchors], case.shape.mask_token_id, case.shape.block_size
    )
    hidden_NBH = drafter(case.features_TF, embeddings, case.blocks)
    sums = objective_sums(hidden_NBH, case.slots, case.vocabulary, case.settings, case.teacher_TH)
    loss = sums.loss_sum / case.divisor
    loss.backward()
    # Where no slot is trained nothing reaches a parameter, and its gradient is zero.
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in drafter.named_parameters()}
    grad_norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
    errors = {name: tensor_error(grads[name], expected) for name, expected in case.gradients.items()}
    logits_error = None
    if case.logits_NBV is not None:
        logits_NBV = vocabulary_logits(hidden_NBH.detach().flatten(0, 1), case.vocabulary).view_as(case.logits_NBV)
        logits_error = tensor_error(logits_NBV[case.logit_slots], case.logits_NBV[case.logit_slots])
    loss_error = number_error(loss.item(), case.expected["loss"])
    grad_norm_error = number_error(grad_norm, case.expected["grad_norm"])
    worst_gradient = max(errors.values(), default=0.0)
    agrees = (
        loss_error <= LOSS_TOLERANCE and max(grad_norm_error, worst_gradient, logits_error or 0.0) <= TENSOR_TOLERANCE
    )
    return {
        "loss": loss.item(),
        "expected_loss": case.expected["loss"],
        "grad_norm": grad_norm,
        "expected_grad_norm": case.expected["grad_norm"],
        "loss_error": loss_error,
        "grad_norm_error": grad_norm_error,
        "logits_error": logits_error,
        "gradients_error": worst_gradient,
        "gradient_errors": errors,
        "num_trained_slots": case.slots.num_slots,
        "agrees": bool(agrees),
    }


def padded_case(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Case:
    """A SpecForge training step: R rows of S tokens, each row one document, R * K anchors of which some are kept."""
    settings, block_size = padded_settings(meta), meta["block_size"]
    num_rows, row_length = tensors["input_ids"].shape
    lengths = torch.full((num_rows,), row_length)
    anchors_RK = tensors["anchors"].long() + torch.arange(num_rows)[:, None] * row_length
    blocks = Blocks.at(anchors_RK[tensors["anchor_keep"] != 0], lengths, block_size)
    input_ids_T = tensors["input_ids"].flatten()
    slots = TrainedSlots.of(blocks, input_ids_T, tensors["loss_mask"].flatten(), settings.decay(block_size))
    # Its divisor guards against zero by an addend; under D-PACE it counts rows, not slots.
    divisor = slots.denominator + 1e-6 if settings.dpace_alpha is None else num_rows
    shape = drafter_shape(
        meta,
        meta["num_target_features"],
        layer_types=meta["layer_types"],
        sliding_window=meta["sliding_window"] or None,
    )
    return case_of("padded", shape, tensors, blocks, slots, settings, divisor, meta["expected"])


def packed_case(cfg: Mapping[str, Any], expected: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Case:
    """A speculators training step: one packed row, labels from the target's own logits, a divisor without decay."""
    settings = packed_settings(cfg)
    if cfg.get("sample_from_anchor") or cfg.get("draft_vocab"):
        raise UnsupportedError("sample_from_anchor or a reduced draft vocabulary")
    block_size = cfg["block_size"]
    document_ids_T = tensors["document_ids"]
    lengths = torch.unique_consecutive(document_ids_T, return_counts=True)[1]
    used_N = tensors["anchors"] >= 0
    blocks = Blocks.at(tensors["anchors"][used_N], lengths, block_size)
    if not torch.equal(blocks.token_positions[document_ids_T >= 0], tensors["position_ids"][document_ids_T >= 0]):
        raise ValueError("position_ids are not the places of the tokens within their documents")

    tokens_NB = blocks.tokens_NB.clamp(max=blocks.num_tokens - 1)
    supervised_NB = blocks.in_document_NB & (tensors["loss_mask"][tokens_NB] != 0)
    supervised_NB[:, 0] = False
    reference_NB = tensors["expected.aligned_loss_mask"].view(-1, block_size)[used_N] != 0
    if not torch.equal(supervised_NB, reference_NB & blocks.in_document_NB):
        raise ValueError("expected.aligned_loss_mask differs from loss_mask within a document")
    # That trainer does not stop at the end of a document. Its numbers can only be met by training what it trained.
    num_beyond = int((reference_NB & ~supervised_NB).sum())

    decay, places_NB = settings.decay(block_size), tokens_NB - 1
    slots = TrainedSlots.labelled(reference_NB, tensors["input_ids"].flatten()[tokens_NB], decay, places_NB)
    sizes = {
        "hidden_size": cfg["hidden"],
        "intermediate_size": cfg["ffn"],
        "num_attention_heads": cfg["heads"],
        "num_key_value_heads": cfg["kv_heads"],
        "head_dim": cfg["head_dim"],
        "vocab_size": cfg["vocab"],
        "block_size": block_size,
        "mask_token_id": cfg["mask_token_id"],
        "rope_theta": cfg["rope_theta"],
    }
    shape = drafter_shape(
        sizes,
        cfg["aux_layers"],
        layer_types=packed_layer_types(cfg),
        sliding_window=cfg["sliding_window"] or None,
        sliding_is_causal=not cfg.get("non_causal"),
    )
    logits_NBV = tensors["expected.logits"].view(used_N.numel(), block_size, -1)[used_N]
    return case_of(
        "packed",
        shape,
        tensors,
        blocks,
        slots,
        settings,
        slots.num_slots + 1e-5,
        expected,
        teacher_TH=rms_norm(tensors["verifier_last_hidden_states"], tensors["target_norm.weight"]),
        logits_NBV=logits_NBV,
        logit_slots=reference_NB,
        notes={"num_slots_beyond_document": num_beyond} if num_beyond else {},
    )


def padded_settings(meta: Mapping[str, Any]) -> ObjectiveSettings:
    """CE on the data's tokens, with its decay or with D-PACE's weights, whose alpha is 0.5 where the file says none."""
    if meta["loss_type"] not in ("dflash", "dpace"):
        raise UnsupportedError(f"loss_type {meta['loss_type']!r}")
    alpha = meta.get("dpace_alpha", 0.5) if meta["loss_type"] == "dpace" else None
    return ObjectiveSettings(gamma=gamma_of(meta) if alpha is None else None, dpace_alpha=alpha)


def packed_settings(cfg: Mapping[str, Any]) -> ObjectiveSettings:
    """CE on the target's tokens, KL or TV with the decay, or that CE with D-PACE's weights."""
    kinds = {"ce": "ce_weight", "kl_div": "kl_weight", "tv": "tv_weight"}
    loss, weighting = cfg["loss"], cfg["weighting"]
    if loss not in kinds or weighting not in ("fixed-exp-decay", "dpace") or (weighting == "dpace" and loss != "ce"):
        raise UnsupportedError(f"loss {loss!r} with weighting {weighting!r}")
    alpha = cfg["dpace_alpha"] if weighting == "dpace" else None
    return ObjectiveSettings(
        gamma=gamma_of(cfg) if alpha is None else None,
        labels="target",
        dpace_alpha=alpha,
        **{"ce_weight": 0.0, kinds[loss]: 1.0},
    )


def gamma_of(settings: Mapping[str, Any]) -> float:
    """The decay along the block; without one all slots weigh alike, which is the limit of a slow decay."""
    return settings.get("gamma") or math.inf


def packed_layer_types(cfg: Mapping[str, Any]) -> list[LayerType]:
    full = cfg.get("full_attention_indices") or ()
    full = {int(i) for i in (full.split(",") if isinstance(full, str) else full) if str(i).strip()}
    slides = bool(cfg["sliding_window"])
    kinds = (LayerType.full_attention, LayerType.sliding_attention)
    return [kinds[slides and i not in full] for i in range(cfg["layers"])]


def drafter_shape(sizes: Mapping[str, Any], num_features: int, **layers: Any) -> DrafterShape:
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    return DrafterShape(
        **{name: sizes[name] for name in (*names, "block_size", "mask_token_id")},
        rms_norm_eps=sizes.get("rms_norm_eps", 1e-6),
        rope_theta=float(sizes["rope_theta"]),
        # The files do not say which layers they captured, nor does the drafter's arithmetic ask.
        target_layer_ids=tuple(range(num_features)),
        num_target_layers=num_features + 1,
        max_position_embeddings=1 << 20,
        **layers,
    )


def case_of(
    family: str,
    shape: DrafterShape,
    tensors: Mapping[str, Tensor],
    blocks: Blocks,
    slots: TrainedSlots,
    settings: ObjectiveSettings,
    divisor: float,
    expected: Mapping[str, Any],
    **rest: Any,
) -> Case:
    return Case(
        family=family,
        shape=shape,
        weights=with_prefix(tensors, "draft."),
        vocabulary=TargetVocabulary(tensors["embed.weight"], tensors["lm_head.weight"]),
        features_TF=tensors["hidden_states"].flatten(0, -2),
        input_ids_T=tensors["input_ids"].flatten(),
        blocks=blocks,
        slots=slots,
        settings=settings,
        divisor=divisor,
        expected={name: expected[name] for name in ("loss", "grad_norm")},
        gradients=with_prefix(tensors, "grad."),
        **rest,
    )


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(hidden, weight.shape, weight, 1e-6)


def tensor_error(computed: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; where that is zero, the largest difference."""
    if expected.numel() == 0:
        return 0.0
    error = float((computed - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
    return error if math.isfinite(error) else math.inf


def number_error(computed: float, expected: float) -> float:
    error = abs(computed - expected) / (abs(expected) or 1.0)
    return error if math.isfinite(error) else math.inf


if __name__ == "__main__":
    sys.exit(main())
