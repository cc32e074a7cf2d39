"""Shared prefixes in the layers of a model: segments of trees against whole sequences, each alone, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from interpreted import HALF, use
from model.test_hybrids import make_hybrid
from truestep.model.loading.load import load_policy
from truestep.model.mixers import attention
from truestep.model.mixers.paths import make_paths, sum_paths
from truestep.model.mixers.registered import put_in
from truestep.model.policy import packed_hidden
from truestep.rollouts.packing import pack
from truestep.rollouts.prefixes import forest_of, share
from truestep.step.plan.plan import StepRule, plan_exactly
from truestep.tools.verify.reference import Float64, Reference
from truestep.types import PackedBatch, Rollout, Sharing

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ATTENDING: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gpt_oss": _EXPERTS | {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": _EXPERTS
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
}
RECURRENT = ("qwen3_5_text", "nemotron_h", "kimi_linear", "lfm2", "jamba")
SHORT = ("qwen3", "gemma2", "gpt_oss", "qwen3_5_text", "nemotron_h")
LENGTHS = (40, 25, 1, 12, 3, 30)


def make_model(directory: Path, kind: str) -> Path:
    if kind in RECURRENT:
        return make_hybrid(directory, kind)
    config = AutoConfig.for_model(kind, **(_SIZES | ATTENDING[kind]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(directory)
    return directory


def tree(depth: int, seed: int, in_prefixes: bool = True) -> list[Rollout]:
    """Documents that part at `depth` places, each time by branches that end at once; also a twin, one that others begin
    with, a stranger, and labels in prefixes, each with another mask and weight in each of its documents."""
    draw = np.random.default_rng(seed)
    ids: list[np.ndarray] = []
    own: list[int] = []  # where the last segment of each document begins
    prefix = draw.integers(0, 61, 33)
    for _ in range(depth):
        for _ in range(2):
            own.append(len(prefix))
            ids.append(np.concatenate([prefix, draw.integers(0, 61, draw.integers(1, 30))]))
        prefix = np.concatenate([prefix, draw.integers(0, 61, draw.integers(1, 20))])
    own += [len(prefix) - 1, len(prefix), own[0], 0]
    ids += [prefix, np.concatenate([prefix, draw.integers(0, 61, 70)]), ids[0], draw.integers(0, 61, 9)]
    order = draw.permutation(len(ids))
    firsts = [0 if in_prefixes else own[place] for place in order]
    return [_document(number, ids[place], firsts[number], draw) for number, place in enumerate(order)]


def _document(number: int, ids: np.ndarray, first: int, draw: np.random.Generator) -> Rollout:
    mask = draw.random(len(ids)) < 0.5
    mask[0], mask[-1] = False, True
    mask[:first] = False
    if number % 3 == 0:
        mask[: len(ids) // 2] = False
    values = np.where(mask, -1.0, 0.0).astype(np.float32)
    return Rollout(id=str(number), input_ids=ids, loss_mask=mask, logprobs=values, advantages=values)


def shared(documents: list[Rollout], budget: int = 4096) -> list[tuple[list[Rollout], PackedBatch]]:
    """The micro-batches of a plan that shares all it can: their documents, and what is computed."""
    rule = StepRule(len(documents), False, 1, 1, budget, share="always")
    plan = plan_exactly(documents, rule, 0)
    packed = []
    for members in plan.micro_batches:
        some = [plan.sequences[index] for index in members]
        packed.append((some, pack(some, 8, forest=forest_of(plan, members))))
    assert any(parent >= 0 for _, batch in packed for parent in batch.tokens.parents)
    return packed


class Gradients:
    """The log-probs of documents' labels, and the gradient of a sum of them. Each has a weight of its own."""

    def __init__(self, model: Any):
        self.model, self.named = model, dict(model.named_parameters())
        self.found: dict[str, torch.Tensor] = {}

    def add(self, documents: list[Rollout], rows: torch.Tensor, ids: torch.Tensor) -> None:
        logprobs = self.model.get_output_embeddings()(rows).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        of_documents = logprobs.split([document.num_labels for document in documents])
        total = logprobs.new_zeros(())
        for document, own in zip(documents, of_documents, strict=True):
            self.found[f"logprobs of {document.id}"] = own.detach()
            weights = torch.randn(len(own), generator=torch.Generator().manual_seed(int(document.id)))
            total = total + (own * weights).sum()
        gradients = torch.autograd.grad(total, list(self.named.values()), allow_unused=True)
        for name, gradient in zip(self.named, gradients, strict=True):
            if gradient is not None:
                self.found[name] = self.found.get(name, 0) + gradient


def alone(model: Any, documents: list[Rollout]) -> dict[str, torch.Tensor]:
    gradients = Gradients(model)
    for document in documents:
        tokens = torch.from_numpy(document.input_ids)
        hidden = model.base_model(input_ids=tokens[None], use_cache=False)[0][0]
        labels = torch.from_numpy(np.flatnonzero(document.loss_mask))
        gradients.add([document], hidden[labels - 1], tokens[labels])
    return gradients.found


