"""A tiny random chat model that calls tools: some of its words are whole tool calls, in the form of Hermes."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from truestep.tools.demo import model as demo_model

CALL = '<tool_call>{"name":"calculate","arguments":{"expression":"1+2"}}</tool_call>'
LOOK = '<tool_call>{"name":"look","arguments":{}}</tool_call>'
STRANGE = '<tool_call>{"name":"</script><img/src=x>","arguments":{}}</tool_call>'
BROKEN = '<tool_call>{"name":calculate</tool_call>'
# The model ends its turn with any of these.
STOPS = (CALL, LOOK, STRANGE, BROKEN, "done")
_WORDS = ("<start>", "system", "user", "assistant", "tool", "what", "is", "1+2", "3", "error:", "seen", *STOPS)
_TEMPLATE = (
    "{%% for message in messages%s %%}<start> {{ message.role }} {{ message.content }} "
    "{%% for call in message.tool_calls or [] %%}<tool_call>{{ call.function.name }}</tool_call> {%% endfor %%}"
    "<end> {%% endfor %%}{%% if add_generation_prompt %%}<start> assistant {%% endif %%}"
)


def tool_model(directory: Path, shown: str = "") -> Path:
    """`shown` is a slice of the messages that the template shows: with "[-3:]" it leaves out the past."""
    demo_model.make_model(directory, _WORDS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = _TEMPLATE % shown
    tokenizer.save_pretrained(directory)
    return directory
