"""Verdicts in addition to the verdict on what the policy learns (`state`). A verdict that `state` already implies is
left out."""

from collections.abc import Callable, Iterator
from statistics import median

from truestep.report.figures import format_percent
from truestep.report.formats import format_number
from truestep.report.verdicts.evidence import FEWEST_STEPS, Evidence, Verdict, short
from truestep.report.verdicts.state import CUT_OFF, zero_parts
from truestep.text import printable

_FEW = 0.01  # rejected fraction of completions; below it the verdict is a note, else a warning
_FAR = 0.1  # nats per token between the policy and the sampler
_CLIPPED = 0.3  # fraction of tokens whose ratio is clipped
_SLOW, _SLOW_SECONDS = 0.5, 1.0  # waiting: as a fraction of a step's time, and in seconds
# What a run waits for while it samples in process: metric, kind, title, text and advice of the verdict.
_WAITS = (
    (
        "time/rating",
        "slow rewards",
        "The run waits for its rewards",
        "is waiting for rewards after the last completion has ended",
        "Make the reward faster, or give it more processes (sampler.reward_workers).",
    ),
    (
        "sampling_idle_time",
        "slow tools",
        "The sampler waits for its episodes",
        "is waiting for tools and rewards, with no token to draw",
        "Make the tools faster (tool_time/NAME), give them more processes (sampler.reward_workers), or make more "
        "documents a step, so that others draw meanwhile (schedule.docs_per_step).",
    ),
)
_REPEATS = 0.5  # the last share of distinct completions, divided by the first
_SILENT = 0.1  # the last entropy, divided by the first
# Fractions of groups without advantages: above `_EMPTY` a verdict is a note, above `_NEARLY_ALL` a warning.
_EMPTY, _NEARLY_ALL = 0.5, 0.8
_MANY_CUT = 0.3  # fraction of episodes that a limit cuts off
# The advice if a limit cuts off many episodes, by limit.
_RAISE = {
    "max_turns": "Raise sampler.max_turns, or let the environment end its episodes sooner.",
    "max_episode_tokens": "Raise sampler.max_episode_tokens, or let the environment say less.",
    "max_new_tokens": "Raise sampler.max_new_tokens, the most tokens of one turn.",
    "episode_timeout": "Look at turn_time/environment and turn_time/drawing: make the slower one faster, or raise "
    "sampler.episode_timeout.",
}
# Fractions of computed tokens that are prefixes which another micro-batch has too: above `_AGAIN` a verdict is a note,
# above `_MOSTLY_AGAIN` a warning.
_AGAIN, _MOSTLY_AGAIN = 0.1, 0.5
# States that imply that groups have no advantages.
_WITHOUT_DIFFERENCE = ("collapse", "constant reward", "too hard", "too easy", "lost", "rate", "entropy", "length")
# States in which the reward rises, so that less exploration is not a problem.
_RISING = ("learned", "hacked")


