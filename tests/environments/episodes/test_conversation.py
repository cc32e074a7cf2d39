"""A conversation's tokens: drawn ones stay, others' are what the template adds, and a rewritten past begins anew.

The oracle of random conversations is the template's own rendering of the same messages. It knows nothing of how the
difference is found.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from truestep.environments.episodes.conversation import Conversation, ConversationError, Sequence
from truestep.environments.episodes.environment import tool_message
from truestep.environments.episodes.tool_calls import family_of
from truestep.generate.generator import Completion
from truestep.rollouts.turns import read_turns, turn_lines

TEMPLATES = Path(__file__).parent / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


@dataclass(frozen=True)
class Model:
    """A model's template and tokens, and how its policy writes a turn just as the template renders it."""

    template: str
    special: tuple[str, ...]
    end: str
    call: Callable[[list[dict[str, Any]]], str] | None = None  # None: it has no tools
    answer: str = "{thought}{text}"
    thought: str = ""  # "" : it writes no reasoning
    text_and_calls: str = "{text}\n{calls}"
    plain: tuple[str, ...] = ()  # added tokens that are not special

    @property
    def harmony(self) -> bool:
        return self.template == "gpt_oss"


def _hermes_calls(calls: list[dict[str, Any]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {json.dumps(call["arguments"])}}}\n</tool_call>'
        for call in calls
    )


def _mistral_calls(calls: list[dict[str, Any]]) -> str:
    return "[TOOL_CALLS] " + json.dumps(calls)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[ARGS]")
MODELS = {
    "qwen3": Model(
        "qwen3", CHATML, "<|im_end|>", _hermes_calls, thought="<think>\n{thought}\n</think>\n\n", plain=QWEN_PLAIN
    ),
    "qwen3 without reasoning": Model("qwen3", CHATML, "<|im_end|>", _hermes_calls, plain=QWEN_PLAIN),
    "qwen_plain": Model(
        "qwen_plain", CHATML, "<|im_end|>", _hermes_calls, thought="<think>\n{thought}\n</think>\n\n", plain=QWEN_PLAIN
    ),
    "llama3": Model(
        "llama3",
        (
            *("<|begin_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"),
            "<|python_tag|>",
        ),
        "<|eot_id|>",
        lambda calls: f'{{"name": "{calls[0]["name"]}", "parameters": {json.dumps(calls[0]["arguments"])}}}',
        text_and_calls="{calls}",
    ),
    "mistral": Model("mistral", MISTRAL, "</s>", _mistral_calls, answer=" {text}", text_and_calls="{calls}"),
    "mistral_args": Model(
        "mistral_args",
        MISTRAL,
        "</s>",
        lambda calls: "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in calls),
        text_and_calls="{text}{calls}",
    ),
    "gemma": Model("gemma", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "gpt_oss": Model(
        "gpt_oss",
        (
            *("<|startoftext|>", "<|endoftext|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
            *("<|return|>", "<|constrain|>"),
        ),
        "<|return|>",
        lambda calls: (
            f"to=functions.{calls[0]['name']}<|channel|>commentary json<|message|>{json.dumps(calls[0]['arguments'])}"
        ),
        thought="<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant",
        answer="{thought}<|channel|>final<|message|>{text}",
        text_and_calls=" {calls}<|call|>",
    ),
}


@cache
def tokenizer_of(name: str) -> Any:
    model = MODELS[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("l", "l"), ("Ġ", "a"), ("a", "n"), ("an", "d"), ("Ġ", "{"), ("}", "Ċ"), (">", "Ċ")]
    vocabulary = {letter: number for number, letter in enumerate([*letters, *(a + b for a, b in merges)])}
    tokens = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in model.special])
    tokens.add_tokens([AddedToken(token, special=False, normalized=False) for token in model.plain])
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token=model.special[0], eos_token=model.end)
    found.chat_template = (TEMPLATES / f"{model.template}.jinja").read_text(encoding="utf-8")
    return found


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def decoded(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any = None) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False))


def completion(ids: list[int], start: int = 0) -> Completion:
    """A completion whose tokens all have log-probs and versions of their own."""
    numbers = range(start, start + len(ids))
    return Completion(ids, [-1.0 - number for number in numbers], True, versions=[7 + number for number in numbers])


