"""The training loop through `make_trainer`: what it logs, what it survives, and where it goes on."""

from __future__ import annotations

import dataclasses
import gc
import io
import math
import os
import signal
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from checkpoints import read_weights
from small_runs import (
    change_plans,
    file_config,
    file_hashes,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    tell,
    without_times,
    word_model,
    write_lines,
    write_rollouts,
)
from tiny import label_positions
from truestep.config.schema import Config
from truestep.metrics.sinks import Sink
from truestep.metrics.spent import of_the_machine
from truestep.ranks.place import find_place
from truestep.rollouts.source import Interrupted
from truestep.run.checkpoint.saves import SaveRule
from truestep.run.train import train
from truestep.run.trainer import Trainer, TrainingError
from truestep.types import StepPlan

ALWAYS = {
    "num_put_aside",
    "num_rejected",
    *("loss", "new_logprobs", "grad_norm", "learning_rate", "num_documents", "documents_seen", "num_tokens"),
    "num_sequences",
    *("num_labels", "num_micro_batches", "computed_tokens", "recomputed_prefix_tokens"),
    *("tokens_per_second", "data_wait_time", "step_time"),
    *(f"time/{part}" for part in ("waiting", "forward", "head", "backward", "reduce", "optimizer", "sync", "other")),
}
BASIC = {
    *("old_logprobs", "ratio_new_old", "ratio_new_old_sum", "ratio_new_old_squared_sum", "kl_new_old"),
    *("clipped_ratio_fraction", "clipped_ratio_fraction_low", "clipped_ratio_fraction_high"),
    *("clipped_fraction", "clamped_ratios"),
    *("advantage", "max_advantage", "min_advantage", "zero_advantage_fraction", "reward", "max_reward", "min_reward"),
    *("staleness", "max_staleness", "min_staleness", "effective_sample_size", "effective_sample_share", "entropy"),
    "logprob_advantage_covariance",
    *("response_length", "max_response_length", "min_response_length", "reward_std"),
    *("response_length_rewarded", "response_length_unrewarded"),
}
FULL = {f"log_ratio_p{percentile}" for percentile in (1, 5, 50, 95, 99)}

Model = Callable[[str], Path]


@dataclass
class DoAt(Sink):
    """Does something once a step's line is logged."""

    step_number: int
    action: Callable[[], object]

    def step(self, line: Mapping[str, Any]) -> None:
        if line["step"] == self.step_number:
            self.action()

    def evaluation(self, line: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def send(kind: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), kind)


def run(config: Config, *extra: Sink) -> str:
    trainer = quiet_trainer(config)
    trainer.sinks.extend(extra)
    return trainer.run()


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("trainer") / "model")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "prompts.jsonl", sort_prompts(6))


def test_metrics_and_ledger_say_what_is_in_the_files(tiny_model: Model, tmp_path: Path) -> None:
    records = write_rollouts(tmp_path / "r.jsonl", 17)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run")
    assert run(config) == "the data ended after step 4"
    metrics, ledger = read_lines(tmp_path / "run/metrics.jsonl"), read_lines(tmp_path / "run/ledger.jsonl")
    by_id = {record["id"]: record for record in records}
    assert [name for line in ledger for name in line["documents"]] == list(by_id)
    assert [line["num_documents"] for line in ledger] == [5, 5, 5, 2]
    for number, (line, entry) in enumerate(zip(metrics, ledger, strict=True), start=1):
        assert set(line) == {"step"} | ALWAYS | BASIC
        documents = [by_id[name] for name in entry["documents"]]
        assert line["step"] == entry["step"] == number
        assert line["num_documents"] == entry["num_documents"] == len(documents)
        assert line["num_labels"] == entry["num_labels"] == sum(len(label_positions(one)) for one in documents)
        assert line["documents_seen"] == entry["documents_seen"] == sum(one["num_documents"] for one in ledger[:number])
        tokens = sum(len(one["input_ids"]) for one in documents)
        assert line["num_tokens"] == tokens
        assert line["num_micro_batches"] >= math.ceil(tokens / 40)
        assert line["step_time"] >= line["data_wait_time"] >= 0
        assert line["tokens_per_second"] == pytest.approx(tokens / line["step_time"])
        assert sum(value for name, value in line.items() if name.startswith("time/")) == pytest.approx(
            line["step_time"]
        )
        assert min(line[f"time/{name}"] for name in ("forward", "head", "backward", "optimizer")) > 0
        lengths = [len(label_positions(one)) for one in documents]
        assert (line["response_length"], line["max_response_length"]) == (sum(lengths) / len(lengths), max(lengths))
        assert line["learning_rate"] == 1e-2
        rewards = [one["reward"] for one in documents if "reward" in one]
        assert line["max_reward"] == pytest.approx(max(rewards))
        assert all(type(line[name]) is int for name in ("num_documents", "num_labels", "num_tokens", "documents_seen"))


