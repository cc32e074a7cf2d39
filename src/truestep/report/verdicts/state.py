"""The verdict on what a policy learns: the first judgement in `_IN_ORDER` that holds. Only one is returned, because
several could contradict each other."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from truestep.report.figures import format_percent
from truestep.report.formats import format_number
from truestep.report.verdicts.evidence import Evidence, HeldOut, Trend, Verdict, short
from truestep.text import printable

# If one completion has at least this share over different prompts, the policy has collapsed.
COLLAPSED = 0.9
# A change of entropy between two steps, as a factor and in nats. Only a far too large update causes such a change.
_JUMP, _SMALLEST_JUMP = 3.0, 0.3
_LOST = 0.5  # if the last reward, divided by an earlier one, is below this, the reward is lost
_ENTROPY_GROWTH, _SMALLEST_GROWTH = 2.0, 0.5  # the last entropy divided by the first, and their difference in nats
_LENGTH_GROWTH = 1.5  # if the last completion length, divided by the first, is above this, the length has grown
CUT_OFF = 0.5  # fraction of completions
_EMPTY = 0.9  # fraction of groups without advantages
_USUAL = 0.7  # fraction of earlier steps that had a higher reward
_RISE = 0.02  # relative rise of the held-out loss
_ROUNDING = 1e-9
_NEAR = 0.1  # fraction of the range of rewards
# Names of reward parts that measure success, and names of penalties, whose best value is 0.
_SUCCESS = re.compile(r"correct|accura|right|solved|success|pass|exact", re.IGNORECASE)
_PENALTY = re.compile(r"penal|cost|fine|length|repet|overlong|error|toxic|unsafe", re.IGNORECASE)


def state(evidence: Evidence) -> Verdict:
    """Return the verdict on what the policy learns."""
    return next(verdict for judge in _IN_ORDER if (verdict := judge(evidence)) is not None)


def _broken(evidence: Evidence) -> Verdict | None:
    """Find a step at which the entropy jumped and after which the reward stayed low."""
    steps, entropies = evidence.metric("entropy")
    rewards = evidence.values("reward")
    if len(entropies) < 3 or len(rewards) != len(entropies):
        return None
    before, after = np.maximum(entropies[:-1], 1e-6), np.maximum(entropies[1:], 1e-6)
    jumps = (np.maximum(after / before, before / after) > _JUMP) & (np.abs(after - before) > _SMALLEST_JUMP)
    for place in np.flatnonzero(jumps)[:8].tolist():
        held = float(rewards[: place + 1][-10:].mean())
        left = max(float(rewards[place + 1 :].mean()), float(rewards[-10:].mean()))
        if held > 0 and left < _LOST * held and len(rewards) - place > 2:
            where = f"between steps {format_number(float(steps[place]))} and {format_number(float(steps[place + 1]))}"
            return Verdict(
                "rate",
                "bad",
                "An update was so large that it broke the policy",
                f"{where} the entropy went from {short(entropies[place])} to {short(entropies[place + 1])}, and the "
                f"reward, {short(held)} until then, is {short(float(rewards[-1]))} now.",
                "Lower optimizer.learning_rate by a factor of 3 to 10, and start from a checkpoint before that step.",
            )
    return None


def _collapsed(evidence: Evidence) -> Verdict | None:
    same = evidence.recent("most_common_completion")
    if not len(same) or same.mean() < COLLAPSED or _passes(evidence):
        return None
    quote = evidence.quote()
    which = "" if quote is None else f" ({quote})"
    facts = [f"{format_percent(float(same.mean()))} of the completions of {evidence.since()} are the same{which}"]
    if evidence.reward is not None:
        facts.append(f"the reward went {evidence.reward.change}")
    facts += [f"its part `{printable(part, 60)}` is 0 in every document" for part in zero_parts(evidence)]
    return Verdict(
        "collapse",
        "bad",
        "The policy collapsed: it answers different prompts with one completion",
        f"{_listed(facts)}.",
        "Unless this answer is right for all prompts, the reward pays for it on prompts where it is wrong: mend the "
        "reward, and start from a checkpoint before the collapse.",
    )


def _listed(facts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(facts[:-1]), facts[-1])))


def _passes(evidence: Evidence) -> bool:
    """Tell whether nearly all held-out answers pass; False if the run declares no pass_reward."""
    passed = evidence.evaluated("pass@1")[1]
    return len(passed) > 0 and float(passed[-1]) >= COLLAPSED


def _hacked(evidence: Evidence) -> Verdict | None:
    reward = evidence.reward
    if reward is None or not reward.rose:
        return None
    fallen = evidence.held_out_fell
    facts = [] if fallen is None else [f"{fallen.text} (more than chance explains)"]
    for part in evidence.parts:
        trend = evidence.trend(f"rewards/{part}")
        if trend is not None and trend.fell and 0 <= trend.last <= _LOST * trend.first and _wanted(evidence, part):
            facts.append(f"the part `{printable(part, 60)}` of the reward fell {trend.change}")
    if not facts:
        return None
    return Verdict(
        "hacked",
        "bad",
        "The reward rises while what it should measure falls",
        f"the training reward rose {reward.text}, while {_listed(facts)}.",
        "The policy found another way to be paid. Read its best-paid rollouts in `truestep report`, mend the reward, "
        "and start from a checkpoint before the fall.",
    )


def _wanted(evidence: Evidence, part: str) -> bool:
    """Tell whether a part of the reward should be large. It should if its name means success, or if it is added to the
    reward and its name does not mean a penalty."""
    if _SUCCESS.search(part):
        return True
    return _adds_up(evidence) and not _PENALTY.search(part)


def _adds_up(evidence: Evidence) -> bool:
    """Tell whether the reward is the sum of its parts."""
    rewards, parts = evidence.values("reward"), [evidence.values(f"rewards/{part}") for part in evidence.parts]
    if not parts or any(len(part) != len(rewards) for part in parts):
        return False
    return bool(np.allclose(np.sum(parts, axis=0), rewards, rtol=1e-4, atol=1e-6))


def zero_parts(evidence: Evidence) -> list[str]:
    """Return the parts of the reward that should be large but are 0 in all documents so far."""
    if not evidence.window or len(evidence.values("reward")) < evidence.window:
        return []
    means = {part: evidence.values(f"rewards/{part}") for part in evidence.parts}
    return [
        part
        for part, values in means.items()
        if len(values) >= evidence.window and not values.any() and _wanted(evidence, part)
    ]


def _random(evidence: Evidence) -> Verdict | None:
    entropy = evidence.trend("entropy")
    # If loss.entropy_target is set, the rise of the entropy is intended. Otherwise it is judged here.
    if entropy is None or not entropy.rose or "entropy_bonus_weight" in evidence.names:
        return None
    grew = entropy.last - entropy.first > _SMALLEST_GROWTH and entropy.last > _ENTROPY_GROWTH * entropy.first
    if not grew or (evidence.reward is not None and evidence.reward.rose):
        return None
    option = "loss.entropy_bonus" if "entropy_bonus" in evidence.names else "optimizer.learning_rate"
    return Verdict(
        "entropy",
        "bad",
        "The policy becomes random",
        f"the entropy rose {entropy.change} nats a token{_and_reward(evidence)}.",
        f"Lower {option}, and start from a checkpoint before the rise.",
    )


def _and_reward(evidence: Evidence) -> str:
    return "" if evidence.reward is None else f", while the reward went {evidence.reward.change}"


def _longer(evidence: Evidence) -> Verdict | None:
    cut = evidence.recent_mean("truncated_fraction")
    if cut is None or cut < CUT_OFF:
        return None
    length = evidence.trend("response_length")
    if length is None or not length.rose or length.last < _LENGTH_GROWTH * length.first:
        return None
    return Verdict(
        "length",
        "bad",
        "Completions grow until they are cut off",
        f"their length rose {length.change} tokens{_and_reward(evidence)}, and {format_percent(cut)} of those of "
        f"{evidence.since()} were cut off.",
        "If the reward pays for length, mend it or give data.overlong_penalty; if long answers are right, raise "
        "sampler.max_new_tokens.",
    )


def _one_reward(evidence: Evidence) -> Verdict | None:
    """Judge a run in which all documents of the last steps have the same reward."""
    low, high = evidence.recent("min_reward"), evidence.recent("max_reward")
    if not len(low) or len(low) != len(high) or low.min() != high.max():
        return None
    value, (smallest, largest) = float(high.max()), evidence.range
    sizes = evidence.values("num_documents")
    if smallest == largest:
        every = (
            f"all {format_number(float(sizes.sum()))} completions so far have the reward {short(value)}, so no group "
            "has a difference, and no advantage is other than 0."
        )
        return _never_varied(evidence, value, every)
    if value == largest:
        return _highest(evidence)
    earlier = evidence.values("max_reward")[: -evidence.window]
    if not len(earlier) or float((earlier > value).mean()) < _USUAL:  # higher rewards were rare
        return None
    return Verdict(
        "lost",
        "bad",
        "The policy can no longer earn what it earned before",
        f"in {evidence.since()} every completion has the reward {short(value)}, though up to {short(largest)} was "
        "earned before; nothing is learnt from these steps.",
        "Start from a checkpoint before the loss, with a lower optimizer.learning_rate.",
    )


def _never_varied(evidence: Evidence, value: float, every: str) -> Verdict:
    if evidence.pass_reward is not None and value >= evidence.pass_reward:
        return Verdict(
            "too easy", "warning", "The prompts are too easy: every completion passes", every, "Take harder prompts."
        )
    if value == 0:
        return Verdict(
            "too hard",
            "bad",
            "Nothing is learnt: no completion has earned anything",
            every,
            "Call the reward on a right answer by hand. If it pays for that, the prompts are too hard for this model: "
            "take easier ones, fine-tune on examples first, or reward partial success.",
        )
    return Verdict(
        "constant reward",
        "bad",
        "Nothing is learnt: the reward is constant",
        every,
        "Call the reward on a right and on a wrong answer by hand: it must tell them apart. If it does, the prompts "
        "are so easy or so hard that all answers to them are alike.",
    )


def _fallen(evidence: Evidence) -> Verdict | None:
    fallen = evidence.held_out_fell
    if fallen is not None:
        facts = f"{fallen.text}, more than chance explains over {format_number(fallen.prompts)} prompts."
        advice = (
            "If the training reward rises meanwhile, it pays for something else: read its best-paid rollouts. If not, "
        )
        return _worse(facts, f"{advice}lower optimizer.learning_rate, and start from a checkpoint before the fall.")
    if evidence.reward is not None and evidence.reward.fell:
        return _worse(f"the training reward fell {evidence.reward.text}.")
    rewards, steps = evidence.observations("reward"), evidence.metric("reward")[0]
    if (fall := find_fall(rewards)) is None:
        return None
    window, best, place, last = fall
    return _worse(
        f"the training reward was {short(best)} over the {window * evidence.updates} steps up to step "
        f"{format_number(float(steps[place * evidence.updates]))}, and is {short(last)} at the end."
    )


_LOWER = "Lower optimizer.learning_rate, and start from a checkpoint before the fall."


def _worse(facts: str, advice: str = _LOWER) -> Verdict:
    return Verdict("worse", "bad", "The policy got worse", facts, advice)


def find_fall(rewards: np.ndarray) -> tuple[int, float, int, float] | None:
    """Find a fall of the reward that is larger than noise, between means over windows of steps. Return the size of the
    window, the best mean, the index where its window ends, and the last mean."""
    window = max(5, len(rewards) // 10)
    if len(rewards) < 2 * window:
        return None
    sums = np.cumsum(np.append(0.0, rewards))
    means = (sums[window:] - sums[:-window]) / window
    best = int(means.argmax())
    drop = float(means[best] - means[-1]) - _ROUNDING * abs(float(means[best]))
    if best + window > len(rewards) - window or drop <= _NEAR * float(np.ptp(means)):
        return None
    last = rewards[-window:]
    with np.errstate(over="ignore"):  # the variance of very large rewards overflows to inf; then no fall is found
        spread = float(np.sqrt((rewards[best : best + window].var(ddof=1) + last.var(ddof=1)) / window))
    # 4 spreads, because the best of many windows is two or three spreads too high by chance.
    if drop <= 4 * spread:
        return None
    return window, float(means[best]), best + window - 1, float(means[-1])


def _highest(evidence: Evidence) -> Verdict | None:
    """Judge a mean reward near the largest reward seen so far. The largest possible reward is unknown."""
    empty, mean = evidence.recent_mean("zero_advantage_groups"), evidence.recent_mean("reward")
    smallest, largest = evidence.range
    near = largest - _NEAR * (largest - smallest)
    if empty is None or mean is None or empty < _EMPTY or mean < near or smallest == largest:
        return None
    trend = evidence.reward
    if trend is None or (trend.rose and trend.first < near) or zero_parts(evidence):
        return None
    return Verdict(
        "too easy",
        "warning",
        "Hardly anything is left to learn: nearly every completion earns the most that any has earned",
        f"{format_percent(empty)} of the groups of {evidence.since()} have no difference; their mean reward is "
        f"{short(mean)}, {short(trend.first)} at the start, and the largest reward seen is {short(largest)}.",
        "If no completion can earn more, the prompts are too easy: take harder ones. If one can, none has found out "
        "how.",
    )


def _rare(evidence: Evidence) -> Verdict | None:
    """Judge a mean reward near the smallest reward, if nearly all groups have no advantages."""
    empty, mean = evidence.recent_mean("zero_advantage_groups"), evidence.recent_mean("reward")
    smallest, largest = evidence.range
    if empty is None or mean is None or empty < _EMPTY or mean > smallest + _NEAR * (largest - smallest):
        return None
    trend = evidence.reward
    if trend is None or trend.rose or trend.fell:
        return None
    return Verdict(
        "too hard",
        "warning",
        "Next to nothing is learnt: hardly any completion earns more than the others",
        f"{format_percent(empty)} of the groups of {evidence.since()} have no difference, and the mean reward is "
        f"{short(mean)}, while up to {short(largest)} was earned.",
        "The prompts are too hard for this model: take easier ones, more completions of each (data.group_size), or "
        "reward partial success.",
    )


def _learned(evidence: Evidence) -> Verdict | None:
    held_out, reward = evidence.held_out_rose, evidence.reward
    rose = reward is not None and reward.rose
    if held_out is None and not rose:
        return None
    facts = []
    if held_out is not None:
        facts.append(f"{held_out.text} over {format_number(held_out.prompts)} prompts, more than chance explains")
    if reward is not None:
        facts.append(f"the training reward {'rose' if rose else 'went'} {reward.text}")
    text = f"{', and '.join(facts)}."
    empty = evidence.recent_mean("zero_advantage_groups")
    if empty is not None and empty > CUT_OFF:
        text += f" {format_percent(empty)} of the groups have no difference by now: little is left to learn from them."
    if held_out is None and evidence.held_out:
        flat: HeldOut = evidence.held_out[0]
        text = f"{text[:-1]}, but {flat.text}, which chance explains."
        return Verdict("learned", "note", "The policy earns more on its training prompts", text)
    return Verdict("learned", "good", "The policy learned", text)


def _unchanged(evidence: Evidence) -> Verdict | None:
    reward: Trend | None = evidence.reward
    if reward is None:
        return None
    facts = [f"the training reward went {reward.text}", *(one.text for one in evidence.held_out[:1])]
    return Verdict("unchanged", "note", "No change beyond noise so far", f"{'; '.join(facts)}.")


def _supervised(evidence: Evidence) -> Verdict | None:
    """Judge the held-out loss. Judge the training loss too if the run logs no reward and no advantage."""
    losses = evidence.evaluated("loss")[1]
    trend = evidence.trend("loss") if not {"reward", "advantage"} & set(evidence.names) else None
    if len(losses) >= 2:
        best = int(losses.argmin())
        text = f"the held-out loss went from {short(losses[0])} to {short(losses[-1])}"
        if losses[-1] > (1 + _RISE) * losses[best] and best < len(losses) - 2 and (trend is None or not trend.rose):
            place = format_number(float(evidence.evaluated("loss")[0][best]))
            more = f"{text}; it was lowest after step {place}, with {short(losses[best])}."
            advice = f"The model learns its examples by heart: end near step {place}, or give it more examples."
            return Verdict("overfitted", "warning", "The held-out loss rises again", more, advice)
        if losses[-1] < losses[0]:
            return Verdict("learned", "good", "The model learned", f"{text}.")
    if trend is not None and trend.fell:
        return Verdict("learned", "good", "The model fits its examples better", f"the loss fell {trend.text}.")
    if trend is not None and trend.rose:
        facts, advice = f"the loss rose {trend.text}.", "Lower optimizer.learning_rate."
        return Verdict("worse", "bad", "The model got worse", facts, advice)
    return None


def _unknown(evidence: Evidence) -> Verdict:
    count = len(evidence.steps)
    if len(evidence.values("reward")) or evidence.early:
        return Verdict(
            "early", "note", "Too early for a verdict", f"{count} {'step was' if count == 1 else 'steps were'} made."
        )
    return Verdict(
        "unknown", "note", "Whether anything is learnt cannot be said", "the run logs neither rewards nor evaluations."
    )


_IN_ORDER: tuple[Callable[[Evidence], Verdict | None], ...] = (
    _broken,
    _collapsed,
    _hacked,
    _random,
    _longer,
    _one_reward,
    _highest,
    _fallen,
    _rare,
    _learned,
    _unchanged,
    _supervised,
    _unknown,
)
