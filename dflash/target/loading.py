"""Load a frozen target model and its tokenizer from a hub name, a folder or a GGUF file."""

import os
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import transformers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
GGUF_TOKENS_KEY = "tokenizer.ggml.tokens"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)

# struct codes of GGUF's scalar value types; 8 is a string, 9 an array.
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_GGUF_STRING, _GGUF_ARRAY = 8, 9


def load_causal_lm(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a causal language model, frozen and in eval mode.

    path: a hub name, a local folder or a `.gguf` file; what looks local never reaches the hub.
    Raises ValueError, one line, when there is no usable model at `path`.
    """
    location = locate(path)
    _silence_progress_bars()
    # A large model goes straight to its GPU; on CPU this would only add a dependency on accelerate.
    placement: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            **location,
            **placement,
            dtype=dtype,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported below; Transformers' own error does not say which
            output_loading_info=True,
        )
    except torch.cuda.OutOfMemoryError as error:
        raise ValueError(f"target {path}: does not fit on {device} in {dtype}; take a smaller one") from error
    except Exception as error:  # Transformers raises nearly every type here, and all of them mean "not loadable".
        raise ValueError(f"target {path}: cannot be loaded as a causal language model: {_one_line(error)}") from error
    # Transformers fills absent weights with random numbers and only warns.
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"target {path}: {len(missing)} weights are missing, first {missing[0]}; "
            "the files are incomplete or of another architecture, fetch them again"
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise ValueError(
            f"target {path}: {len(mismatched)} weights have another shape than the config says, first {name} "
            f"({list(found)}, not {list(expected)}); config and weights belong to different models"
        )
    if "gguf_file" in location:
        _forget_gguf(model)
    return model.requires_grad_(False).eval()


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer that belongs to a target, or None where a folder or GGUF file holds none.

    Raises ValueError, one line, when `path` is no usable place or its tokenizer is damaged.
    """
    location = locate(path)
    folder = Path(location["pretrained_model_name_or_path"])
    if "gguf_file" in location:
        if GGUF_TOKENS_KEY not in _read_gguf_header(folder / location["gguf_file"]).keys:
            return None
    elif folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    _silence_progress_bars()
    try:
        return AutoTokenizer.from_pretrained(**location, trust_remote_code=False)
    except Exception as error:  # As above: the type says nothing, the place and the text do.
        raise ValueError(f"target {path}: its tokenizer cannot be loaded: {_one_line(error)}") from error


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Return the token ids that end an answer, sorted; empty where nothing names any.

    Read from the generation config, else from the config or its text_config; the tokenizer's own end token is
    added when given, as serving engines stop on it too.
    """
    config = model.config
    sources = (getattr(model, "generation_config", None), config, getattr(config, "text_config", None))
    found = (_as_ids(getattr(source, "eos_token_id", None)) for source in sources)
    ids = next((ids for ids in found if ids), set())
    return tuple(sorted(ids | _as_ids(getattr(tokenizer, "eos_token_id", None))))


def _as_ids(value: int | list[int] | tuple[int, ...] | None) -> set[int]:
    if value is None:
        return set()
    return {value} if isinstance(value, int) else {int(token) for token in value}


def locate(path: str) -> dict[str, Any]:
    """Turn a user's path into from_pretrained's arguments, checking local places first."""
    place = Path(os.path.expanduser(path))
    if path.lower().endswith(".gguf"):
        _check_gguf(place)
        return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name, "local_files_only": True}
    if not path or not place.exists():
        # A hub name is NAME or OWNER/NAME; the hub must not be asked for a mistyped folder.
        if not path or path.startswith(("/", ".", "~")) or path.count("/") > 1:
            raise ValueError(f"target {path!r}: no such folder; give a model folder, a .gguf file or a hub name")
        return {"pretrained_model_name_or_path": path}
    if not place.is_dir():
        raise ValueError(f"target {path}: is a file; give a model folder, a .gguf file or a hub name")
    if not (place / "config.json").is_file():
        raise ValueError(f"target {path}: the folder has no config.json; give the folder that holds the model")
    return {"pretrained_model_name_or_path": str(place), "local_files_only": True}


def _silence_progress_bars() -> None:
    """Keep Transformers' bars off the terminal, where every rank would draw its own."""
    transformers.utils.logging.disable_progress_bar()
    # Its GGUF reader draws a bar of its own that no setting reaches.
    modeling_gguf_pytorch_utils.tqdm = partial(tqdm, disable=True)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def _forget_gguf(model: PreTrainedModel) -> None:
    """Drop the mark "quantized": the weights are dense by now, and Transformers refuses to save marked ones."""
    del model.config.quantization_config
    model.is_quantized = False
    model.hf_quantizer = None


@dataclass(frozen=True, slots=True)
class _GgufHeader:
    keys: frozenset[str]
    last_byte: int  # one past the end of the last tensor


def _check_gguf(file: Path) -> None:
    """Raise ValueError unless `file` is a GGUF file that reaches the end of its last tensor."""
    if not file.is_file():
        raise ValueError(f"target {file}: no such file; give an existing .gguf file")
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        magic = stream.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ValueError(f"target {file}: not a GGUF file (it starts with {magic!r}); fetch it again")
    try:
        last_byte = _read_gguf_header(file).last_byte
    except EOFError as error:
        raise ValueError(
            f"target {file}: the GGUF file is cut short, its header goes on after {num_bytes} bytes; fetch it again"
        ) from error
    if num_bytes < last_byte:
        raise ValueError(
            f"target {file}: the GGUF file is cut short, it has {num_bytes} of {last_byte} bytes; fetch it again"
        )


def _read_gguf_header(file: Path) -> _GgufHeader:
    """Read key names and extent of a GGUF file without touching its tensors (the gguf package maps them blindly).

    Raises EOFError when the header is cut short, ValueError when it is damaged. Source: ggml's docs/gguf.md.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    num_file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(len(GGUF_MAGIC))
        version = _read_scalar(stream, "I")
        if version not in GGUF_VERSIONS:
            raise ValueError(f"target {file}: GGUF version {version} is not supported; convert it to version 3")
        num_tensors, num_keys = _read_scalar(stream, "Q"), _read_scalar(stream, "Q")
        keys: set[str] = set()
        alignment = 32
        for _ in range(num_keys):
            key = _read_string(stream, num_file_bytes)
            value = _read_value(stream, _read_scalar(stream, "I"), file, num_file_bytes)
            keys.add(key)
            if key == "general.alignment" and isinstance(value, int) and value > 0:
                alignment = value
        last_byte = 0
        for _ in range(num_tensors):
            name = _read_string(stream, num_file_bytes)
            num_elements = 1
            for _ in range(_read_scalar(stream, "I")):
                num_elements *= _read_scalar(stream, "Q")
            kind, offset = _read_scalar(stream, "I"), _read_scalar(stream, "Q")
            try:
                block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            except (ValueError, KeyError) as error:
                raise ValueError(f"target {file}: tensor {name} has the unknown GGUF type {kind}") from error
            last_byte = max(last_byte, offset + num_elements // block_elements * block_bytes)
        data_start = -(-stream.tell() // alignment) * alignment
    return _GgufHeader(frozenset(keys), data_start + last_byte)


def _read_scalar(stream: BinaryIO, code: str) -> Any:
    num_bytes = struct.calcsize("<" + code)
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return struct.unpack("<" + code, data)[0]


def _read_string(stream: BinaryIO, num_file_bytes: int) -> str:
    num_bytes = _read_scalar(stream, "Q")
    if stream.tell() + num_bytes > num_file_bytes:
        raise EOFError
    return stream.read(num_bytes).decode("utf-8", errors="replace")


def _read_value(stream: BinaryIO, kind: int, file: Path, num_file_bytes: int) -> Any:
    """Read one metadata value; arrays are walked over and given back as None, since nobody here needs one."""
    if kind == _GGUF_STRING:
        return _read_string(stream, num_file_bytes)
    if kind in _GGUF_SCALARS:
        return _read_scalar(stream, _GGUF_SCALARS[kind])
    if kind != _GGUF_ARRAY:
        raise ValueError(f"target {file}: the GGUF header is damaged (value type {kind}); fetch it again")
    element_kind, num_elements = _read_scalar(stream, "I"), _read_scalar(stream, "Q")
    if element_kind in _GGUF_SCALARS:
        end = stream.tell() + num_elements * struct.calcsize("<" + _GGUF_SCALARS[element_kind])
        if end > num_file_bytes:
            raise EOFError
        stream.seek(end)
        return None
    for _ in range(num_elements):
        _read_value(stream, element_kind, file, num_file_bytes)
    return None
