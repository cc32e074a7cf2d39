"""Several sets of held-out prompts in a run, and the best checkpoint, which is kept beside the newest ones."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from small_runs import quiet_trainer, read_lines, sampled_config, sort_prompts, word_model, write_lines
from truestep.commands.cli import main
from truestep.commands.running import train
from truestep.config.load import ConfigError, config_of
from truestep.config.schema import Config, evaluation_metrics
from truestep.metrics.best import Best
from truestep.report import write_report
from truestep.report.figures import best_tile
from truestep.report.runs import read_run
from truestep.run.trainer import TrainingError
from truestep.tools.export import ExportError, export

SETS = {
    "digits": {"prompts": "held_out.jsonl", "pass_reward": 0.5},
    "lengths": {"prompts": "held_out.jsonl", "reward": "plain_rewards:one_reward", "samples_per_prompt": 1},
    "episodes": {"environment": {"class": "turn_environments:Own", "options": {"count": 12}}},
    "fewer": {"environment": {"class": "turn_environments:Own", "options": {"count": 8}}, "max_prompts": 2},
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("sets") / "model")


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "held_out.jsonl", sort_prompts(4))
    return write_lines(tmp_path / "prompts.jsonl", sort_prompts(6))


def test_each_set_has_its_own_reward_or_environment(words: Path, prompts: Path, tmp_path: Path) -> None:
    evaluation = {"sets": SETS, "every": 2, "samples_per_prompt": 2}
    config = sampled_config(
        words,
        prompts,
        tmp_path / "run",
        evaluation=evaluation,
        schedule={"steps": 2},
        data={"tokens_per_microbatch": 64},
    )
    shown = io.StringIO()
    console = {"logging": config.logging.model_copy(update={"console": True})}
    train(config.model_copy(update=console), console=Console(file=shown, width=200))
    lines = read_lines(tmp_path / "run" / "evaluation.jsonl")
    assert [line["step"] for line in lines] == [0, 2]
    for line in lines:
        # Own makes 12 or 8 prompts, and as held-out ones their last two and three more.
        assert {name: line[f"{name}/num_prompts"] for name in SETS} == dict(zip(SETS, (4, 4, 5, 2), strict=True))
        assert line["num_prompts"] == 15 and line["num_unrated"] == 0
        assert line["lengths/greedy_reward"] == line["lengths/sampled_reward"] == 1.0
        assert line["lengths/sampled_reward_ci"] is None and "lengths/pass@1" not in line
        assert 0 <= line["digits/pass@1"] <= line["digits/pass@2"] <= 1
        means = [line[f"{name}/sampled_reward"] for name in SETS]
        assert line["sampled_reward"] == pytest.approx(sum(means) / 4)
    logged = [f"evaluation/{name}" for name in lines[-1]]
    assert set(evaluation_metrics(config)) <= set(logged)
    assert {"evaluation/digits/pass@2", "evaluation/episodes/sampled_reward"} <= set(evaluation_metrics(config))
    said = shown.getvalue().partition("held-out after step 2")[2].splitlines()
    assert said[0].endswith("over 15 prompts")
    of_sets = {name.strip(): text for name, _, text in (line.partition(":") for line in said[1 : 1 + len(SETS)])}
    assert list(of_sets) == list(SETS) and all(text.strip().startswith("greedy ") for text in of_sets.values())
    assert "pass@2 " in of_sets["digits"]
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Held-out sets, sampled" in page and "Prompt of digits" in page


def test_rewards_of_sets_may_be_objects_of_python(words: Path, prompts: Path, tmp_path: Path) -> None:
    worth = 0.25
    base = sampled_config(words, prompts, tmp_path / "run", schedule={"steps": 1}).model_dump(exclude_unset=True)
    sets = {"a": {"prompts": "held_out.jsonl", "reward": lambda prompt, completion, **_: worth}}
    result = train(config_of({**base, "evaluation": {"sets": sets}}), isolated=False)
    assert [line["a/sampled_reward"] for line in result.evaluations()] == [0.25, 0.25]


class Scripted:
    """An evaluation with given results by step."""

    def __init__(self, metric: str, values: dict[int, float | None]):
        self.metric, self.values = metric, values

    def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> dict[str, Any]:
        return {"step": step, "documents_seen": documents_seen, self.metric: self.values[step], "num_labels": 1}

    def close(self) -> None: ...


def kept(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (directory / "checkpoints").glob("step-*"))


def best_config(words: Path, prompts: Path, directory: Path, steps: int, **checkpoint: Any) -> Config:
    return sampled_config(
        words,
        prompts,
        directory,
        schedule={"steps": steps},
        evaluation={"prompts": "held_out.jsonl", "every": 1},
        checkpoint={"every": 3, "keep": 1, "keep_best": "evaluation/greedy_reward", **checkpoint},
    )


VALUES = {0: 9.0, 1: 0.1, 2: 0.5, 3: None, 4: 0.5, 5: 0.2, 6: 0.4, 7: 0.6, 8: 0.3, 9: 0.1}


def run(config: Config, values: dict[int, float | None] | None = None, metric: str = "greedy_reward") -> None:
    trainer = quiet_trainer(config)
    trainer.evaluator = Scripted(metric, values or VALUES)
    trainer.run()


def test_the_best_checkpoint_stays_beside_the_newest_and_over_resumes(
    words: Path, prompts: Path, tmp_path: Path
) -> None:
    """Step 0 is no checkpoint, of equal ones the first stays, and a step that is not due is saved as it is better."""
    directory = tmp_path / "run"
    run(best_config(words, prompts, directory, 6))
    assert kept(directory) == [2, 6]
    run(best_config(words, prompts, directory, 7))
    assert kept(directory) == [7]
    run(best_config(words, prompts, directory, 9))
    assert kept(directory) == [7, 9]
    tile = best_tile(read_run(directory))
    assert tile.value == "step 7"
    assert tile.detail == "evaluation/greedy_reward 0.600; the evaluation of the first weights was better: 9"
    assert export(directory, tmp_path / "best", "float32", best=True).name == "step-00000007"
    assert export(directory, tmp_path / "newest", "float32").name == "step-00000009"


def test_a_crash_keeps_the_best_of_what_it_goes_on_from(words: Path, prompts: Path, tmp_path: Path) -> None:
    """Evaluations after the checkpoint are rolled back with it: here the second try is worse at step 5, not better."""
    directory = tmp_path / "run"
    config = best_config(words, prompts, directory, 6)

    class Crash(Scripted):
        def run(self, step: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> dict[str, Any]:
            if step == 5:
                raise RuntimeError("power cut")
            return super().run(step, documents_seen, asked_to_stop)

    trainer = quiet_trainer(config)
    trainer.evaluator = Crash("greedy_reward", VALUES | {4: 0.4})
    with pytest.raises(RuntimeError):
        trainer.run()
    shutil.rmtree(directory / "checkpoints" / "step-00000003")  # keep: 1 had left it beside step 2
    assert kept(directory) == [2]
    run(config, VALUES | {3: 0.1, 4: 0.3, 6: 0.2})
    assert kept(directory) == [2, 6]


def paths_of(*steps: int) -> list[Path]:
    return [Path(f"step-{step:08d}") for step in steps]


def test_a_loss_is_best_where_it_is_least() -> None:
    lines = [{"step": step, "loss": loss} for step, loss in enumerate((0.1, 3.0, 2.0, 2.5))]
    best = Best("evaluation/loss", lines)
    assert [best.is_best(step, paths_of(*range(1, step))) for step in (1, 2, 3)] == [True, True, False]
    paths = paths_of(1, 3)
    assert best.checkpoint(paths) == paths[1] and best.checkpoint(paths_of(9)) is None
    assert Best().checkpoint(paths) is None and not Best().is_best(1, [])


def test_the_best_is_compared_with_checkpoints_that_exist() -> None:
    """Also if keep_best was added on a resume, or a checkpoint was removed."""
    best = Best("evaluation/loss", [{"step": step, "loss": loss} for step, loss in ((0, 4.0), (2, 1.0), (4, 2.0))])
    assert best.is_best(4, []) and not best.is_best(4, paths_of(2))
    assert best.better_than(paths_of(4)[0]) == "the evaluation after step 2, which has no checkpoint, was better: 1"
    assert best.better_than(paths_of(2)[0]) is None
    first = Best("evaluation/greedy_reward", [{"step": 0, "greedy_reward": 0.5}, {"step": 2, "greedy_reward": 0.25}])
    assert first.better_than(paths_of(2)[0]) == "the evaluation of the first weights was better: 0.5"


@pytest.mark.parametrize(
    "worse", [{"a/reward": math.nan}, {"a/reward": math.inf}, {"a/reward": 9.0, "a/num_unrated": 1, "num_unrated": 1}]
)
def test_no_number_and_no_partly_rated_evaluation_is_the_best(worse: dict[str, float]) -> None:
    unrated = {"a/num_unrated": 0, "num_unrated": 0}
    best = Best("evaluation/a/reward", [{"step": 1, **unrated, **worse}, {"step": 2, **unrated, "a/reward": 0.5}])
    assert best.checkpoint(paths_of(1, 2)) == paths_of(2)[0] and best.is_best(2, paths_of(1))
    other = {"step": 3, "a/reward": 0.7, "a/num_unrated": 0, "num_unrated": 1}  # of another set
    assert Best("evaluation/a/reward", [other]).is_best(3, [])


@pytest.mark.parametrize("metric", [None, "evaluation/greedy_reward"])
def test_a_copy_of_a_checkpoint_is_left_alone(metric: str | None, words: Path, prompts: Path, tmp_path: Path) -> None:
    config = best_config(words, prompts, tmp_path / "run", 2, every=1, keep_best=metric)
    run(config)
    copy = tmp_path / "run" / "checkpoints" / "step-00000002-backup"
    shutil.copytree(copy.with_name("step-00000002"), copy)
    run(best_config(words, prompts, tmp_path / "run", 3, every=1, keep_best=metric), VALUES | {3: 0.9})
    assert {path.name for path in copy.parent.iterdir()} == {"step-00000003", copy.name}


def test_a_run_does_not_go_on_by_itself_from_a_checkpoint_kept_as_the_best(
    words: Path, prompts: Path, tmp_path: Path
) -> None:
    config = best_config(words, prompts, tmp_path / "run", 6)
    run(config)
    assert kept(tmp_path / "run") == [2, 6]
    latest = tmp_path / "run" / "checkpoints" / "step-00000006"
    part = next((latest / "truestep").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(TrainingError, match="step-00000006 cannot be read.*goes on from .*step-00000002"):
        quiet_trainer(config)
    assert kept(tmp_path / "run") == [2, 6]


def test_a_run_without_a_best_checkpoint_says_why(words: Path, prompts: Path, tmp_path: Path) -> None:
    run(best_config(words, prompts, tmp_path / "run", 1, keep_best=None))
    with pytest.raises(ExportError, match="keeps no best checkpoint, since its checkpoint.keep_best is null"):
        export(tmp_path / "run", tmp_path / "out", "float32", best=True)
    with pytest.raises(ExportError, match="--best is for a run's directory"):
        export(tmp_path / "run" / "checkpoints" / "step-00000001", tmp_path / "out", "float32", best=True)


def test_a_metric_that_no_evaluation_has_is_refused(words: Path, prompts: Path, tmp_path: Path) -> None:
    options = best_config(words, prompts, tmp_path / "run", 1).model_dump(exclude_unset=True)
    options["checkpoint"]["keep_best"] = "evaluation/pass@1"
    with pytest.raises(ConfigError, match="is no metric of this run's evaluations"):
        config_of(options)
    options["evaluation"] |= {"pass_reward": 1.0}
    assert config_of(options).checkpoint.keep_best == "evaluation/pass@1"


def test_a_set_has_limits_of_turns_and_may_be_removed(words: Path, prompts: Path, tmp_path: Path) -> None:
    """The sampler's limits are for the environments of sets, where the sampler has a reward."""
    options = sampled_config(words, prompts, tmp_path / "run").model_dump(exclude_unset=True)
    options["sampler"]["max_turns"] = 2
    options["evaluation"] = {"sets": {"games": SETS["episodes"], "gone": None}}
    evaluation = config_of(options).evaluation
    assert evaluation is not None and list(evaluation.sets or ()) == ["games"]
    options["evaluation"] = {"sets": {"plain": {"prompts": "held_out.jsonl"}}}
    with pytest.raises(ConfigError, match="sampler.max_turns is for sampler.environment"):
        config_of(options)


def test_records_are_scored_whatever_evaluations_keep(words: Path, prompts: Path, tmp_path: Path) -> None:
    """Without an evaluation, keep_best names a metric that there is not."""
    config = tmp_path / "run.yaml"
    sections = {
        "model": {"path": str(words), "dtype": "float32", "device": "cpu"},
        "data": {"advantages": "none", "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 1},
        "sampler": {"prompts": str(prompts), "reward": "plain_rewards:digit_reward", "max_new_tokens": 4},
        "evaluation": {"prompts": str(prompts)},
        "checkpoint": {"directory": str(tmp_path / "run"), "keep_best": "evaluation/sampled_reward"},
    }
    config.write_text(json.dumps(sections))
    record = {"id": "a", "input_ids": [2, 3, 4], "prompt_length": 1, "logprobs": [-1.0, -1.0], "advantage": 1.0}
    records = write_lines(tmp_path / "records.jsonl", [record])
    done = CliRunner().invoke(
        main, ["score", str(config), "--data.path", str(records), "--output", str(tmp_path / "o")]
    )
    assert done.exit_code == 0, done.output
