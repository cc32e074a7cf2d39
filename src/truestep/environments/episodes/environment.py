"""The base class for training over several turns: an environment starts a conversation and answers each turn.

    class Calculator(Environment):
        \"\"\"Asks for a sum and offers a tool.\"\"\"

        @tool
        def calculate(self, expression: str) -> str:
            \"\"\"Return the value of an arithmetic expression.\"\"\"
            ...

        def finish(self, answer: Answer) -> float:
            return float(answer.text.strip() == self.row["answer"])

Each episode has its own process. Methods may be coroutines. Imports no torch, so that these processes start fast.
"""

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

Message = dict[str, Any]  # a chat message: {"role": "user", "content": "..."}
F = TypeVar("F", bound=Callable[..., Any])

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the policy wrote."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None
    problem: str | None = None  # why it cannot be carried out; None: it is well formed


@dataclass(frozen=True)
class Answer:
    """A turn of the policy."""

    text: str  # without tool calls, reasoning and special tokens
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    raw: str = ""  # the whole turn, including special tokens


@dataclass(frozen=True)
class End:
    """The end of an episode."""

    reward: float | Mapping[str, float]  # a number, or parts as a reward function may return them
    turn_rewards: Sequence[float | None] = ()  # optional rewards of the policy's turns; they are only logged


def tool(method: F) -> F:
    """Mark a method as a tool that the policy may call. The chat template shows its docstring and types."""
    method.is_tool = True  # type: ignore[attr-defined]
    return method


class Environment:
    """One episode. Override `start` or `step`, or write only tools and `finish`."""

    row: Mapping[str, Any]  # the prompt's record
    turns: int = 0  # the number of the policy's turns so far
    # Seconds of the current turn's tool calls, by tool; None: not measured.
    _tool_seconds: dict[str, float] | None = None

    def __init__(self, **options: Any):
        """`options` are those of sampler.environment.options."""
        self.options = options

    def start(self, row: Mapping[str, Any]) -> str | Sequence[Message] | Sequence[int]:
        """Return what the policy sees first: messages, text, or tokens."""
        prompt: str | Sequence[Message] = row["prompt"]
        return prompt

    def step(self, answer: Answer) -> Any:
        """Answer a turn of the policy with messages, text or tokens, or end the episode with `End` or a reward. By
        default tools are called, and a turn without a tool call ends the episode."""
        if not answer.tool_calls:
            return self.finish(answer)
        return self._call_tools(answer)

    def finish(self, answer: Answer) -> Any:
        """Return the reward, or its parts, after a turn without a tool call."""
        raise NotImplementedError(f"{type(self).__name__} has neither `step` nor `finish`")

    def cut(self, reason: str) -> Any:
        """Return the reward of an episode that max_turns, max_episode_tokens or episode_timeout has cut off."""
        return 0.0

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterable[Mapping[str, Any]] | None:
        """Return the records of prompts that this environment makes itself, for training or for evaluation. None: the
        prompts come from the file sampler.prompts."""
        return None

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Prepare for episodes, and return the schemas of the tools by name, in the form that the chat template
        accepts. This is called once, in the process from which episodes are forked. By default the tools are the
        methods marked with `@tool`."""
        return tools_of(cls)

    async def _call_tools(self, answer: Answer) -> list[Message]:
        return [await self._call_tool(call) for call in answer.tool_calls]

    async def _call_tool(self, call: ToolCall) -> Message:
        return tool_message(call, await self._result(call))

    async def _result(self, call: ToolCall) -> str:
        if call.problem is not None:
            return f"error: {call.problem}"
        method = getattr(self, call.name, None) if call.name.isidentifier() else None
        if not getattr(method, "is_tool", False) or method is None:
            return f"error: there is no tool {call.name!r}; there are {', '.join(tools_of(type(self))) or 'none'}"
        try:
            inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            return f"error: {call.name}: {error}"
        start = time.perf_counter()
        result = method(**call.arguments)
        text = str(await result if inspect.isawaitable(result) else result)
        if self._tool_seconds is not None:
            spent = time.perf_counter() - start
            self._tool_seconds[call.name] = self._tool_seconds.get(call.name, 0.0) + spent
        return text


def tool_message(call: ToolCall, content: str) -> Message:
    """Return the message that answers a tool call."""
    known = {"name": call.name} | ({} if call.id is None else {"tool_call_id": call.id})
    return {"role": "tool", **known, "content": content}


def tools_of(kind: type[Environment]) -> dict[str, dict[str, Any]]:
    """Return the schemas of an environment's tools by name, in the form that chat templates accept."""
    found = {name: getattr(kind, name) for name in dir(kind) if getattr(getattr(kind, name), "is_tool", False)}
    return {name: _schema(name, method) for name, method in found.items()}


def _schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(method)
    parameters = [one for one in inspect.signature(method).parameters.values() if one.name != "self"]
    properties = {one.name: {"type": _JSON_TYPES.get(hints.get(one.name, str), "string")} for one in parameters}
    required = [one.name for one in parameters if one.default is inspect.Parameter.empty]
    shape = {"type": "object", "properties": properties, "required": required}
    described = inspect.cleandoc(method.__doc__ or "")
    return {"type": "function", "function": {"name": name, "description": described, "parameters": shape}}
