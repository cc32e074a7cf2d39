"""Parses a completion into text, reasoning and tool calls, in the format of the model's family.

hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>, or <function=…><parameter=…> within: Hermes, Qwen
llama     {"name": …, "parameters": {…}}, alone or after <|python_tag|>: Llama 3
mistral   [TOOL_CALLS] and a JSON list, or a name, [ARGS] and a JSON object for each call
harmony   messages in channels: gpt-oss
plain     text without tool calls

A malformed call becomes a `ToolCall` with a `problem`, so that the environment can answer it. Parsing accepts every
text, and takes time linear in its length.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from truestep.environments.episodes.environment import Answer, Message, ToolCall
from truestep.text import printable

_MOST_CALLS = 128  # tool calls of one turn
_LONGEST_NAME = 128
_DEEPEST = 64  # nesting of arguments, which templates and the environment's process convert to JSON again

_Types = Mapping[str, Mapping[str, Any]]  # the JSON type of each parameter of each tool


@dataclass(frozen=True)
class BadCall(ToolCall):
    """A malformed tool call, with its text."""

    written: str = ""


@dataclass(frozen=True)
class _Turn:
    text: str
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str | None = None


@dataclass(frozen=True)
class Family:
    """The form in which a model writes reasoning and tool calls."""

    name: str
    special: frozenset[str] = frozenset()  # texts of the tokenizer's special tokens
    thought: tuple[str, str] | None = None  # the texts around reasoning; None: reasoning is part of the text
    takes_reasoning: bool = False  # the template has a separate message field for reasoning
    types: _Types = field(default_factory=dict)

    def read(self, raw: str, thinking: bool = False) -> Answer:
        """Parse a completion, decoded with its special tokens. `thinking`: the prompt ends within reasoning."""
        turn = self._read(self._without_special(raw), thinking)
        calls = _with_ids(turn.calls, raw) if self.name == "mistral" else turn.calls
        return Answer(turn.text, tuple(calls), turn.reasoning, raw)

    def message(self, answer: Answer) -> Message:
        """Return the assistant's message, in the form that chat templates accept.

        If a call is malformed, hermes and llama keep all calls in the content, as they were written. The templates of
        other families need calls in the field `tool_calls`; there, a malformed call has its text as its arguments.
        """
        if self.name in ("hermes", "llama") and any(call.problem is not None for call in answer.tool_calls):
            return self.as_written(answer)
        message: Message = {"role": "assistant", "content": self._thought_in_text(answer) + answer.text}
        if answer.reasoning and self.takes_reasoning:
            message["reasoning_content"] = answer.reasoning
            if self.name == "harmony":
                message["thinking"] = answer.reasoning
                if answer.tool_calls:  # gpt-oss's template refuses both
                    message["content"] = ""
        if answer.tool_calls:
            message["tool_calls"] = [_openai(call) for call in answer.tool_calls]
        return message

    def as_written(self, answer: Answer) -> Message:
        """Return the assistant's message with its tool calls as text, for templates that refuse the field
        `tool_calls`."""
        text = self._without_special(answer.raw)
        if self.name == "harmony":
            text = self._without_special(answer.raw, markers=frozenset())
        elif answer.reasoning is not None and self.takes_reasoning:
            text = self._split(text, thinking=True)[1]
        message: Message = {"role": "assistant", "content": text}
        if answer.reasoning and self.takes_reasoning and self.name != "harmony":
            message["reasoning_content"] = answer.reasoning
        return message

    def _read(self, text: str, thinking: bool) -> _Turn:
        if self.name == "harmony":
            return _harmony(text)
        reasoning, rest = self._split(text, thinking)
        turn = _READERS[self.name](rest, self.types)
        return _Turn(turn.text, turn.calls, reasoning)

    def _split(self, text: str, thinking: bool) -> tuple[str | None, str]:
        """Return the reasoning, if any, and the text after it. Reasoning is always at the beginning."""
        if self.thought is None:
            return None, text
        begins, ends = self.thought
        head, ended, rest = text.partition(ends)
        if head.lstrip().startswith(begins):
            return head.lstrip()[len(begins) :].strip("\n"), rest.lstrip("\n")
        # The prompt may have begun the reasoning. If that is unknown, an end marker within a tool call's arguments does
        # not count.
        if thinking or (ended and not any(marker in head for marker in _CALL_MARKERS)):
            return head.strip("\n"), rest.lstrip("\n")
        return None, text

    def _thought_in_text(self, answer: Answer) -> str:
        """Return the reasoning as it was written, if the template has no field for it."""
        if answer.reasoning is None or self.takes_reasoning:
            return ""
        text = self._without_special(answer.raw)
        return text[: len(text) - len(self._split(text, thinking=True)[1])]

    def _without_special(self, raw: str, markers: frozenset[str] | None = None) -> str:
        kept = _MARKERS.get(self.name, frozenset()) | frozenset(self.thought or ()) if markers is None else markers
        removed = self.special - kept
        if not removed:
            return raw
        odd = sorted((token for token in removed if not _BRACKETS.fullmatch(token)), key=len, reverse=True)
        raw = _BRACKETS.sub(lambda found: "" if found[0] in removed else found[0], raw)
        return re.sub("|".join(map(re.escape, odd)), "", raw) if odd else raw


# Nearly all special tokens have this form. One pattern with a thousand alternatives would be slow.
_BRACKETS = re.compile(r"<[^<>]{1,62}>|\[[^\[\]]{1,62}\]")
_CALL_MARKERS = ("<tool_call>", "<|python_tag|>", "[TOOL_CALLS]")
_MARKERS: Mapping[str, frozenset[str]] = {
    "hermes": frozenset({"<tool_call>", "</tool_call>"}),
    "llama": frozenset({"<|python_tag|>"}),
    "mistral": frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}),
    "harmony": frozenset(
        {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"}
    ),
}
_RECOGNISED = (
    ("harmony", ("<|channel|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama", ("<|python_tag|>", "<|start_header_id|>")),
)


def family_of(tokenizer: Any, tools: Iterable[Any] | None = None) -> Family:
    """Recognise a model's family by its chat template, or else by its tokens.

    `tools` are schemas, in the form that chat templates accept. A call in the form <parameter=…> does not tell the
    types of its arguments, so the types of `tools` are used.
    """
    template, added = template_of(tokenizer, tools), added_tokens(tokenizer)
    special = frozenset(token for token, is_special in added.values() if is_special)
    tokens = frozenset(token for token, _ in added.values())
    name = _recognised(lambda marker: marker in template) or _recognised(lambda marker: marker in tokens) or "plain"
    thought: tuple[str, str] | None = None
    if name == "mistral":
        thought = ("[THINK]", "[/THINK]")
    elif name == "hermes" or "</think>" in template or "</think>" in tokens:
        thought = ("<think>", "</think>")
    takes_reasoning = name == "harmony" or "reasoning_content" in template
    return Family(name, special, thought, takes_reasoning, _types(tools))


def template_of(tokenizer: Any, tools: Iterable[Any] | None = None) -> str:
    """Return the text of the chat template that conversations use. Empty: there is none."""
    try:
        return str(tokenizer.get_chat_template(None, tools)) if tokenizer.chat_template else ""
    except ValueError:  # several templates and no default
        return ""


def added_tokens(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Return the tokens added to the ordinary vocabulary: the text of each, and whether it is special."""
    found = {number: (token.content, token.special) for number, token in tokenizer.added_tokens_decoder.items()}
    special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return found | {number: (str(token), True) for number, token in special}


