"""Parquet files that hold far more than their bytes: each is refused by name, in little memory, and others are read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from truestep.files.bounded import MIB
from truestep.rollouts import pages
from truestep.rollouts.files import DataError, read_records
from truestep.rollouts.pages import checked_groups
from truestep.rollouts.values import BadRecord

_READ = """
import resource, sys
from pathlib import Path
from truestep.rollouts.files import DataError, read_records
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _, _, record in read_records([Path(sys.argv[1])]):
        print(getattr(record, "reason", "a record"))
except DataError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def lists(values: np.ndarray, length: int) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, length, dtype=np.int32)), pa.array(values))


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **({"compression": "zstd"} | options))
    return path


def read(path: Path) -> tuple[list[str], int]:
    """What is said of the records, and the MiB that reading them took, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", _READ, str(path)], capture_output=True, env=environment, check=True)
    *said, memory = result.stdout.decode().splitlines()
    return said, int(memory)


def test_one_row_of_forty_million_values(tmp_path: Path) -> None:
    """A value and a count, in 1 KB."""
    path = written(tmp_path / "a.parquet", {"input_ids": lists(np.zeros(4 * 10**7, np.int8), 4 * 10**7)})
    assert path.stat().st_size < 2000
    (said,), memory = read(path)
    assert "it says that it has 40,000,000 values in" in said
    assert memory < 100


def test_a_row_that_is_larger_than_any_record(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"input_ids": lists(np.zeros(17 * 10**6, np.int64), 17 * 10**6)})
    said, memory = read(path)
    assert said == ["the record is not read: it has more than 128 MiB"]
    assert memory < 700


def test_pages_that_hold_more_than_the_footer_says(tmp_path: Path) -> None:
    """Decoding goes by the page. A count of 10,000 in its header is changed, and the footer stays as it is."""
    path = written(tmp_path / "a.parquet", {"reward": np.zeros(10**4)}, compression="none", write_statistics=False)
    content = path.read_bytes()
    count, larger = (bytes(_varint(2 * number)) for number in (10**4, 10**6))
    assert len(count) == len(larger)
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    place = content.index(count, start)
    path.write_bytes(content[:place] + larger + content[place + len(count) :])
    metadata = pq.ParquetFile(path).metadata
    (group,) = checked_groups(path, metadata, ["reward"])
    assert group.bytes > 8 * 10**6


def _varint(number: int) -> list[int]:
    return [number & 0x7F | 0x80, *_varint(number >> 7)] if number > 0x7F else [number]


ONE_ROW = pa.array([0, 3000], pa.int32())
TEXTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "references to a long text": (["x" * 10**5] * 3000, {}),
    "texts that repeat each other": (
        [f"{'x' * 10**5}{number}" for number in range(3000)],
        {"use_dictionary": False, "column_encoding": {"messages.list.element": "DELTA_BYTE_ARRAY"}},
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_tried_in_a_process_with_little_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, options = TEXTS[name]
    row = pa.ListArray.from_arrays(ONE_ROW, pa.array(texts))
    path = written(tmp_path / "a.parquet", {"messages": row}, **options)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(pages, "_MOST_MEMORY", 100 * MIB)
    with pytest.raises(DataError, match="cannot be decoded in 100 MiB of memory: .* a process of its own"):
        list(read_records([path]))


def test_what_is_large_and_fits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried in a process as well, and every value is as it was."""
    table = honest(rows=20, tokens=5000)
    path = written(tmp_path / "a.parquet", table)
    monkeypatch.setattr(pages, "_HARMLESS", 0)
    monkeypatch.setattr(pages, "_BATCH_BYTES", 10**6)
    tried: list[Any] = []
    monkeypatch.setattr(pages.subprocess, "run", lambda *given, **more: tried.append(run(*given, **more)) or tried[-1])
    records = [record for _, _, record in read_records([path])]
    assert [result.returncode for result in tried] == [0]
    assert records == pa.table(table).to_pylist()
    (group,) = checked_groups(path, pq.ParquetFile(path).metadata, list(table))
    assert group.batch_rows < 20


run = subprocess.run


def honest(rows: int, tokens: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    count = rows * tokens
    return {
        "id": [f"row-{number}" for number in range(rows)],
        "input_ids": lists(generator.integers(0, 150_000, count), tokens),
        "logprobs": lists(-generator.random(count), tokens),
        "loss_mask": lists(np.ones(count, np.int64), tokens),
        "reward": generator.random(rows),
        "metadata": [{"system": "s" * 20_000}] * rows,
    }


@pytest.mark.parametrize("compression", ["zstd", "snappy", "gzip", "brotli", "lz4", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_the_headers_of_honest_pages_are_read(compression: str, version: str, tmp_path: Path) -> None:
    table = honest(rows=300, tokens=100)
    path = written(
        tmp_path / "a.parquet", table, compression=compression, data_page_version=version, row_group_size=120
    )
    metadata = pq.ParquetFile(path).metadata
    groups = checked_groups(path, metadata, list(table))
    assert [group.rows for group in groups] == [120, 120, 60]
    for group, rows in zip(groups, (120, 120, 60), strict=True):
        assert rows * (3 * 100 * 8 + 8) < group.bytes < rows * (3 * 100 * 8 + 8 + 20_100) * 1.5
    assert [record for _, _, record in read_records([path])] == pa.table(table).to_pylist()


@pytest.mark.long
def test_documents_of_a_million_tokens(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", honest(rows=6, tokens=10**6))
    said, memory = read(path)
    assert said == ["a record"] * 6
    assert memory < 1500


def test_rows_without_a_field(tmp_path: Path) -> None:
    """Each is a rejection, so there may be no more of them than the file has bytes for."""
    path = written(tmp_path / "a.parquet", {"other": pa.array(np.zeros(2 * 10**6, np.int8))})
    with pytest.raises(DataError, match="it says that it has 2,000,000 rows in"):
        next(read_records([path]))


@pytest.mark.parametrize("place", range(4, 120, 7))
def test_a_damaged_header_is_a_refusal(place: int, tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", honest(rows=3, tokens=5))
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    path.write_bytes(content)
    said: str | None = None
    try:
        assert all(isinstance(record, dict | BadRecord) for _, _, record in read_records([path]))
    except DataError as error:
        said = str(error)
    assert said is None or said.startswith(f"{path} cannot be read: ")