def beside(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    for judge in _JUDGES:
        yield from judge(evidence, state)


def _dead_parts(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    if state.kind in ("collapse", "too hard", "constant reward"):
        return
    for part in zero_parts(evidence):
        yield Verdict(
            f"dead part {part}",
            "warning",
            f"The part `{printable(part, 60)}` of the reward is dead",
            f"it is 0 in every document of all {len(evidence.values('reward'))} steps, so nothing is learnt from it.",
            "Call the reward on an answer that should earn this part. If the part is 0, mend the reward; otherwise the "
            "model cannot earn it yet.",
        )


def _rejected(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    total = sum(evidence.rejected.values())
    if not total:
        return
    share = total / max(1.0, total + float(evidence.values("num_documents").sum()))
    reason, count = max(evidence.rejected.items(), key=lambda item: item[1])
    often = "all for this reason" if count == total else f"{count:,} of them for the most frequent reason"
    yield Verdict(
        "rejected",
        "note" if share < _FEW else "warning",
        "Rejected completions are not trained on",
        f"{total:,} ({format_percent(share)}) {'was' if total == 1 else 'were'} rejected, {often}: "
        f"{printable(reason, 200)}.",
        f"{evidence.rejected_in} has each with its reason.",
    )


def _best_is_past(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    for one in evidence.held_out if state.level != "bad" else ():
        best, step = one.best
        # 1.5 margins, because the best of many evaluations is high partly by chance.
        if one.margin is not None and best - one.last > 1.5 * one.margin and best > one.first:
            yield Verdict(
                "best is past",
                "warning",
                f"The held-out {one.name} reward fell from its best",
                f"it was {best:.3f} after step {format_number(step)}, and is {one.last:.3f} after the last evaluation.",
                f"The checkpoint of step {format_number(step)} may be the better model.",
            )
            return


def _slow(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    for metric, kind, title, waiting, advice in _WAITS:
        waits, steps = (evidence.values(name)[-FEWEST_STEPS:] for name in (metric, "step_time"))
        if len(waits) < FEWEST_STEPS or len(waits) != len(steps):
            continue
        share, seconds = median((waits / steps).tolist()), median(waits.tolist())
        if share > _SLOW and seconds > _SLOW_SECONDS:
            part = f"{format_percent(share)} of a step's time, {seconds:.1f} s"
            yield Verdict(kind, "warning", title, f"in the last {FEWEST_STEPS} steps {part}, {waiting}.", advice)


def _far(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    distance, clipped = (evidence.recent_mean(name) for name in ("kl_new_old", "clipped_ratio_fraction"))
    facts = []
    if distance is not None and distance > _FAR:
        facts.append(f"their divergence (kl_new_old) is {short(distance)} nats a token")
    if clipped is not None and clipped > _CLIPPED:
        facts.append(f"the ratio of {format_percent(clipped)} of the tokens is outside the clip's bounds")
    if not facts or state.kind == "rate":
        return
    staleness = evidence.recent_mean("staleness")
    old = f" The documents are {format_number(staleness, 3)} documents old." if staleness else ""
    yield Verdict(
        "far from the sampler",
        "warning",
        "The policy is far from the sampler",
        f"in {evidence.since()} {' and '.join(facts)}.{old}",
        "Lower optimizer.learning_rate, schedule.updates_per_batch or the age of rollouts (sampler.max_staleness).",
    )


def _cut_off(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    cut = evidence.recent_mean("truncated_fraction")
    if f"ended_by/{next(iter(_RAISE))}" in evidence.names:
        yield from _cut_episodes(evidence, state)
        return
    if cut is None or state.kind in ("length", "collapse", "rate", "entropy", "lost"):
        return
    # Only if most were cut off from the start. The verdict "length" judges growth.
    if min(cut, float(evidence.values("truncated_fraction")[: evidence.window].mean())) < CUT_OFF:
        return
    yield Verdict(
        "cut off",
        "warning",
        "Most completions are cut off",
        f"{format_percent(cut)} of those of {evidence.since()} reached the length limit before they ended.",
        "Raise sampler.max_new_tokens, or give data.overlong_penalty.",
    )


def _cut_episodes(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    """Name the limit that cuts off most episodes, if limits cut off many."""
    shares = {limit: evidence.recent_mean(f"ended_by/{limit}") or 0.0 for limit in _RAISE}
    if sum(shares.values()) < _MANY_CUT or state.kind in ("collapse", "rate", "entropy", "lost"):
        return
    limits = sorted((limit for limit in shares if shares[limit] > 0), key=lambda limit: -shares[limit])
    listed = ", ".join(f"{format_percent(shares[limit])} by {limit}" for limit in limits)
    yield Verdict(
        "cut off",
        "warning",
        "Many episodes are cut before they end",
        f"of those of {evidence.since()}, limits cut {format_percent(sum(shares.values()))}: {listed}.",
        _RAISE[limits[0]],
    )


def _no_gradient(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    norms = evidence.recent("grad_norm")
    if not len(norms) or norms.any() or state.kind in _WITHOUT_DIFFERENCE:
        return
    yield Verdict(
        "no gradient",
        "warning",
        "The steps change nothing",
        f"the gradient of all {evidence.since()} is 0.",
        "Look at the advantages (zero_advantage_fraction) and at the clipped and masked shares of the labels.",
    )


def _empty_groups(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    share = evidence.recent_mean("zero_advantage_groups")
    if share is None or share <= _EMPTY or evidence.early or state.kind in (*_WITHOUT_DIFFERENCE, *_RISING, "worse"):
        return
    yield Verdict(
        "groups without a difference",
        "warning" if share > _NEARLY_ALL else "note",  # with hard prompts, half of the groups usually have no advantage
        "Most groups teach nothing",
        f"in {evidence.since()} {format_percent(share)} of the groups have no advantage.",
        "The prompts are too easy or too hard: take others, or let data.zero_advantage: replace draw them.",
    )


def _repeats(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    if state.kind in (*_WITHOUT_DIFFERENCE, *_RISING):
        return
    facts = []
    distinct, entropy = evidence.trend("distinct_completions"), evidence.trend("entropy")
    if distinct is not None and distinct.last < _REPEATS * distinct.first:
        facts.append(f"the share of different completions in a group fell {distinct.change}")
    if entropy is not None and entropy.first > 0 and entropy.last < _SILENT * entropy.first:
        facts.append(f"the entropy fell {entropy.change} nats")
    if facts:
        yield Verdict(
            "no exploration",
            "warning",
            "The policy has all but stopped exploring",
            f"{' and '.join(facts)}, while the reward did not rise.",
            "Lower optimizer.learning_rate, or give loss.entropy_bonus or loss.entropy_target.",
        )


def _divided_trees(evidence: Evidence, state: Verdict) -> Iterator[Verdict]:
    # A step in which no shared prefixes were looked for has no number of them.
    again, computed = (evidence.recent_sum(name) for name in ("recomputed_prefix_tokens", "computed_tokens"))
    if again <= _AGAIN * computed:
        return
    yield Verdict(
        "divided trees",
        "warning" if again > _MOSTLY_AGAIN * computed else "note",
        "Shared prefixes are computed several times",
        f"{format_percent(again / computed)} of the tokens that {evidence.since()} computed are prefixes that another "
        "micro-batch computed too: the documents that have them do not fit one micro-batch, or are divided to keep "
        "all ranks busy.",
        "If they do not fit, raise data.tokens_per_microbatch (model.activation_checkpointing makes room); with more "
        "ranks than groups, take more groups a step (schedule.docs_per_step).",
    )


_JUDGES: tuple[Callable[[Evidence, Verdict], Iterator[Verdict]], ...] = (
    _rejected,
    _dead_parts,
    _far,
    _cut_off,
    _no_gradient,
    _empty_groups,
    _repeats,
    _best_is_past,
    _slow,
    _divided_trees,
)
