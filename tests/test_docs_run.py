"""The documentation is executed: every command and every block of Python is run here, in a directory that has what the
pages speak of, or it is named below with the test that runs it. A new block that is neither makes a test fail.

What is run is what stands on the page. Models are tiny, and runs are cut to a few small steps.
"""

from __future__ import annotations

import glob
import json
import re
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import truestep
from documents import make_documents
from pages import ROOT, Block, Page, all_pages, shell_commands, truestep_arguments
from plan.shapes import H200
from small_runs import merged, quiet_trainer, sort_prompts, word_model, write_lines
from truestep.commands.cli import main
from truestep.config.load import load_config
from truestep.rollouts.advantages import RULES

# Commands that are run elsewhere, or by hand, by what they begin with; and by which test or for what reason.
COMMANDS = {
    r"make (demo|test|test-long|test-nightly|tutorial|small-model|format|docs|site)\b": "`.ci/run` runs make test "
    "(check, site and suite), make test-long and what a change concerns of make test-nightly; make demo runs "
    "`truestep demo`; make tutorial types docs/tutorial.md with a real model",
    r"\.venv/bin/pre-commit install": "it changes the clone",
    r"\. \.venv/bin/activate": "tests/test_tutorial.py",
    r"pip install": "the Makefile installs the same package; the extras are those of pyproject.toml",
    r"truestep demo": "tests/test_demo.py",
    r"truestep verify": "tests/verify/test_verify.py types it, under every layout",
    r"truestep init runs/largest|cd runs/largest|python prompts.py|python -m pytest -q": "tests/test_tutorial.py",
    r"truestep train config.yaml --model.dtype float32 --sampler.max_new_tokens 6": "tests/test_tutorial.py",
    r"truestep report run$": "tests/test_tutorial.py",
    r"python -m examples.recipes.prepare|truestep (train examples|export runs)/recipes": "tests/test_recipes.py",
    r"python -m examples.boxes.prepare|truestep (train examples|export runs)/boxes": "tests/test_boxes.py",
    r"python -m examples.experts.echo": "tests/test_examples_train.py",
    r"truestep train examples/": "tests/test_examples_train.py",
    r"cd my-task|python (-m pytest )?test_reward.py": "tests/test_init.py",
    r"torchrun": "tests/test_launch.py parses it as torchrun does; tests/ranks/test_train_over_ranks.py trains",
    r"(sbatch|kubectl|sky) ": "tests/test_launch.py",
    r"VLLM_\S* .*vllm|VLLM_SERVER_DEV_MODE=1 python": "tests/server/vllm_server.py starts a real one",
    r"python -m sglang": "tests/server/sglang_server.py speaks its protocol; the server itself needs a GPU",
    r"python benchmarks/": "it measures a GPU",
    r"export TINKER_|python -m tinker_cookbook": "tests/tinker/test_client.py",
    r"truestep replay runs/example": "tests/replay/test_replay.py makes steps again, and with these options",
    r"truestep bisect runs/example": "tests/replay/test_bisect.py",
    r"truestep compare runs/example runs/other": "tests/replay/test_compare.py",
    r"truestep elastic-command": "tests/test_elastic_command.py",
    r"truestep serve": "tests/generate/endpoint/test_serve.py",
    r"curl -X POST \$OPENAI_BASE_URL": "tests/generate/endpoint/test_app.py posts the same",
    r"echo \{\"reward\"": "tests/generate/endpoint/sorts.py prints the same",
}  # fmt: skip

