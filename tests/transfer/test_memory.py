"""Weights in memory that two processes share: what arrives is what was sent, or it is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiny import expert_model, make_model
from truestep.policy.loading.load import load_policy
from truestep.policy.save import save_policy
from truestep.sampler.server.sync import Publisher, Wanted, WeightsDirectory
from truestep.transfer import memory as memory_module
from truestep.transfer.checksum import _BLOCK as BLOCK
from truestep.transfer.checksum import ROW, checksum
from truestep.transfer.memory import MemoryFullError, SharedMemory, room_of
from truestep.transfer.receiver import CHECKED, FAILED, Receiver, TransferError


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[SharedMemory]:
    made = SharedMemory(tmp_path, 4)
    yield made
    made.close()


def write(memory: SharedMemory, name: str, tensors: dict[str, torch.Tensor], size: int = 0) -> Path:
    memory.begin(name, size)
    memory.add(tensors)
    return memory.finish()


def marks_of(receiver: Receiver, index: Path, folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    receiver.stage(str(index), str(folder))
    assert receiver._staged is not None
    receiver._staged._thread.join()
    return [mark.suffix for mark in folder.iterdir()]


def taken(receiver: Receiver, index: Path, folder: Path) -> dict[str, torch.Tensor]:
    assert marks_of(receiver, index, folder) == [CHECKED]
    found: dict[str, torch.Tensor] = {}
    receiver.load(str(index), lambda weights: found.update({name: value.clone() for name, value in weights}))
    return found


def some(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(BLOCK // 3, 5, generator=draw),
        "odd": torch.randint(0, 255, (ROW + 3,), dtype=torch.uint8, generator=draw),
        "half": torch.randn(7, 9, generator=draw).bfloat16(),
        "none": torch.empty(0, 4),
        "one": torch.tensor(3.5),
        "turned": torch.randn(6, 5, generator=draw).t(),
    }


def same(found: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(sent) and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in sent.items()
    )


def test_what_arrives_is_what_was_sent(memory: SharedMemory, tmp_path: Path) -> None:
    receiver = Receiver()
    receiver.connect(str(memory.path), memory.token)
    for number in range(4):
        assert same(
            taken(receiver, write(memory, str(number), some(number)), tmp_path / f"marks{number}"), some(number)
        )
    assert [slot.path.name for slot in memory._slots] == ["slot-0", "slot-1"], "two files, written by turns"
    assert len(list(memory.path.glob("*.weights.json"))) == 2


def plain_checksum(content: bytes) -> str:
    """Add up words one at a time, as the docstring says."""
    words = rows = 0
    for number, start in enumerate(range(0, len(content), ROW), 1):
        row = content[start : start + ROW].ljust(ROW, b"\0")
        total = sum(int.from_bytes(row[at : at + 8], "little") for at in range(0, ROW, 8))
        words, rows = words + total, rows + number * total
    return f"{words % 2**64:016x}{rows % 2**64:016x}"


@pytest.mark.parametrize("size", [0, 1, 8, ROW - 1, ROW, ROW + 1, BLOCK - ROW, BLOCK, 2 * BLOCK + 77])
def test_a_checksum_is_that_of_a_plain_loop(size: int) -> None:
    content = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    assert checksum(content) == plain_checksum(bytes(content.numpy()))


@pytest.mark.parametrize("size", [memory_module._STRETCH, 2 * memory_module._STRETCH + 77])
def test_what_several_threads_copy_has_the_checksum_of_the_whole(memory: SharedMemory, size: int) -> None:
    sent = torch.from_numpy(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    entry = json.loads(write(memory, "1", {"sent": sent}).read_text())["tensors"]["sent"]
    assert entry["checksum"] == checksum(sent)
    assert memory._slots[0].content[:size].tobytes() == sent.numpy().tobytes()


def test_a_checksum_sees_what_can_go_wrong() -> None:
    sent = torch.randn(64, 1024)
    right = checksum(sent)
    flipped = sent.clone()
    flipped.view(torch.int32)[63, 1023] ^= 1
    turned = sent[torch.tensor([1, 0, *range(2, 64)])]
    short = torch.cat([sent[:-1], torch.zeros(1, 1024)])
    assert len({right, *(checksum(other) for other in (flipped, turned, short, sent.t().contiguous()))}) == 5


def test_an_addition_is_copied_while_the_next_one_is_made(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives weights up waits for the copies that were begun, and no other one is begun."""
    honest, begun, held, copied = memory_module._copy, threading.Event(), threading.Event(), list[int]()

    def slow(content: Any, room: Any, start: int) -> Any:
        begun.set()
        held.wait(60)
        copied.append(len(content))
        return honest(content, room, start)

    monkeypatch.setattr(memory_module, "_copy", slow)
    memory.begin("w", 1000)
    memory.add({f"{number}": torch.ones(number) for number in range(1, 9)})
    assert begun.wait(60) and not copied, "nobody waited"
    threading.Timer(0.2, held.set).start()
    memory.abandon()
    assert 0 < len(copied) <= 4, "one of each thread"


