"""Environments that an OpenEnv server serves: each episode is a session of its own on the server.

    sampler:
      environment: {type: openenv, options: {url: "http://127.0.0.1:8000"}}

The server describes its actions at `/schema`. If an action is one text, the policy's turn is the action. The tools of
an MCP environment become the policy's tools. Any other action becomes the tool `act`, with the action's schema.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from truestep.config.custom import CustomError
from truestep.environments.adapters import missing
from truestep.environments.episodes.environment import Answer, End, Environment, Message, ToolCall, tool_message

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect
except ImportError as error:
    raise missing("sampler.environment.type: openenv", "openenv", error) from error

ACT = "act"  # the tool for an environment whose action is neither one text nor a call of an MCP tool
_LARGEST = 2**24  # the most bytes of a message
_SECONDS = 30.0  # time limit for connecting, and for requests that describe the server
_NOT_SHOWN = ("done", "reward", "metadata")  # fields of an observation that the policy does not see


@dataclass(frozen=True)
class Actions:
    """How the policy acts: its text becomes a field of the action, or it calls tools."""

    field: str | None
    tools: Mapping[str, Mapping[str, Any]]  # schemas by name
    is_mcp: bool = False


class OpenEnv(Environment):
    """Shows the server's observations and sends the policy's actions."""

    _known: Actions | None = None  # the server's actions, set by `prepare`

    def __init__(
        self,
        *,
        url: str,
        reset: Mapping[str, Any] | None = None,
        size: int = 1000,
        held_out: int = 100,
        seed: int = 0,
        system: str | None = None,
        action: str | None = None,
        observation: str | None = None,
        reward: str = "sum",
        chat: bool = True,
        wait: float = 30.0,
    ):
        """`reset`: arguments of each reset. `size`, `held_out`: the numbers of training and evaluation episodes if
        there is no file of prompts. The seeds of their resets count up from `seed`, first for training, then for
        evaluation. `system`: a system prompt. `action`: the field of the action that takes the policy's text, or `act`
        for a tool call; null: chosen by the server's schema. `observation`: the field of the observation that the
        policy sees; null: the only field, or all fields as JSON. `reward`: `sum` of the steps' rewards, or `last`.
        `chat`: whether the conversation consists of chat messages; false: text, for a model without a chat template.
        `wait`: seconds to wait for a free session."""
        super().__init__()
        if reward not in ("sum", "last"):
            raise CustomError(f"sampler.environment.options.reward: {reward!r} is neither sum nor last")
        self.url, self.arguments, self.system, self.shown = url.rstrip("/"), dict(reset or {}), system, observation
        self.size, self.held_out, self.seed = size, held_out, seed
        self.how, self.chat, self.wait = reward, chat, wait
        self.actions = self._known or _actions(self.url, action)
        self.rewards: list[float | None] = []  # the reward of each turn
        self.server: ClientConnection | None = None

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Ask the server what its actions are."""
        cls._known = cls(**options).actions
        return cls._known.tools

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Return a row for each seed of a reset."""
        made = cls(**options)
        first = made.seed + made.size * held_out
        seeds = range(first, first + (made.held_out if held_out else made.size))
        return ({"id": f"seed-{seed}", "prompt": f"seed {seed}", "seed": seed} for seed in seeds)

    def start(self, row: Mapping[str, Any]) -> str | Sequence[Message]:
        """Open a session of the server and reset it. Return the prompt from the file, if any, followed by the first
        observation."""
        arguments = self.arguments | dict(row.get("reset") or {})
        if "seed" in row:
            arguments["seed"] = row["seed"]
        self.server, result = _session(self.url, self.wait, arguments)
        if result.get("done"):
            raise RuntimeError("the server's episode is over with its reset")
        text = self._text(result)
        if "seed" not in row:
            return self._begin(row["prompt"], text)
        return self._begin("", text)

    def _begin(self, prompt: Any, text: str) -> str | Sequence[Message]:
        before: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        if isinstance(prompt, str):
            said = "\n\n".join(filter(None, (prompt, text)))
            if not self.chat:
                return "\n\n".join(filter(None, (self.system, said)))
            return [*before, {"role": "user", "content": said}]
        return [*before, *prompt, {"role": "user", "content": text}]

    def step(self, answer: Answer) -> Any:
        """Send the turn as an action, or send each of its tool calls as an action."""
        if self.actions.field is not None:
            told = self._act({self.actions.field: answer.text})
            self.rewards.append(told.reward)
            if told.done:
                return self._end()
            return [{"role": "user", "content": told.text}] if self.chat else told.text
        said, given = [], []
        for call in answer.tool_calls:
            told = self._call(call)
            said.append(tool_message(call, told.text))
            given.append(told.reward)
            if told.done:
                break
        self.rewards.append(_sum(given))
        return said if said and not told.done else self._end()

    def cut(self, reason: str) -> float:
        """Return the reward of the steps so far."""
        return self._reward()

    def _call(self, call: ToolCall) -> "_Told":
        if call.problem is not None or call.name not in self.actions.tools:
            known = ", ".join(self.actions.tools) or "none"
            return _Told(f"error: {call.problem or f'there is no tool {call.name!r}; there are {known}'}")
        if self.actions.is_mcp:
            return self._act({"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)})
        return self._act(dict(call.arguments))

    def _act(self, action: Mapping[str, Any]) -> "_Told":
        """Send an action. If the server's schema refuses it, return the error as the answer."""
        try:
            assert self.server is not None
            result = _asked(self.server, "step", action)
        except _RefusedError as error:
            return _Told(f"error: {error}")
        reward = result.get("reward")
        return _Told(self._text(result), None if reward is None else float(reward), bool(result.get("done")))

    def _text(self, result: Mapping[str, Any]) -> str:
        """Return the part of an observation that the policy sees, as text."""
        seen = {name: value for name, value in result["observation"].items() if name not in _NOT_SHOWN}
        if self.actions.is_mcp and "tool_name" in seen:
            seen = {"error": seen["error"]} if seen.get("error") else {"result": _plain(seen.get("result"))}
        if self.shown is not None:
            if self.shown not in seen:
                known = ", ".join(seen) or "none"
                raise KeyError(f"sampler.environment.options.observation: {self.shown!r} is none of {known}")
            seen = {self.shown: seen[self.shown]}
        value: Any = next(iter(seen.values())) if len(seen) == 1 else seen
        return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) or "(empty)"

    def _end(self) -> End:
        assert self.server is not None
        # Frees the session now; without this, the server would notice the exit of this process only later.
        self.server.close()
        return End(self._reward(), self.rewards)

    def _reward(self) -> float:
        given = [reward for reward in self.rewards if reward is not None]
        return (sum(given) if self.how == "sum" else given[-1]) if given else 0.0


