"""Checks of log-probs: impossible values, truncated distributions, and the sampler's against the trainer's."""

from collections.abc import Iterator

import numpy as np

from truestep.tools.audit.finding import Evidence, sure
from truestep.tools.audit.samples import Dump

MANY = 200  # fewest labels for a test of distributions
SIGMAS = 6.0  # standard errors; a larger deviation of a mean is by chance in one of 10^9 runs
# nats: thresholds for the estimated divergence between sampler and trainer; above the second, the confidence is high
CLOSE, FAR = 0.02, 0.1
# fewest samples for a comparison of their ends without a trainer's log-probs; log-probs above -NEAR are almost certain
FEW_ENDS, NEAR = 16, 1e-3
FEW_LABELS = 8  # samples of at most so many labels were not cut by a length limit; a grammar may have ended them
_REASONS = (
    "Possible reasons: a limit that cut the samples, a grammar, a stop string, or a log-prob that was not recorded"
)
RATIO = 0.05  # allowed difference of the mean importance ratio from 1
SURPRISE = 0.1  # allowed difference between mean surprisal and mean entropy, relative to the entropy


def invalid(dump: Dump) -> Iterator[Evidence]:
    """Find impossible log-probs at labels: above 0, infinite, missing in a sample that has others, or all integers."""
    values = dump.logprobs[dump.labels]
    has = np.bincount(dump.label_owner[np.isfinite(values)], minlength=len(dump.samples)) > 0
    bad = (values > 1e-3) | np.isinf(values) | (np.isnan(values) & has[dump.label_owner])
    yield from _first(dump, bad, "a log-prob of {value:g} at a label")
    known = np.isfinite(values)
    whole = known & (values == np.round(values)) & (values < 0)
    if MANY <= known.sum() == int((whole | (known & (values == 0))).sum()) and len(np.unique(values[whole])) > 1:
        yield from _first(dump, whole, "all log-probs are whole numbers: {value:g}")


def _first(dump: Dump, bad: np.ndarray, text: str) -> Iterator[Evidence]:
    if bad.any():
        token = int(dump.labels[bad.argmax()])
        index, position = dump.place(token)
        count = len(set(dump.label_owner[bad].tolist()))
        what = text.format(value=dump.logprobs[token])
        yield Evidence(
            index, f"{what}; {int(bad.sum()):,} of {len(bad):,} labels in {count:,} samples", count, position
        )


def constant(dump: Dump) -> Iterator[Evidence]:
    """Find samples whose log-probs are all the same number, such as a placeholder."""
    values, owner = dump.logprobs[dump.labels], dump.label_owner
    n = np.bincount(owner, minlength=len(dump.samples))
    first = np.full(len(dump.samples), np.nan)
    _, at = np.unique(owner, return_index=True)
    first[owner[at]] = values[at]
    same = np.bincount(owner[values == first[owner]], minlength=len(dump.samples))
    found = np.flatnonzero((n >= 16) & (same == n))
    if len(found):
        index = int(found[0])
        text = f"all {n[index]} log-probs of the sample are {first[index]:g}; this is so in {len(found):,} samples"
        yield Evidence(index, text, len(found), int(dump.edges[0][index]))


def truncated(dump: Dump) -> Iterator[Evidence]:
    """Find log-probs of a truncated distribution: many that are exactly 0 and none close to 0, or importance ratios
    that are all below 1."""
    labels = _but_ends(dump)
    values = dump.logprobs[labels]
    values = values[np.isfinite(values)]
    if len(values) >= MANY and not dump.coarse:
        certain, near = int((values == 0).sum()), int(((values < -1e-6) & (values > -NEAR)).sum())
        if 50 <= certain < 0.98 * len(values) and near <= certain / 50:
            token = int(labels[(dump.logprobs[labels] == 0).argmax()])
            index, position = dump.place(token)
            text = (
                f"{certain:,} of {len(values):,} labels have a log-prob of exactly 0, and {near:,} one between -1e-3 "
                "and -1e-6: where one token survives the truncation its log-prob is 0"
            )
            inside = bool((dump.logprobs[dump.labels[~dump.zero_ends]] == 0).any())
            text += "" if inside else f". All of them are the last labels of samples. {_REASONS}"
            yield Evidence(index, text, len(set(dump.owner[dump.labels].tolist())), position, sure(inside))
            return
    gap = dump.gap
    known = np.isfinite(gap)
    found = gap[known]
    if len(found) < MANY:
        return
    below, above = found < -CLOSE, found > CLOSE
    if below.mean() > 0.05 and above.sum() <= 0.01 * below.sum() and np.quantile(found, 0.001) > -1.5:
        token = int(dump.labels[known][found.argmin()])
        index, position = dump.place(token)
        text = (
            f"the trainer's log-prob is below the sampler's at {below.mean():.0%} of {len(found):,} labels (by up to "
            f"{-found.min():.2f}) and above it at {above.mean():.1%}: the sampler drew from a truncated distribution"
        )
        yield Evidence(index, text, len(set(dump.owner[dump.labels[known]].tolist())), position)


