"""Speculative decoding is what the target alone would have said, whatever its cache and however good the drafts."""

import json
from pathlib import Path

import helpers_decoding as helpers
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from dflash import decoding
from dflash.decoding import CachedTarget, SpeculativeResult, greedy_decode, speculative_decode
from dflash.drafter.blocks import Blocks
from dflash.drafter.model import DFlashDrafter, embed_blocks
from dflash.drafter.served import load_served
from dflash.target.loading import load_causal_lm
from dflash.target.vocabulary import vocabulary_of

PAIR = Path(__file__).parent / "fixtures" / "served_pair"
EXPECTED = json.loads((PAIR / "expected.json").read_text())
NUM_NEW_TOKENS = 32


@pytest.fixture(scope="module", params=helpers.TARGETS)
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    return helpers.random_target(request.param)


@pytest.fixture(scope="module")
def full_target() -> PreTrainedModel:
    return helpers.random_target("full")


@pytest.fixture(scope="module")
def served_target() -> PreTrainedModel:
    return load_causal_lm(str(PAIR / "target"), torch.float32, torch.device("cpu"))


@torch.inference_mode()
def whole_features(target: PreTrainedModel, ids: list[int], target_layer_ids: tuple[int, ...]) -> torch.Tensor:
    """Features [T, F] of a sequence read at once, by Transformers' own definition."""
    hidden = target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[i + 1][0] for i in target_layer_ids], dim=-1)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


@torch.inference_mode()
def naive_speculative_decode(
    target: PreTrainedModel, drafter: DFlashDrafter, prompt: list[int], num_new_tokens: int, stop_ids: tuple[int, ...]
) -> SpeculativeResult:
    """The same without any cache: all is read anew each turn, drafts come from the drafter's training forward."""
    shape, vocabulary = drafter.shape, vocabulary_of(target)
    choose = lambda ids: target(input_ids=torch.tensor([ids])).logits[0].argmax(-1).tolist()  # noqa: E731
    result = SpeculativeResult([choose(prompt)[-1]])
    while len(result.output_ids) < num_new_tokens and result.output_ids[-1] not in stop_ids:
        known = prompt + result.output_ids
        start = len(known) - 1
        features = whole_features(target, known, shape.target_layer_ids)
        blocks = Blocks.at(torch.tensor([start]), torch.tensor([len(known)]), shape.block_size)
        embedded = embed_blocks(vocabulary, torch.tensor(known[-1:]), shape.mask_token_id, shape.block_size)
        hidden = drafter(features, embedded, blocks)
        draft = (hidden[0, 1:] @ vocabulary.head.T).argmax(-1).tolist()
        room = num_new_tokens - len(result.output_ids)
        gained: list[int] = []
        num_accepted = 0
        for token, right in zip([*draft, None], choose(known + draft)[start:], strict=True):
            gained.append(right)
            # The last token there is room for is the target's own, whatever was drafted for it.
            if token != right or len(gained) == room:
                break
            num_accepted += 1
            if right in stop_ids:
                break
        result.output_ids.extend(gained)
        result.starts.append(start)
        result.drafts.append(draft)
        result.acceptance_lengths.append(len(gained))
        result.accepted.append(num_accepted)
    return result


@pytest.mark.parametrize("entry", EXPECTED["greedy_decoding"], ids=lambda entry: f"prompt{len(entry['prompt'])}")
def test_served_pair_decodes_as_by_another_runtime(entry: dict, served_target: PreTrainedModel) -> None:
    num_new_tokens = EXPECTED["max_new_tokens"]
    limits = {"max_new_tokens": num_new_tokens, "stop_ids": ()}
    drafter = load_served(PAIR / "draft")
    result = speculative_decode(served_target, drafter, vocabulary_of(served_target), entry["prompt"], **limits)
    assert greedy_decode(served_target, entry["prompt"], **limits) == entry["greedy"]
    assert result.output_ids == entry["output"]
    assert result.starts == entry["starts"]
    assert result.acceptance_lengths == entry["acceptance_lengths"]
    assert result.accepted == [length - 1 for length in entry["acceptance_lengths"]]
    num_whole = sum(start + 8 <= len(entry["prompt"]) + num_new_tokens for start in entry["starts"])
    assert result.drafts[:num_whole] == entry["drafts"][:num_whole]
    assert all(len(draft) == 7 for draft in result.drafts), "a whole block is drafted even at the end"


