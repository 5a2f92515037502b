"""The oracles: fixtures of other trainers through the real command, and the served pair's teacher-forced logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers_fixtures import packed_variant, padded_variant
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash.batch import TargetVocabulary
from dflash.drafter.blocks import Blocks
from dflash.drafter.head import vocabulary_logits
from dflash.drafter.model import embed_blocks
from dflash.drafter.served import load_served

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
NAMES = ["padded_full_ce", "padded_sliding_ce", "padded_full_dpace", "packed_full_ce", "packed_full_kl"]


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
    code, reports = _check(*(FIXTURES / f"{name}.safetensors" for name in NAMES))
    assert code == 0 and len(reports) == len(NAMES)
    for report in reports:
        assert report["agrees"] is True
        assert report["loss"] == pytest.approx(report["expected_loss"], rel=1e-5)
        assert report["grad_norm"] == pytest.approx(report["expected_grad_norm"], rel=1e-4)
        assert report["gradients_error"] < 1e-5 and len(report["gradient_errors"]) in (3, 6)
        assert (report["logits_error"] is None) == (report["family"] == "padded")


def _one_sided_dpace(meta, tensors):
    meta["loss_type"] = "dpace-cumulative-confidence-only"


def _reverse_kl(meta, tensors):
    meta["cfg"]["loss"] = "rkl"


def _dpace_of_kl(meta, tensors):
    meta["cfg"]["weighting"] = "dpace"


def _other_weighting(meta, tensors):
    meta["cfg"]["weighting"] = "linear"


def test_unsupported_losses_have_their_own_exit_code(tmp_path):
    changes = [
        ("padded_full_dpace", _one_sided_dpace),
        ("packed_full_ce", _reverse_kl),
        ("packed_full_kl", _dpace_of_kl),
        ("packed_full_ce", _other_weighting),
    ]
    code, reports = _check(*_variants(tmp_path, changes), FIXTURES / "padded_full_ce.safetensors")
    assert code == 3
    assert ["unsupported" in report for report in reports] == [True] * len(changes) + [False]


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


def _other_alpha(meta, tensors):
    meta["dpace_alpha"] = 0.499


def _one_slot_less(meta, tensors):
    """The last supervised slot of a used block no longer counts."""
    last = int(tensors["anchors"][-2]) + meta["cfg"]["block_size"] - 1
    tensors["loss_mask"][last] = 0
    tensors["expected.aligned_loss_mask"][0, -meta["cfg"]["block_size"] - 1] = 0


def _other_norm(meta, tensors):
    tensors["target_norm.weight"][5] *= 1.01


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
        ("padded_full_dpace", _other_alpha),
        ("padded_full_dpace", _keep_more),
        ("packed_full_kl", _one_slot_less),
        ("packed_full_kl", _other_norm),
    ]
    code, reports = _check(*_variants(tmp_path, changes))
    assert all("error" not in report for report in reports), reports
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
    cases = [(name, change) for name in names for change in changes]
    # Under D-PACE the number of rows is the divisor, so a row more would show.
    code, reports = _check(*_variants(tmp_path, [*cases, ("padded_full_dpace", _shuffle_anchors)]))
    assert code == 0, reports


def test_other_files_of_both_schemas_agree_with_the_dense_twin(tmp_path):
    padded = [padded_variant(tmp_path / f"padded_{alpha}.safetensors", alpha) for alpha in (None, 0.0, 0.3)]
    kinds = [("ce", None), ("kl_div", None), ("tv", None), ("ce", 0.7)]
    packed = [packed_variant(tmp_path / f"{loss}_{alpha}.safetensors", loss, alpha) for loss, alpha in kinds]
    code, reports = _check(*padded, *packed)
    assert code == 0, reports
    for report in reports[len(padded) :]:
        assert report["logits_error"] < 1e-5 and report["num_slots_beyond_document"] > 0


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

    source = packed_variant(tmp_path / "source.safetensors")
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
    unsupported = _changed(FIXTURES / "packed_full_ce.safetensors", tmp_path / "unsupported.safetensors", _reverse_kl)
    code, reports = _check(*files, unsupported, FIXTURES / "padded_full_ce.safetensors")
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
