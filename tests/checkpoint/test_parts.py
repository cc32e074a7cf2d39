"""Parts of tensors: what each rank writes, and that any box is read from any cut, no more of the files than that."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from checkpoints import latest, read_weights
from documents import same_bits
from small_runs import file_config, quiet_trainer, write_rollouts
from truestep.files.tensors import write_image
from truestep.model.loading.load import load_policy
from truestep.model.loading.read import read_model
from truestep.model.policy import Policy
from truestep.process import progress
from truestep.run.checkpoint.checksums import RunningChecksums, write_checksums
from truestep.run.checkpoint.comparison import find_damage
from truestep.run.checkpoint.staging import Staging
from truestep.weights.lazy import Unread
from truestep.weights.tensor_parts import (
    FOLDER,
    WEIGHT,
    Box,
    StoredTensors,
    TensorPart,
    _packed,
    _unpacked,
    describe_parts,
    part_name,
    unread_weight,
    write_index,
)

Model = Callable[[str], Path]


def boxes_of(shape: tuple[int, ...], draw: random.Random) -> Iterator[Box]:
    """Cut a shape by a random grid."""
    borders = [sorted({0, size, *(draw.randrange(size + 1) for _ in range(draw.randrange(3)))}) for size in shape]
    for cells in itertools.product(*(list(itertools.pairwise(each)) for each in borders)):
        yield Box(tuple(a for a, _ in cells), tuple(b - a for a, b in cells))


def write_cut(checkpoint: Path, tensors: dict[str, torch.Tensor], ranks: int, draw: random.Random) -> None:
    """Write tensors as so many ranks would that have random boxes of them."""
    (checkpoint / FOLDER).mkdir(parents=True)
    shares: list[list[TensorPart]] = [[] for _ in range(ranks)]
    for key, tensor in tensors.items():
        for number, box in enumerate(boxes_of(tuple(tensor.shape), draw)):
            values = tensor[box.inside(Box((0,) * tensor.ndim, tuple(tensor.shape)))]
            free = [share for share in shares if all(part.key != key for part in share)]
            if number >= ranks:  # a rank has one box of a tensor
                shares.append([])
                free = [shares[-1]]
            draw.choice(free).append(TensorPart(key, tuple(tensor.shape), box.start, values))
    described = []
    for rank, share in enumerate(shares):
        file = checkpoint / FOLDER / part_name(rank)
        staged = Staging().stage(share)
        staged.copy()
        write_image(staged.image, file)
        described.append(describe_parts(file, share))
    write_index(checkpoint / FOLDER, described)


@pytest.mark.parametrize("seed", range(12))
def test_any_box_is_read_from_any_cut(seed: int, tmp_path: Path) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tensors = {
        "matrix": torch.randn(13, 7, generator=generator),
        "half": torch.randn(6, 5, 4, generator=generator).bfloat16(),
        "codes": torch.randint(-9, 9, (11,), generator=generator, dtype=torch.int8),
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
    }
    write_cut(tmp_path, tensors, 4, draw)
    stored = StoredTensors(tmp_path)
    assert set(stored.keys()) >= {"matrix", "half", "codes", "number"}
    for key in stored.keys():  # noqa: SIM118
        whole, tensor = Box((0,) * tensors[key].ndim, tuple(tensors[key].shape)), tensors[key]
        assert same_bits(stored.read_whole(key), tensor) and stored.dtype(key) == tensor.dtype
        for _ in range(20):
            start = tuple(draw.randrange(size + 1) for size in tensor.shape)
            shape = tuple(draw.randrange(size - a + 1) for a, size in zip(start, tensor.shape, strict=True))
            box = Box(start, shape)
            assert same_bits(stored.read(key, box), tensor[box.inside(whole)].contiguous())


def test_a_hole_is_refused(tmp_path: Path) -> None:
    """A planted fault: a part that no file has."""
    write_cut(tmp_path, {"a": torch.arange(12.0).view(6, 2)}, 3, random.Random(3))
    file = tmp_path / FOLDER / "tensors.json"
    index = json.loads(file.read_text())
    entry = index["tensors"]["a"]
    whole = entry["parts"]
    entry["parts"] = _packed(_unpacked(whole, 6)[:-1])
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a has .* of the 12 numbers"):
        StoredTensors(tmp_path).read_whole("a")
    entry["parts"] = whole[:-8]
    file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="damaged|buffer|padding|reshape"):
        StoredTensors(tmp_path).read_whole("a")


def test_an_index_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It had a list for each part, with the file's name."""
    tensors = {"a": torch.arange(12.0).view(6, 2), "b": torch.tensor(3.0)}
    write_cut(tmp_path, tensors, 3, random.Random(3))
    file = tmp_path / FOLDER / "tensors.json"
    index = json.loads(file.read_text())
    for key, entry in index["tensors"].items():
        ndim = tensors[key].ndim
        rows = _unpacked(entry["parts"], 2 + 2 * ndim).tolist()
        entry["parts"] = [[index["files"][row[0]], row[1], row[2 : 2 + ndim], row[2 + ndim :]] for row in rows]
    file.write_text(json.dumps({"tensors": index["tensors"]}))
    stored = StoredTensors(tmp_path)
    assert all(same_bits(stored.read_whole(key), tensor) for key, tensor in tensors.items())


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A view of a weight that is not read yet, cut over columns and then rows, reads its own numbers alone."""
    tensor = torch.randn(64, 32)
    write_cut(tmp_path, {WEIGHT + "w": tensor}, 4, random.Random(1))
    stored = StoredTensors(tmp_path)
    unread = torch.nn.Parameter(unread_weight(stored, WEIGHT + "w", torch.empty(64, 32, device="meta")))
    part = torch.nn.Parameter(unread.detach().narrow(1, 8, 16))[10:20]
    assert isinstance(part, Unread)
    before = progress.amounts().get("bytes read", 0)
    assert same_bits(part.read(), tensor[10:20, 8:24].contiguous())
    assert progress.amounts()["bytes read"] - before == 10 * 16 * 4
    assert same_bits((unread * 2).read(), tensor * 2), "any other operation reads all of it"


@pytest.mark.parametrize("sizes", [[0], [5], [64, 3], [1, 63, 64, 65, 128]])
def test_checksums_made_while_writing_are_those_of_the_file(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.run.checkpoint.checksums.STRETCH", 64)
    (tmp_path / FOLDER).mkdir()
    content = random.Random(1).randbytes(sum(sizes))
    (tmp_path / "file").write_bytes(content)
    running, place = RunningChecksums(), 0
    for size in sizes:
        running.add(memoryview(content)[place : place + size])
        place += size
    write_checksums(tmp_path)
    manifest = tmp_path / FOLDER / "checksums.json"
    assert json.loads(manifest.read_text())["files"]["file"] == running.entry()


def test_the_staging_memory_is_used_again_and_is_no_larger_than_the_parts() -> None:
    staging = Staging()
    parts = [TensorPart(f"{n}", (100, n), (0, 0), torch.full((100, n), float(n))) for n in range(1, 9)]
    first = staging.stage(parts)
    first.copy()
    place = staging._room.data_ptr()
    for part in parts:
        part.values.zero_()  # an update
    assert all((part.values == float(part.key)).all() for part in first.parts)
    staging.stage(parts).copy()
    assert staging._room.data_ptr() == place
    assert staging._room.nbytes == first.image.nbytes <= sum(part.values.nbytes for part in parts) + 100 * len(parts)


def test_staging_memory_that_a_thread_makes_is_what_the_first_save_uses() -> None:
    staging = Staging()
    parts = [TensorPart("one", (100, 7), (0, 0), torch.full((100, 7), 1.0))]
    assert not staging.has_room
    staging.make_room_beside(parts)
    assert staging.has_room, "it is on its way"
    assert staging._making is not None
    staging._making.wait()
    place = staging._room.data_ptr()
    given = staging.stage(parts)
    given.copy()
    (staged,) = given.parts
    assert staged.values.data_ptr() == place + given.image.nbytes - staged.values.nbytes
    assert staging.has_room and staged.values.eq(1).all()


class FakeStream:
    """A GPU's stream."""

    def __init__(self) -> None:
        self.waited, self.copied = 0, [0]  # bytes, between one wait of the host's and the next

    def wait_event(self, _: object) -> None:
        self.waited += 1

    def synchronize(self) -> None:
        self.copied.append(0)


