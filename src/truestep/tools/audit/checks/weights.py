"""Checks over steps: weights that never change, and weights that become stale."""

from collections.abc import Iterator

import numpy as np

from truestep.tools.audit.checks.logprobs import beside_trainer
from truestep.tools.audit.checks.tokens import members_of
from truestep.tools.audit.finding import Evidence
from truestep.tools.audit.samples import NONE, Dump

AHEAD = 8  # steps
TREND = 3.09  # standard errors of the Mann-Kendall test; by chance in one of 1,000 runs


def never_changed(dump: Dump) -> Iterator[Evidence]:
    """Compare the log-probs of the same token after the same prompt at different steps, bit by bit."""
    first, _ = dump.edges
    steps = dump.steps
    usable = (dump.prompts >= 0) & (first > 0) & (steps != NONE)
    usable &= np.array([one.ids is not None and one.ids[0] >= 0 for one in dump.samples], np.bool_)
    places = np.where(usable, dump.starts[:-1] + np.maximum(first, 0), 0)
    if not usable.any() or dump.coarse:
        return
    ids, versions = dump.ids[places], dump.numbers(lambda one: one.version)
    for name, values in (("sampler", dump.logprobs[places]), ("trainer", dump.trainer[places])):
        known = usable & np.isfinite(values) & (values < -1e-4)
        keys = np.unique(np.stack([dump.prompts, ids]), axis=1, return_inverse=True)[1].reshape(-1)
        compared, index = set(), -1
        equal = pairs = 0
        for members in members_of(keys, known):
            early, late = members[steps[members].argmin()], members[steps[members].argmax()]
            same_version = name == "sampler" and versions[early] == versions[late]
            if steps[late] == steps[early] or same_version:
                continue
            pairs += 1
            equal += bool(values[early] == values[late])
            compared |= {int(steps[early]), int(steps[late])}
            index = int(late) if index < 0 else index
        # If the dump has no versions, the sampler may be some steps behind.
        least = AHEAD if name == "sampler" and not np.isfinite(versions).any() else 2
        if equal == pairs >= 4 and max(compared) - min(compared) >= least:
            text = (
                f"for {pairs:,} prompts of several steps ({min(compared)} to {max(compared)}), the {name}'s log-prob "
                f"of the first token is the same to the last bit: the {name} has the same weights"
            )
            yield Evidence(index, text, pairs, int(first[index]))
            return


def staleness(dump: Dump) -> Iterator[Evidence]:
    """Test whether the sampler's weights become staler from step to step, or never change."""
    old = dump.numbers(lambda one: one.staleness)
    rows = np.flatnonzero(np.isfinite(old) & (dump.steps != NONE))
    if not len(rows):
        return
    steps, place = np.unique(dump.steps[rows], return_inverse=True)
    means = np.bincount(place, old[rows]) / np.bincount(place)
    versions = dump.numbers(lambda one: one.version)[rows]
    index = int(rows[place == len(steps) - 1][0])
    if len(steps) >= 4 and np.isfinite(versions).all() and len(set(versions.tolist())) == 1:
        text = (
            f"all {len(steps):,} steps ({steps[0]} to {steps[-1]}) were drawn by weights of version {versions[0]:.0f}"
        )
        yield Evidence(index, text, len(rows), name="weights-never-changed")
        return
    third = len(steps) // 3
    if third and trend(means) > TREND and means[-third:].mean() >= 1.5 * means[third:-third].mean() > 0:
        text = f"staleness goes from {means[0]:.1f} at step {steps[0]} to {means[-1]:.1f} at step {steps[-1]}"
        yield Evidence(index, text, len(rows))


def trend(values: np.ndarray) -> float:
    """Return the z-score of the Mann-Kendall test for a rising trend."""
    n = len(values)
    rises = sum(float(np.sign(values[i + 1 :] - values[i]).sum()) for i in range(n - 1))
    ties = np.unique(values, return_counts=True)[1]
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    return (rises - np.sign(rises)) / np.sqrt(variance) if variance > 0 else 0.0


def others(dump: Dump) -> Iterator[Evidence]:
    yield from beside_trainer(dump)
    yield from _drift(dump)


def _drift(dump: Dump) -> Iterator[Evidence]:
    """Test whether the gap between the trainer's and the sampler's log-probs grows from step to step."""
    gap = np.abs(dump.gap)
    steps = dump.steps[dump.label_owner]
    known = np.isfinite(gap) & (steps != NONE)
    numbers, place = np.unique(steps[known], return_inverse=True)
    if len(numbers) < 6:
        return
    means = np.bincount(place, gap[known]) / np.bincount(place)
    if trend(means) > TREND and means[-1] > 5 * means[0] and means[-1] > 0.02:
        index = int(dump.label_owner[known][place == len(numbers) - 1][0])
        text = (
            f"the mean gap between the trainer's and the sampler's log-probs grows from {means[0]:.1e} at step "
            f"{numbers[0]} to {means[-1]:.1e} at step {numbers[-1]}: the sampler is not given the new weights"
        )
        yield Evidence(index, text, int((place == len(numbers) - 1).sum()))
