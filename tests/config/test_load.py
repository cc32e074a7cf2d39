"""Files and overrides become a Config, or an error that names the option, the place and the way out."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from config.loading import load, message
from truestep.config.describe import list_options
from truestep.config.load import ConfigError, dump_config, load_config
from truestep.config.losses import GspoLoss, ReinforceLoss
from truestep.config.schema import Config
from truestep.config.section import Section

MODEL = "model: {path: m}\n"

# Every section but data.source, as a user would write it.
EXAMPLE = """\
model:
  path: models/qwen3-1.7b            # a HF directory
  dtype: bfloat16                    # of the compute; weights and optimizer state stay float32
  head: {fp32_lm_head: true, logits_chunk_size: auto}
loss: {type: gspo, epsilon_low: 0.003, epsilon_high: 0.004, normalize_by: document_means, metrics: basic}
data:
  advantages: group_normalized
  group_size: 8
  tokens_per_microbatch: 16384
schedule: {docs_per_step: 256, overshoot: carry, breadth_first_micro_batches: 1, steps: 200}
sampler: {type: in_process, prompts: prompts.jsonl, reward: my_package.rewards:score, temperature: 1.0,
          max_new_tokens: 512}
evaluation: {prompts: held_out.jsonl, every: 10}
parallel: {data_shard: -1, data_replicate: 1, tensor: 1, context: 1, pipeline: 1}
optimizer: {type: adamw, learning_rate: 1.0e-6, gradient_clip: 0.3, weight_decay: 0.0}
checkpoint: {directory: runs/example, every: 20, keep: 3}
logging: {jsonl: true, wandb: null, tensorboard: null}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that messages begin with `run.yaml`, whatever the machine


# What loads


def test_an_example_of_every_section_loads() -> None:
    config = load(EXAMPLE)
    assert isinstance(config.loss, GspoLoss)
    assert config.loss.epsilon_low == 0.003
    assert config.sampler is not None
    assert config.sampler.reward == "my_package.rewards:score"
    assert config.checkpoint.directory == "runs/example"


def test_a_null_directory_is_named_after_the_file_and_a_byte_order_mark_is_no_part_of_it() -> None:
    assert load("\ufeff" + MODEL).checkpoint.directory == "runs/run"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("1.0e-6", 1e-6), ("2", 2.0), (".5", 0.5), ("1_0.5", 10.5), ("0x10", 16.0)],
)
def test_numbers(text: str, value: float) -> None:
    in_file, override = f"{MODEL}optimizer: {{learning_rate: {text}}}", ("--optimizer.learning_rate", text)
    for rate in (load(in_file).optimizer.learning_rate, load(MODEL, *override).optimizer.learning_rate):
        assert rate == value
        assert isinstance(rate, float)


def test_a_whole_number_in_scientific_notation_and_a_leading_zero_are_whole_numbers() -> None:
    config = load(MODEL + "seed: 010\ndata: {tokens_per_microbatch: 1e4}")
    assert (config.seed, config.data.tokens_per_microbatch) == (10, 10_000)


def test_dates_and_clock_times_are_text() -> None:
    config = load(MODEL + "data: {path: [2026-01-31, 1:30]}")
    assert config.data.path == ["2026-01-31", "1:30"]


def test_anchors_and_merge_keys() -> None:
    config = load(
        MODEL + "logging: {tensorboard: &name board}\ncheckpoint: {directory: *name}\n"
        "schedule: {<<: [{steps: 3}, {steps: 4, docs_per_step: 5}], docs_per_step: 6}\n"
    )
    assert config.checkpoint.directory == "board"
    assert (config.schedule.steps, config.schedule.docs_per_step) == (3, 6)


def test_an_error_behind_a_merge_key_points_at_the_line_of_the_option() -> None:
    text = MODEL + "schedule:\n  <<: [{\n   steps: 0}]\n"
    assert message(text) == "run.yaml:4: schedule.steps must be int >= 1 or null, not 0"


# Overrides


def test_overrides_of_every_form() -> None:
    config = load(
        MODEL + "loss: {type: grpo}\ndata: {path: x}\n",
        *("--model.head.fp32-lm-head", "true", "--loss.type", "gspo", "--data.path", "[a, b]", "--seed", "7"),
        *("--parallel.data_shard", "-1", "--schedule.steps=null", "--data.shuffle", "--loss.dual-clip=2.5"),
        "--deterministic",
    )
    assert config.model.head.fp32_lm_head
    assert config.data.shuffle
    assert config.deterministic
    assert isinstance(config.loss, GspoLoss)
    assert config.loss.dual_clip == 2.5
    assert config.data.path == ["a", "b"]
    assert config.seed == 7
    assert config.parallel.data_shard == -1