def _but_ends(dump: Dump) -> np.ndarray:
    """Return the labels for the test of truncation. Without truncation, a forced end has a log-prob of 0 too. So ends
    with a log-prob of 0 are left out if the dump has forced ends, or if only its longest samples have such ends."""
    rows = np.flatnonzero(dump.label_counts > 1)
    shorter = rows[dump.label_counts[rows] < dump.label_counts.max()]
    at_limit = len(shorter) >= FEW_ENDS and not dump.zero_ends[dump.last_labels[shorter]].any()
    return dump.labels[~dump.zero_ends] if at_limit or dump.forced_ends.any() else dump.labels


def forced_ends(dump: Dump) -> Iterator[Evidence]:
    """Find end tokens that were not drawn and have a log-prob of 0. The trainer's log-probs show them; in a dump
    without these, the lengths of the samples do."""
    if dump.forced_ends.any():
        at = int((dump.forced_ends & dump.unlikely).argmax())
        token, rows = int(dump.labels[at]), np.unique(dump.label_owner[dump.forced_ends])
        index, position = dump.place(token)
        text = (
            f"token {dump.ids[token]}, at the end, has a log-prob of exactly 0 where the policy's is "
            f"{dump.trainer[token]:.2f}; this is so in {len(rows):,} samples"
        )
        cut = _cut_by_a_limit(dump, rows, int(dump.ids[token]))
        text += ", all of the largest length" if cut else f". {_REASONS}"
        yield Evidence(index, text, len(rows), position, sure(cut))
    elif not dump.coarse and not np.isfinite(dump.trainer[dump.labels]).any():
        yield from _certain_at_the_limit(dump)


def _cut_by_a_limit(dump: Dump, rows: np.ndarray, end: int) -> bool:
    """Tell whether a limit cut the samples `rows`: they have the largest length, and shorter ones drew the end token. A
    grammar and a stop string force ends too, but at any length, or at all ends of short answers."""
    places = np.flatnonzero(dump.forced_ends & dump.unlikely)
    _, at = np.unique(dump.label_owner[places], return_index=True)
    first = places[at]  # the first forced label of each of these samples
    drawn, tokens = dump.label_counts.copy(), dump.edges[1].copy()
    drawn[rows] = first - (np.cumsum(dump.label_counts) - dump.label_counts)[rows]
    tokens[rows] = dump.labels[first] - dump.starts[rows] - 1
    at_limit = any((sizes[rows] == sizes.max()).all() for sizes in (drawn, tokens))
    ends = (dump.ids[dump.labels] == end) & (dump.logprobs[dump.labels] < 0)
    return at_limit and drawn[rows].min() >= FEW_LABELS and bool(ends.any())


def _certain_at_the_limit(dump: Dump) -> Iterator[Evidence]:
    """Find samples of the largest length that end with a log-prob of exactly 0, if shorter ones with the same last
    token do not. A policy that is certain of an end also has log-probs near 0, but at every length. Rounding hides
    that difference, so rounded log-probs are not tested. A grammar may end very short answers, so they are not tested
    either."""
    rows = np.flatnonzero(dump.label_counts > 1)
    known = dump.logprobs[dump.labels]
    small = known[(known > -NEAR) & (known < 0)]
    if len(rows) < 2 * FEW_ENDS or dump.label_counts.max() <= FEW_LABELS:
        return
    if np.isclose(small, np.round(small, 5), rtol=1e-6, atol=0).all():
        return
    last = dump.labels[dump.last_labels[rows]]
    ids, values = dump.ids[last], dump.logprobs[last]
    full = dump.label_counts[rows] == dump.label_counts[rows].max()
    zero = full & (values == 0)
    if zero.sum() < FEW_ENDS or len(set(ids[zero].tolist())) > 1:
        return
    same = ids == ids[zero][0]
    shorter = values[same & ~full & np.isfinite(values)]
    near = (values > -NEAR) & (values < 0) & same & full
    if len(shorter) < FEW_ENDS or (shorter > -1e-6).any() or (shorter > -NEAR).mean() > 0.5 or near.any():
        return
    index = int(rows[zero.argmax()])
    text = (
        f"{int(zero.sum()):,} samples of the largest length, {int(dump.label_counts[index]):,} labels, end with token "
        f"{ids[zero][0]} at a log-prob of exactly 0, and {len(shorter):,} shorter ones with at most "
        f"{shorter.max():.2g}. {_REASONS}"
    )
    yield Evidence(index, text, int(zero.sum()), int(last[zero.argmax()] - dump.starts[index]), "medium")


