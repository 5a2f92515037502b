"""Embedding and logits rebuilt from the vocabulary alone, against the Transformers model itself."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from helpers_target import VOCAB_SIZE, tiny_target
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from dflash.batch import TargetVocabulary
from dflash.target import vocabulary as module
from dflash.target.vocabulary import check_vocabulary, load_vocabulary, vocabulary_of

CPU = torch.device("cpu")
SCALED = ["gemma2", "gemma3", "granite", "cohere", "minicpm3"]
ARCHITECTURES = [*SCALED, "qwen3", "llama", "qwen3_5"]


@torch.no_grad()
def embedded_and_logits(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = model(input_ids=input_ids, output_hidden_states=True)
    return output.hidden_states[0], output.hidden_states[-1], output.logits


def assert_rebuilds(vocabulary: TargetVocabulary, model: PreTrainedModel, tolerance: float = 1e-6) -> None:
    input_ids = torch.arange(VOCAB_SIZE)[None]
    embedded, hidden, logits = embedded_and_logits(model, input_ids)
    own_embedded = vocabulary.embedding[input_ids] * vocabulary.embedding_scale
    own_logits = (hidden @ vocabulary.head.T) * vocabulary.logit_multiplier
    if (cap := vocabulary.logit_softcap) is not None:
        own_logits = cap * torch.tanh(own_logits / cap)
    for own, theirs in ((own_embedded, embedded), (own_logits, logits)):
        assert own.shape == theirs.shape
        assert (own - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_of_a_loaded_model(name: str, tied: bool):
    model = tiny_target(name, tie_word_embeddings=tied)
    vocabulary = vocabulary_of(model)
    assert (vocabulary.head.data_ptr() == vocabulary.embedding.data_ptr()) == tied
    assert_rebuilds(vocabulary, model)
    check_vocabulary(model, vocabulary)


@pytest.mark.parametrize("name", SCALED)
def test_the_scalings_are_really_there(name: str):
    vocabulary = vocabulary_of(tiny_target(name))
    scalings = (vocabulary.embedding_scale, vocabulary.logit_multiplier, vocabulary.logit_softcap)
    assert scalings != (1.0, 1.0, None)


def test_embedding_scale_is_rounded_to_the_embedding_dtype():
    model = tiny_target("gemma3").bfloat16()
    scale = vocabulary_of(model).embedding_scale
    assert scale == torch.tensor(32**0.5).bfloat16().item() != 32**0.5
    embedded = model.get_input_embeddings()(torch.arange(VOCAB_SIZE))
    assert torch.equal(model.get_input_embeddings().weight * scale, embedded)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
def test_only_the_two_tensors_are_read_from_safetensors(
    name: str, tied: bool, shard_size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model = tiny_target(name, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    monkeypatch.setattr(module, "load_causal_lm", None)
    vocabulary = load_vocabulary(str(tmp_path), torch.float32, CPU)
    assert (vocabulary.head.data_ptr() == vocabulary.embedding.data_ptr()) == tied
    assert_rebuilds(vocabulary, model)
    assert load_vocabulary(str(tmp_path), torch.bfloat16, CPU).head.dtype == torch.bfloat16


def test_names_of_a_multimodal_checkpoint_and_of_prediction_modules(tmp_path: Path):
    model = tiny_target("qwen3", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {"language_model." + name: tensor for name, tensor in tensors.items()}
    other = torch.zeros(VOCAB_SIZE, 32)
    renamed |= {"model.layers.6.embed_tokens.weight": other, "mtp.lm_head.weight": other.clone()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert_rebuilds(load_vocabulary(str(tmp_path), torch.float32, CPU), model)


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_head_under_a_tied_config(same: bool, tmp_path: Path):
    model = tiny_target("qwen3", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1.0 if same else 2.0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    vocabulary = load_vocabulary(str(tmp_path), torch.float32, CPU)
    assert (vocabulary.head is vocabulary.embedding) == same
    assert_rebuilds(vocabulary, type(model).from_pretrained(tmp_path).eval())


def test_other_formats_are_loaded_whole(tmp_path: Path):
    model = tiny_target("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_rebuilds(load_vocabulary(str(tmp_path), torch.float32, CPU), model)


def test_damaged_folders_are_value_errors(tmp_path: Path):
    model = tiny_target("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    shard = tmp_path / index["lm_head.weight"]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged"):
        load_vocabulary(str(tmp_path), torch.float32, CPU)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}, which holds lm_head.weight, is missing"):
        load_vocabulary(str(tmp_path), torch.float32, CPU)


def test_tensors_of_another_size_than_the_config_are_a_value_error(tmp_path: Path):
    tiny_target("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 50}))
    with pytest.raises(ValueError, match="mixes two models"):
        load_vocabulary(str(tmp_path), torch.float32, CPU)


def test_a_head_with_a_bias_is_refused():
    model = tiny_target("llama")
    model.lm_head = torch.nn.Linear(32, VOCAB_SIZE, bias=True)
    with pytest.raises(ValueError, match="has a bias"):
        vocabulary_of(model)


@pytest.mark.parametrize("wrong", [{"embedding_scale": 1.2}, {"logit_multiplier": 0.5}, {"logit_softcap": 0.01}])
def test_unknown_scalings_are_found_by_the_check(wrong: dict[str, float]):
    model = tiny_target("llama")
    with pytest.raises(ValueError, match="scales its (embedding|logits)"):
        check_vocabulary(model, dataclasses.replace(vocabulary_of(model), **wrong))


def test_saved_tied_checkpoints_hold_one_matrix(tmp_path: Path):
    tiny_target("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in set(file.keys())
