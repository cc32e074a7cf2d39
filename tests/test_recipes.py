"""examples/recipes: what their rewards and tools say to right and wrong answers, and that each recipe runs as typed."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pages import ROOT
from rollouts.chat_models import make_chat_model
from truestep import Answer, Environment, ToolCall
from truestep.config.load import load_config
from truestep.environments.episodes.conversation import Conversation
from truestep.environments.episodes.environment import tools_of

sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
try:
    import recipe_beside_trl
    import recipe_task
    from examples.recipes import calculator, prepare, retrieval, structured
    from recipes import commands_of, curve_of, table
finally:
    del sys.path[:2]

RECIPES = ROOT / "examples" / "recipes"
PAGE = (RECIPES / "README.md").read_text(encoding="utf-8")
Row = dict[str, Any]


def begin(kind: type[Environment], row: Row) -> Environment:
    environment = kind()
    environment.row = row
    return environment


def call(environment: Environment, name: str, **arguments: Any) -> str:
    said = environment.step(Answer("", (ToolCall(name, arguments),)))
    (message,) = asyncio.run(said)
    assert message["role"] == "tool"
    return str(message["content"])


def held_out(kind: type[Environment]) -> list[Row]:
    return [dict(row) for row in kind.rows({}, True) or ()]


def trained_on(kind: type[Environment]) -> list[Row]:
    return [dict(row) for row in kind.rows({}, False) or ()]


# The calculator


def test_answers_of_the_calculator_are_those_of_python() -> None:
    for row in held_out(calculator.Calculator) + trained_on(calculator.Calculator)[:300]:
        expression = row["prompt"][0]["content"].removeprefix("What is ").removesuffix("?")
        assert row["answer"] == str(eval(expression, {"__builtins__": {}}))
        environment = begin(calculator.Calculator, row)
        for operation, value in row["operations"]:
            assert call(environment, "calculate", expression=operation) == value == str(eval(operation))
        assert environment.step(Answer(f" {row['answer']}\n")) == 1.0
        for wrong in (
            "",
            str(int(row["answer"]) + 1),
            f"It is {row['answer']}",
            f"-{row['answer']}",
            f"{row['answer']}0",
        ):
            assert environment.step(Answer(wrong)) == 0.0


@pytest.mark.parametrize(
    "expression", ["1 + 2 * 3", "(1 + 2)", "1 / 2", "", "9" * 40 + " * 2", "x + 1", 7, ["1 + 1"], None]
)
def test_the_calculator_refuses_more_than_one_operation_and_goes_on(expression: Any) -> None:
    environment = begin(calculator.Calculator, {"answer": "3"})
    assert call(environment, "calculate", expression=expression).startswith("error: expected one operation")
    assert call(environment, "calculate", expression="1 + 2") == "3"


def test_the_calculator_takes_thirty_lines() -> None:
    lines = (RECIPES / "calculator.py").read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("class Calculator"))
    end = next(number for number, line in enumerate(lines) if number > first and line.startswith("def "))
    assert end - first <= 30


# Retrieval


def test_every_answer_is_in_the_article_that_its_title_finds() -> None:
    assert len(retrieval.articles()) == 40
    for row in held_out(retrieval.Encyclopaedia) + trained_on(retrieval.Encyclopaedia):
        environment = begin(retrieval.Encyclopaedia, row)
        found = call(environment, "search", query=row["title"])
        article = next(one for one in retrieval.articles() if one["title"] == row["title"])
        assert found == article["text"] and row["answer"] in found
        assert environment.step(Answer(f"{row['answer'].upper()}. ")) == 1.0
        others = {answer for _, answer in article["questions"]} - {row["answer"]}
        assert [environment.step(Answer(wrong)) for wrong in ("", found, *others)] == [0.0] * (2 + len(others))


def test_questions_about_an_article_are_all_held_out_or_none() -> None:
    asked, unseen = ({row["title"] for row in rows(retrieval.Encyclopaedia)} for rows in (trained_on, held_out))
    assert (len(asked), len(unseen), asked & unseen) == (30, 10, set())
    assert {row["title"] for row in map(row_of_demonstration, retrieval.demonstrations("any", 96))} <= asked


def row_of_demonstration(messages: Sequence[Row]) -> Row:
    return {"title": messages[1]["tool_calls"][0]["function"]["arguments"]["query"]}


@pytest.mark.parametrize("query", ["", "the of is", "zebra", 5, None])
def test_a_search_that_finds_nothing_says_so(query: Any) -> None:
    assert call(begin(retrieval.Encyclopaedia, {"answer": "x"}), "search", query=query) == "nothing found"


# JSON by a schema

SCHEMA = {"name": "string", "age": "integer", "member": "boolean"}
VALUES = {"name": "Ada Lind", "age": 40, "member": True}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"name": "Ada Lind", "age": 40, "member": true}', (0.2, 0.3, 0.5)),
        (' {"member": true, "age": 40, "name": "Ada Lind"}\n', (0.2, 0.3, 0.5)),
        ('{"name": "Ada Lind", "age": 41, "member": true}', (0.2, 0.3, 1 / 3)),
        ('{"name": "Ada Lind", "age": "40", "member": true}', (0.2, 0.0, 1 / 3)),
        ('{"name": "Ada Lind", "age": 40, "member": 1}', (0.2, 0.0, 1 / 3)),
        ('{"name": "Ada Lind", "age": true, "member": true}', (0.2, 0.0, 1 / 3)),
        ('{"name": "Ada Lind", "age": 40}', (0.2, 0.0, 1 / 3)),
        ('{"name": "Ada Lind", "age": 40, "member": true, "job": "x"}', (0.2, 0.0, 0.5)),
        ("{}", (0.2, 0.0, 0.0)),
        ('["name", "age", "member"]', (0.0, 0.0, 0.0)),
        ('Here it is: {"name": "Ada Lind", "age": 40, "member": true}', (0.0, 0.0, 0.0)),
        ('{"name": "Ada Lind", "age": 40, "member": true', (0.0, 0.0, 0.0)),
        ("[" * 100_000, (0.0, 0.0, 0.0)),
        ("9" * 10_000, (0.0, 0.0, 0.0)),
        ("", (0.0, 0.0, 0.0)),
    ],
)
def test_parts_of_the_reward_for_json(text: str, parts: tuple[float, ...]) -> None:
    found = structured.score(text, SCHEMA, VALUES)
    assert list(found) == ["parses", "fields", "values"]
    assert tuple(found.values()) == pytest.approx(parts)


def test_a_text_has_the_values_that_are_asked_of_it() -> None:
    for row in held_out(structured.Structured):
        *_, question = row["prompt"]
        text, _, schema = question["content"].partition("\nAnswer with JSON of this schema: ")
        assert json.loads(schema) == row["schema"] and len(row["schema"]) == 3
        for name, value in row["values"].items():
            said = {True: "is a member", False: "is not a member"}[value] if name == "member" else str(value)
            assert said.removeprefix("is ") in text and isinstance(value, structured.TYPES[row["schema"][name]])
        answer = Answer(json.dumps(row["values"]))
        assert sum(begin(structured.Structured, row).step(answer).values()) == pytest.approx(1.0)
        solved = row["prompt"][1]["content"]
        assert structured.score(solved, *wanted_of(row["prompt"][0]["content"])) == pytest.approx(
            {"parses": 0.2, "fields": 0.3, "values": 0.5}
        )


def wanted_of(question: str) -> tuple[Row, Row]:
    schema = json.loads(question.partition("\nAnswer with JSON of this schema: ")[2])
    return schema, {name: structured.EXAMPLE[name] for name in schema}


def test_a_member_is_not_taken_for_one_who_is_none() -> None:
    rows = [row for row in trained_on(structured.Structured) if "member" in row["values"]]
    assert {row["values"]["member"] for row in rows} == {True, False}
    for row in rows:
        assert ("not a member" in row["prompt"][-1]["content"]) == (not row["values"]["member"])


# All of them


@pytest.mark.parametrize("kind", [calculator.Calculator, retrieval.Encyclopaedia, structured.Structured])
def test_rows_are_the_same_each_time_and_none_is_held_out_and_trained_on(kind: type[Environment]) -> None:
    assert held_out(kind) == held_out(kind) and trained_on(kind) == trained_on(kind)
    asked = [json.dumps(row["prompt"]) for row in trained_on(kind)]
    held = {json.dumps(row["prompt"]) for row in held_out(kind)}
    assert len(set(asked) & held) <= len(held) / 20  # the run leaves these few out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model in the place of SmolLM2, with a token for each byte, and what `prepare` makes of it."""
    folder = tmp_path_factory.mktemp("recipes")
    make_chat_model(folder / "smollm2", "qwen")
    config = json.loads((folder / "smollm2" / "config.json").read_text())
    (folder / "smollm2" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    prepare.make_model(folder / "smollm2", folder / "model")
    prepare.write_demonstrations(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "kind"), [("calculator", calculator.Calculator), ("retrieval", retrieval.Encyclopaedia)]
)
def test_demonstrations_are_what_an_episode_is(name: str, kind: type[Environment], prepared: Path) -> None:
    """Token for token: the demonstration's rendering is the conversation of a policy that writes its turns."""
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    tools = list(tools_of(kind).values())
    lines = [json.loads(line) for line in (prepared / f"{name}.jsonl").read_text().splitlines()]
    assert len(lines) == prepare.COUNT and all(line["tools"] == tools for line in lines)
    for line in lines[:8]:
        whole = tokenizer.apply_chat_template(line["messages"], tools=tools, tokenize=False)
        conversation = Conversation(tokenizer, tools)
        conversation.begin(line["messages"][:1])
        for message, answer in zip(line["messages"][1::2], [*line["messages"][2::2], None], strict=True):
            asked = tokenizer.decode(conversation.prompt)
            assert whole.startswith(asked)
            written = whole[len(asked) :].partition("<|im_end|>")[0] + "<|im_end|>"
            read = conversation.drawn(Drawn(tokenizer(written)["input_ids"]))
            assert [dict(one.arguments) for one in read.tool_calls] == [
                one["function"]["arguments"] for one in message.get("tool_calls", [])
            ]
            assert read.text == message["content"]
            if answer is not None:
                conversation.say([answer])
        assert len(conversation.sequences) == 1