@pytest.mark.parametrize("text", ["*.jsonl", "12", "a: b", "2026-01-31", "no", "# x", "@x", "a\\b", "-x", "~/a", "x=y"])
def test_text_on_the_command_line_needs_no_second_quotes(text: str) -> None:
    assert load(MODEL, "--data.path", text).data.path == text
    assert load(MODEL, f"--data.path={text}").data.path == text


def test_quotes_and_null_still_mean_what_they_mean_in_yaml() -> None:
    assert load(MODEL, "--data.path", "'null'").data.path == "null"
    assert load(MODEL + "data: {path: a}", "--data.path", "null").data.path is None


def test_every_option_that_can_be_off_takes_it_without_quotes() -> None:
    """YAML reads an unquoted `off` as false, in a file and on the command line."""
    sections, found = list(Section.__subclasses__()), []
    for section in sections:
        sections += section.__subclasses__()
        for name, field in section.model_fields.items():
            if "'off'" in str(field.annotation):
                found.append(name)
                parsed = TypeAdapter(Annotated[field.annotation, *field.metadata]).validate_python(False)  # type: ignore[name-defined]
                assert parsed == "off", f"{section.__name__}.{name}"
    assert {"share_prefixes", "reward_isolation", "replay"} <= set(found)
    text = MODEL + "data: {path: x, share_prefixes: off}\n"
    assert load(text).data.share_prefixes == "off"
    assert load(MODEL + "data: {path: x}\n", "--data.share_prefixes", "off").data.share_prefixes == "off"
    assert (
        load(EXAMPLE.replace("max_new_tokens", "reward_isolation: off, max_new_tokens")).sampler.reward_isolation
        == "off"
    )


def test_whole_sections_can_be_replaced_or_removed() -> None:
    assert load(EXAMPLE, "--evaluation", "null").evaluation is None
    config = load(EXAMPLE, "--sampler", "null", "--evaluation", "null", "--data.path", "a")
    assert config.sampler is None
    config = load(MODEL + "loss: {type: gspo, dual_clip: 3}", "--loss", "{type: reinforce, ratio_cap: 2}")
    assert config.loss == ReinforceLoss(type="reinforce", ratio_cap=2.0)


def test_an_override_can_make_a_section_that_the_file_leaves_out_or_null() -> None:
    for text in (MODEL, MODEL + "logging: {wandb: null}\n", MODEL + "logging:\n"):
        wandb = load(text, "--logging.wandb.project", "p").logging.wandb
        assert wandb is not None
        assert wandb.project == "p"
    assert load(" seed: 1", "--model.path", "m").model.path == "m"


WRONG_OVERRIDES = """\
--seed 1 --seed=2                    => --seed is given twice: leave one of the two out
--loss.dual-clip=2 --loss.dual_clip 2 => --loss.dual_clip is given twice: leave one of the two out
--loss {} --loss.type gspo           => --loss and --loss.type are both given: one is a part of the other. Leave one out
--loss.type gspo --loss {}           => --loss.type and --loss are both given: one is a part of the other. Leave one out
x                                    => 'x' is not an override: write --section.option value
--data.path a b                      => 'b' is not an override: write --section.option value
--                                   => '--' is not an override: write --section.option value
--a..b 1                             => '--a..b' is not an override: write --section.option value
--schedule.steps --deterministic     => --schedule.steps needs a value: int >= 1 or null
--schedule.steps=                    => --schedule.steps needs a value: int >= 1 or null
--data.path                          => --data.path needs a value: text, list of text or null
--loss                               => --loss needs a value
--seed many                          => seed must be int >= 0, not 'many'
--seed -1                            => seed must be int >= 0, not -1
--seed.more 1                        => seed must be int >= 0, not a section of options
--deterministic 1                    => deterministic must be true or false, not 1
--seed 'a: [b'                       => --seed 'a: [b': not valid YAML: a [ is not closed before this line
--sampler '{type: a, type: b}'       => sampler.type is already given at command line
--loss.epsilon-lo 1                  => loss.epsilon_lo is unknown: did you mean loss.epsilon_low?
--deterministc                       => deterministc is unknown: did you mean deterministic?
--sampler.batch_size x               => sampler.batch_size must be int >= 1 or null, not 'x'
--logging '{wandb: {mode: offline}}' => logging.wandb.project is required"""