@pytest.mark.parametrize(("level", "expected"), [("none", set()), ("basic", BASIC), ("full", BASIC | FULL)])
def test_the_metrics_level_decides_what_is_logged(
    level: str, expected: set[str], tiny_model: Model, tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 5)
    run(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", loss={"metrics": level}))
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert set(line) == {"step"} | ALWAYS | expected


def test_metrics_without_their_inputs_are_absent(tiny_model: Model, tmp_path: Path) -> None:
    write_lines(
        tmp_path / "r.jsonl", [{"input_ids": [2, 3, 4], "loss_mask": [0, 1, 1]}, {"input_ids": [5], "prompt_length": 1}]
    )
    run(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", loss={"type": "cross_entropy"}))
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert set(line) >= ALWAYS
    assert not {"reward", "staleness", "ratio_new_old", "advantage", "max_reward"} & set(line)


def first_change(model: Path, run_directory: Path, rollouts: Path, clip: float | None) -> tuple[torch.Tensor, float]:
    """Of all weights by one step; with an epsilon this large AdamW's update is proportional to the gradient."""
    config = file_config(
        model,
        rollouts,
        run_directory,
        optimizer={"epsilon": 1e4, "learning_rate": 1e4, "gradient_clip": clip},
        schedule={"steps": 1},
    )
    run(config)
    before = load_file(model / "model.safetensors")
    after = read_weights(run_directory / "checkpoints/step-00000001")
    change = torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)])
    return change, read_lines(run_directory / "metrics.jsonl")[0]["grad_norm"]


def test_gradient_clip_scales_the_gradient_and_not_what_is_logged(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 8)
    free, norm = first_change(tiny_model("llama"), tmp_path / "free", tmp_path / "r.jsonl", None)
    assert free.norm() == pytest.approx(norm, rel=1e-2)
    clipped, logged = first_change(tiny_model("llama"), tmp_path / "clipped", tmp_path / "r.jsonl", norm / 10)
    assert logged == norm
    assert clipped.norm() == pytest.approx(norm / 10, rel=1e-2)
    loose, _ = first_change(tiny_model("llama"), tmp_path / "loose", tmp_path / "r.jsonl", norm * 10)
    assert torch.equal(loose, free)


def test_nan_ends_the_run_with_the_steps_number_and_updates_nothing(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)
    directory = tmp_path / "run"
    trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", directory, checkpoint={"every": 1}))
    _, master = next(iter(trainer.policy.weights.master.items()))
    seen: dict[str, torch.Tensor] = {}

    def poison(plan: StepPlan) -> StepPlan:
        if trainer.step == 2:
            trainer._finish_save()
            with torch.no_grad():
                master.fill_(math.nan)
            seen.update({name: weight.detach().clone() for name, weight in trainer.policy.weights.master.items()})
        return plan

    change_plans(trainer, poison)
    with pytest.raises(TrainingError, match=r"^step 3: the gradient's norm is nan") as caught:
        trainer.run()
    assert str(directory / "checkpoints/step-00000002") in str(caught.value)
    assert len(read_lines(directory / "metrics.jsonl")) == len(read_lines(directory / "ledger.jsonl")) == 2
    for name, weight in trainer.policy.weights.master.items():
        assert torch.equal(torch.nan_to_num(weight, nan=7.0), torch.nan_to_num(seen[name], nan=7.0))
    assert not (directory / "checkpoints/step-00000003").exists()


