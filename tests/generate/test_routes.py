"""The experts that the engine chose come with its completions, and training replays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from completing import Asked, How, decode
from families.tiny_families import tiny_family
from tiny import expert_model
from truestep.generate.engine.engine import Engine, Limits, engine_of
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.play import rollout_of, sequence_of
from truestep.losses.label_losses import CrossEntropy
from truestep.losses.objective import Denominator, Objective
from truestep.model.experts import grouped
from truestep.model.experts.routing import ExpertSettings
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.step.compute.runner import StepRunner
from truestep.step.plan.plan import make_plan
from truestep.types import Rollout, Sharing

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
HOW = How(1.0, 1.0, 9, None, frozenset({3}))
PROMPTS = [(5, 7, 9, 11, 2), (5, 7, 9, 11, 2), (13,), tuple(range(20, 60))]
TOLERANCE = 1e-5

Load = Callable[..., Policy]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(family: str = "qwen3_moe", **options: Any) -> Policy:
        directory = tmp_path / family
        if not directory.exists():
            _ = expert_model(directory) if family == "qwen3_moe" else tiny_family(directory, family)
        return load_policy(directory, device="cpu", **options)

    return loaded


def documents(completions: list[Completion], prompts: list[tuple[int, ...]] = PROMPTS) -> list[Rollout]:
    return [
        rollout_of(sequence_of(prompt, completion), id=str(number))
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def asked() -> list[Asked]:
    return [Asked(prompt, (number,)) for number, prompt in enumerate(PROMPTS)]


def scored(policy: Policy, rollouts: list[Rollout], sharing: Sharing | None = None) -> Any:
    runner = StepRunner(policy, Objective(CrossEntropy(), Denominator("labels", None)), "full", keep_scores=True)
    if sharing is not None:
        sharing = replace(sharing, alike=policy.token_fields)
    return runner.accumulate(make_plan(rollouts, [list(range(len(rollouts)))], 0, sharing=sharing))


def move_routers(policy: Policy) -> None:
    """Let the routers choose otherwise than they did, as after updates."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters():
            if weight.ndim == 2 and (".gate.weight" in name or ".router.weight" in name):
                weight += weight.std() * torch.randn(weight.shape, generator=generator)


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_computes_the_engines_log_probs_with_its_experts(family: str, engine: bool, load: Load) -> None:
    policy = load(family)
    completions = decode(policy, asked(), How(1.0, 1.0, 9, None, frozenset({3}), engine=engine))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert completion.routes is not None
        assert len(completion.routes) == len(prompt) + len(completion.token_ids) - 1
    rollouts = documents(completions)
    found = scored(policy, rollouts)
    for completion, score in zip(completions, found.scores, strict=True):
        assert np.abs(score.logprobs - completion.logprobs).max() < TOLERANCE
    line = found.line()
    assert line["route_disagreement"] == line["route_disagreement_tokens"] == 0
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    assert line["replayed_tokens"] == pytest.approx(1 - len(rollouts) / tokens)


