"""Promises of the pages that no other test would break: what a page says it has, and what a run never does."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import truestep
from pages import ROOT, plain_blocks
from rollouts.rollout_records import NEEDS
from small_runs import (
    file_config,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    without_times,
    word_model,
    write_lines,
    write_rollouts,
)
from truestep.commands.cli import main
from truestep.config.custom import CustomError
from truestep.files import bounded
from truestep.generate import groups
from truestep.generate.engine import draw, phase
from truestep.generate.servers import probe
from truestep.losses.label_losses import LabelLoss, LabelTerm
from truestep.losses.labels import Labels
from truestep.metrics.types import Sum
from truestep.plan import activations, search
from truestep.report import rollouts as page_rollouts
from truestep.report import series
from truestep.rollouts import advantages, stored
from truestep.rollouts.fields import record_names
from truestep.rollouts.files import Checks
from truestep.rollouts.kept.files import list_files, read_rows
from truestep.rollouts.stream import ids, intake, reading
from truestep.run.terminal import run as terminal_run
from truestep.step.update.optimizers import by_weight
from truestep.tools.score import score
from truestep.tools.verify import judge
from truestep.tools.verify.compare import Difference
from truestep.tools.verify.layouts import Layout
from truestep.types import Rollout
from truestep.weight_transfer import link
from truestep.weights import lazy as unread

SOURCES = Path(truestep.__file__).parent


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def named_in_rows(name: str) -> set[str]:
    """Collect what inline code names in the first cells of a page's tables."""
    cells = [line.split("|")[1] for line in page(name).splitlines() if line.startswith("|")]
    return {code for cell in cells for code in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture
def config(tiny_model: Callable[[str], Path], tmp_path: Path) -> truestep.Config:
    write_rollouts(tmp_path / "r.jsonl", 20)
    return file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", schedule={"steps": 2})


# ---- what pages have


def test_every_field_of_a_record_has_a_row() -> None:
    assert set(record_names()) <= named_in_rows("docs/rollouts.md")


def test_every_command_but_the_demo_is_a_function() -> None:
    named_otherwise = {"report": "write_report", "data": "check_files"}
    functions = {command: named_otherwise.get(command, command) in truestep.__all__ for command in main.commands}
    assert [command for command, there in functions.items() if not there] == ["elastic-command", "demo"]


def test_the_page_of_python_has_every_public_name_as_it_is_called() -> None:
    rows = (re.fullmatch(r"(\w+)(?:\((.*)\))?", row) for row in named_in_rows("docs/python.md"))
    called = {match[1]: match[2] for match in rows if match}
    results = {
        "TrainingResult",
        "Score",
        "Verification",
        "Parity",
        "Audit",
        "Finding",
        "MemoryPlan",
        "DataSummary",
        "Replay",
        "Bisection",
        "Comparison",
    }
    assert set(truestep.__all__) - {"__version__"} <= called.keys() | results
    assert all(f"`{name}`" in page("docs/python.md") for name in results)
    for name, words in called.items():
        function = getattr(truestep, name, None)
        if words is not None and inspect.isfunction(function):
            check_call(name, words.removesuffix(", ..."), inspect.signature(function).parameters)


def check_call(name: str, words: str, parameters: Mapping[str, inspect.Parameter]) -> None:
    """Hold what a page writes between the brackets of a call against the function's own parameters."""
    call = ast.parse(f"{name}({words})", mode="eval").body
    assert isinstance(call, ast.Call)
    assert [ast.unparse(argument) for argument in call.args] == list(parameters)[: len(call.args)], name
    for keyword in call.keywords:
        assert parameters[str(keyword.arg)].default == ast.literal_eval(keyword.value), (name, keyword.arg)


def test_every_metric_of_a_run_has_a_row(config: truestep.Config, tmp_path: Path) -> None:
    names = {re.sub("NAME", r"\\w+", name) for name in named_in_rows("docs/metrics.md")}
    quiet_trainer(config.changed({"loss.metrics": "full", "loss.entropy_bonus": 0.1, "loss.z_loss": 0.1})).run()
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    sampled = sampled_config(
        word_model(tmp_path / "m"), prompts, tmp_path / "sampled", loss={"metrics": "full"}, schedule={"steps": 1}
    )
    quiet_trainer(sampled).run()
    lines = [*read_lines(tmp_path / "run/metrics.jsonl"), *read_lines(tmp_path / "sampled/metrics.jsonl")]
    logged = {name for line in lines for name in line if name != "step"}
    assert len(logged) > 50
    assert {name for name in logged if not any(re.fullmatch(known, name) for known in names)} == set()


# ---- what never happens


def forbidden(tree: ast.AST) -> Iterator[str]:
    """Find what could run code that stands in a file or a message: pickle, its relatives, and loads that use it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            )
            yield from (name for name in names if re.match(r"(pickle|dill|cloudpickle|marshal|shelve|joblib)\b", name))
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in (
                "eval",
                "exec",
                "torch.load",
                "np.load",
                "numpy.load",
                "pd.read_pickle",
                "pandas.read_pickle",
                "yaml.unsafe_load",
                "yaml.full_load",
                "torch.jit.load",
                "torch.export.load",
                "torch.hub.load",
            ):
                yield called
            if any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords):
                yield f"{called}(allow_pickle)"
            if called == "yaml.load" and "Safe" not in ast.unparse(node):
                yield called


def test_nothing_is_unpickled() -> None:
    found = {
        str(file.relative_to(SOURCES)): names
        for file in SOURCES.rglob("*.py")
        if (names := list(forbidden(ast.parse(file.read_text(encoding="utf-8")))))
    }
    # Objects of the user's program, which processes that the trainer starts are sent: they call `receive`.
    # Other trainers' dumps, which torch reads without running what they name: tests/audit/test_opening.py.
    assert found == {"config/held.py": ["cloudpickle", "pickle"], "tools/audit/opening.py": ["torch.load"]}
    assert "weights_only=True)" in (SOURCES / "tools/audit/opening.py").read_text(encoding="utf-8")
    received = {path for path in map(str, sorted(SOURCES.rglob("*.py"))) if "held.receive(" in Path(path).read_text()}
    assert received == {str(SOURCES / "environments/worker.py"), str(SOURCES / "ranks/launch.py")}
    planted = "import pickle\nfrom joblib import load\ntorch.load(file)\nexec(text)\nyaml.load(text, yaml.Loader)\n"
    planted += "read_array(file, allow_pickle=True)\nyaml.full_load(text)\n"
    assert len(list(forbidden(ast.parse(planted)))) == 7


def test_nothing_is_downloaded(config: truestep.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refused(self: socket.socket, address: Any) -> None:
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert quiet_trainer(config).run() == "all 2 steps are done"
    assert asked == []


def test_score_has_the_numbers_of_a_step_and_updates_nothing(config: truestep.Config, tmp_path: Path) -> None:
    """Those of a first step of all documents, which `train` makes of the same file."""
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    model = {file: file.read_bytes() for file in Path(config.model.path).iterdir()}
    scored = score(config, tmp_path / "out", gradients=True).step
    after = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and "out" not in file.parts}
    assert after == before and {file: file.read_bytes() for file in Path(config.model.path).iterdir()} == model
    quiet_trainer(config.changed({"schedule.docs_per_step": 20, "schedule.steps": 1})).run()
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    names = set(scored) & set(line) - {
        "num_micro_batches",
        "computed_tokens",
        "recomputed_prefix_tokens",
        "documents_seen",
    }
    assert len(names) > 25
    for name in names:
        assert scored[name] == pytest.approx(line[name], rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize(("kind", "in_a_file"), [("keep", True), ("mask", False), ("drop", False)])
def test_what_is_read_into_memory_whatever_its_size(
    kind: str, in_a_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 4)
    monkeypatch.setattr(stored, "LARGE_BYTES", 1)
    found = stored.open_documents([tmp_path / "r.jsonl"], Checks(NEEDS, truncated=kind), tmp_path / "cache").rollouts
    assert isinstance(found, stored.StoredDocuments) == in_a_file == (tmp_path / "cache").exists()


def test_documents_of_several_updates_are_kept_once(config: truestep.Config) -> None:
    """At the first update on them."""
    quiet_trainer(config.changed({"schedule.updates_per_batch": 2, "schedule.steps": 4})).run()
    rows = [row for file in list_files(Path(str(config.checkpoint.directory)) / "rollouts") for row in read_rows(file)]
    assert [row["step"] for row in rows] == [1] * 5 + [3] * 5
    assert len({row["id"] for row in rows}) == 10


# ---- `verify`


@pytest.mark.parametrize("value", [1e-6, 2e-5, float("nan")])
def test_verify_exits_with_1_where_a_bound_is_broken(
    value: float, config: truestep.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts = [
        judge.LayoutResult(Layout("one process"), {"loss": Difference(1, "loss", "loss", 1e-8)}),
        judge.LayoutResult(Layout("FSDP 2", 2), {"gradient": Difference(2, "gradient", "lm_head.weight", value)}),
    ]
    monkeypatch.setattr(judge, "verify", lambda *_, **__: verdicts)
    (tmp_path / "c.yaml").write_text(truestep.dump_config(config), encoding="utf-8")
    (tmp_path / "out").mkdir()
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "c.yaml"), "--output", str(tmp_path / "out")])
    proof = json.loads((tmp_path / "out/verify.json").read_text(encoding="utf-8"))
    assert (tmp_path / "out/verify.svg").is_file()
    if value == 1e-6:
        assert done.exit_code == 0 and proof["passed"] and "all 2 layouts are within 1e-05" in done.output
        return
    assert done.exit_code == 1 and not proof["passed"] and "all 2 layouts" not in done.output
    assert "FSDP 2: gradient lm_head.weight at step 2" in done.output
    assert "1 of 2 layouts are out of bounds" in done.stderr


# ---- a user's own code


@dataclass(frozen=True)
class Mean(LabelLoss):
    """The commonest mistake: the mean is taken here, and not by `loss.normalize_by`."""

    slope_too: bool = False

    def __call__(self, labels: Labels) -> LabelTerm:
        loss = -labels.advantages * labels.log_ratio.exp()
        return LabelTerm(loss if self.slope_too else loss.mean(), loss.mean() if self.slope_too else loss)


@dataclass(frozen=True)
class Pair(LabelLoss):
    def __call__(self, labels: Labels) -> Any:
        return labels.logprobs, labels.advantages


def number(labels: Labels, step: Any) -> Any:
    return {"mine": 1.0}


def nothing(labels: Labels, step: Any) -> Any:
    return None


def taken(labels: Labels, step: Any) -> Any:
    return {"loss": Sum(1.0)}


OWN = "promises.test_pages"


def own_loss(name: str, **options: Any) -> dict[str, Any]:
    loss = {"type": "custom", "normalize_by": "labels", "function": f"{OWN}:{name}", "options": options}
    return {"loss": loss}


def own_metric(name: str) -> dict[str, Any]:
    return {"logging": {"custom_metrics": [f"{OWN}:{name}"]}}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (own_loss("Mean"), "Mean gives as loss a single number, not one number for each label"),
        (own_loss("Mean", slope_too=True), "Mean gives as slope a single number, not one number for each label"),
        (own_loss("Pair"), "Pair gives tuple, not a LabelTerm(loss, slope)"),
        (own_metric("number"), "number gives mine as float: a metric is one of truestep.metrics.types"),
        (own_metric("nothing"), "nothing gives NoneType, not a mapping of metrics"),
        (own_metric("taken"), "taken gives loss, which is the name of another metric"),
    ],
    ids=["mean of losses", "mean of slopes", "no term", "a number", "nothing", "a name that is taken"],
)
def test_own_code_that_gives_nonsense_is_one_clear_error(
    options: dict[str, Any], said: str, config: truestep.Config
) -> None:
    with pytest.raises(CustomError, match=re.escape(said)):
        quiet_trainer(truestep.Config(**{**config.model_dump(exclude_unset=True), **options})).run()
    assert not list(Path(str(config.checkpoint.directory)).glob("metrics.jsonl")), "no step was made"


class Meddler(truestep.Callback):
    """Writes to all that it is given."""

    def __init__(self) -> None:
        self.refused = 0

    def on_rollouts(self, run: truestep.Run, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            for array in (rollout.advantages, rollout.logprobs, rollout.input_ids, rollout.loss_mask):
                try:
                    array[:] = 0  # type: ignore[index]
                except ValueError:
                    self.refused += 1
            for mapping in (rollout.rewards, rollout.metadata):
                mapping["mine"] = 1.0  # type: ignore[index]

    def on_step(self, run: truestep.Run, metrics: Mapping[str, Any]) -> None:
        metrics.clear()  # type: ignore[attr-defined]

    def on_evaluation(self, run: truestep.Run, evaluation: Mapping[str, Any]) -> None:
        evaluation["examples"].clear()


class Next(truestep.Callback):
    """Comes behind the one that meddles, and sees what it would have seen alone."""

    def on_rollouts(self, run: truestep.Run, rollouts: Sequence[Rollout]) -> None:
        assert not any("mine" in rollout.metadata or "mine" in rollout.rewards for rollout in rollouts)

    def on_step(self, run: truestep.Run, metrics: Mapping[str, Any]) -> None:
        assert metrics["step"] == run.step

    def on_evaluation(self, run: truestep.Run, evaluation: Mapping[str, Any]) -> None:
        assert evaluation["examples"]


def test_a_callback_cannot_change_a_run(tmp_path: Path) -> None:
    model, prompts = word_model(tmp_path / "m"), write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    evaluation, meddler = {"prompts": str(prompts), "every": 1}, Meddler()
    for name, callbacks in (("plain", []), ("meddled", [meddler, Next()])):
        given = sampled_config(model, prompts, tmp_path / name, evaluation=evaluation, schedule={"steps": 2})
        truestep.train(given, callbacks=callbacks)
    assert meddler.refused == 2 * 8 * 4
    for file in ("metrics.jsonl", "evaluation.jsonl", "ledger.jsonl"):
        plain, meddled = (without_times(read_lines(tmp_path / name / file)) for name in ("plain", "meddled"))
        assert meddled == plain, file


class CtrlC(truestep.Callback):
    def __init__(self, times: int) -> None:
        self.times = times

    def on_step(self, run: truestep.Run, metrics: Mapping[str, Any]) -> None:
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # two that are pending together are one


def test_ctrl_c_in_a_program(config: truestep.Config) -> None:
    quiet = Console(file=io.StringIO())
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        truestep.train(config, callbacks=[CtrlC(2)], console=quiet)
    assert signal.getsignal(signal.SIGINT) is handler
    stopped = truestep.train(config, callbacks=[CtrlC(1)], console=quiet)
    assert not stopped.finished and stopped.step == 1 and stopped.checkpoint is not None
    assert truestep.train(config, console=quiet).step == 2, "the directory was left unlocked"
    assert torch.is_grad_enabled()


# ---- figures that stand in the code too

MIB, GIB = 2**20, 2**30
WORDS = {4: "four", 8: "eight"}
FIGURES = [
    ("rollouts", f"Of files of {stored.LARGE_BYTES // MIB} MiB or more together"),
    ("rollouts", f"at most {reading.MOST_MESSAGES:,}, or {reading.MOST_BYTES // MIB} MiB of them"),
    ("rollouts", f"A message of more than {bounded.RECORD // MIB} MiB is rejected unread"),
    ("rollouts", f"Open groups take at most {intake.MOST_OPEN_BYTES // GIB} GiB"),
    ("rollouts", f"`stream_ids.bin` in the run's directory, {ids._DIGEST} bytes each"),
    ("rollouts", f"standard deviation + {advantages.STANDARD_DEVIATION_FLOOR:.0e}".replace("e-04", "e-4")),
    ("metrics", f"at most {page_rollouts.MOST_ROWS:,} rollouts"),
    (
        "metrics",
        f"Of a line of more than {series.LONGEST_SERIES:,} points the page has the smallest and the largest value",
    ),
    ("metrics", f"of each of {series.BUCKETS} stretches"),
    ("memory", f"the first of a fixed ladder that fits {search.ROOM:.0%} of its memory"),
    ("terminal", f"The time left is that of the last {terminal_run._TIMED} steps"),
    ("memory", f"Compiled layers keep {activations._COMPILED:.0%} of that"),
    ("engine", f"at most {phase._ROWS['cuda']:,} on a GPU and {phase._ROWS['cpu']} on a CPU"),
    ("engine", f"a block of {draw.BLOCK} tokens is drawn first"),
    ("sampling", f"prompts of up to {max(probe._LENGTHS)} tokens"),
    ("sampling", f"at temperature {probe.TEMPERATURE}"),
    ("sampling", f"in chunks of {link.CHUNK // MIB} MiB"),
    ("sampling", f"after {WORDS[groups.TRIES]} times the whole group is given up"),
    ("troubleshooting", f"If {WORDS[groups.HOPELESS]} groups in a row cannot be completed"),
    ("optimizers", f"{by_weight._NUMBERS / 1e6:.1f} million numbers of a weight at a time"),
    ("ranks", f"no more than {unread._MAPPED >> 20} MB of the files"),
]


@pytest.mark.parametrize(("name", "text"), FIGURES)
def test_a_figure_of_a_page_is_that_of_the_code(name: str, text: str) -> None:
    assert any(text in block for block in plain_blocks(page(f"docs/{name}.md"))), text
