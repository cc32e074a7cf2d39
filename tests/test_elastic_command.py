"""The commands of a run whose ranks come and go, and what such a run is refused for."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser, parse_min_max_nnodes

from small_runs import merged
from truestep.commands.cli import main
from truestep.config.schema import Config
from truestep.ranks import elastic, watch
from truestep.ranks.axes import RankLayout
from truestep.ranks.elastic import Agent, agent_of, find_agent
from truestep.ranks.group import Ranks
from truestep.run.elastic import JOIN_PATIENCE, ElasticError, check_elastic
from truestep.run.train import _refuse_notice
from truestep.run.trainer import TrainingError
from truestep.tools.elastic_command import read_timeout

GIVEN: dict[str, Any] = {
    "model": {"path": "model"},
    "data": {"path": "rollouts.jsonl", "advantages": "none"},
    "schedule": {"docs_per_step": 8},
}
AGENT = Agent(number=1, least=2, most=4)


def config(**sections: Any) -> Config:
    return Config.model_validate(merged(GIVEN, sections))


def printed(tmp_path: Path, *words: str, **sections: Any) -> str:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(GIVEN, sections)), encoding="utf-8")
    done = CliRunner().invoke(main, ["elastic-command", str(tmp_path / "run.yaml"), *words])
    assert done.exit_code == 0, done.output
    return done.output


def parsed(line: str) -> tuple[list[str], dict[str, Any]]:
    """The GPUs of each agent, and what torchrun's own parser makes of its command."""
    gpus, _, rest = line.partition("for gpus in ")[2].partition("; do ")
    command, _, _ = rest.partition(" & ")
    words = command.split()
    threads = "OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}"
    assert words[:4] == [f"{elastic.OWN_STORE}=1", threads, "CUDA_VISIBLE_DEVICES=$gpus", "torchrun"]
    return gpus.split(), vars(get_args_parser().parse_args(words[4:]))


def test_one_agent_a_gpu(tmp_path: Path) -> None:
    lines = printed(tmp_path, "--hosts", "one,two", "--gpus", "4", "--seed", "3").splitlines()
    assert lines[::2] == ["# one", "# two"]
    for line, host in zip(lines[1::2], ("one", "two"), strict=True):
        gpus, given = parsed(line)
        assert gpus == ["0", "1", "2", "3"]
        assert parse_min_max_nnodes(given["nnodes"]) == (4, 8) and given["nproc_per_node"] == "1"
        assert (given["rdzv_backend"], given["rdzv_endpoint"], given["local_addr"]) == ("c10d", "one:29500", host)
        assert given["max_restarts"] >= 100
        settings = _parse_rendezvous_config(given["rdzv_conf"])
        assert settings.keys() == {
            *("join_timeout", "last_call_timeout", "keep_alive_interval", "keep_alive_max_attempt", "read_timeout")
        }
        assert settings["read_timeout"] == str(read_timeout(8, config().schedule.stall_timeout))
        assert given["module"] and given["training_script"] == "truestep"
        assert given["training_script_args"] == ["train", str(tmp_path / "run.yaml"), "--seed", "3"]


class Clock:
    """Time that passes when somebody waits for an event, which never comes, or sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


class Over(BaseException):
    """A process has ended."""


@pytest.mark.parametrize("stall_timeout", [20.0, 300.0, 3600.0])
@pytest.mark.parametrize("size", [2, 64, 1024, 16384])
def test_ranks_of_a_machine_that_is_cut_off_end_before_their_agent(
    size: int, stall_timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch waits for the store for ever, and the guard ends the rank; or it waits for the others to connect."""
    monkeypatch.setenv(elastic.SHARES_STORE, "False")
    clock, agent = Clock(), Agent(os.getppid(), 1, size)
    assert not agent.gone
    guard = watch.Watch(Ranks(1, RankLayout(data_shard=size)), stall_timeout, agent)
    monkeypatch.setattr(guard, "_ended", clock)

    def end(reason: str, code: int) -> NoReturn:
        assert "the store of rank 0 has not answered" in reason
        raise Over

    monkeypatch.setattr(guard, "_exit", end)
    guard._answers = 1  # just before the guard looks for the first time
    with pytest.raises(Over):
        guard._guard(agent)
    waited = max(clock.now, JOIN_PATIENCE)
    assert read_timeout(size, stall_timeout) > waited + elastic.SECONDS_TO_LEAVE


