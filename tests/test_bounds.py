"""Ceilings on lines, JSON, models and prompts that others wrote. Servers, streams and Parquet have their own files."""

from __future__ import annotations

import json
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from truestep.config.load import ConfigError, load_config
from truestep.environments import frames
from truestep.environments.prompts import PromptError, load_prompts
from truestep.files import bounded
from truestep.files.bounded import MIB
from truestep.files.tensors import tensor_places
from truestep.model.adapter_files import read_adapter
from truestep.model.loading.load import load_policy
from truestep.rollouts import rendering
from truestep.rollouts.files import read_records
from truestep.rollouts.rendering import TemplateStoppedError, within_bounds
from truestep.rollouts.values import BadRecord
from truestep.weights.errors import ModelError


def said(path: Path) -> list[str]:
    return [record.reason if isinstance(record, BadRecord) else "a record" for _, _, record in read_records([path])]


def test_a_line_is_held_up_to_a_ceiling_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "RECORD", 10 * MIB)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"id": "a"}\n')
        for _ in range(100):
            file.write(b"x" * MIB)
        file.write(b'\n{"id": "b"}\n')
    tracemalloc.start()
    found = [(line, said) for (_, line, _), said in zip(read_records([path]), said(path), strict=True)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [(1, "a record"), (2, "the line is not read: it has more than 10 MiB"), (3, "a record")]
    assert peak < 40 * MIB


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"metadata": [' + b"[]," * (MIB + 1) + b"[]]}", "it has 1,048,580 lists and objects: at most 1,048,576"),
        (b'{"metadata": [' + b"{}," * (MIB + 1) + b"{}]}", "it has 1,048,580 lists and objects: at most 1,048,576"),
        (b'{"metadata": [' + b'"",' * (2 * MIB) + b'""]}', "it has 2,097,154 texts: at most 2,097,152"),
    ],
    ids=["lists", "objects", "texts"],
)
def test_a_record_that_takes_far_more_than_its_bytes(text: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text + b"\n")
    (found,) = said(path)
    assert found.startswith(f"the record is not read: {reason}")
    path.write_bytes(b'{"prompt": "a"}\n' + text + b"\n")
    with pytest.raises(PromptError, match=f":2: {reason}"):
        load_prompts(path, lambda text: {"input_ids": [1]})


def test_a_prompt_that_is_longer_than_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "RECORD", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x" * 1000}) + "\n")
    with pytest.raises(PromptError, match=":1: it has more than 1,000 bytes"):
        load_prompts(tmp_path / "a.jsonl", lambda text: {"input_ids": [1]})


@pytest.mark.long
def test_a_document_of_a_million_tokens_is_far_below(tmp_path: Path) -> None:
    count = 10**6
    record = {
        "input_ids": [151_643] * count,
        "loss_mask": [1] * count,
        "logprobs": [-0.12345678901234567] * count,
        "reference_logprobs": [-0.12345678901234567] * count,
        "advantage": [-0.12345678901234567] * count,
        "model_version": [123_456] * count,
    }
    text = json.dumps(record).encode()
    assert len(text) < bounded.RECORD
    (tmp_path / "a.jsonl").write_bytes(text + b"\n")
    assert said(tmp_path / "a.jsonl") == ["a record"]


def test_a_dataset_whose_parts_are_compressed(tmp_path: Path) -> None:
    """A few bytes would be any number. Also the values of a dictionary, and not what `datasets` writes itself."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a"}] * 3).save_to_disk(tmp_path / "honest")
    tokenizer: Callable[[str], Any] = lambda text: {"input_ids": [1]}  # noqa: E731
    assert len(load_prompts(tmp_path / "honest", tokenizer)) == 3
    tables = {
        "values": pa.table({"prompt": ["a" * 10_000] * 1000}),
        "a dictionary": pa.table({"prompt": pa.array(["a" * 10_000] * 1000).dictionary_encode()}),
    }
    for name, table in tables.items():
        for codec in ("zstd", "lz4", None):
            directory = tmp_path / f"{name} {codec}"
            shutil.copytree(tmp_path / "honest", directory)
            (file,) = directory.glob("*.arrow")
            with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as stream:
                stream.write_table(table)
            if codec is None:
                assert len(load_prompts(directory, tokenizer)) == 1000
            else:
                with pytest.raises(PromptError, match="has compressed data, which is not read"):
                    load_prompts(directory, tokenizer)


TEMPLATES = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}",
    "a text that doubles": "{% set n = namespace(s='x' * 1000) %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_never_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    monkeypatch.setattr(rendering, "_SECONDS", 0.5 if "loops" in name else 60.0)
    monkeypatch.setattr(rendering, "_MEMORY", 100 * MIB)
    with pytest.raises(TemplateStoppedError, match="it was stopped: a chat template may run for"):
        within_bounds(lambda: render_jinja_template([[{"role": "user"}]], chat_template=TEMPLATES[name]))


def test_what_renders_in_time_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it ends at the moment at which it would be stopped: the exception comes to nobody else."""
    monkeypatch.setattr(rendering, "_LOOK", 0.0005)
    monkeypatch.setattr(rendering, "_SECONDS", 0.001)
    outcomes = set()
    for number in range(200):
        try:
            outcomes.add(within_bounds(lambda number=number: time.sleep(number / 200 * 0.004) or "rendered"))
        except TemplateStoppedError:
            outcomes.add("stopped")
    assert outcomes == {"rendered", "stopped"}


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("qwen3_tied"), tmp_path / "model"))