@dataclass
class Chat:
    """A conversation by hand."""

    name: str
    tools: Any = None
    count: int = 0
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = tokenizer_of(self.name)
        self.conversation = Conversation(self.tokenizer, self.tools)

    def draw(self, raw: str) -> Any:
        ids = encoded(self.tokenizer, raw)
        answer = self.conversation.drawn(completion(ids, len(self.drawn)))
        self.drawn += ids
        return answer

    def text(self, number: int = -1) -> str:
        return decoded(self.tokenizer, self.conversation.sequences[number].input_ids)


USER = [{"role": "user", "content": "2 + 2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
RESULT = [{"role": "tool", "name": "add", "content": "4"}]
MORE = [{"role": "user", "content": "and more?"}]


def check_labels(chat: Chat) -> None:
    """All that was drawn is a label, in order, once, with its own log-prob and version, and nothing else is."""
    number = 0
    for one in chat.conversation.sequences:
        assert not one.loss_mask[0]
        assert len(one.input_ids) == len(one.loss_mask) == len(one.logprobs) == len(one.versions)
        spans = {index for turn in one.turns if turn.role == "assistant" for index in range(turn.start, turn.end)}
        assert spans == {index for index, drawn in enumerate(one.loss_mask) if drawn}
        assert read_turns(turn_lines(one.turns), len(one.input_ids)) == one.turns
        for token, drawn, logprob, version in zip(
            one.input_ids, one.loss_mask, one.logprobs, one.versions, strict=True
        ):
            if drawn:
                assert (token, logprob, version) == (chat.drawn[number], -1.0 - number, 7 + number)
                number += 1
            else:
                assert (logprob, version) == (0.0, 0)
    assert number == len(chat.drawn)


def test_a_conversation_with_a_tool() -> None:
    chat = Chat("qwen3", TOOLS)
    chat.conversation.begin(USER)
    first = chat.conversation.prompt
    assert decoded(chat.tokenizer, first) == rendered(chat.tokenizer, USER, TOOLS)
    answer = chat.draw("<think>\nI add.\n</think>\n\n" + CALL)
    assert answer.reasoning == "I add." and [call.name for call in answer.tool_calls] == ["add"]
    chat.conversation.say(RESULT)
    chat.draw("<think>\nFour.\n</think>\n\n4<|im_end|>")
    (only,) = chat.conversation.sequences
    between = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert chat.text() == (
        decoded(chat.tokenizer, first)
        + "<think>\nI add.\n</think>\n\n"
        + CALL
        + between
        + "<think>\nFour.\n</think>\n\n4<|im_end|>"
    )
    assert [(turn.role, decoded(chat.tokenizer, only.input_ids[turn.start : turn.end])) for turn in only.turns] == [
        ("assistant", "<think>\nI add.\n</think>\n\n" + CALL),
        ("tool", between),
        ("assistant", "<think>\nFour.\n</think>\n\n4<|im_end|>"),
    ]
    check_labels(chat)


def test_reasoning_that_the_template_leaves_out_begins_a_sequence() -> None:
    chat = Chat("qwen3")
    chat.conversation.begin(USER)
    chat.draw("<think>\nFour.\n</think>\n\n4<|im_end|>")
    chat.conversation.say(MORE)
    past = [*USER, {"role": "assistant", "content": "4"}, *MORE]
    assert len(chat.conversation.sequences) == 2 and chat.text() == rendered(chat.tokenizer, past)
    assert "Four." in chat.text(0) and "Four." not in chat.text() and not any(chat.conversation.sequences[1].loss_mask)
    chat.draw("5<|im_end|>")
    assert chat.conversation.sequences[1].turns[0].role == "assistant"
    check_labels(chat)


@pytest.mark.parametrize("spaces", ["", " "])
def test_an_empty_thought_that_the_last_turn_alone_has_rewrites_nothing(spaces: str) -> None:
    chat = Chat("qwen3", TOOLS)
    chat.conversation.begin(USER)
    chat.draw(CALL.replace(": ", ":" + spaces))  # the template writes `: `
    chat.conversation.say(RESULT)
    chat.draw("4<|im_end|>")
    chat.conversation.say(MORE)
    assert len(chat.conversation.sequences) == 1
    assert chat.text().endswith("4<|im_end|>\n<|im_start|>user\nand more?<|im_end|>\n<|im_start|>assistant\n")
    check_labels(chat)


def test_an_empty_thought_that_was_drawn_is_left_out_later() -> None:
    chat = Chat("qwen3")
    chat.conversation.begin(USER)
    chat.draw("<think>\n\n</think>\n\n4<|im_end|>")
    chat.conversation.say(MORE)
    assert len(chat.conversation.sequences) == 2


def test_a_template_that_never_shows_reasoning_begins_a_sequence() -> None:
    chat = Chat("qwen_plain")
    tokenizer = tokenizer_of.__wrapped__("qwen_plain")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message.content }}\n        {%- for call",
        "message.content.split('</think>')[-1].strip() }}\n        {%- for call",
    )
    chat.conversation = Conversation(tokenizer)
    chat.conversation.begin(USER)
    chat.draw("<think>\nFour.\n</think>\n\n4<|im_end|>")
    chat.conversation.say(MORE)
    assert len(chat.conversation.sequences) == 2 and "Four." not in chat.text()