HEEDS = "trap 'echo told $CUDA_VISIBLE_DEVICES; exit 1' TERM"
AGENTS = {
    "ends": "exit $((CUDA_VISIBLE_DEVICES * 3))",
    "is told": f"{HEEDS}; echo there; while :; do sleep 0.05; done",
    "is told while it starts": f"{HEEDS}; [ $CUDA_VISIBLE_DEVICES != 0 ] || kill $PPID; while :; do sleep 0.05; done",
}


@pytest.mark.parametrize("shell", ["bash", "sh"])
@pytest.mark.parametrize(
    ("what", "gpus", "code"), [("ends", 3, 6), ("is told", 3, 1), ("is told while it starts", 16, 1)]
)
def test_the_printed_line_has_the_agents_signals_and_exit_codes(
    shell: str, what: str, gpus: int, code: int, tmp_path: Path
) -> None:
    """The shell is what SLURM and Kubernetes start and end."""
    line = printed(tmp_path, "--hosts", "one", "--gpus", str(gpus), "--least", "1").splitlines()[1]
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{AGENTS[what]}\n")
    (tmp_path / "torchrun").chmod(0o700)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    heeds = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)  # a shell cannot heed what it was started to ignore
    started = subprocess.Popen(
        [shell, "-c", line],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | path,
        preexec_fn=heeds,
        start_new_session=True,
    )
    try:
        assert started.stdout is not None
        if what == "is told":
            assert [started.stdout.readline() for _ in range(gpus)] == ["there\n"] * gpus
            started.terminate()
        said = started.communicate(timeout=20)[0].split()
        assert started.returncode in (code, 128 + signal.SIGTERM if "told" in what else code)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    assert said.count("told") == (gpus if "told" in what else 0)
    assert {word for word in said if word.isdigit()} == ({str(gpu) for gpu in range(gpus)} if "told" in what else set())


def test_gpus_that_a_layout_needs_together_have_one_agent(tmp_path: Path) -> None:
    words = ("--hosts", "one", "--gpus", "8", "--least", "1", "--port", "4000")
    gpus, given = parsed(printed(tmp_path, *words, parallel={"tensor": 2, "data_replicate": 2}).splitlines()[1])
    assert gpus == ["0,1,2,3", "4,5,6,7"] and given["nproc_per_node"] == "4"
    assert given["nnodes"] == "1:2" and given["rdzv_endpoint"] == "one:4000"


@pytest.mark.parametrize(
    ("words", "sections", "said"),
    [
        (["--hosts", "one,one"], {}, "names a machine twice"),
        (["--hosts", "one", "--least", "9"], {}, "more than the 8 agents"),
        (["--hosts", "one", "--gpus", "3"], {"parallel": {"tensor": 2}}, "make no team"),
        (["--hosts", "one"], {"schedule": {"overshoot": "keep"}}, "set schedule.overshoot: carry"),
    ],
)
def test_a_command_that_cannot_be_made(words: list[str], sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(GIVEN, sections)), encoding="utf-8")
    done = CliRunner().invoke(main, ["elastic-command", str(tmp_path / "run.yaml"), *words])
    assert done.exit_code == 1 and said in " ".join(done.output.split())


