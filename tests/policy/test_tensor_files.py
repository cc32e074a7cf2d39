"""Our files of tensors are those that safetensors writes, byte for byte, and each piece of one is progress."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from truestep import progress
from truestep.policy import tensor_files
from truestep.policy.tensor_files import read_tensors, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=generator)
    found = {f'{str(dtype).removeprefix("torch.")} é"': values.to(dtype) for dtype in tensor_files._TYPES}
    return found | {
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "b": values[1].clone(),
        "a.10": values.bool(),
        "a.9": values.bool(),
        "large": torch.randn(100_000, generator=generator),
    }


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(
    metadata: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE", 1000)
    monkeypatch.setattr(tensor_files, "_SYNCED", 30_000)
    given = tensors()
    save_file(given, tmp_path / "theirs", metadata)
    before = progress.amounts()
    write_tensors(given, tmp_path / "ours", metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    size = (tmp_path / "ours").stat().st_size
    for kind in ("bytes written", "bytes on the disk"):
        assert progress.amounts()[kind] - before.get(kind, 0) == size
    read, theirs = read_tensors(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert {name: (value.dtype, value.shape) for name, value in read.items()} == {
        name: (value.dtype, value.shape) for name, value in theirs.items()
    }
    assert all(
        torch.equal(read[name].double(), value.double()) for name, value in theirs.items() if value.is_floating_point()
    )
    assert progress.amounts()["bytes read"] - before.get("bytes read", 0) == sum(v.nbytes for v in read.values())


def test_a_tensor_that_is_no_run_of_memory_is_written_as_it_looks(tmp_path: Path) -> None:
    value = torch.arange(12.0).view(3, 4).T
    write_tensors({"value": value}, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["value"], value)


def test_no_tensors_are_a_file_too(tmp_path: Path) -> None:
    write_tensors({}, tmp_path / "ours")
    save_file({}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tensors({"value": torch.zeros(10)}, "/dev/full")
