"""Checks of groups: copies, greedy draws, advantages, rewards, missing members."""

from collections.abc import Iterator, Mapping
from math import exp, lgamma, log

import numpy as np

from truestep.tools.audit.checks.tokens import members_of
from truestep.tools.audit.finding import Evidence, sure
from truestep.tools.audit.samples import Dump, Sample

CHANCE = 1e-6  # probability below which equal completions are not accidents
TIMES = 4.0  # required number of equal pairs, as a multiple of the predicted number
FLOORS = (1e-6, 1e-4)
# lengths in characters, of a completion and of a whole group, from which equal texts without log-probs are not
# accidents
LONG, CHARACTERS = 64, 128


def copies(dump: Dump) -> Iterator[Evidence]:
    """Compare the number of equal completions of a prompt with the number that their log-probs predict."""
    completions = dump.completions
    logs = np.bincount(dump.label_owner, np.nan_to_num(dump.logprobs[dump.labels]), len(dump.samples))
    drawn = np.bincount(dump.label_owner[np.isfinite(dump.logprobs[dump.labels])], minlength=len(dump.samples)) > 0
    expected, equal, groups, same_groups, surplus = 0.0, [], 0, 0, 0
    for members in members_of(dump.asked, completions >= 0):
        distinct, at = np.unique(completions[members], return_index=True)
        groups += 1
        same_groups += len(distinct) == 1
        expected += float(np.exp(logs[members]).sum()) * (len(members) - 1) / 2
        if len(distinct) < len(members):
            surplus += len(members) - len(distinct)
            equal.append(int(np.delete(members, at)[0]))
    if not equal:
        return
    with_logprobs = bool(drawn[equal].all())
    # Log-probs predict the number of equal pairs; copies are fewer than pairs, and come in clusters. Hence the factor
    # `TIMES`.
    if with_logprobs and (surplus < TIMES * expected or poisson_tail(surplus, expected) > CHANCE):
        return
    first = equal[0]
    if same_groups >= max(4, 0.9 * groups):
        text = f"in {same_groups:,} of {groups:,} groups all completions are the same"
        text += f", and their log-probs predict {expected:.2g} equal pairs" if with_logprobs else ""
        if not with_logprobs and len(set(completions.tolist())) < 4:
            return
        yield Evidence(first, text, same_groups, None, sure(with_logprobs), "temperature-unused")
    elif with_logprobs or sum(_long(dump, i) for i in equal) > 0.5 * groups > 1:
        text = f"{surplus:,} completions are copies of others in their group"
        text += f", and their log-probs predict {expected:.2g}" if with_logprobs else f" in {len(equal):,} groups"
        yield Evidence(first, text, len(equal), None, sure(with_logprobs))


def _all_twice(dump: Dump) -> Iterator[Evidence]:
    """Find dumps of texts in which each completion of a prompt occurs twice, as if two ranks had written one batch.
    Short completions are left out, because they may be equal by chance."""
    if any(one.group is not None or one.ids is not None for one in dump.samples):
        return
    groups, found = 0, list[int]()
    for members in members_of(dump.asked, dump.completions >= 0):
        counts = np.unique(dump.completions[members], return_counts=True)[1]
        groups += 1
        long = any(_long(dump, int(i)) for i in members)
        if long and len(counts) > 1 and counts.min() > 1 and len(set(counts.tolist())) == 1:
            found.append(int(members[-1]))
    if len(found) >= 4 and len(found) >= 0.8 * groups:
        text = f"each completion of a prompt occurs more than once, for {len(found):,} of {groups:,} prompts"
        yield Evidence(found[0], text, len(found), None, "medium")