@pytest.mark.parametrize("case", WRONG_OVERRIDES.splitlines())
def test_wrong_overrides(case: str) -> None:
    overrides, _, expected = case.partition(" => ")
    assert message(MODEL, *shlex.split(overrides)) == f"command line: {expected}"


def test_an_override_inside_what_is_no_section_names_both_places() -> None:
    expected = "command line: --loss.type cannot be set: run.yaml:2: loss is 'gspo', not a section"
    assert message(MODEL + "loss: gspo", "--loss.type", "grpo") == expected


# Errors of the file

FILE_ERRORS = [
    ("", "run.yaml: the file is empty: model.path is required"),
    ("# nothing\n", "run.yaml: the file is empty: model.path is required"),
    ("- a\n", "run.yaml:1: the file must be sections of options (model:, loss:), not ['a']"),
    ("words", "run.yaml:1: the file must be sections of options (model:, loss:), not 'words'"),
    ("seed: 1", "run.yaml: model.path is required"),
    ("\nmodel:\n  dtype: float32", "run.yaml:2: model.path is required"),
    ("model:\n", "run.yaml:1: model must be a section of options, not null"),
    ("seed: 1\n&a b", "run.yaml:2: not valid YAML: a colon is missing, or the line belongs to no option"),
    (
        "a: b: c\n",
        "run.yaml:1: not valid YAML: a colon too many, or missing in the line before, or wrong indentation",
    ),
    (
        "a:\n  b: 1\n   c: 2\n",
        "run.yaml:3: not valid YAML: a colon too many, or missing in the line before, or wrong indentation",
    ),
    (
        "a:\n   b: 1\n  c: 2\n",
        "run.yaml:3: not valid YAML: this line's indentation is not that of the lines it belongs to",
    ),
    ("a:\n\tb: 1\n", "run.yaml:2: not valid YAML: a tab begins the line or a value: use spaces"),
    ("a: {b: 1\nc: 2\n", "run.yaml:2: not valid YAML: a { is not closed before this line"),
    ("a: [1, 2\nc: 2\n", "run.yaml:2: not valid YAML: a [ is not closed before this line"),
    ("a: 'b\nc: 2\n", "run.yaml:3: not valid YAML: a quotation mark is not closed"),
    ("a: @b\n", "run.yaml:1: not valid YAML: text that begins with @ needs quotes"),
    ("a: *b\n", "run.yaml:1: not valid YAML: text that begins with * needs quotes"),
    (MODEL + "\nloss {type: grpo}\n", "run.yaml:3: 'loss {type' is unknown: a colon is missing after loss"),
    ("\x00", "run.yaml:1: not valid YAML: unacceptable character #x0000: special characters are not allowed"),
    ("[" * 2000, "run.yaml: not valid YAML: nested too deeply"),
    (MODEL + "\nmodel: {path: n}\n", "run.yaml:3: model is already given at run.yaml:1"),
    (MODEL + "loss:\n  z_loss: 1\n  z_loss: 1\n", "run.yaml:4: loss.z_loss is already given at run.yaml:3"),
    (MODEL + "? [a]\n: 1\n", "run.yaml:2: an option's name must be text, not a list or a mapping"),
    (MODEL + "a: &x [*x]\n", "run.yaml:2: a contains itself"),
    (MODEL + "a: &x {<<: *x}\n", "run.yaml:2: a contains itself"),
    (MODEL + "loss: {<<: 3}", "run.yaml:2: << takes a mapping, or a list of mappings"),
    (MODEL + "seed: !!binary abcd", "run.yaml:2: seed: cannot read 'abcd' as binary"),
    (MODEL + "seed: !mine {a: 1}", "run.yaml:2: the tag '!mine' is not supported"),
    (MODEL + f"seed: {10**30}", f"run.yaml:2: seed: cannot read '{10**30}' as int"),
]


@pytest.mark.parametrize(("text", "expected"), FILE_ERRORS)
def test_wrong_files(text: str, expected: str) -> None:
    assert message(text) == expected


