"""The target's frozen embedding and LM head, with the scalings its architecture puts around them."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from dflash.batch import TargetVocabulary
from dflash.target.capture import decoder_layers
from dflash.target.loading import load_causal_lm
from dflash.target.shape import read_config, read_field

_EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight")
# Architectures that multiply the embedding by sqrt(hidden_size), rounded to the embedding's dtype. Gemma 3n is not
# among them: its layers do not give one hidden state per token, so it cannot be a target.
_SQRT_SCALED = ("gemma", "gemma2", "gemma3", "gemma4", "vaultgemma")
_WEIGHTS_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def vocabulary_of(model: PreTrainedModel) -> TargetVocabulary:
    """Take the vocabulary from a loaded model, whose tensors it shares; before FrozenTarget drops the head.

    Raises ValueError when the model has no LM head, or one with a bias.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(head, nn.Module) or not isinstance(getattr(head, "weight", None), Tensor):
        raise ValueError(f"model.target.path: {type(model).__name__} has no LM head; it cannot be a target")
    if getattr(head, "bias", None) is not None:
        raise ValueError(
            f"model.target.path: the LM head of {type(model).__name__} has a bias, which no drafter is served with; "
            "it cannot be a target"
        )
    return _vocabulary(model.config, embedding.weight.detach(), head.weight.detach())


def load_vocabulary(path: str, dtype: torch.dtype, device: torch.device) -> TargetVocabulary:
    """Read the vocabulary of a target without the rest of its weights where they are in safetensors files.

    path: a folder, a hub name or a `.gguf` file; other formats than safetensors are loaded whole.
    Raises ValueError when there is no usable model at `path`.
    """
    config = read_config(path)
    files = {} if path.lower().endswith(".gguf") else files_of_tensors(path)
    text = config.get_text_config(decoder=True)
    shape = (read_field(text, "vocab_size"), read_field(text, "hidden_size"))
    embedding_name = _find(files, _EMBEDDING_NAMES)
    head_name = _find(files, _HEAD_NAMES)
    is_tied = bool(read_field(config, "tie_word_embeddings"))
    has_bias = any(name.removesuffix(".weight") + ".bias" in files for name in (head_name,) if name)
    if embedding_name is None or has_bias or (head_name is None and not is_tied):
        return vocabulary_of(load_causal_lm(path, dtype, device))

    embedding = read_tensor(path, files[embedding_name], embedding_name, dtype, device)
    head = embedding
    if head_name is not None:
        stored = read_tensor(path, files[head_name], head_name, dtype, device)
        # A checkpoint that says "tied" and yet stores two different matrices is untied, to Transformers too.
        if not is_tied or not torch.equal(stored, embedding):
            head = stored
    for name, tensor in ((embedding_name, embedding), (head_name, head)):
        if tensor.shape != shape:
            raise ValueError(
                f"target {path}: {name} is {list(tensor.shape)}, but config.json says {list(shape)} "
                "(vocab_size, hidden_size); the folder mixes two models"
            )
    return _vocabulary(config, embedding, head)