def no_numbers(dump: Dump) -> Iterator[Evidence]:
    """Find rewards and advantages that are NaN or infinite."""
    rewards = [i for i, one in enumerate(dump.samples) if one.reward is not None and not np.isfinite(one.reward)]
    places = {i: at for i, one in enumerate(dump.samples) if (at := _no_advantage(one)) is not None}
    for what, found, at in (
        ("a reward", rewards, None),
        ("an advantage", [*places], next(iter(places.values()), None)),
    ):
        if found:
            text = f"{what} that is no number, in {len(found):,} of {len(dump.samples):,} samples"
            yield Evidence(found[0], text, len(found), at if dump.samples[found[0]].ids is not None else None)


def _no_advantage(sample: Sample) -> int | None:
    """Return the place of a sample's first label whose advantage is no number; 0 if all labels share one advantage."""
    if sample.advantages is None:
        return None
    bad = ~np.isfinite(sample.advantages)
    if sample.mask is not None and len(sample.mask) == len(bad):
        bad &= sample.mask
    return int(bad.argmax()) if bad.any() else None


def _long(dump: Dump, index: int) -> bool:
    return len(dump.samples[index].completion or "") >= LONG


def poisson_tail(count: int, mean: float) -> float:
    """Return the probability of at least `count` events if `mean` are expected."""
    if mean <= 0:
        return 0.0 if count else 1.0
    if count <= mean:
        return 1.0
    return sum(exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(count, count + 200))


def copies_of_groups(dump: Dump) -> Iterator[Evidence]:
    yield from _copied_groups(dump)
    yield from _all_twice(dump)


def _copied_groups(dump: Dump) -> Iterator[Evidence]:
    """Find groups with the same completions as an earlier group."""
    completions = dump.completions
    logs = np.bincount(dump.label_owner, np.nan_to_num(dump.logprobs[dump.labels]), len(dump.samples))
    seen: dict[tuple[int, ...], int] = {}
    again: list[tuple[int, int]] = []
    for members in members_of(dump.groups, (completions >= 0) & dump.alone):
        key = tuple(sorted(completions[members].tolist()))
        written = {dump.samples[int(i)].completion or "" for i in members}
        texts = len(written) > 2 and sum(map(len, written)) >= CHARACTERS
        unlikely = logs[members].sum() < 2 * log(CHANCE) or texts
        if len(set(key)) > 1 and unlikely:
            if key in seen:
                again.append((int(members[0]), seen[key]))
            seen.setdefault(key, int(members[0]))
    if again:
        index, before = again[0]
        other = dump.samples[before]
        text = f"all completions of its group are also at {other.file}:{other.line}; {len(again):,} groups are copies"
        yield Evidence(index, text, len(again))


def incomplete(dump: Dump) -> Iterator[Evidence]:
    """Find groups that are smaller than most, if the dump has group ids or texts."""
    named = np.array([one.group is not None or one.ids is None for one in dump.samples], np.bool_)
    groups = dump.asked[(dump.asked >= 0) & named]
    if not len(groups):
        return
    sizes = np.bincount(groups)
    values, counts = np.unique(sizes[sizes > 0], return_counts=True)
    usual = int(values[counts.argmax()])
    few = np.flatnonzero((sizes > 0) & (sizes < usual))
    if usual > 1 and counts.max() >= 0.5 * counts.sum() and len(few) >= max(3, 0.05 * counts.sum()):
        index = int(np.flatnonzero(dump.asked == few[0])[0])
        text = f"{len(few):,} of {counts.sum():,} groups have fewer than {usual} samples (this one {sizes[few[0]]})"
        yield Evidence(index, text, len(few), None, "medium")