@dataclass(frozen=True)
class _Told:
    """The server's answer to an action."""

    text: str
    reward: float | None = None
    done: bool = False


class _RefusedError(Exception):
    """The action does not fit the server's schema."""


class _FullError(Exception):
    """The server has no free session."""


def _sum(rewards: Sequence[float | None]) -> float | None:
    given = [reward for reward in rewards if reward is not None]
    return sum(given) if given else None


def _plain(result: Any) -> Any:
    """Return the content of an MCP tool's result, without the result's envelope."""
    if isinstance(result, Mapping) and "content" in result:
        if (data := result.get("data")) is not None:
            return data
        return "\n".join(str(part.get("text", part)) for part in result["content"])
    return result


def _session(url: str, wait: float, arguments: Mapping[str, Any]) -> tuple[ClientConnection, Mapping[str, Any]]:
    """Open a session and reset it. If all sessions of the server are in use, wait for a free one."""
    end = time.monotonic() + wait
    pause = 0.05
    while True:
        address = f"ws{url.removeprefix('http')}/ws"
        try:
            server = connect(address, open_timeout=_SECONDS, max_size=_LARGEST, proxy=None)
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"{address} gives no session: {error}") from None
        try:
            return server, _asked(server, "reset", arguments)
        except _FullError as error:
            if time.monotonic() > end:
                raise ConnectionError(f"{url} had no free session for {wait:g} s: {error}") from None
        time.sleep(pause)
        pause = min(1.0, 2 * pause)


def _asked(server: ClientConnection, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send a message and return the data of its answer."""
    try:
        with suppress(WebSocketException):  # the connection is closed, but the server's last message can still be read
            server.send(json.dumps({"type": kind, "data": dict(data)}))
        answer = json.loads(server.recv())
    except (OSError, WebSocketException, ValueError) as error:
        raise ConnectionError(f"the session of the server broke off: {error}") from None
    told: Mapping[str, Any] = answer["data"]
    if answer["type"] != "error":
        return told
    said = f"{told.get('message')}"
    if told.get("code") == "CAPACITY_REACHED":
        raise _FullError(said)
    if told.get("code") == "VALIDATION_ERROR":
        problems = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in told.get("errors", ())]
        raise _RefusedError("; ".join(problems) or said)
    raise RuntimeError(f"the server answered {told.get('code')}: {said}")


def _actions(url: str, action: str | None) -> Actions:
    """Ask the server what its actions are."""
    told = _fetched(f"{url}/schema")
    schema = told.get("action") if isinstance(told, dict) else None
    if not isinstance(schema, dict):
        raise CustomError(f"sampler.environment.options.url: {url}/schema does not answer as an OpenEnv server")
    properties = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", ()) if name in properties]
    if {"tool_name", "arguments"} <= set(properties) and action is None:
        return Actions(None, _mcp_tools(url), is_mcp=True)
    if action is None and len(required or properties) == 1:
        (only,) = required or properties
        action = only if properties[only].get("type") == "string" else None
    if action not in (None, ACT):
        if action not in properties:
            known = ", ".join(properties) or "none"
            raise CustomError(f"sampler.environment.options.action: {action!r} is no field of the action: {known}")
        return Actions(action, {})
    parameters = {name: value for name, value in schema.items() if name not in ("title", "description")}
    return Actions(None, {ACT: _tool(ACT, schema.get("description", ""), parameters | {"properties": properties})})


def _mcp_tools(url: str) -> dict[str, dict[str, Any]]:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
    answer = _fetched(f"{url}/mcp", body)
    if answer.get("error"):
        raise CustomError(f"{url} lists no tools: {answer['error'].get('message')}")
    found = {}
    for one in answer["result"]["tools"]:
        parameters = one.get("inputSchema") or one.get("input_schema") or {"type": "object", "properties": {}}
        found[one["name"]] = _tool(one["name"], one.get("description") or "", parameters)
    return found


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": dict(parameters)},
    }


def _fetched(url: str, body: Any = None) -> Any:
    """Request a description of the server: by GET, or by POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_SECONDS) as answer:
            return json.loads(answer.read(_LARGEST))
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise CustomError(
            f"sampler.environment.options.url: {url} does not answer as an OpenEnv server: {error}"
        ) from None
