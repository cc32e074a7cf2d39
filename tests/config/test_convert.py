"""`truestep convert`: whole configurations of six trainers become ones that load, and no option of theirs is lost."""

from __future__ import annotations

import json
import os
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
        "schedule.docs_per_step": 2048,  # of an update
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


GROWING = "a0: &a0 [x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]\n" for n in range(1, 12))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [", "a.yaml: cannot be read: "),
        ("a.toml", "a = ", "a.toml: cannot be read: "),
        ("a.yaml", "- 1\n", "a.yaml: no options are in it"),
        ("a.sh", "echo hello\n", "a.sh: no options are in it"),
        (
            "a.yaml",
            "a: [" + "x, " * 9 + "x]\nb: !!python/object/apply:os.system [exit]",
            "could not determine a constructor",
        ),
        ("a.yaml", "a: &a\n  b: *a\n", "it has more than 10,000 values, its aliases written out"),
        ("a.yaml", GROWING, "it has more than 10,000 values, its aliases written out"),
        ("a.yaml", "a: 1\n" + "#" * 2**24, "it has more than 16 MiB"),
        ("a.sh", "set -x\necho it's\n", "a.sh: cannot be read: line 2: a quotation that begins here has no end"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(said)):
        convert(tmp_path / name)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    for name, kind in (("a.yaml", "a named pipe"), (".", "a directory"), ("b.yaml", "No such file")):
        with pytest.raises(ConfigError, match=f"cannot be read: .*{kind}"):
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


def converted_of(directory: Path, name: str, text: str) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Convert a file, load what comes of it, and give its text, its options and the comments by their option."""
    theirs, ours = directory / name, directory / "ours.yaml"
    theirs.write_text(text, encoding="utf-8")
    written, converted = convert(theirs)
    ours.write_text(written, encoding="utf-8")
    return written, load_config(ours).model_dump(by_alias=True), converted.left


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\x00"])
def test_no_letter_of_theirs_ends_a_comment(end: str, tmp_path: Path) -> None:
    tree = {
        f"un{end}seed: 79": 1,
        "rollout_stop": f"x{end}seed: 77",
        "own": f"y{end}seed: 78",
        "n_samples_per_prompt": 2,
    }
    written, options, left = converted_of(tmp_path, "run.json", json.dumps(tree))
    assert options["seed"] == int(describe.options()["seed"].default) and options["sampler"]["stop"] == [
        f"x{end}seed: 77"
    ]
    assert len(left) == 2 and written.count("seed: 7") == 4


def test_no_secret_is_written(tmp_path: Path) -> None:
    script = "--pretrain m --n_samples_per_prompt 2 --wandb_key SECRET-1 --use_wandb SECRET-2 --hub_token SECRET-3"
    script += " --remote_rm_url http://user:SECRET-4@host --my_password 'SECRET-5'\n"
    written, _, left = converted_of(tmp_path, "run.sh", script)
    assert "SECRET" not in written
    assert {"wandb_key", "use_wandb", "hub_token", "remote_rm_url", "my_password"} == set(left)
    assert written.count("***") == 5
    switched, _, _ = converted_of(tmp_path, "on.sh", "--pretrain m --n_samples_per_prompt 2 --use_wandb true\n")
    assert "use_wandb: true" in switched


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "lr: 5e-7\nnum_generations: 2\n"),
        ("a.json", '{"lr": 5e-7, "num_generations": 2}'),
        ("a.yaml", "actor:\n  rate: 5e-7\noptim: {lr: '${actor.rate}'}\nnum_generations: 2\n"),
        ("a.sh", "train --num-generations 2 --lr 5e-7 && echo done\n"),
        ("a.sh", "train --num-generations 2 --lr 5e-7 2>&1 | tee log\n"),
        ("a.sh", "train --num-generations 2 --lr 5e-7 > log\n"),
        ("a.sh", "train --num-generations 2 --lr 5e-7; echo done\n"),
        ("a.sh", "train --num-generations 2 --lr 5e-7\necho done\n"),
        ("a.sh", "LR=5e-7\ntrain --num-generations 2 --lr ${LR} \\\n  --seed 3\n"),
        ("a.sh", "export LR=5e-7\ntrain --lr $LR --num-generations 2\n"),
        ("a.sh", "train --lr ${LR:-5e-7} --num-generations 2\n"),
        ("a.sh", 'ARGS="--lr 5e-7 --num-generations 2"\ntrain $ARGS --seed 3\n'),
        ("a.sh", "ARGS=(\n  # the rate's\n  --lr 5e-7\n  --num-generations 2\n)\ntrain ${ARGS[@]} --seed 3\n"),
        ("a.sh", 'echo "it\'s on"  # it\'s\ntrain --lr "5e-7" --num-generations 2\n'),
    ],
)
def test_a_learning_rate_is_read_wherever_it_stands(name: str, text: str, tmp_path: Path) -> None:
    _, options, _ = converted_of(tmp_path, name, text)
    assert options["optimizer"]["learning_rate"] == 5e-7 and options["data"]["group_size"] == 2


def test_a_variable_that_the_script_does_not_set_is_no_value(tmp_path: Path) -> None:
    script = "train --num-generations 2 --lr ${LR} --pretrain $ROOT/m --min_p $(cat p) --rollout-stop '$x' \"<|a|>\"\n"
    written, options, left = converted_of(tmp_path, "a.sh", script)
    assert left["lr"] == "write optimizer.learning_rate" and "lr: ${LR}" in written
    assert left["pretrain"].startswith("write model.path") and left["min_p"] == "write sampler.min_p"
    assert options["sampler"]["stop"] == ["$x", "<|a|>"]


VERL = "actor_rollout_ref: {rollout: {n: 2}}\n"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.sh",
            "--train_batch_size 128 --rollout_batch_size 64 --n_samples_per_prompt 8",
            {"schedule.docs_per_step": 128},
        ),
        (
            "a.sh",
            "--rollout-batch-size 32 --global-batch-size 64 --n-samples-per-prompt 8",
            {"schedule.docs_per_step": 64},
        ),
        (
            "a.yaml",
            f"{VERL}actor: {{ppo_mini_batch_size: 4}}\ndata: {{train_batch_size: 16}}\n",
            {"schedule.docs_per_step": 8},
        ),
        (
            "a.yaml",
            f"{VERL}data: {{train_batch_size: 16}}\nactor: {{ppo_mini_batch_size: 4}}\n",
            {"schedule.docs_per_step": 8},
        ),
        ("a.yaml", f"{VERL}data: {{train_batch_size: 16}}\n", {"schedule.docs_per_step": 32}),
        (
            "a.yaml",
            f"{VERL}algorithm: {{adv_estimator: grpo, norm_adv_by_std_in_grpo: false}}\n",
            {"data.advantages": "group_mean"},
        ),
        (
            "a.yaml",
            f"{VERL}algorithm: {{adv_estimator: rloo, norm_adv_by_std_in_grpo: true}}\n",
            {"data.advantages": "leave_one_out"},
        ),
        (
            "a.sh",
            "--advantage_estimator reinforce_baseline --no_advantage_std_norm --n_samples_per_prompt 2",
            {"data.advantages": "group_mean"},
        ),
        (
            "a.sh",
            "--advantage_estimator group_norm --no_advantage_std_norm --n_samples_per_prompt 2",
            {"data.advantages": "group_normalized"},
        ),
        (
            "a.yaml",
            "grpo: {normalize_rewards: true, use_leave_one_out_baseline: true, num_generations_per_prompt: 2}\n",
            {"data.advantages": "leave_one_out", "data.advantage_scale": "group"},
        ),
        (
            "a.yaml",
            "grpo: {normalize_rewards: true, use_leave_one_out_baseline: false, num_generations_per_prompt: 2}\n",
            {"data.advantages": "group_normalized", "data.advantage_scale": None},
        ),
        (
            "a.yaml",
            "importance_sampling_level: token\nloss_type: cispo\nepsilon: 0.2\nepsilon_high: 5.0\nnum_generations: 2\n",
            {"loss.type": "cispo", "loss.normalize_by": "labels", "loss.epsilon_low": 1.0, "loss.epsilon_high": 4.0},
        ),
        ("a.yaml", "loss_type: sapo\nepsilon: 0.2\nnum_generations: 2\n", {"loss.type": "sapo"}),
        ("a.yaml", "loss_type: grpo\nimportance_sampling_level: sequence\nnum_generations: 2\n", {"loss.type": "gspo"}),
        (
            "a.yaml",
            "critic: {model: {path: critic}}\nactor_rollout_ref: {model: {path: actor}, rollout: {n: 2}}\n",
            {"model.path": "actor"},
        ),
    ],
)
def test_what_counts_first_does_not_depend_on_the_order(
    name: str, text: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    _, options, _ = converted_of(tmp_path, name, text)
    assert {option: value_of(options, option) for option in expected} == expected


def test_their_defaults_are_said_not_to_be_ours(tmp_path: Path) -> None:
    written, _, _ = converted_of(tmp_path, "a.yaml", "num_generations: 2\n")
    assert "# An option that the original file leaves out has truestep's default here, which may differ." in written