def refused(model: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_policy(model)
    return str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer.model", "generation_config.json"])
def test_a_file_of_a_model_that_is_too_large(name: str, model: Path) -> None:
    with (model / name).open("ab") as file:
        file.truncate(257 * MIB)
    assert f"{name} cannot be used: it has more than 256 MiB" in refused(model)


def test_settings_that_are_too_large(model: Path) -> None:
    with (model / "config.json").open("ab") as file:
        file.truncate(17 * MIB)
    assert "config.json cannot be used: it has more than 16 MiB" in refused(model)
    (model / "adapter_config.json").write_bytes(b" " * (17 * MIB))
    with pytest.raises(ModelError, match=r"adapter_config.json cannot be used: it has more than 16 MiB"):
        read_adapter(model)


def header(entries: dict[str, Any], values: int = 0, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * values


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "longer than the file": header({}, length=2**62),
    "a shape of more than the bytes": header({"a": ENTRY | {"shape": [2**40]}}, 8),
    "a shape that overflows": header({"a": ENTRY | {"shape": [2**62, 4]}}, 8),
    "parts behind the file": header({"a": ENTRY | {"shape": [2**30], "data_offsets": [0, 2**32]}}, 8),
    "parts over each other": header({"a": ENTRY, "b": ENTRY}, 8),
    "offsets below 0": header({"a": ENTRY | {"data_offsets": [-8, 0]}}, 8),
    "nested": struct.pack("<Q", 200_000) + b"[" * 200_000,
}


@pytest.mark.parametrize("name", HEADERS)
def test_weights_whose_header_lies(name: str, model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    file.write_bytes(HEADERS[name])
    save_file({"other": torch.zeros(10**6)}, model / "other.safetensors")  # so that config.json is not what is refused
    assert "could not be loaded" in refused(model)


def test_our_own_reader_of_headers_has_the_same_ceiling(tmp_path: Path) -> None:
    """It reads checkpoints, whose parts it maps."""
    save_file({"a": torch.zeros(2)}, tmp_path / "a")
    assert list(tensor_places(tmp_path / "a")) == ["a"]
    (tmp_path / "a").write_bytes(HEADERS["longer than the file"])
    with pytest.raises(bounded.TooLargeError, match="has a header of 4,611,686,018,427,387,904 bytes"):
        tensor_places(tmp_path / "a")


def test_config_that_asks_for_weights_that_are_not_there(model: Path) -> None:
    """Nothing of the size that it says is made before its weights are looked for."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 2**30}))
    assert "config.json asks for weights of vocab_size 1,073,741,824 x hidden_size" in refused(model)


def test_a_configuration_whose_anchors_grow(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    tracemalloc.start()
    with pytest.raises(ConfigError):
        load_config(tmp_path / "run.yaml")
    assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    tracemalloc.stop()


def test_a_frame_of_a_reward_that_announces_more_than_it_may() -> None:
    """It is refused by its length, before any of it is waited for."""
    ours, theirs = frames.connected()
    one = frames.Frames(ours, frames.LARGEST_ANSWER)
    theirs.sendall(struct.pack("<I", 2**31 - 1) + b"{")
    with pytest.raises(frames.FrameError, match="bytes announced; at most 65536 are taken"):
        one.receive(time.monotonic() + 30)
    one.close()
    theirs.close()