def test_a_gpu_is_asked_for_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small copies that a step waits for come through between the pieces."""
    monkeypatch.setattr("truestep.run.checkpoint.staging._PIECE", 4096)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    generator = torch.Generator().manual_seed(0)
    shapes = [(7,), (5000,), (), (300, 77), (4096,), (2, 3)]
    parts = [TensorPart(f"{n}", tuple(shape), (0,) * len(shape), torch.randn(shape, generator=generator))
             for n, shape in enumerate(shapes)]  # fmt: skip
    parts.append(TensorPart("turned", (60, 50), (0, 0), torch.randn(50, 60, generator=generator).T))
    staged, stream = Staging().stage(parts), FakeStream()
    staged._stream = stream
    pieces = staged._pieces

    def counted() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for source, target in pieces():
            stream.copied[-1] += source.nbytes
            yield source, target

    monkeypatch.setattr(staged, "_pieces", counted)
    staged.copy()
    assert all(torch.equal(copy.values, part.values) for copy, part in zip(staged.parts, parts, strict=True))
    assert stream.waited == 1 and max(stream.copied) < 3 * 4096 < sum(stream.copied) and stream.copied[-1] == 0
    staged.before_update()


def test_an_update_goes_on_where_a_copy_failed() -> None:
    """The save fails, and says so to all ranks after the step."""
    staged = Staging().stage([TensorPart("one", (3,), (0,), torch.zeros(3))])
    staged._sources = [torch.zeros(4)]
    with pytest.raises(RuntimeError):
        staged.copy()
    staged.before_update()


def test_a_save_fails_with_what_the_thread_that_makes_its_memory_failed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> torch.Tensor:
        raise MemoryError("planted")

    monkeypatch.setattr("truestep.run.checkpoint.staging.mapped", refused)
    staging = Staging()
    parts = [TensorPart("one", (100, 7), (0, 0), torch.zeros(100, 7))]
    staging.make_room_beside(parts)
    with pytest.raises(MemoryError, match="planted"):
        staging.stage(parts).copy()


@pytest.mark.parametrize(("every", "made"), [(0, 0), (1, 0), (2, 1)])
def test_the_memory_is_made_once_and_before_the_first_save(
    every: int, made: int, tiny_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that saves after its first step has nothing to make it beside; one that saves at its end needs none."""
    honest, sizes = Staging.make_room_beside, []

    def counted(self: Staging, parts: Sequence[TensorPart]) -> None:
        sizes.append(sum(part.values.nbytes for part in parts))
        honest(self, parts)

    monkeypatch.setattr(Staging, "make_room_beside", counted)
    write_rollouts(tmp_path / "r.jsonl", 24)
    given = {"every": every, "keep": 9}
    trainer = quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", checkpoint=given))
    trainer.run()
    assert len(sizes) == made
    room = trainer.saves._staging._room.nbytes
    assert all(size <= room < size + 64 * 400 for size in sizes), "it is as large as what is staged"


