"""Foreign files: what cannot be read ends with exit code 2, and no pickle runs code."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from audit.faults import PLANTED
from audit.world import World, sample
from audit.writers import WRITERS, truestep
from truestep.commands.cli import main
from truestep.files import bounded
from truestep.tools.audit import opening
from truestep.tools.audit.formats.arrays import array
from truestep.tools.audit.opening import UnreadableError, find_files, read_records
from truestep.tools.audit.run import audit

SMALL = World(steps=1, groups=2, size=2)
RECORD = {"input_ids": [3, 4, 5], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -2.0]}


def typed(*words: str) -> Any:
    return CliRunner().invoke(main, ["audit", *words])


class Runs:
    """Unpickled, it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_pickle_that_runs_code_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train_0_0.pt"
    torch.save({"rollout_id": 0, "rollout_data": {"tokens": Runs(tmp_path / "made")}}, path)
    with pytest.raises(UnreadableError, match=r"posix\.mkdir"):
        audit([path])
    assert not (tmp_path / "made").exists()


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.pt"
    path.write_bytes(pickle.dumps(Runs(tmp_path / "made")))
    with pytest.raises(UnreadableError, match=r"no archive of torch\.save"):
        audit([path])
    assert not (tmp_path / "made").exists()


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    torch.save({"rollout_data": torch.zeros(10_000_000, dtype=torch.uint8)}, tmp_path / "whole.pt")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt") as whole,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name))
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(UnreadableError, match=r"compressed, which torch\.save never does"):
        audit([tmp_path / "bomb.pt"])


def test_a_tensor_that_repeats_a_number_without_end_is_refused() -> None:
    with pytest.raises(UnreadableError, match="values"):
        array(torch.zeros(1).expand(2**40), "tokens")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("dump.jsonl", b'{"input_ids": [1', "line 1 is no JSON"),
        ("dump.jsonl", b"[1, 2]\n", "no object"),
        ("dump.jsonl", b'{"text": "a"}\n', "fields"),
        ("config.json", b'{"text": "a"}', "Name dumps, or directories of dumps alone"),
        ("dump.jsonl", b"", "no sample"),
        ("dump.jsonl", b'{"input_ids": ["a"], "prompt_length": 1}\n', "type str"),
        ("dump.jsonl", b'{"input_ids": [[1], [2]], "prompt_length": 1}\n', "type list"),
        ("dump.jsonl", b'{"input_ids": [1.5e400], "prompt_length": 1}\n', "input_ids"),
        ("dump.jsonl", b'{"rollout_data": {"tokens": 3, "response_lengths": []}}\n', "cannot be read"),
        ("dump.jsonl", b'{"choices": [5]}\n', "no object"),
        ("dump.jsonl", b'{"group_idx": 0, "traj_idx": 0, "steps": 7}\n', "no list"),
        ("dump.json", b"[" * 5000, "cannot be read"),
        ("dump.parquet", b"PAR1nothing", "cannot be read"),
        ("dump.txt", b"{}", "suffix"),
    ],
)
def test_what_cannot_be_read_ends_with_2(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    result = typed(str(tmp_path / name))
    assert result.exit_code == 2
    assert says in result.stderr


def test_paths_that_are_no_dumps_end_with_2(tmp_path: Path) -> None:
    assert typed(str(tmp_path / "missing.jsonl")).exit_code == 2
    assert typed(str(tmp_path)).exit_code == 2
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert typed(str(tmp_path / "pipe.jsonl")).exit_code == 2


def test_lines_and_files_have_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(RECORD) + "\n", encoding="utf-8")
    monkeypatch.setattr(bounded, "RECORD", 20)
    with pytest.raises(UnreadableError, match="20 bytes"):
        list(read_records(path))
    (tmp_path / "dump.json").write_text(json.dumps([RECORD]), encoding="utf-8")
    monkeypatch.setattr(opening, "_MOST_JSON", 20)
    with pytest.raises(UnreadableError, match="20 bytes"):
        list(read_records(tmp_path / "dump.json"))


def test_exit_codes_and_the_page(tmp_path: Path) -> None:
    (clean,) = truestep(sample(World()), tmp_path / "clean")
    result = typed(str(clean), "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    assert "no finding" in result.stdout
    assert "No finding." in (tmp_path / "page.html").read_text(encoding="utf-8")
    fault = next(one for one in PLANTED if one.finding == "logprob-invalid")
    (faulty,) = fault.write(tmp_path / "faulty")
    named = faulty.rename(faulty.with_name("<b>dump.jsonl"))
    result = typed(str(named), "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 1
    assert "logprob-invalid" in result.stdout
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines() if str(tmp_path) not in line)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;dump" in page
    assert "<b>" not in page
    assert "default-src 'none'" in page
    assert "src=" not in page
    assert "<script" not in page


@pytest.mark.parametrize("source", WRITERS)
def test_a_format_that_is_named_is_the_one_that_is_read(source: str, tmp_path: Path) -> None:
    files = WRITERS[source](sample(SMALL), tmp_path)
    assert audit(files, source=source).samples >= 4
    other = "verl" if source != "verl" else "prime-rl"
    with pytest.raises(UnreadableError, match=f"not {other}'s"):
        audit(files, source=other)


def test_files_of_a_directory_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (10, 9, 100):
        (tmp_path / f"{number}.jsonl").write_text("{}", encoding="utf-8")
    assert [file.stem for file in find_files([tmp_path])] == ["9", "10", "100"]


def test_numpy_arrays_of_a_dump_are_read(tmp_path: Path) -> None:
    torch.save({"rollout_data": {"routes": np.arange(6, dtype=np.int32).reshape(1, 2, 3)}}, tmp_path / "one.pt")
    ((_, record),) = read_records(tmp_path / "one.pt")
    assert record["rollout_data"]["routes"].tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_null_is_a_log_prob_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text(json.dumps(RECORD | {"logprobs": [None, -1.0, None]}) + "\n", encoding="utf-8")
    (finding,) = audit([path]).findings
    assert (finding.name, finding.position, finding.token) == ("logprob-invalid", 2, 5)


def test_compressed_lines_are_read_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = b"".join(json.dumps(RECORD | {"id": str(number)}).encode() + b"\n" for number in range(20))
    path = tmp_path / "dump.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    assert [record["id"] for _, record in read_records(path)] == [str(number) for number in range(20)]
    assert find_files([tmp_path]) == [path] and audit([path]).samples == 20
    monkeypatch.setattr(opening, "_MOST_DECOMPRESSED", len(lines) - 1)
    with pytest.raises(UnreadableError, match="decompressed, it has more than"):
        list(read_records(path))
    monkeypatch.undo()
    for content in (gzip.compress(lines)[:-9], gzip.compress(lines)[:40] + b"\0" * 60, lines):
        path.write_bytes(content)
        with pytest.raises(UnreadableError, match="cannot be read"):
            list(read_records(path))
    with pytest.raises(UnreadableError, match="unknown suffix"):
        list(read_records(tmp_path / "dump.parquet.gz"))