SERVER = {
    "type": "server",
    "start": {"environment": "engine"},
    "prompts": "prompts.jsonl",
    "reward": "package.module:reward",
}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"schedule": {"docs_per_step": 0}}, "set schedule.docs_per_step"),
        ({"schedule": {"overshoot": "keep"}}, "set schedule.overshoot: carry"),
        ({"data": {"path": "part-{rank}.jsonl"}}, "name files that all ranks see"),
        ({"parallel": {"data_shard": 2}}, "set parallel.data_shard: -1"),
        ({"parallel": {"tensor": 2}}, "parallel.tensor: 2 does not divide the 3 ranks"),
        ({"checkpoint": {"lock": False}}, "checkpoint.lock: false"),
    ],
)
def test_what_a_run_whose_ranks_change_is_refused_for(sections: dict[str, Any], said: str) -> None:
    check_elastic(config(), AGENT)
    with pytest.raises(ElasticError, match="--nnodes 2:4") as refused:
        check_elastic(config(**sections), AGENT)
    assert said in str(refused.value)


def test_servers_that_the_first_rank_starts_are_refused() -> None:
    given = Config.model_validate(
        {
            "model": {"path": "model"},
            "data": {"group_size": 2},
            "sampler": SERVER,
            "schedule": {"docs_per_step": 8, "steps": 1},
        }
    )
    with pytest.raises(ElasticError, match=r"sampler\.start"):
        check_elastic(given, AGENT)


def test_agents_that_share_a_store_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's agents keep the address of the first agent's store when another agent becomes the first."""
    monkeypatch.setenv(elastic.SHARES_STORE, "True")
    with pytest.raises(ElasticError, match=f"{elastic.OWN_STORE}=1"):
        check_elastic(config(), AGENT)


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["python", "/bin/torchrun", "--nnodes", "2:4", "-m", "truestep", "train", "run.yaml"], (2, 4)),
        (["python", "-m", "torch.distributed.run", "--nnodes=2:4", "-m", "truestep", "train", "run.yaml"], (2, 4)),
        (["python", "/bin/torchrun", "--nnodes", "2", "-m", "truestep", "train", "run.yaml"], None),
        (["python", "/bin/torchrun", "-m", "truestep", "train", "--nnodes", "2:4"], None),
        (["python", "train.py", "--nnodes", "2:4"], None),
        ([], None),
    ],
)
def test_an_agent_is_known_by_its_command(
    words: list[str], nodes: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_command_line", lambda number: words if number == os.getppid() else [])
    assert find_agent() is None, "a process that torchrun did not start"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    found = find_agent()
    assert (None if found is None else (found.least, found.most)) == nodes
    assert found is None or (found.number == os.getppid() and not found.gone)


def test_an_agent_that_has_ended_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    agent = agent_of(2**22 + 1, 1, 2)
    assert agent is not None and agent.gone and agent.last_start
    agent.end()  # no process of another kind has its number


COMMAND = ["python", "/bin/torchrun", "--nnodes", "2:4", "-m", "truestep", "train", "run.yaml"]


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "one:29500"], ("one", 29500)),
        (["--rdzv-backend", "c10d", "--rdzv_endpoint", "[fd00::1]:7"], ("fd00::1", 7)),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "one"], ("one", 29400)),  # torch's own port
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"], None),  # any that is free
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "one:two"], None),
        (["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "one:29500"], None),
        ([], None),
    ],
)
def test_where_the_rendezvous_is_asked(
    options: list[str], asked: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cut_off([TimeoutError()], monkeypatch, options) is (asked is not None)
    assert looked_up == ([asked] if asked else []), "at the start, when names still have answers"


@pytest.mark.parametrize(
    ("answers", "killed"),
    [
        ([None], False),
        ([ConnectionRefusedError(errno.ECONNREFUSED, "refused")], False),
        ([TimeoutError()], True),
        ([OSError(errno.EHOSTUNREACH, "No route to host")], True),
        ([OSError(errno.ENETUNREACH, "Network is unreachable"), OSError(errno.ENETDOWN, "Network is down")], True),
        ([TimeoutError(), None], False),  # it answers the second time, or at its second address
        ([TimeoutError(), TimeoutError(), TimeoutError(), None], False),
        ([OSError(errno.EMFILE, "Too many open files")], False),
        ([ConnectionResetError(errno.ECONNRESET, "reset")], False),
        ([socket.gaierror(-3, "Temporary failure in name resolution")], False),
    ],
    ids=repr,
)
def test_an_agent_whose_machine_is_cut_off_is_killed(
    answers: list[Exception | None], killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself it waits for a quarter of an hour, and may then close the run for others. A refusal is an answer, and
    errors of this machine tell nothing."""
    assert cut_off(answers, monkeypatch) is killed