def beside_trainer(dump: Dump) -> Iterator[Evidence]:
    """Compare the sampler's log-probs with the trainer's: shifted by one label, by the mean ratio, and by
    divergence."""
    gap = dump.gap
    known = np.isfinite(gap)
    if known.sum() < MANY:
        return
    size = float(np.abs(gap[known]).mean())
    worst = int(dump.labels[known][np.abs(gap[known]).argmax()])
    index, position = dump.place(worst)
    count = len(set(dump.owner[dump.labels[known]].tolist()))
    for by in (1, -1):
        if size > CLOSE and (moved := _moved(dump, by)) is not None and moved < 0.2 * size:
            side = "late" if by > 0 else "early"
            text = f"a mean gap of {size:.2g} falls to {moved:.1g} with the sampler's log-probs one label {side}"
            yield Evidence(index, text, count, position, name="logprob-shifted")
            return
    d = np.clip(gap[known], -20, 20)
    divergence = float(np.mean(np.expm1(d) - d))
    ratio = np.exp(d)
    error = float(ratio.std() / np.sqrt(len(ratio)))
    off = abs(float(ratio.mean()) - 1)
    wrong = off > max(RATIO, SIGMAS * error)
    if not wrong and divergence < CLOSE:
        return
    # A temperature scales all log-probs in the same way. Then the gap and the sampler's log-probs are functions of the
    # trainer's.
    base = dump.trainer[dump.labels][known]
    explained = min(_explained(base, d), _explained(base, base - d))
    text = (
        f"the trainer's log-probs are {size:.2g} from the sampler's on average; the mean ratio is {ratio.mean():.3f} "
        f"+- {error:.3f}; the trainer's log-prob of a label explains {explained:.0%} of the gap's variance"
    )
    confidence = sure(wrong or divergence > FAR)
    name = "logprob-temperature" if explained > 0.6 else "logprob-weights"
    yield Evidence(index, text, count, position, confidence, name)


def _explained(base: np.ndarray, values: np.ndarray) -> float:
    """Return the share of the values' variance that a parabola in `base` explains."""
    terms = np.stack([np.ones_like(base), base, base**2], 1)
    left = values - terms @ np.linalg.lstsq(terms, values, rcond=None)[0]
    return 1 - float((left**2).sum() / max(((values - values.mean()) ** 2).sum(), 1e-30))


def _moved(dump: Dump, by: int) -> float | None:
    """Return the mean gap if each sample's sampler log-probs are shifted by one label."""
    owner = dump.label_owner
    sampler = np.roll(dump.logprobs[dump.labels], -by)
    same = np.roll(owner, -by) == owner
    left = np.abs(dump.trainer[dump.labels] - sampler)[same]
    left = left[np.isfinite(left)]
    return float(left.mean()) if len(left) else None


def surprise(dump: Dump) -> Iterator[Evidence]:
    """Compare the mean surprisal of the drawn tokens with the mean entropy. They are equal if the tokens were drawn
    from that distribution."""
    drawn = ~dump.forced_ends
    chosen = dump.labels[drawn & np.isfinite(dump.trainer[dump.labels]) & np.isfinite(dump.entropy[dump.labels])]
    surprisal, entropy = -dump.trainer[chosen], dump.entropy[chosen]
    if len(chosen) < MANY:
        means = dump.numbers(lambda one: one.mean_entropy)
        sums = np.bincount(dump.label_owner, -np.nan_to_num(dump.trainer[dump.labels]), len(dump.samples))
        means[dump.label_owner[~drawn]] = np.nan
        rows = np.flatnonzero(np.isfinite(means) & (dump.label_counts > 0))
        if dump.label_counts[rows].sum() < MANY or len(rows) < 16:
            return
        # One term per sample, for all of its labels. These are also martingale differences.
        surprisal, entropy = sums[rows], means[rows] * dump.label_counts[rows]
        owners = rows
    else:
        owners = dump.owner[chosen]
    difference = surprisal - entropy
    error = float(difference.std() / np.sqrt(len(difference)))
    mean = float(difference.mean())
    relative = mean / max(float(entropy.mean()), 1e-9)
    if abs(mean) > SIGMAS * error and abs(relative) > SURPRISE:
        how = "sharper" if mean < 0 else "flatter"
        text = (
            f"the drawn tokens' mean surprisal is {relative:+.0%} from the mean entropy ({abs(mean) / error:.0f} "
            f"standard errors): they were drawn from a {how} distribution than that of the log-probs"
        )
        yield Evidence(int(owners[difference.argmin() if mean < 0 else difference.argmax()]), text, len(set(owners)))
