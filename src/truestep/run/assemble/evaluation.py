"""Makes the evaluation of held-out prompts or of held-out documents."""

import dataclasses

from truestep.config.schema import Config
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.evaluate import Evaluator
from truestep.generate.generator import DrawOptions, Generator
from truestep.generate.read import stop_ids
from truestep.generate.servers.shared import SharedServers
from truestep.losses.objective import Denominator, Objective
from truestep.model.policy import Policy
from truestep.rollouts.files import DataError
from truestep.run.assemble.rewards import Raters, longest_conversation, made_rows, make_plays
from truestep.run.assemble.sources import held_out_documents, read_prompts
from truestep.run.assemble.step import make_objective, make_rule, make_runner
from truestep.step.before.check import SamplerCheck
from truestep.step.held_out import HeldOutLoss


def make_evaluator(
    config: Config, policy: Policy, raters: Raters, servers: SharedServers | None, check: SamplerCheck | None
) -> Evaluator | HeldOutLoss | None:
    evaluation, sampler = config.evaluation, config.sampler
    if evaluation is not None and evaluation.path is not None:
        return _make_held_out_loss(config, policy)
    plays = make_plays(config, policy, raters, evaluates=True)
    if evaluation is None or plays is None:
        return None
    max_new_tokens = evaluation.max_new_tokens or (sampler.max_new_tokens if sampler else 512)
    made = made_rows(config, policy.weights.ranks, raters, evaluates=True)
    held_out = read_prompts(evaluation.prompts, made, policy, evaluation.max_prompts)
    generator: Generator
    if evaluation.servers:
        assert servers is not None
        generator = servers
    else:
        exact = getattr(sampler, "exact", False)  # sampling and evaluation share one engine
        rows, waves = evaluation.batch_size, config.deterministic
        longest = 0 if evaluation.reward is not None else longest_conversation(sampler)
        settings = EngineSettings(rows, longest, evaluation.engine, exact, waves=waves)
        generator = EngineGenerator(policy, settings)
    return Evaluator(
        generator=generator,
        prompts=held_out,
        plays=plays,
        options=DrawOptions(
            temperature=evaluation.temperature,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids(policy),
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
            stop=tuple(evaluation.stop or ()),
        ),
        samples_per_prompt=evaluation.samples_per_prompt,
        seed=config.seed,
        pass_reward=evaluation.pass_reward,
        compare=check.answers if check is not None and evaluation.servers else None,
    )


def _make_held_out_loss(config: Config, policy: Policy) -> HeldOutLoss:
    documents = held_out_documents(config, policy)
    if not any(rollout.num_labels for rollout in documents.rollouts):
        reasons = "; ".join(sorted({record.reason for record in documents.rejected})[:3]) or "no document has a label"
        raise DataError(f"evaluation.path: no record of it can be evaluated: {reasons}")
    runner = dataclasses.replace(
        make_runner(config, policy),
        objective=Objective(make_objective(config).label_loss, Denominator("labels")),
        metrics_level="none",
        custom_metrics={},
        compares=None,
    )
    return HeldOutLoss(runner, make_rule(config, policy), documents.rollouts, len(documents.rejected))
