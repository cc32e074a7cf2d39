"""Our files of tensors are those that safetensors writes, byte for byte, and each piece of one is progress."""

from __future__ import annotations

import errno
import fcntl
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from truestep.files import tensors as tensor_files
from truestep.files.tensors import lay_out, write_image, write_tensors
from truestep.gpu.pinned import mapped
from truestep.process import progress


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
    read, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "theirs")
    assert {name: (value.dtype, value.shape) for name, value in read.items()} == {
        name: (value.dtype, value.shape) for name, value in theirs.items()
    }
    assert all(
        torch.equal(read[name].double(), value.double()) for name, value in theirs.items() if value.is_floating_point()
    )


def image_of(given: dict[str, torch.Tensor], shift: int = 0) -> torch.Tensor:
    """Give the bytes of a file in memory that begins at a page, or so many bytes behind it."""
    layout = lay_out(given)
    image = torch.frombuffer(mapped(layout.size + shift), dtype=torch.uint8)[shift:]
    image[: len(layout.header)] = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    for name, tensor in given.items():
        start = layout.starts[name]
        image[start : start + tensor.nbytes] = tensor.contiguous().reshape(-1).view(torch.uint8)
    return image


def takes_pages(folder: Path) -> bool:
    """Tell whether this file system can write straight from memory."""
    try:
        with (folder / "probe").open("wb", buffering=0) as file:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            file.write(mapped(4096))
    except OSError:
        return False
    return True


class Writes:
    """What is written straight to the disk, in bytes, and what by way of the system's own copies. This disk takes so
    many pieces straight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: float = math.inf):
        self.straight, self.others, honest = list[int](), list[int](), os.write

        def write(handle: int, content: Any) -> int:
            straight = bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)
            if straight and len(self.straight) >= takes:
                raise OSError(errno.EINVAL, "Invalid argument")
            count = honest(handle, content)
            (self.straight if straight else self.others).append(count)
            return count

        monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("shift", [0, 64])
@pytest.mark.parametrize("takes", [math.inf, 1, 0])
def test_an_image_is_the_same_file_however_it_comes_to_the_disk(
    shift: int, takes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_PIECE", 2**16)
    given, shown, before = tensors(), list[bytes](), progress.amounts()
    write_tensors(given, tmp_path / "known")
    size = (tmp_path / "known").stat().st_size
    straight = min(size // 4096 * 4096, takes * 2**16) if takes_pages(tmp_path) and not shift else 0
    writes = Writes(monkeypatch, takes)
    write_image(image_of(given, shift), tmp_path / "ours", lambda content: shown.append(bytes(content)))
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "known").read_bytes() == b"".join(shown)
    assert progress.amounts()["bytes on the disk"] - before.get("bytes on the disk", 0) == 2 * size
    assert sum(writes.straight) + sum(writes.others) == size
    assert sum(writes.straight) == straight


def test_an_image_on_a_file_system_that_writes_by_way_of_copies_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = fcntl.fcntl

    def refuse(handle: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return honest(handle, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    writes = Writes(monkeypatch)
    write_image(image_of(tensors()), tmp_path / "ours")
    assert not writes.straight
    assert (tmp_path / "ours").read_bytes() == bytes(image_of(tensors()).numpy())


def test_an_image_that_a_disk_has_no_room_for_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_image(image_of(tensors()), "/dev/full")

    def full(handle: int, content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_image(image_of(tensors()), tmp_path / "ours")


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
