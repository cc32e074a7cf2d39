"""Kept records of anybody's making: each file ends with samples or with an error that names the place."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from zlib_ng.zlib_ng import crc32

from truestep.commands.cli import main
from truestep.rollouts.documents import document_bytes
from truestep.rollouts.kept import records
from truestep.rollouts.kept.records import blocks_in, encode
from truestep.tools.audit import opening
from truestep.tools.audit.opening import UnreadableError, read_records
from truestep.tools.audit.run import audit
from truestep.types import Rollout

LONG = 100_000  # tokens of the document of which an array could be made huge


def a_document(name: str = "a", size: int = 12) -> Rollout:
    mask = np.arange(size) >= size // 2
    values = np.where(mask, -np.linspace(0.1, 2, size), 0).astype(np.float32)
    advantages = np.where(mask, 0.5, 0).astype(np.float32)
    routes = {"routed_experts": np.zeros((size, 2, 2), np.uint8)} if size < LONG else {}
    return Rollout(
        name, np.arange(size) % 50, mask, values, advantages, reward=1.0, group_id="g", token_fields=routes,
        starts=(0, 3), record_ids=("x", "y"), metadata={"by_turn": [{"drawing": 0.5}]}, rewards={"right": 1.0},
    )  # fmt: skip


def split(document: Rollout) -> tuple[dict[str, Any], bytes]:
    content = document_bytes(document)
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def with_line(line: bytes, arrays: bytes) -> bytes:
    return len(line).to_bytes(8, "little") + line + arrays


def block_of(head: bytes, parts: bytes = b"") -> bytes:
    return b"RECS" + len(head).to_bytes(4, "little") + crc32(head).to_bytes(4, "little") + head + parts


def block(raw: Sequence[bytes], step: int = 1) -> bytes:
    """A step of documents of these bytes, with the checksums that they should have."""
    parts = [records._codec().compress(content, asbytes=True) for content in raw]
    sizes = [(len(part), len(content), crc32(part)) for part, content in zip(parts, raw, strict=True)]
    return block_of(json.dumps({"step": step, "documents": sizes}).encode(), b"".join(parts))


def changed(change: Callable[[dict[str, Any]], Any], size: int = 12) -> bytes:
    """Two documents, and what stands in the JSON of the second one is changed."""
    line, arrays = split(a_document("b", size))
    line = change(line) or line
    return block([document_bytes(a_document()), with_line(json.dumps(line).encode(), arrays)])


def put(*names: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(line: dict[str, Any]) -> None:
        for name in names[:-1]:
            line = line[name]
        line[names[-1]] = value

    return change


def gone(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda line: line.pop(name) and None


DEEP = b"[" * 100_000 + b"]" * 100_000
HEAD = "the step at byte 0 has no head that truestep wrote"
SECOND = "document 2 of step 1 is no"
HOSTILE = {
    "magic words": (b"RECS" * (1 << 20), "no sample"),
    "beginnings of heads": (b'RECS\x10\0\0\0ABCD{"step":' * 10_000, "more than 100 of its steps are damaged"),
    "a head of 1 GiB": (b"RECS\0\0\0\x40" + bytes(100), "no sample"),
    "a deep head": (block_of(b'{"step":1,"documents":' + DEEP + b"}"), HEAD),
    "a head of lists": (block_of(b"[1, 2]"), HEAD),
    "a head without documents": (block_of(b'{"step":1}'), HEAD),
    "a head without a step": (block_of(b'{"documents":[]}'), HEAD),
    "a step that is a text": (block_of(b'{"step":"1","documents":[]}'), HEAD),
    "sizes below 0": (block_of(b'{"step":1,"documents":[[-5,1,1]]}'), HEAD),
    "two sizes": (block_of(b'{"step":1,"documents":[[5,1]]}', bytes(5)), HEAD),
    "more lists than are read": (block_of(b'{"step":1,"documents":[' + b"[0,0,0]," * (1 << 22) + b"[]]}"), HEAD),
    "a document of nothing": (block([b""]), "document 1 of step 1 is no document"),
    "a deep document": (block([with_line(DEEP, b"")]), "document 1 of step 1 is no document: ValueError: nested"),
    "a document of a list": (block([with_line(b"[]", b"")]), "document 1 of step 1 is no document"),
    "no arrays": (changed(gone("arrays")), SECOND),
    "arrays in a list": (changed(put("arrays", value=[["input_ids", 3]])), SECOND),
    "no tokens": (changed(lambda line: line["arrays"].pop("input_ids") and None), SECOND),
    "values of 20,000 bytes": (changed(put("arrays", "advantages", value=["|V20000", 1]), LONG), r"of \|V20000"),
    "a text's numbers": (changed(put("arrays", "input_ids", value=["<U1", 12])), "input_ids are of <U1"),
    "arrays of arrays": (changed(put("arrays", "logprobs", value=["(90000000,)f4", 0])), "logprobs are of"),
    "more values than bytes": (changed(put("arrays", "input_ids", value=["<i8", 1 << 60])), "fewer bytes than"),
    "values below 0": (changed(put("arrays", "input_ids", value=["<i4", -1])), "fewer bytes than"),
    "another length": (changed(put("arrays", "input_ids", value=["<i4", 11])), "11 tokens and a mask of 12"),
    "an attribute of no rollout": (changed(put("harm", value=1)), SECOND),
    "an id that is a number": (changed(put("id", value=5)), SECOND),
    "turns of numbers": (changed(put("turns", value=[5])), SECOND),
    "sequences again and again": (changed(put("starts", value=[0, 9] * 9)), "document 2 of step 1 is none of ours"),
    "sequences behind the end": (changed(put("starts", value=[0, 99])), "document 2 of step 1 is none of ours"),
    "sequences of text": (changed(put("starts", value=["a", "b"])), "document 2 of step 1 is none of ours"),
    "rewards in a list": (changed(put("rewards", value=[[1], 2])), "cannot be read"),
    "routes of objects": (changed(put("token_fields", "routed_experts", "dtype", value="O")), SECOND),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_named(name: str, tmp_path: Path) -> None:
    content, says = HOSTILE[name]
    path = tmp_path / "from-00000001.records"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError, match=says) as raised:
            audit([path])
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(raised.value)
    assert CliRunner().invoke(main, ["audit", str(path)]).exit_code == 2


def test_documents_and_files_have_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "from-00000001.records"
    path.write_bytes(encode(1, [a_document(str(number)) for number in range(4)]))
    ((_, raw, _), *_) = next(blocks_in(path)).sizes
    assert len(list(read_records(path))) == 8
    monkeypatch.setattr(opening, "_MOST_DECOMPRESSED", 3 * raw)
    with pytest.raises(UnreadableError, match="decompressed, it has more than"):
        list(read_records(path))
    monkeypatch.setattr(opening, "_MOST_KEPT", raw - 1)
    with pytest.raises(UnreadableError, match="document 1 of step 1 is not read: it has more than"):
        list(read_records(path))
    monkeypatch.undo()
    monkeypatch.setattr(opening, "_MOST_SCORES", 1)
    with pytest.raises(UnreadableError, match="its rewards have more than 1 parts"):
        list(read_records(path))


def test_a_document_of_a_million_tokens_is_read(tmp_path: Path) -> None:
    one = a_document("long", 10**6)
    routes = np.zeros((10**6, 2, 20), np.uint8)
    path = tmp_path / "from-00000001.records"
    path.write_bytes(encode(1, [replace(one, starts=(), record_ids=(), token_fields={"routed_experts": routes})]))
    ((_, record),) = read_records(path)
    assert len(record["input_ids"]) == 10**6 and record["routed_experts"]["shape"] == [10**6, 2, 20]


def test_one_document_is_in_memory_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "from-00000001.records"
    path.write_bytes(encode(1, [a_document(str(number), LONG) for number in range(20)]))
    tracemalloc.start()
    try:
        for _ in next(blocks_in(path)).read_each():
            pass
        assert tracemalloc.get_traced_memory()[1] < 10 * LONG * 8, "three documents at most, of some 25 bytes a token"
    finally:
        tracemalloc.stop()


ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    2**31,
    2**63,
    1e300,
    "",
    "x",
    "<f4",
    "|V9999",
    [],
    {},
    [0],
    [[]],
    {"a": 1},
)


def mutated(draws: random.Random) -> bytes:
    """A file of three steps, of which something is something else. Its checksums are right in most."""
    raw = [document_bytes(a_document(str(number), draws.choice([6, 12]))) for number in range(2)]
    kind = draws.randrange(5)
    if kind == 0:  # some bytes of a document
        content = bytearray(raw[0])
        for _ in range(draws.randint(1, 4)):
            content[draws.randrange(len(content))] = draws.randrange(256)
        raw[0] = bytes(content)
    if kind in (1, 2):  # some values in its JSON
        line, arrays = split(a_document())
        for _ in range(draws.randint(1, 2)):
            replace_some(line, draws)
        raw[draws.randrange(2)] = with_line(json.dumps(line).encode(), arrays)
    middle = block(raw, 2)
    if kind == 3:  # in a head
        size = int.from_bytes(middle[4:8], "little")
        head = json.loads(middle[12 : 12 + size])
        replace_some(head, draws)
        middle = block_of(json.dumps(head).encode(), middle[12 + size :])
    whole = encode(1, [a_document("p")]) + middle + encode(3, [a_document("q")])
    if kind == 4:  # cut, or with other bytes at any place
        place, count = draws.randrange(len(whole)), draws.choice([1, 4, 60])
        whole = whole[:place] + draws.randbytes(draws.choice([0, count])) + whole[place + count :]
    return whole


def replace_some(value: Any, draws: random.Random) -> None:
    """Replace, remove or add a value at any depth of some JSON."""
    places = []
    left = [value]
    while left:
        one = left.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        places += [(one, key) for key in keys]
        left += [one[key] for key in keys if isinstance(one[key], dict | list)]
    held, key = draws.choice(places)
    if draws.random() < 0.2:
        del held[key]
    else:
        held[key] = copy.deepcopy(draws.choice(ODD))


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_file_ends_with_samples_or_an_error(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    path, read, refused = tmp_path / "from-00000001.records", 0, 0
    tracemalloc.start()
    try:
        for _ in range(50):
            path.write_bytes(mutated(draws))
            try:
                read += audit([path]).samples > 0
            except UnreadableError as error:
                refused += str(path) in str(error)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert read + refused == 50 and read and refused
