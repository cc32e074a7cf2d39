"""A checkpoint of many ranks that fewer go on from: what each reads is its own part, and hardly more is compared."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from truestep.ranks.axes import RankLayout
from truestep.ranks.elastic import RankLostError
from truestep.ranks.group import Ranks
from truestep.run.checkpoint import checksums, comparison
from truestep.run.checkpoint.comparison import Comparison, shares_of
from truestep.weights import tensor_parts
from truestep.weights.tensor_parts import StoredTensors

WROTE, RESUMED = 16, 12


@pytest.fixture(scope="module")
def many_ranks() -> ModuleType:
    """The benchmark, which does in one process what each of many ranks would do."""
    file = Path(__file__).parents[2] / "benchmarks" / "many_ranks.py"
    spec = importlib.util.spec_from_file_location("many_ranks", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules["many_ranks"] = made  # where dataclasses look for their module
    spec.loader.exec_module(made)
    return made


SHAPES = {"weight/a": (192, 8), "optimizer/a.exp_avg": (192, 8), "weight/b": (48, 64), "weight/c": (50, 3)}
LARGER = {key: (64 * rows, width) for key, (rows, width) in SHAPES.items()}


def test_no_rank_reads_more_than_its_part_and_the_headers(many_ranks: ModuleType, tmp_path: Path) -> None:
    many_ranks.write_checkpoint(tmp_path / "checkpoint", LARGER, WROTE)
    resumed = many_ranks.Resume(tmp_path / "checkpoint", LARGER, RESUMED)
    reads = [resumed.of(rank) for rank in range(RESUMED)]
    assert resumed.damages() == {}
    assert all(read.values == read.own for read in reads)
    assert sum(read.values for read in reads) == sum(4 * rows * width for rows, width in LARGER.values())
    assert many_ranks.most(reads, "both") < 1.05


LAYOUTS = [
    RankLayout(data_shard=12),
    RankLayout(data_shard=1),
    RankLayout(data_shard=5, data_replicate=2),
    RankLayout(data_shard=3, tensor=2, context=2),
    RankLayout(data_shard=1, pipeline=3),
    RankLayout(data_shard=40),  # more than some tensors have rows
    RankLayout(data_shard=4, pipeline=8),
    RankLayout(data_shard=4, data_replicate=8),
    RankLayout(data_shard=4, tensor=8),
    RankLayout(data_shard=2, context=2, expert=4, pipeline=8),
]
# Stacked weights of experts have few rows, and most of the bytes.
WITH_EXPERTS = SHAPES | {"weight/experts": (8, 2048)}


def shares_in(layout: RankLayout) -> list[Any]:
    return [shares_of(Ranks(rank, layout)) for rank in range(math.prod(layout.sizes))]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.sizes)))
@pytest.mark.parametrize("stretch", [1 << 20, 3000])
def test_every_byte_is_compared_by_one_rank(
    layout: RankLayout, stretch: int, many_ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "STRETCH", stretch)
    monkeypatch.setattr(comparison, "READ", 1000)
    many_ranks.write_checkpoint(tmp_path, WITH_EXPERTS, WROTE)
    (tmp_path / "empty").touch()
    (tmp_path / "config.json").write_bytes(bytes(7001))
    checksums.write_checksums(tmp_path)
    compared = Comparison(tmp_path)
    counted = {file: np.zeros(file.stat().st_size, int) for file in tmp_path.rglob("*") if file.is_file()}
    sizes = []
    for shares in shares_in(layout):
        pieces = compared.pieces(shares)
        sizes.append(sum(piece.stop - piece.start for piece in pieces))
        for piece in pieces:
            counted[tmp_path / piece.name][piece.start : piece.stop] += 1
    assert max(sizes) < 2 * sum(sizes) / len(sizes)
    assert {int(each) for file, times in counted.items() if file.name != "checksums.json" for each in times} == {1}
    assert compared.damages([compared.read(shares) for shares in shares_in(layout)]) == {}


def test_a_bit_that_any_rank_reads_is_found(many_ranks: ModuleType, tmp_path: Path) -> None:
    many_ranks.write_checkpoint(tmp_path, SHAPES, WROTE)
    draw, layout = random.Random(0), RankLayout(data_shard=RESUMED)
    for number in (0, 7, 15):
        file = tmp_path / "truestep" / f"part-{number:05d}.safetensors"
        whole = file.read_bytes()
        for place in (0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(8))):
            file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
            compared = Comparison(tmp_path)
            found = compared.damages([compared.read(shares) for shares in shares_in(layout)])
            name = f"truestep/{file.name}"
            assert found == {name: f"{name} is damaged in its bytes 0 to {len(whole)}"}, place
        file.write_bytes(whole)


def told_by(*checkpoints: Path) -> dict[str, str]:
    """What two ranks say, each of which sees one of the checkpoints."""
    compared = [Comparison(each) for each in checkpoints]
    told = [each.read([(rank, len(compared))]) for rank, each in enumerate(compared)]
    (found,) = {json.dumps(each.damages(told)) for each in compared}  # they all say the same
    return dict(json.loads(found))


def test_what_one_rank_cannot_read_all_ranks_say(many_ranks: ModuleType, tmp_path: Path) -> None:
    """One that cannot read the manifest or the index does not know which part is its own."""
    for name in ("a", "b"):
        many_ranks.write_checkpoint(tmp_path / name, SHAPES, 4)
    a, b = tmp_path / "a", tmp_path / "b"
    assert told_by(a, b) == {}
    part, index, manifest = (
        b / "truestep" / name for name in ("part-00002.safetensors", "tensors.json", "checksums.json")
    )
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert told_by(a, b) == {
        "truestep/part-00002.safetensors": f"truestep/part-00002.safetensors has {len(whole) - 1} bytes, and "
        f"{len(whole)} were written"
    }
    part.unlink()
    assert told_by(a, b) == {"truestep/part-00002.safetensors": "truestep/part-00002.safetensors is missing"}
    whole = index.read_bytes()
    index.unlink()
    assert told_by(a, b) == {"truestep/tensors.json": "truestep/tensors.json is missing"}, (
        "and of the part nobody knows"
    )
    index.write_bytes(whole.replace(b"part-00001", b"part-00003"))
    assert next(iter(told_by(a, b))) == "truestep/tensors.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b'"bytes": ', b'"bytes":'))
    assert told_by(a, b)["truestep/checksums.json"] == "truestep/checksums.json is not the same for all ranks"
    manifest.write_bytes(whole[:-10])
    assert "truestep/checksums.json is damaged" in told_by(a, b)["truestep/checksums.json"]
    manifest.unlink()
    assert told_by(a, b)["truestep/checksums.json"] == "truestep/checksums.json is not the same for all ranks"


def test_an_index_that_tells_of_more_than_there_is_ends(many_ranks: ModuleType, tmp_path: Path) -> None:
    many_ranks.write_checkpoint(tmp_path, {"weight/a": (64, 4)}, 2)
    part = tmp_path / "truestep" / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:200])
    checksums.write_checksums(tmp_path)
    assert comparison.find_damage(tmp_path) is None, "the files are those that were written; to read them fails"
    with pytest.raises(ValueError, match="mmap|size|shape"):
        StoredTensors(tmp_path).read_whole("weight/a")


def test_the_index_of_many_ranks_is_small(many_ranks: ModuleType, tmp_path: Path) -> None:
    """Every rank is sent what the others wrote, and reads the index."""
    sizes = []
    for ranks in (4, 64):
        many_ranks.write_checkpoint(tmp_path / str(ranks), {"weight/a": (640, 2)}, ranks)
        sizes.append((tmp_path / str(ranks) / "truestep" / tensor_parts.INDEX).stat().st_size)
    assert sizes[1] < sizes[0] + 60 * 40, "less than 40 bytes for a part"


class Together(Ranks):
    """Ranks that are threads."""

    meeting: ClassVar[threading.Barrier]
    told: ClassVar[list[Any]]

    def gather(self, value: Any, ahead: bool = False, sampling: bool = False) -> list[Any]:
        self.told[self.rank] = value
        self.meeting.wait(20)
        values = list(self.told)
        self.meeting.wait(20)
        return values


def found_by(*checkpoints: Path) -> Any:
    """What ranks say together of a checkpoint, which each sees at a place of its own; an error if they raise one."""
    count = len(checkpoints)
    Together.meeting, Together.told = threading.Barrier(count), [None] * count

    def find(rank: int) -> Any:
        try:
            return comparison.find_damage_together(checkpoints[rank], Together(rank, RankLayout(data_shard=count)))
        except RankLostError as error:
            return str(error).replace(str(checkpoints[rank]), "which")

    with ThreadPoolExecutor(count) as pool:
        (found,) = set(pool.map(find, range(count)))  # they all say the same
    return found


def test_ranks_that_compare_together_all_say_the_same(many_ranks: ModuleType, tmp_path: Path) -> None:
    many_ranks.write_checkpoint(tmp_path, SHAPES, 4)
    assert found_by(*[tmp_path] * 3) is None
    part = tmp_path / "truestep" / "part-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    assert found_by(*[tmp_path] * 3).startswith("truestep/part-00002.safetensors is damaged in its bytes 0 to ")


def test_a_rank_that_sees_the_checkpoint_late_is_waited_for_and_then_named(
    many_ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is whole, so it is no damage that a network disk shows it late to one machine."""
    many_ranks.write_checkpoint(tmp_path / "a", SHAPES, 4)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    manifest = tmp_path / "b" / "truestep" / "checksums.json"
    monkeypatch.setattr(comparison, "_LOOKS", (0, 0, 0))
    whole = manifest.read_bytes()

    class Late(Comparison):
        seen_by_b = 0

        def __init__(self, checkpoint: Path):
            if checkpoint.name == "b":
                Late.seen_by_b += 1
                if Late.seen_by_b == 3:
                    manifest.write_bytes(whole)
            super().__init__(checkpoint)

    manifest.unlink()
    monkeypatch.setattr(comparison, "Comparison", Late)
    assert found_by(tmp_path / "a", tmp_path / "b", tmp_path / "a") is None
    assert Late.seen_by_b == 3
    for content in (None, whole[:-1], whole + b" "):
        manifest.unlink() if content is None else manifest.write_bytes(content)
        said = found_by(tmp_path / "a", tmp_path / "b", tmp_path / "b", tmp_path / "a", tmp_path / "a")
        assert said.startswith(
            "ranks 1, 2 do not see truestep/checksums.json of the checkpoint which as others of the 5"
        )
    manifest.unlink()
    manifest.mkdir()
    assert "rank 1 does not see truestep/checksums.json" in found_by(tmp_path / "a", tmp_path / "b", tmp_path / "a")
    assert "checksums.json cannot be read: " in found_by(tmp_path / "b", tmp_path / "b"), "no rank can"


def test_a_manifest_that_cannot_be_looked_for_is_named(tmp_path: Path) -> None:
    """Else one rank's error would leave the others waiting for it."""
    found = comparison.find_damage(tmp_path / ("long" * 100))
    assert found == "checksums.json cannot be read: File name too long"
