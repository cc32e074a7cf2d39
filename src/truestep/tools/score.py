"""Computes one step over all of `data.path` and writes files: the forward pass, and optionally the backward pass."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files.disks import writing
from truestep.files.tensors import write_tensors
from truestep.files.whole import write_json, write_json_lines
from truestep.losses.objective import Objective
from truestep.model.policy import Policy
from truestep.ranks.group import Ranks
from truestep.ranks.watch import Watch
from truestep.rollouts.parts import PartedSource
from truestep.rollouts.rejects import write_rejected
from truestep.rollouts.source import FileSource
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.run.assemble.sources import own_part, read_documents, replayed_by
from truestep.run.assemble.step import make_annotators, make_rule, make_runner
from truestep.step.before.scoring import by_record
from truestep.step.compute.runner import Accumulated
from truestep.step.plan.plan import plan_exactly
from truestep.step.update.gradient_clipping import gradient_norm
from truestep.types import DocumentScore, Rejected, Rollout, StepPlan

_GRADIENTS, _PARTIAL = "gradients.safetensors", ".gradients.safetensors.partial"


@dataclass(frozen=True)
class Score:
    step: dict[str, Any]
    documents: list[dict[str, Any]]
    weights: Path  # directory of the weights


def score(config: Config, output: Path, *, gradients: bool) -> Score:
    """Write scores.jsonl and step.json; with `gradients` also gradients.safetensors and the gradient norm."""
    if config.data.path is None:
        raise TruestepError("data.path is null: score needs the rollouts of a step: add --data.path FILE.jsonl")
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    ranks = join_ranks(config)
    watch = Watch(ranks, config.schedule.stall_timeout)
    with watch.watching():
        return _score(config, output, gradients, ranks, watch)


def _score(config: Config, output: Path, gradients: bool, ranks: Ranks, watch: Watch) -> Score:
    watch.phase("loading the model")
    policy = make_policy(config, ranks)
    watch.phase("reading the rollouts")
    rollouts, rejected = _documents(config, policy, ranks)
    ranks.share(lambda: _clear(output, rejected))
    if not rollouts:
        raise TruestepError(f"no record of {config.data.path} is usable: see {output / 'rejected.jsonl'}")
    plan = plan_exactly(rollouts, make_rule(config, policy), documents_seen=0)
    runner = dataclasses.replace(make_runner(config, policy), keep_scores=True)
    watch.phase("computing the step")
    annotators = make_annotators(
        config, runner, lambda path: make_policy(config, ranks, path or config.model.path, frozen=True)
    )
    plan = annotators.annotate(plan)
    accumulated = runner.accumulate(plan, backward=gradients)
    objective = runner.objective
    scored = by_record(plan.documents, accumulated.scores)
    result = Score(
        _step_line(accumulated, plan, policy, gradients, len(rejected)),
        [_document_line(rollout, score, objective) for rollout, score in scored],
        policy.path,
    )
    watch.phase("writing the scores")
    tensors = policy.weights.collect_gradients() if gradients else None
    ranks.share(lambda: _write(output, result, tensors))
    return result


def _documents(config: Config, policy: Policy, ranks: Ranks) -> tuple[Sequence[Rollout], Sequence[Rejected]]:
    given = config, policy.vocabulary_size, ranks.data_rank, lambda: policy.tokenizer
    documents = read_documents(*given, routes=replayed_by(config, policy))
    if not own_part(config):
        return documents.rollouts, documents.rejected
    source = PartedSource(FileSource(documents.rollouts, documents.rejected), ranks)
    return source.peek(sum(ranks.gather_parts(len(documents.rollouts)))), source.aside().rejected


def _clear(output: Path, rejected: Sequence[Rejected]) -> None:
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    for name in ("step.json", "scores.jsonl", _GRADIENTS, _PARTIAL):  # left over from an earlier call
        (output / name).unlink(missing_ok=True)
    write_rejected(output, rejected)


def _write(output: Path, result: Score, gradients: dict[str, torch.Tensor] | None) -> None:
    write_json_lines(output / "scores.jsonl", result.documents)
    if gradients is not None:
        tensors = {name: gradient.float().cpu().contiguous() for name, gradient in gradients.items()}
        write_tensors(tensors, output / _PARTIAL)
        (output / _PARTIAL).replace(output / _GRADIENTS)
    # step.json is written last: if it exists, the other files are complete.
    write_json(output / "step.json", result.step)


def _step_line(
    accumulated: Accumulated, plan: StepPlan, policy: Policy, gradients: bool, rejected: int
) -> dict[str, Any]:
    line = accumulated.line() | {"documents_seen": plan.documents_seen_after, "num_rejected": rejected}
    return line | {"grad_norm": gradient_norm(policy.weights)} if gradients else line


def _document_line(rollout: Rollout, score: DocumentScore, objective: Objective) -> dict[str, Any]:
    line = {
        "id": rollout.id,
        "logprobs": score.logprobs.tolist(),
        "entropy": score.entropy.tolist(),
        "ratio": _ratios(rollout, score, objective),
    }
    return line | {"metadata": dict(rollout.metadata)} if rollout.metadata else line


def _ratios(rollout: Rollout, score: DocumentScore, objective: Objective) -> list[float]:
    """Return each label's importance ratio as the loss uses it: the label's own, or its document's. Empty without old
    log-probs."""
    if objective.recompute:  # the old log-probs come from the same weights
        return [1.0] * len(score.logprobs)
    if rollout.logprobs is None or not len(score.logprobs):
        return []
    log_ratio = score.logprobs.astype(np.float64) - rollout.logprobs[rollout.loss_mask]
    if objective.label_loss.document_ratio:
        log_ratio = np.full_like(log_ratio, log_ratio.mean())
    return np.exp(log_ratio).tolist()
