"""Reading completions: text, reasoning and tool calls of each family, whatever a policy writes."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from truestep.environments.episodes.environment import Answer
from truestep.environments.episodes.tool_calls import Family, family_of

THINK = ("<think>", "</think>")
HERMES = Family("hermes", frozenset({"<|im_start|>", "<|im_end|>", "<|endoftext|>"}), THINK, takes_reasoning=True)
LLAMA = Family("llama", frozenset({"<|python_tag|>", "<|eot_id|>", "<|eom_id|>"}))
MISTRAL = Family("mistral", frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "</s>"}), ("[THINK]", "[/THINK]"))
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
HARMONY = Family("harmony", frozenset(HARMONY_TOKENS), takes_reasoning=True)
PLAIN = Family("plain", frozenset({"<end_of_turn>"}))
FAMILIES = (HERMES, LLAMA, MISTRAL, HARMONY, PLAIN)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "wind": {"type": "boolean"},
                "hours": {"type": "array"},
            },
        },
    },
}


def calls_of(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    assert all(call.problem is None for call in answer.tool_calls), answer.tool_calls
    return [(call.name, dict(call.arguments)) for call in answer.tool_calls]


def tokenizer(template: str | None, tokens: dict[str, bool]) -> Any:
    special = [token for token, is_special in tokens.items() if is_special]
    numbers = {token: number for number, token in enumerate(tokens)}
    return SimpleNamespace(
        chat_template=template,
        get_chat_template=lambda name, tools: template,
        added_tokens_decoder={
            numbers[token]: SimpleNamespace(content=token, special=tokens[token]) for token in tokens
        },
        all_special_tokens=special,
        all_special_ids=[numbers[token] for token in special],
    )


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("qwen3", "hermes"),
        ("qwen_plain", "hermes"),
        ("llama3", "llama"),
        ("mistral", "mistral"),
        ("mistral_args", "mistral"),
        ("gemma", "plain"),
        ("gpt_oss", "harmony"),
    ],
)
def test_a_family_is_recognised_by_its_template(file: str, name: str) -> None:
    template = (Path(__file__).parent / "templates" / f"{file}.jinja").read_text(encoding="utf-8")
    # The tokens of another family do not count where there is a template: Hermes's models have those of Llama.
    tokens = {} if name == "plain" else {"<|python_tag|>": True}
    family = family_of(tokenizer(template, tokens))
    assert family.name == name
    assert family.takes_reasoning is (file in ("qwen3", "gpt_oss"))


@pytest.mark.parametrize(
    ("token", "name"), [("[TOOL_CALLS]", "mistral"), ("<tool_call>", "hermes"), ("<|python_tag|>", "llama")]
)
def test_a_family_is_recognised_by_its_tokens(token: str, name: str) -> None:
    assert family_of(tokenizer(None, {token: True})).name == name
    assert family_of(tokenizer("{{ messages }}", {token: False})).name == name
    assert family_of(tokenizer(None, {})).name == "plain"


def test_hermes() -> None:
    raw = (
        "<think>\nTwo cities.\n</think>\n\nI look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>'
    )
    answer = HERMES.read(raw)
    assert (answer.text, answer.reasoning, answer.raw) == ("I look.", "Two cities.", raw)
    assert calls_of(answer) == [("weather", {"city": "Bern"}), ("weather", {"city": "Ulm"})]
    message = HERMES.message(answer)
    assert message["reasoning_content"] == "Two cities." and message["content"] == "I look."
    assert message["tool_calls"][0] == {
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Bern"}},
    }


def test_a_turn_without_calls_is_its_text() -> None:
    for family in FAMILIES:
        assert family.read("  2 < 3 [sic]\n") == Answer("  2 < 3 [sic]\n", raw="  2 < 3 [sic]\n")
    assert HERMES.read("4<|im_end|>").text == PLAIN.read("4<end_of_turn>").text == "4"
    assert HERMES.message(HERMES.read("4<|im_end|>")) == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("raw", "thinking", "reasoning", "text"),
    [
        ("<think>\na\n</think>\n\nb", False, "a", "b"),
        ("<think>\n\n</think>\n\nb", False, "", "b"),
        ("a\n</think>\n\nb", True, "a", "b"),  # the prompt began it
        ("a\n</think>\n\nb", False, "a", "b"),
        ("<think>a", False, "a", ""),  # cut
        ("a", True, "a", ""),
        ("say <think> loudly", False, None, "say <think> loudly"),
    ],
)
def test_reasoning(raw: str, thinking: bool, reasoning: str | None, text: str) -> None:
    answer = HERMES.read(raw, thinking)
    assert (answer.reasoning, answer.text) == (reasoning, text)


def test_a_call_within_reasoning_is_none_and_its_end_within_a_call_is_none() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
    assert HERMES.read(f"<think>{call[:30]}</think>done").tool_calls == ()
    assert calls_of(HERMES.read(call)) == [("f", {"a": "</think>"})]


def test_reasoning_stays_in_the_content_where_the_template_has_no_field() -> None:
    family = replace(HERMES, takes_reasoning=False)
    answer = family.read("<think>\na\n</think>\n\nb<|im_end|>")
    assert answer.reasoning == "a" and answer.text == "b"
    assert family.message(answer) == {"role": "assistant", "content": "<think>\na\n</think>\n\nb"}
    answer = family.read("a\n</think>\n\nb<|im_end|>", thinking=True)
    assert family.message(answer)["content"] == "a\n</think>\n\nb"


def test_the_xml_form_takes_types_from_the_tools() -> None:
    raw = (
        "<tool_call>\n<function=weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n"
        "<parameter=wind>\nTrue\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
    )
    family = family_of(tokenizer("<tool_call>", {}), [WEATHER, "no schema", {"function": {}}])
    assert calls_of(family.read(raw)) == [("weather", {"city": "7", "days": 7, "wind": True, "hours": [1, 2]})]
    assert calls_of(HERMES.read(raw))[0][1] == {"city": "7", "days": "7", "wind": "True", "hours": "[1, 2]"}
    lines = "<tool_call><function=f><parameter=code>\n\na\n</parameter></function></tool_call>"
    assert calls_of(HERMES.read(lines)) == [("f", {"code": "\na"})]


@pytest.mark.parametrize("tail", ["", "<|eot_id|>", "<|eom_id|>"])
def test_llama(tail: str) -> None:
    call = '{"name": "weather", "parameters": {"city": "Bern"}}'
    expected = ("weather", {"city": "Bern"})
    assert calls_of(LLAMA.read(call + tail)) == [expected]
    assert calls_of(LLAMA.read("<|python_tag|>" + call + tail)) == [expected]
    assert calls_of(LLAMA.read(f"<|python_tag|>{call}; {call}{tail}")) == [expected, expected]
    assert LLAMA.read('{"name": "Bob", "age": 5}' + tail).tool_calls == ()
    assert LLAMA.read('{"answer": ' + tail).tool_calls == ()
    words = LLAMA.read(call + " Done." + tail)
    assert calls_of(words) == [expected] and words.text == "Done."


def test_mistral() -> None:
    old = '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]</s>'
    answer = MISTRAL.read(old)
    assert calls_of(answer) == [("f", {"a": 1}), ("g", {})]
    first, second = answer.tool_calls
    assert first.id == "abcdefghi" and second.id is not None and len(second.id) == 9 and second.id.isalnum()
    assert MISTRAL.read(old) == answer
    assert MISTRAL.message(answer)["tool_calls"][0]["id"] == "abcdefghi"
    new = 'I look.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]h{"b": 2}</s>'
    answer = MISTRAL.read(new)
    assert answer.text == "I look." and calls_of(answer) == [("f", {"a": 1}), ("g", {}), ("h", {"b": 2})]
    assert answer.tool_calls[1].id == "abcdefghi" and len({call.id for call in answer.tool_calls}) == 3


def test_harmony() -> None:
    raw = (
        "<|channel|>analysis<|message|>Look it up.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Bern"}<|call|>'
    )
    answer = HARMONY.read(raw)
    assert (answer.text, answer.reasoning) == ("I look.", "Look it up.")
    assert calls_of(answer) == [("weather", {"city": "Bern"})]
    message = HARMONY.message(answer)
    assert message["thinking"] == "Look it up." and message["content"] == "", "its template refuses both"
    other = HARMONY.read(' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>')
    assert calls_of(other) == [("weather", {"city": "Bern"})] and other.reasoning is None
    final = HARMONY.read(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    )
    assert (final.text, final.reasoning, final.tool_calls) == ("b", "a", ())
    assert HARMONY.read("<|channel|>final<|message|>cut").text == "cut"
    assert HARMONY.read("<|channel|>analysis").text == ""


@pytest.mark.parametrize(
    ("family", "raw", "problem"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "is not valid JSON: Expecting value"),
        (HERMES, '<tool_call>{"arguments": {}}</tool_call>', "has no name"),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            "must be a JSON object, and they are a list",
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "and they are text"),
        (HERMES, '<tool_call>{"name": 7}</tool_call>', "name must be text, and it is a number"),
        (HERMES, "<tool_call>[]</tool_call>", "must be a JSON object, and this is a list"),
        (HERMES, "<tool_call>", "is not valid JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "1e999 is too large"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "half of a surrogate pair"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": %s}}' % ("[" * 99 + "]" * 99), "nested too deeply"),
        (HERMES, '<tool_call>{"name": "%s"}</tool_call>' % ("f" * 999), "999 characters, and 128 are allowed"),
        (HERMES, "<tool_call><function=f><parameter=a>1</function></tool_call>", "parameter a is not closed"),
        (HERMES, "<tool_call><function=f", "is not closed by >"),
        (HERMES, "<tool_call><function=></function></tool_call>", "has no name"),
        (LLAMA, '{"name": "f", "parameters": {"a"', "is not valid JSON"),
        (LLAMA, '{"name": "f", "parameters": 5}', "and they are a number"),
        (LLAMA, "<|python_tag|>print(1)", "is not valid JSON"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f"', "is not valid JSON"),
        (MISTRAL, "[TOOL_CALLS][]", "is empty"),
        (MISTRAL, "[TOOL_CALLS]f", "has no [ARGS]"),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]5", "and they are a number"),
        (MISTRAL, "[TOOL_CALLS][ARGS]{}", "has no name"),
        (HARMONY, "<|channel|>commentary to=functions.f<|message|>{<|call|>", "is not valid JSON"),
        (HARMONY, "<|channel|>commentary to=functions.<|message|>{}<|call|>", "has no name"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(family: Family, raw: str, problem: str) -> None:
    answer = family.read(raw)
    assert len(answer.tool_calls) == 1 and problem in (answer.tool_calls[0].problem or "")
    message = family.message(answer)
    written = json.dumps(message, ensure_ascii=False)
    assert written.encode() and message["role"] == "assistant"
    if family in (HERMES, LLAMA):
        assert message["content"] == raw and "tool_calls" not in message
    else:
        assert message["tool_calls"][0]["function"].keys() == {"name", "arguments"}


def test_a_malformed_call_of_hermes_keeps_its_reasoning_where_it_belongs() -> None:
    answer = HERMES.read("<think>\na\n</think>\n\n<tool_call>{</tool_call><|im_end|>")
    assert HERMES.message(answer) == {
        "role": "assistant",
        "content": "<tool_call>{</tool_call>",
        "reasoning_content": "a",
    }


def test_a_turn_has_at_most_128_calls() -> None:
    for family, call in ((HERMES, '<tool_call>{"name": "f"}</tool_call>'), (MISTRAL, "[TOOL_CALLS]f[ARGS]{}")):
        answer = family.read(call * 200)
        assert len(answer.tool_calls) == 129 and "128" in (answer.tool_calls[-1].problem or "")
    answer = MISTRAL.read("[TOOL_CALLS][" + ", ".join(['{"name": "f"}'] * 200) + "]")
    assert len(answer.tool_calls) == 129 and "128" in (answer.tool_calls[-1].problem or "")


PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "<parameter=", "</parameter>", "</function>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "<|im_end|>", "<|eot_id|>"),
    *HARMONY_TOKENS,
    *(" to=functions.f", "analysis", "commentary", "final", '{"name": "f", "parameters": {}}', '{"a":', "[", "{", '"'),
    *("\n", " ", ";", "<", ">", "\ud800", "é", "\x00", "{{ 7 }}", "assistant", '{"name": "f", "arguments": {"a": 1}}'),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_reading_raises_on_no_text(family: Family) -> None:
    draw = random.Random(1)
    for _ in range(2000):
        raw = "".join(draw.choices(PIECES, k=draw.randint(0, 12)))
        answer = family.read(raw, thinking=draw.random() < 0.2)
        assert answer.raw == raw
        for message in (family.message(answer), family.as_written(answer)):
            assert message["role"] == "assistant" and isinstance(message["content"], str)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_reading_takes_time_linear_in_the_text(family: Family) -> None:
    many = replace(family, special=family.special | {f"<|reserved_{number}|>" for number in range(1000)})
    slowest = 0.0
    for piece in [*PIECES, "<a", "[a", " {", '{"a":[', "[TOOL_CALLS]f", "<tool_call><function=f>", "\n\n", "</"]:
        for start in ("", '{"name":', "<tool_call>", "<|python_tag|>", "<think>"):
            if start and piece not in ("[", "{", '{"a":[', "\n", " ", "<tool_call>"):
                continue
            raw = start + piece * (50_000 // len(piece))
            began = time.process_time()
            many.message(many.read(raw))
            slowest = max(slowest, time.process_time() - began)
    assert slowest < 1, "fifty thousand letters take some hundredths of a second, and minutes where it is square"


def test_a_megabyte_of_calls_is_read_at_once() -> None:
    began = time.process_time()
    assert len(HERMES.read("<tool_call>" * 100_000).tool_calls) == 129
    assert time.process_time() - began < 1