@pytest.mark.parametrize("thought", ["", "<|channel|>analysis<|message|>Four.<|end|><|start|>assistant"])
def test_a_return_of_gpt_oss_is_an_end_later(thought: str) -> None:
    chat = Chat("gpt_oss")
    chat.conversation.begin(USER)
    chat.draw(thought + "<|channel|>final<|message|>4<|return|>")
    chat.conversation.say(MORE)
    assert len(chat.conversation.sequences) == 2
    assert chat.text(0).endswith("4<|return|>") and "<|return|>" not in chat.text() and "Four." not in chat.text()
    check_labels(chat)


def test_a_call_of_gpt_oss_goes_on_as_it_was_drawn() -> None:
    chat = Chat("gpt_oss", TOOLS)
    chat.conversation.begin(USER)
    raw = (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a":2,"b":2}<|call|>'
    )
    chat.draw(raw)
    chat.conversation.say(RESULT)
    assert len(chat.conversation.sequences) == 1
    assert chat.text().endswith(
        f'{raw}<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|><|start|>assistant'
    )
    check_labels(chat)


def test_content_that_the_template_trims_stays_as_it_was_drawn() -> None:
    chat = Chat("gemma")
    chat.conversation.begin([{"role": "system", "content": "Be brief."}, *USER])
    assert chat.text().startswith("<bos><start_of_turn>user\nBe brief.\n\n2 + 2?<end_of_turn>\n")
    chat.draw("  4 \n\n<end_of_turn>")
    chat.conversation.say(MORE)
    chat.draw("5<end_of_turn>")
    (only,) = chat.conversation.sequences
    assert "model\n  4 \n\n<end_of_turn>\n<start_of_turn>user\nand more?<end_of_turn>\n" in chat.text()
    assert only.input_ids.count(chat.tokenizer.bos_token_id) == 1
    check_labels(chat)


@pytest.mark.parametrize("raw", ["4", " 4 ", ""])
def test_what_the_template_puts_behind_a_turn_without_its_end_is_appended(raw: str) -> None:
    chat = Chat("gemma")
    chat.conversation.begin(USER)
    chat.draw(raw)  # a stop text or the length ended it
    chat.conversation.say(MORE)
    assert chat.text().endswith(
        f"model\n{raw}<end_of_turn>\n<start_of_turn>user\nand more?<end_of_turn>\n<start_of_turn>model\n"
    )
    check_labels(chat)


def test_another_token_that_ends_a_turn_stands_for_the_templates() -> None:
    chat = Chat("qwen_plain")
    chat.conversation.begin(USER)
    chat.draw("4<|endoftext|>")
    chat.conversation.say(MORE)
    assert "4<|endoftext|>\n<|im_start|>user\nand more?" in chat.text()


def test_the_end_of_a_turn_may_be_any_special_token_of_the_template() -> None:
    tokenizer = tokenizer_of.__wrapped__("gemma")
    tokenizer.chat_template = tokenizer.chat_template.replace("<end_of_turn>", "<bos>")
    conversation = Conversation(tokenizer)
    conversation.begin(USER)
    conversation.drawn(completion(encoded(tokenizer, " 4<bos>")))
    conversation.say(MORE)
    assert decoded(tokenizer, conversation.prompt).endswith(
        "model\n 4<bos>\n<start_of_turn>user\nand more?<bos>\n<start_of_turn>model\n"
    )


