"""A run's step is made again from what the run kept: bit for bit at its layout, by the law at another."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from checkpoints import latest, read_weights
from ranks.cases import on_ranks
from replay.made_again import KEEP, exactly
from small_runs import (
    file_config,
    quiet_trainer,
    read_lines,
    sampled_config,
    sort_prompts,
    word_model,
    write_lines,
    write_rollouts,
)
from stream.test_train import directory_config
from truestep.config.load import load_config
from truestep.config.schema import Config
from truestep.files.tensors import tensor_places
from truestep.rollouts.kept.records import RecordFiles, RecordsError, blocks_of, encode
from truestep.run.again import ReplayError
from truestep.run.directory import RunDirectory
from truestep.run.train import train
from truestep.run.weight_lines import read_weight_lines
from truestep.tools.replay.compare import compare
from truestep.tools.replay.replay import replay

Model = Callable[[str], Path]


def trained(config: Config) -> Path:
    quiet_trainer(config).run()
    assert config.checkpoint.directory is not None
    return Path(config.checkpoint.directory)


@pytest.fixture
def of_files(tiny_model: Model, tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "run", kind: str = "llama", **sections: Any) -> Path:
        write_rollouts(tmp_path / "r.jsonl", 25)
        given: dict[str, Any] = {part: {**KEEP[part]} if isinstance(KEEP[part], dict) else KEEP[part] for part in KEEP}
        for part, options in sections.items():
            given[part] = {**given[part], **options} if isinstance(given.get(part), dict) else options
        return trained(file_config(tiny_model(kind), tmp_path / "r.jsonl", tmp_path / name, **given))

    return make


def test_a_step_of_files_is_what_it_was_bit_for_bit(of_files: Callable[..., Path], tmp_path: Path) -> None:
    run = of_files()
    for step, begins in ((1, 0), (3, 2), (4, 2)):
        found = replay(run, step, tmp_path / f"again{step}")
        exactly(found)
        assert found.begins == begins
        theirs = next(line for line in read_lines(run / "metrics.jsonl") if line["step"] == step)
        assert found.metrics["grad_norm"] == theirs["grad_norm"] and found.metrics["loss"] == theirs["loss"]
    same = compare(run, tmp_path / "again4")
    assert same.step is None and "2 steps, 3 to 4, are the same" in same.text


def test_the_bits_of_the_weights_are_those_of_the_checkpoint(of_files: Callable[..., Path], tmp_path: Path) -> None:
    """Digests in the run's file are sums over the numbers of its checkpoint, by a loop of its own."""
    run = of_files()
    last = max(line["step"] for line in read_lines(run / "ledger.jsonl"))
    noted = read_weight_lines(RunDirectory(run))[last].measured
    weights = read_weights(latest(run))
    assert set(noted.digests) == set(weights)
    for name, weight in weights.items():
        bits = weight.reshape(-1).view(torch.int32).tolist()
        assert noted.digests[name] == sum((2 * place + 1) * value for place, value in enumerate(bits)) % 2**64
        assert noted.weight_norms[name] == pytest.approx(float(weight.double().norm()), rel=1e-5)


