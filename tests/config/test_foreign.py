"""Names of other trainers are answered with our option, its value converted, or with the reason that there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from truestep.config import foreign
from truestep.config.describe import options
from truestep.config.load import ConfigError, load_config

NAMES = sorted(foreign.FOREIGN)
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


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_names_options_that_exist(name: str) -> None:
    ours = foreign.FOREIGN[name].option
    said = foreign.explain([name], 1)
    assert said is not None
    if ours is None:
        assert "truestep has none like it" in said
        return
    words = ours.split(" and " if " and " in ours else " or ")
    sections = ("logging.wandb", "logging.mlflow", "logging.trackio", "data.overlong_penalty")
    assert all(word in options() or word in sections for word in words), ours


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
    found = foreign.FOREIGN[name]
    assert found.option is not None and found.convert is not None
    allowed = re.findall(r"[\w.:]+", options()[found.option].allowed)
    for value in values:
        assert found.convert(value) in allowed, value


def test_the_page_is_written_from_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "coming-from.md"
    assert page.read_text(encoding="utf-8") == foreign.markdown_table() + "\n", "run `make docs`"