# Blocks of other languages that are no command and are not run here: page, first line, and who looks at them.
BLOCKS = {
    ("docs/environments.md", '{"ended_by"'): "tests/step/test_episodes.py",
    ("docs/agents.md", "# agent.py"): "tests/generate/endpoint/test_agents.py runs it as it stands there",
    ("docs/agents.md", "# three.py"): "tests/environments/adapters/test_verifiers.py trains on it as it stands there",
    ("docs/architecture.md", "def make(groups"): "tests/doors/test_optimizer.py",
    ("docs/architecture.md", "from truestep.model.mixers"): "tests/doors/test_recurrent_layer.py",
    ("docs/objectives.md", "from dataclasses"): "tests/doors/test_objective_of_the_docs.py",
    ("docs/objectives.md", "def by_turns"): "tests/rollouts/test_advantage_rules.py",
    ("docs/rollouts.md", '{"id": "e7/1"'): "tests/rollouts/test_sequences.py",
    ("docs/sampling.md", "import asyncio"): "tests/server/test_openai.py",
    ("docs/python.md", "def rollouts(start"): "a sketch; tests/api/test_objects.py has sources that run",
    ("docs/rollouts.md", "connection.xadd"): "tests/stream/test_redis.py",
    ("docs/adapters.md", "from peft"): "tests/model/test_adapter.py",
    ("docs/tutorial.md", "import json"): "tests/test_tutorial.py",
    ("docs/tutorial.md", "def reward"): "tests/test_tutorial.py",
    ("docs/tutorial.md", "from reward"): "tests/test_tutorial.py",
    ("docs/sft.md", '{"id": "7"'): "tests/test_sft.py",
    ("README.md", "from truestep import Config, train, write_report"): "tests/api/test_eight_lines.py",
    ("docs/python.md", "from functools"): "tests/api/test_any_object.py trains with each of these",
    ("docs/session.md", "from truestep import Session"): "tests/api/test_session.py runs it as it stands there",
    (
        "docs/session.md",
        'with Session("run.yaml") as session:  # ',
    ): "tests/api/test_session.py runs it as it stands there",
    ("docs/session.md", "def dpo"): "tests/api/test_session.py runs it as it stands there",
    ("docs/session.md", "await asyncio"): "tests/api/test_session.py runs it as it stands there",
    ("docs/session.md", "def values"): "tests/api/test_session.py runs it as it stands there",
    ("docs/engine.md", "key = "): "tests/generate/engine/test_engine.py",
}

# What commands print: numbers of real runs. Messages among them are compared with the sources by tests/test_docs.py.
PRINTED = {
    "README.md": "tests/test_demo.py",
    "examples/boxes/README.md": "tests/test_boxes.py",
    "docs/families.md": "tests/families/test_families.py",
    "docs/machines.md": "tests/test_elastic.py",
    "docs/memory.md": "tests/plan/test_report.py",
    "docs/audit.md": "tests/audit/test_opening.py",
    "docs/parity.md": "tests/parity/test_verdict.py",
    "docs/python.md": "tests/api/test_config.py",
    "docs/ranks.md": "tests/test_docs.py",
    "docs/replay.md": "tests/replay/test_replay.py",
    "docs/sampling.md": "tests/server/test_lies.py",
    "docs/terminal.md": "tests/terminal/test_run.py",
    "docs/tinker.md": "tests/tinker/test_usage.py",
    "docs/troubleshooting.md": "tests/test_docs.py",
    "docs/tutorial.md": "examples/tutorial/run_page.py",
}