KINDS: dict[str, dict[str, Any]] = {
    "LoRA": {"adapter": {"rank": 2}},
    "a reference": {"loss": {"kl_reference": {"weight": 0.1}}},
    "old log-probs of its own, two updates a batch": {
        "loss": {"old_logprobs": "recompute"},
        "schedule": {"updates_per_batch": 2, "steps": 5},
    },
    "states in 8 bits": {"optimizer": {"type": "adamw_8bit"}},
    "micro-batches that a step ends with": {"schedule": {"overshoot": "keep"}},
    "labels held back, and a steered entropy": {
        "loss": {"clip_cov": {"share": 0.2, "low": -1.0, "high": 1.0}, "entropy_target": {"entropy": 1.0}}
    },
    "advantages over the step, and a warm-up": {
        "data": {"advantages": "batch_normalized", "group_size": 4},
        "optimizer": {"warmup_steps": 3},
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_is_what_it_was(
    tiny_model: Model, tmp_path: Path, kind: str, of_files: Callable[..., Path]
) -> None:
    """From the run's beginning or a checkpoint, which may stand between two updates on the same documents."""
    sections = KINDS[kind]
    if "advantages" in sections.get("data", {}):
        write_rollouts(tmp_path / "g.jsonl", 16, advantages="rewards")
        sections = {**sections, "data": {**sections["data"], "path": str(tmp_path / "g.jsonl")}}
    run = of_files(**sections)
    for step in (2, 4):
        exactly(replay(run, step))


def sampled(tmp_path: Path, name: str = "run", **sections: Any) -> Path:
    model = tmp_path / "model"
    if not model.exists():
        word_model(model)
        write_lines(tmp_path / "p.jsonl", sort_prompts(7))
    return trained(sampled_config(model, tmp_path / "p.jsonl", tmp_path / name, **{**KEEP, **sections}))


def test_a_sampled_step_is_made_again_without_its_sampler(tmp_path: Path) -> None:
    run = sampled(tmp_path)
    (tmp_path / "p.jsonl").unlink()
    found = replay(run, 3, tmp_path / "again")
    exactly(found)
    found = replay(run, 3, overrides=["--data.tokens_per_microbatch", "24"])
    assert found.lawful and not found.exact and "but for rounding" in found.text
    assert "data.tokens_per_microbatch is 64 and 24" in found.text


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_in_a_record_is_named(of_files: Callable[..., Path], tmp_path: Path) -> None:
    run = of_files()
    block = next(block for block in blocks_of(run / "records") if block.step == 3)
    names = next(line for line in read_lines(run / "ledger.jsonl") if line["step"] == 3)["documents"]
    flip(block.file, block.documents + block.sizes[0][0] + 5)
    with pytest.raises(RecordsError, match="the record of document 2 of step 3 is damaged"):
        replay(run, 3)
    flip(block.file, block.documents + block.sizes[0][0] + 5)
    changed = block.read()
    assert changed[1].logprobs is not None
    changed[1].logprobs[changed[1].loss_mask] *= 1.0001
    (run / "records").rename(run / "were")
    others = [other for other in blocks_of(run / "were") if other.step != 3]
    files = RecordFiles(run / "records", 1e9)
    for step, documents in sorted([(3, changed), *((other.step, other.read()) for other in others)]):
        files.append(step, encode(step, documents))
    with pytest.raises(ReplayError, match=f"the record of document {names[1]} of step 3 has other values"):
        replay(run, 3)


def test_a_flipped_weight_of_the_checkpoint_is_named(of_files: Callable[..., Path], tmp_path: Path) -> None:
    run = of_files()
    (part,) = (run / "checkpoints" / "step-00000002" / "truestep").glob("part-*.safetensors")
    weight = "model.layers.1.mlp.up_proj.weight"
    flip(part, tensor_places(part)[f"weight/{weight}"][1] + 2)
    found = replay(run, 3)
    assert not found.exact and not found.lawful
    assert f"are not those that step 2 left: the bits of {weight} differ" in found.text
    assert f"step-00000002 is damaged: truestep/{part.name} is damaged" in found.text
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(ReplayError, match=f"step-00000002 is damaged.*{part.name} has .* bytes"):
        replay(run, 3)
    (part.parent / "tensors.json").write_text("{")
    with pytest.raises(ReplayError, match=r"step-00000002 is damaged.*has .* bytes"):
        replay(run, 3)


def test_a_later_step_is_judged_if_the_weights_before_it_are_the_same(of_files: Callable[..., Path]) -> None:
    run = of_files()
    lines = read_lines(run / "metrics.jsonl")
    lines[3]["grad_norm"] *= 50
    write_lines(run / "metrics.jsonl", lines)
    found = replay(run, 4)
    assert found.begins == 2 and not found.lawful, found.text
    assert "step 4 is not what it was: in step 4 grad_norm differs by 9.8e-01" in found.text


def test_other_first_weights_are_named(of_files: Callable[..., Path], tmp_path: Path) -> None:
    """A run that is replayed from its beginning checks the weights that it began with, if it noted them."""
    run = of_files(checkpoint={"every": 0})
    shutil.rmtree(run / "checkpoints")
    exactly(replay(run, 2))
    model = Path(load_config(run / "config.yaml").model.path)
    changed = shutil.copytree(model, tmp_path / "changed")
    weight = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(changed / "model.safetensors")
    tensors[weight].view(torch.int32)[3, 2] ^= 1
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    found = replay(run, 2, overrides=["--model.path", str(changed)])
    assert not found.lawful and f"(model.path: {changed}) are not those that the run began with" in found.text
    assert f"the bits of {weight} differ" in found.text
    lines = read_lines(run / "weights.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    write_lines(run / "weights.jsonl", lines[1:])
    found = replay(run, 2)
    assert found.exact and "the run noted no digest of its first weights" in found.text


def test_what_is_missing_is_said(of_files: Callable[..., Path], tmp_path: Path) -> None:
    run = of_files()
    with pytest.raises(ReplayError, match="has no step 99: its ledger has steps 1 to 5"):
        replay(run, 99)
    with pytest.raises(ReplayError, match="data.advantages cannot be changed"):
        replay(run, 3, overrides=["--data.advantages", "group_mean"])
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "records")
    with pytest.raises(ReplayError, match="the records of 3 steps from 1 to 3 were not kept.*from the run's beginning"):
        replay(run, 3)
    with pytest.raises(ReplayError, match="is not the directory of a run that made steps"):
        replay(tmp_path, 3)


def test_nothing_but_the_same_bits_is_the_same_step_where_nothing_rounds_otherwise(
    of_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of the optimizer that were lost: all metrics of the step are the same, and its weights are not."""
    run = of_files()
    monkeypatch.setattr("truestep.run.train.restore_optimizer", lambda *_: None)
    found = replay(run, 3)
    assert not found.exact and not found.lawful, found.text
    assert "step 3 is not what it was, bit for bit: 0 of" in found.text and "Something else" in found.text
    other = replay(run, 3, overrides=["--data.tokens_per_microbatch", "24"])
    assert "layout or machine round otherwise" in other.text


def test_a_step_that_the_ledger_has_no_line_of_is_named(of_files: Callable[..., Path]) -> None:
    run = of_files()
    lines = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join([*lines[:2], "x" + lines[2], *lines[3:]]))
    with pytest.raises(
        ReplayError, match=r"ledger.jsonl has no undamaged line of step 3, .* made again from step 3 on"
    ):
        replay(run, 4)
    exactly(replay(run, 5))


def test_a_step_after_which_documents_were_put_aside(tiny_model: Model, tmp_path: Path) -> None:
    """The ledger has another line of its number, which names no documents that were trained on."""
    records = write_rollouts(tmp_path / "r.jsonl", 11)
    sent = tmp_path / "sent"
    sent.mkdir()
    write_lines(sent / "a.jsonl", [*records[:-1], {**records[-1], "truncated": True}])
    (sent / "END").touch()
    config = directory_config(tiny_model("llama"), sent, tmp_path / "run", data={"truncated": "drop"}, **KEEP)
    run = trained(config)
    last = read_lines(run / "ledger.jsonl")[-1]
    assert (last["step"], last["documents"]) == (2, []) and last["put_aside"]
    exactly(replay(run, 2))
    assert "2 steps, 1 to 2, are the same" in compare(run, run).text


def test_weights_alone_show_that_a_step_is_the_same(of_files: Callable[..., Path]) -> None:
    run = of_files()
    (run / "metrics.jsonl").unlink()
    found = replay(run, 4)
    exactly(found)
    assert "the bits of 21 weights; the run kept no metrics (logging.jsonl)" in found.text
    assert "Something else made the difference" not in found.text
    (run / "weights.jsonl").unlink()
    found = replay(run, 4)
    assert not found.exact and not found.lawful and "kept no metrics to compare it with" in found.text


def test_metrics_alone_do_not_show_that_the_bits_are_the_same(of_files: Callable[..., Path]) -> None:
    """Of weights that are kept in host memory the copies have digests, and otherwise the weights themselves."""
    found = replay(of_files(optimizer={"offload": "all"}), 1, overrides=["--optimizer.offload", "none"])
    assert found.lawful and not found.exact and "no bits of weights were compared" in found.text, found.text
    assert "no weight differs" not in found.text


def test_what_if(of_files: Callable[..., Path]) -> None:
    """Another loss on the same documents: its numbers are beside those of the original, and judged by none."""
    run = of_files()
    for overrides, said in (
        (["--loss.type", "gspo"], "loss.type is gspo (it was grpo)"),
        (["--loss.epsilon_high=0.3"], "loss.epsilon_high is 0.3 (it was 0.2)"),
        (["--optimizer.learning_rate", "1e-3"], "optimizer.learning_rate is 0.001 (it was 0.01)"),
    ):
        found = replay(run, 3, overrides=overrides)
        assert found.changed and said in found.text and "what if" in found.text
    assert found.metrics["learning_rate"] == 1e-3
    direct = replay(run, 3, overrides=["--loss.type", "gspo"])
    assert direct.metrics["loss"] != replay(run, 3).metrics["loss"]


def train_and_replay(config: dict[str, Any], alone: str, expected: str) -> None:
    """On every rank: a run of these ranks, and its steps again; and steps of a run of one process."""
    run = train(Config.model_validate(config), Console(file=io.StringIO())).directory.path
    exactly(replay(run, 4))
    moved = replay(Path(alone), 4)
    assert moved.lawful and not moved.exact and expected in moved.text


@pytest.mark.long
def test_two_ranks_and_from_one_layout_to_the_other(tiny_model: Model, tmp_path: Path) -> None:
    """Two ranks make their own steps bit for bit, and those of one process by the law; and one process theirs."""
    write_rollouts(tmp_path / "r.jsonl", 20)

    def config(name: str) -> Config:
        return file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / name, **KEEP)

    alone = trained(config("alone"))
    on_ranks(2, train_and_replay, config("both").model_dump(), str(alone), "ranks 1 and 2")
    found = replay(tmp_path / "both", 4)
    assert found.lawful and not found.exact and "layout or machine round otherwise (ranks 2 and 1" in found.text
    first = compare(alone, tmp_path / "both")
    assert (first.step, first.cause) == (1, "numerics")
