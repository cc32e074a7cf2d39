"""Names of other trainers are answered with our option, its value converted, or with the reason that there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from truestep.config import foreign
from truestep.config.describe import options, sections
from truestep.config.load import ConfigError, load_config

NAMES = sorted(foreign.table().options)
# What a person who comes from another trainer types, and the answer. The first word is where it is typed.
TYPED = """\
max_steps: 100                          => TRL, transformers and prime-rl; write schedule.steps: 100
schedule.max_steps: -1                  => write schedule.steps: null
num_generations: 8                      => it is an option of TRL; write data.group_size: 8
loss.loss_type: dr_grpo                 => write loss.normalize_by: constant (and loss.type
loss.loss_type: grpo                    => write loss.normalize_by: document_means
optimizer.max_norm: 1.0                 => it is an option of prime-rl and OpenRLHF; write optimizer.gradient_clip: 1.0
loss.policy_loss: ppo                   => it is an option of PipelineRL and Fast-LLM; write loss.type: grpo
loss.rollout_is: sequence               => write loss.correction.level: document
loss.loss_agg_mode: seq-mean-token-mean => it is an option of verl; write loss.normalize_by: document_means
loss.importance_sampling_level: sequence => write loss.type: gspo
data.scale_rewards: false               => write data.advantages: group_mean
data.scale_rewards: batch               => write data.advantages: batch_normalized
loss.delta: 4.0                         => write loss.dual_clip: 4.0
optimizer.lr: 1e-6                      => verl, prime-rl, slime and DeepSpeed; write optimizer.learning_rate: 1e-06
optimizer.max_grad_norm: 0              => write optimizer.gradient_clip: null
optimizer.lr_scheduler_type: cosine     => write optimizer.schedule: cosine
optimizer.lr_scheduler_type: polynomial => write optimizer.schedule
model.bf16: true                        => write model.dtype: bfloat16
model.gradient_checkpointing: true      => write model.activation_checkpointing: true
gradient_accumulation_steps: 8          => write schedule.docs_per_step (a step is a number of documents
rollout_batch_size: 64                  => write schedule.docs_per_step (it counts prompts
loss.beta: 0.04                         => it is an option of TRL; write loss.kl_reference.weight: 0.04
loss.kl_loss_type: low_var_kl           => write loss.kl_reference.estimator: k3
data.mask_truncated_completions: true   => write data.truncated: mask
packing: true                           => and truestep has none like it: documents are always packed
use_vllm: true                          => write sampler.type: server
use_vllm: false                         => write sampler.type: in_process
report_to: wandb                        => write logging.wandb or logging.tensorboard
"""
CASES = [tuple(part.strip() for part in line.split("=>")) for line in TYPED.splitlines()]


def answer(typed: str, directory: Path) -> str:
    """Write the option into a configuration, load it, and give what the loader says."""
    name, _, value = typed.partition(": ")
    *sections, leaf = name.split(".")
    lines = {"model": ["path: m"]}
    for section in sections:
        lines.setdefault(section, []).append(f"{leaf}: {value}")
    text = "".join(f"{section}: {{{', '.join(inner)}}}\n" for section, inner in lines.items())
    path = directory / "run.yaml"
    path.write_text(text if sections else f"{text}{leaf}: {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return str(caught.value)


@pytest.mark.parametrize(("typed", "expected"), CASES)
def test_a_name_of_another_trainer_is_answered_with_ours(typed: str, expected: str, tmp_path: Path) -> None:
    said = answer(typed, tmp_path)
    assert expected in said
    assert said.startswith(f"{tmp_path}/run.yaml:")


def test_answers_name_options_that_exist() -> None:
    known = {*options(), "logging.wandb", "logging.trackio", "data.overlong_penalty"}
    for name in NAMES:
        ours = foreign.table().options[name].here
        said = foreign.explain(name.split("."), 1)
        assert said is not None, name
        if ours is None:
            assert "truestep has none like it" in said, name
        else:
            assert known >= set(ours.split(" and " if " and " in ours else " or ")), (name, ours)


def test_no_foreign_name_hides_one_of_ours() -> None:
    own = {option.name.rpartition(".")[2] for option in options().values()}
    assert not own & set(NAMES)
    assert len(NAMES) >= 60


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale_rewards", ["group", "none", "batch", True, False]),
        ("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo"]),
        ("policy_loss", ["ppo", "grpo", "gspo", "reinforce"]),
        ("policy_loss_type", ["ppo", "gspo"]),
        ("normalize_by_documents", [True, False]),
        ("calculate_per_token_loss", [True, False]),
        ("divide_advantage_by_std", [True, False]),
        ("rollout_is", ["token", "sequence"]),
        ("use_unbiased_kl", [True, False]),
        ("use_bias_correction_kl", [True, False]),
        ("overlong_filtering", [True, False]),
        ("loss_agg_mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]),
        ("importance_sampling_level", ["token", "sequence"]),
        ("adv_estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"]),
        ("advantage_estimator", ["grpo", "rloo", "group_norm", "dr_grpo", "reinforce_baseline"]),
        ("kl_loss_type", ["kl", "k1", "mse", "k2", "low_var_kl", "k3"]),
        ("mask_truncated_completions", [True, False]),
        ("dynamic_filtering", [True, False]),
        ("lr_scheduler_type", ["constant", "constant_with_warmup", "cosine", "linear"]),
        ("torch_dtype", ["bfloat16", "float32"]),
    ],
)
def test_a_converted_value_is_one_that_the_option_takes(name: str, values: list[Any]) -> None:
    found = foreign.table().options[name]
    assert found.here is not None
    allowed = re.findall(r"[\w.:]+", options()[found.here].allowed)
    for value in values:
        assert found.converted(value) in allowed, value


def test_every_value_of_the_table_is_one_that_the_option_takes() -> None:
    for name in NAMES:
        found = foreign.table().options[name]
        if found.values:
            assert found.here is not None, name
            option = options()[found.here]
            for ours in found.values.values():
                assert ours is None or option.is_bool or type(ours) is int or ours in option.choices, (name, ours)


def test_the_table_is_read_only_when_an_option_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\nloss: {type: cross_entropy}\ndata: {path: a.jsonl}\nschedule: {docs_per_step: 4}\n"
    )
    foreign.table.cache_clear()
    load_config(tmp_path / "run.yaml")
    assert foreign.table.cache_info().currsize == 0


def answers(file: Path, text: str, overrides: Sequence[str] = ()) -> list[str]:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value).splitlines()


WHOLE = sorted((Path(__file__).parent / "foreign").glob("*.yaml"))


@pytest.mark.parametrize("file", WHOLE, ids=lambda file: file.stem)
def test_a_whole_file_of_another_trainer(file: Path, tmp_path: Path) -> None:
    """Every option of it is answered at once; at most one in ten has no better answer than that it is not ours."""
    text = file.read_text(encoding="utf-8")
    said = answers(tmp_path / "run.yaml", text)
    given = [".".join(name) for name, _ in foreign.leaves(yaml.safe_load(text)) if ".".join(name) not in options()]
    answered = [line for line in said if "; write " in line or "truestep has none like it" in line]
    assert len(given) >= 20
    for name in given:
        assert any(
            re.search(
                rf" {re.escape(name)} is unknown| {re.escape(name.split('.')[0])}[\w.]* is unknown: .*none like it",
                line,
            )
            for line in said
        ), name
    unanswered = [line for line in said if line not in answered and "is required" not in line]
    assert len(unanswered) <= len(given) / 10, unanswered
    assert not [line for line in said if "did you mean" in line]
    for line in said:  # what is written is an option
        for words in re.findall(r"; write ([\w. ]+?)(?:: | \(|$)", line):
            for word in re.split(" and | or ", words):
                assert word in options() or word in sections(), line


TREES = {
    "actor_rollout_ref.rollout.n=16": "write data.group_size: 16",
    "+actor_rollout_ref.rollout.n=16": "write data.group_size: 16",
    "++data.train_batch_size=64": "write schedule.docs_per_step (it counts prompts",
    "algorithm.adv_estimator=rloo": "write data.advantages: leave_one_out",
    "algorithm.adv_estimator=gae": "write data.advantages",
    "--trainer.optim.lr=1e-6": "write optimizer.learning_rate: 1e-06",
    "--orchestrator.rollouts-per-example=8": "write data.group_size: 8",
    "--orchestrator.batch_size=512": "write schedule.docs_per_step: 512",
    "--grpo.num_prompts_per_step=32": "write schedule.docs_per_step (it counts prompts",
    "--actor.adam.lr=5e-7": "write optimizer.learning_rate: 5e-07",
    "--rollout.batch_size=128": "write schedule.docs_per_step (it counts prompts",
    "--algo.advantage.estimator=group_norm": "write data.advantages: group_normalized",
    "critic.optim.lr=1e-5": "truestep has none like it: there is no critic",
}


@pytest.mark.parametrize("token", TREES)
def test_a_whole_name_on_the_command_line(token: str, tmp_path: Path) -> None:
    (said,) = answers(tmp_path / "run.yaml", "model: {path: m}\n", [token])
    assert said.startswith("command line: ")
    assert TREES[token] in said


def test_prompts_are_counted_as_documents_where_the_group_is_known(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata: {train_batch_size: 64}\nactor_rollout_ref: {rollout: {n: 8}}\n"
    said = answers(tmp_path / "run.yaml", text)
    assert any("write schedule.docs_per_step: 512 (it counts prompts" in line for line in said)
    said = answers(tmp_path / "run.yaml", "model: {path: m}\ndata: {train_batch_size: 64, group_size: 4}\n")
    assert any("write schedule.docs_per_step: 256 (it counts prompts" in line for line in said)


def test_our_own_option_in_the_way_of_hydra(tmp_path: Path) -> None:
    (said,) = answers(tmp_path / "run.yaml", "model: {path: m}\n", ["schedule.steps=5"])
    assert said == "command line: 'schedule.steps=5' is not an override: write --schedule.steps 5"


@pytest.mark.parametrize(
    "name",
    ["training", "algorithm", "orchestra", "trainer", "loss.rolling", "logger", "tracking", "data.url_of"],
)
def test_nothing_is_offered_where_nothing_is_near(name: str, tmp_path: Path) -> None:
    (said,) = answers(tmp_path / "run.yaml", "model: {path: m}\n", [f"--{name}", "5"])
    assert "did you mean" not in said


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("optimizer.learning_rat", "optimizer.learning_rate"),
        ("schedule.step", "schedule.steps"),
        ("learning_rates", "optimizer.learning_rate"),
    ],
)
def test_what_is_near_is_offered(name: str, near: str, tmp_path: Path) -> None:
    (said,) = answers(tmp_path / "run.yaml", "model: {path: m}\n", [f"--{name}", "5"])
    assert f"did you mean {near}?" in said


def test_the_page_is_written_from_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == foreign.markdown_table() + "\n", "run `make docs`"