def _blocks(rewards: np.ndarray, groups: np.ndarray, steps: np.ndarray, parts: np.ndarray) -> Mapping[str, np.ndarray]:
    """Return the advantages [N] that each known rule computes from rewards."""

    def mean(values: np.ndarray, by: np.ndarray) -> np.ndarray:
        return (np.bincount(by, values) / np.bincount(by))[by]

    def spread(values: np.ndarray, by: np.ndarray, less: int) -> np.ndarray:
        n = np.bincount(by)[by]
        return np.sqrt(mean((values - mean(values, by)) ** 2, by) * n / np.maximum(n - less, 1))

    n = np.bincount(groups)[groups]
    centred = rewards - mean(rewards, groups)
    whole = rewards - mean(rewards, steps)
    found = {
        "reward": rewards,
        "group_mean": centred,
        "leave_one_out": centred * n / np.maximum(n - 1, 1),
        "the step's mean": whole,
        "reward over the group's mean": centred / np.where(mean(rewards, groups) == 0, np.inf, mean(rewards, groups)),
    }
    for floor in FLOORS:  # trainers add this to a standard deviation
        found |= {
            f"group_normalized, {floor:g}": centred / (spread(rewards, groups, 1) + floor),
            f"group_normalized (n), {floor:g}": centred / (spread(rewards, groups, 0) + floor),
            f"batch_normalized, {floor:g}": centred / (spread(centred, steps, 1) + floor),
            f"group mean, the step's deviation, {floor:g}": centred / (spread(rewards, steps, 1) + floor),
            f"the step's mean and deviation, {floor:g}": whole / (spread(rewards, steps, 1) + floor),
        }
    if parts.shape[1] > 1:
        each = [(p - mean(p, groups)) / (spread(p, groups, 1) + FLOORS[1]) for p in parts.T]
        total = np.sum(each, 0)
        found["parts normalised"] = total
        found["parts normalised, the step's deviation"] = (total - mean(total, steps)) / (
            spread(total, steps, 1) + FLOORS[1]
        )
    return {name: np.where(np.abs(values) < 1e-5, 0, values) for name, values in found.items()}


def _best(rules: Mapping[str, np.ndarray], given: np.ndarray, telling: np.ndarray) -> tuple[str, np.ndarray, float]:
    """Return the rule that explains the largest share of advantages in groups with different rewards, the samples for
    which it holds, and this share."""
    best = ("", np.zeros(len(given), np.bool_), -1.0)
    for name, values in rules.items():
        scale = float(np.sqrt(np.mean(values[telling] ** 2))) if telling.any() else 0.0
        fits = np.abs(given - values) <= 0.01 * np.maximum(np.abs(values), scale) + 1e-4
        share = float(fits[telling].mean())
        if share > best[2]:
            best = (name, fits, share)
    return best


def advantages(dump: Dump) -> Iterator[Evidence]:
    """Find the rule that explains most advantages, and compare each advantage with that rule's value for its group's
    rewards."""
    groups, given, rewards = dump.rated, dump.advantage, dump.rewards
    usable = (groups >= 0) & np.isfinite(given) & np.isfinite(rewards)
    if usable.sum() < 8:
        return
    sizes = np.bincount(groups[groups >= 0], minlength=int(groups.max(initial=-1)) + 1)
    seen = sizes[sizes > 0]
    usual = int(np.bincount(seen).argmax()) if len(seen) else 0
    whole = (sizes >= max(2, usual)) & (np.bincount(groups[usable], minlength=len(sizes)) == sizes)
    full = usable & whole[np.maximum(groups, 0)]
    chosen = np.flatnonzero(full)
    if len(chosen) < 8:
        return
    a, r = given[chosen], rewards[chosen]
    g = np.unique(groups[chosen], return_inverse=True)[1]
    s = np.unique(dump.steps[chosen], return_inverse=True)[1]
    members = [dump.samples[int(i)] for i in chosen]
    names = sorted({name for one in members for name in one.parts})
    parts = np.array([[one.parts.get(name, 0.0) for name in names] for one in members]).reshape(len(a), -1)
    spread = np.bincount(g, (r - (np.bincount(g, r) / np.bincount(g))[g]) ** 2)[g]
    telling = spread > 1e-12
    if telling.sum() < 8:
        telling = np.ones(len(a), np.bool_)
    rules = _blocks(r, g, s, parts)
    name, fits, share = _best(rules, a, telling)
    if share >= 0.5:
        if not fits.all():
            index = int((~fits).argmax())
            text = (
                f"an advantage is {a[index]:.4g} where the rule {name} gives {rules[name][index]:.4g}; "
                f"{int((~fits).sum()):,} of {len(a):,} samples differ from the rule, the others follow it"
            )
            yield Evidence(int(chosen[index]), text, int((~fits).sum()), _first_label(dump, int(chosen[index])))
        return
    yield from _elsewhere(dump, chosen, a, r, g, s, usual)


