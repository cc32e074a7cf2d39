"""The commands as a user types them: what they write, and one message for every mistake."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoints import read_weights
from small_runs import read_lines, sort_prompts, word_model, write_lines, write_rollouts
from tiny import label_positions
from truestep import __version__
from truestep.commands.cli import main
from truestep.config.describe import list_options, sections
from truestep.config.schema import EVERYDAY
from truestep.errors import TruestepError

Model = Callable[[str], Path]


def truestep(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def write_config(path: Path, **sections: Any) -> Path:
    path.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return word_model(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def files(tiny_model: Model, tmp_path: Path) -> dict[str, Any]:
    """A configuration that works: ten rollouts, two steps."""
    write_rollouts(tmp_path / "r.jsonl", 10)
    return {
        "model": {"path": str(tiny_model("llama")), "dtype": "float32"},
        "data": {"path": "r.jsonl", "advantages": "none", "tokens_per_microbatch": 40},
        "schedule": {"docs_per_step": 5},
        "checkpoint": {"directory": "run"},
    }


@pytest.fixture
def sampled(words: Path, tmp_path: Path) -> dict[str, Any]:
    write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    return {
        "model": {"path": str(words), "dtype": "float32"},
        "data": {"group_size": 2, "tokens_per_microbatch": 64},
        "schedule": {"docs_per_step": 4, "steps": 1},
        "sampler": {"prompts": "p.jsonl", "reward": "plain_rewards:digit_reward", "max_new_tokens": 4},
        "checkpoint": {"directory": "run"},
    }


def check_one_message(result: Result, said: str) -> str:
    assert result.exit_code == 1, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit), result.exception
    assert "\nerror: " in f"\n{result.stderr}", "what the command does may be said before"
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.output
    assert said in result.stderr
    return result.stderr


def check_refused(result: Result, said: str) -> None:
    """One message, and nothing that looks like a run."""
    check_one_message(result, said)
    assert not Path("run").exists()


def test_every_option_is_in_the_help_of_train() -> None:
    result = truestep("train", "--help-all")
    assert result.exit_code == 0 and result.output == truestep("train", "--help", "all").output
    missing = [option.name for option in list_options() if option.name.rpartition(".")[2] not in result.output]
    assert not missing
    for section in ("loss.", "optimizer.", "sampler.", "evaluation."):
        assert f"--{section}" in result.output or section in result.output
    assert "Keep logits in float32 instead of rounding them to bfloat16" in " ".join(result.output.split())


def test_the_help_of_train_has_the_options_that_matter_and_names_every_section() -> None:
    result = truestep("train", "--help")
    assert result.exit_code == 0 and len(result.output.splitlines()) < 80
    options = [line.split()[0][2:] for line in result.output.splitlines() if line.startswith("--")]
    assert options == list(EVERYDAY)
    words = result.output.replace(",", " ").split()
    assert set(sections()) <= set(words) and "--help-all" in words


@pytest.mark.parametrize(
    ("word", "has", "has_not"),
    [
        ("loss", ["--loss.kl_reference.weight", "--loss.epsilon_low"], ["--model.path", "--data.path"]),
        ("loss.kl_reference", ["--loss.kl_reference.weight"], ["--loss.epsilon_low"]),
        ("run", ["--seed", "--preset"], ["--model.path", "--sampler.prompts"]),
        ("CLIP", ["--loss.clip_cov.share", "--optimizer.gradient_clip"], ["--model.path"]),
        ("--optimizer.learning_rate", ["--optimizer.learning_rate"], ["--optimizer.beta1"]),
    ],
)
def test_help_about_a_word(word: str, has: list[str], has_not: list[str]) -> None:
    for command in ("train", "verify"):
        result = truestep(command, "--help", word)
        named = {line.split()[0] for line in result.output.splitlines() if line.startswith("  --")}
        assert result.exit_code == 0 and set(has) <= named and not set(has_not) & named, result.output


def test_help_about_what_is_not_there() -> None:
    check_one_message(
        truestep("train", "--help", "learning_rat3"), "no section and no option has 'learning_rat3' in its name"
    )


@pytest.mark.parametrize("command", ["score", "export", "report", "demo", "data"])
def test_every_command_has_help(command: str) -> None:
    for help_option in ("--help", "-h"):
        result = truestep(command, help_option)
        assert result.exit_code == 0
        assert "Usage:" in result.output


def test_python_dash_m_and_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "truestep", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(__version__)
    wrong = subprocess.run([sys.executable, "-m", "truestep", "train", "no.yaml"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("error: no.yaml")
    assert "Traceback" not in wrong.stderr


def test_train_writes_a_run_and_goes_on(files: dict[str, Any]) -> None:
    config = write_config(Path("c.yaml"), **files)
    first = truestep("train", config, "--schedule.steps", "1")
    assert first.exit_code == 0, first.output
    assert "step 1/1" in first.output
    assert "all 1 steps are done; the run is in run" in first.output
    second = truestep("train", config, "--optimizer.learning_rate=1e-4")
    assert second.exit_code == 0, second.output
    assert "going on after step 1" in second.output
    assert "the data ended after step 2" in second.output
    assert [line["step"] for line in read_lines(Path("run/metrics.jsonl"))] == [1, 2]
    third = truestep("train", config)
    assert "the data ended after step 2" in third.output


def test_a_name_with_brackets_is_shown_as_it_is(files: dict[str, Any]) -> None:
    files["checkpoint"]["directory"] = "runs/[red]a[/b]"
    result = truestep("train", write_config(Path("c.yaml"), **files))
    assert result.exit_code == 0, result.exception
    assert "the run is in runs/[red]a[/b]" in result.output
    scored = truestep("score", "c.yaml", "--output", "[bold]out[/c]")
    assert scored.exit_code == 0, scored.exception
    assert "[bold]out[/c]" in scored.output
    exported = truestep("export", "runs/[red]a[/b]", "--output", "[x]hf[/y]")
    assert exported.exit_code == 0, exported.exception
    assert "[x]hf[/y]" in exported.output


def test_every_error_for_users_is_one_of_ours() -> None:
    from truestep.config.load import ConfigError
    from truestep.rollouts.files import DataError

    assert issubclass(ConfigError, TruestepError)
    assert issubclass(DataError, TruestepError)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--loss.epsilon_lo", "0.1"], "loss.epsilon_low"),
        (["--nonsense.option", "1"], "nonsense"),
        (["--optimizer.learning_rate", "fast"], "optimizer.learning_rate"),
        (["--schedule.docs_per_step", "-1"], "schedule.docs_per_step"),
        (["--seed", "-1", "--data.shuffle", "true"], "seed"),
        (["--model.path", "no/such/model"], "no/such/model"),
        (["--data.path", "no/such/*.jsonl"], "no/such/*.jsonl"),
        (["--data.path", "r.txt"], "r.txt"),
        (["--data.path", "bad.jsonl"], "no record of bad.jsonl can be trained on"),
        (["--data.path", "empty.jsonl"], "the files are empty"),
        (["--data.path", "bad.jsonl", "--data.on_bad_record", "stop"], "bad.jsonl:1"),
        (["--data.advantages", "group_mean", "--loss.type", "gspo", "--data.path", "bare.jsonl"], "advantage"),
        (["--evaluation", "{prompts: p.jsonl, reward: 'json:loads'}"], "write it as reward(prompt, completion"),
        (["--evaluation", "{prompts: p.jsonl, reward: 'truestep.environments.sorting:reward'}"], "tokenizer"),
        (["--checkpoint.directory", "r.jsonl"], "r.jsonl"),
    ],
)
def test_a_mistake_is_one_message_and_makes_no_run(overrides: list[str], said: str, files: dict[str, Any]) -> None:
    Path("r.txt").write_text("{}")
    Path("empty.jsonl").write_text("")
    write_lines(Path("bad.jsonl"), [{"id": "no input ids"}])
    write_lines(Path("bare.jsonl"), [{"input_ids": [1, 2], "prompt_length": 1, "logprobs": [-1.0]}])
    write_lines(Path("p.jsonl"), sort_prompts(2))
    before = {path.name for path in Path().iterdir()}
    result = truestep("train", write_config(Path("c.yaml"), **files), *overrides)
    check_refused(result, said)
    assert {path.name for path in Path().iterdir()} == before | {"c.yaml"}


@pytest.mark.parametrize(
    ("section", "option", "value", "said"),
    [
        ("sampler", "reward", "no_such_module_x:score", "no_such_module_x"),
        ("sampler", "reward", "score", "package.module:function"),
        ("sampler", "prompts", "missing.jsonl", "sampler.prompts: missing.jsonl does not exist"),
        ("data", "group_size", None, "sampler needs data.group_size"),
        ("data", "group_size", 3, "data.group_size: 3"),
        ("schedule", "steps", None, "sampler needs schedule.steps"),
        ("data", "path", "r.jsonl", "one source"),
        ("logging", "wandb", {"mode": "offline"}, "logging.wandb.project"),
        ("seed", None, -5, "seed"),
    ],
)
def test_a_samplers_mistakes(section: str, option: str | None, value: Any, said: str, sampled: dict[str, Any]) -> None:
    if option is None:
        sampled[section] = value
    else:
        sampled.setdefault(section, {})[option] = value
    check_refused(truestep("train", write_config(Path("c.yaml"), **sampled)), said)


def test_a_model_without_a_tokenizer_cannot_sample(sampled: dict[str, Any], tiny_model: Model) -> None:
    sampled["model"]["path"] = str(tiny_model("llama"))
    check_refused(truestep("train", write_config(Path("c.yaml"), **sampled)), "tokenizer")


@pytest.mark.parametrize(
    ("parallel", "said"),
    [({"data_replicate": 3}, "does not divide the 2 ranks"), ({"data_shard": 4}, "needs 4 ranks, and this run has 2")],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_done(
    parallel: dict[str, int], said: str, files: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = write_config(Path("c.yaml"), **files, parallel=parallel)
    check_refused(truestep("train", config), said)
    check_refused(truestep("score", config, "--output", "out"), said)
    assert not Path("out").exists()


def test_a_sink_without_its_package_makes_no_run(files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    files["logging"] = {"wandb": {"project": "p", "mode": "offline"}}
    check_refused(truestep("train", write_config(Path("c.yaml"), **files)), "pip install 'truestep[wandb]'")


def test_a_run_of_another_source_is_not_gone_on_with(files: dict[str, Any], sampled: dict[str, Any]) -> None:
    sampled["model"] = files["model"] = sampled["model"]
    files["data"]["path"] = "small.jsonl"
    write_rollouts(Path("small.jsonl"), 5, vocabulary=14)
    assert truestep("train", write_config(Path("f.yaml"), **files)).exit_code == 0
    before = Path("run/metrics.jsonl").read_bytes()
    check_one_message(truestep("train", write_config(Path("s.yaml"), **sampled)), "checkpoint.directory")
    sampled["checkpoint"]["directory"] = "other"
    assert truestep("train", write_config(Path("s.yaml"), **sampled)).exit_code == 0
    files["checkpoint"]["directory"] = "other"
    check_one_message(truestep("train", write_config(Path("f.yaml"), **files)), "checkpoint.directory")
    assert Path("run/metrics.jsonl").read_bytes() == before


def test_score_writes_its_three_files(files: dict[str, Any], tiny_model: Model) -> None:
    config = write_config(Path("c.yaml"), **files)
    result = truestep("score", config, "--output", "out", "--gradients", "--loss.metrics", "full")
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    scores = read_lines(Path("out/scores.jsonl"))
    assert [line["id"] for line in scores] == [record["id"] for record in records]
    for line, record in zip(scores, records, strict=True):
        assert set(line) >= {"id", "logprobs", "entropy", "ratio"}
        assert len(line["logprobs"]) == len(line["entropy"]) == len(line["ratio"]) == len(label_positions(record))
        assert line.get("metadata") == record.get("metadata")
    step = json.loads(Path("out/step.json").read_text())
    assert step["num_documents"] == 10
    assert step["num_labels"] == sum(len(label_positions(record)) for record in records)
    assert {"loss", "grad_norm", "ratio_new_old", "entropy", "documents_seen"} <= set(step)
    gradients = load_file("out/gradients.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tiny_model("llama"))
    assert {name: value.shape for name, value in gradients.items()} == {
        name: value.shape for name, value in model.named_parameters()
    }
    total = sum(float(value.double().square().sum()) for value in gradients.values()) ** 0.5
    assert step["grad_norm"] == pytest.approx(total, rel=1e-6)
    assert not Path("run").exists()


def test_scoring_again_leaves_nothing_of_the_last_time(files: dict[str, Any]) -> None:
    config = write_config(Path("c.yaml"), **files)
    truestep("score", config, "--output", "out", "--gradients")
    truestep("score", config, "--output", "out")
    assert "grad_norm" not in json.loads(Path("out/step.json").read_text())
    assert not Path("out/gradients.safetensors").exists(), "of another step than step.json"
    write_lines(Path("bad.jsonl"), [{"id": "no input ids"}])
    check_one_message(truestep("score", config, "--output", "out", "--data.path", "bad.jsonl"), "rejected.jsonl")
    assert {path.name for path in Path("out").iterdir()} == {"rejected.jsonl"}


def test_scores_mistakes(sampled: dict[str, Any], files: dict[str, Any]) -> None:
    check_refused(truestep("score", write_config(Path("s.yaml"), **sampled), "--output", "out"), "data.path")
    config = write_config(Path("c.yaml"), **files)
    check_refused(truestep("score", config, "--output", "r.jsonl"), "r.jsonl")
    check_refused(truestep("score", config, "--output", "out", "--loss.typ", "grpo"), "loss.type")
    assert not Path("out").exists()


def test_export_gives_a_model_that_transformers_reads(files: dict[str, Any]) -> None:
    truestep("train", write_config(Path("c.yaml"), **files))
    result = truestep("export", "run", "--output", "hf", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    assert "step-00000002" in result.output
    trained = read_weights(Path("run/checkpoints/step-00000002"))
    exported = AutoModelForCausalLM.from_pretrained("hf").state_dict()
    assert all((exported[name] == value).all() for name, value in trained.items())
    check_one_message(truestep("export", "run", "--output", "hf"), "hf exists already")
    check_one_message(truestep("export", "nowhere", "--output", "hf2"), "nowhere")
    assert not Path("hf2").exists()


def test_data_check(files: dict[str, Any], tiny_model: Model) -> None:
    write_lines(Path("bad.jsonl"), [{"id": "no input ids"}, {"input_ids": [1, 99], "prompt_length": 1}])
    result = truestep("data", "check", "r.jsonl", "bad.jsonl", "--model", tiny_model("llama"))
    assert result.exit_code == 0, result.output
    assert "12: 10 documents, 2 rejected" in result.output
    assert "bad.jsonl:2" in result.output
    check_one_message(truestep("data", "check", "missing.jsonl"), "missing.jsonl")
    check_one_message(truestep("data", "check", "r.jsonl", "--model", "nowhere"), "nowhere")
    zero = truestep("data", "check", "r.jsonl", "--temperature", "0")
    assert zero.exit_code == 2  # click's own, for an argument that cannot be
    assert "--temperature" in zero.stderr


def test_report_writes_a_page(files: dict[str, Any]) -> None:
    truestep("train", write_config(Path("c.yaml"), **files))
    result = truestep("report", "run")
    assert result.exit_code == 0, result.output
    assert "<html" in Path("run/report.html").read_text(encoding="utf-8")
    Path("nothing").mkdir()
    check_one_message(truestep("report", "nothing"), "nothing")


def test_a_demo_never_removes_what_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from truestep.tools.demo import run as demo

    Path("precious").mkdir()
    Path("precious/thesis.tex").write_text("years of work")
    with pytest.raises(TruestepError, match="precious"):
        demo.run(Path("precious"), 0, Console(file=io.StringIO()))
    assert Path("precious/thesis.tex").read_text() == "years of work"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_write_task", stop)
    for _ in range(2):  # its own, unfinished, it does remove
        with pytest.raises(KeyboardInterrupt):
            demo.run(Path("fresh"), 0, Console(file=io.StringIO()))
    assert Path("fresh/model/config.json").is_file()


def test_the_help_says_in_a_line_of_80_columns_what_each_command_is_for() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    for name in main.commands:
        assert len(re.findall(rf"^  {name} +[A-Z].*\.$", text, re.MULTILINE)) == 1, name
    assert "..." not in text.partition("Begin:")[2]


def test_an_unknown_command_is_answered_with_its_nearest() -> None:
    assert "no command 'trian': did you mean train?" in CliRunner().invoke(main, ["trian"]).stderr
    assert "No such command 'xyzzy'" in CliRunner().invoke(main, ["xyzzy"]).stderr


def test_the_shell_completes_after_a_mistyped_command() -> None:
    completed = CliRunner().invoke(
        main,
        env={"_TRUESTEP_COMPLETE": "bash_complete", "COMP_WORDS": "truestep trian --", "COMP_CWORD": "2"},
        prog_name="truestep",
    )
    assert completed.exception is None or isinstance(completed.exception, SystemExit), completed.exception
    assert "did you mean" not in completed.output
