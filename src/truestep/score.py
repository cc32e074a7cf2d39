"""The window into a step: one step's forward, and backward, over the whole of `data.path`, written to files."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from truestep.assemble import make_deterministic, make_policy, make_rule, make_runner, read_documents
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.files import finite_or_null, write_json_lines, write_whole
from truestep.policy.policy import Policy
from truestep.rollouts.rejects import write_rejected
from truestep.step.plan import plan_exactly
from truestep.step.run import Accumulated, gradient_norm
from truestep.types import DocumentScore, Rollout, StepPlan


class ScoreError(TruestepError):
    pass


@dataclass(frozen=True)
class Score:
    step: dict[str, Any]
    documents: list[dict[str, Any]]


def score(config: Config, output: Path, *, gradients: bool) -> Score:
    """Write scores.jsonl, step.json and, if asked for, gradients.safetensors and the gradient's norm."""
    if config.data.path is None:
        raise ScoreError("score needs data.path: the rollouts of the step that is to be scored")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ScoreError("this version of truestep scores on one process: start it without torchrun")
    if config.deterministic:
        make_deterministic()
    policy = make_policy(config)
    documents = read_documents(config, policy.vocabulary_size)
    output.mkdir(parents=True, exist_ok=True)
    for name in ("step.json", "scores.jsonl", "gradients.safetensors"):  # of an earlier step
        (output / name).unlink(missing_ok=True)
    write_rejected(output, documents.rejected)
    if not documents.rollouts:
        raise ScoreError(f"no record of {config.data.path} is usable: see {output / 'rejected.jsonl'}")
    plan = plan_exactly(documents.rollouts, make_rule(config), documents_seen=0)
    runner = make_runner(config, policy)
    accumulated = runner.accumulate(plan, backward=gradients, keep_scores=True)
    result = Score(
        _step_line(accumulated, plan, policy, gradients, len(documents.rejected)),
        [_document_line(rollout, said, config) for rollout, said in _pairs(plan, accumulated)],
    )
    write_json_lines(output / "scores.jsonl", result.documents)
    if gradients:
        tensors = {name: gradient.float().cpu().contiguous() for name, gradient in policy.weights.gradients.items()}
        write_whole(output / "gradients.safetensors", save(tensors))
    # The step's file is last: where it stands, the others are whole.
    write_whole(output / "step.json", (json.dumps(finite_or_null(result.step), indent=2) + "\n").encode())
    return result


def _pairs(plan: StepPlan, accumulated: Accumulated) -> zip[tuple[Rollout, DocumentScore]]:
    return zip(plan.documents, accumulated.scores, strict=True)


def _step_line(
    accumulated: Accumulated, plan: StepPlan, policy: Policy, gradients: bool, rejected: int
) -> dict[str, Any]:
    line = accumulated.line()
    line["documents_seen"] = plan.documents_seen + plan.totals.num_documents
    line["num_rejected"] = rejected
    if gradients:
        line["grad_norm"] = gradient_norm(policy.weights.gradients)
    return line


def _document_line(rollout: Rollout, said: DocumentScore, config: Config) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "logprobs": said.logprobs.tolist(),
        "entropy": said.entropy.tolist(),
        "ratio": _ratios(rollout, said, whole_document=config.loss.type == "gspo"),
        **({"metadata": dict(rollout.metadata)} if rollout.metadata else {}),
    }


def _ratios(rollout: Rollout, said: DocumentScore, whole_document: bool) -> list[float]:
    """Per label; for gspo the document's R_d at each. Empty where the record has no sampler log-probs."""
    if rollout.logprobs is None or not len(said.logprobs):
        return []
    log_ratio = said.logprobs.astype(np.float64) - rollout.logprobs[rollout.loss_mask]
    if whole_document:
        log_ratio = np.full_like(log_ratio, log_ratio.mean())
    return np.exp(log_ratio).tolist()
