"""Makes the evaluation of held-out prompts."""

from truestep.assemble.rewards import Raters, evaluation_rewards
from truestep.config.schema import Config
from truestep.environments.prompts import load_prompts
from truestep.policy.policy import Policy
from truestep.sampler.decode import DecodeOptions
from truestep.sampler.evaluate import Evaluator
from truestep.sampler.in_process import stop_ids


def make_evaluator(config: Config, policy: Policy, raters: Raters) -> Evaluator | None:
    evaluation, sampler = config.evaluation, config.sampler
    rewards = evaluation_rewards(config, policy.weights.ranks)
    if evaluation is None or rewards is None:
        return None
    max_new_tokens = evaluation.max_new_tokens or (sampler.max_new_tokens if sampler else 512)
    held_out = load_prompts(evaluation.prompts, policy.tokenizer, policy.vocabulary_size)
    return Evaluator(
        policy=policy,
        prompts=held_out[: evaluation.max_prompts],
        rater=raters.of(rewards),
        options=DecodeOptions(
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            max_new_tokens=max_new_tokens,
            batch_size=evaluation.batch_size,
            stop_ids=stop_ids(policy),
            top_k=evaluation.top_k,
            min_p=evaluation.min_p,
            stop=tuple(evaluation.stop or ()),
        ),
        samples_per_prompt=evaluation.samples_per_prompt,
        seed=config.seed,
    )