def test_every_token_has_the_experts_of_its_record(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load()
    rollouts = documents(decode(policy, asked(), HOW))
    move_routers(policy)
    seen: list[torch.Tensor] = []
    honest = grouped.mixture

    def watched(x: Any, index: torch.Tensor, *others: Any) -> Any:
        seen.append(index.clone())
        return honest(x, index, *others)

    monkeypatch.setattr(grouped, "mixture", watched)
    line = scored(policy, rollouts).line()
    assert 0 < line["route_disagreement"] < 1
    start = 0
    for rollout in rollouts:
        routes = rollout.token_fields["routed_experts"]
        for layer in range(2):
            assert torch.equal(seen[layer][start : start + len(routes)], torch.from_numpy(routes[:, layer].astype(int)))
        start += rollout.num_tokens


def test_sequences_share_where_ids_and_experts_are_the_same(load: Load) -> None:
    policy = load()
    rollouts = documents(decode(policy, asked(), HOW))
    move_routers(policy)
    other = rollouts[1].token_fields["routed_experts"].copy()
    other[2] = 3 - other[2]  # of the two that share a prompt
    rollouts[1] = rollout_of(sequence_of(PROMPTS[1], decode(policy, asked()[1:2], HOW)[0]), id="1")
    rollouts[1].token_fields["routed_experts"][:5] = rollouts[0].token_fields["routed_experts"][:5]
    rollouts[1].token_fields["routed_experts"][2] = other[2]
    alone, shared = scored(policy, rollouts), scored(policy, rollouts, Sharing())
    saved = alone.line()["computed_tokens"] - shared.line()["computed_tokens"]
    assert saved == 2, "the first two tokens of a prompt of five"
    for one, two in zip(alone.scores, shared.scores, strict=True):
        assert np.abs(one.logprobs - two.logprobs).max() < TOLERANCE
    for name in ("route_disagreement", "replayed_tokens", "largest_expert_share"):
        assert shared.line()[name] == pytest.approx(alone.line()[name])


@pytest.mark.parametrize("limits", [{"chunk_tokens": 7}, {"cache_bytes": 60_000}])
def test_routes_survive_chunks_and_preemption(limits: dict[str, int], load: Load) -> None:
    policy = load()
    how = DrawOptions(1.0, 40, frozenset())
    requests = [Request(prompt, how, (number,)) for number, prompt in enumerate(PROMPTS)]
    done: dict[int, Completion] = {}
    with policy.weights.gathered():
        engine = engine_of(policy)
        assert isinstance(engine, Engine)
        with engine.session(policy, Limits(4, 80, **limits)) as session:
            for number, request in enumerate(requests):
                session.submit(number, request)
            while session.busy:
                done |= dict(session.step())
            if "cache_bytes" in limits:
                assert session.counts.preemptions
    found = scored(policy, documents([done[number] for number in range(4)]))
    assert found.line()["route_disagreement"] == 0
    for number, score in enumerate(found.scores):
        assert np.abs(score.logprobs - done[number].logprobs).max() < TOLERANCE


@pytest.mark.parametrize(
    "how", [pytest.param({"compiled": True}, marks=pytest.mark.long), {"activation_checkpointing": "full"}]
)
def test_compiled_and_recomputed_layers_replay(how: dict[str, Any], load: Load, monkeypatch: Any) -> None:
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", "aot_eager")
    plain = load()
    rollouts = documents(decode(plain, asked(), HOW))
    move_routers(plain)
    expected = scored(plain, rollouts)
    policy = load(**how)
    move_routers(policy)
    found = scored(policy, rollouts)
    assert found.line()["route_disagreement"] == pytest.approx(expected.line()["route_disagreement"])
    for one, two in zip(expected.scores, found.scores, strict=True):
        assert np.abs(one.logprobs - two.logprobs).max() < TOLERANCE
    for name, gradient in plain.weights.gradients.items():
        assert (policy.weights.gradients[name] - gradient).norm() <= TOLERANCE * gradient.norm(), name


def test_off_neither_records_nor_replays(load: Load) -> None:
    policy = load(experts=ExpertSettings(replay="off"))
    (completion, *_) = decode(policy, asked(), HOW)
    assert completion.routes is None
    rollouts = documents(decode(load(), asked(), HOW))
    assert "replayed_tokens" not in scored(policy, rollouts).line()


def test_a_balance_term_takes_frequencies_from_records_that_name_all(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward pass counts them, and they are those of the records' choices."""
    policy = load(experts=ExpertSettings(balance="loss", strength=0.3))
    rollouts = documents(decode(policy, asked(), HOW))
    move_routers(policy)
    objective = Objective(CrossEntropy(), Denominator("labels", None), routers=True)
    StepRunner(policy, objective).accumulate(make_plan(rollouts, [range(4)], 0))
    assert policy.routing is not None and policy.routing.terms is not None
    for place, shares in enumerate(policy.routing.terms.shares.values()):
        chosen = np.concatenate([rollout.token_fields["routed_experts"][:, place].ravel() for rollout in rollouts])
        assert np.allclose(shares.numpy(), np.bincount(chosen, minlength=4) / len(chosen))
