"""Every option is in the help and in the reference; a wrong name or value is told what would be right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel
from rich.console import Console

from truestep.config import losses, schema
from truestep.config import sections as section_models
from truestep.config.describe import (
    ALL,
    Option,
    explain_unknown,
    explain_wrong,
    list_options,
    locate,
    markdown_everyday,
    markdown_reference,
    options,
    render_options,
    sections,
)
from truestep.config.load import ConfigError, load_config
from truestep.config.schema import EVERYDAY

REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"


MODEL = "model: {path: m}\n"


def message(text: str, directory: Path, *overrides: str) -> str:
    file = directory / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value).replace(f"{directory}/", "")


def _rendered(width: int) -> str:
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render_options(ALL))
    return capture.get()


def test_every_option_says_what_it_is() -> None:
    for option in list_options():
        assert all([option.type, option.default, option.meaning.strip()]), option.name
    for section in sections().values():
        assert section.meaning, section.name


def test_names_are_unique() -> None:
    names = [option.name for option in list_options()]
    assert len(names) == len(set(names))


def test_no_field_of_the_schema_is_left_out() -> None:
    models = {
        item
        for item in (schema.Config, *vars(section_models).values(), *vars(losses).values())
        if isinstance(item, type) and issubclass(item, BaseModel)
    }
    # A user names the entries of these options, so their own meanings have what each entry is made of.
    within = {
        "data.fields": section_models.FieldConfig,
        "evaluation.sets": section_models.EvaluationSet,
        "sampler.prompts": section_models.DatasetPrompts,
    }
    for name, model in within.items():
        assert set(model.model_fields) <= set(re.findall(r"\w+", options()[name].meaning)), name
    fields = {name for model in models - set(within.values()) for name in model.model_fields}
    listed = {part for name in [*options(), *sections()] for part in name.split(".")}
    assert fields == listed


@pytest.mark.parametrize(
    "expected",
    [
        Option("seed", "int >= 0", "0", "The seed of sampling, of shuffling and of the order of prompts."),
        Option(
            "model.path",
            "text",
            "required",
            "A Hugging Face causal LM directory (safetensors, config.json, tokenizer).",
        ),
        Option(
            "loss.dual_clip",
            "float > 1 | null",
            "null",
            "Dual clipping: the largest ratio, above 1, for labels with negative advantage. Their loss is at most "
            "-dual_clip x advantage. `null`: none.",
            ("grpo", "gspo"),
        ),
    ],
)
def test_an_option_is_described_whole(expected: Option) -> None:
    assert options()[expected.name] == expected


@pytest.mark.parametrize(
    ("name", "type_text", "default"),
    [
        ("model.head.logits_chunk_size", "int >= 1 | auto", "auto"),
        ("loss.type", "grpo | gspo | reinforce | cispo | sapo | gmpo | dppo | cross_entropy | custom", "grpo"),
        (
            "loss.normalize_by",
            "labels | documents | document_means | constant",
            "labels (gspo: document_means, gmpo: document_means)",
        ),
        ("loss.epsilon_low", "float >= 0", "0.2 (gspo: 0.0003, cispo: 1.0, gmpo: 0.4)"),
        ("data.path", "text | list of text | null", "null"),
        ("parallel.data_shard", "-1 | int >= 1", "-1"),
        ("optimizer.learning_rate", "float >= 0 and <= 1e+30", "1e-6"),
        ("optimizer.beta1", "float >= 0 and < 1", "0.9"),
        ("sampler.top_p", "float > 0 and <= 1", "1.0"),
        ("logging.wandb.project", "text", "required"),
        ("deterministic", "true | false", "false"),
    ],
)
def test_types_and_defaults(name: str, type_text: str, default: str) -> None:
    assert (options()[name].type, options()[name].default) == (type_text, default)


def test_a_field_redeclared_without_a_docstring_means_what_its_parent_says() -> None:
    assert losses.GspoLoss.model_fields["epsilon_low"].description is None  # or this test tests nothing
    meaning = "The ratio is clipped below 1 - epsilon_low (gmpo: the log-ratio below -epsilon_low)."
    assert options()["loss.epsilon_low"].meaning == meaning


def test_each_loss_has_its_own_meaning() -> None:
    lines = options()["loss.type"].meaning.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "grpo",
        "gspo",
        "reinforce",
        "cispo",
        "sapo",
        "gmpo",
        "dppo",
        "cross_entropy",
        "custom",
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_has_every_option_and_fits(width: int) -> None:
    text = _rendered(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(text.split())
    for option in list_options():
        heading = next(line for line in lines if line.startswith(f"  --{option.name} "))
        assert heading.split()[0] == f"--{option.name}"
        default = "[required]" if option.default == "required" else f"[default: {option.default}]"
        type_and_default = f"--{option.name} {option.type} {default}"
        assert type_and_default in words, option.name
        assert " ".join(option.meaning.split()) in words, option.name


def test_the_reference_is_what_the_code_says() -> None:
    told = "run `python -m truestep.config.describe > docs/configuration.md`"
    assert REFERENCE.read_text(encoding="utf-8") == markdown_reference(), told


def test_the_page_of_what_matters_is_what_the_code_says() -> None:
    told = "run `python -m truestep.config.describe everyday > docs/options.md`"
    assert REFERENCE.with_name("options.md").read_text(encoding="utf-8") == markdown_everyday(), told


def test_about_twenty_options_matter() -> None:
    assert 18 <= len(set(EVERYDAY)) == len(EVERYDAY) <= 24
    assert set(EVERYDAY) <= {option.name for option in list_options()}


def test_the_reference_has_a_row_of_four_cells_for_every_option() -> None:
    rows = [line for line in markdown_reference().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows]
    assert len(rows) == len(list_options())
    for row in rows:
        assert row.replace("\\|", "").count("|") == 5, row


def test_locations_lose_what_pydantic_adds() -> None:
    assert locate(("loss", "grpo", "ratio_cap")) == (("loss", "ratio_cap"), "grpo")
    assert locate(("loss", "gspo")) == (("loss",), "gspo")
    assert locate(("data", "path", "list[str]", 0)) == (("data", "path"), "")
    assert locate(("model", "head", "logits_chunk_size", "literal['auto']")) == (
        ("model", "head", "logits_chunk_size"),
        "",
    )
    assert locate(()) == ((), "")


def test_a_near_name_of_the_same_section_comes_before_the_same_name_of_another() -> None:
    assert explain_unknown(("loss", "epsilon"), "grpo").startswith("did you mean loss.epsilon_")
    assert explain_unknown(("data", "epsilon")) == "option 'epsilon' is in section optimizer: optimizer.epsilon"


# What a wrong name or value is told

OPTION_ERRORS = [
    # unknown names: the same section, then anywhere
    ("loss:\n  epsilon_lwo: 1", "3: loss.epsilon_lwo is unknown: did you mean loss.epsilon_low?"),
    (
        "loss: {docs_per_step: 3}",
        "2: loss.docs_per_step is unknown: option 'docs_per_step' is in section schedule: schedule.docs_per_step",
    ),
    (
        "data: {batch_size: 3}",
        "2: data.batch_size is unknown: option 'batch_size' is in section sampler and section evaluation: "
        "sampler.batch_size, evaluation.batch_size",
    ),
    ("data: {seed: 3}", "2: data.seed is unknown: option 'seed' is in no section: seed"),
    ("wandb: {}", "2: wandb is unknown: option 'wandb' is in section logging: logging.wandb"),
    ("logit_chunk_size: 3", "2: logit_chunk_size is unknown: did you mean model.head.logits_chunk_size?"),
    ("sched: {}", "2: sched is unknown: did you mean schedule?"),
    (
        "checkpoint: {qqqq: 3}",
        "2: checkpoint.qqqq is unknown: section checkpoint has directory, every, keep, keep_best, hugging_face_every, "
        "in_memory_every, in_memory_gigabytes, grace, lock",
    ),
    ("loss.type: gspo", "2: 'loss.type' is unknown: in a file it is type under loss"),
    (
        "loss: {type: ppo}",
        "2: loss.type must be grpo, gspo, reinforce, cispo, sapo, gmpo, dppo, cross_entropy or custom, not 'ppo'; "
        "did you mean grpo?",
    ),
    ("loss: {type: reinforce, ratio_capp: 1}", "2: loss.ratio_capp is unknown: did you mean loss.ratio_cap?"),
    ("loss: {type: grpo, ratio_capp: 1}", "2: loss.ratio_capp is unknown: did you mean loss.ratio_cap?"),
    # options of another variant
    (
        "optimizer: {type: custom, function: m:f, offload: states}",
        "2: optimizer.offload is not an option of optimizer.type: custom (set at run.yaml:2); adamw, adamw_8bit and "
        "muon have it",
    ),
    ("loss: {ratio_cap: 2}", "2: loss.ratio_cap is not an option of loss.type: grpo (the default); reinforce has it"),
    (
        "loss:\n  type: reinforce\n  epsilon_low: 1",
        "4: loss.epsilon_low is not an option of loss.type: reinforce (set at run.yaml:3); grpo, gspo, cispo and gmpo "
        "have it",
    ),
    # values
    (
        "loss:\n  type: gsop",
        "3: loss.type must be grpo, gspo, reinforce, cispo, sapo, gmpo, dppo, cross_entropy or custom, not 'gsop'; did "
        "you mean gspo?",
    ),
    (
        "loss: {type: [a]}",
        "2: loss.type must be grpo, gspo, reinforce, cispo, sapo, gmpo, dppo, cross_entropy or custom, not ['a']",
    ),
    ("loss: gspo", "2: loss must be a section of options, not 'gspo'"),
    ("loss: {type: gspo, dual_clip: 1}", "2: loss.dual_clip must be float > 1 or null, not 1"),
    ("logging: {wandb: no}", "2: logging.wandb must be a section of options or null, not false"),
    ("sampler: {type: sever}", "2: sampler.type must be in_process or server, not 'sever'; did you mean server?"),
    ("sampler: {type: server, start: {}}", "2: sampler.start.environment is required"),
    ("sampler: {type: server, urls: []}", "2: sampler.urls must be list of text or null, not []"),
    (
        "sampler: {top_p: 0.9, type: server}",
        "2: sampler.top_p is not an option of sampler.type: server (set at run.yaml:2); in_process has it",
    ),
    (
        "sampler: {max_staleness: 8}",
        "2: sampler.max_staleness is not an option of sampler.type: in_process (the default); server has it",
    ),
    ("seed: true", "2: seed must be int >= 0, not true"),
    ("seed: 1.5", "2: seed must be int >= 0, not 1.5"),
    ("deterministic: 'true'", "2: deterministic must be true or false, not 'true'; did you mean true?"),
    ("data: {tokens_per_microbatch: '1'}", "2: data.tokens_per_microbatch must be int >= 1, not '1'"),
    ("data: {path: 12}", "2: data.path must be text, list of text or null, not 12; put it in quotes"),
    ("data: {path: [1, a]}", "2: data.path must be text, list of text or null, not [1, 'a']"),
    ("data: {path: [[1], {}]}", "2: data.path must be text, list of text or null, not a list"),
    ("model2: 1\nparallel: {tensor: 0}", "3: parallel.tensor must be int >= 1, not 0"),
    ("optimizer: {beta1: 1.0}", "2: optimizer.beta1 must be float >= 0 and < 1, not 1.0"),
    ("optimizer: {epsilon: .inf}", "2: optimizer.epsilon must be float > 0, not inf"),
    ("optimizer: {epsilon: .nan}", "2: optimizer.epsilon must be float > 0, not nan"),
    (f"seed: {'x' * 100}", f"2: seed must be int >= 0, not '{'x' * 56}..."),
]


@pytest.mark.parametrize(("text", "expected"), OPTION_ERRORS)
def test_wrong_options(text: str, expected: str, tmp_path: Path) -> None:
    assert f"run.yaml:{expected}" in message(MODEL + text, tmp_path).splitlines()


def test_alternatives_of_a_type_make_one_error(tmp_path: Path) -> None:
    expected = "run.yaml:1: model.head.logits_chunk_size must be int >= 1 or auto, not 0"
    assert message("model: {path: m, head: {logits_chunk_size: 0}}", tmp_path) == expected


def test_several_errors_are_a_line_each(tmp_path: Path) -> None:
    assert message("seed: a\nmodel: {dtype: int8, path: m}\n", tmp_path, "--loss.z_loss=-1").splitlines() == [
        "run.yaml:2: model.dtype must be float32 or bfloat16, not 'int8'",
        "command line: loss.z_loss must be float >= 0, not -1",
        "run.yaml:1: seed must be int >= 0, not 'a'",
    ]


@pytest.mark.parametrize(("given", "meant"), [("fp32", "float32"), ("bf16", "bfloat16"), ("float16", "bfloat16")])
def test_a_value_of_another_program_is_answered_with_ours(given: str, meant: str, tmp_path: Path) -> None:
    expected = f"run.yaml:1: model.dtype must be float32 or bfloat16, not '{given}'; did you mean {meant}?"
    assert message(f"model: {{path: m, dtype: {given}}}", tmp_path) == expected


def test_an_override_of_the_type_leaves_no_option_of_the_old_type_behind(tmp_path: Path) -> None:
    text = MODEL + "loss:\n  type: grpo\n  epsilon_low: 0.1\n  dual_clip: 3\n"
    by = "is not an option of loss.type: reinforce (from the command line);"
    assert message(text, tmp_path, "--loss.type", "reinforce").splitlines() == [
        f"run.yaml:4: loss.epsilon_low {by} grpo, gspo, cispo and gmpo have it",
        f"run.yaml:5: loss.dual_clip {by} grpo and gspo have it",
    ]


def test_importing_the_configuration_does_not_import_torch() -> None:
    modules = "truestep.config.load, truestep.config.describe, truestep.config.schema, truestep.config.sections"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_value_with_two_letters_swapped_is_answered_with_the_one_that_was_meant() -> None:
    assert explain_wrong("loss.type", "gpro").endswith("not 'gpro'; did you mean grpo?")