def _recognised(known: Callable[[str], bool]) -> str | None:
    return next((name for name, markers in _RECOGNISED if any(map(known, markers))), None)


def _types(tools: Iterable[Any] | None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for tool in tools or ():
        try:
            function = tool.get("function", tool)
            properties = function.get("parameters", {}).get("properties", {})
            found[function["name"]] = {name: shape.get("type") for name, shape in properties.items()}
        except (AttributeError, KeyError, TypeError):
            continue  # the chat template judges schemas, and may accept this one
    return found


def _openai(call: ToolCall) -> Message:
    arguments = call.written if isinstance(call, BadCall) else dict(call.arguments)
    known = {} if call.id is None else {"id": call.id}
    return {"type": "function", **known, "function": {"name": call.name, "arguments": arguments}}


def _with_ids(calls: list[ToolCall], raw: str) -> list[ToolCall]:
    """Give each call the id of nine letters and digits that Mistral's templates require."""
    digest = hashlib.sha256(raw.encode("utf-8", "surrogatepass")).hexdigest()
    taken: set[str] = set()
    named: list[ToolCall] = []
    for index, call in enumerate(calls):
        id = call.id if call.id is not None and re.fullmatch(r"[a-zA-Z0-9]{9}", call.id) else None
        if id is None or id in taken:
            id = hashlib.sha256(f"{index} {digest}".encode()).hexdigest()[:9]
        taken.add(id)
        named.append(_changed(call, id))
    return named


def _changed(call: ToolCall, id: str) -> ToolCall:
    if isinstance(call, BadCall):
        return BadCall(call.name, call.arguments, id, call.problem, call.written)
    return ToolCall(call.name, call.arguments, id, call.problem)


def _plain(text: str, types: _Types) -> _Turn:
    return _Turn(text)


def _hermes(text: str, types: _Types) -> _Turn:
    before, *pieces = text.split("<tool_call>")
    if not pieces:
        return _Turn(text)
    texts = [before.rstrip("\n")]
    calls: list[ToolCall] = []
    for piece in pieces:
        if len(calls) == _MOST_CALLS:
            calls.append(_too_many())
            break
        body, _, after = piece.partition("</tool_call>")
        calls.append(_xml_call(body, types) if body.lstrip().startswith("<function=") else _json_call(body))
        texts.append(after.strip("\n") if after.strip() else "")
    return _Turn("\n".join(filter(None, texts)), calls)


def _xml_call(body: str, types: _Types) -> ToolCall:
    name, ended, inner = body.partition("<function=")[2].partition(">")
    name = name.strip()
    if not ended:
        return BadCall("", problem="the tool call's <function=…> is not closed by >", written=body)
    arguments: dict[str, Any] = {}
    known = types.get(name, {})
    for piece in inner.partition("</function>")[0].split("<parameter=")[1:]:
        key, _, value = piece.partition(">")
        value, closed, _ = value.partition("</parameter>")
        if not closed:
            return _bad(name, f"the parameter {printable(key, 60)} is not closed by </parameter>", body)
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = _typed(value, known.get(key.strip()))
    return _checked_call(name, arguments, None, body)


def _typed(value: str, kind: Any) -> Any:
    if kind in (None, "string"):
        return value
    if kind == "boolean" and value.strip() in ("True", "False"):
        return value.strip() == "True"
    loaded, problem = _load(value)
    return value if problem is not None else loaded


_LLAMA_CALL = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
_NO_CALL = re.compile(r"[\s;]*")


def _llama(text: str, types: _Types) -> _Turn:
    before, tagged, body = text.partition("<|python_tag|>")
    if not tagged:
        before, body = "", text.strip()
        if not _LLAMA_CALL.match(body):
            return _Turn(text)
    body = body.replace("<|python_tag|>", ";")
    calls: list[ToolCall] = []
    position = 0
    while True:
        position = _end(_NO_CALL.match(body, position), position)
        if position == len(body):
            break
        if len(calls) == _MOST_CALLS:
            calls.append(_too_many())
            break
        if not tagged and calls and body[position] != "{":  # words after the calls
            return _Turn(body[position:], calls)
        try:
            value, position = _DECODER.raw_decode(body, position)
        except (ValueError, RecursionError):
            calls.append(_json_call(body[position:]))
            break
        if not tagged and not (isinstance(value, dict) and value.keys() & {"parameters", "arguments"}):
            return _Turn(text)  # an answer in JSON that is not a tool call
        calls.append(_call_of(value, body))
    return _Turn(before, calls)


def _end(found: re.Match[str] | None, otherwise: int) -> int:
    return otherwise if found is None else found.end()


def _mistral(text: str, types: _Types) -> _Turn:
    before, *pieces = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for piece in pieces:
        calls += _mistral_calls(piece.strip())
        if len(calls) > _MOST_CALLS:
            calls[_MOST_CALLS:] = [_too_many()]
            break
    return _Turn(before, calls)


def _mistral_calls(body: str) -> list[ToolCall]:
    if body[:1] not in ("[", "{") or body.startswith(("[ARGS]", "[CALL_ID]")):
        return [_named_call(body)]
    value, problem = _load(body)
    if problem is not None:
        return [BadCall("", problem=problem, written=body)]
    if isinstance(value, dict):
        return [_call_of(value, body)]
    if not value:
        return [BadCall("", problem="the list of tool calls is empty", written=body)]
    return [_call_of(one, body) for one in value[: _MOST_CALLS + 1]]


def _named_call(body: str) -> ToolCall:
    name, tagged, arguments = body.partition("[ARGS]")
    if not tagged:
        brace = body.find("{")
        name, arguments = (body[:brace], body[brace:]) if brace >= 0 else (body, "")
        if brace < 0:
            return _bad(name.strip(), "the tool call has no [ARGS] with a JSON object behind its name", body)
    name, _, id = name.partition("[CALL_ID]")
    return _call_with_json(name.strip(), arguments, id.strip() or None)


def _harmony(text: str) -> _Turn:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for piece in text.split("<|start|>"):
        header, found, content = piece.partition("<|message|>")
        if not found and "<|channel|>" not in header:
            # Text without a channel. If it is only `assistant`, it is the header of a message that was cut off.
            texts.append(_until_end(header) if header != "assistant" else "")
            continue
        content = _until_end(content)
        channel = header.partition("<|channel|>")[2].split(maxsplit=1)[:1]
        recipient = _recipient(header)
        if recipient is not None:
            if len(calls) == _MOST_CALLS:
                calls.append(_too_many())
                break
            calls.append(_call_with_json(recipient, content, None))
        else:
            (thoughts if channel == ["analysis"] else texts).append(content)
    reasoning = "\n".join(thoughts) if thoughts else None
    return _Turn("\n".join(filter(None, texts)), calls, reasoning)


_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>")


def _until_end(content: str) -> str:
    found = _MESSAGE_END.search(content)
    return content if found is None else content[: found.start()]


def _recipient(header: str) -> str | None:
    words = re.sub(r"<\|(?:channel|constrain)\|>", " ", header).split()
    named = next((word for word in words if word.startswith("to=")), None)
    return None if named is None else named.removeprefix("to=").removeprefix("functions.")


_READERS: Mapping[str, Callable[[str, _Types], _Turn]] = {
    "plain": _plain,
    "hermes": _hermes,
    "llama": _llama,
    "mistral": _mistral,
}


def _json_call(body: str) -> ToolCall:
    value, problem = _load(body)
    return BadCall("", problem=problem, written=body) if problem is not None else _call_of(value, body)


def _call_of(value: Any, body: str) -> ToolCall:
    """Return the call that a JSON value describes."""
    if not isinstance(value, dict):
        return BadCall("", problem=f"a tool call must be a JSON object, and this is {_kind(value)}", written=body)
    name, id = value.get("name"), value.get("id")
    if name is not None and not isinstance(name, str):
        return BadCall("", problem=f"the tool call's name must be text, and it is {_kind(name)}", written=body)
    arguments = value.get("arguments", value.get("parameters"))
    return _checked_call(name or "", arguments, id if isinstance(id, str) else None, body)


def _call_with_json(name: str, arguments: str, id: str | None) -> ToolCall:
    value, problem = _load(arguments) if arguments.strip() else ({}, None)
    return _bad(name, problem, arguments) if problem is not None else _checked_call(name, value, id, arguments)


def _checked_call(name: str, arguments: Any, id: str | None, written: str) -> ToolCall:
    if not name:
        return BadCall("", problem="the tool call has no name", written=written)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        kind = _kind(arguments)
        return _bad(name, f"the arguments of {printable(name, 60)} must be a JSON object, and they are {kind}", written)
    problem = _flaw([name, arguments])
    if problem is None and len(name) > _LONGEST_NAME:
        problem = f"the tool call's name has {len(name)} characters, and {_LONGEST_NAME} are allowed"
    return _bad(name, problem, written) if problem is not None else ToolCall(name, arguments, id)


def _bad(name: str, problem: str, written: str) -> BadCall:
    return BadCall(name[:_LONGEST_NAME].encode("utf-8", "replace").decode(), problem=problem, written=written)


def _too_many() -> BadCall:
    return BadCall("", problem=f"a turn may have {_MOST_CALLS} tool calls; this one and those after it are not read")


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)


def _load(text: str) -> tuple[Any, str | None]:
    """Parse JSON. Return the value, or the problem."""
    try:
        return _DECODER.decode(text), None
    except json.JSONDecodeError as error:
        return None, f"the tool call is not valid JSON: {error.msg} at character {error.pos}"
    except ValueError as error:
        return None, f"the tool call is not valid JSON: {error}"
    except RecursionError:
        return None, "the tool call is nested too deeply"


def _flaw(value: Any) -> str | None:
    """Return the reason why a JSON value cannot be written as text again; None if it can."""
    left = [(value, 0)]
    while left:
        one, depth = left.pop()
        if depth > _DEEPEST:
            return "the tool call's arguments are nested too deeply"
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                return "the tool call holds half of a surrogate pair, which is not text"
        elif isinstance(one, dict):
            left += [(item, depth + 1) for pair in one.items() for item in pair]
        elif isinstance(one, list):
            left += [(item, depth + 1) for item in one]
    return None
