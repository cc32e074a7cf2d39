"""The metrics of a step's groups: whether they differ at all, which is what there is to learn from.

They are of the members that are in the step, and of groups that have two or more of them there. Every rank has all
documents of the step here, so no layout shows in them.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from truestep.metrics.types import Mean, Metric
from truestep.rollouts.selection import has_advantage
from truestep.types import Rollout


def measure_groups(documents: Sequence[Rollout]) -> dict[str, Metric]:
    """Measure the share of groups without an advantage, the share of distinct members, and the spread of rewards."""
    groups: dict[str, list[Rollout]] = defaultdict(list)
    for document in documents:
        if document.group_id is not None:
            groups[document.group_id].append(document)
    together = [members for members in groups.values() if len(members) > 1]
    taught = [members for members in together if any(member.advantages is not None for member in members)]
    empty = [members for members in taught if not any(map(has_advantage, members))]
    # Members have one prompt, so those that differ have other completions.
    distinct = [len({member.input_ids.tobytes() for member in members}) / len(members) for members in together]
    rewards = [[member.reward for member in members if member.reward is not None] for members in together]
    spreads = [statistics.stdev(values) for values in rewards if len(values) > 1]
    return {
        "zero_advantage_groups": Mean(float(len(empty)), float(len(taught))),
        "distinct_completions": Mean(sum(distinct), float(len(distinct))),
        "group_reward_spread": Mean(sum(spreads), float(len(spreads))),
    }