def test_a_gradient_that_is_not_finite_names_the_documents_that_made_it(tiny_model: Model, tmp_path: Path) -> None:
    """Two advantages near the largest float32 among ordinary ones."""
    lines = write_rollouts(tmp_path / "r.jsonl", 20)
    for number in (0, 1):
        lines[number]["advantage"] = 3e38
    write_lines(tmp_path / "r.jsonl", lines)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", loss={"type": "reinforce"})
    trainer = quiet_trainer(config)
    before = {name: weight.detach().clone() for name, weight in trainer.policy.weights.master.items()}
    named = rf"each of these documents alone causes it: {lines[0]['id']}, {lines[1]['id']}\. Nothing was updated"
    with pytest.raises(TrainingError, match=named):
        trainer.run()
    assert all(torch.equal(before[name], weight) for name, weight in trainer.policy.weights.master.items())


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_in_hand(kind: signal.Signals, tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    whole = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "whole")
    run(whole)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run")
    trainer = quiet_trainer(config)
    passes = iter(range(100))
    # In the midst of the second step, which has several passes.
    micro_batches = read_lines(tmp_path / "whole/metrics.jsonl")[0]["num_micro_batches"]
    trainer.policy.model.base_model.register_forward_hook(
        lambda *_: send(kind)() if next(passes) == micro_batches else None
    )
    ended = trainer.run()
    how = {signal.SIGTERM: "a signal (SIGTERM)", signal.SIGINT: "Ctrl-C (SIGINT)"}[kind]
    assert ended == f"stopped by {how} after step 2; the same command goes on from here"
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 2
    assert (tmp_path / "run/checkpoints/step-00000002").is_dir()
    assert run(config) == "the data ended after step 4"
    for name in ("metrics.jsonl", "ledger.jsonl"):
        together = without_times(read_lines(tmp_path / "run" / name))
        assert together == without_times(read_lines(tmp_path / "whole" / name)), "bit for bit the uninterrupted run"
    last = "checkpoints/step-00000004/truestep/part-00000.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def left(run: Path) -> dict[str, str]:
    """All files but the lock, which names the process that had it last."""
    return {name: content for name, content in file_hashes(run).items() if name != ".lock"}


def test_a_finished_run_is_left_as_it_is(words: Path, prompts: Path, tmp_path: Path) -> None:
    config = sampled_config(words, prompts, tmp_path / "run", evaluation={"prompts": str(prompts), "every": 2})
    assert run(config) == "all 3 steps are done"
    before = left(tmp_path / "run")
    assert run(config) == "all 3 steps are done"
    assert left(tmp_path / "run") == before


def test_a_finished_run_of_files_is_left_as_it_is(tiny_model: Model, tmp_path: Path) -> None:
    records = write_rollouts(tmp_path / "r.jsonl", 7)
    write_lines(tmp_path / "r.jsonl", [*records, {"id": "bad"}])
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run")
    assert run(config) == "the data ended after step 2"
    before = left(tmp_path / "run")
    assert len(read_lines(tmp_path / "run/rejected.jsonl")) == 1
    assert run(config) == "the data ended after step 2"
    assert left(tmp_path / "run") == before


def evaluations(directory: Path) -> list[dict[str, Any]]:
    return without_times(read_lines(directory / "evaluation.jsonl"))


