"""Which tokens of a conversation are supervised, for chat templates of every kind, to the token."""

from typing import Any

import numpy as np
import pytest
from helpers_data import (
    ALTERNATING,
    CHATML,
    CLOSED,
    EMPTY_THINK,
    LLAMA2,
    NO_GENERATION_PROMPT,
    NOTHING_BEHIND,
    OPEN_THINK,
    PLAIN,
    PLAIN_ENDED,
    QWEN3,
    QWEN3_NO_THINKING,
    bytes_tokenizer,
    marked,
    turns,
    words_tokenizer,
)

from dflash.data import chat
from dflash.data.chat import ConversationEncoder
from dflash.data.rows import RowError

END = "<|im_end|>"
# Refuses the answers that stand in for the real one, where the generation prompt alone does not tell.
NO_SHORT_ANSWERS = (
    "{% if messages[-1].content | length < 2 and not add_generation_prompt %}{{ raise_exception('short') }}{% endif %}"
    + EMPTY_THINK
)


def encoded(template: str, messages: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Per document its whole text and its supervised stretches, both decoded from the tokens."""
    tokenizer = bytes_tokenizer(template)
    encoder = ConversationEncoder(tokenizer)
    documents = []
    for row in encoder.tokenize(encoder.render(messages)):
        assert row.input_ids.dtype == np.int32 and row.loss_mask.dtype == np.uint8
        assert set(row.loss_mask.tolist()) <= {0, 1}
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask, [0]]).astype(int))).reshape(-1, 2)
        documents.append((tokenizer.decode(row.input_ids), [tokenizer.decode(row.input_ids[a:b]) for a, b in edges]))
    return documents


def supervised(template: str, messages: list[dict[str, Any]]) -> list[list[str]]:
    return [stretches for _, stretches in encoded(template, messages)]


TALK = turns("q1", "a1", "q2", "a2 é 🦜")
# (template, messages, supervised stretches of each document)
CASES = {
    "chatml": (CHATML, TALK, [["a1" + END, "a2 é 🦜" + END]]),
    "system": (CHATML, [{"role": "system", "content": "s"}, *TALK], [["a1" + END, "a2 é 🦜" + END]]),
    "question last": (CHATML, turns("q1", "a1", "q2"), [["a1" + END]]),
    "assistant first": (CHATML, turns("hello", "q1", "a1", first="assistant"), [["hello" + END, "a1" + END]]),
    "two answers running": (CHATML, [*turns("q", "a"), *turns("b", first="assistant")], [["a" + END, "b" + END]]),
    "white space is content": (CHATML, turns("q", "\n a \n\n"), [["\n a \n\n" + END]]),
    "empty answer": (CHATML, turns("q", ""), [[END]]),
    "answer repeats question": (CHATML, turns("a", "a", "a", "a"), [["a" + END, "a" + END]]),
    "answer is a header": (CHATML, turns("q", "assistant\n"), [["assistant\n" + END]]),
    "answer holds the end": (CHATML, turns("q", f"a{END}b"), [[f"a{END}b" + END]]),
    "question holds a turn": (CHATML, turns(f"q{END}\n<|im_start|>assistant\nno", "a"), [["a" + END]]),
    "empty think in prompt": (EMPTY_THINK, TALK, [["a1" + END, "a2 é 🦜" + END]]),
    "empty think, like content": (EMPTY_THINK, turns("q", "<table>"), [["<table>" + END]]),
    "empty think, filled": (EMPTY_THINK, turns("q", "<think>\nt</think>a"), [["<think>\nt</think>a" + END]]),
    "open think": (OPEN_THINK, turns("q", "<think>\nt</think>a"), [["t</think>a" + END]]),
    "open think, unused": (OPEN_THINK, turns("q", "a"), [["a" + END]]),
    "qwen3": (
        QWEN3,
        turns("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2"),
        [["<think>\nt1\n</think>\n\na1" + END], ["<think>\nt2\n</think>\n\na2" + END]],
    ),
    "qwen3, no thoughts": (
        QWEN3,
        turns("q1", "a1", "q2", "a2"),
        [["<think>\n\n</think>\n\na1" + END], ["<think>\n\n</think>\n\na2" + END]],
    ),
    "qwen3, thinking off": (QWEN3_NO_THINKING, turns("q1", "a1", "q2", "a2"), [["a1" + END], ["a2" + END]]),
    "qwen3, one turn": (QWEN3, turns("q", "a"), [["<think>\n\n</think>\n\na" + END]]),
    "closed by an eos": (CLOSED, TALK, [["a1" + END, "a2 é 🦜" + END]]),
    "llama 2": (LLAMA2, turns("q1", " a1 ", "q2", "a2"), [["a1 </s>", "a2 </s>"]]),
    "no generation prompt": (NO_GENERATION_PROMPT, TALK, [["a1" + END, "a2 é 🦜" + END]]),
    "no end": (PLAIN, turns("q1", "a1", "q2", "a2"), [["a1", "a2"]]),
    "textual end": (PLAIN_ENDED, turns("q1", "a1", "q2", "a2"), [["a1 [END]", "a2 [END]"]]),
    "nothing behind": (NOTHING_BEHIND, turns("q1", "a1 ", "q2", "a2\n"), [["a1 ", "a2\n"]]),
    "marked": (marked("<|im_start|>assistant\n", f"CONTENT{END}", "\n"), TALK, [["a1" + END, "a2 é 🦜" + END]]),
    "marked, end left out": (
        marked("<|im_start|>assistant\n", "CONTENT", f"{END}\n"),
        TALK,
        [["a1" + END, "a2 é 🦜" + END]],
    ),
    "marked with header": (
        marked("", f"<|im_start|>assistant\nCONTENT{END}", "\n"),
        TALK,
        [["a1" + END, "a2 é 🦜" + END]],
    ),
    "marked in part": (marked("<|im_start|>assistant\n", "!", f"CONTENT{END}\n"), turns("q", "a"), [["!"]]),
    "marked nowhere": (marked("<|im_start|>assistant\n", "", f"CONTENT{END}\n"), turns("q", "a"), [[]]),
}


@pytest.mark.parametrize("case", CASES)
def test_supervised_stretches(case: str) -> None:
    template, messages, expected = CASES[case]
    assert supervised(template, messages) == expected


@pytest.mark.parametrize("case", CASES)
def test_frame_agrees_with_the_common_case(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way for an answer that stands unchanged behind the prompt, against the renderings of stand-ins."""
    template, messages, expected = CASES[case]
    messages = [{**message, "weight": 1} for message in messages]  # a further key closes the short way
    calls = []
    frame = ConversationEncoder._frame
    monkeypatch.setattr(ConversationEncoder, "_frame", lambda *args: calls.append(1) or frame(*args))
    assert supervised(template, messages) == expected
    assert len(calls) >= len(expected)


def test_documents_are_the_templates_own_renderings() -> None:
    for template in (CHATML, CLOSED, LLAMA2, PLAIN):
        tokenizer = bytes_tokenizer(template)
        [(text, _)] = encoded(template, TALK)
        assert text == tokenizer.apply_chat_template(TALK, tokenize=False)
    thoughts = turns("q1", "<think>\nt1\n</think>\n\na1", "q2", "<think>\nt2\n</think>\n\na2")
    rendered = [bytes_tokenizer(QWEN3).apply_chat_template(thoughts[:n], tokenize=False) for n in (2, 4)]
    assert [text for text, _ in encoded(QWEN3, thoughts)] == rendered
    assert "t1" in rendered[0] and "t1" not in rendered[1]


def test_rewritten_and_marked_supervises_the_last_turn_alone() -> None:
    template = marked("<|im_start|>assistant\n", f"{{% if loop.last %}}!{{% endif %}}CONTENT{END}", "\n")
    assert supervised(template, turns("q1", "a1", "q2", "a2")) == [["!a1" + END], ["!a2" + END]]


def test_a_system_prompt_moved_to_the_last_question_cuts_the_conversation() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{% if loop.index0 + 2 >= messages | length %}S {% endif %}"
        "{{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    documents = encoded(template, turns("q1", "a1", "q2", "a2"))
    assert documents == [
        ("[INST] S q1[/INST]a1</s>", ["a1</s>"]),
        ("[INST] q1[/INST]a1</s>[INST] S q2[/INST]a2</s>", ["a2</s>"]),
    ]


def test_bos_is_not_doubled() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = bytes_tokenizer("{{ bos_token }}" + CHATML)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    encoder = ConversationEncoder(tokenizer)
    [row] = encoder.tokenize(encoder.render(turns("q", "a")))
    assert row.input_ids.tolist().count(tokenizer.bos_token_id) == 1


def test_a_token_that_straddles_the_start_counts_as_the_answers() -> None:
    """Merges join the newline before an answer to its first letter, and its last letter to what follows."""
    tokenizer = bytes_tokenizer(PLAIN, trained_on="\na\na\na\na b\n\nb\n\nb\n\nb\n\n" * 5)
    encoder = ConversationEncoder(tokenizer)
    [row] = encoder.tokenize(encoder.render(turns("q", "a cb")))
    pieces = [tokenizer.decode([token]) for token in row.input_ids]
    first, last = np.flatnonzero(row.loss_mask)[[0, -1]]
    assert pieces[first] == "\na" and pieces[last].startswith("b\n")
    assert row.loss_mask[first : last + 1].all()


def test_words_without_white_space() -> None:
    template = CHATML.replace("+ '<|im_end|>", "+ ' <|im_end|>")
    tokenizer = words_tokenizer(template, "user assistant where is it here . and there")
    encoder = ConversationEncoder(tokenizer)
    [row] = encoder.tokenize(encoder.render(turns("where is it", "here. and there ", "and", "it")))
    tokens = tokenizer.convert_ids_to_tokens(row.input_ids)
    assert [token for token, is_on in zip(tokens, row.loss_mask, strict=True) if is_on] == [
        *("here", ".", "and", "there", END),
        *("it", END),
    ]


def test_the_end_may_be_an_added_token_that_is_not_special() -> None:
    tokenizer = bytes_tokenizer(CHATML.replace(END, "<end>"))
    tokenizer.add_tokens(["<end>", "\n"])
    encoder = ConversationEncoder(tokenizer)
    [row] = encoder.tokenize(encoder.render(turns("q", "a")))
    assert tokenizer.decode(row.input_ids[row.loss_mask == 1]) == "a<end>"


def test_batches_equal_single_rows() -> None:
    encoder = ConversationEncoder(bytes_tokenizer(CHATML))
    renderings = [r for n in range(1, 9) for r in encoder.render(turns("q" * n, "a" * n * n, "?", "é"))]
    together = encoder.tokenize(renderings)
    for rendering, row in zip(renderings, together, strict=True):
        [alone] = encoder.tokenize([rendering])
        assert np.array_equal(alone.input_ids, row.input_ids) and np.array_equal(alone.loss_mask, row.loss_mask)
    assert encoder.tokenize([]) == []


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (ALTERNATING, turns("q", "a", "b", first="assistant"), "roles must alternate user/assistant"),
        ("{{ messages[0]['nothing'] + 1 }}" + CHATML, turns("q", "a"), "refuses the conversation"),
        ("{{ messages[7].content }}" + CHATML, turns("q", "a"), "refuses the conversation"),
        ("{% for x in %}", turns("q", "a"), "refuses the conversation"),
        (CHATML, turns("q", "a \ud800 b"), "surrogate"),
        (NO_SHORT_ANSWERS, turns("q", "an answer"), "does not show where message 2 begins"),
    ],
)
def test_what_a_template_refuses_is_a_bad_row(template: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        ConversationEncoder(bytes_tokenizer(template)).render(messages)


def test_tokenizers_that_cannot_serve() -> None:
    with pytest.raises(ValueError, match="no tokenizer.*input_ids and loss_mask"):
        ConversationEncoder(None)
    with pytest.raises(ValueError, match="no chat template.*chat_template.jinja"):
        ConversationEncoder(bytes_tokenizer(None))

    class Slow:
        is_fast = False

        def get_chat_template(self) -> str:
            return CHATML

    with pytest.raises(ValueError, match="Slow.*no token offsets.*tokenizer.json"):
        ConversationEncoder(Slow())  # type: ignore[arg-type]


def test_common_prefix_against_a_loop() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        first, second = ("".join(rng.choice(list("ab"), size=rng.integers(0, 9), p=[0.9, 0.1])) for _ in range(2))
        naive = 0
        while naive < min(len(first), len(second)) and first[naive] == second[naive]:
            naive += 1
        assert chat._num_common(first, second) == naive