def test_a_template_without_special_tokens_is_followed_where_the_turn_is_as_rendered() -> None:
    tokenizer = tokenizer_of.__wrapped__("gemma")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content | trim + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    for raw, sequences in (("4\n", 1), ("4", 1), ("", 1), (" 4\n", 2)):
        conversation = Conversation(tokenizer)
        conversation.begin(USER)
        conversation.drawn(completion(encoded(tokenizer, raw)))
        conversation.say(MORE)
        assert len(conversation.sequences) == sequences
        turn = {"role": "assistant", "content": raw}
        assert decoded(tokenizer, conversation.prompt) == rendered(tokenizer, [*USER, turn, *MORE])


def test_a_change_far_before_the_turn_begins_a_sequence() -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen_plain")
    tokenizer.chat_template = "{{ messages | length }}" + tokenizer.chat_template
    conversation = Conversation(tokenizer)
    conversation.begin(USER)
    conversation.drawn(completion(encoded(tokenizer, "4<|im_end|>")))
    conversation.say(MORE)
    assert [decoded(tokenizer, one.input_ids)[0] for one in conversation.sequences] == ["1", "3"]


def test_tools_that_move_to_the_last_question_begin_a_sequence() -> None:
    chat = Chat("mistral", TOOLS)
    chat.conversation.begin(USER)
    answer = chat.draw('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 2}}]</s>')
    assert chat.text().count("[AVAILABLE_TOOLS]") == 1 and chat.text().startswith("<s>[AVAILABLE_TOOLS]")
    chat.conversation.say([tool_message(call, "4") for call in answer.tool_calls])
    assert len(chat.conversation.sequences) == 1 and '{"content": 4, "call_id": "' in chat.text()
    chat.draw(" It is 4.</s>")
    chat.conversation.say(MORE)
    assert len(chat.conversation.sequences) == 2 and chat.text().count("[AVAILABLE_TOOLS]") == 1
    check_labels(chat)


def test_a_new_date_rewrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        day = 1

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 5, cls.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    chat_template_utils._compile_jinja_template.cache_clear()
    chat = Chat("llama3")
    for day in (1, 2, 3):
        Clock.day = day
        chat.conversation.begin(USER) if day == 1 else chat.conversation.say(MORE)
        chat.draw("4<|eot_id|>")
    assert len(chat.conversation.sequences) == 1 and "01 May 2026" in chat.text() and "02 May" not in chat.text()
    assert chat.text().count("<|begin_of_text|>") == 1
    check_labels(chat)


def test_a_template_that_refuses_says_why() -> None:
    chat = Chat("gemma")
    with pytest.raises(ConversationError, match="refuses the messages: Conversation roles must alternate"):
        chat.conversation.begin([{"role": "assistant", "content": "4"}])
    chat.conversation.begin(USER)
    chat.draw("4<end_of_turn>")
    with pytest.raises(ConversationError, match="Conversation roles must alternate"):
        chat.conversation.say(RESULT)
    chat.conversation.say(MORE)  # nothing was lost
    assert chat.text().endswith("and more?<end_of_turn>\n<start_of_turn>model\n")


def test_two_calls_that_llama_refuses_stay_text() -> None:
    chat = Chat("llama3", TOOLS)
    chat.conversation.begin(USER)
    call = '{"name": "add", "parameters": {"a": 2, "b": 2}}'
    answer = chat.draw(f"{call}; {call}<|eot_id|>")
    assert len(answer.tool_calls) == 2
    chat.conversation.say([tool_message(one, "4") for one in answer.tool_calls])
    assert len(chat.conversation.sequences) == 1 and chat.text().count("ipython") == 2
    check_labels(chat)


def test_text_and_tokens() -> None:
    chat = Chat("gemma")
    chat.conversation.begin("Sum: 2 + 2 =")
    chat.draw(" 4")
    chat.conversation.say("\nSum: 4 + 4 =")
    chat.draw(" 8")
    chat.conversation.say([5, 6])
    assert chat.text() == "Sum: 2 + 2 = 4\nSum: 4 + 4 = 8" + decoded(chat.tokenizer, [5, 6])
    assert [turn.role for turn in chat.conversation.sequences[0].turns] == ["assistant", "environment"] * 2
    check_labels(chat)
    chat.draw("x")
    with pytest.raises(ConversationError, match="start it with messages"):
        chat.conversation.say(MORE)
    tokens = Chat("gemma")
    tokens.conversation.begin([1, 2, 3])
    assert tokens.conversation.prompt == (1, 2, 3)


