"""Rewards, environments and losses as Python has them: no import finds them, and a run takes them."""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import pickle
import pty
import re
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import truestep
from api import own_code
from api.own_rewards import Counting, scaled
from small_runs import read_lines, sort_prompts, without_times, word_model, write_lines
from truestep import Answer, Config, ConfigError, Environment, LabelTerm
from truestep.commands import running
from truestep.config import held
from truestep.config.custom import name_of
from truestep.environments import frames, process
from truestep.environments.episodes import wire
from truestep.environments.episodes.same_process import SameProcessEpisodes, _body
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater, check_reward
from truestep.errors import TruestepError
from truestep.losses.label_losses import FunctionLoss, make_label_loss, term_of
from truestep.losses.labels import Labels
from truestep.ranks.group import ALONE
from truestep.run.assemble.rewards import sampler_rewards
from truestep.types import PackedLabels

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    word_model(folder / "model")
    write_lines(folder / "p.jsonl", sort_prompts(4))
    return folder


def config_of(task: Path, run: Path, **sections: Any) -> Config:
    sampler = {"prompts": task / "p.jsonl", "max_new_tokens": 6} | sections.pop("sampler", {})
    base: dict[str, Any] = {
        "model": {"path": task / "model", "dtype": "float32", "device": "cpu"},
        "data": {"group_size": 4, "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 8, "steps": 1},
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint": {"directory": run},
        "logging": {"console": False},
    }
    return Config(**{**base, "sampler": sampler, **sections})


def closure(scale: float) -> Any:
    def reward(prompt: object, completion: str, **_: object) -> float:
        return scale * len(completion)

    return reward


REWARDS: dict[str, Any] = {
    "lambda": lambda prompt, completion, **_: float(len(completion)),
    "closure": closure(1.0),
    "partial": functools.partial(scaled, scale=1.0),
    "object": Counting(),
    "method": Counting().method,
}


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("kind", REWARDS)
def test_any_reward_rates(kind: str, isolated: bool, task: Path) -> None:
    sections = {"reward": REWARDS[kind]} | ({} if isolated else {"reward_isolation": "same_process"})
    options = sampler_rewards(config_of(task, task / "run", sampler=sections), ALONE)
    assert options is not None and options[0].reward.startswith("this-program:")
    check_reward(options[0], [("p.jsonl:1", ["answer"])])
    rater = Rater(*options)
    try:
        assert rater.submit(Prompt("a", "sort 2 1 =", {"answer": "1 2"}, (1, 2)), "three", "0").result() == 5.0
    finally:
        rater.close()


def test_an_object_trains_in_both_places_and_keeps_its_state_here(
    task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = Counting()
    apart = truestep.train(config_of(task, tmp_path / "apart"), reward=counting).metrics()
    assert counting.calls == 0
    here = truestep.train(
        config_of(task, tmp_path / "here", logging={"console": True}), reward=counting, isolated=False
    ).metrics()
    assert counting.calls == 8 and without_times(here) == without_times(apart)
    assert re.search(r"reward: this-program:Counting", (tmp_path / "here" / "config.yaml").read_text(encoding="utf-8"))
    said = " ".join(capsys.readouterr().out.split())
    assert "rewards: in the trainer's own process (sampler.reward_isolation: same_process)" in said


def test_no_process_sends_an_object_back(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("the trainer unpickles")

    monkeypatch.setattr(pickle, "loads", refused)
    monkeypatch.setattr(pickle, "load", refused)
    truestep.train(config_of(task, tmp_path / "run"), reward=closure(1.0))
    assert held._received == {}


def test_a_reward_of_the_same_process_that_fails_costs_its_completion(task: Path, tmp_path: Path) -> None:
    calls = []

    def reward(prompt: object, completion: str, **fields: Any) -> float:
        fields["answer"] = "changed"  # a copy
        calls.append(completion)
        if len(calls) == 3:
            raise SystemExit("no")
        return float(len(calls))

    data = {"group_size": 4, "tokens_per_microbatch": 64, "advantages": lambda group: [one.reward for one in group]}
    result = truestep.train(config_of(task, tmp_path / "run", data=data), reward=reward, isolated=False)
    assert result.step == 1
    (line,) = read_lines(tmp_path / "run" / "rejected.jsonl")
    assert "the reward raised SystemExit: no (at test_any_object.py" in line["reason"]


def environments() -> dict[str, Any]:
    class Length(Environment):
        def __init__(self, scale: float = 1.0):
            self.scale = scale
            self.seen: list[str] = []

        def finish(self, answer: Answer) -> float:
            self.seen.append(answer.text)
            return self.scale * len(answer.text)

    return {"class": Length, "partial": functools.partial(Length, scale=1.0), "object": Length()}


@pytest.mark.parametrize("kind", ["class", "partial", "object"])
def test_any_environment_trains_in_both_places(kind: str, task: Path, tmp_path: Path) -> None:
    environment = environments()[kind]
    lines: list[dict[str, float]] = []
    for isolated in (True, False):
        config = config_of(task, tmp_path / str(isolated), sampler={"max_episode_tokens": 32, "max_turns": 1})
        result = truestep.train(config, environment=environment, isolated=isolated)
        (line,) = without_times(result.metrics())
        if kind == "object":
            assert bool(environment.seen) != isolated  # what it keeps in its own process stays there
        lines.append({name: line[name] for name in ("reward", "reward_std", "num_labels", "response_length", "loss")})
    assert lines[0] == pytest.approx(lines[1], rel=1e-5) and lines[0]["reward"] > 0


# ---- losses


def labels() -> Labels:
    generator = torch.Generator().manual_seed(3)
    count = torch.tensor([3, 4])
    values = {name: torch.randn(7, generator=generator, dtype=torch.float64) for name in "abcdef"}
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    known = dict.fromkeys(PackedLabels.__dataclass_fields__, values["d"])
    known |= {"old_logprobs": values["b"], "advantages": values["c"], "document": document, "num_labels": count}
    known |= {"has": {}}
    return Labels(
        **known,
        logprobs=values["a"],
        entropy=values["e"],
        logsumexp=values["f"],
        sampler_logprobs=values["b"],
        weight=torch.ones(7, dtype=torch.float64),
    )


def test_the_slope_of_a_function_is_its_derivative() -> None:
    given = labels()
    loss = FunctionLoss(lambda labels: -labels.advantages * labels.log_ratio.exp() + labels.entropy, "mine")
    with torch.no_grad():  # as in a step
        term = term_of(loss, given)
    ratio = (given.logprobs - given.old_logprobs).exp()
    torch.testing.assert_close(term.loss, -given.advantages * ratio + given.entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(term.slope, -given.advantages * ratio, rtol=0, atol=1e-12)
    assert not term.loss.requires_grad and not term.slope.requires_grad
    constant = term_of(FunctionLoss(lambda labels: labels.entropy, "constant"), given)
    assert constant.slope.tolist() == [0.0] * 7


def test_a_function_may_give_its_slope_itself() -> None:
    given = labels()
    loss = FunctionLoss(lambda labels: LabelTerm(labels.logprobs, 2 * labels.logprobs), "own")
    torch.testing.assert_close(term_of(loss, given).slope, 2 * given.logprobs)


@pytest.mark.parametrize("returned", [lambda labels: labels.logprobs.mean(), lambda labels: 0.5, lambda labels: None])
def test_what_is_not_one_number_for_each_label_is_refused_by_name(returned: Any) -> None:
    with pytest.raises(TruestepError, match=r"^mine gives as loss "):
        term_of(FunctionLoss(returned, "mine"), labels())


def losses() -> dict[str, Any]:
    def with_options(labels: Labels, *, scale: float = 1.0) -> torch.Tensor:
        return -scale * labels.advantages * labels.log_ratio.exp()

    from doors.toy_losses import Saturating

    return {
        "lambda": (lambda labels: -labels.advantages * labels.log_ratio.exp(), {}),
        "options": (with_options, {"scale": 1.0}),
        "partial": (functools.partial(with_options, scale=1.0), {}),
        "maker": (lambda: Saturating(2.0), {}),
        "object": (Saturating(2.0), {}),
        "partial of a class": (functools.partial(Saturating, sharpness=2.0), {}),
    }


@pytest.mark.parametrize("kind", ["lambda", "options", "partial", "maker", "object", "partial of a class"])
def test_any_loss_is_taken(kind: str) -> None:
    loss, options = losses()[kind]
    given = {"type": "custom", "function": loss, **({"options": options} if options else {})}
    config = Config(model={"path": "m"}, loss=given, data={"path": "d", "advantages": "none"})
    made, plain = make_label_loss(config.loss), labels()
    term = term_of(made, plain)
    if kind in ("lambda", "options", "partial"):
        torch.testing.assert_close(term.slope, -plain.advantages * plain.log_ratio.exp())
    else:
        assert math.isclose(made.sharpness, 2.0)


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("options", {"scall": 1.0}, "options.scall: with_options has no such option; did you mean scale"),
        ("options", {"scale": "x"}, "options.scale: Input should be a valid number"),
        ("object", {"sharpness": 1.0}, "options: loss.function is an object that is made already"),
    ],
)
def test_options_of_any_loss_are_checked(kind: str, options: dict[str, Any], said: str) -> None:
    given = {"type": "custom", "function": losses()[kind][0], "options": options}
    with pytest.raises(ConfigError, match=re.escape(said)):
        Config(model={"path": "m"}, loss=given, data={"path": "d", "advantages": "none"})


# ---- names, and what is refused


def test_an_object_has_one_name_and_another_has_another() -> None:
    first, second = closure(1.0), closure(2.0)
    name = name_of("sampler.reward", first)
    assert name.startswith("this-program:reward") and name_of("sampler.reward", first) == name
    assert name_of("sampler.reward", second) != name
    counting = Counting()
    assert name_of("sampler.reward", counting.method) == name_of("sampler.reward", counting.method)
    assert name_of("sampler.reward", own_code.reward) == "api.own_code:reward"


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^sampler\.reward: int is neither a function nor a class"):
        Config(model={"path": "m"}, sampler={"prompts": "p", "reward": 3})


def test_what_cannot_be_sent_is_said_with_what_to_do(task: Path, tmp_path: Path) -> None:
    counting = Counting()
    counting.lock = threading.Lock()
    with pytest.raises(TruestepError, match=r"Counting\S* cannot be sent to a process of its own: .*isolated=False"):
        truestep.train(config_of(task, tmp_path / "run"), reward=counting)
    assert truestep.train(config_of(task, tmp_path / "run"), reward=counting, isolated=False).step == 1


def test_a_reward_has_to_be_given(task: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Config: sampler needs sampler.reward or sampler.environment"):
        truestep.train(config_of(task, tmp_path / "run"))
    written = tmp_path / "run.yaml"
    text = f"model: {{path: {task / 'model'}, dtype: float32, device: cpu}}\nsampler: {{prompts: {task / 'p.jsonl'}, "
    text += "max_new_tokens: 6}\ndata: {group_size: 4}\nschedule: {docs_per_step: 8, steps: 1}\n"
    written.write_text(f"{text}checkpoint: {{directory: {tmp_path / 'run'}}}\nlogging: {{console: false}}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: sampler needs sampler\.reward or sampler\.environment"):
        truestep.train(written)
    assert truestep.train(written, reward=closure(1.0)).step == 1


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("sections", "code"),
    [
        ({"loss": {"type": "grpo", "epsilon_low": 0.1, "normalize_by": "documents"}}, "loss"),
        ({"preset": "dapo"}, "loss"),
        ({"sampler": {"environment": {"type": "command", "run": "x"}, "max_turns": 3}}, "reward"),
        ({"sampler": {"environment": {"type": "reasoning_gym", "options": {"task": "x"}}}}, "environment"),
        ({"sampler": {"reward": "api.own_code:reward"}}, "environment"),
    ],
)
def test_code_stands_in_place_of_what_the_configuration_names(
    written: bool, sections: dict[str, Any], code: str, tmp_path: Path
) -> None:
    options = {
        "model": {"path": "m"},
        "data": {"group_size": 4},
        "schedule": {"docs_per_step": 8, "steps": 1},
        **sections,
        "sampler": {
            **({} if "reasoning_gym" in str(sections) else {"prompts": "p.jsonl"}),
            **({"reward": "a:b"} if code == "loss" else {}),
            **sections.get("sampler", {}),
        },
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(options), encoding="utf-8")
    config: Any = file if written else Config(**options)
    given = _config_of(config, code)
    if code == "loss":
        assert given.loss.type == "custom" and given.loss.function.startswith("this-program:")
        wanted = "documents" if "loss" in sections else "labels"
        assert given.loss.normalize_by == wanted and given.sampler.reward == "a:b"
    else:
        sampler, of = given.sampler, getattr(given.sampler, "environment", None)
        assert (sampler.reward or "").startswith("this-program:") == (code == "reward") == (of is None)
        assert of is None or (of.type == "python" and getattr(of, "class").startswith("this-program:"))


def test_what_train_is_given_is_forgotten_when_it_ends(task: Path, tmp_path: Path) -> None:
    class Large:
        pass

    kept, large = closure(1.0), Large()
    name, gone = name_of("sampler.reward", kept), weakref.ref(large)
    config = config_of(task, tmp_path / "run", sampler={"reward": kept})
    given: Any = lambda prompt, completion, large=large, **_: 1.0  # noqa: E731
    truestep.train(config, reward=given, isolated=False)
    del given, large
    gc.collect()
    assert gone() is None and held.find(name) is kept


def test_an_object_that_is_too_large_to_send_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "encode", functools.partial(frames.encode, limit=1000))
    worker = process.Worker(process.WorkerOptions("this-program:f", 5.0, 2**30, objects={"this-program:f": "a" * 2000}))
    try:
        with pytest.raises(process.LostError, match="the reward and what it holds cannot be sent to its process: "):
            worker.start()
    finally:
        monkeypatch.undo()
        worker.end()


def test_event_loops_of_the_same_process_are_closed_with_their_episodes() -> None:
    class Waits(Environment):
        async def finish(self, answer: Answer) -> float:
            return 1.0

    name = name_of("sampler.environment.class", Waits)
    episodes = SameProcessEpisodes(process.WorkerOptions(name, 5.0, 2**30, isolation="same_process"), {})
    episodes.start()
    answer = {"text": "a", "tool_calls": [], "reasoning": "", "raw": "a"}
    calls = ({"call": "start", "seed": "", "name": None, "row": {}}, {"call": "step", "answer": answer})
    begun = _body(wire.BEGIN, 1, frames.encode({"nonce": "", **calls[0]}))
    episodes._answers(*wire.untagged(begun))
    episode, before = episodes._episodes[1], len(os.listdir("/proc/self/fd"))
    assert "end" in episode.answer({"nonce": "", **calls[1]})
    assert len(os.listdir("/proc/self/fd")) > before
    episodes._answers(wire.CLOSE, 1, b"")
    assert len(os.listdir("/proc/self/fd")) == before


def _config_of(config: Any, code: str) -> Any:
    """Give the configuration that `train` has with code of this program."""
    seen: list[Config] = []

    class EnoughError(Exception):
        pass

    def stop(config: Config, *_: Any, **__: Any) -> None:
        seen.append(config)
        raise EnoughError

    pieces = {"loss": lambda labels: labels.logprobs, "reward": closure(1.0), "environment": environments()["class"]}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EnoughError):
        patch.setattr(running, "train_here", stop)
        truestep.train(
            config.changed({"checkpoint.directory": "r"}) if isinstance(config, Config) else config,
            **{code: pieces[code]},
        )
    return seen[0]


