"""The loss and the advantages that docs/objectives.md shows, copied into an empty directory as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from small_runs import merged, quiet_trainer, read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.config.schema import Config
from truestep.losses.labels import Labels
from truestep.tools.demo import run as demo
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

PAGE = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## Your own loss, your own advantages")[1].split("\n## ")[0]


def block(language: str) -> str:
    """The first block of a language: the second one in Python is tests/rollouts/own_advantages.py's."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", SECTION, flags=re.DOTALL)
    return found[0]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "my_objective.py").write_text(block("python"), encoding="utf-8")
    prompts = write_lines(tmp_path / "prompts.jsonl", sort_prompts(8))
    base = sampled_config(word_model(tmp_path / "model"), prompts, tmp_path / "run").model_dump()
    yield Config.model_validate(merged(base | {"loss": {}}, yaml.safe_load(block("yaml"))))
    sys.modules.pop("my_objective", None)


def test_the_example_is_the_same() -> None:
    example = (Path(__file__).parents[2] / "examples" / "my_objective.py").read_text(encoding="utf-8")
    assert example.partition("\n\n")[2] == block("python")


def test_it_trains(config: Config) -> None:
    trainer = quiet_trainer(config)
    trainer.run()
    lines = read_lines(Path(config.checkpoint.directory or "") / "metrics.jsonl")
    assert len(lines) == 3 and any(line["grad_norm"] > 0 for line in lines)


def test_it_passes_verify(config: Config) -> None:
    names = ("head: 7 rows a chunk", "FSDP 2")
    verdicts = verify(config, Path("out"), most_ranks=2, only=lambda layout: layout.name in names)
    assert len(verdicts) == 2 and all(v.passed for v in verdicts), [list(complaints(v)) for v in verdicts]


@pytest.mark.release
def test_it_learns_the_task_of_the_demo_from_outside_the_repository(tmp_path: Path) -> None:
    """A directory with a package, configurations and data, and commands as a user types them. The run ends as the demo
    does, which differs in the loss alone; what `verify` says of it is above, and of the same loss in test_verify."""
    base = demo.make_model(tmp_path / "base", demo.sorting.WORDS, 0)
    demo._write_task(tmp_path, base, 0)
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "__init__.py").touch()
    (tmp_path / "their_package" / "objective.py").write_text(block("python"), encoding="utf-8")
    first, second = demo.PHASES
    own = yaml.safe_load(block("yaml").replace("my_objective:", "their_package.objective:"))
    options = yaml.safe_load(second.read_text(encoding="utf-8")) | {"loss": own["loss"]}
    assert options["loss"]["function"] == "their_package.objective:Tanh"
    (tmp_path / "1-warm-up.yaml").write_text(first.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "2-own.yaml").write_text(yaml.safe_dump(options), encoding="utf-8")

    def typed(*arguments: str) -> None:
        command = [sys.executable, "-m", "truestep", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    typed("train", "1-warm-up.yaml", "--model.path", "base", "--checkpoint.directory", "warm")
    typed("export", "warm", "--output", "model", "--dtype", "float32")
    typed("train", "2-own.yaml", "--checkpoint.directory", "run")
    evaluations = read_lines(tmp_path / "run" / "evaluation.jsonl")
    assert evaluations[0]["sampled_reward"] < 0.5 and evaluations[-1]["sampled_reward"] >= 0.9


def test_what_it_says_of_labels_is_there() -> None:
    rows = [line.split("|")[1] for line in SECTION.splitlines() if line.startswith("| `")][1:]
    names = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    fields = set(Labels.__dataclass_fields__) | set(dir(Labels))
    assert len(names) > 12 and names <= fields, names - fields
