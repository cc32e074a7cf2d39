"""`loss.gradient_divisor` against DeepSpeed's own engine on two gloo ranks, at every stage of ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oracles.step import oracle_logprobs, read_document
from peers.installed import needs_peers, run_worker
from scoring import run_score, write_records
from tiny import Record, make_records, set_old_logprobs

DOCUMENTS, RANKS = 8, 2
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS))


def plain(record: Record) -> dict[str, Any]:
    """A record with every list as long as its tokens."""
    document = read_document(record, 1.0)
    count = len(document.input_ids)
    values: dict[str, list[float]] = {"loss_mask": [0] * count, "logprobs": [0.0] * count, "advantage": [0.0] * count}
    for place, position in enumerate(document.positions):
        values["loss_mask"][position] = 1
        values["logprobs"][position] = (document.old_logprobs or [])[place]
        values["advantage"][position] = (document.advantages or [])[place]
    return {"input_ids": document.input_ids, "temperature": document.temperature, **values}


@pytest.mark.nightly
@needs_peers
def test_the_gradient_is_that_of_deepspeeds_engine(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """With one document in a micro-batch, `deepspeed` divides as the engine does; with two, the half of that number."""
    model = tiny_model("llama")
    records = make_records(3, documents=DOCUMENTS)
    records = set_old_logprobs(records, oracle_logprobs(model, records), seed=3)
    file = write_records(tmp_path / "rollouts.jsonl", records)
    divisors: dict[int, tuple[str | int, tuple[int, ...]]] = {1: ("deepspeed", (0, 1, 2, 3)), 2: (DOCUMENTS // 2, (2,))}
    cases = [
        {"model": str(model), "records": [plain(record) for record in records], "micro_batch": size, "stages": stages}
        for size, (_, stages) in divisors.items()
    ]
    made = iter(run_worker("deepspeed_worker.py", cases, tmp_path, *TWO_RANKS))
    for size, (divisor, stages) in divisors.items():
        config = {
            "model": {"path": str(model), "dtype": "float32"},
            "loss": {"type": "grpo", "normalize_by": "documents", "gradient_divisor": divisor},
            "data": {"path": str(file), "advantages": "none", "tokens_per_microbatch": 64},
        }
        ours = run_score(config, tmp_path / "out").gradients
        for stage in stages:
            theirs = next(made)
            assert set(theirs) == set(ours)
            for name, gradient in theirs.items():
                error = float((ours[name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
                print(f"micro-batch of {size}, ZeRO {stage}, {name}: {error:.1e}")
                assert error <= 1e-5, (size, stage, name)
