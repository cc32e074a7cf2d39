"""Makes the evaluation of held-out prompts or of held-out documents."""

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Sequence

from truestep.config.schema import Config, of_sets
from truestep.config.sections import EvaluationConfig
from truestep.generate.engine.phase import EngineSettings
from truestep.generate.engine.service import EngineGenerator
from truestep.generate.evaluate import Evaluator, EvaluatorOfSets
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
from truestep.types import Rollout


def make_evaluator(
    config: Config, policy: Policy, raters: Raters, servers: SharedServers | None, check: SamplerCheck | None
) -> Evaluator | EvaluatorOfSets | HeldOutLoss | None:
    evaluation = config.evaluation
    if evaluation is None:
        return None
    if evaluation.path is not None:
        return _make_held_out_loss(config, policy)
    sets = of_sets(config)
    generator: Generator
    if evaluation.servers:
        assert servers is not None
        generator = servers
    else:
        generator = EngineGenerator(policy, _engine_settings(config, evaluation, sets.values()))
    compare = check.answers if check is not None and evaluation.servers else None
    made = {name: _make_evaluator(alone, policy, raters, generator, compare, name) for name, alone in sets.items()}
    return made[""] if evaluation.sets is None else EvaluatorOfSets(made)


def _engine_settings(config: Config, evaluation: EvaluationConfig, sets: Iterable[Config]) -> EngineSettings:
    samplers = [alone.sampler for alone in sets if alone.evaluation is not None and alone.evaluation.reward is None]
    longest = max(map(longest_conversation, samplers), default=0)
    exact = getattr(config.sampler, "exact", False)  # sampling and evaluation share one engine
    return EngineSettings(evaluation.batch_size, longest, evaluation.engine, exact, waves=config.deterministic)


def _make_evaluator(
    config: Config,
    policy: Policy,
    raters: Raters,
    generator: Generator,
    compare: Callable[[Sequence[Rollout], int], None] | None,
    name: str,
) -> Evaluator:
    evaluation, sampler = config.evaluation, config.sampler
    plays = make_plays(config, policy, raters, evaluates=True)
    assert evaluation is not None and plays is not None
    made = made_rows(config, policy.weights.ranks, raters, evaluates=True)
    return Evaluator(
        generator=generator,
        prompts=read_prompts(evaluation.prompts, made, policy, evaluation.max_prompts),
        plays=plays,
        options=DrawOptions(
            temperature=evaluation.temperature,
            max_new_tokens=evaluation.max_new_tokens or (sampler.max_new_tokens if sampler else 512),
            stop_ids=stop_ids(policy),
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
            stop=tuple(evaluation.stop or ()),
        ),
        samples_per_prompt=evaluation.samples_per_prompt,
        seed=config.seed,
        stream=(zlib.crc32(name.encode()),) if name else (),
        pass_reward=evaluation.pass_reward,
        compare=compare,
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