def test_a_name_of_another_program_says_so(task: Path, tmp_path: Path) -> None:
    config = config_of(task, tmp_path / "run", sampler={"reward": "this-program:gone"})
    with pytest.raises(TruestepError, match="'this-program:gone' is an object of the Python program that made"):
        truestep.train(config)


# ---- programs

PROGRAM = """
import functools, sys
from pathlib import Path
from truestep import Config, train, verify

task = Path(sys.argv[1])
bonus = 0.25

class Longer:
    def __init__(self):
        self.calls = 0
    def __call__(self, prompt, completion, **_):
        self.calls += 1
        return len(completion) + bonus

def scaled(prompt, completion, *, scale, **_):
    return scale * len(completion) + bonus

def closure(scale):
    return lambda prompt, completion, **_: scale * len(completion) + bonus

def options(name):
    return Config(
        model={"path": task / "model", "dtype": "float32", "device": "cpu"},
        sampler={"prompts": task / "p.jsonl", "max_new_tokens": 6},
        data={"group_size": 4, "tokens_per_microbatch": 64},
        schedule={"docs_per_step": 8, "steps": 1},
        optimizer={"learning_rate": 1e-2},
        checkpoint={"directory": Path(sys.argv[2]) / name},
        logging={"console": False},
    )

REWARDS = {"closure": closure(1.0), "object": Longer(), "partial": functools.partial(scaled, scale=1.0)}
"""
TRAINING = """
for name, reward in REWARDS.items():
    result = train(options(name), reward=reward)
    line = " ".join(["result", name, result.ended, str(result.metrics()[-1]["reward"])])
    print(line + "\\n", end="")  # ranks share the output: one write a line
"""