def test_teacher_forced_logits_of_the_served_pair(served_target: PreTrainedModel) -> None:
    tensors, forced = load_file(PAIR / "teacher_forced.safetensors"), EXPECTED["teacher_forced"]
    drafter, vocabulary = load_served(PAIR / "draft"), vocabulary_of(served_target)
    with torch.inference_mode():
        runner = CachedTarget(served_target, drafter.shape.target_layer_ids)
        _, features_TF = runner.prefill(torch.tensor(forced["sequence"]))
        assert_close(features_TF, tensors["target_features"][0])
        cache = drafter.new_cache()
        drafter.append_context(cache, features_TF)
        for block, expected_KV in zip(forced["blocks"], tensors["block_logits"], strict=True):
            embedded_BH = embed_blocks(vocabulary, torch.tensor([block["anchor"]]), drafter.shape.mask_token_id, 8)[0]
            hidden_BH = drafter.draft_hidden(embedded_BH, cache, block["anchor_pos"])
            logits_KV = hidden_BH[1:] @ vocabulary.head.T
            assert_close(logits_KV, expected_KV)
            assert logits_KV.argmax(-1).tolist() == block["draft"]


@pytest.mark.parametrize(("num_prompt_tokens", "block_size"), [(1, 2), (1, 5), (11, 2), (11, 5)])
def test_rollback_is_exact(
    target: PreTrainedModel, num_prompt_tokens: int, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that are right up to a drawn slot, so that every cache goes back by every number of tokens."""
    prompt = helpers.random_prompt(num_prompt_tokens)
    limits = {"max_new_tokens": NUM_NEW_TOKENS, "stop_ids": ()}
    answer = greedy_decode(target, prompt, **limits)
    assert len(set(answer)) > 10, "an answer that repeats one token would hide mistakes"
    scripted = helpers.ScriptedDrafting(prompt, answer, block_size)
    monkeypatch.setattr(decoding, "Drafting", scripted)
    drafter = helpers.random_drafter(target, block_size)
    result = speculative_decode(target, drafter, vocabulary_of(target), prompt, **limits)
    assert result.output_ids == answer
    assert result.acceptance_lengths[:-1] == [count + 1 for count in scripted.num_right[:-1]]
    assert result.accepted[:-1] == scripted.num_right[:-1]
    assert set(scripted.num_right) == set(range(block_size)), "the script covers all ways back"
    assert 1 + sum(result.acceptance_lengths) == len(answer)
    ids = (prompt + answer)[: result.starts[-1]]
    features = whole_features(target, ids, drafter.shape.target_layer_ids)
    assert_close(torch.cat(scripted.features), features)


def test_drafter_that_knows_nothing_is_lossless(target: PreTrainedModel) -> None:
    prompt = helpers.random_prompt(5, seed=1)
    limits = {"max_new_tokens": 20, "stop_ids": ()}
    drafter = helpers.random_drafter(target, block_size=7)
    result = speculative_decode(target, drafter, vocabulary_of(target), prompt, **limits)
    assert result.output_ids == greedy_decode(target, prompt, **limits)
    assert all(len(draft) == 6 for draft in result.drafts)


def test_greedy_is_what_transformers_generates(target: PreTrainedModel) -> None:
    ids = torch.tensor([helpers.random_prompt(6)])
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False)
    assert (
        greedy_decode(target, ids[0].tolist(), max_new_tokens=NUM_NEW_TOKENS, stop_ids=()) == expected[0, 6:].tolist()
    )


@pytest.mark.parametrize("stops", (False, True))
def test_equals_decoding_without_caches(served_target: PreTrainedModel, stops: bool) -> None:
    """With a drafter good enough that accept lengths differ, and a stop token in the middle of an accepted block."""
    drafter, entry = load_served(PAIR / "draft"), EXPECTED["greedy_decoding"][0]
    stop_ids = (entry["greedy"][14],) if stops else ()
    result = speculative_decode(
        served_target, drafter, vocabulary_of(served_target), entry["prompt"], max_new_tokens=30, stop_ids=stop_ids
    )
    assert result == naive_speculative_decode(served_target, drafter, entry["prompt"], 30, stop_ids)
    assert len(set(result.acceptance_lengths)) > 2
    assert len(result.output_ids) == (15 if stops else 30)


@pytest.mark.parametrize("name", ("sliding_and_full", "linear_and_full"))
def test_random_drafter_equals_decoding_without_caches(name: str) -> None:
    target = helpers.random_target(name)
    drafter, prompt = helpers.random_drafter(target, 4), helpers.random_prompt(9)
    result = speculative_decode(target, drafter, vocabulary_of(target), prompt, max_new_tokens=12, stop_ids=())
    assert result == naive_speculative_decode(target, drafter, prompt, 12, ())


def test_ends_at_the_stop_token_wherever_it_falls(
    full_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first token, in accepted drafts, as the bonus token: it is the last one kept, and lengths say so."""
    prompt, block_size = helpers.random_prompt(4), 5
    answer = greedy_decode(full_target, prompt, max_new_tokens=24, stop_ids=())
    drafter, vocabulary = helpers.random_drafter(full_target, block_size), vocabulary_of(full_target)
    num_accepted = set()
    for place, token in enumerate(answer):
        if token in answer[:place]:
            continue
        monkeypatch.setattr(decoding, "Drafting", helpers.ScriptedDrafting(prompt, answer, block_size))
        limits = {"max_new_tokens": 24, "stop_ids": {token, helpers.VOCAB_SIZE + 1}}
        result = speculative_decode(full_target, drafter, vocabulary, prompt, **limits)
        assert result.output_ids == answer[: place + 1] == greedy_decode(full_target, prompt, **limits)
        assert sum(result.acceptance_lengths) == place
        if place:
            num_accepted.add(result.acceptance_lengths[-1] - result.accepted[-1])
    assert num_accepted == {0, 1}, "the stop token was a draft here and the bonus token there"


@pytest.mark.parametrize("name", ("full", "linear_and_full"))
def test_ends_at_the_limit_wherever_it_falls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, prompt = helpers.random_target(name), helpers.random_prompt(4)
    answer = greedy_decode(target, prompt, max_new_tokens=20, stop_ids=())
    drafter, vocabulary = helpers.random_drafter(target, 5), vocabulary_of(target)
    for num_new_tokens in range(1, 12):
        monkeypatch.setattr(decoding, "Drafting", helpers.ScriptedDrafting(prompt, answer, 5))
        limits = {"max_new_tokens": num_new_tokens, "stop_ids": ()}
        result = speculative_decode(target, drafter, vocabulary, prompt, **limits)
        assert result.output_ids == answer[:num_new_tokens] == greedy_decode(target, prompt, **limits)
        assert sum(result.acceptance_lengths) == num_new_tokens - 1
        assert all(length >= 1 for length in result.acceptance_lengths)


class AllRightDrafting:
    """Stands in for `Drafting`: every draft is what the target will say."""

    def __init__(self, prompt: list[int], answer: list[int], block_size: int) -> None:
        self.known, self.num_drafts = prompt + answer, block_size - 1

    def __call__(self, *_args: object) -> "AllRightDrafting":
        return self

    def extend(self, features_TF: torch.Tensor) -> None:
        pass

    def draft(self, anchor_1: torch.Tensor, start: int) -> torch.Tensor:
        return torch.tensor(self.known[start + 1 : start + 1 + self.num_drafts])


def test_a_draft_that_equals_the_bonus_token_by_chance_is_not_accepted(
    full_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit the last token is the target's own, though the draft nobody verified says the same."""
    prompt, block_size = helpers.random_prompt(4), 5
    answer = greedy_decode(full_target, prompt, max_new_tokens=20, stop_ids=())
    drafter = helpers.random_drafter(full_target, block_size)
    monkeypatch.setattr(decoding, "Drafting", AllRightDrafting(prompt, answer, block_size))
    expected = {1: [], 2: [0], 3: [1], 5: [3], 6: [4], 7: [4, 0], 9: [4, 2], 11: [4, 4]}
    for num_new_tokens, accepted in expected.items():
        limits = {"max_new_tokens": num_new_tokens, "stop_ids": ()}
        result = speculative_decode(full_target, drafter, vocabulary_of(full_target), prompt, **limits)
        assert result.output_ids == answer[:num_new_tokens]
        assert result.accepted == accepted == [length - 1 for length in result.acceptance_lengths]


def test_decodes_up_to_the_last_position_and_no_further(full_target: PreTrainedModel) -> None:
    num_positions = full_target.config.max_position_embeddings
    drafter, prompt = helpers.random_drafter(full_target, 8), helpers.random_prompt(num_positions - 6)
    limits = {"max_new_tokens": 6, "stop_ids": ()}
    result = speculative_decode(full_target, drafter, vocabulary_of(full_target), prompt, **limits)
    assert result.output_ids == greedy_decode(full_target, prompt, **limits)
    with pytest.raises(ValueError, match=r"250 prompt tokens and max_new_tokens=7 exceed the target's 256 positions"):
        speculative_decode(full_target, drafter, vocabulary_of(full_target), prompt, max_new_tokens=7, stop_ids=())


@pytest.mark.parametrize(("prompt", "num_new_tokens", "message"), [([], 4, "no tokens"), ([1], 0, "max_new_tokens: 0")])
def test_impossible_requests(
    full_target: PreTrainedModel, prompt: list[int], num_new_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_decode(full_target, prompt, max_new_tokens=num_new_tokens, stop_ids=())
