"""What the adapter makes of what an OpenEnv server says, and of one that fails. test_real.py talks to a real one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from truestep.config.custom import CustomError
from truestep.environments.adapters.openenv import ACT, OpenEnv
from truestep.environments.episodes.environment import Answer, End, ToolCall
from truestep.environments.episodes.service import check_environment
from truestep.environments.process import WorkerOptions
from truestep.environments.rewards import RewardError

TEXT = {"properties": {"metadata": {"type": "object"}, "message": {"type": "string"}}, "required": ["message"]}
MOVE = {
    "title": "Move",
    "description": "A move on the board.",
    "type": "object",
    "properties": {"metadata": {"type": "object"}, "x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
}
FULL = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "Server at capacity: 1/1 sessions active"}}
Answers = Callable[[dict[str, Any]], dict[str, Any] | str | None]


def seen(reward: float | None = None, done: bool = False, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(code: str, message: str, *errors: dict[str, Any]) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message, "errors": list(errors)}}


@contextmanager
def serving(schema: Any, answers: Answers, greeting: Callable[[], Any] = lambda: None) -> Iterator[str]:
    """Serve sessions on loopback. `answers` gives the answer to a message; None breaks the session off."""

    def session(connection: ServerConnection) -> None:
        if (first := greeting()) is not None:
            connection.send(json.dumps(first))
            return
        for message in connection:
            answer = answers(json.loads(message))
            if answer is None:
                return
            connection.send(answer if isinstance(answer, str) else json.dumps(answer))

    def page(connection: ServerConnection, request: Request) -> Response | None:
        if request.path != "/schema":
            return None
        return Response(HTTPStatus.OK, "OK", Headers(), json.dumps(schema).encode())

    with serve(session, "127.0.0.1", 0, process_request=page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join()


def echo(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        return seen(said=f"seed {message['data'].get('seed')}", metadata={"hidden": True})
    said = message["data"]["message"]
    return seen(None if said == "?" else len(said), said == "bye", said=f"you said {said}")


def test_a_text_is_the_turn_and_rewards_are_summed_or_the_last() -> None:
    with serving({"action": TEXT}, echo) as url:
        for how, expected in (("sum", 5.0), ("last", 3.0)):
            own = OpenEnv(url=url, reward=how, system="be kind")
            own.turns = 0
            first = own.start({"prompt": "seed 4", "seed": 4})
            assert first == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "seed 4"}]
            assert own.cut("max_turns") == 0.0
            assert own.step(Answer("hi")) == [{"role": "user", "content": "you said hi"}]
            assert own.step(Answer("?")) == [{"role": "user", "content": "you said ?"}]
            assert own.cut("max_turns") == 2.0
            assert own.step(Answer("bye")) == End(expected, [2.0, None, 3.0])


def test_a_prompt_of_a_file_comes_before_the_observation() -> None:
    with serving({"action": TEXT}, echo) as url:
        row: dict[str, Any] = {"prompt": "do it", "reset": {"seed": 9}}
        assert OpenEnv(url=url, reset={"seed": 1}).start(row) == [{"role": "user", "content": "do it\n\nseed 9"}]
        assert OpenEnv(url=url, chat=False, system="s").start(row) == "s\n\ndo it\n\nseed 9"
        chat = OpenEnv(url=url).start({"prompt": [{"role": "system", "content": "x"}]})
        assert chat == [{"role": "system", "content": "x"}, {"role": "user", "content": "seed None"}]


def test_episodes_of_its_own_are_seeds_and_held_out_ones_are_others() -> None:
    with serving({"action": TEXT}, echo) as url:
        options = {"url": url, "size": 3, "held_out": 2, "seed": 5}
        assert [row["seed"] for row in OpenEnv.rows(options, held_out=False)] == [5, 6, 7]
        assert [row["seed"] for row in OpenEnv.rows(options, held_out=True)] == [8, 9]


def board(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reset":
        return seen(cells=[0, 0], turn="x")
    x, y = (message["data"].get(name) for name in "xy")
    if not isinstance(x, int):
        return error("VALIDATION_ERROR", "Invalid message", {"loc": ["x"], "msg": "should be a valid integer"})
    return seen(float(x), x == y, cells=[x, y], turn="o")


def test_an_action_of_several_fields_is_a_tool_with_the_servers_schema() -> None:
    with serving({"action": MOVE}, board) as url:
        own = OpenEnv(url=url)
        schema = own.actions.tools[ACT]["function"]
        assert schema["description"] == "A move on the board." and set(schema["parameters"]["properties"]) == {"x", "y"}
        assert own.start({"prompt": "p", "seed": 0}) == [{"role": "user", "content": '{"cells": [0, 0], "turn": "x"}'}]
        calls = (
            ToolCall(ACT, {"x": 2, "y": 3}, "a"),
            ToolCall(ACT, {"x": "two"}, "b"),
            ToolCall("leap"),
            ToolCall(ACT, problem="its arguments are no JSON"),
        )
        told = own.step(Answer("", calls))
        assert [(one["role"], one.get("tool_call_id")) for one in told] == [("tool", "a"), ("tool", "b")] + [
            ("tool", None)
        ] * 2
        assert [one["content"] for one in told] == [
            '{"cells": [2, 3], "turn": "o"}',
            "error: x: should be a valid integer",
            "error: there is no tool 'leap'; there are act",
            "error: its arguments are no JSON",
        ]
        both = own.step(Answer("", (ToolCall(ACT, {"x": 4, "y": 4}), ToolCall(ACT, {"x": 9, "y": 9}))))
        assert both == End(6.0, [2.0, 4.0]), "what comes behind the end is not sent"


def test_a_turn_without_a_tool_call_ends_an_episode_of_tools() -> None:
    with serving({"action": MOVE}, board) as url:
        own = OpenEnv(url=url, observation="turn")
        assert own.start({"prompt": "p", "seed": 0}) == [{"role": "user", "content": "x"}]
        own.step(Answer("", (ToolCall(ACT, {"x": 1, "y": 2}),)))
        assert own.step(Answer("I stop")) == End(1.0, [1.0, None])


def test_options_choose_the_field_of_the_action() -> None:
    with serving({"action": MOVE}, board) as url:
        assert OpenEnv(url=url, action="x").actions.field == "x"
        with pytest.raises(CustomError, match=r"options\.action: 'z' is no field of the action: x, y"):
            OpenEnv(url=url, action="z")
        with pytest.raises(CustomError, match=r"options\.reward: 'mean' is neither sum nor last"):
            OpenEnv(url=url, reward="mean")
        with pytest.raises(KeyError, match=r"options\.observation: 'board' is none of cells, turn"):
            OpenEnv(url=url, observation="board").start({"prompt": "p", "seed": 0})
    with serving({"action": TEXT}, echo) as url:
        assert ACT in OpenEnv(url=url, action=ACT).actions.tools


def test_a_full_server_is_waited_for() -> None:
    told = [FULL, FULL, None]
    with serving({"action": TEXT}, echo, lambda: told.pop(0)) as url:
        assert OpenEnv(url=url).start({"prompt": "p", "seed": 1}) == [{"role": "user", "content": "seed 1"}]
    problem = r"had no free session for 0\.1 s: Server at capacity: 1/1"
    with serving({"action": TEXT}, echo, lambda: FULL) as url, pytest.raises(ConnectionError, match=problem):
        OpenEnv(url=url, wait=0.1).start({"prompt": "p", "seed": 1})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (error("EXECUTION_ERROR", "the game is broken"), "the server answered EXECUTION_ERROR: the game is broken"),
        (None, "the session of the server broke off"),
        ("no JSON", "the session of the server broke off: Expecting value"),
        (seen(done=True, said="over"), "the server's episode is over with its reset"),
    ],
)
def test_a_server_that_fails_fails_the_episode(answer: Any, problem: str) -> None:
    raised = pytest.raises((RuntimeError, ConnectionError), match=problem)
    with serving({"action": TEXT}, lambda message: answer) as url, raised:
        OpenEnv(url=url).start({"prompt": "p", "seed": 1})


def test_what_is_no_openenv_server_ends_the_run_before_it_begins() -> None:
    options = WorkerOptions("truestep.environments.adapters.openenv:OpenEnv", 60.0, 2**29)
    with serving("no schema", echo) as url:
        pass
    with pytest.raises(
        RewardError, match=r"options\.url: http://127.* does not answer as an OpenEnv server: .*refused"
    ):
        check_environment(options, {"url": url}, [False])
    with serving("no schema", echo) as url, pytest.raises(RewardError, match="does not answer as an OpenEnv server"):
        check_environment(options, {"url": url}, [False])
    with pytest.raises(RewardError, match="its options do not fit: missing a required argument: 'url'"):
        check_environment(options, {})
