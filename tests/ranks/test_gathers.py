"""What ranks bring together, and how often: the head once a micro-batch, gradients once a step, all weights once a
phase of sampling, and of the matrices that Muon orthogonalises one on each rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from completing import decode
from generate.engine.test_engine import options, requests
from ranks.cases import on_ranks
from ranks.updates import options_of, set_gradients
from scoring import write_records
from tiny import make_records
from truestep.config.schema import Config
from truestep.model.loading.load import load_policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join
from truestep.run.assemble.step import make_optimizer
from truestep.step.update.optimizer import update
from truestep.step.update.optimizers.exchange import WholeMatrices
from truestep.tools.score import score

HEAD = 62 * 32  # numbers of the head, and of the embedding, as they are gathered: of 61 rows, as many on each rank


class Noted(TorchDispatchMode):
    """Notes the size of each tensor that is gathered from all ranks, and of each that is reduced over them."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.gathered.append(args[0].numel())
        if "reduce_scatter" in str(func):
            self.reduced.append(args[1].numel() if torch.is_tensor(args[1]) else 0)
        return func(*args, **(kwargs or {}))


def case_of(model: Path, folder: Path) -> dict[str, Any]:
    """Two micro-batches on each of two ranks."""
    write_records(folder / "r.jsonl", make_records(3, documents=12))
    return {
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"path": str(folder / "r.jsonl"), "advantages": "none", "tokens_per_microbatch": 50},
    }


def score_and_count(given: dict[str, Any], output: str) -> None:
    told = []
    for rows in (2, 1000):
        given["model"]["head"] = {"logits_chunk_size": rows}
        with Noted() as noted:
            step = score(Config.model_validate(given), Path(output), gradients=True).step
        assert step["num_micro_batches"] > 1 and step["num_labels"] > 10 * step["num_micro_batches"]
        # The embedding is gathered twice, for the forward pass and for the backward pass.
        assert noted.gathered.count(HEAD) == (2 + 1) * step["num_micro_batches"], noted.gathered
        told.append(noted.gathered)
    assert told[0] == told[1]


@pytest.mark.long
def test_the_head_is_gathered_once_a_micro_batch_and_not_once_a_chunk(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    on_ranks(2, score_and_count, case_of(tiny_model("llama"), tmp_path), str(tmp_path / "out"))


def score_and_count_reductions(given: dict[str, Any], output: str) -> None:
    counts = {}
    for each in (False, True):
        given["parallel"] = {"reduce_each_micro_batch": each}
        with Noted() as noted:
            step = score(Config.model_validate(given), Path(output), gradients=True).step
        counts[each] = len(noted.reduced)
        assert step["num_micro_batches"] == 2
    assert counts[False] > 0 and counts[True] == 2 * counts[False], counts


@pytest.mark.long
def test_gradients_are_reduced_once_a_step_or_after_each_micro_batch(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    on_ranks(2, score_and_count_reductions, case_of(tiny_model("llama"), tmp_path), str(tmp_path / "out"))


def sample_and_count(model: str) -> None:
    policy = load_policy(model, device="cpu", ranks=join(RankLayout(), device="cpu", stall_timeout=60))
    counts = []
    for tokens in (2, 14):
        with Noted() as noted:
            decode(policy, requests((3, 9, 5, 7)), options(max_new_tokens=tokens))
        counts.append(len(noted.gathered))
    # The first phase compares the engine with training too.
    assert 0 < counts[1] <= counts[0], counts
    assert counts[1] == 5, "the embedding, two layers, the norm and the head"


@pytest.mark.long
def test_weights_are_gathered_once_a_phase_of_sampling_however_long_it_is(tiny_model: Callable[[str], Path]) -> None:
    on_ranks(2, sample_and_count, str(tiny_model("llama")))


def update_and_count(given: dict[str, Any]) -> None:
    config = Config.model_validate(given)
    ranks = join(RankLayout(), device="cpu", stall_timeout=60)
    weights = load_policy(config.model.path, dtype="float32", device="cpu", ranks=ranks).weights
    honest, worked = WholeMatrices.each, list[tuple[int, int]]()

    def each(self: Any, names: Any, part_of: Any, work: Any) -> Any:
        wholes: list[torch.Size] = []
        results = honest(self, names, part_of, lambda whole: wholes.append(whole.shape) or work(whole))
        assert all(shape in [weights.pieces[name].shape for name in names] for shape in wholes), "they are whole"
        worked.append((len(names), len(wholes)))
        return results

    WholeMatrices.each = each  # type: ignore[method-assign]
    set_gradients(weights, 0)
    update(make_optimizer(config, weights), weights, 1e-3)
    told = ranks.gather(worked)
    assert len(told[0]) > 3
    for calls in zip(*told, strict=True):
        names = calls[0][0]
        assert [count for _, count in calls] == ([1, 1] if names == 2 else [1, 0]), calls
    assert dist.get_world_size() == 2


@pytest.mark.long
def test_muon_has_a_matrix_on_each_rank_at_once_and_no_second_one(tiny_model: Callable[[str], Path]) -> None:
    on_ranks(2, update_and_count, options_of(tiny_model("llama"), {"type": "muon"}))
