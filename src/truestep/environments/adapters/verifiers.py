"""Environments of the package verifiers, version 0.4. They request completions as clients of the run's endpoint.

    sampler:
      environment: {type: verifiers, options: {env: {taskset: {id: my_tasks}}, size: 1000}}

`env` has the options of the section `[env]` in the package's own configurations. One process imports the package and
loads the tasks; each episode's process is forked from it. For each episode, the package would start new Python
interpreters for the chat loop and the tool servers. Here they run in the episode's process, or in forks of it.
"""

import asyncio
import itertools
import json
import math
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.config.custom import CustomError
from truestep.environments.adapters import missing
from truestep.environments.episodes.environment import Answer, Environment
from truestep.environments.episodes.program import CUT, RUNNING

try:
    import httpx
    import verifiers.v1 as vf
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import subprocess as local_runtime
except ImportError as error:
    raise missing("sampler.environment.type: verifiers", "verifiers", error) from error

__all__ = ["Chat", "Verifiers"]  # the package looks for the harness in this list

_CHAT = "truestep_chat"  # the module name under which the package imports the harness
_KEY = "TRUESTEP_DOCUMENT"  # the environment variable with the document's key
_PORT_SECONDS = 60.0  # time limit until a tool server has opened its port
_POLL_SECONDS = 0.01


class EpisodeFailedError(RuntimeError):
    """The package says that an episode failed."""


class UnfitError(RuntimeError):
    """The episode cannot become a document: it has several rewards, or turns on which the policy must not be
    trained."""


@dataclass(frozen=True)
class _Loaded:
    env: Any
    tasks: Sequence[Any]


class Verifiers(Environment):
    """Plays one of the environment's tasks. The reward is the one that the environment gives to the policy's trace."""

    _shared: _Loaded | None = None  # the loaded environment, set by `prepare` and shared by episodes

    def __init__(self, *, env: str | Mapping[str, Any], size: int = 1000, held_out: int = 100):
        """`env`: the options of the package's `[env]`, such as taskset: {id: ...}, or only the taskset's id. `size`: at
        most this many tasks, from the first on, are used for training. `held_out`: at most this many of the following
        tasks are used for evaluation."""
        super().__init__()
        self.size, self.held_out = size, held_out
        self.loaded = self._shared or _load(env, size + held_out)
        self._asking: list[Any] = []  # the traces whose turns are sampled from the policy
        self._unfit: UnfitError | None = None

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Load the environment and its tasks, which episodes then share. Return no tools: the environment's requests
        contain them."""
        cls._shared = cls(**options).loaded
        return {}

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Return a row for each task: its number, its key and its prompt's text."""
        made = cls(**options)
        first, count = (made.size, made.held_out) if held_out else (0, made.size)
        chosen = made.loaded.tasks[first : first + count]
        if not chosen and (tasks := len(made.loaded.tasks)):
            raise ValueError(f"the taskset has {tasks} tasks, and options.size: {made.size} leaves none for evaluation")
        return (_row(number, task) for number, task in enumerate(chosen, first))

    async def start(self, row: Mapping[str, Any]) -> str:  # type: ignore[override]
        """Begin the episode. It runs in this process's event loop while `step` waits."""
        os.environ[_KEY] = row["key"]
        self._seconds = row["seconds"]
        self._playing = asyncio.ensure_future(self._play(row["row"], row["url"]))
        return RUNNING

    async def step(self, answer: Answer) -> str:
        done, _ = await asyncio.wait([self._playing], timeout=self._seconds)
        return json.dumps({"reward": self._playing.result()}) if done else RUNNING

    async def _play(self, record: Mapping[str, Any], url: str) -> dict[str, float]:
        task = self.loaded.tasks[record["number"]]
        if task.key != record["key"]:
            raise EpisodeFailedError(
                f"the taskset makes another task of number {record['number']} in this process than when the run began: "
                "make its tasks from their numbers alone, without unseeded random draws"
            )
        policy = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=url, api_key_var=_KEY))
        async with self.loaded.env.serving():
            episode = await self.loaded.env.run_episode(task, policy, on_trace=lambda trace: self._begun(trace, url))
        if self._unfit is not None:
            raise self._unfit
        if not episode.ok:
            failed = [error for trace in episode.traces if not trace.ok for error in trace.errors]
            raise _failure([*failed, *episode.errors])
        if not self._asking:
            raise UnfitError("no agent of the environment asks the policy: each has a client of its own")
        return _rating(self._asking[0])

    def _begun(self, trace: Any, url: str) -> None:
        """Check an agent's run before its first turn."""
        if trace.agent.config.client.base_url != url:  # the agent uses another model
            return
        name = trace.agent.name
        self._asking.append(trace)
        if self._unfit is not None:
            raise self._unfit
        if not trace.agent.trainable:
            self._unfit = UnfitError(
                f"the environment's agent {name!r} is not to be trained, and the policy would be trained on its turns: "
                f"give it another model, by options.env.{name}: model and client"
            )
        elif len(self._asking) > 1:
            names = ", ".join(one.agent.name for one in self._asking)
            self._unfit = UnfitError(
                f"the environment scores several runs of the policy in one episode ({names}), and a document has one "
                "reward: groups are made by data.group_size; other agents need another model"
            )
        if self._unfit is not None:
            raise self._unfit