@pytest.mark.parametrize("kind", ["llama", "qwen3_tied", "gemma2", "mistral"])
def test_a_checkpoint_is_the_model_that_was_saved(kind: str, tiny_model: Model, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "r.jsonl", 10)
    trainer = quiet_trainer(file_config(tiny_model(kind), tmp_path / "r.jsonl", tmp_path / "run"))
    trainer.run()
    again = load_policy(latest(tmp_path / "run"), device="cpu")
    check_same_policy(again, trainer.policy)
    model = read_model(latest(tmp_path / "run"))[0]
    assert all(isinstance(weight, Unread) for weight in model.parameters()), "nothing is read before it is needed"


def check_same_policy(one: Policy, other: Policy) -> None:
    assert one.weights.master.keys() == other.weights.master.keys()
    assert all(same_bits(one.weights.master[name], value) for name, value in other.weights.master.items())
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    assert mine.keys() == theirs.keys() and all(same_bits(mine[name], value) for name, value in theirs.items())
    assert dict(one.companions) == dict(other.companions) and one.head == other.head
    assert one.model.generation_config.to_dict() == other.model.generation_config.to_dict()


def test_every_nth_checkpoint_is_a_hugging_face_directory(tiny_model: Model, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_rollouts(tmp_path / "r.jsonl", 40)
    given = {"every": 2, "keep": 9, "hugging_face_every": 2}
    quiet_trainer(file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", checkpoint=given)).run()
    found = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [file.name[-1] for file in found if (file / "model.safetensors").is_file()] == ["4", "8"]
    assert len(found) == 4 and find_damage(found[1]) is None
    theirs = AutoModelForCausalLM.from_pretrained(found[1]).state_dict()
    assert all(same_bits(theirs[name], value) for name, value in read_weights(found[1]).items())
