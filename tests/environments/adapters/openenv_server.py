"""Environments of the package openenv, made with its own base classes, on loopback.

The Python of `make adapters` runs it, and it prints its port. `/digits` takes a text, `/tools` is an MCP environment,
and `/board` takes an action of two numbers.
"""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)


class Text(Action):
    message: str


class Place(Action):
    """A place on the board."""

    x: int
    y: int


class Seen(Observation):
    shown: str = ""


class Digits(Environment):
    """Rewards digits in a message, over two steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self._state = State(episode_id=episode_id)
        return Seen(shown=f"sort {(seed or 0) % 10} 1 =")

    def step(self, action: Text, timeout_s: float | None = None, **_: Any) -> Seen:
        self._state.step_count += 1
        digits = sum(word.isdigit() for word in action.message.split())
        return Seen(shown="sort 2 =", reward=digits / 10, done=self._state.step_count == 2)

    @property
    def state(self) -> State:
        return self._state


class Board(Digits):
    """Ends at x = y."""

    def step(self, action: Place, timeout_s: float | None = None, **_: Any) -> Seen:  # type: ignore[override]
        return Seen(shown=f"{action.x},{action.y}", reward=float(action.x), done=action.x == action.y)


class Tools(MCPEnvironment):
    """Has the tools `add` and `fail`, and a reward of 0.5 for each call."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def fail() -> str:
            """Fail."""
            raise ValueError("it cannot be done")

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
        return Observation(metadata={"seed": seed})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("there are tools alone")

    def step(self, action: Action, timeout_s: float | None = None, **others: Any) -> Observation:
        observation = super().step(action, timeout_s=timeout_s, **others)
        return observation.model_copy(update={"reward": 0.5})

    async def step_async(self, action: Action, timeout_s: float | None = None, **others: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **others)
        return observation.model_copy(update={"reward": 0.5})

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    app = FastAPI()
    app.mount("/digits", create_fastapi_app(Digits, Text, Seen, max_concurrent_envs=64))
    app.mount("/board", create_fastapi_app(Board, Place, Seen, max_concurrent_envs=8))
    app.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