def _first_label(dump: Dump, index: int) -> int | None:
    return int(dump.edges[0][index]) if dump.samples[index].ids is not None else None


def _elsewhere(
    dump: Dump, chosen: np.ndarray, a: np.ndarray, r: np.ndarray, g: np.ndarray, s: np.ndarray, usual: int
) -> Iterator[Evidence]:
    """Test whether the advantages follow from the rewards of other samples, or from other groups."""
    index, position = int(chosen[0]), _first_label(dump, int(chosen[0]))
    none, order, telling = np.zeros((len(a), 1)), np.arange(len(a)), np.abs(a) > 1e-6
    if telling.sum() < 8:
        return
    own = _blocks(r, g, s, none)
    if _best(own, a, telling)[2] >= 0.9:  # the others were set to 0 on purpose
        return
    for by in [*range(1, 2 * usual + 1), *range(-2 * usual, 0)]:
        moved = {name: np.roll(values, by) for name, values in own.items()}
        for what, rules in (("rewards", _blocks(np.roll(r, by), g, s, none)), ("advantages", moved)):
            name, _, share = _best(rules, a, telling)
            if share >= 0.9:
                side = "before" if by > 0 else "behind"
                text = f"advantages follow the rule {name} with the {what} of the samples {abs(by)} places {side}"
                yield Evidence(index, text, len(a), position, name="rewards-mispaired")
                return
    for size in sorted({usual, *(k for k in range(2, 65) if len(a) % k == 0)}):
        for first in range(size if size == usual else 1):
            name, _, share = _best(_blocks(r, (order + first) // size, s, none), a, telling)
            if share >= 0.9:
                text = f"advantages follow the rule {name} in blocks of {size} samples in file order" + (
                    f" that begin at sample {(-first) % size}" if first else ""
                )
                yield Evidence(index, f"{text}, and not in groups", len(a), position, name="advantages-other-group")
                return
    against = total = 0
    worst = index
    for members in members_of(g):
        dr, da = np.sign(r[members][:, None] - r[members]), np.sign(a[members][:, None] - a[members])
        total += int((dr != 0).sum()) // 2
        wrong = int((dr * da < 0).sum()) // 2
        worst = int(chosen[members[0]]) if wrong and not against else worst
        against += wrong
    if total >= 20 and against > 0.1 * total:
        text = f"in {against:,} of {total:,} pairs within groups, the smaller reward has the larger advantage"
        confidence = sure(against > 0.25 * total)
        yield Evidence(worst, text, len(a), _first_label(dump, worst), confidence)


def reward_parts(dump: Dump) -> Iterator[Evidence]:
    """Compare rewards with the sums of their parts. Report differences only if most samples have none."""
    rows = [i for i, one in enumerate(dump.samples) if len(one.parts) > 1 and one.reward is not None]
    if len(rows) < 8:
        return
    sums = np.array(
        [sum(value for name, value in dump.samples[i].parts.items() if "penalty" not in name) for i in rows]
    )
    less = np.array([sum(value for name, value in dump.samples[i].parts.items() if "penalty" in name) for i in rows])
    given = dump.rewards[rows]
    bad = np.minimum(np.abs(given - sums + less), np.abs(given - sums - less)) > 1e-4 * np.maximum(1, np.abs(given))
    if bad.any() and bad.mean() < 0.4:
        index = int(bad.argmax())
        text = f"a reward of {given[index]:.4g} whose parts add up to {sums[index]:.4g}; {int(bad.sum()):,} samples"
        yield Evidence(rows[index], text, int(bad.sum()))


def mispaired(dump: Dump) -> Iterator[Evidence]:
    """Compare rewards with whether a completion contains the right answer: the completion of the same sample, of a
    sample some places away, or of the sample that it belongs to if rewards were gathered from ranks in turns."""
    rows = [
        i for i, one in enumerate(dump.samples) if one.answer and one.completion is not None and one.reward is not None
    ]
    right = np.array([_has_answer(dump.samples[i].completion or "", dump.samples[i].answer or "") for i in rows], float)
    rewards = dump.rewards[rows]
    if len(rows) >= 32 and 0 < right.mean() < 1 and rewards.std() > 0:
        here = float(np.corrcoef(right, rewards)[0, 1])
        moved = {
            f"{abs(by)} places {'before' if by < 0 else 'behind'}": np.roll(rewards, by) for by in range(-16, 17) if by
        }
        moved |= {f"gathered from {ranks} ranks in turns": rewards[_dealt(dump, rows, ranks)] for ranks in (2, 4, 8)}
        away = {where: float(np.corrcoef(right, values)[0, 1]) for where, values in moved.items()}
        by = max(away, key=lambda one: away[one])
        independent = len(set(dump.groups[rows].tolist()))
        sure = np.arctanh(min(away[by], 0.999)) * np.sqrt(max(independent - 3, 1)) > SURE
        if away[by] > 0.8 and here < away[by] - 0.3 and sure:
            text = (
                f"whether a completion has the answer correlates with its reward at {here:.2f}, and at {away[by]:.2f} "
                f"with the rewards {by}"
            )
            wrong = int((right != (rewards > rewards.mean())).argmax())
            yield Evidence(rows[wrong], text, len(rows))
            return
    yield from _unequal(dump)


SURE = 4.5  # required standard errors of Fisher's z; 32 offsets and 3 numbers of ranks are tried


def _dealt(dump: Dump, rows: list[int], ranks: int) -> np.ndarray:
    """Return the place of each sample's reward, if in each step rewards are in turns of the ranks, and samples one rank
    after the other."""
    steps = np.array([dump.samples[row].step for row in rows], object)
    places = np.arange(len(rows))
    for step in dict.fromkeys(steps):
        members = np.flatnonzero(steps == step)
        if len(members) % ranks == 0:
            places[members] = members.reshape(-1, ranks).T.ravel()
    return places


def _has_answer(completion: str, answer: str) -> bool:
    """Return True if a completion contains an answer as a separate word."""
    at = completion.find(answer)
    while at >= 0:
        before, behind = completion[at - 1 : at], completion[at + len(answer) : at + len(answer) + 1]
        if not (before.isalnum() or behind.isalnum()):
            return True
        at = completion.find(answer, at + 1)
    return False


def _unequal(dump: Dump) -> Iterator[Evidence]:
    """Find equal completions of one prompt with different rewards."""
    keys = dump.asked * (int(dump.completions.max(initial=0)) + 1) + dump.completions
    usable = (dump.asked >= 0) & (dump.completions >= 0) & np.isfinite(dump.rewards) & dump.alone
    equal, unequal = 0, []
    for members in members_of(keys, usable):
        equal += len(members) - 1
        differ = np.abs(dump.rewards[members] - dump.rewards[members[0]]) > 1e-6
        if differ.any():
            unequal.append(int(members[differ.argmax()]))
    if len(unequal) >= 3 and len(unequal) >= 0.3 * equal:
        text = f"in {len(unequal):,} cases, equal completions of a prompt have different rewards"
        yield Evidence(unequal[0], text, len(unequal), None, "medium")
