"""Prompts to be answered: rows of `messages`, `prompt` or `input_ids`, turned into token ids."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.data.rows import Place, RowError, read_json_lines


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the target reads it, and where it stands."""

    place: Place
    input_ids: list[int]


def read_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, limit: int | None = None
) -> list[Prompt]:
    """Read the first `limit` prompts of a JSONL file, all of them when it is None.

    Raises ValueError with file and line for the first row that is no prompt, and when the file holds none.
    """
    prompts: list[Prompt] = []
    for line, record in read_json_lines(path):
        if len(prompts) == limit:
            break
        place = Place(path, line)
        try:
            if isinstance(record, RowError):
                raise record
            prompts.append(Prompt(place, prompt_ids(record, tokenizer, vocab_size)))
        except RowError as error:
            raise ValueError(f"{place}: {error}") from error
    if not prompts:
        raise ValueError(f"{path}: holds no prompt; each line must be an object with messages, prompt or input_ids")
    return prompts


def prompt_ids(record: Any, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> list[int]:
    """Token ids of one row, up to where the answer begins.

    `messages` go through the chat template; a last assistant turn is the answer itself and left out. `prompt` is one
    user turn where there is a chat template, plain text otherwise. `input_ids` stay as they are. The first of these
    keys counts. Raises RowError.
    """
    if not isinstance(record, dict):
        raise RowError("a row must be a JSON object")
    if record.get("messages") is not None:
        ids = _template_ids(_turns(record["messages"]), tokenizer)
    elif record.get("prompt") is not None:
        text = record["prompt"]
        if not isinstance(text, str):
            raise RowError("prompt must be text")
        if tokenizer is None:
            raise RowError("prompt is text, but the target has no tokenizer; give input_ids, or a target with one")
        has_template = bool(tokenizer.chat_template)
        ids = (
            _template_ids([{"role": "user", "content": text}], tokenizer)
            if has_template
            else _text_ids(text, tokenizer)
        )
    elif record.get("input_ids") is not None:
        ids = record["input_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise RowError("input_ids must be a list of integers")
    else:
        has = ", ".join(repr(key) for key in list(record)[:8]) or "no key"
        raise RowError(f"needs messages, prompt or input_ids; it has {has}")
    if not ids:
        raise RowError("the prompt has no tokens")
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise RowError(f"token {outside} is outside the target's vocabulary of {vocab_size} tokens")
    return ids


def _turns(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RowError("messages must be a list of at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise RowError(f"message {number} needs a role and a content, both text")
    turns = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if not turns:
        raise RowError("messages hold nothing but an assistant turn")
    return turns


def _template_ids(turns: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if tokenizer is None:
        raise RowError("messages are text, but the target has no tokenizer; give input_ids, or a target with one")
    if not tokenizer.chat_template:
        raise RowError("messages need a chat template, and the target's tokenizer has none; give prompt or input_ids")
    try:
        return list(tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False))
    except Exception as error:  # A template is a program of its own and raises what it likes.
        raise RowError(f"the target's chat template refuses it: {' '.join(str(error).split())}") from error


def _text_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(text)["input_ids"])