class Chat(vf.Harness[vf.HarnessConfig]):
    """Requests turns and calls the task's tools until a turn has no tool call. It does the same as the package's
    harness `null`, but in this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages.extend(given)
        timeout = self.config.tool_timeout
        servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
            client.headers["Authorization"] = f"Bearer {secret}"
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
            while (turn := await _turn(client, f"{endpoint}/chat/completions", body, trace)) is not None:
                messages.append(turn)
                if not turn.get("tool_calls"):
                    break
                for call in turn["tool_calls"]:
                    content = await _called(call["function"], places, connections)
                    name = call["function"]["name"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        return vf.ProgramResult(0, "", "")


async def _turn(client: Any, url: str, body: Mapping[str, Any], trace: Any) -> dict[str, Any] | None:
    """Return the policy's next turn; None if a limit of the package or of the run has ended the episode."""
    answer = await client.post(url, json=body)
    if answer.status_code == 200:
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    if trace.stop_condition is not None or CUT in answer.text:
        return None
    raise EpisodeFailedError(f"no turn: status {answer.status_code}: {answer.text:.500}")


async def _called(function: Mapping[str, Any], places: Any, connections: Any) -> Any:
    """Call a tool. Return its result, or an error message."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    if function["name"] not in places:
        return f"error: there is no tool {function['name']!r}; there are {', '.join(places) or 'none'}"
    return await call_mcp(connections, places, function["name"], arguments)


def _row(number: int, task: Any) -> Mapping[str, Any]:
    return {
        "id": f"task-{number}",
        "prompt": task.data.prompt_text or f"task {task.key}",
        "number": number,
        "key": task.key,
    }


def _rating(trace: Any) -> dict[str, float]:
    """Return the trace's reward, with its weighted single rewards and its metrics as parts."""
    unknown = [name for name, reward in trace.rewards.items() if reward is None]
    if unknown:
        raise EpisodeFailedError(f"the environment did not give the reward {unknown[0]!r}: {trace.stop_condition}")
    if not math.isfinite(trace.reward):
        raise EpisodeFailedError(f"the environment gave the reward {trace.reward}: a reward must be a finite number")
    parts = {name: value for name, value in trace.metrics.items() if value is not None and math.isfinite(value)}
    return {**parts, **{name: reward.value for name, reward in trace.rewards.items()}, "reward": float(trace.reward)}