def test_what_a_copy_fails_with_is_raised_before_weights_are_shown(
    memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = memory_module._copy

    def failing(content: Any, room: Any, start: int) -> Any:
        if len(content) == 8:
            raise OSError(5, "planted")
        return honest(content, room, start)

    monkeypatch.setattr(memory_module, "_copy", failing)
    memory.begin("w", 1000)
    memory.add({"whole": torch.ones(7)})
    memory.add({"broken": torch.ones(2)})
    with pytest.raises(OSError, match="planted"):
        memory.finish()
    assert not list(memory.path.glob("*.json"))
    monkeypatch.setattr(memory_module, "_copy", honest)
    assert write(memory, "again", {"whole": torch.ones(7)}).exists()


def test_a_changed_byte_is_found_and_nothing_is_loaded(memory: SharedMemory, tmp_path: Path) -> None:
    index = write(memory, "a", some())
    begin = json.loads(index.read_text())["tensors"]["half"]["begin"]
    memory._slots[0].content[begin + 5] ^= 4
    receiver = Receiver()
    assert marks_of(receiver, index, tmp_path / "marks") == [FAILED]
    with pytest.raises(TransferError, match="half arrived with checksum"):
        receiver.load(str(index), lambda weights: pytest.fail("it was given weights"))


def test_half_of_the_tensors_is_not_enough(memory: SharedMemory, tmp_path: Path) -> None:
    index, receiver = write(memory, "a", some()), Receiver()
    marks_of(receiver, index, tmp_path / "marks")
    with pytest.raises(TransferError, match="did not take 4 tensors of 6"):
        receiver.load(str(index), lambda weights: {name for name, _ in [next(weights), next(weights)]})


def test_weights_that_were_not_staged_are_not_loaded(memory: SharedMemory, tmp_path: Path) -> None:
    first, receiver = write(memory, "a", some()), Receiver()
    with pytest.raises(TransferError, match="was not staged"):
        receiver.load(str(first), lambda weights: set())
    marks_of(receiver, first, tmp_path / "marks")
    with pytest.raises(TransferError, match="was not staged"):
        receiver.load(str(write(memory, "b", some())), lambda weights: set())


def test_what_is_read_is_not_written_over(memory: SharedMemory, tmp_path: Path) -> None:
    slow = Receiver()
    first = write(memory, "first", some(1))
    assert marks_of(slow, first, tmp_path / "slow") == [CHECKED]
    for number in range(2, 6):
        write(memory, str(number), some(number))
    assert len(memory._slots) == 3, "the file that is being read was passed over"
    found: dict[str, torch.Tensor] = {}
    slow.load(str(first), lambda weights: found.update({name: value.clone() for name, value in weights}))
    assert same(found, some(1))
    for number in range(6, 9):
        write(memory, str(number), some(number))
    assert len(memory._slots) == 3 and not first.exists()
    with pytest.raises(TransferError, match="cannot be read"):
        slow.stage(str(first), str(tmp_path / "slow"))


def test_weights_that_are_being_written_are_not_read(memory: SharedMemory, tmp_path: Path) -> None:
    index = write(memory, "a", some())
    kept = index.read_bytes()
    write(memory, "b", some())
    memory.begin("c", 0)
    index.write_bytes(kept)  # as one that was opened before it was removed
    with pytest.raises(TransferError, match="other weights are being written"):
        Receiver().stage(str(index), str(tmp_path))


def test_no_room_is_an_error_before_anything_is_written(memory: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(memory, "a", some())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_module.os, "posix_fallocate", full)
    with pytest.raises(MemoryFullError, match=r"no room for 1\.00 GB of weights: No space"):
        memory.begin("b", 10**9)
    monkeypatch.undo()
    assert first.exists()
    assert write(memory, "c", some()).exists()


def test_tensors_of_odd_sizes_take_no_more_than_was_asked_for(memory: SharedMemory) -> None:
    """A file that has to grow grows by an eighth, for which there may be no room."""
    tensors = {str(number): torch.zeros(1003, dtype=torch.uint8) for number in range(50)}
    size = sum(room_of(tensor.nbytes) for tensor in tensors.values())
    memory.begin("a", size)
    memory.add(tensors)
    memory.finish()
    assert (memory.path / "slot-0").stat().st_size == size


def test_another_machine_s_memory_is_known(memory: SharedMemory, tmp_path: Path) -> None:
    receiver = Receiver()
    with pytest.raises(TransferError, match="cannot be read here"):
        receiver.connect(str(tmp_path / "elsewhere"), memory.token)
    with pytest.raises(TransferError, match="another machine or run"):
        receiver.connect(str(memory.path), "another")
    receiver.connect(str(memory.path), memory.token)


def _leave_memory(parent: Path, pipe: Any) -> None:
    made = SharedMemory(parent)
    write(made, "a", some())
    made.begin("b", 0)
    pipe.send(str(made.path))
    signal.pause()


def test_memory_of_a_killed_trainer_is_freed_by_the_next_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_leave_memory, args=(tmp_path, there))
    process.start()
    left = Path(here.recv())
    SharedMemory(tmp_path).close()
    assert left.is_dir(), "its process lives"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    SharedMemory(tmp_path).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["qwen3_tied", "llama", "experts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_of_a_model_arrives(kind: str, dtype: torch.dtype, memory: SharedMemory, tmp_path: Path) -> None:
    """Tied, untied and joined weights, under the names of files, against what a plain save of the policy has."""
    from server.test_publication import stored

    model = expert_model(tmp_path / "model") if kind == "experts" else make_model(tmp_path / "model", kind)
    policy = load_policy(model)
    save_policy(policy, tmp_path / "plain", dtype)
    right = stored(tmp_path / "plain")
    places = Publisher(WeightsDirectory(tmp_path / "disk"), dtype).write(policy, 8, Wanted(False, True), memory)
    assert places.disk is None and places.memory is not None
    found = taken(Receiver(), places.memory, tmp_path / "marks")
    if policy.facts.tied:
        right["lm_head.weight"] = policy.head_weight.detach().to(dtype)
    assert same(found, right)
    sums = {name: entry["checksum"] for name, entry in json.loads(places.memory.read_text())["tensors"].items()}
    assert sums == {name: checksum(value.contiguous()) for name, value in right.items()}
    if kind == "experts":
        assert any(".experts.3." in name for name in found), "one by one, as files have them"


def test_weights_that_memory_has_no_room_for_go_to_the_disk(
    memory: SharedMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(make_model(tmp_path / "model", "llama"))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_module.os, "posix_fallocate", full)
    directory = WeightsDirectory(tmp_path / "disk")
    places = Publisher(directory, torch.float32).write(policy, 0, Wanted(False, True), memory)
    assert places.memory is None and places.disk is not None and places.disk.is_dir()
    with pytest.raises(MemoryFullError):
        Publisher(directory, torch.float32, memory_alone=True).write(policy, 0, Wanted(False, True), memory)


def test_a_server_needs_nothing_of_the_trainer() -> None:
    """What is installed beside a vLLM imports neither transformers nor any other part of truestep."""
    code = (
        "import sys, truestep.transfer.receiver, truestep.transfer.vllm_plugin as plugin; plugin.register();"
        "own = [name for name in sys.modules if name.startswith('truestep')];"
        "wrong = [name for name in own if name not in ('truestep', 'truestep.errors')"
        " and not name.startswith('truestep.transfer')];"
        "sys.exit(str(wrong) if wrong or 'transformers' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
