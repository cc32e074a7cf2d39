"""The layout changes no result: a step under every layout is the float64 oracle's, for each kind of loss.

This is the one test of it: a loss of labels with a tied head and normed queries, and a loss of whole documents with
capped logits and windows. Some of the documents have several sequences. `make test` has each kind of cut once, with one
loss or the other; both have those that divide a document over ranks. What the other losses make of their labels:
tests/losses. How layouts stand to other models, to recomputation and to half precision: tests/ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from selection import in_tiers
from sequences import in_documents
from small_runs import file_config, write_rollouts
from truestep.config.schema import Config
from truestep.files.whole import write_json_lines
from truestep.tools.verify.judge import Judge, make_judge
from truestep.tools.verify.layouts import Layout, layouts_for
from truestep.tools.verify.report import complaints

# Kinds of model and loss, and the names of layouts that run one after another on the same ranks.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "labels": ("qwen3_tied", {"type": "grpo", "epsilon_high": 0.28, "dual_clip": 3.0, "entropy_bonus": 0.01}),
    "documents": ("gemma2", {"type": "gspo", "epsilon_low": 0.2, "epsilon_high": 0.25}),
}
ALONE: dict[str, tuple[str, ...]] = {
    "packing": (
        "one process",
        "smallest micro-batches",
        "one large micro-batch",
        "other packing order",
        "shared prefixes",
        "shared prefixes, divided trees",
    ),
    "padding and chunks": ("padded micro-batches", "head: 1 row a chunk", "head: 7 rows a chunk"),
    "kernels": ("head: fused kernels",),
}
OVER_RANKS: dict[str, tuple[str, ...]] = {
    "shards": ("FSDP 2", "FSDP 2, breadth first 2", "FSDP 2, reduced each time", "FSDP 2, shared prefixes"),
    "replicas": ("replicas 2",),
    "four shards": ("FSDP 4", "FSDP 4, shared prefixes", "FSDP 4, ragged ranks"),
    "shards and replicas": ("HSDP 2 x 2",),
    "context": ("context 2", "context 2, shared prefixes"),
    "context of four": ("context 4",),
    "context beside data": ("data 2 x context 2",),
    "tensor": ("tensor 2", "tensor 2, shared prefixes"),
    "tensor of four": ("tensor 4",),
    "tensor beside data": ("data 2 x tensor 2",),
    "pipeline": ("pipeline 2", "pipeline 2, shared prefixes", "pipeline 2, 2 stages a rank"),
    "pipeline of four": ("pipeline 4",),
    "pipeline beside data": ("data 2 x pipeline 2",),
    "context and tensor": ("context 2 x tensor 2",),
    "context and pipeline": ("context 2 x pipeline 2",),
    "tensor and pipeline": ("tensor 2 x pipeline 2",),
}
GROUPS = ALONE | OVER_RANKS
SHORT = {
    "labels": (*ALONE, "shards", "replicas", "four shards", "tensor", "pipeline", "tensor beside data"),
    "documents": ("packing", "context", "context of four", "context and pipeline"),
}
# A rank that has whole documents makes nothing else of a loss of documents than of a loss of labels. With the latter,
# test_verify has every layout as a user types it; here are those of several axes, with a tied head and documents of
# several sequences.
LONG = {
    "labels": ("shards and replicas", "context beside data", "context and tensor", "tensor and pipeline"),
    "documents": ("context beside data", "context and tensor"),
}
CASES = [
    value
    for kind in KINDS
    for value in in_tiers([(kind, g) for g in GROUPS], *([(kind, g) for g in tier[kind]] for tier in (SHORT, LONG)))
]


@pytest.fixture(scope="module")
def judge_of(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Judge]:
    """Give the judge of a kind. What the reference's steps cost is paid once."""
    made: dict[str, Judge] = {}

    def judge(kind: str) -> Judge:
        if kind not in made:
            folder = tmp_path_factory.mktemp(f"verify-{kind}")
            made[kind] = make_judge(config_of(kind, tiny_model, folder), folder / "scratch", documents=14, full=False)
        return made[kind]

    return judge


def config_of(kind: str, tiny_model: Callable[[str], Path], folder: Path) -> Config:
    write_rollouts(folder / "rollouts.jsonl", 8)
    lines = (folder / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    write_json_lines(folder / "rollouts.jsonl", in_documents([json.loads(line) for line in lines]))
    (folder / "scratch").mkdir()
    model, loss = KINDS[kind]
    sections: dict[str, Any] = {"loss": loss, "schedule": {"updates_per_batch": 2}, "optimizer": {"gradient_clip": 0.5}}
    return file_config(tiny_model(model), folder / "rollouts.jsonl", folder / "run", **sections)


def layouts(judge: Judge, group: str) -> list[Layout]:
    known = layouts_for(judge.case.budget, judge.case.longest, 4, kernels=True)
    return [layout for layout in known if layout.name in GROUPS[group]]


@pytest.mark.parametrize(("kind", "group"), CASES)
def test_a_step_under_these_layouts_is_the_oracles(kind: str, group: str, judge_of: Callable[[str], Judge]) -> None:
    judge = judge_of(kind)
    verdicts = list(judge.judge(layouts(judge, group)))
    assert [verdict.layout.name for verdict in verdicts] == list(GROUPS[group])
    assert not [complaint for verdict in verdicts for complaint in complaints(verdict)]
    assert all({"loss", "metric", "gradient", "update"} <= set(verdict.worst) for verdict in verdicts)


def test_every_layout_is_in_a_group() -> None:
    # Those of experts are tried with mixtures: test_experts.py.
    known = [layout.name for layout in layouts_for(64, 20, 4, kernels=True) if "expert" not in layout.name]
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(known)