def results(text: str) -> dict[str, str]:
    found = re.findall(r"^result (\w+) (.*?)\r?$", text, re.MULTILINE)
    assert {name for name, _ in found} == {"closure", "object", "partial"}, text
    assert all(said.startswith("all 1 steps are done") for _, said in found), text
    return dict(found)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.release), 2])
def test_a_script_needs_no_guard_on_any_number_of_ranks(ranks: int, task: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(PROGRAM + TRAINING, encoding="utf-8")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *torchrun, str(script), str(task), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found = results(done.stdout)
    assert len(re.findall("^result", done.stdout, re.MULTILINE)) == 3 * ranks and len(set(found.values())) == 1


@pytest.mark.long
def test_ranks_of_verify_get_a_loss_of_the_script_and_do_not_run_it(task: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    checks = """
config = options("verified").changed({
    "loss": {"type": "custom", "function": lambda labels: -labels.advantages * (labels.log_ratio * bonus).exp()},
    "sampler.reward": closure(1.0),
})
print("result", verify(config, sys.argv[2], ranks=2, documents=6).passed)
"""
    script.write_text(PROGRAM + checks, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), str(task), str(tmp_path)], capture_output=True, text=True, env=environment()
    )
    assert done.stdout.splitlines()[-1:] == ["result True"], done.stdout + done.stderr
    assert done.stdout.count("result") == 1


