"""Loading targets: folders of every dtype, GGUF files, and one-line errors for what is no target."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.target.loading import load_causal_lm, load_tokenizer, stop_token_ids

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GGUF_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_model(folder: Path, dtype: torch.dtype = torch.float32, tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied)).to(dtype)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "<end>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", unk_token="<unk>")


def write_gguf(file: Path, with_tokens: bool) -> PreTrainedModel:
    """Write a tiny Qwen3 with its MLPs in blocks of Q8_0, and return the model whose weights the file holds."""
    torch.manual_seed(0)
    # Transformers takes a GGUF file's Qwen3 heads to be 128 wide.
    model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 128}, tie_word_embeddings=False))
    config = model.config
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if with_tokens:
        tokens = [chr(ord("A") + i) for i in range(config.vocab_size - 2)] + ["AB", "<end>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - 1) + [3])
        writer.add_token_merges(["A B"])
        writer.add_eos_token_id(len(tokens) - 1)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for i in range(config.num_hidden_layers):
        for ours, theirs in GGUF_LAYER_NAMES.items():
            names[f"model.layers.{i}.{ours}.weight"] = f"blk.{i}.{theirs}.weight"
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        if ".mlp." in name:
            packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)))
            writer.add_tensor(names[name], packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(names[name], np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folder_of_any_dtype(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    saved = save_model(tmp_path / "model", dtype, tied)
    model = load_causal_lm(str(tmp_path / "model"), torch.float32, CPU)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, saved.state_dict()[name].float()), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_home_and_relative_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("~/model", "model", "./model"):
        assert load_causal_lm(path, torch.bfloat16, CPU).dtype == torch.bfloat16


@pytest.mark.parametrize("path", ["/no/such/folder", "./folder", "../folder", "~/no_such_folder", "runs/a/model", ""])
def test_missing_folder_is_never_asked_of_the_hub(path: str) -> None:
    for load in (lambda: load_causal_lm(path, torch.float32, CPU), lambda: load_tokenizer(path)):
        with pytest.raises(ValueError, match="no such folder"):
            load()


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_causal_lm(str(tmp_path), torch.float32, CPU)


def test_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a file"):
        load_causal_lm(str(tmp_path / "model.bin"), torch.float32, CPU)


@pytest.mark.parametrize("model_type", ["no_such_model", "vit"])
def test_unsupported_architecture(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match="cannot be loaded as a causal language model") as caught:
        load_causal_lm(str(tmp_path), torch.float32, CPU)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    save_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights are missing, first model\.layers\.1\.mlp\.up_proj\.weight"):
        load_causal_lm(str(tmp_path), torch.float32, CPU)


def test_weights_of_another_shape(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 40}))
    with pytest.raises(ValueError, match="6 weights have another shape .* first model.layers.0.mlp.down_proj.weight"):
        load_causal_lm(str(tmp_path), torch.float32, CPU)


def test_cut_safetensors(tmp_path: Path) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_causal_lm(str(tmp_path), torch.float32, CPU)


def test_gguf_file(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", with_tokens=False)
    model = load_causal_lm(str(tmp_path / "tiny.gguf"), torch.float32, CPU)
    input_ids = torch.arange(12)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(input_ids).logits, expected(input_ids).logits)
    model.save_pretrained(tmp_path / "folder")
    again = load_causal_lm(str(tmp_path / "folder"), torch.float32, CPU)
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())


def test_gguf_cut_short(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", with_tokens=True)
    data = (tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "cut.gguf"
    for num_bytes in [4, 7, 20, 60, 500, len(data) // 2, len(data) - 64]:
        file.write_bytes(data[:num_bytes])
        for load in (lambda: load_causal_lm(str(file), torch.float32, CPU), lambda: load_tokenizer(str(file))):
            with pytest.raises(ValueError, match="cut short"):
                load()


def test_gguf_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        load_causal_lm(str(tmp_path / "absent.gguf"), torch.float32, CPU)
    file = tmp_path / "page.gguf"
    for content, reason in [
        (b"<html>", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version 1"),
        (b"GGUF" + struct.pack("<IQQQ4sI", 3, 0, 1, 4, b"name", 77), "damaged"),
    ]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load_causal_lm(str(file), torch.float32, CPU)


def test_gguf_of_an_unsupported_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "nonsense")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="nonsense"):
        load_causal_lm(str(tmp_path / "odd.gguf"), torch.float32, CPU)


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    save_model(tmp_path)
    assert load_tokenizer(str(tmp_path)) is None
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("a b")["input_ids"] == [1, 0]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "bare.gguf", with_tokens=False)
    assert load_tokenizer(str(tmp_path / "bare.gguf")) is None
    write_gguf(tmp_path / "full.gguf", with_tokens=True)
    tokenizer = load_tokenizer(str(tmp_path / "full.gguf"))
    assert tokenizer("CABA")["input_ids"] == [2, 46, 0]


def test_stop_token_ids(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    model = load_causal_lm(str(tmp_path / "model"), torch.float32, CPU)
    assert stop_token_ids(model) == (2,)
    model.generation_config = GenerationConfig(eos_token_id=[9, 5])
    assert stop_token_ids(model) == (5, 9)
    assert stop_token_ids(model, make_tokenizer()) == (2, 5, 9)
    model.generation_config = GenerationConfig()
    model.config.eos_token_id = None
    assert stop_token_ids(model) == ()
    model.config.text_config = LlamaConfig(**{**SHAPE, "eos_token_id": 7})
    assert stop_token_ids(model) == (7,)


def test_generation_config_decides(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path / "model")
    assert stop_token_ids(load_causal_lm(str(tmp_path / "model"), torch.float32, CPU)) == (3, 4)


def test_loading_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", with_tokens=True)
    model = load_causal_lm(str(tmp_path / "tiny.gguf"), torch.float32, CPU)
    load_tokenizer(str(tmp_path / "tiny.gguf"))
    model.save_pretrained(tmp_path / "folder")
    load_causal_lm(str(tmp_path / "folder"), torch.float32, CPU)
    assert capfd.readouterr() == ("", "")