def _failure(errors: Sequence[Any]) -> EpisodeFailedError:
    """Return the first of an episode's errors, and print where it was raised."""
    if not errors:
        return EpisodeFailedError("the environment's episode failed")
    if errors[0].traceback:
        print(errors[0].traceback, file=sys.stderr)
    return EpisodeFailedError(f"{errors[0].type}: {errors[0].message}")


def _load(env: Any, most: int) -> _Loaded:
    """Load the environment and its first tasks."""
    sys.modules[_CHAT] = sys.modules[__name__]
    # Put the directories of episodes under the temporary directory: isolated processes cannot write to the home
    # directory.
    local_runtime.CACHE_DIR = Path(tempfile.gettempdir()) / f"truestep-verifiers-{os.getuid()}"
    local_runtime.SubprocessRuntime.run_background = _run_background
    try:
        config = vf.resolve_env_config({"taskset": {"id": env}} if isinstance(env, str) else dict(env))
        for name, agent in agent_config_fields(config).items():
            setattr(config, name, _played_here(agent, config.taskset.id))
        loaded = vf.load_environment(config)
        return _Loaded(loaded, list(itertools.islice(loaded.taskset, most)))
    except (ImportError, TypeError, ValueError, AttributeError) as error:
        raise CustomError(f"sampler.environment.options.env: verifiers refuses it: {error}") from error


def _played_here(agent: Any, taskset: str) -> Any:
    """Return an agent's configuration, completed. If it chooses the harness `null` or none, it gets the chat loop of
    this module. If it chooses no runtime, it gets a local subprocess, which runs as a fork of this process."""
    here: dict[str, Any] = {}
    given = agent.harness
    name = vf.default_harness_id(taskset) if given is None else given.id
    if name == "null" or (given is None and name == vf.HarnessConfig().id):
        here["harness"] = vf.HarnessConfig(**({} if given is None else given.model_dump()) | {"id": _CHAT})
    if "runtime" not in agent.model_fields_set or agent.runtime == vf.AgentConfig().runtime:
        here["runtime"] = vf.SubprocessConfig()
    return agent.model_copy(update=here)


@dataclass
class _Forked:
    """A forked process, with the part of asyncio's process interface that the package uses."""

    pid: int
    returncode: int | None = None

    async def wait(self) -> int:
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            else:
                await asyncio.sleep(_POLL_SECONDS)
        return self.returncode


async def _run_background(runtime: Any, command: Sequence[str], env: Mapping[str, str], log: str) -> None:
    """Run `python -m MODULE`, a tool server, in a fork of this process, which has imported the package already. The
    server is ready when it has written its port to a file."""
    if command[:2] != [sys.executable, "-m"]:
        raise EpisodeFailedError(
            f"the environment starts the program {command[0]!r}: only its own Python modules (python -m MODULE) can be "
            "started here"
        )
    pid = os.fork()
    if pid == 0:
        _become_module(command[2], runtime.process_env(dict(env)), runtime.workdir, log)
    with suppress(OSError):  # the child does the same; the package kills the process group
        os.setpgid(pid, pid)
    forked = _Forked(pid)
    runtime._background.append(forked)
    end = asyncio.get_running_loop().time() + _PORT_SECONDS
    port = env.get("MCP_PORT_FILE")
    while port is not None and not _has_text(port) and asyncio.get_running_loop().time() < end:
        with suppress(TimeoutError):
            await asyncio.wait_for(forked.wait(), _POLL_SECONDS)
            raise EpisodeFailedError(f"the server of tools {command[2]} ended: {(runtime.workdir / log).read_text()}")


def _has_text(path: str) -> bool:
    with suppress(OSError):
        return os.path.getsize(path) > 0
    return False


def _become_module(module: str, env: Mapping[str, str], directory: Path, log: str) -> None:
    """Run a module as `python -m` does, and never return."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(directory)
        os.environ.pop(_KEY, None)
        os.environ.update(env)
        written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.argv = [module]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