class Terminal:
    """A Python that somebody types into."""

    def __init__(self, *arguments: str):
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-q", "-i", "-c", f"import sys; sys.argv = {['', *arguments]!r}"]
        variables = {**environment(), "TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
        os.close(theirs)
        self.said = ""
        self._read_to_prompt()

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())
        self._read_to_prompt()

    def _read_to_prompt(self) -> None:
        """Read until Python waits for the next line."""
        new, end = "", time.monotonic() + 240
        while not re.search(r"(>>>|\.\.\.) $", new):
            assert time.monotonic() < end, self.said + new
            if select.select([self._ours], [], [], 1.0)[0]:
                new += os.read(self._ours, 65536).decode(errors="replace")
        self.said += new

    def end(self) -> int:
        os.write(self._ours, b"raise SystemExit(3)\n")
        while select.select([self._ours], [], [], 5.0)[0]:
            try:
                self.said += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # it has exited
                break
        os.close(self._ours)
        return self._process.wait(60)


@pytest.mark.long
def test_a_typed_session_trains(task: Path, tmp_path: Path) -> None:
    terminal = Terminal(str(task), str(tmp_path))
    lines = (PROGRAM + TRAINING).splitlines()
    for here, following in zip(lines, [*lines[1:], ""], strict=True):
        if here.strip():
            terminal.type(here)
            inside = here.startswith((" ", "def ", "class ", "for "))
            if inside and not following.startswith(" "):
                terminal.type("")  # ends a block
    assert terminal.end() == 3, terminal.said
    assert len(set(results(terminal.said.replace("\r\n", "\n")).values())) == 1