def evaluated_config(words: Path, prompts: Path, directory: Path, **sections: Any) -> Config:
    evaluation = {"prompts": str(prompts), "every": 2, "max_prompts": 2}
    return sampled_config(words, prompts, directory, evaluation=evaluation, **({"schedule": {"steps": 5}} | sections))


def test_evaluations_are_at_the_start_every_so_many_steps_and_at_the_end(
    words: Path, prompts: Path, tmp_path: Path
) -> None:
    run(evaluated_config(words, prompts, tmp_path / "whole"))
    lines = evaluations(tmp_path / "whole")
    assert [(line["step"], line["documents_seen"]) for line in lines] == [(0, 0), (2, 16), (4, 32), (5, 40)]
    assert all(line["num_prompts"] == 2 for line in lines)
    for stop in (1, 2):
        directory = tmp_path / f"stopped-{stop}"
        config = evaluated_config(words, prompts, directory)
        assert "signal (SIGTERM) after step" in run(config, DoAt(stop, send(signal.SIGTERM)))
        run(config)
        assert evaluations(directory) == lines
    run(evaluated_config(words, prompts, tmp_path / "even", schedule={"steps": 4}))
    assert [line["step"] for line in evaluations(tmp_path / "even")] == [0, 2, 4]


def test_a_run_that_is_stopped_in_its_last_evaluation_keeps_its_steps_and_makes_it_next(
    words: Path, prompts: Path, tmp_path: Path
) -> None:
    whole, config = (evaluated_config(words, prompts, tmp_path / name) for name in ("whole", "stopped"))
    quiet_trainer(whole).run()
    trainer = quiet_trainer(config)
    assert trainer.evaluator is not None
    run = trainer.evaluator.run

    def stopped(step: int, documents_seen: int, asked_to_stop: Callable[[], bool]) -> dict[str, Any]:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked_to_stop()
            raise Interrupted
        return run(step, documents_seen, asked_to_stop)

    object.__setattr__(trainer.evaluator, "run", stopped)
    assert trainer.run() == "stopped by Ctrl-C (SIGINT) after step 5; the same command goes on from here"
    assert not trainer.finished and trainer.stopped_by == signal.SIGINT
    assert trainer.checkpoints.latest() == tmp_path / "stopped/checkpoints/step-00000005"
    assert quiet_trainer(config).run() == "all 5 steps are done"
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "whole")


def test_a_crash_rolls_back_to_the_last_checkpoint(words: Path, prompts: Path, tmp_path: Path) -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    run(evaluated_config(words, prompts, tmp_path / "whole"))
    config = evaluated_config(words, prompts, tmp_path / "run", checkpoint={"every": 3})
    with pytest.raises(RuntimeError):
        run(config, DoAt(5, crash))
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 5
    assert run(config) == "all 5 steps are done"
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert without_times(read_lines(tmp_path / "run" / name)) == without_times(
            read_lines(tmp_path / "whole" / name)
        )


