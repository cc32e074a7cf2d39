"""Damaged files of a run: each is named, none ends in a traceback, nothing is lost silently."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from safetensors.torch import save_file

from small_runs import (
    file_config,
    read_lines,
    said,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from truestep.commands.cli import main
from truestep.config.load import ConfigError, check_secrets, dump_config, load_config
from truestep.config.schema import Config
from truestep.environments.prompts import PromptError
from truestep.errors import TruestepError
from truestep.files.whole import (
    DEEPEST,
    Line,
    LineError,
    count_lines,
    exact_object,
    json_line,
    lines_from_the_end,
    read_exact_lines,
    read_json_lines,
    scan_lines,
)
from truestep.run.checkpoint import checksums
from truestep.run.checkpoint.checksums import write_checksums
from truestep.run.checkpoint.comparison import Comparison, find_damage
from truestep.run.directory import RunDirectory, RunError
from truestep.run.train import make_trainer
from truestep.run.trainer import TrainingError
from truestep.weights import tensor_parts
from truestep.weights.tensor_parts import TensorPart

Model = Callable[[str], Path]


@pytest.fixture
def config(tiny_model: Model, tmp_path: Path) -> Config:
    write_rollouts(tmp_path / "r.jsonl", 30)
    schedule = {"steps": 4}
    return file_config(
        tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", checkpoint={"every": 2}, schedule=schedule
    )


def longer(config: Config, steps: int) -> Config:
    return config.model_copy(update={"schedule": config.schedule.model_copy(update={"steps": steps})})


# Lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON: .* column 2"),
        (b'{"a": "cut', "^not JSON: Unterminated string starting at its column 7$"),
        (b"\xff", "not UTF-8 at its byte 1"),
        (b"[1]", "not a JSON object"),
        (b"3", "not a JSON object"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is given twice"),
        (b'{"a": NaN}', "NaN is no JSON"),
        (b'{"a": [-Infinity]}', "-Infinity is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not readable: "),
        (b'{"a": ' + b"[" * DEEPEST + b"]" * DEEPEST + b"}", "nested deeper"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested deeper"),
        (b'{"a":' * 150_000, "nested deeper"),
    ],
)
def test_a_damaged_object_is_named(line: bytes, reason: str) -> None:
    with pytest.raises(LineError, match=reason):
        exact_object(line)


def test_an_object_up_to_the_depth_is_read() -> None:
    value: Any = 1
    for _ in range(DEEPEST - 1):
        value = [value]
    assert exact_object(json.dumps({"a": value}).encode()) == {"a": value}
    wide = {"a": [{"b": [1]} for _ in range(1000)]}
    assert exact_object(json.dumps(wide).encode()) == wide


def odd_file(path: Path, seed: int) -> list[bytes]:
    """Lines of every kind and length, some damaged, some empty, the last perhaps cut."""
    random = np.random.default_rng(seed)
    kinds = [b"", b"  ", b"{", b"\xff\xfe", b"[]", b'{"step": 1}', b'{"text": "' + b"x" * 300 + b'"}']
    lines = [kinds[index] for index in random.integers(0, len(kinds), random.integers(0, 12))]
    cut = [b"", b'{"step": 9'][random.integers(0, 2)]
    path.write_bytes(b"".join(line + b"\n" for line in lines) + cut)
    return [*lines, cut] if cut else lines


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("block", [1, 3, 64, 1 << 16])
def test_lines_are_the_same_from_both_ends(seed: int, block: int, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    lines = odd_file(path, seed)
    forward = list(scan_lines(path))
    content = path.read_bytes()
    for line in forward:
        assert content[line.start : line.end].rstrip(b"\n") == lines[line.number - 1]
    assert [line.number for line in forward] == [n for n, line in enumerate(lines, 1) if line.strip()]

    def facts(line: Line) -> tuple[Any, ...]:
        return line.start, line.end, line.value, line.damage, line.whole

    assert [facts(line) for line in lines_from_the_end(path, block)] == [facts(line) for line in forward][::-1]
    assert count_lines(path) == content.count(b"\n")


def test_damaged_lines_are_left_out_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n\x1b[2J{\n{"a": 2}\nno\n{"a": 3}\n{"a"')
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}, {"a": 3}]
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path}:2 (byte 9) is damaged: not JSON: Expecting value at its column 1 (and 1 more lines); left out, "
        "3 lines are read"
    )
    with pytest.raises(LineError, match=r"f\.jsonl:2 \(byte 9\) is damaged"):
        list(read_exact_lines(path))
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert read_json_lines(path) == [{"a": 1}]
    with pytest.raises(LineError, match="the last line is cut off"):
        list(read_exact_lines(path))


def test_a_line_without_an_end_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.files.whole.LONGEST_LINE", 1000)
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": "' + b"x" * 30_000_000 + b'"}\n{"a": 2}\n')
    tracemalloc.start()
    found = [line.value or line.damage for line in scan_lines(path)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [{"a": 1}, "it is longer than 1,000 bytes", {"a": 2}]
    assert peak < 10_000_000


def test_the_end_of_a_large_file_is_read_alone(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    with path.open("w") as file:
        for step in range(200_000):
            file.write(json_line({"step": step, "documents": ["a"] * 20}))
    tracemalloc.start()
    last = next(lines_from_the_end(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last.value is not None and last.value["step"] == 199_999
    assert peak < 2_000_000


# A run's directory


def ledger_of(path: Path, lines: list[bytes]) -> RunDirectory:
    directory = RunDirectory(path)
    path.mkdir()
    directory.ledger.write_bytes(b"".join(line + b"\n" for line in lines))
    return directory


STEP = [f'{{"step": {step}}}'.encode() for step in range(10)]


@pytest.mark.parametrize(
    ("lines", "step", "kept", "said"),
    [
        ([STEP[1], b"torn", STEP[3], STEP[4]], 3, 3, ""),  # far behind: the report names it
        ([STEP[1], STEP[2], b"torn", STEP[4]], 3, 3, "ledger.jsonl .byte 24. is damaged: not JSON"),
        ([STEP[1], STEP[2], b"torn", b"torn"], 3, 3, "is damaged"),
        ([STEP[1], STEP[2]], 4, 2, "ends with step 2, and the run goes on after step 4"),
        ([STEP[1], b"torn", STEP[4]], 3, 2, "ends with step 1, and the run goes on after step 3"),
        ([b"torn"], 1, 1, "is damaged"),
        ([], 2, 0, "names no step"),
        ([STEP[1], STEP[2], STEP[1], STEP[4]], 3, 3, "its step 1 is out of order"),  # 3, with a digit flipped
        ([STEP[1], STEP[2], STEP[8]], 3, 2, "ends with step 2"),  # likewise
        ([STEP[1], STEP[2], STEP[3], STEP[4], STEP[2]], 3, 3, ""),  # a 5 that was to go anyway
        ([STEP[1], b'{"step": true}', b'{"step": "2"}'], 3, 3, "is damaged"),
    ],
)
def test_a_damaged_ledger_is_rolled_back_and_named(
    lines: list[bytes], step: int, kept: int, said: str, tmp_path: Path
) -> None:
    directory = ledger_of(tmp_path / "run", lines)
    faults = "; ".join(directory.roll_back(step, 0))
    assert directory.ledger.read_bytes().splitlines() == lines[:kept]
    assert (said in faults.replace("(", ".").replace(")", ".")) if said else not faults


def test_a_damaged_line_of_metrics_does_not_end_a_run(config: Config, tmp_path: Path) -> None:
    said(config)
    run = tmp_path / "run"
    for name in ("metrics.jsonl", "ledger.jsonl"):
        lines = (run / name).read_bytes().split(b"\n")
        lines[1] = b"\x00\xff" + lines[1][10:]
        (run / name).write_bytes(b"\n".join(lines))
    assert "all 6 steps are done" in said(longer(config, 6))
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert [line["step"] for line in read_json_lines(run / name)] == [1, 3, 4, 5, 6]
    result = CliRunner().invoke(main, ["report", str(run)])
    assert result.exit_code == 0, result.output
    assert "metrics.jsonl: 1 line is no JSON object and left out" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("section", "options", "message"),
    [
        ("model", {"device": "cuda"}, "^model.device: cuda was asked for and there is no CUDA device$"),
        ("model", {"freeze": ["absent"]}, "^model.freeze: 'absent' matches no weight"),
        ("adapter", {"rank": 4}, "^adapter: .* holds a whole model, and the configuration has an adapter$"),
    ],
)
def test_an_option_that_cannot_be_is_not_a_damaged_checkpoint(
    section: str, options: dict[str, Any], message: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who is told to remove a sound checkpoint loses it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said(config)
    with pytest.raises(TruestepError, match=message):
        said(longer(config, 6).changed({f"{section}.{name}": value for name, value in options.items()}))
    assert "all 6 steps are done" in said(longer(config, 6))


def test_a_run_that_has_made_more_steps_says_so(config: Config) -> None:
    said(config)
    assert "the run has made 4 steps already, and schedule.steps is 3" in said(longer(config, 3))


def test_the_last_line_damaged_is_said_on_resume(config: Config, tmp_path: Path) -> None:
    said(config)
    ledger = tmp_path / "run" / "ledger.jsonl"
    lines = ledger.read_bytes().split(b"\n")
    lines[3] = b"\x1b[2J" + lines[3][5:]
    ledger.write_bytes(b"\n".join(lines))
    text = said(longer(config, 5))
    assert "ledger.jsonl (byte" in text and "is damaged" in text and "\x1b" not in text
    assert "as its checkpoint needs no line of this file" in " ".join(text.split())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_told_from_a_held_lock(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(RunError, match="cannot be locked: its file system has no locks .*checkpoint.lock: false"):
        RunDirectory(tmp_path).lock()
    RunDirectory(tmp_path, locks=False).lock()


@pytest.mark.parametrize("written", [b"", b"\x00\xff", b"   \n"])
def test_the_holder_of_a_lock_is_never_empty(written: bytes, tmp_path: Path) -> None:
    holder = RunDirectory(tmp_path)
    holder.lock()
    (tmp_path / ".lock").write_bytes(written)
    with pytest.raises(RunError, match=r"written by another process \(.{3,}\)"):
        RunDirectory(tmp_path).lock()
    holder.unlock()


def test_a_run_without_locks_runs(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(RunError, match="has no locks"):
        said(config)
    unlocked = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"lock": False})})
    assert "all 4 steps are done" in said(unlocked)


# Checkpoints


def flip(file: Path, position: int, mask: int = 1) -> None:
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ mask]))


def test_a_flipped_byte_of_any_file_of_a_checkpoint_is_named(config: Config, tmp_path: Path) -> None:
    said(config)
    checkpoint = tmp_path / "run/checkpoints/step-00000004"
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    assert {"part-00000.safetensors", "tensors.json", "carried.jsonl", "state.json", "random-00000.json"} <= {
        file.name for file in files
    }
    random = np.random.default_rng(0)
    for file in files:
        whole = file.read_bytes()
        for position in {0, len(whole) - 1, int(random.integers(0, max(1, len(whole))))} if whole else set():
            flip(file, position)
            assert file.name in (find_damage(checkpoint) or ""), (file, position)
            file.write_bytes(whole)
        file.write_bytes(whole[:-3] if whole else b"x")
        assert file.name in (find_damage(checkpoint) or "")
        file.unlink()
        assert (find_damage(checkpoint) is None) == (file.name == "checksums.json")
        file.write_bytes(whole)
    assert find_damage(checkpoint) is None


def test_a_damaged_checkpoint_names_the_one_before_it(config: Config, tmp_path: Path) -> None:
    said(config)
    before, last = (tmp_path / f"run/checkpoints/step-0000000{step}" for step in (2, 4))
    part = last / "truestep/part-00000.safetensors"
    flip(part, part.stat().st_size - 2000)  # a number of AdamW's state: nothing else would notice it
    why = (
        r"step-00000004 is damaged: truestep/part-00000\.safetensors is damaged in its bytes 0 to .* The run goes on "
        r"from .*step-00000002, and the damaged one is kept as .*/checkpoints/damaged-step-00000004\n"
    )
    ledger = (tmp_path / "run/ledger.jsonl").read_bytes()
    assert re.search(why, said(config))
    assert (tmp_path / "run/ledger.jsonl").read_bytes() == ledger
    assert find_damage(last) is None and (last.parent / "damaged-step-00000004").is_dir()
    shutil.rmtree(last)
    part = before / "truestep/part-00000.safetensors"
    flip(part, -1 + part.stat().st_size)
    with pytest.raises(TrainingError, match=r"starts again from its beginning: it has no other"):
        make_trainer(config, Console(file=io.StringIO()))


def in_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def plant(checkpoint: Path) -> None:
        manifest = checkpoint / "truestep/checksums.json"
        content = json.loads(manifest.read_bytes())
        change(content["files"])
        manifest.write_text(json.dumps(content))

    return plant


def in_index(change: Callable[[list[list[int]]], Any], rows_of_tensor: int | None = None) -> Callable[[Path], None]:
    """Change the table of the first tensor, or its shape; all checksums are right."""

    def plant(checkpoint: Path) -> None:
        index = checkpoint / "truestep/tensors.json"
        content = json.loads(index.read_bytes())
        entry = next(iter(content["tensors"].values()))
        rows = tensor_parts._unpacked(entry["parts"], 2 + 2 * len(entry["shape"])).tolist()
        change(rows)
        entry["shape"][0] = rows_of_tensor or entry["shape"][0]
        entry["parts"] = tensor_parts._packed(rows)
        index.write_text(json.dumps(content))
        write_checksums(checkpoint)

    return plant


ENTRY = {"bytes": 1, "crc32": [0]}


@pytest.mark.parametrize(
    ("plant", "file"),
    [
        (in_manifest(lambda files: files.update({"a\0b": ENTRY})), "checksums.json"),
        (in_manifest(lambda files: files.update({"a\ud800b": ENTRY})), "checksums.json"),
        (in_manifest(lambda files: files.update({"a" * 500: ENTRY})), "a" * 50),
        (in_manifest(lambda files: files.update({"a": {"bytes": 1 << 64, "crc32": [0]}})), "checksums.json"),
        (in_index(lambda rows: rows[0].__setitem__(0, 5)), "tensors.json"),
        (in_index(lambda rows: rows[0].__setitem__(0, -1)), "tensors.json"),
        (in_index(lambda rows: rows[0].__setitem__(1, -(1 << 40))), "tensors.json"),
        (in_index(lambda rows: rows[0].__setitem__(2, -7)), "tensors.json"),
        (in_index(lambda rows: None, 1 << 63), "tensors.json"),
    ],
    ids=["zero-byte", "surrogate", "long-name", "size", "file-5-of-1", "file-minus-1", "byte", "row", "rows"],
)
def test_what_a_checkpoint_cannot_mean_is_named(plant: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    (tmp_path / "truestep").mkdir()
    part = TensorPart("weight/a", (6, 4), (0, 0), torch.zeros(6, 4))
    save_file({part.key: part.values}, tmp_path / "truestep/part-00000.safetensors")
    described = tensor_parts.describe_parts(tmp_path / "truestep/part-00000.safetensors", [part])
    tensor_parts.write_index(tmp_path / "truestep", [described])
    write_checksums(tmp_path)
    assert find_damage(tmp_path) is None
    plant(tmp_path)
    assert file in (find_damage(tmp_path) or "")


def test_a_run_goes_back_from_an_index_of_other_files(config: Config, tmp_path: Path) -> None:
    said(config)
    in_index(lambda rows: rows[0].__setitem__(0, 5))(tmp_path / "run/checkpoints/step-00000004")
    assert re.search(r"truestep/tensors\.json is damaged: .* The run goes on from .*step-00000002,", said(config))


def test_parts_of_ranks_find_what_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "STRETCH", 1 << 20)
    (tmp_path / "truestep").mkdir()
    (tmp_path / "a").write_bytes(np.random.default_rng(0).bytes(5_500_000))
    (tmp_path / "empty").write_bytes(b"")
    write_checksums(tmp_path)
    comparison = Comparison(tmp_path)

    def found() -> dict[str, str]:
        return comparison.damages([comparison.read([(part, 4)]) for part in range(4)])

    assert found() == {}
    flip(tmp_path / "a", 3_200_000)
    assert found() == {"a": "a is damaged in its bytes 3145728 to 4194304"}
    assert find_damage(tmp_path) == found()["a"]


# Secrets


def test_a_runs_own_config_holds_no_secret_and_is_refused_as_one(config: Config, tmp_path: Path) -> None:
    url = "redis://:opensesame@127.0.0.1:6379/0"
    options = config.model_dump()
    options["data"] |= {"path": None, "source": {"type": "stream", "url": url, "stream": "s"}}
    options["optimizer"] = {"type": "custom", "function": "m:f", "options": {"api_key": "opensesame"}}
    secret = Config.model_validate(options)
    text = dump_config(secret, without_secrets=True)
    assert "opensesame" not in text
    (tmp_path / "config.yaml").write_text(text)
    loaded = load_config(tmp_path / "config.yaml")
    with pytest.raises(
        ConfigError, match=r"data\.source\.url, optimizer\.options\.api_key: \*\*\* stands where a secret"
    ):
        check_secrets(loaded, tmp_path / "config.yaml")
    check_secrets(secret, tmp_path / "own.yaml")
    again = load_config(tmp_path / "config.yaml", ["--data.source.url", url, "--optimizer.options", "{api_key: k}"])
    check_secrets(again, tmp_path / "config.yaml")
    result = CliRunner().invoke(main, ["train", str(tmp_path / "config.yaml")])
    assert result.exit_code == 1 and "stands where a secret was left out" in result.output


# Prompts and commands


def test_a_prompt_field_that_the_reward_call_takes_is_refused_before_the_run(tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    for name in ("completion", "self"):
        prompts = write_lines(tmp_path / "p.jsonl", [*sort_prompts(2), {**sort_prompts(1)[0], name: "x"}])
        with pytest.raises(PromptError, match=rf"p\.jsonl:3: a prompt cannot have the field `{name}`"):
            make_trainer(sampled_config(model, prompts, tmp_path / "run"), Console(file=io.StringIO()))


def test_a_deeply_nested_prompt_is_named(tmp_path: Path) -> None:
    model = word_model(tmp_path / "model")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1 2"}\n{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(PromptError, match=r"p\.jsonl:2: nested deeper than"):
        make_trainer(sampled_config(model, prompts, tmp_path / "run"), Console(file=io.StringIO()))


@pytest.mark.parametrize(
    "content",
    [
        *("[1]", '"x"', "NaN", "{}", "{", "\x00", "[" * 100_000, '{"vocab_size": ' + "9" * 6000 + "}"),
        *('{"vocab_size": null}', '{"vocab_size": -1}', '{"vocab_size": 1e400}', '{"vocab_size": true}'),
        '{"vocab_size": "12"}',
    ],
    ids=range(13),
)
def test_data_check_with_an_odd_model_is_one_message(content: str, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 3)
    (tmp_path / "config.json").write_text(content)
    result = CliRunner().invoke(main, ["data", "check", str(tmp_path / "r.jsonl"), "--model", str(tmp_path)])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "its config.json" in " ".join(result.output.split())
    assert len(result.output) < 1000


def test_a_run_reads_what_it_wrote(config: Config, tmp_path: Path) -> None:
    said(config)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert list(read_exact_lines(tmp_path / "run" / name)) == read_lines(tmp_path / "run" / name)
