"""Mutated records, lines, prompts, configurations and answers: each ends as a named error or a success."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fuzz.mutate import check_text, memory, mutated_bytes, mutated_value
from tiny import make_records
from truestep.config.load import dump_config, load_config
from truestep.config.schema import Config
from truestep.environments.prompts import load_prompts
from truestep.errors import TruestepError
from truestep.files.whole import LineError, exact_object
from truestep.rollouts.files import load_documents, parse_json, read_records, readable
from truestep.rollouts.record import BadRecord, Checks, Needs, parse_record

CHECKS = [
    Checks(Needs(True, True, "group_normalized"), 61, max_tokens=40, group_size=4),
    Checks(Needs(True, True, "none"), 61),
    Checks(Needs(False, False, "none")),
]
LENGTHS = [pytest.param(2_000, id="short"), pytest.param(100_000, id="whole", marks=pytest.mark.release)]
BASES = [make_records(seed, documents=12, advantages=kind) for seed, kind in enumerate(("given", "rewards", "none"))]


@pytest.mark.parametrize("count", LENGTHS)
def test_mutated_records(count: int) -> None:
    draw = random.Random(1)
    accepted = refused = 0
    held = 0.0
    for index in range(count):
        record: Any = draw.choice(draw.choice(BASES))
        if draw.random() < 0.5:
            line = mutated_bytes(draw, json.dumps(record).encode())
            record = parse_json(line)
        else:
            record = mutated_value(draw, record)
        try:
            rollout = parse_record(readable(record), "f.jsonl:1", draw.choice(CHECKS))
            assert len(rollout.input_ids) == len(rollout.loss_mask) >= 1 and not rollout.loss_mask[0]
            for values in (rollout.logprobs, rollout.advantages):
                assert values is None or np.isfinite(values).all()
            accepted += 1
        except BadRecord as error:
            check_text(error.reason)
            refused += 1
        if index == count // 10:
            held = memory()
    assert min(accepted, refused) > count / 20
    assert memory() - held < 200


@pytest.mark.parametrize("count", LENGTHS)
def test_mutated_lines(count: int) -> None:
    draw = random.Random(2)
    line = json.dumps(
        {"step": 3, "documents": ["a", "b"], "loss": 0.125, "inner": {"list": [1, [2, {"x": None}]]}}
    ).encode()
    read = 0
    for _ in range(count // 2):
        content = mutated_bytes(draw, line)
        try:
            assert isinstance(exact_object(content), dict)
            read += 1
        except LineError as error:
            check_text(str(error))
    assert count / 100 < read < count / 2


@pytest.mark.parametrize(
    "count", [pytest.param(60, id="short"), pytest.param(2000, id="whole", marks=pytest.mark.release)]
)
def test_mutated_files_of_records(count: int, tmp_path: Path) -> None:
    """Whole JSONL and Parquet files, their headers and the names of their columns included."""
    draw = random.Random(3)
    lines = "".join(json.dumps(record) + "\n" for record in BASES[0]).encode()
    table = [{"input_ids": record["input_ids"], "id": record["id"], "prompt_length": 1} for record in BASES[0]]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "whole.parquet")
    parquet = (tmp_path / "whole.parquet").read_bytes()
    for index in range(count):
        suffix, content = ((".jsonl", lines), (".parquet", parquet))[index % 2]
        file = tmp_path / f"f{suffix}"
        file.write_bytes(mutated_bytes(draw, content))
        try:
            list(read_records([file]))
            load_documents([file], CHECKS[2])
        except TruestepError as error:
            check_text(str(error), str(file))


class Words:
    """A tokenizer that takes any text, and a template that reads messages."""

    chat_template = "x"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, list[int]]:
        return self(" ".join(f"{message['role']}: {message['content'] + ''}" for message in messages))


@pytest.mark.parametrize(
    "count", [pytest.param(300, id="short"), pytest.param(10_000, id="whole", marks=pytest.mark.release)]
)
def test_mutated_prompts(count: int, tmp_path: Path) -> None:
    draw = random.Random(4)
    prompts = [
        {"id": "a", "prompt": "1 2 3", "answer": "3"},
        {"prompt": [{"role": "user", "content": "sort"}], "tests": [{"in": 1, "out": [2]}]},
        {"prompt": "é\u2028x", "id": 7},
    ]
    whole = "".join(json.dumps(prompt) + "\n" for prompt in prompts).encode()
    file, read = tmp_path / "p.jsonl", 0
    for index in range(count):
        if index % 2:
            file.write_bytes(mutated_bytes(draw, whole))
        else:
            file.write_text("".join(json.dumps(mutated_value(draw, prompt)) + "\n" for prompt in prompts))
        try:
            read += len(load_prompts(file, Words(), 1000)) > 0
        except TruestepError as error:
            check_text(str(error), str(file))
    assert count / 50 < read < count


@pytest.mark.parametrize(
    "count", [pytest.param(150, id="short"), pytest.param(10_000, id="whole", marks=pytest.mark.release)]
)
def test_mutated_configs(count: int, tmp_path: Path) -> None:
    """Every option in some of the files, one section beside the model and the data in the others. Reading YAML is most
    of the time, and these are half as long."""
    draw = random.Random(5)
    base = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"source": {"type": "stream", "stream": "s"}, "advantages": "none"},
            "sampler": None,
            "schedule": {"docs_per_step": 8, "steps": 3},
            "checkpoint": {"directory": "runs/x"},
            "loss": {"type": "grpo"},
        }
    )
    text = dump_config(base).encode()
    tree = yaml.safe_load(text)
    needed = ("model", "data")
    few = [{name: tree[name] for name in (*needed, other)} for other in tree if other not in needed]
    texts = [yaml.safe_dump(sections, sort_keys=False).encode() for sections in few]
    short = b"model: {path: m}\ndata: &d\n  path: a.jsonl\n  group_size: 4\nloss:\n  type: gspo\n  clip_low: 3e-4\n"
    file, read = tmp_path / "c.yaml", 0
    for index in range(count):
        if index % 8 == 0:
            file.write_bytes(mutated_bytes(draw, text if index % 80 == 0 else draw.choice(texts)))
        elif index % 2:
            file.write_bytes(mutated_bytes(draw, short))
        else:
            options = mutated_value(draw, tree if index % 20 == 2 else draw.choice(few))
            file.write_text(json.dumps(options, ensure_ascii=draw.random() < 0.8), errors="replace")
        odd = draw.choice(("--seed", "--loss.type", "--x", "--data.path=[", "--optimizer", "seed", "--="))
        overrides = [odd, "{a: 1"]
        try:
            config = load_config(file, overrides[: draw.choice((0, 0, 0, 1, 2))])
            dump_config(config, without_secrets=True)
            read += 1
        except TruestepError as error:
            check_text(str(error).replace("\n", " "))
    assert count / 100 < read < count


def test_a_column_name_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "f.parquet"
    pq.write_table(pa.table({"input_ids": [[1, 2]], "metadatum": ["x"]}), file)
    file.write_bytes(file.read_bytes().replace(b"metadatum", b"metad\xfftum"))
    with pytest.raises(TruestepError, match=r"f\.parquet cannot be read: .*utf-8"):
        list(read_records([file]))