@pytest.mark.parametrize("reward", ["plain_rewards:digit_reward", "unsteady_reward:reward"])
def test_evaluation_changes_nothing_of_the_training(reward: str, words: Path, prompts: Path, tmp_path: Path) -> None:
    """Not even where the reward draws from the process's random state."""
    given = {"sampler": {"reward": reward}, "schedule": {"steps": 5}}
    run(sampled_config(words, prompts, tmp_path / "without", **given))
    run(evaluated_config(words, prompts, tmp_path / "with", **given))
    first, second = (without_times(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("without", "with"))
    assert first == second


def test_several_updates_on_one_batch(words: Path, prompts: Path, tmp_path: Path) -> None:
    config = sampled_config(words, prompts, tmp_path / "run", schedule={"updates_per_batch": 2, "steps": 4})
    run(config)
    metrics, ledger = read_lines(tmp_path / "run/metrics.jsonl"), read_lines(tmp_path / "run/ledger.jsonl")
    assert [line["documents_seen"] for line in metrics] == [8, 16, 24, 32]
    documents = [line["documents"] for line in ledger]
    assert documents[0] == documents[1] != documents[2] == documents[3]
    for fresh, again in ((metrics[0], metrics[1]), (metrics[2], metrics[3])):
        assert fresh["ratio_new_old"] == pytest.approx(1, abs=1e-5)
        assert abs(again["ratio_new_old_squared_sum"] / again["num_labels"] - 1) > 1e-3
        assert again["old_logprobs"] == fresh["old_logprobs"]
        assert (fresh["staleness"], again["staleness"]) == (0, 8)


def test_a_restart_between_two_updates_of_a_batch(words: Path, prompts: Path, tmp_path: Path) -> None:
    schedule = {"updates_per_batch": 2, "steps": 4}
    run(sampled_config(words, prompts, tmp_path / "whole", schedule=schedule))
    config = sampled_config(words, prompts, tmp_path / "run", schedule=schedule)
    run(config, DoAt(3, send(signal.SIGTERM)))
    run(config)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert without_times(read_lines(tmp_path / "run" / name)) == without_times(
            read_lines(tmp_path / "whole" / name)
        )


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_learning_rate_is_that_of_the_schedule(schedule: str, tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)
    minimum = 0.0 if schedule == "constant" else 1e-3
    optimizer = {"learning_rate": 1e-2, "schedule": schedule, "warmup_steps": 2, "minimum_learning_rate": minimum}
    config = file_config(
        tiny_model("llama"),
        tmp_path / "r.jsonl",
        tmp_path / "run",
        optimizer=optimizer,
        schedule={"steps": 6, "docs_per_step": 3},
    )
    run(config, DoAt(3, send(signal.SIGTERM)))
    run(config)
    logged = [line["learning_rate"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    expected = {
        "linear": [0.005, 0.01, 0.01, 0.00775, 0.0055, 0.00325],
        "cosine": [0.005, 0.01, *(0.001 + 0.009 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (0, 1, 2, 3))],
        "constant": [0.005, 0.01, 0.01, 0.01, 0.01, 0.01],
    }
    assert logged == pytest.approx(expected[schedule], rel=1e-12)


def test_tensorboard_has_each_step_once_over_a_restart(tiny_model: Model, tmp_path: Path) -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    write_rollouts(tmp_path / "r.jsonl", 20)
    config = file_config(
        tiny_model("llama"),
        tmp_path / "r.jsonl",
        tmp_path / "run",
        logging={"tensorboard": str(tmp_path / "board")},
        checkpoint={"every": 2},
    )
    trainer = quiet_trainer(config)
    trainer.sinks.append(DoAt(3, crash))
    with pytest.raises(RuntimeError):
        trainer.run()
    for sink in trainer.sinks:
        sink.close()
    train(config, Console(file=io.StringIO()))
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    logged = [line["grad_norm"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert [event.step for event in events.Scalars("grad_norm")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("grad_norm")] == pytest.approx(logged, rel=1e-6)


def test_what_makes_no_whole_step_is_dropped_and_said(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 12)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", schedule={"last_step": "drop"})
    assert run(config) == "the data ended after step 2; the last 2 documents make no whole step and were dropped"


def test_a_resumed_runs_config_is_the_new_one(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 20)

    def config(**optimizer: Any) -> Config:
        steps = {"steps": 2 if not optimizer else 4}
        return file_config(
            tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", optimizer=optimizer, schedule=steps
        )

    run(config())
    run(config(learning_rate=5e-3))
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text(encoding="utf-8"))
    assert Config.model_validate(written) == config(learning_rate=5e-3)
    assert [line["learning_rate"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [0.01, 0.01, 0.005, 0.005]


def test_a_run_learns(words: Path, prompts: Path, tmp_path: Path) -> None:
    """The sign of everything at once: the reward that is trained on rises."""
    config = sampled_config(
        words, prompts, tmp_path / "run", data={"group_size": 16}, schedule={"docs_per_step": 64, "steps": 12}
    )
    run(config)
    rewards = [line["reward"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3


def test_times_are_all_that_two_runs_differ_in(words: Path, prompts: Path, tmp_path: Path) -> None:
    lines = []
    for name in ("first", "second"):
        run(sampled_config(words, prompts, tmp_path / name))
        lines.append(read_lines(tmp_path / name / "metrics.jsonl"))
    assert without_times(lines[0]) == without_times(lines[1])
    assert any(map(of_the_machine, lines[0][0]))


def test_trainer_is_made_of_what_the_config_says(tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 5)
    trainer: Trainer = quiet_trainer(
        file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", logging={"jsonl": False})
    )
    trainer.run()
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert (tmp_path / "run/ledger.jsonl").exists()


def test_the_garbage_collector_looks_at_what_is_newer_than_the_run(tiny_model: Model, tmp_path: Path) -> None:
    class Circle:
        """Garbage that only the collector finds."""

        def __init__(self) -> None:
            self.itself = self

    write_rollouts(tmp_path / "r.jsonl", 75)
    trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run"))
    seen: list[tuple[int, int]] = []
    circles: list[weakref.ref[Circle]] = []

    def look(*_: object) -> None:
        seen.append((gc.get_freeze_count(), len(gc.get_objects())))
        circles.append(weakref.ref(Circle()))

    tell(trainer, gradient=look)
    before = gc.get_freeze_count()
    trainer.run()
    assert len(seen) == 15
    assert {frozen for frozen, _ in seen[:10]} == {before}
    assert all(frozen > 50_000 and newer < frozen / 4 for frozen, newer in seen[10:])
    assert all(circle() is None for circle in circles[:10]), "garbage was taken away before"
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"activation_checkpointing": "selective"}},
        {"adapter": {"rank": 2}, "logging": {"rollouts": {"documents": "all"}}},
        {"loss": {"type": "grpo", "kl_reference": {"weight": 0.1}}, "data": {"share_prefixes": "always"}},
    ],
    ids=["plain", "selective", "adapter", "reference"],
)
def test_a_step_leaves_no_tensor_to_the_garbage_collector(
    sections: dict[str, Any], tiny_model: Model, tmp_path: Path
) -> None:
    """What only the collector frees stays on a GPU for many steps."""
    write_rollouts(tmp_path / "r.jsonl", 20)
    trainer = quiet_trainer(file_config(tiny_model("qwen3"), tmp_path / "r.jsonl", tmp_path / "run", **sections))
    left: list[list[torch.Tensor]] = []

    def look(*_: object) -> None:
        find_place()  # as the watch does from its thread: it looks at what this thread's functions hold
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        gc.set_debug(0)
        left.append([found for found in gc.garbage if isinstance(found, torch.Tensor)])
        gc.garbage.clear()

    tell(trainer, gradient=look)
    gc.disable()
    try:
        trainer.run()
    finally:
        gc.enable()
    assert len(left) == 4
    assert left[1:] == [[]] * 3  # the first look finds what was left before


def test_a_run_with_changed_plans_tells_of_its_gradients_and_leaves_no_checkpoint(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    write_rollouts(tmp_path / "r.jsonl", 12)
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", checkpoint={"every": 1})
    trainer, changed, seen = quiet_trainer(config), [], []

    def reverse(plan: StepPlan) -> StepPlan:
        changed.append(dataclasses.replace(plan, micro_batches=tuple(reversed(plan.micro_batches))))
        return changed[-1]

    trainer.save_rule = SaveRule(never=True)
    change_plans(trainer, reverse)
    tell(trainer, gradient=lambda plan, _, norm: seen.append((plan, norm)))
    assert trainer.run() == "the data ended after step 3"
    assert [plan for plan, _ in seen] == changed and len(changed) == 3
    assert [norm for _, norm in seen] == [line["grad_norm"] for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert not (tmp_path / "run" / "checkpoints").exists()