ADDRESSES = [("fd00::1", 7), ("10.0.0.1", 7)]
looked_up: list[tuple[str, int]] = []


def cut_off(
    answers: list[Exception | None],
    monkeypatch: pytest.MonkeyPatch,
    options: Sequence[str] = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "one"),
) -> bool:
    """Tell whether a rank kills its agent, if connections to the rendezvous end so; the last answer is that of all
    further ones, too."""
    looked_up.clear()
    passed, killed, left = [0.0], list[tuple[int, int]](), list(answers)

    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        looked_up.append((host, port))
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in enumerate(ADDRESSES)]

    def connect(address: tuple[str, int], timeout: float) -> contextlib.AbstractContextManager[None]:
        assert address in ADDRESSES
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, TimeoutError):
            passed[0] += timeout
        if answer is not None:
            raise answer
        return contextlib.nullcontext()

    def sleep(seconds: float) -> None:
        passed[0] += seconds

    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    monkeypatch.setattr(elastic, "_taken", {})
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(elastic, "time", SimpleNamespace(sleep=sleep))
    words = [*COMMAND[:4], *options, *COMMAND[4:]]
    monkeypatch.setattr(elastic, "_command_line", lambda number: words if number == os.getppid() else [])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    agent = find_agent()
    assert agent is not None
    agent.leave_if_cut_off()
    assert passed[0] <= elastic.SECONDS_TO_LEAVE
    assert killed in ([], [(os.getppid(), signal.SIGKILL)])
    return bool(killed)


def test_one_rank_of_a_team_ends_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is; a second signal would keep the agent from ending the others."""
    told: list[int] = []
    monkeypatch.setattr(os, "kill", lambda number, kind: told.append(number))
    monkeypatch.setattr(elastic, "_taken", {})
    for _ in range(2):
        Agent(os.getppid(), 1, 2, processes=4).end()
    assert told == [os.getppid()]


def test_few_restarts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun makes none where it is not told otherwise."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    agent = agent_of(os.getppid(), 1, 2)
    assert agent is not None
    with pytest.raises(ElasticError, match="set --max-restarts 1000"):
        check_elastic(config(), agent)


@pytest.mark.parametrize("text", [None, "model: 3", "schedule: {docs_per_step: 8}"])
def test_a_configuration_that_cannot_be_loaded_ends_the_agent(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher would start the same command a thousand times."""
    ended: list[int] = []
    words = ["python", "/bin/torchrun", "--nnodes", "2:4", "-m", "truestep", "train", "run.yaml"]
    monkeypatch.setattr(elastic, "_command_line", lambda number: words if number == os.getppid() else [])
    monkeypatch.setattr(Agent, "end", lambda self: ended.append(self.number))
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    before = signal.getsignal(signal.SIGTERM)
    try:
        for elastically in (False, True):
            if elastically:
                monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
            assert CliRunner().invoke(main, ["train", str(tmp_path / "run.yaml")]).exit_code == 1
            assert ended == [os.getppid()] * elastically
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN, "which the agent sends to its workers in turn"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_launcher_that_is_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_command_line", lambda number: ["python", "launch.py"])
    assert not elastic.unknown_launcher()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert elastic.unknown_launcher()
    words = ["python", "/bin/torchrun", "--nnodes", "2", "train.py"]
    monkeypatch.setattr(elastic, "_command_line", lambda number: words)
    assert not elastic.unknown_launcher()


def test_a_notice_that_is_there_already_is_refused(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    given = config(schedule={"preemption_file": str(notice)})
    _refuse_notice(given)
    notice.touch()
    with pytest.raises(TrainingError, match="is there already: remove it"):
        _refuse_notice(given)