@torch.no_grad()
def check_vocabulary(model: PreTrainedModel, vocabulary: TargetVocabulary, tolerance: float = 0.05) -> None:
    """Raise ValueError unless `vocabulary` embeds and predicts as the whole, untruncated model itself does.

    One short forward. It catches an architecture that scales its embedding or logits in a way unknown here, which
    would train a drafter for another model than the one that is served.
    tolerance: largest difference over the largest value; wrong scalings are off by far more, rounding by far less.
    """
    seen: dict[str, Tensor] = {}
    decoder = model.get_decoder()
    first_layer = decoder_layers(decoder)[0]

    def remember(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen["embedded"] = args[0] if args else kwargs["hidden_states"]

    hook = first_layer.register_forward_pre_hook(remember, with_kwargs=True)
    try:
        last = vocabulary.embedding.shape[0] - 1
        input_ids = torch.tensor([[last // 3, last // 2, last]], device=model.device)
        hidden = decoder(input_ids=input_ids, use_cache=False, return_dict=True).last_hidden_state
        logits = model(input_ids=input_ids, use_cache=False, return_dict=True).logits
    finally:
        hook.remove()
    own_embedded = vocabulary.embedding[input_ids] * vocabulary.embedding_scale
    own_logits = (hidden @ vocabulary.head.T) * vocabulary.logit_multiplier
    if (cap := vocabulary.logit_softcap) is not None:
        own_logits = cap * torch.tanh(own_logits / cap)
    for what, own, theirs in (("embedding", own_embedded, seen["embedded"]), ("logits", own_logits, logits)):
        # Written so that NaN, which compares false, is let through: the packer names the documents of such features.
        if (own.float() - theirs.float()).abs().max() > tolerance * theirs.float().abs().max():
            raise ValueError(
                f"model.target.path: {type(model).__name__} scales its {what} in a way this program does not know; "
                "it cannot be a target"
            )


def _vocabulary(config: PreTrainedConfig, embedding: Tensor, head: Tensor) -> TargetVocabulary:
    text = config.get_text_config(decoder=True)
    return TargetVocabulary(
        embedding=embedding,
        head=head,
        embedding_scale=_embedding_scale(text, embedding.dtype),
        logit_multiplier=_logit_multiplier(text),
        logit_softcap=read_field(text, "final_logit_softcapping"),
    )


def _embedding_scale(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Factor on the embedding: Gemma's sqrt(H), Granite's and Falcon-H1's embedding_multiplier, MiniCPM's scale_emb."""
    if config.model_type.removesuffix("_text") in _SQRT_SCALED:
        return torch.tensor(config.hidden_size**0.5).to(dtype).item()
    if (scale := read_field(config, "scale_emb")) is not None:
        return torch.tensor(float(scale)).to(dtype).item()
    return float(read_field(config, "embedding_multiplier") or 1.0)


def _logit_multiplier(config: PreTrainedConfig) -> float:
    """Factor on the logits: Cohere's logit_scale, Falcon-H1's lm_head_multiplier, one over Granite's logits_scaling."""
    # Only Cohere's: others (MPT) carry a logit_scale that Transformers ignores.
    name = "logit_scale" if config.model_type.startswith("cohere") else "lm_head_multiplier"
    if (multiplier := read_field(config, name)) is not None:
        return float(multiplier)
    if (scaling := read_field(config, "logits_scaling")) is not None:  # Granite and MiniCPM3 divide by it.
        return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)
    return 1.0


def files_of_tensors(path: str) -> dict[str, str]:
    """Map each tensor of a safetensors checkpoint to its file's name; empty when there is no such checkpoint."""
    index = _fetch(path, _INDEX_FILE)
    if index is not None:
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    weights = _fetch(path, _WEIGHTS_FILE)
    if weights is None:
        return {}
    try:
        with safe_open(weights, framework="pt") as file:
            return dict.fromkeys(file.keys(), _WEIGHTS_FILE)
    except Exception as error:  # safetensors' own exception type is not importable in all its versions.
        raise ValueError(f"target {path}: {_WEIGHTS_FILE} is damaged: {error}; fetch it again") from error


def _fetch(path: str, name: str) -> Path | None:
    """Return a file of a folder or of the hub's cache, None where the model has no such file."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    found = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None


def _find(names: dict[str, str], endings: tuple[str, ...]) -> str | None:
    """Return the one tensor name that is or ends in one of `endings`, None when there is none or no telling which.

    Multi-token-prediction modules, stored as further layers or under `mtp.`, repeat these names and are passed over.
    """
    own = [name for name in names if ".layers." not in name and not name.startswith("mtp.")]
    found = [name for name in own if any(name == ending or name.endswith("." + ending) for ending in endings)]
    return found[0] if len(found) == 1 else None


def read_tensor(path: str, file_name: str, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    file = _fetch(path, file_name)
    if file is None:
        raise ValueError(f"target {path}: {file_name}, which holds {name}, is missing; fetch it again")
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name).to(device=device, dtype=dtype)
    except Exception as error:  # As above.
        raise ValueError(f"target {path}: {file_name} is damaged: {error}; fetch it again") from error
