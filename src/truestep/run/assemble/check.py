"""Makes the check that a sampler's log-probs equal the policy's, and that its tokens are draws from the policy."""

from collections.abc import Callable

from truestep.config.schema import Config
from truestep.config.sections import ServerSampler
from truestep.generate.servers.shared import SharedServers
from truestep.run.assemble.step import make_rule, tolerance_of
from truestep.step.before.agreement import Judge
from truestep.step.before.check import SamplerCheck
from truestep.step.compute.runner import StepRunner


def make_check(
    config: Config, runner: StepRunner, servers: SharedServers | None, say: Callable[[str], None]
) -> SamplerCheck | None:
    """Make the check; None without a sampler. A fault of in-process sampling goes to `say` and does not end the run."""
    sampler, data = config.sampler, config.data
    if sampler is None:
        return None
    rule, served = make_rule(config, runner.policy), isinstance(sampler, ServerSampler)
    # Draws are not tested if completions are selected: the remaining tokens are not plain draws from the policy.
    chosen = data.zero_advantage == "replace" or data.truncated != "keep"
    judge = Judge(tolerance_of(config), runner.policy.vocabulary_size, draws=served and not chosen, served=served)
    if not isinstance(sampler, ServerSampler):
        return SamplerCheck(runner, rule, judge, warn=say)
    ahead = sampler.max_staleness > 0 and sampler.check_share > 0
    assert servers is not None
    return SamplerCheck(
        runner,
        rule,
        judge,
        max_staleness=sampler.max_staleness,
        arrived=servers.arrived if ahead else None,
    )