def in_trees(model: Any, packed: list[tuple[list[Rollout], PackedBatch]]) -> dict[str, torch.Tensor]:
    gradients = Gradients(model)
    for documents, batch in packed:
        hidden = packed_hidden(model, batch.tokens, torch.device("cpu"))
        gradients.add(documents, hidden[batch.labels.rows], batch.labels.ids)
    return gradients.found


def check_trees(kind: str, directory: Path, documents: list[Rollout], budgets: Sequence[int]) -> list[int]:
    """Compare micro-batches of each budget with whole sequences. Return how many tokens were computed."""
    exact, ours = Reference(directory)._model, Reference(directory)._model
    if kind in RECURRENT:
        put_in(ours)
    ours.set_attn_implementation(attention.NAME)
    computed = []
    with Float64():
        right = alone(exact, documents)
        for budget in budgets:
            packed = shared(documents, budget)
            got = in_trees(ours, packed)
            assert got.keys() == right.keys()
            for name, wanted in right.items():
                # a few weights are float32 in transformers' code
                most = 1e-9 if wanted.dtype == torch.float64 else 1e-6
                assert float((got[name] - wanted).norm() / wanted.norm().clamp(min=1e-9)) < most, name
            computed.append(sum(batch.tokens.num_tokens for _, batch in packed))
    return computed


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in SHORT else pytest.mark.long) for kind in (*ATTENDING, *RECURRENT)],
)
def test_trees_are_whole_sequences_alone(kind: str, tmp_path: Path) -> None:
    """Trees in one micro-batch, and one that is larger than its micro-batches: each computes its prefix again."""
    directory = make_model(tmp_path / kind, kind)
    check_trees(kind, directory, tree(5, seed=1), [4096])
    documents = tree(2, seed=4, in_prefixes=False)
    longest, every = (size(document.num_tokens for document in documents) for size in (max, sum))
    whole, divided = check_trees(kind, directory, documents, [4096, longest])
    assert whole < divided < every


@pytest.mark.parametrize("in_prefixes", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_trees_of_any_depth_are_whole_sequences_alone(depth: int, in_prefixes: bool, tmp_path: Path) -> None:
    """With labels in prefixes and without, each computed once."""
    documents = tree(depth, seed=depth, in_prefixes=in_prefixes)
    beginnings = {document.input_ids[: at + 1].tobytes() for document in documents for at in range(document.num_tokens)}
    assert check_trees("llama", make_model(tmp_path / "llama", "llama"), documents, [4096]) == [len(beginnings)]


def test_recomputed_layers_see_the_same_paths(tmp_path: Path) -> None:
    """Values and gradients of a float32 policy whose layers are computed again, against the same without sharing."""
    documents = tree(3, seed=5)
    found = []
    for recomputes, sharing in ((False, None), (True, Sharing())):
        directory = make_model(tmp_path / f"{recomputes}", "gemma2")
        policy = load_policy(directory, device="cpu", activation_checkpointing=recomputes)
        batch = pack(documents, forest=share(documents, sharing))
        policy.weights.zero_gradients()
        rows = policy.hidden(batch.tokens)[batch.labels.rows]
        (rows * torch.linspace(-1, 1, rows.shape[1])).sum().backward()
        found.append([rows.detach(), *policy.weights.gradients.values()])
    for alone_, together in zip(*found, strict=True):
        assert float((together - alone_).norm() / alone_.norm().clamp(min=1e-9)) < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 1000))
def test_the_sum_over_copies_is_the_gradient_of_copying(lengths: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    parents = [int(draw.integers(-1, number)) if number else -1 for number in range(len(lengths))]
    ends = np.cumsum([0, *lengths]).tolist()
    paths = make_paths(tuple(itertools.pairwise(ends)), parents, torch.device("cpu"))
    values = torch.randn(ends[-1], 2, 3, dtype=torch.float64, requires_grad=True)
    wanted = []
    for number in range(len(lengths)):
        place = number
        path = []
        while place >= 0:
            path.append(values[ends[place] : ends[place + 1]])
            place = parents[place]
        wanted += path[::-1]
    right, got = torch.cat(wanted), paths.gather(values)
    assert torch.equal(got, right)
    weights = torch.randn_like(right)
    ours, theirs = (torch.autograd.grad((each * weights).sum(), values)[0] for each in (got, right))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", ["plain", "kernels"])
def test_copies_are_summed_in_float32(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen copies of a bfloat16 gradient: a sum in bfloat16 would be off by a hundred times as much."""
    place = use(which, monkeypatch)
    spans = ((0, 5), *((5 + number, 6 + number) for number in range(16)))
    paths = make_paths(spans, [-1, *[0] * 16], place)
    gradient = torch.randn(len(paths.source), 7, generator=torch.Generator().manual_seed(0)).to(place, HALF)
    wanted = torch.zeros(21, 7, dtype=torch.float64, device=place).index_add_(0, paths.source, gradient.double())
    if which == "kernels":
        from truestep.model.mixers.paths_kernel import sum_on_gpu

        got = sum_on_gpu(gradient, *paths.index[1:])
    else:
        got = sum_paths(gradient, paths.index)
    assert torch.equal(got.double(), wanted.to(HALF).double())
