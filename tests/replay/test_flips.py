"""One bit that flipped, in each field of a kept document and in each file of a checkpoint: `replay` names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.made_again import KEEP, exactly
from selection import long_except
from small_runs import file_config, merged, quiet_trainer, read_lines, write_lines, write_rollouts
from truestep.errors import TruestepError
from truestep.rollouts.digests import digest_of
from truestep.rollouts.kept.records import RecordFiles, RecordsError, blocks_of, encode
from truestep.run.again import ReplayError
from truestep.tools.replay.replay import replay
from truestep.types import Rollout, Turn

Model = Callable[[str], Path]
STEP, PLACE = 3, 1  # of the document that is changed


def make_run(tiny_model: Model, folder: Path, **sections: Any) -> Path:
    write_rollouts(folder / "r.jsonl", 20)
    options = merged(KEEP, sections)
    quiet_trainer(file_config(tiny_model("llama"), folder / "r.jsonl", folder / "run", **options)).run()
    return folder / "run"


def flipped(values: np.ndarray, place: Any, bit: int = 0) -> np.ndarray:
    """The array with one bit of one value flipped."""
    changed = np.ascontiguousarray(values).copy()
    if changed.dtype == bool:
        changed[place] = ~changed[place]
    else:
        changed.view(f"u{changed.itemsize}")[place] ^= 1 << bit
    return changed


def with_everything(document: Rollout) -> Rollout:
    """The document with a value of each kind that a record may have."""
    mask = document.loss_mask
    return replace(
        document,
        reward=0.5,
        rewards={"right": 0.5},
        model_version=np.where(mask, 2, 0),
        reference_logprobs=np.where(mask, -1.5, 0).astype(np.float32),
        fields={"weight": np.where(mask, 2.0, 0).astype(np.float32)},
        token_fields={"routed_experts": np.zeros((document.num_tokens, 2, 1), np.uint8)},
        document_fields={"level": np.array(3)},
        turns=(Turn(2, 4, "assistant", 0.5),),
    )


def of_labels(name: str) -> Callable[[Rollout], Rollout]:
    def change(document: Rollout) -> Rollout:
        label = document.loss_mask.nonzero()[0][1]
        return replace(document, **{name: flipped(getattr(document, name), label)})

    return change


def of_fields(place: str, name: str, at: Any) -> Callable[[Rollout], Rollout]:
    def change(document: Rollout) -> Rollout:
        held = getattr(document, place)
        index = document.loss_mask.nonzero()[0][1] if at is None else at
        return replace(document, **{place: {**held, name: flipped(held[name], index)}})

    return change


def a_reward(document: Rollout) -> Rollout:
    return replace(document, reward=float(flipped(np.array([document.reward]), 0)[0]))


FIELDS: dict[str, tuple[Callable[[Rollout], Rollout], str]] = {
    "a token": (lambda document: replace(document, input_ids=flipped(document.input_ids, 0)), "tokens or labels"),
    "a label": (lambda document: replace(document, loss_mask=flipped(document.loss_mask, -1)), "tokens or labels"),
    "a log-prob": (of_labels("logprobs"), "values, such as log-probs"),
    "an advantage": (of_labels("advantages"), "values, such as log-probs"),
    "a version": (of_labels("model_version"), "values, such as log-probs"),
    "a reference's log-prob": (of_labels("reference_logprobs"), "values, such as log-probs"),
    "a reward": (a_reward, "values, such as log-probs"),
    "a part of a reward": (lambda document: replace(document, rewards={"right": 0.25}), "values, such as log-probs"),
    "a field of labels": (of_fields("fields", "weight", None), "values, such as log-probs"),
    "a route": (of_fields("token_fields", "routed_experts", (1, 1, 0)), "values, such as log-probs"),
    "a field of the document": (of_fields("document_fields", "level", ()), "values, such as log-probs"),
    "a turn": (lambda document: replace(document, turns=(Turn(2, 5, "assistant", 0.5),)), "values, such as log-probs"),
}


def rewrite(run: Path, documents: list[Rollout]) -> None:
    """Write the records again, with other documents of STEP, and with the right checksums."""
    blocks = {block.step: block.read() for block in blocks_of(run / "records")} | {STEP: documents}
    for file in (run / "records").iterdir():
        file.unlink()
    files = RecordFiles(run / "records", 1e9)
    for step, kept in sorted(blocks.items()):
        files.append(step, encode(step, kept))


def test_a_bit_of_each_field_is_named_though_the_checksums_are_right(tiny_model: Model, tmp_path: Path) -> None:
    """As memory may flip it before a record is written."""
    run = make_run(tiny_model, tmp_path)
    documents = next(block for block in blocks_of(run / "records") if block.step == STEP).read()
    documents[PLACE] = with_everything(documents[PLACE])
    lines = read_lines(run / "ledger.jsonl")
    lines[STEP - 1]["digests"][PLACE] = digest_of(documents[PLACE])
    write_lines(run / "ledger.jsonl", lines)
    rewrite(run, documents)
    replay(run, STEP)
    for what, (change, said) in FIELDS.items():
        changed = change(documents[PLACE])
        rewrite(run, [*documents[:PLACE], changed, *documents[PLACE + 1 :]])
        with pytest.raises(ReplayError) as error:
            replay(run, STEP)
        assert f"the record of document {changed.id} of step {STEP} has other {said}" in str(error.value), what


def test_a_bit_of_each_part_of_the_file_is_named(tiny_model: Model, tmp_path: Path) -> None:
    """Of a document's bytes the document; of the block's begin, the step."""
    run = make_run(tiny_model, tmp_path)
    block = next(block for block in blocks_of(run / "records") if block.step == STEP)
    whole, ends = block.file.read_bytes(), np.cumsum([size for size, *_ in block.sizes]) + block.documents
    places = [*range(block.start, block.documents, 61), *range(block.documents, block.end, 307)]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        block.file.write_bytes(content)
        if place < block.documents:
            with pytest.raises(ReplayError, match=f"the records of step {STEP} are not kept any more, or damaged"):
                replay(run, STEP)
            continue
        number = int(np.searchsorted(ends, place, "right")) + 1
        with pytest.raises(RecordsError, match=f"the record of document {number} of step {STEP} is damaged"):
            replay(run, STEP)
    block.file.write_bytes(whole)
    exactly(replay(run, STEP))


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "8 bits": {"optimizer": {"type": "adamw_8bit"}},
    "LoRA": {"adapter": {"rank": 2}},
    "Hugging Face": {"checkpoint": {"hugging_face_every": 1}},
}


def told(run: Path) -> str:
    """What is said of a step from the damaged checkpoint; it is no step that is what it was."""
    try:
        found = replay(run, STEP)
    except TruestepError as error:
        return str(error)
    assert not found.lawful, found.text
    return found.text


@pytest.mark.long
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_bit_of_each_file_of_a_checkpoint_is_named(tiny_model: Model, tmp_path: Path, kind: str) -> None:
    """At three places of each file, and of weights and states in the files that have both."""
    run = make_run(tiny_model, tmp_path, **CHECKPOINTS[kind])
    checkpoint = run / "checkpoints" / "step-00000002"
    files = [file for file in sorted(checkpoint.rglob("*")) if file.is_file() and file.stat().st_size]
    assert {"config.json", "adapter_config.json"} & {file.name for file in files}
    for file in files:
        whole = file.read_bytes()
        for place in (len(whole) // 3, len(whole) // 2 + 3, len(whole) - 1):
            content = bytearray(whole)
            content[place] ^= 1
            file.write_bytes(content)
            said, name = told(run), str(file.relative_to(checkpoint))
            assert "step-00000002 is damaged" in said, (name, place, said)
            assert name in said or file.name == "checksums.json", (name, place, said)
        file.write_bytes(whole)
    exactly(replay(run, STEP))


@pytest.mark.parametrize("kind", long_except(["AdamW", "8 bits", "LoRA"], "AdamW"))
def test_a_bit_of_each_tensor_is_named(tiny_model: Model, tmp_path: Path, kind: str) -> None:
    """A weight by its name, from the digests of the step before; a state of the optimizer by its file. An adapter's
    weights are read from peft's file."""
    run = make_run(tiny_model, tmp_path, **CHECKPOINTS[kind])
    folder = run / "checkpoints" / "step-00000002" / "truestep"
    (part,) = folder.glob("part-*.safetensors")
    whole = part.read_bytes()
    first = 8 + int.from_bytes(whole[:8], "little")  # the byte after the header of safetensors
    tensors = json.loads(whole[8:first])
    chosen = [name for name in tensors if "layers.1.mlp.up_proj" in name]
    assert len(chosen) >= 3, list(tensors)[:9]
    for name in chosen:
        content = bytearray(whole)
        content[first + tensors[name]["data_offsets"][0] + 3] ^= 1
        part.write_bytes(content)
        said = told(run)
        assert f"truestep/{part.name} is damaged" in said, name
        if name.startswith("weight/"):
            named = f"are not those that step 2 left: the bits of {name.partition('/')[2]} differ"
            assert ("is what it was, bit for bit" if kind == "LoRA" else named) in said, said
    part.write_bytes(whole)
    exactly(replay(run, STEP))
