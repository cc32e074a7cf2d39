"""`truestep convert`: whole configurations of six trainers become ones that load, and no option of theirs is lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from truestep.commands.cli import main
from truestep.config import describe, foreign
from truestep.config.convert import convert, read_foreign
from truestep.config.load import ConfigError, load_config

TREES = sorted((Path(__file__).parent / "trees").iterdir())
# What some options of each become.
BECOMES: dict[str, dict[str, Any]] = {
    "verl": {
        "model.path": "~/models/deepseek-llm-7b-chat",
        "data.group_size": 8,
        "schedule.docs_per_step": 8192,
        "loss.kl_reference.weight": 0.001,
        "loss.kl_reference.estimator": "k3",
        "loss.clip_cov": None,
        "loss.kl_cov": None,
        "loss.epsilon_low": 0.2,
        "sampler.max_new_tokens": 512,
        "sampler.top_k": 0,
        "adapter": None,
    },
    "nemo_rl": {
        "data.group_size": 16,
        "schedule.docs_per_step": 512,
        "optimizer.learning_rate": 5e-6,
        "sampler.max_new_tokens": 512,
        "loss.kl_reference.weight": 0.01,
        "checkpoint.keep": 3,
        "seed": 42,
    },
    "prime_rl": {
        "model.path": "Qwen/Qwen3-0.6B",
        "data.group_size": 16,
        "schedule.docs_per_step": 128,
        "schedule.steps": 100,
        "optimizer.learning_rate": 1e-6,
        "optimizer.beta2": 0.999,
        "sampler.max_new_tokens": 512,
        "seed": 42,
    },
    "slime": {
        "model.path": "/root/Qwen3-4B",
        "data.group_size": 8,
        "schedule.docs_per_step": 256,
        "schedule.steps": 3000,
        "loss.epsilon_low": 0.2,
        "loss.epsilon_high": 0.28,
        "loss.correction.type": "truncate",
        "loss.correction.high": 2.0,
        "loss.kl_reference": None,
        "sampler.stop": ["</answer>"],
        "evaluation.prompts": {"aime": "/root/aime-2024/aime-2024.jsonl"},
        "parallel.tensor": 2,
        "optimizer.beta2": 0.98,
    },
    "openrlhf": {
        "data.group_size": 8,
        "schedule.docs_per_step": 1024,
        "loss.epsilon_low": 0.2,
        "loss.epsilon_high": 0.28,
        "loss.kl_reference.weight": 0.01,
        "loss.kl_reference.in": "loss",
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.learning_rate": 1e-6,
        "adapter": None,
    },
    "trl": {
        "model.path": "Qwen/Qwen2.5-1.5B",
        "data.group_size": 8,
        "optimizer.learning_rate": 1e-6,
        "loss.epsilon_low": 0.2,
        "loss.epsilon_high": 0.28,
        "loss.normalize_by": "labels",
        "loss.kl_reference": None,
        "loss.correction": None,
        "sampler.max_new_tokens": 256,
        "sampler.type": "in_process",
        "adapter": None,
    },
}


def value_of(options: dict[str, Any], name: str) -> Any:
    value: Any = options
    for part in name.split("."):
        value = None if value is None else value[part]
    return value


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.stem)
def test_a_whole_configuration_loads_and_keeps_each_option_as_a_value_or_a_comment(tree: Path, tmp_path: Path) -> None:
    given = read_foreign(tree)
    assert len(given) >= 60
    text, converted = convert(tree)
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    options = load_config(path).model_dump(by_alias=True)
    for name, expected in BECOMES[tree.stem].items():
        assert value_of(options, name) == expected, name
    assert set(converted.of.values()) | set(converted.left) | set(converted.unset) == set(given)
    comments = "\n".join(re.findall("#.*", text))
    for name in given:
        assert re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", comments), name
    for name in converted.filled:
        assert "# fill in: " in text and name in describe.options()
    written = yaml.safe_load(
        text
    )  # every option that is written comes from theirs, belongs to one, or is to be filled in
    assert {".".join(name) for name, _ in foreign.leaves(written)} >= set(converted.of) - {"evaluation.prompts"}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.stem)
def test_each_of_its_options_is_answered_on_the_command_line(tree: Path, tmp_path: Path) -> None:
    """With what to write here, or why there is none. What is called as ours is taken as ours."""
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\n", encoding="utf-8")
    given = {
        name: value
        for name, value in read_foreign(tree).items()
        if name not in (*describe.options(), *describe.sections())
    }
    for name, value in given.items():
        said = foreign.explain(name.split("."), value)
        assert said is not None and ("; write " in said or "truestep has none like it" in said), (name, said)
    with pytest.raises(ConfigError) as caught:
        load_config(
            path, [f"--{name}={value if isinstance(value, int | float) else 'x'}" for name, value in given.items()]
        )
    lines = str(caught.value).splitlines()
    for name in given:
        sections = [name[:end] for end, letter in enumerate(name) if letter == "."]  # one line may answer a section
        line = next((line for of in (name, *sections) for line in lines if f": {of} is unknown: " in line), "")
        assert "; write " in line or "truestep has none like it" in line, (name, line)


def test_a_script_of_hydra_s_overrides_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\npython3 -m verl.trainer.main_ppo \\\n  algorithm.adv_estimator=rloo data.train_batch_size=64 \\\n"
        "  +actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.optim.lr=1e-6 \\\n"
        "  actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.kl_loss_coef=0.01 $@\n",
        encoding="utf-8",
    )
    text, converted = convert(script)
    assert converted.ours["data.advantages"] == "leave_one_out"
    assert converted.ours["schedule.docs_per_step"] == 256
    assert converted.ours["optimizer.learning_rate"] == 1e-6
    assert "loss.kl_reference.weight" not in converted.ours
    assert "since use_kl_loss is not" in converted.left["actor_rollout_ref.actor.kl_loss_coef"]
    assert "actor_rollout_ref.actor.use_kl_loss: false" in text


def test_a_divergence_in_the_reward_is_one(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("--init_kl_coef 0.02 --n_samples_per_prompt 4 --pretrain m\n", encoding="utf-8")
    _, converted = convert(script)
    assert converted.ours["loss.kl_reference.weight"] == 0.02
    assert converted.ours["loss.kl_reference.in"] == "reward"


def test_an_option_that_no_trainer_has_is_kept_as_a_comment(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("num_generations: 4\nmy_own_option: {deep: 3}\n", encoding="utf-8")
    text, converted = convert(file)
    assert converted.left == {"my_own_option.deep": "no trainer that truestep knows has it"}
    assert "#   my_own_option.deep: 3" in text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [", "a.yaml: cannot be read: "),
        ("a.toml", "a = ", "a.toml: cannot be read: "),
        ("a.yaml", "- 1\n", "a.yaml: no options are in it"),
        ("a.sh", "echo hello\n", "a.sh: no options are in it"),
        ("a.sh", "echo 'hello\n", "a.sh: cannot be read: No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        convert(tmp_path / name)


def test_the_command_writes_a_file_and_none_over_another(tmp_path: Path) -> None:
    theirs = tmp_path / "trl.yaml"
    theirs.write_text("model_name_or_path: m\nnum_generations: 4\n", encoding="utf-8")
    output = tmp_path / "run.yaml"
    done = CliRunner().invoke(main, ["convert", str(theirs), "--output", str(output)])
    assert done.exit_code == 0 and "2 options converted" in done.output
    assert load_config(output).data.group_size == 4
    again = CliRunner().invoke(main, ["convert", str(theirs), "--output", str(output)])
    assert again.exit_code == 1 and "exists" in again.output
    shown = CliRunner().invoke(main, ["convert", str(theirs)])
    assert shown.output == output.read_text(encoding="utf-8")
