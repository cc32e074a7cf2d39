"""docs/mistakes.md: each mistake of the page is made, and what is said is what the page says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from small_runs import file_config, said, sort_prompts, tokenised_model, write_lines
from tiny import label_positions, make_records
from truestep.commands.cli import main
from truestep.config.load import dump_config
from truestep.environments.rewards import RewardError, call, load_reward
from truestep.rollouts.advantages import GroupSizeError, check_group_sizes
from truestep.run.directory import RunDirectory

PAGE = Path(__file__).parents[1] / "docs" / "mistakes.md"
REWARDS = """
def score(prompt, completion, *, answer, **_): return 1.0
def trl(prompts, completions, **kwargs): return [0.0]
def verl(data_source, solution_str, ground_truth, extra_info=None): return 0.0
def bare(prompt, completion): return 0.0
def needy(prompt, completion, *, solution, **_): return 0.0
def parts(prompt, completion, **_): return {"right": "yes", "short": 0.5}
def verls_dict(prompt, completion, **_): return {"score": 1.0, "acc": 1.0}
def text(prompt, completion, **_): return "1.0"
def raises(prompt, completion, **_): return {}["nothing"]
async def waits(prompt, completion, **_): return 0.5
"""
FILES = "data: {path: r.jsonl, advantages: none}\nschedule: {docs_per_step: 4}\n"
SAMPLED = "data: {group_size: 4}\nschedule: {docs_per_step: 8, steps: 1}\n"


def rows() -> dict[str, str]:
    """The page's table: what is answered, by mistake."""
    cells = (re.fullmatch(r"\| (.+?) \| `(.+)` \|", line) for line in PAGE.read_text(encoding="utf-8").splitlines())
    return {found[1]: found[2] for found in cells if found}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "rewards.py").write_text(REWARDS)
    tokenised_model(tmp_path / "m", "llama")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text((tmp_path / "m" / "config.json").read_text())
    write_lines(tmp_path / "p.jsonl", sort_prompts(2))
    write_lines(tmp_path / "r.jsonl", [record | {"group_id": str(n // 4)} for n, record in enumerate(records())])
    yield tmp_path
    import sys

    sys.modules.pop("rewards", None)


def records(**options: Any) -> list[dict[str, Any]]:
    return make_records(5, documents=16, max_length=16, **options)


def typed(text: str) -> str:
    """Train with a configuration, and give the one message that it ends with."""
    Path("run.yaml").write_text(text + "logging: {console: false}\n")
    result = CliRunner().invoke(main, ["train", "run.yaml"])
    assert result.exit_code == 1, (result.output, result.exception)
    return result.stderr.replace("\n", " ")


def model(options: str = "") -> str:
    return f"model: {{path: m, dtype: float32{options}}}\n"


def reward(name: str) -> str:
    return typed(model() + SAMPLED + f"sampler: {{prompts: p.jsonl, reward: '{name}'}}\n")


def one_prompt_lacks_a_field() -> str:
    lines = [{"prompt": "1 + 1", "answer": "2"}] * 31 + [{"prompt": "1 + 2"}]
    write_lines(Path("some.jsonl"), lines)
    return typed(model() + SAMPLED + "sampler: {prompts: some.jsonl, reward: 'rewards:score'}\n")


def rated(name: str) -> str:
    with pytest.raises(RewardError) as caught:
        call(load_reward(f"rewards:{name}"), "p", "c", {"answer": "1"})
    return str(caught.value)


def larger_than_the_data() -> str:
    config = file_config(Path("m"), Path("r.jsonl"), Path("run"))
    return said(config.model_copy(update={"schedule": config.schedule.model_copy(update={"docs_per_step": 999})}))


def without_logprobs() -> str:
    labelled = [record for record in records() if label_positions(record)]  # a document without labels needs none
    write_lines(Path("r.jsonl"), [{key: record[key] for key in record if key != "logprobs"} for record in labelled])
    return typed(model() + FILES)


def two_runs() -> str:
    config = file_config(Path("m"), Path("r.jsonl"), Path("run"))
    held = RunDirectory(Path("run"))
    Path("run").mkdir()
    held.lock()
    try:
        return typed(dump_config(config).partition("logging:")[0])
    finally:
        held.unlock()


MADE: dict[str, Callable[[], str]] = {
    "an option is misspelled": lambda: typed(model() + "loss: {epsilon_lo: 0.1}\n"),
    "an option of another trainer": lambda: typed(model() + "loss: {beta: 0.04}\n"),
    "an option stands in the wrong section": lambda: typed(model() + "docs_per_step: 8\n"),
    "a number is text": lambda: typed(model() + "optimizer: {learning_rate: fast}\n"),
    "no model is named": lambda: typed(FILES),
    "the model is a name on the hub": lambda: typed("model: {path: Qwen/Qwen3-1.7B}\n" + FILES),
    "the model has no safetensors": lambda: typed("model: {path: empty}\n" + FILES),
    "the prompts are not there": lambda: typed(
        model() + SAMPLED + "sampler: {prompts: nowhere.jsonl, reward: 'rewards:score'}\n"
    ),
    "documents from two sources": lambda: typed(
        model()
        + "data: {path: r.jsonl, group_size: 4}\nschedule: {docs_per_step: 8, steps: 1}\n"
        + "sampler: {prompts: p.jsonl, reward: 'rewards:score'}\n"
    ),
    "no source of documents at all": lambda: typed(model()),
    "a step would cut a group in two": lambda: typed(
        model()
        + "data: {group_size: 4}\nschedule: {docs_per_step: 6, steps: 1}\n"
        + "sampler: {prompts: p.jsonl, reward: 'rewards:score'}\n"
    ),
    "a sampler without a group size": lambda: typed(
        model() + "schedule: {docs_per_step: 8, steps: 1}\nsampler: {prompts: p.jsonl, reward: 'rewards:score'}\n"
    ),
    "a group size that the records do not have": lambda: typed(
        model() + "data: {path: r.jsonl, group_size: 3}\nschedule: {docs_per_step: 4}\n"
    ),
    "a step larger than the data": larger_than_the_data,
    "the reward's module is misspelled": lambda: reward("rewads:score"),
    "the reward's function is not there": lambda: reward("rewards:scroe"),
    "a reward with TRL's signature": lambda: reward("rewards:trl"),
    "a reward with verl's signature": lambda: reward("rewards:verl"),
    "a reward that does not take the prompt's fields": lambda: reward("rewards:bare"),
    "a reward that needs a field the prompts lack": lambda: reward("rewards:needy"),
    "a prompt that lacks a field of the others": one_prompt_lacks_a_field,
    "a reward that returns verl's dict": lambda: rated("verls_dict"),
    "a reward with a part that is text": lambda: rated("parts"),
    "a reward that returns text": lambda: rated("text"),
    "a reward that raises": lambda: rated("raises"),
    "records without log-probs": without_logprobs,
    "a completion longer than a micro-batch": lambda: typed(
        model()
        + "data: {group_size: 4, tokens_per_microbatch: 8}\nschedule: {docs_per_step: 8, steps: 1}\n"
        + "sampler: {prompts: p.jsonl, reward: 'rewards:score'}\n"
    ),
    "two runs in one directory": two_runs,
}


def test_the_page_has_every_mistake_that_is_made_here() -> None:
    assert list(rows()) == list(MADE)
    assert len(MADE) >= 20


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("mistake", MADE)
def test_a_mistake_is_answered_as_the_page_says(mistake: str) -> None:
    pattern = ".*".join(map(re.escape, rows()[mistake].split("…")))
    answer = MADE[mistake]()
    assert re.search(pattern, answer, re.DOTALL), answer


def test_a_coroutine_is_awaited(folder: Path) -> None:
    assert call(load_reward("rewards:waits"), "p", "c", {"answer": "1"}) == 0.5


@pytest.mark.usefixtures("folder")
def test_data_check_refuses_the_group_size_that_train_refuses() -> None:
    for size, code in (("3", 1), ("4", 0)):
        result = CliRunner().invoke(main, ["data", "check", "r.jsonl", "--group-size", size])
        assert result.exit_code == code, result.output
        assert ("data.group_size: 3 fits none of the 4 groups" in result.stderr) == (code == 1)


@pytest.mark.usefixtures("folder")
def test_a_wrong_group_size_is_refused_in_files_that_are_tables_too() -> None:
    data = "data: {path: r.jsonl, group_size: 3, cache_directory: tables}\nschedule: {docs_per_step: 4}\n"
    assert "data.group_size: 3 fits none of the 4 groups: there are 4 of 4 records" in typed(model() + data)


@pytest.mark.parametrize(
    ("members", "size", "said"),
    [
        ([4, 4, 4], 4, None),
        ([8, 8], 4, None),  # a later record of the same name opens a new group
        ([4, 3, 1], 4, None),  # some are not complete
        ([3], 4, None),  # one says nothing
        ([], 4, None),
        ([3, 3, 3], None, None),
        ([3, 5, 5], 4, "there are 2 of 5, 1 of 3 records. Write data.group_size: 5"),
        ([1, 2, 3, 5, 6, 7], 4, "and 3 more sizes"),
    ],
)
def test_a_group_size_is_refused_that_no_group_has(members: list[int], size: int | None, said: str | None) -> None:
    if said is None:
        check_group_sizes(members, size)
        return
    with pytest.raises(GroupSizeError, match=re.escape(said)):
        check_group_sizes(members, size)
