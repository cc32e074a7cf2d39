"""What ranks bring together, and how often: the head once a micro-batch, all weights once a phase of sampling, and of
the matrices that Muon orthogonalises one on each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ranks.cases import on_ranks
from ranks.updates import options_of, set_gradients
from sampler.engine.test_engine import options, requests
from scoring import write_records
from tiny import make_records
from truestep.assemble.step import make_optimizer
from truestep.config.schema import Config
from truestep.policy.loading.load import load_policy
from truestep.ranks.axes import RankLayout
from truestep.ranks.group import join
from truestep.sampler.decode import decode
from truestep.score import score
from truestep.step.optimizer import update
from truestep.step.optimizers.exchange import WholeMatrices

HEAD = 62 * 32  # numbers of the head, and of the embedding, as they are gathered: of 61 rows, as many on each rank


class Gathers(TorchDispatchMode):
    """Notes the size of each tensor that is gathered from all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@contextmanager
def noted() -> Iterator[list[int]]:
    with Gathers() as gathers:
        yield gathers.sizes


def score_and_count(given: dict[str, Any], output: str) -> None:
    told = []
    for rows in (2, 1000):
        given["model"]["head"] = {"logits_chunk_size": rows}
        with noted() as sizes:
            step = score(Config.model_validate(given), Path(output), gradients=True).step
        assert step["num_micro_batches"] > 1 and step["num_labels"] > 10 * step["num_micro_batches"]
        # The embedding is gathered twice, for the forward pass and for the backward pass.
        assert sizes.count(HEAD) == (2 + 1) * step["num_micro_batches"], sizes
        told.append(sizes)
    assert told[0] == told[1]


@pytest.mark.long
def test_the_head_is_gathered_once_a_micro_batch_and_not_once_a_chunk(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    write_records(tmp_path / "r.jsonl", make_records(3, documents=12))
    given = {
        "model": {"path": str(tiny_model("llama")), "dtype": "float32"},
        "data": {"path": str(tmp_path / "r.jsonl"), "advantages": "none", "tokens_per_microbatch": 50},
    }
    on_ranks(2, score_and_count, given, str(tmp_path / "out"))


def sample_and_count(model: str) -> None:
    policy = load_policy(model, device="cpu", ranks=join(RankLayout(), device="cpu", stall_timeout=60))
    counts = []
    for tokens in (2, 14):
        with noted() as sizes:
            decode(policy, requests((3, 9, 5, 7)), options(max_new_tokens=tokens))
        counts.append(len(sizes))
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