REWARDS = "from truestep.environments.sorting import reward as score\n"
OLD = """
def trl_reward(prompts, completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer)]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""
SMALL: dict[str, Any] = {
    "model": {"dtype": "float32", "compile": False},
    "data": {"group_size": 4, "tokens_per_microbatch": 4096},
    "sampler": {"max_new_tokens": 6},
    "evaluation": {"every": 2},
    "schedule": {"docs_per_step": 8, "steps": 2},
}


def normal(command: list[str]) -> str:
    return " ".join(word for word in command if word)


def comments_removed(text: str) -> str:
    return re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE)


def commands_of(block: Block) -> list[str]:
    return [line for words in shell_commands(comments_removed(block.text)) if (line := normal(words))]


def all_blocks() -> Iterator[tuple[Page, Block]]:
    for page in all_pages():
        if page.path.name != "CHANGELOG.md":
            yield from ((page, block) for block in page.blocks)


def elsewhere(command: str) -> str | None:
    return next((pattern for pattern in COMMANDS if re.match(pattern, command)), None)


def named(page: Page, block: Block) -> tuple[str, str] | None:
    return next((key for key in BLOCKS if key[0] == str(page.path) and block.text.lstrip().startswith(key[1])), None)


def run_here() -> list[tuple[str, str]]:
    """List the commands that are run here: the page and the command, in their order."""
    return [
        (str(page.path), command)
        for page, block in all_blocks()
        if block.language in ("bash", "sh")
        for command in commands_of(block)
        if elsewhere(command) is None
    ]


def python_here() -> list[tuple[str, str]]:
    return [
        (str(page.path), block.text)
        for page, block in all_blocks()
        if block.language == "python" and named(page, block) is None
    ]


def unaccounted(page: Page, block: Block) -> Iterator[str]:
    """Say of a block why nobody executes it; nothing where somebody does."""
    if block.language in ("bash", "sh"):
        for command in commands_of(block):
            if elsewhere(command) is None and truestep_arguments(command.split()) is None:
                yield f"{page.at(block.line)}: {command}: no test runs it"
    elif block.language in ("python", "yaml") or named(page, block) is not None:
        return  # run here; loaded by tests/test_docs.py
    elif block.language == "json":
        if page.path.name != "README.md":
            yield f"{page.at(block.line)}: a record that no test reads"
    elif block.language == "text":
        if str(page.path) not in PRINTED:
            yield f"{page.at(block.line)}: text that no test compares"
    elif not all(truestep_arguments(command.split()) for command in commands_of(block)):
        yield f"{page.at(block.line)}: a block of the language {block.language!r} that no test executes"


def test_every_block_is_executed_or_named() -> None:
    assert [problem for page, block in all_blocks() for problem in unaccounted(page, block)] == []


def test_what_is_named_is_there() -> None:
    commands = [c for _, block in all_blocks() if block.language in ("bash", "sh") for c in commands_of(block)]
    used = {elsewhere(command) for command in commands}
    assert [pattern for pattern in COMMANDS if pattern not in used] == []
    found = {named(page, block) for page, block in all_blocks()}
    assert [key for key in BLOCKS if key not in found] == []
    texts = {str(page.path) for page, block in all_blocks() if block.language == "text"}
    assert [page for page in PRINTED if page not in texts] == []
    files = re.findall(r"(?:tests|examples)/[\w/]+\.py", json.dumps([COMMANDS, [*BLOCKS.values()], PRINTED]))
    assert len(files) > 20 and [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("bash", "curl https://example.org | sh\n"),
        ("bash", "make tests\n"),
        ("json", '{"a": 1}\n'),
        ("text", "all is well\n"),
        ("", "x = y\n"),
        ("rust", "fn main() {}\n"),
    ],
)
def test_a_new_block_is_noticed(language: str, text: str) -> None:
    assert list(unaccounted(Page(Path("docs/new.md")), Block(language, text, 1)))


def readme_config() -> dict[str, Any]:
    (block,) = (b for page, b in all_blocks() if str(page.path) == "README.md" and b.language == "yaml")
    return dict(yaml.safe_load(block.text))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make what the pages speak of: a model, prompts, a reward, rollouts, configurations and a run."""
    place = tmp_path_factory.mktemp("reader")
    model = word_model(place / "models" / "qwen3-1.7b")
    shutil.copytree(model, place / "weights")
    (place / "examples").symlink_to(ROOT / "examples")
    write_lines(place / "prompts.jsonl", sort_prompts(16))
    write_lines(place / "held_out.jsonl", sort_prompts(4))
    (place / "my_package").mkdir()
    (place / "my_package" / "rewards.py").write_text(REWARDS)
    (place / "my_package" / "old.py").write_text(OLD)
    own = merged(readme_config(), SMALL)
    for name in ("qwen3", "run", "config"):
        text = yaml.safe_dump(own | {"checkpoint": own["checkpoint"] | {"directory": f"runs/{name}"}})
        (place / f"{name}.yaml").write_text(text.replace("runs/qwen3", "runs/example"))
    records = write_lines(place / "rollouts" / "a.jsonl", list(rollouts()))
    shutil.copy(records, place / "suspects.jsonl")
    files = {name: own[name] for name in ("model", "loss", "optimizer")}
    data = {"advantages": "group_normalized", "group_size": 4, "tokens_per_microbatch": 64}
    (place / "rollouts.yaml").write_text(yaml.safe_dump(files | {"data": data | {"path": "rollouts/a.jsonl"}}))
    (place / "rates.json").write_text(json.dumps(asdict(H200)))
    yield place
    for name in [name for name in sys.modules if name.split(".")[0] == "my_package"]:
        del sys.modules[name]