def test_text_within_messages_is_the_users() -> None:
    chat = Chat("gemma")
    chat.conversation.begin(USER)
    chat.draw("4<end_of_turn>")
    chat.conversation.say("and more?")
    assert chat.text().endswith("<start_of_turn>user\nand more?<end_of_turn>\n<start_of_turn>model\n")
    chat.draw("5<end_of_turn>")
    chat.conversation.say([1, 2])
    chat.draw("6<end_of_turn>")
    with pytest.raises(ConversationError, match="start it with messages"):
        chat.conversation.say(MORE)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("", "begins with no tokens"),
        ([], "expected text, tokens or a list of messages, and it is empty"),
        (None, "and it is None"),
        ([1, 10**9], "token id 1000000000 is not one"),
        ([-1], "token id -1 is not one"),
        ([1, "a"], "message 0 is 1: expected an object with a role"),
        ([{"content": "a"}], "message 0 is .*: expected an object with a role"),
        ([{"role": "a" * 65, "content": "a"}], "expected an object with a role"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ("\ud800", "half of a surrogate pair"),
        ([{"role": "user", "content": 5}], "refuses the messages"),
    ],
)
def test_what_cannot_become_tokens_is_refused(said: Any, problem: str) -> None:
    with pytest.raises(ConversationError, match=problem):
        Chat("qwen_plain").conversation.begin(said)


def test_turns_come_in_order() -> None:
    chat = Chat("gemma")
    with pytest.raises(ConversationError, match="has not begun"):
        chat.conversation.prompt  # noqa: B018
    chat.conversation.begin(USER)
    with pytest.raises(ConversationError, match="begun already"):
        chat.conversation.begin(USER)
    with pytest.raises(ConversationError, match="before the policy's turn"):
        chat.conversation.say(MORE)
    chat.draw("4")
    with pytest.raises(ConversationError, match="was not answered"):
        chat.draw("4")


def test_messages_need_a_chat_template() -> None:
    tokenizer = tokenizer_of.__wrapped__("gemma")
    tokenizer.chat_template = None
    with pytest.raises(ConversationError, match="no chat template"):
        Conversation(tokenizer).begin(USER)


