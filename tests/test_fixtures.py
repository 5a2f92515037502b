"""The oracles: fixtures of other trainers through the real command, and the served pair's teacher-forced logits."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers_drafter import dense_drafter, randomize, small_micro_batch, small_shape, small_vocabulary
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash.batch import TargetVocabulary
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import vocabulary_logits
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.served import load_served
from dflash.drafter.shape import DrafterShape

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
SUPPORTED = ["padded_full_ce", "padded_sliding_ce", "packed_full_ce"]
UNSUPPORTED = ["padded_full_dpace", "packed_full_kl"]


def _check(*files: Path) -> tuple[int, list[dict]]:
    command = [sys.executable, str(ROOT / "tools" / "check_fixture.py"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FIXTURES, timeout=120)
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def _changed(source: Path, target: Path, change) -> Path:
    """A copy of a fixture after `change(meta, tensors)`."""
    with safe_open(source, "pt") as file:
        meta = json.loads(file.metadata()["meta"])
    tensors = load_file(source)
    change(meta, tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target, {"meta": json.dumps(meta)})
    return target


def test_the_command_agrees_with_the_fixtures():
    code, reports = _check(*(FIXTURES / f"{name}.safetensors" for name in SUPPORTED))
    assert code == 0 and len(reports) == len(SUPPORTED)
    for report in reports:
        assert report["agrees"] is True
        assert report["loss"] == pytest.approx(report["expected_loss"], rel=1e-5)
        assert report["grad_norm"] == pytest.approx(report["expected_grad_norm"], rel=1e-4)
        assert report["gradients_error"] < 1e-5 and len(report["gradient_errors"]) in (3, 6)
        assert (report["logits_error"] is None) == (report["family"] == "padded")


def test_unsupported_losses_have_their_own_exit_code():
    code, reports = _check(
        *(FIXTURES / f"{name}.safetensors" for name in UNSUPPORTED), FIXTURES / "padded_full_ce.safetensors"
    )
    assert code == 3
    assert ["unsupported" in report for report in reports] == [True, True, False]


def _shift_loss(meta, tensors):
    meta["expected"]["loss"] *= 1 + 3e-5


def _shift_gradient(meta, tensors):
    tensors["grad.fc.weight"][3, 5] += 3e-4 * tensors["grad.fc.weight"].abs().max()


def _shift_logits(meta, tensors):
    tensors["expected.logits"][0, 9, 4] += 3e-4 * tensors["expected.logits"].abs().max()


def _other_window(meta, tensors):
    meta["sliding_window"] = 23


def _other_gamma(meta, tensors):
    meta["gamma"] = 6.5


def _keep_more(meta, tensors):
    tensors["anchor_keep"][0, 0] ^= 1


def _variants(folder: Path, changes: list) -> list[Path]:
    return [
        _changed(FIXTURES / f"{name}.safetensors", folder / f"{number}.safetensors", change)
        for number, (name, change) in enumerate(changes)
    ]


def test_small_differences_are_failures(tmp_path):
    changes = [
        ("padded_full_ce", _shift_loss),
        ("padded_full_ce", _shift_gradient),
        ("packed_full_ce", _shift_logits),
        ("padded_sliding_ce", _other_window),
        ("padded_sliding_ce", _other_gamma),
        ("padded_full_ce", _keep_more),
    ]
    code, reports = _check(*_variants(tmp_path, changes))
    assert code == 1 and [report["agrees"] for report in reports] == [False] * len(changes)


def _shuffle_anchors(meta, tensors):
    order = torch.tensor([4, 0, 7, 2, 6, 1, 5, 3])
    for name in ("anchors", "anchor_keep"):
        tensors[name] = tensors[name][:, order]


def _spoil_dropped(meta, tensors):
    """Anchors that are not kept, and rows without any that are, may hold anything."""
    tensors["anchors"] = torch.where(tensors["anchor_keep"] != 0, tensors["anchors"], 11)
    for name, filler in (
        ("input_ids", 3),
        ("hidden_states", 0.5),
        ("loss_mask", 1),
        ("anchors", 7),
        ("anchor_keep", 0),
    ):
        tensors[name] = torch.cat((torch.full_like(tensors[name][:1], filler), tensors[name]))


def test_what_does_not_count_does_not_show(tmp_path):
    names, changes = ("padded_full_ce", "padded_sliding_ce"), (_shuffle_anchors, _spoil_dropped)
    code, reports = _check(*_variants(tmp_path, [(name, change) for name in names for change in changes]))
    assert code == 0, reports


def _written(path: Path, meta: dict, weights: dict, tensors: dict, loss: torch.Tensor) -> Path:
    """A fixture whose loss and gradients come from the dense twin."""
    loss.backward()
    grads = {name: weight.grad for name, weight in weights.items()}
    norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
    meta["expected"] = {"loss": float(loss.detach()), "grad_norm": norm}
    tensors |= {f"draft.{name}": weight.detach() for name, weight in weights.items()}
    tensors |= {f"grad.{name}": grad for name, grad in grads.items()}
    single = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    save_file({name: value.contiguous() for name, value in single.items()}, path, {"meta": json.dumps(meta)})
    return path


def _twin_weights(shape: DrafterShape) -> dict[str, torch.Tensor]:
    drafter = DFlashDrafter(shape)
    randomize(drafter)
    return {name: value.double().requires_grad_() for name, value in drafter.state_dict().items()}


def _padded_variant(path: Path) -> Path:
    """Block 5, window 6, three query heads to a key head, no decay, an unused row, blocks past the end."""
    shape = small_shape(layer_types=("sliding_attention", "full_attention"), sliding_window=6)
    vocabulary, batch, size = small_vocabulary(shape), small_micro_batch([21] * 3), shape.block_size
    features = torch.randn(3, 21, shape.feature_width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    anchors = torch.tensor([[20, 3, 9, 3], [1, 2, 3, 4], [18, 0, 12, 7]])
    keep = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
    rows = [(r, int(a)) for r in range(3) for a, kept in zip(anchors[r], keep[r], strict=True) if kept]
    packed = [r * 21 + a for r, a in rows]
    weights = _twin_weights(shape)
    embeddings = embed_blocks(vocabulary, batch.input_ids[packed], shape.mask_token_id, size)
    hidden = dense_drafter(weights, shape, features.flatten(0, 1), embeddings, packed, [21] * 3)
    losses = []
    for n, (r, a) in enumerate(rows):
        for k in range(1, size):
            if a + k < 21 and batch.loss_mask[r * 21 + a + k]:
                label = batch.input_ids[r * 21 + a + k].long()
                losses.append(F.cross_entropy(hidden[n, k] @ vocabulary.head.T, label))
    meta = {name: getattr(shape, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")}
    meta |= {name: getattr(shape, name) for name in ("num_key_value_heads", "head_dim", "vocab_size", "block_size")}
    meta |= {name: getattr(shape, name) for name in ("mask_token_id", "rms_norm_eps", "rope_theta", "sliding_window")}
    meta |= {"layer_types": list(shape.layer_types), "gamma": None, "loss_type": "dflash", "num_target_features": 3}
    tensors = {"embed.weight": vocabulary.embedding, "lm_head.weight": vocabulary.head, "hidden_states": features}
    tensors |= {"anchors": anchors, "anchor_keep": keep}
    tensors |= {"input_ids": batch.input_ids.view(3, 21).long(), "loss_mask": batch.loss_mask.view(3, 21).long()}
    return _written(path, meta, weights, tensors, torch.stack(losses).mean())


def _packed_variant(path: Path) -> Path:
    """Sliding layers, non-causal in the block, blocks that run into the next document, unused anchors in between."""
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    shape = small_shape(layer_types=kinds, sliding_window=4, sliding_is_causal=False, block_size=6, rope_theta=1e6)
    lengths, size, padding = [17, 9, 14], shape.block_size, 5
    vocabulary, batch = small_vocabulary(shape), small_micro_batch([*lengths, padding])
    batch.loss_mask[-padding:] = 0
    generator = torch.Generator().manual_seed(6)
    features, last = (
        torch.randn(45, width, dtype=torch.float64, generator=generator)
        for width in (shape.feature_width, shape.hidden_size)
    )
    anchors = [30, -1, 14, 2, -1, 0]
    used = [a for a in anchors if a >= 0]
    weights = _twin_weights(shape)
    embeddings = embed_blocks(vocabulary, batch.input_ids[used], shape.mask_token_id, size)
    hidden = dense_drafter(weights, shape, features, embeddings, used, [*lengths, padding])
    normed = last / torch.sqrt(last.square().mean(-1, keepdim=True) + 1e-6)
    labels = (normed @ vocabulary.head.T).argmax(-1)
    total, mask, logits = torch.zeros(()), torch.zeros(len(anchors), size), torch.zeros(len(anchors), size, 37)
    for n, a in enumerate(used):
        row = anchors.index(a)
        logits[row] = hidden[n].detach() @ vocabulary.head.T
        for k in range(1, size):
            if batch.loss_mask[a + k]:
                mask[row, k] = 1
                loss = F.cross_entropy(hidden[n, k] @ vocabulary.head.T, labels[a + k - 1])
                total = total + loss * math.exp(-(k - 1) / 2.5)
    cfg = {
        "hidden": 20,
        "ffn": 28,
        "layers": 3,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "vocab": 37,
        "draft_vocab": 0,
    }
    cfg |= {"rope_theta": 1e6, "aux_layers": 3, "block_size": size, "mask_token_id": 36, "sliding_window": 4}
    cfg |= {"full_attention_indices": "1", "non_causal": True, "sample_from_anchor": False, "loss": "ce", "gamma": 2.5}
    cfg |= {"weighting": "fixed-exp-decay"}
    document_ids = torch.tensor([d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * padding)
    position_ids = torch.tensor([p for length in lengths for p in range(length)] + [0] * padding)
    tensors = {"embed.weight": vocabulary.embedding, "lm_head.weight": vocabulary.head, "hidden_states": features}
    tensors |= {"anchors": torch.tensor(anchors), "document_ids": document_ids, "position_ids": position_ids}
    tensors |= {"input_ids": batch.input_ids.long(), "loss_mask": batch.loss_mask.long()}
    tensors |= {"verifier_last_hidden_states": last, "target_norm.weight": torch.ones(20)}
    tensors |= {"expected.aligned_loss_mask": mask.view(1, -1).long(), "expected.logits": logits.view(1, -1, 37)}
    return _written(path, {"cfg": cfg}, weights, tensors, total / (mask.sum() + 1e-5))


def test_other_files_of_both_schemas_agree_with_the_dense_twin(tmp_path):
    code, reports = _check(
        _padded_variant(tmp_path / "padded.safetensors"), _packed_variant(tmp_path / "packed.safetensors")
    )
    assert code == 0, reports
    assert reports[1]["logits_error"] < 1e-5 and reports[1]["num_slots_beyond_document"] > 0


def _no_gamma(meta, tensors):
    meta["cfg"]["gamma"] = None


def _absent_gamma_and_indices(meta, tensors):
    del meta["cfg"]["gamma"], meta["cfg"]["full_attention_indices"]


def _slow_decay(meta, tensors):
    meta["cfg"]["gamma"] = 1e30


def test_a_packed_file_without_gamma_does_not_decay(tmp_path):
    names = ["packed_full_ce"] * 3
    changes = [_no_gamma, _absent_gamma_and_indices, _slow_decay]
    code, reports = _check(*_variants(tmp_path, list(zip(names, changes, strict=True))))
    losses = [report["loss"] for report in reports]
    assert code == 1, "the file was written with a decay"
    assert losses == [losses[0]] * 3 and losses[0] > reports[0]["expected_loss"]


def test_sliding_layers_without_full_ones(tmp_path):
    """No indices at all, an empty list and an empty text all mean that every layer slides."""

    def indices(value):
        def change(meta, tensors):
            meta["cfg"]["full_attention_indices"] = value

        return change

    def absent(meta, tensors):
        del meta["cfg"]["full_attention_indices"]

    source = _packed_variant(tmp_path / "source.safetensors")
    changes = [indices([]), indices(""), indices(None), absent]
    files = [_changed(source, tmp_path / f"{n}.safetensors", change) for n, change in enumerate(changes)]
    code, reports = _check(source, *files)
    assert code == 1 and reports[0]["agrees"] is True
    losses = [report["loss"] for report in reports[1:]]
    assert losses == [losses[0]] * 4 and losses[0] != reports[0]["loss"]


def _gamma_of_text(meta, tensors):
    meta["cfg"]["gamma"] = "slow"


def _no_hidden_states(meta, tensors):
    tensors["hidden_states"] = tensors["hidden_states"][..., :-1]


def _no_norm(meta, tensors):
    del tensors["draft.norm.weight"]


def _grad_of_nothing(meta, tensors):
    tensors["grad.nothing"] = torch.zeros(3)


def _grad_of_another_shape(meta, tensors):
    tensors["grad.fc.weight"] = tensors["grad.fc.weight"][:, :-1]


def _no_expected_loss(meta, tensors):
    meta["expected"] = {"loss": "high", "grad_norm": None}


def test_a_broken_file_is_named_and_the_next_ones_are_still_read(tmp_path):
    changes = [
        ("packed_full_ce", _gamma_of_text),
        ("packed_full_ce", _no_hidden_states),
        ("padded_full_ce", _no_norm),
        ("padded_full_ce", _grad_of_nothing),
        ("padded_full_ce", _grad_of_another_shape),
        ("padded_full_ce", _no_expected_loss),
    ]
    files = _variants(tmp_path, changes)
    code, reports = _check(*files, FIXTURES / "padded_full_dpace.safetensors", FIXTURES / "padded_full_ce.safetensors")
    assert code == 1
    assert [report["file"] for report in reports[: len(files)]] == [str(file) for file in files]
    assert all(report["error"] and report["agrees"] is False for report in reports[: len(files)])
    assert "unsupported" in reports[-2] and reports[-1]["agrees"] is True


def test_files_that_are_no_fixture_are_an_answer_not_a_traceback(tmp_path):
    (tmp_path / "text.safetensors").write_text("no tensors")
    files = [
        tmp_path / "absent.safetensors",
        tmp_path / "text.safetensors",
        FIXTURES / "served_pair/draft/model.safetensors",
    ]
    code, reports = _check(*files)
    assert code == 1 and all(report["agrees"] is False and report["error"] for report in reports)


def _served_pair():
    folder = FIXTURES / "served_pair"
    target, forced = (
        load_file(folder / "target" / "model.safetensors"),
        load_file(folder / "teacher_forced.safetensors"),
    )
    vocabulary = TargetVocabulary(target["model.embed_tokens.weight"], target["lm_head.weight"])
    expected = json.loads((folder / "expected.json").read_text())["teacher_forced"]
    drafter = load_served(folder / "draft")
    sequence, anchors = torch.tensor(expected["sequence"]), forced["anchors"]
    embeddings = embed_blocks(vocabulary, sequence[anchors], drafter.shape.mask_token_id, drafter.shape.block_size)
    drafts = [block["draft"] for block in expected["blocks"]]
    return drafter, vocabulary, forced["target_features"][0], anchors, embeddings, forced["block_logits"], drafts


def _assert_close(logits: torch.Tensor, expected: torch.Tensor, drafts: list[list[int]]) -> None:
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert logits.argmax(-1).tolist() == drafts


def test_teacher_forced_logits_through_training():
    drafter, vocabulary, features_TF, anchors, embeddings, expected, drafts = _served_pair()
    blocks = Blocks.at(anchors, torch.tensor([features_TF.shape[0]]), drafter.shape.block_size)
    with torch.no_grad():
        hidden = drafter(features_TF, embeddings, blocks)[:, 1:]
    _assert_close(vocabulary_logits(hidden.flatten(0, 1), vocabulary).view_as(expected), expected, drafts)


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_teacher_forced_logits_through_decoding(piece):
    drafter, vocabulary, features_TF, anchors, embeddings, expected, drafts = _served_pair()
    cache, logits = drafter.new_cache(capacity=4), {}
    for anchor, block in sorted(zip(anchors.tolist(), embeddings, strict=True), key=lambda pair: pair[0]):
        while cache.length < anchor:
            drafter.append_context(cache, features_TF[cache.length : min(cache.length + piece, anchor)])
        logits[anchor] = vocabulary_logits(drafter.draft_hidden(block, cache, anchor)[1:], vocabulary)
    _assert_close(torch.stack([logits[anchor] for anchor in anchors.tolist()]), expected, drafts)
