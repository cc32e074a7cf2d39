"""A checkpoint of many ranks that fewer go on from: what each reads is its own part, and hardly more is compared."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from truestep.run.checkpoint import checksums
from truestep.weights import tensor_parts

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


def test_no_rank_reads_much_more_than_its_part(many_ranks: ModuleType, tmp_path: Path) -> None:
    many_ranks.write_checkpoint(tmp_path / "checkpoint", LARGER, WROTE)
    reads = [many_ranks.resume(tmp_path / "checkpoint", LARGER, RESUMED, rank) for rank in range(RESUMED)]
    assert all(read.values == read.own for read in reads)
    assert sum(read.values for read in reads) == sum(4 * rows * width for rows, width in LARGER.values())
    assert many_ranks.most(reads, "both") < 1.51, "two files of three quarters of a part, and their headers"


def test_every_stretch_is_compared_by_one_rank(
    many_ranks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_ranks.write_checkpoint(tmp_path / "checkpoint", SHAPES, WROTE)
    (tmp_path / "checkpoint" / "empty").touch()
    checksums.write_checksums(tmp_path / "checkpoint")
    seen: list[tuple[int, str]] = []
    check = checksums._checksum

    for rank in range(RESUMED):

        def noted(checkpoint: Path, stretch: Any, rank: int = rank) -> int:
            seen.append((rank, stretch.name))
            return check(checkpoint, stretch)

        monkeypatch.setattr(checksums, "_checksum", noted)
        assert checksums.find_damage(tmp_path / "checkpoint", rank, RESUMED) is None
    names = [name for _, name in seen]
    assert len(set(names)) == len(names) and sum("part-" in name for name in names) == WROTE
    assert [rank for rank, _ in seen] == sorted(rank for rank, _ in seen) and len({rank for rank, _ in seen}) > 8
    (tmp_path / "checkpoint" / "truestep" / "part-00007.safetensors").write_bytes(b"x")
    found = [checksums.find_damage(tmp_path / "checkpoint", rank, RESUMED) for rank in range(RESUMED)]
    assert any(damage is not None and "part-00007" in damage for damage in found)


def test_the_index_of_many_ranks_is_small(many_ranks: ModuleType, tmp_path: Path) -> None:
    """Every rank is sent what the others wrote, and reads the index."""
    sizes = []
    for ranks in (4, 64):
        many_ranks.write_checkpoint(tmp_path / str(ranks), {"weight/a": (640, 2)}, ranks)
        sizes.append((tmp_path / str(ranks) / "truestep" / tensor_parts.INDEX).stat().st_size)
    assert sizes[1] < sizes[0] + 60 * 40, "less than 40 bytes for a part"