def test_a_prompt_may_end_within_reasoning() -> None:
    tokenizer = tokenizer_of.__wrapped__("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>assistant\\n' }}{%- endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    )
    conversation = Conversation(tokenizer, TOOLS)
    conversation.begin(USER)
    assert decoded(tokenizer, conversation.prompt).endswith("<think>\n")
    answer = conversation.drawn(completion(encoded(tokenizer, "I add.\n</think>\n\n" + CALL)))
    assert answer.reasoning == "I add." and len(answer.tool_calls) == 1
    conversation.say(RESULT)
    (only,) = conversation.sequences
    assert decoded(tokenizer, only.input_ids).endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n")
    answer = conversation.drawn(completion(encoded(tokenizer, "cut")))
    assert (answer.reasoning, answer.text) == ("cut", "")


def test_unknown_versions_stay_unknown() -> None:
    sequence = Sequence([1])
    sequence.add_drawn(completion([2, 3]))
    assert sequence.versions == [0, 7, 8]
    sequence.add_drawn(Completion([4], [-1.0], True))
    sequence.add([5], "user")
    sequence.add_drawn(completion([6]))
    assert sequence.versions == [] and sequence.logprobs == [0.0, -1.0, -2.0, -1.0, 0.0, -1.0]
    with pytest.raises(ValueError, match="other numbers"):
        sequence.add_drawn(Completion([4], [], True))


def test_tokens_after_a_special_token_are_those_of_the_whole_text() -> None:
    """A tokenizer of SentencePiece's kind puts a space before a text, and may take the space after a special token."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzASU:?+ 0123456789\n<>|/"]
    tokens = Tokenizer(BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokens.decoder = decoders.Metaspace(prepend_scheme="first")
    tokens.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ 'U: ' if message.role == 'user' else 'A: ' }}{{ message.content + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
    )
    conversation = Conversation(tokenizer)
    conversation.begin([{"role": "user", "content": "a"}])
    conversation.drawn(completion(encoded(tokenizer, "<s>b</s>")[-2:]))
    conversation.say([{"role": "user", "content": "c"}])
    whole = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert list(conversation.prompt) == encoded(tokenizer, rendered(tokenizer, whole))


def test_tokenising_is_linear_in_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Chat("qwen_plain")
    read: list[int] = []
    call = type(chat.tokenizer).__call__
    decode = type(chat.tokenizer).decode

    def counted(self: Any, text: str, **options: Any) -> Any:
        read.append(len(text))
        return call(self, text, **options)

    def counted_decode(self: Any, ids: Any, **options: Any) -> Any:
        read.append(len(ids))
        return decode(self, ids, **options)

    chat.conversation.begin([{"role": "user", "content": "x" * 20_000}])
    turn = encoded(chat.tokenizer, "4<|im_end|>")
    monkeypatch.setattr(type(chat.tokenizer), "__call__", counted)
    monkeypatch.setattr(type(chat.tokenizer), "decode", counted_decode)
    for _ in range(100):
        chat.conversation.drawn(completion(turn))
        chat.conversation.say(MORE)
    assert sum(read) < 100 * 200


WORDS = ["4", "two and two", "é✓", "a\n\nb", "{x}", "I'll add", "all", "Hallo", "½ < 1"]
WILD = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "add", "arguments": {"a": 1}}', '{"name": "add"'),
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>"),
    *(" to=functions.add", "analysis", "final", "commentary", "\n", "  ", "[", "{", '"', "<|im_end|>", "</s>", "é"),
    *("<|im_start|>", "<function=add>", "<parameter=a>", "1</parameter>", "</function>", "assistant"),
]


@dataclass
class Turns:
    """Draws what a policy writes."""

    draw: random.Random
    model: Model
    tokenizer: Any

    def words(self) -> str:
        return " ".join(self.draw.choices(WORDS, k=self.draw.randint(1, 3)))

    def canonical(self) -> tuple[str, dict[str, Any]]:
        """A turn as the template renders it, and its message."""
        draw, model = self.draw, self.model
        message: dict[str, Any] = {"role": "assistant", "content": self.words()}
        thought = ""
        if model.thought and draw.random() < 0.5:
            written = self.words()
            thought = model.thought.format(thought=written)
            if model.template == "qwen_plain":
                message["content"] = thought + message["content"]
            else:
                message["thinking" if model.harmony else "reasoning_content"] = written
        text = message["content"].removeprefix(thought)
        if model.call is None or draw.random() < 0.5:
            return model.answer.format(thought=thought, text=text) + model.end, message
        several = 1 if model.template in ("llama3", "gpt_oss") else draw.randint(1, 2)
        calls = [{"name": "add", "arguments": {"a": draw.randint(0, 9), "b": [1, {"c": "é"}]}} for _ in range(several)]
        calls = json.loads(json.dumps(calls))
        if model.template == "mistral":
            calls = [call | {"id": f"{draw.randrange(10**9):09}"} for call in calls]
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            | ({"id": call["id"]} if "id" in call else {})
            for call in calls
        ]
        if "{text}" not in model.text_and_calls:  # its template shows calls alone
            message["content"] = text = ""
        raw = model.call(calls).replace("\\u00e9", "é")
        written = thought + model.text_and_calls.format(text=text, calls=raw)
        return written + ("" if model.harmony else model.end), message

    def wild(self) -> list[int]:
        draw = self.draw
        kind = draw.random()
        if kind < 0.3:
            ids = draw.choices(range(len(self.tokenizer)), k=draw.randint(0, 12))
        elif kind < 0.6:
            ids = encoded(self.tokenizer, "".join(draw.choices(WILD + WORDS, k=draw.randint(0, 8))))
        else:
            raw = self.canonical()[0]
            cut = draw.randint(0, len(raw))
            raw = draw.choice(
                [raw, raw[:cut], raw[:cut] + draw.choice(WILD) + raw[cut:], raw.replace(": ", ":"), " " + raw]
            )
            ids = encoded(self.tokenizer, raw)
        if draw.random() < 0.5:
            ids = [*ids, *encoded(self.tokenizer, draw.choice([self.model.end, *self.model.special]))]
        return ids


def play_canonical(name: str, seed: int) -> int:
    """A policy that writes as its template does: every prompt is the template's rendering. Returns the sequences."""
    draw = random.Random(f"{name} {seed}")
    model, tools = MODELS[name], draw.choice([None, TOOLS])
    chat = Chat(name, tools)
    turns = Turns(draw, model, chat.tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": turns.words()}]
    if draw.random() < 0.3 and model.template in ("qwen3", "qwen_plain", "llama3", "gemma"):
        messages.insert(0, {"role": "system", "content": turns.words()})
    chat.conversation.begin(messages)
    sequences = 1
    for _ in range(draw.randint(1, 5)):
        assert decoded(chat.tokenizer, chat.conversation.prompt) == rendered(chat.tokenizer, messages, tools)
        raw, message = turns.canonical()
        answer = chat.draw(raw)
        assert [call.problem for call in answer.tool_calls] == [None] * len(message.get("tool_calls", []))
        if model.template != "qwen_plain":
            assert answer.text.strip() == message["content"].strip()
        stands = chat.text()
        said = [{"role": "user", "content": turns.words()}]
        if answer.tool_calls:
            said = [tool_message(call, turns.words()) for call in answer.tool_calls]
        messages += [message, *said]
        chat.conversation.say(said)
        sequences += not rendered(chat.tokenizer, messages, tools).startswith(stands)
        assert len(chat.conversation.sequences) == sequences
    assert decoded(chat.tokenizer, chat.conversation.prompt) == rendered(chat.tokenizer, messages, tools)
    check_labels(chat)
    return sequences


def play_wild(name: str, seed: int) -> bool:
    """A policy that writes anything. Returns whether all its turns could be answered."""
    draw = random.Random(f"{name} {seed} wild")
    model, tools = MODELS[name], draw.choice([None, TOOLS])
    chat = Chat(name, tools)
    family = family_of(chat.tokenizer, tools)
    turns = Turns(draw, model, chat.tokenizer)
    messages: list[dict[str, Any]] = [{"role": "user", "content": turns.words()}]
    chat.conversation.begin(messages)
    for _ in range(draw.randint(1, 5)):
        before = chat.conversation.prompt
        ids = turns.wild()
        answer = chat.conversation.drawn(completion(ids, len(chat.drawn)))
        chat.drawn += ids
        assert chat.conversation.prompt == (*before, *ids)
        said = [{"role": "user", "content": turns.words()}]
        if answer.tool_calls and draw.random() < 0.9:
            said = [tool_message(call, call.problem or turns.words()) for call in answer.tool_calls]
        renderings = list(
            allowed(chat.tokenizer, messages, [family.message(answer), family.as_written(answer)], said, tools)
        )
        count = len(chat.conversation.sequences)
        try:
            chat.conversation.say(said)
        except ConversationError:
            assert not renderings or not answer.tool_calls
            check_labels(chat)
            return False
        messages, whole = renderings[0]
        prompt = chat.conversation.prompt
        if len(chat.conversation.sequences) == count:
            assert prompt[: len(before) + len(ids)] == (*before, *ids)
            said_text = decoded(chat.tokenizer, prompt[len(before) + len(ids) :])
            assert whole.endswith(said_text)
            exact = whole.endswith(answer.raw + said_text)
            if not ids or ids[-1] not in special_ids(chat.tokenizer):
                assert exact or said_text.startswith((model.end, "<|call|>"))
            elif answer.raw.endswith(model.end):
                assert exact or not said_text.startswith(model.end)
            if said[-1]["content"].isalnum():
                assert said[-1]["content"] in said_text
        else:
            assert decoded(chat.tokenizer, prompt) == whole
    check_labels(chat)
    return True


def special_ids(tokenizer: Any) -> list[int]:
    return [number for number, token in tokenizer.added_tokens_decoder.items() if token.special]


def allowed(
    tokenizer: Any, earlier: list[dict[str, Any]], turns: list[dict[str, Any]], said: list[dict[str, Any]], tools: Any
) -> Iterator[tuple[list[dict[str, Any]], str]]:
    """The renderings of a turn's messages that the template accepts."""
    for turn in turns:
        messages = [*earlier, turn, *said]
        try:
            yield messages, rendered(tokenizer, messages, tools)
        except Exception:
            continue


CASES = [50, pytest.param(1000, marks=pytest.mark.release)]


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_that_writes_as_its_template_sees_the_templates_prompts(name: str, count: int) -> None:
    sequences = [play_canonical(name, seed) for seed in range(count)]
    rewrites = max(sequences) > 1
    assert rewrites is (name in ("qwen3", "mistral", "gpt_oss"))


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_a_policy_writes_its_tokens_are_the_labels(name: str, count: int) -> None:
    answered = [play_wild(name, seed) for seed in range(count)]
    assert sum(answered) > count // 4
