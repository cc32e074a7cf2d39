"""Metrics of a step's groups, completions and rewards. Without differences, a group teaches nothing.

Group metrics cover groups with two or more members in the step. Every rank has all documents of the step, so these
metrics need no communication and do not depend on the layout.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence

from truestep.metrics.types import Max, Mean, Metric, Min
from truestep.rollouts.selection import has_advantage
from truestep.types import Rollout

ROUNDING = 1e-9  # share of the largest reward; smaller differences from the mean count as rounding errors


def measure_groups(documents: Sequence[Rollout]) -> dict[str, Metric]:
    """Compute the share of groups without an advantage, the mean share of distinct completions in a group, the mean
    standard deviation of rewards in a group, and the share of the most common completion."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for document in documents:
        if document.group_id is not None:
            groups[document.group_id].append(document)
    together = [members for members in groups.values() if len(members) > 1]
    taught = [members for members in together if any(member.advantages is not None for member in members)]
    empty = [members for members in taught if not any(map(has_advantage, members))]
    # Members of a group have the same prompt: different tokens mean different completions.
    distinct = [len({member.input_ids.tobytes() for member in members}) / len(members) for members in together]
    rewards = [[member.reward for member in members if member.reward is not None] for members in together]
    spreads = [statistics.stdev(values) for values in rewards if len(values) > 1]
    return {
        "zero_advantage_groups": Mean(float(len(empty)), float(len(taught))),
        "distinct_completions": Mean(sum(distinct), float(len(distinct))),
        "group_reward_spread": Mean(sum(spreads), float(len(spreads))),
        "most_common_completion": _most_common(together),
    }


def _most_common(groups: Sequence[Sequence[Rollout]]) -> Mean:
    """Compute the share of documents with the most common completion. It is empty with a single prompt, because a good
    policy may always give that prompt the same answer."""
    prompts = {members[0].input_ids[~members[0].loss_mask].tobytes() for members in groups}
    if len(prompts) < 2:
        return Mean(0.0, 0.0)
    counts = Counter(member.completion for members in groups for member in members)
    return Mean(float(max(counts.values())), float(counts.total()))


def measure_answers(documents: Sequence[Rollout]) -> dict[str, Metric]:
    """Compute the lengths of completions in labels, and the standard deviation of the step's rewards. A completion is
    `rewarded` if its reward is above the step's mean."""
    lengths = [document.num_labels for document in documents]
    with_turns = [document.turns for document in documents if document.turns]
    rewarded = [turn.reward for turns in with_turns for turn in turns if turn.reward is not None]
    metrics: dict[str, Metric] = {
        "response_length": _mean(lengths),
        "max_response_length": Max(float(max(lengths, default=-math.inf))),
        "min_response_length": Min(float(min(lengths, default=math.inf))),
    }
    if with_turns:
        metrics["turns"] = _mean([len(turns) for turns in with_turns])
    if rewarded:
        metrics["turn_reward"] = Mean(math.fsum(rewarded), float(len(rewarded)))
    known = zip(documents, lengths, strict=True)
    pairs = [(document.reward, length) for document, length in known if document.reward is not None]
    if len(pairs) > 1:
        rewards = [reward for reward, _ in pairs]
        mean = statistics.fmean(rewards)
        # Rounding may put a reward that equals the mean slightly above it.
        above = [reward - mean > ROUNDING * max(map(abs, rewards)) for reward in rewards]
        metrics |= {
            "reward_std": Mean(statistics.stdev(rewards), 1.0),
            "response_length_rewarded": _mean([length for (_, length), high in zip(pairs, above, strict=True) if high]),
            "response_length_unrewarded": _mean(
                [length for (_, length), high in zip(pairs, above, strict=True) if not high]
            ),
        }
    return metrics


def _mean(values: Sequence[int]) -> Mean:
    return Mean(float(sum(values)), float(len(values)))