class Drawn:
    def __init__(self, ids: Sequence[int]):
        self.token_ids, self.logprobs, self.versions = ids, [-1.0] * len(ids), [0] * len(ids)
        self.routes = None


def test_the_page_has_the_command_of_each_configuration() -> None:
    recipes = commands_of(PAGE)
    assert recipes.keys() >= {"sums", "needle", "calculator", "retrieval", "structured"}
    trained = [command[2] for commands in recipes.values() for command in commands if command[1] == "train"]
    assert sorted(trained) == sorted(f"examples/recipes/{file.name}" for file in RECIPES.glob("*.yaml"))
    for name, commands in recipes.items():
        assert commands[-1] == ["truestep", "train", f"examples/recipes/{name}.yaml"]
        made = {"models/smollm2", "runs/recipes/model"}
        for command in commands:
            if command[1] == "train":
                config = load_config(ROOT / command[2])
                assert config.model.path in made and config.checkpoint.directory is not None
                made.add(config.checkpoint.directory)
            else:
                assert command[1] == "export" and command[2] in made, shlex.join(command)
                made.add(command[-1])


def test_curves_and_the_table_are_those_of_the_runs_files(tmp_path: Path) -> None:
    def write(name: str, lines: Sequence[Row]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    write("metrics.jsonl", [{"step": step, "step_time": float(step)} for step in range(1, 5)])
    write("evaluation.jsonl", [{"step": step, "pass@1": step / 4, "greedy_reward": 0.5} for step in (0, 2, 4)])
    curve = curve_of(tmp_path)
    assert curve == {"steps": [0, 2, 4], "accuracy": [0.0, 0.5, 1.0], "greedy": [0.5] * 3, "seconds": [0.0, 3.0, 10.0]}
    other = curve | {"accuracy": [0.2, 0.5, 0.8]}
    runs = [{"recipe": "one", "seed": seed, "done": True, **one} for seed, one in enumerate((curve, other))]
    assert "| one | 2 | 4 | 10.0% ± 14.1% | 50.0% ± 0.0% | 90.0% ± 14.1% | 50.0% ± 0.0% | 2.50 |" in table(runs)


def test_chance_of_a_difference_between_two_groups() -> None:
    assert recipe_beside_trl.by_chance([1.0, 2.0], [3.0, 4.0]) == pytest.approx(2 / 6)
    assert recipe_beside_trl.by_chance([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert recipe_beside_trl.by_chance([1.0, 2.0, 3.0], [7.0, 8.0, 9.0]) == pytest.approx(2 / 20)


def test_the_table_beside_trl_has_means_spreads_and_chances() -> None:
    ours = [{"who": "truestep", "greedy": value, "sampled": value} for value in (0.8, 0.9)]
    theirs = [{"who": "TRL", "greedy": 0.5, "sampled": value} for value in (0.8, 0.9)]
    alone = [{"who": "truestep", "seconds": [9.0, 1.0, 3.0]}, {"who": "TRL", "seconds": [4.0]}]
    rows = recipe_beside_trl.told([*ours, *theirs], {"greedy": 0.4, "sampled": 0.25}, alone).splitlines()
    assert rows[2:] == [
        "| before | 40.0% | 25.0% | |",
        "| truestep | 85.0% ± 7.1% (80 90) | 85.0% ± 7.1% (80 90) | 2.000 |",
        "| TRL | 50.0% ± 0.0% (50 50) | 85.0% ± 7.1% (80 90) | 4.000 |",
        "| p | 0.333 | 1.000 | |",
    ]


def test_only_seeds_that_both_have_trained_with_are_compared() -> None:
    found = [{"who": who, "seed": seed} for who, seed in (("TRL", 2), ("truestep", 1), ("truestep", 2), ("TRL", 0))]
    assert recipe_beside_trl.paired(found) == [{"who": "TRL", "seed": 2}, {"who": "truestep", "seed": 2}]
    assert recipe_beside_trl.paired(found[:1]) == []


def test_the_task_beside_trl_is_the_tutorials() -> None:
    for row in recipe_task.rows(50):
        *_, numbers = row["prompt"].removesuffix(":").split("largest of ")
        assert row["answer"] == max(numbers.split())
        assert recipe_task.right(f" {row['answer']}\nlargest", row["answer"]) == 1.0
        assert recipe_task.right(f" {row['answer']} 1", row["answer"]) == recipe_task.right("", row["answer"]) == 0.0


def _packages() -> str:
    """Return the folder with the packages of `make adapters`; they stand behind those of this environment."""
    asked = [os.environ["TRUESTEP_ADAPTERS"], "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(commands_of(PAGE)))
def test_a_recipe_runs_as_it_is_typed(name: str, prepared: Path, tmp_path: Path) -> None:
    """One step of 16 documents of each training, with the tiny model, by the script that measures the recipes."""
    if name in ("sums", "needle") and not os.environ.get("TRUESTEP_ADAPTERS"):
        pytest.skip("TRUESTEP_ADAPTERS names no Python; `make adapters` makes and prints it")
    before = ["model.dtype=float32", "schedule.steps=1", "schedule.docs_per_step=4"]
    by_rewards = [*before[:2], "schedule.docs_per_step=16", "sampler.max_new_tokens=4", "evaluation.max_prompts=2"]
    by_rewards += ["sampler.max_episode_tokens=2048", "optimizer.warmup_steps=0"]
    command = [sys.executable, str(ROOT / "benchmarks" / "recipes.py"), "--model", str(prepared / "smollm2")]
    command += ["--folder", str(tmp_path / "study"), "--out", str(tmp_path / "out"), "--only", name, "--seeds", "3"]
    command += ["--jobs", "1", "--device", "cpu", "--before", *before, "--set", *by_rewards]
    behind = f"import sys; sys.path.append({_packages()!r})" if name in ("sums", "needle") else ""
    (tmp_path / "sitecustomize.py").write_text(behind)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["recipe"], run["seed"], run["done"], run["steps"]) == (name, 3, True, [0, 1]), done.stdout
    (line,) = (tmp_path / "study" / "runs" / f"{name}-3" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["num_documents"] == 16
    assert (tmp_path / "out.svg").read_text().startswith("<svg")