def test_aliases_of_aliases_do_not_fill_the_memory() -> None:
    lines = ["a0: &a0 [1, 1]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    assert message("\n".join(lines)).endswith("is too large, its aliases written out")


def test_files_that_cannot_be_read() -> None:
    Path("latin.yaml").write_bytes(b"\xff\xfea: 1")
    expected = {
        "absent.yaml": "absent.yaml: cannot be read: No such file or directory",
        ".": ".: cannot be read: Is a directory",
        "latin.yaml": "latin.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 0:",
    }
    for name, text in expected.items():
        with pytest.raises(ConfigError) as caught:
            load_config(Path(name))
        assert str(caught.value).startswith(text)


# Round trip


@pytest.mark.parametrize("loss", ["grpo", "gspo", "reinforce", "cispo", "cross_entropy"])
def test_a_dumped_config_loads_back(loss: str) -> None:
    config = load(f"{MODEL}loss: {{type: {loss}}}\noptimizer: {{learning_rate: 1e-6}}")
    assert load(dump_config(config)) == config


def test_the_example_survives_a_round_trip_and_other_yaml_readers() -> None:
    config = load(EXAMPLE)
    assert load(dump_config(config)) == config
    assert yaml.safe_load(dump_config(config)) == config.model_dump()


@given(path=st.text(), paths=st.lists(st.text()), rate=st.floats(0, 1e30), seed=st.integers(0, 2**63 - 1))
@settings(deadline=None)
def test_any_text_and_number_survives_a_round_trip(path: str, paths: list[str], rate: float, seed: int) -> None:
    sections = {"model": {"path": path}, "data": {"path": paths}, "checkpoint": {"directory": path}}
    config = Config.model_validate({**sections, "optimizer": {"learning_rate": rate}, "seed": seed})
    with _file(dump_config(config).encode()) as file:
        assert load_config(file) == config


# Anything at all gives a Config or a ConfigError


@contextmanager
def _file(content: bytes) -> Iterator[Path]:
    """A file in a directory of its own, for tests that hypothesis runs many times."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.yaml"
        path.write_bytes(content)
        yield path


_NAMES = [option.name for option in list_options()] + ["loss", "sampler", "model", "loss.x", "x", "<<", "a.b.c", ""]
_WORDS = st.sampled_from(["grpo", "gspo", "reinforce", "auto", "constant", "float32", "carry", "keep"])
_SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), _WORDS)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
_YAML_WORDS = """model: loss: path type gspo &a *a << !!int !!float !!map ! --- ... 1e-6 .inf 0x 010 \\UFFFFFFFF \\x
{ } [ ] - ? : , | > ' " # % @ `"""
_YAML_PIECES = st.sampled_from([*_YAML_WORDS.split(), "\n", "\t"])


@st.composite
def _near_configs(draw: st.DrawFn) -> dict[str, object]:
    """Real names with arbitrary values, nested as the file nests them."""
    data: dict[str, object] = {"model": {"path": "m"}}
    for name in draw(st.lists(st.sampled_from(_NAMES), max_size=4)):
        section, *rest = name.split(".")
        value = draw(_VALUES)
        for part in reversed(rest):
            value = {part: value}
        data[section] = value
    return data


def _tokens() -> st.SearchStrategy[list[str]]:
    flags = st.sampled_from(_NAMES).map("--{}".format)
    values = _VALUES.map(json.dumps) | st.text(st.characters(), max_size=8)
    joined = st.tuples(flags, values).map("=".join)
    return st.lists(flags | values | joined | st.text(st.characters(), max_size=8), max_size=5)


def _load_or_refuse(content: bytes, tokens: list[str]) -> None:
    refused = ""
    with _file(content) as file:
        try:
            assert isinstance(load_config(file, tokens), Config)
        except ConfigError as error:
            refused = str(error) or "an empty message: pydantic"
    given = content.decode(errors="replace") + " ".join(tokens)  # a message repeats what it refuses
    for leaked in ("pydantic", "Value error", "Input should", "Extra inputs"):
        assert leaked not in refused or leaked in given


_CONTENTS = {
    "bytes": st.binary(),
    "text": st.text().map(str.encode),
    "pieces": st.lists(_YAML_PIECES).map(" ".join).map(str.encode),
    "near": _near_configs().map(lambda data: yaml.safe_dump(data).encode()),
}


@pytest.mark.parametrize("contents", _CONTENTS.values(), ids=_CONTENTS)
def test_garbage_in_the_file(contents: st.SearchStrategy[bytes]) -> None:
    @given(content=contents, tokens=_tokens())
    @settings(deadline=None, max_examples=80)
    def check(content: bytes, tokens: list[str]) -> None:
        _load_or_refuse(content, tokens)

    check()


@given(tokens=_tokens())
@settings(deadline=None, max_examples=120)
def test_garbage_on_the_command_line(tokens: list[str]) -> None:
    _load_or_refuse(MODEL.encode(), tokens)
