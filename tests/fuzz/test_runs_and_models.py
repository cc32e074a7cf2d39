"""Run directories with a flipped byte or a cut file, and odd model directories: a named error or a success."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fuzz.mutate import check_text, memory, mutated_bytes, mutated_value
from small_runs import file_config, tokenised_model, write_rollouts
from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.whole import append_json_line, read_json_lines
from truestep.model.loading.load import load_policy
from truestep.process.randomness import random_state, random_tensors, restore_random
from truestep.report import write_report
from truestep.report.health import health
from truestep.report.runs import read_run
from truestep.report.verdicts.watching import Watching
from truestep.rollouts.kept.files import list_files, roll_back
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.store import read_progress
from truestep.run.directory import RunDirectory
from truestep.run.train import train

Model = Callable[[str], Path]
LINES = ("metrics.jsonl", "ledger.jsonl", "evaluation.jsonl", "rejected.jsonl", "warnings.jsonl")
KEPT = {"steps": "metrics", "evaluations": "evaluation", "warnings": "warnings"}  # what a start reads of those before


def made_run(model: Path, directory: Path) -> Config:
    records = write_rollouts(directory / "r.jsonl", 20)
    with (directory / "r.jsonl").open("a") as file:
        file.write("{\n" + json.dumps({**records[0], "id": "bad", "input_ids": []}) + "\n")
    checkpoint = {"every": 2}
    config = file_config(model, directory / "r.jsonl", directory / "run", checkpoint=checkpoint, schedule={"steps": 3})
    train(config, Console(file=io.StringIO()))
    with (directory / "run/evaluation.jsonl").open("w") as file:
        for step in (0, 2, 3):
            examples = [{"prompt": "1", "completion": "\x1b", "reward": 0.5}]
            line = {"step": step, "documents_seen": 5 * step, "greedy_reward": 0.5, "sampled_reward": 0.1}
            file.write(json.dumps(line | {"num_prompts": 4, "num_unrated": 0, "examples": examples}) + "\n")
    for step in (1, 3):
        append_json_line(
            directory / "run/warnings.jsonl", {"step": step, "kind": "worse", "title": "t", "text": "\x1b"}
        )
    return config


def damage(draw: random.Random, content: bytes) -> bytes:
    """A flipped bit, a cut, a stretch of zeros as a lost page leaves it, or anything."""
    kind = draw.randrange(4)
    if not content or kind == 0:
        return mutated_bytes(draw, content)
    place = draw.randrange(len(content))
    if kind == 1:
        return content[:place]
    if kind == 2:
        end = min(len(content), place + draw.choice((1, 16, 4096)))
        return content[:place] + bytes(end - place) + content[end:]
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def use_lines(run: Path, draw: random.Random) -> None:
    """All that reads the files of lines and the configuration."""
    found = read_run(run)
    judged = health(found)
    for text in (*(note.text for note in judged.notes), *(verdict.text for verdict in judged.verdicts)):
        check_text(text)
    kept = {name: read_json_lines(run / f"{file}.jsonl") for name, file in KEPT.items()}
    watching = Watching(check_text, lambda line: None, rejected_in="rejected.jsonl", **kept)
    check_text(watching.sentence or "nothing can be said")
    watching.evaluation({"step": 9, "greedy_reward": 0.5})
    directory = RunDirectory(run)
    sizes = draw.choice((0, 1, 2, 9)), draw.choice((None, 0, 1, 200))
    for fault in directory.roll_back(draw.choice((0, 1, 2, 3, 5)), *sizes):
        check_text(fault)
    directory.last_evaluated()
    directory.rejected_bytes()


def use_checkpoint(run: Path, name: str, changed: bool) -> None:
    checkpoint = run / "checkpoints" / "step-00000003"
    found = find_damage(checkpoint)
    if changed and not name.endswith("checksums.json"):
        assert found is not None and Path(name).name in found, name
    if found is not None:
        check_text(found)
    elif name.endswith(("carried.jsonl", "state.json")):
        before = random_state(), random_tensors()
        read_progress(checkpoint)
        restore_random(*before)


@pytest.mark.parametrize(
    "count", [pytest.param(200, id="short"), pytest.param(10_000, id="whole", marks=pytest.mark.release)]
)
def test_damaged_run_directories(
    count: int, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # ten thousand would be the most of the test
    made_run(tiny_model("llama"), tmp_path)
    run, draw = tmp_path / "run", random.Random(6)
    shutil.rmtree(run / "checkpoints/step-00000002")
    # The whole configuration has three hundred lines, and PyYAML would take most of the time.
    (run / "config.yaml").write_text(
        "model: {path: m}\nschedule:\n  docs_per_step: 5\n  steps: 3\ndata: {path: r.jsonl}\n"
    )
    files = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file() and path.name != ".lock"}
    of_lines = [path for path in files if path.name in LINES]
    others = [path for path in files if path not in of_lines]
    assert len(of_lines) == 5 and len(others) > 5 and any(path.parent.name == "rollouts" for path in others)
    held = 0.0
    for index in range(count):
        path = draw.choice(of_lines if index % 2 else others)
        content = damage(draw, files[path])
        path.write_bytes(content)
        try:
            if path.parent == run:
                if path.name == "config.yaml":
                    load_config(path)
                use_lines(run, draw)
            elif path.parent.name == "rollouts":
                for fault in roll_back(path.parent, draw.choice((0, 1, 2, 3))):
                    check_text(fault)
                for file in set(list_files(path.parent)) - {path}:
                    file.unlink()  # what was cut off of it
            else:
                use_checkpoint(run, str(path), content != files[path])
        except TruestepError as error:
            check_text(str(error).replace("\n", " "))
            assert path.name == "config.yaml"
        if index % 300 == 0:
            write_report([run], tmp_path / "page.html")
        for changed in [path, *of_lines]:
            changed.write_bytes(files[changed])
        if index == count // 10:
            held = memory()
    assert memory() - held < 200


@pytest.mark.parametrize(
    "count", [pytest.param(6, id="short"), pytest.param(60, id="whole", marks=pytest.mark.release)]
)
def test_damaged_runs_are_resumed_or_refused(count: int, tiny_model: Model, tmp_path: Path) -> None:
    """The whole command: what the checkpoint does not need costs nothing, and damage of the checkpoint is named. The
    run goes on from the one before, where there is one."""
    config = made_run(tiny_model("llama"), tmp_path)
    given = config.model_dump()
    longer = Config.model_validate(given | {"schedule": given["schedule"] | {"steps": 4}, "logging": {}})
    whole, run, draw = tmp_path / "whole", tmp_path / "run", random.Random(7)
    shutil.copytree(run, whole)
    names = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.name != ".lock"]
    for index in range(count):
        name = draw.choice(names)
        content = (whole / name).read_bytes()
        damaged = damage(draw, content)
        (run / name).write_bytes(damaged)
        needed = str(name).startswith("checkpoints/step-00000003") and damaged != content
        if alone := index % 2 == 0:
            shutil.rmtree(run / "checkpoints/step-00000002")
        said = io.StringIO()
        try:
            trainer = train(longer, Console(file=said, width=1000))
            assert trainer.step == 4
            if needed and name.name != "checksums.json":
                kept = run / "checkpoints/damaged-step-00000003" / name.relative_to("checkpoints/step-00000003")
                assert not alone and name.name in said.getvalue() and kept.is_file()
        except TruestepError as error:
            assert alone or not needed
            check_text(str(error), name.name if needed else "a file that the checkpoint does not need ended the run")
        shutil.rmtree(run)
        shutil.copytree(whole, run)


@pytest.mark.parametrize(
    "count", [pytest.param(25, id="short"), pytest.param(400, id="whole", marks=pytest.mark.release)]
)
def test_odd_model_directories(count: int, tmp_path: Path) -> None:
    model, draw = tokenised_model(tmp_path / "model", "qwen3"), random.Random(8)
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    loaded = 0
    held = 0.0
    for index in range(count):
        name = draw.choice(("config.json", "config.json", "model.safetensors", draw.choice(sorted(files))))
        content = files[name]
        if name == "config.json" and index % 4:
            content = json.dumps(mutated_value(draw, json.loads(content))).encode()
        elif name == "model.safetensors" and index % 2:
            header = 8 + int.from_bytes(content[:8], "little")
            content = damage(draw, content[:header]) + content[header:]
        else:
            content = damage(draw, content)
        (model / name).write_bytes(content)
        try:
            load_policy(model, device="cpu", longest_document=16)
            loaded += 1
        except TruestepError as error:
            check_text(str(error).replace("\n", " "))
        (model / name).write_bytes(files[name])
        if index == count // 10:
            held = memory()
    assert 0 < loaded < count
    assert memory() - held < 1000
    assert torch.get_default_dtype() == torch.float32