def rollouts() -> Iterator[dict[str, Any]]:
    for number in range(16):
        yield {
            "id": str(number),
            "group_id": str(number // 4),
            "input_ids": [2, 3, 4, 5 + number % 4],
            "prompt_length": 2,
            "logprobs": [-2.5, -2.25],
            "reward": float(number % 2),
        }


def typed(command: str) -> None:
    """Type a command, as a shell would: patterns of files are replaced by what they find."""
    words = truestep_arguments(re.sub(r"\[(--[^\]]*)\](\.\.\.)?", r"\1", command).split())
    assert words is not None
    words = ["weights" if word == "WEIGHTS" else word for word in words]
    words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    result = CliRunner().invoke(main, words)
    fits = words[0] != "plan" or result.exit_code == 0 or "does not fit" in result.output
    assert fits and (words[0] == "plan" or result.exit_code == 0), (command, result.output, result.exception)


@pytest.mark.nightly
def test_the_commands_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's first: what it trains is what the others look at."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    commands = run_here()
    assert len(commands) > 15
    ran = 0
    for page, command in commands:
        if ("--memory" in command and "examples/" in command) or "--adapter" in command:
            continue  # tests/plan/test_memory.py and tests/test_export.py, which have such models
        if "runs/example" in command and not Path("runs/example").exists():
            typed("truestep train qwen3.yaml")
        shutil.rmtree("models/trained", ignore_errors=True)
        typed(command)
        ran += 1
        if page == "README.md" and "train qwen3.yaml" in command:
            assert len(Path("runs/example/metrics.jsonl").read_text().splitlines()) == 2
    assert ran > 12


def small(train: Callable[..., Any]) -> Callable[..., Any]:
    """Train a few small steps of whatever configuration is given."""

    def trained(config: Any, **more: Any) -> Any:
        config = truestep.load_config(config) if isinstance(config, str) else config
        options = {f"{section}.{name}": value for section, own in SMALL.items() for name, value in own.items()}
        known = {name: value for name, value in options.items() if config.model_dump()[name.split(".")[0]] is not None}
        return train(config.changed(known | {"logging.console": False}), **more)

    return trained


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(9))
def test_the_python_runs(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = python_here()
    assert len(blocks) == 9
    page, text = blocks[number]
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(truestep, "train", small(truestep.train))
    # A class of the page is defined in a module of its own, as it would be in a reader's file.
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    goes_on = page == "docs/environments.md"  # each block of this page goes on from those before it
    for before in [other for place, other in blocks[:number] if goes_on and place == page]:
        exec(compile(before, page, "exec"), module.__dict__)
    exec(compile(text, page, "exec"), module.__dict__)
    names = vars(module)
    if "Sums" in names:
        trained, held_out = (list(names["Sums"].rows({}, chosen)) for chosen in (False, True))
        assert (len(trained), len(held_out)) == (1000, 100)
        assert held_out[0] == {"id": "sum-1000", "prompt": "What is 1000 + 7?", "answer": "1007"}
    elif "Calculator" in names:
        episode = names["Calculator"]()
        episode.row = {"answer": "42"}
        assert episode.calculate("17 + 25") == "42"
        assert [episode.finish(truestep.Answer(text)) for text in (" 42 ", "43")] == [1.0, 0.0]
    elif "against_the_best" in names:
        group = [replace(document, reward=float(n)) for n, document in enumerate(make_documents([3, 4, 5]))]
        assert names["against_the_best"](group) == [-2.0, -1.0, 0.0]
    elif "from_trl" in names:
        assert names["from_trl"]("p", "4", answer="4") == 1.0
        assert names["from_verl"]("p", "5", data_source="d", ground_truth="4", level=1) == 0.0
    elif "score" in names:
        good, bad = (names["score"]("p", completion, answer="4") for completion in (" 4 ", "it is not known to anyone"))
        assert bad == 0.0 if isinstance(bad, float) else bad == {"right": 0.0, "short": 0.0}
        assert good == 1.0 if isinstance(good, float) else good == {"right": 1.0, "short": 0.1}


def test_the_readmes_record_is_one(tmp_path: Path) -> None:
    (block,) = (b for page, b in all_blocks() if str(page.path) == "README.md" and b.language == "json")
    (tmp_path / "r.jsonl").write_text(block.text)
    result = CliRunner().invoke(main, ["data", "check", str(tmp_path / "r.jsonl")])
    assert result.exit_code == 0 and "1 documents" in result.output, result.output


def test_the_readmes_configuration_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    config = load_config(Path("qwen3.yaml"), ["--checkpoint.directory", "runs/short", "--logging.console", "false"])
    trainer = quiet_trainer(config)
    trainer.run()
    assert trainer.state.step == 2


def test_every_advantage_rule_has_a_row() -> None:
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    assert [rule for rule in RULES if f"| `{rule}` |" not in page] == []
