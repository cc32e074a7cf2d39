"""Chat messages: masks token-exact against each family's template, and refusals by name where they cannot be."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollouts.chat_models import FAMILIES, QWEN, THINKING, make_tokenizer
from rollouts.rollout_records import NOTHING, load, write
from truestep.rollouts.chat import ChatTemplate
from truestep.rollouts.record import BadRecord, Checks, parse_record

CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
ASK = {"role": "user", "content": "What is 2 + 2?"}
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "one turn": [ASK, {"role": "assistant", "content": "It is 4."}],
    "two turns": [
        ASK,
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "Sure?\nReally?"},
        {"role": "assistant", "content": "Yes.\n\nQuite — é 数 \U0001f600"},
    ],
    "spaces, and the user has the last word": [
        {"role": "user", "content": "  a  "},
        {"role": "assistant", "content": "  b\n "},
        {"role": "user", "content": "c"},
    ],
    "the same words twice": [ASK, {"role": "assistant", "content": "What is 2 + 2?"}, ASK] * 2,
    "an empty answer": [ASK, {"role": "assistant", "content": ""}],
}


def chat(tokenizer: Any) -> ChatTemplate:
    return ChatTemplate(lambda: tokenizer)


def reason(record: Any, tokenizer: Any) -> str:
    with pytest.raises(BadRecord) as caught:
        parse_record(record, "chat.jsonl:7", Checks(NOTHING, chat=chat(tokenizer)))
    return caught.value.reason


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_are_exact(name: str, conversation: str) -> None:
    family, messages = FAMILIES[name], CONVERSATIONS[conversation]
    if name == "mistral":  # it wants users and assistants by turns
        messages = [message for at, message in enumerate(messages) if at == 0 or message != messages[at - 1]]
    tokenizer = make_tokenizer(family.template, family.special)
    ids: list[int] = []
    mask: list[int] = []
    for text, label in family.by_hand(messages):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += tokens
        mask += [label] * len(tokens)
    if (name, conversation) == ("marked without the end", "an empty answer"):
        assert (
            reason({"messages": messages}, tokenizer) == "messages: the chat template gives no token of the assistant"
        )
        return
    read = chat(tokenizer).read({"messages": messages})
    assert tokenizer.decode(read["input_ids"]) == "".join(text for text, _ in family.by_hand(messages))
    assert read["input_ids"] == ids
    assert read["loss_mask"] == mask


def test_a_system_message_is_never_a_label() -> None:
    tokenizer = make_tokenizer(QWEN, CHATML)
    messages = [{"role": "system", "content": "Be brief."}, *CONVERSATIONS["one turn"]]
    read = chat(tokenizer).read({"messages": messages})
    labels = [token for token, label in zip(read["input_ids"], read["loss_mask"], strict=True) if label]
    assert tokenizer.decode(labels) == "It is 4.<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_is_refused_by_name() -> None:
    tokenizer = make_tokenizer(THINKING, CHATML)
    said = reason({"messages": CONVERSATIONS["two turns"]}, tokenizer)
    assert said.startswith("messages[1]: the template rewrites the turn once the conversation goes on (token ")
    assert "end the conversation with this turn" in said
    read = chat(tokenizer).read({"messages": CONVERSATIONS["one turn"]})
    labels = [token for token, label in zip(read["input_ids"], read["loss_mask"], strict=True) if label]
    assert tokenizer.decode(labels) == "<think>\n\n</think>\n\nIt is 4.<|im_end|>"


def test_a_token_over_the_border_of_a_turn_is_refused_by_name() -> None:
    """The line break before the answer and the answer's first letter are one token."""
    tokenizer = make_tokenizer(QWEN, CHATML, merges=[("Ċ", "I")])
    said = reason({"messages": CONVERSATIONS["one turn"]}, tokenizer)
    assert said.startswith("messages[1]: the turn's own tokens do not go on from those before it (token ")


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("hello", "messages is 'hello': expected a list of objects"),
        ([], "messages is empty: expected a list of objects"),
        ([7], "messages[0] is 7: expected an object with a role and a content"),
        ([{"content": "x"}], "messages[0] is an object: expected an object with a role and a content"),
        ([{"role": "user", "content": 4}], "messages[0].content is 4: expected text"),
        ([{"role": "user"}], "messages[0].content is null: expected text"),
        ([ASK], "messages has no turn of the assistant: there is nothing to learn"),
        (
            [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}],
            "messages[0] is not text: 'utf-8' codec can't encode character '\\ud800' in position 29: surrogates not "
            "allowed",
        ),
    ],
)
def test_messages_that_are_none(messages: Any, expected: str) -> None:
    assert reason({"messages": messages}, make_tokenizer(QWEN, CHATML)) == expected


def test_what_a_template_raises_is_the_records_fault() -> None:
    family = FAMILIES["mistral"]
    messages = [{"role": "system", "content": "x"}, *CONVERSATIONS["one turn"]]
    said = reason({"messages": messages}, make_tokenizer(family.template, family.special))
    assert said == "messages: the chat template refuses them: Only user and assistant roles are supported!"


def test_a_tokenizer_without_a_template() -> None:
    record = {"messages": CONVERSATIONS["one turn"]}
    assert "tokenizer with a chat template" in reason(record, make_tokenizer(None, CHATML))
    assert "tokenizer with a chat template" in reason(record, None)


def test_messages_and_tokens_are_never_both_taken() -> None:
    record = {"messages": CONVERSATIONS["one turn"], "input_ids": [1, 2], "prompt_length": 1}
    assert reason(record, make_tokenizer(QWEN, CHATML)).startswith("messages and input_ids are both there")


def test_jsonl_and_parquet_and_what_is_bad_among_them(tmp_path) -> None:
    tokenizer = make_tokenizer(QWEN, CHATML)
    records = [{"id": name, "messages": messages} for name, messages in CONVERSATIONS.items()]
    records.insert(1, {"id": "bad", "messages": [ASK]})
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    options = {"needs": NOTHING, "vocabulary_size": len(tokenizer), "max_tokens": 400, "chat": chat(tokenizer)}
    found = [load(path, **options) for path in (write(tmp_path / "a.jsonl", *records), tmp_path / "a.parquet")]
    for documents in found:
        assert [rollout.id for rollout in documents.rollouts] == list(CONVERSATIONS)
        assert [(item.line, item.id) for item in documents.rejected] == [(2, "bad")]
    for first, second in zip(found[0].rollouts, found[1].rollouts, strict=True):
        assert first.input_ids.tolist() == second.input_ids.tolist()
        assert first.loss_mask.tolist() == second.loss_mask.tolist()
