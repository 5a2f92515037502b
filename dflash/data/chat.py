"""Conversations to token ids and loss masks, through the target tokenizer's own chat template."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash.data.rows import RowError, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Stand-ins for an assistant's answer, one character each: what their two renderings share is the template's frame.
_STAND_INS = ("x", "y")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant turn in a rendering, as character positions.

    start        what the model writes begins here, behind the generation prompt
    content_end  the frame that the template puts behind the content begins here
    end          the turn with its frame ends here
    plain_end    the supervised part ends here if no token in the frame ends the turn
    """

    start: int
    content_end: int
    end: int
    plain_end: int


@dataclass(frozen=True, slots=True)
class Rendering:
    """One document before it is tokenised: its text, and the assistant turns in it that are supervised."""

    text: str
    turns: tuple[Turn, ...]
    messages: list[Message]


class ConversationEncoder:
    """Renders conversations with a tokenizer's chat template and finds which tokens the assistant wrote.

    Supervised is what the model itself would have to write: everything behind the generation prompt, through the
    token that ends the turn. What a template adds behind that token (the newline after `<|im_end|>`) is written by no
    model, since generation has stopped, and is not supervised. Positions come from the template's renderings of
    prefixes of the conversation, or from its generation markers; the text is never searched.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None") -> None:
        """Raises ValueError for a tokenizer that text cannot be trained on, and says what to do."""
        instead = "or give rows of input_ids and loss_mask, which need no tokenizer"
        if tokenizer is None:
            raise ValueError(
                f"the target has no tokenizer, but the data holds text; put one in the target's folder, {instead}"
            )
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:
            raise ValueError(
                "the target's tokenizer has no chat template, but the data holds text; "
                f"use an instruction-tuned target, add a chat_template.jinja to its folder, {instead}"
            ) from error
        if not tokenizer.is_fast:
            raise ValueError(
                f"the target's tokenizer ({type(tokenizer).__name__}) is a slow one that gives no token offsets, which "
                f"finding the assistant's tokens takes; give its folder a tokenizer.json, {instead}"
            )
        self._tokenizer = tokenizer
        self._has_markers = _GENERATION_MARKER.search(template) is not None
        added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._turn_ending_ids = np.array(sorted(added | set(tokenizer.all_special_ids)), dtype=np.int64)

    def render(self, messages: list[Message]) -> list[Rendering]:
        """Renderings of a conversation: one, or one per assistant turn where the template rewrites earlier turns.

        Turns behind the last of the assistant teach nothing and are left out. Raises RowError when the template
        refuses the conversation.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        messages = messages[: answers[-1] + 1]
        whole = self._render(messages)
        prefixes = [self._render(messages[: i + 1]) for i in answers[:-1]] + [whole]
        turns = [self._turn(messages[: i + 1], prefix) for i, prefix in zip(answers, prefixes, strict=True)]
        kept = [_turn_within(whole, prefix, turn) for prefix, turn in zip(prefixes, turns, strict=True)]
        if all(turn is not None for turn in kept):
            return [Rendering(whole, tuple(turn for turn in kept if turn is not None), messages)]
        return [
            Rendering(prefix, (turn,), messages[: i + 1])
            for i, prefix, turn in zip(answers, prefixes, turns, strict=True)
        ]

    def tokenize(self, renderings: Sequence[Rendering]) -> list[TokenRow]:
        """Tokens and loss masks of renderings, in their order."""
        if self._has_markers:
            return [self._tokenize_marked(rendering) for rendering in renderings]
        if not renderings:
            return []
        # Special tokens are in the text already: adding them again would double the BOS of most templates.
        encoded = self._tokenizer(
            [rendering.text for rendering in renderings],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        columns = zip(renderings, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        return [self._token_row(rendering, input_ids, offsets, None) for rendering, input_ids, offsets in columns]

    def _tokenize_marked(self, rendering: Rendering) -> TokenRow:
        encoded = self._tokenizer.apply_chat_template(
            rendering.messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"return_offsets_mapping": True, "verbose": False},
        )
        marked_T = np.array(encoded["assistant_masks"], dtype=bool)
        return self._token_row(rendering, encoded["input_ids"], encoded["offset_mapping"], marked_T)

    def _token_row(
        self, rendering: Rendering, input_ids: list[int], offsets: list[tuple[int, int]], marked_T: np.ndarray | None
    ) -> TokenRow:
        ids_T = np.array(input_ids, dtype=np.int64)
        offsets_T2 = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        begins_T, ends_T = offsets_T2[:, 0], offsets_T2[:, 1]
        may_end_T = np.isin(ids_T, self._turn_ending_ids)
        mask_T = np.zeros(len(ids_T), dtype=bool)
        for turn in rendering.turns:
            # The first added token behind the content ends the turn: <|im_end|>, <|eot_id|>, </s>, ...
            enders = np.flatnonzero(may_end_T & (begins_T >= turn.content_end) & (ends_T <= turn.end))
            end = int(ends_T[enders[0]]) if len(enders) else turn.plain_end
            own_T = _overlap(begins_T, ends_T, turn.start, end)
            if marked_T is None:
                mask_T |= own_T
                continue
            # Markers are the template author's word on what to train, but many leave out the token that ends the turn.
            chosen_T = marked_T & _overlap(begins_T, ends_T, turn.start, turn.end)
            mask_T |= chosen_T
            content_end = len(rendering.text[: turn.content_end].rstrip())
            if chosen_T.any() and ends_T[chosen_T].max() >= content_end:
                mask_T |= own_T & (begins_T >= turn.content_end)
        return TokenRow(ids_T.astype(np.int32), mask_T.astype(np.uint8))

    def _turn(self, messages: list[Message], rendered: str) -> Turn:
        """Where the last message, an assistant's, stands in the rendering of `messages`."""
        *history, answer = messages
        prompt = self._try_render(history, add_generation_prompt=True)
        content = answer["content"]
        # Nothing but role and content, and no white space around it that a template may strip and add anew.
        is_plain = len(answer) == 2 and content != "" and content == content.strip()
        if (
            prompt is not None
            and is_plain
            and rendered.startswith(prompt)
            and rendered.startswith(content, len(prompt))
        ):
            # The common case needs no more renderings: the content stands unchanged behind the prompt.
            content_end = len(prompt) + len(content)
            return Turn(len(prompt), content_end, len(rendered), _end_of_text(rendered, content_end))
        header, trailer = self._frame(history, answer["role"])
        start = self._start(history, rendered, prompt, header)
        if start is None:
            raise RowError(f"the chat template's rendering does not show where message {len(messages)} begins")
        if trailer is None or not rendered.endswith(trailer):
            # Where the frame cannot be told from the content, the whole turn is supervised.
            content_end = len(rendered.rstrip())
        else:
            content_end = len(rendered) - len(trailer)
        content_end = max(content_end, start)
        return Turn(start, content_end, len(rendered), _end_of_text(rendered, content_end))

    def _start(self, history: list[Message], rendered: str, prompt: str | None, header: str | None) -> int | None:
        """Where what the model writes begins in a rendering, None if the template does not let us know."""
        in_header = header is not None and rendered.startswith(header)
        if prompt is not None and rendered.startswith(prompt):
            # A template without a generation prompt leaves the header to nobody: it is the frame's.
            if in_header and len(header) > len(prompt) and prompt == self._try_render(history):
                return len(header)
            return len(prompt)
        # The generation prompt has something that the rendering has not (an empty <think> block, say), or it changes
        # what stands before it.
        if in_header:
            return len(header)
        # The template frames this content otherwise than another one (it has a <think> block of its own, say).
        return None if header is None else _num_common(header, rendered)

    def _frame(self, history: list[Message], role: str) -> tuple[str | None, str | None]:
        """Text before an answer to `history`, that history included, and text behind it; None for what is unknown."""
        first, second = (self._try_render([*history, {"role": role, "content": text}]) for text in _STAND_INS)
        if first is None or second is None or first == second:
            return None, None
        num_header = _num_common(first, second)
        trailer = first[num_header + 1 :]
        return first[:num_header], trailer if second[num_header + 1 :] == trailer else None

    def _try_render(self, messages: list[Message], add_generation_prompt: bool = False) -> str | None:
        """Rendering of messages that may be no conversation by themselves: None where the template refuses them."""
        try:
            return self._render(messages, add_generation_prompt) if messages else None
        except RowError:
            return None

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RowError("its text holds half a surrogate pair, which is no Unicode character") from None
        except Exception as error:  # a template is a program of its own, and may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RowError(f"the chat template refuses the conversation: {reason}") from error
        return text


def _turn_within(whole: str, rendered: str, turn: Turn) -> Turn | None:
    """The turn as it stands in the rendering of the whole conversation, None if the template has rewritten it.

    A template may close every rendering with something that later turns push back (an EOS at the very end); that is
    no rewriting as long as the turn's own end, which must show in the text, is still there.
    """
    num_common = _num_common(whole, rendered)
    if num_common == len(rendered):
        return turn
    if num_common < turn.content_end or not whole[turn.content_end : num_common].strip():
        return None
    return Turn(turn.start, turn.content_end, end=num_common, plain_end=turn.content_end)


def _end_of_text(rendered: str, content_end: int) -> int:
    """Where a frame that is plain text ends, the white space at its end left out."""
    return content_end + len(rendered[content_end:].rstrip())


def _overlap(begins_T: np.ndarray, ends_T: np.ndarray, start: int, end: int) -> np.ndarray:
    """Tokens that hold any character of [start, end); one without characters belongs where it stands."""
    return (begins_T < end) & ((ends_T > start) | ((ends_T == begins_T) & (begins_T >= start)))


def _num_common(first: str, second: str) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is far faster than single characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
