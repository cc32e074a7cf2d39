"""Checks of tokens and masks: lengths, borders, end tokens, turns."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from truestep.tools.audit.finding import Evidence, sure
from truestep.tools.audit.samples import Dump, Sample, span

# if at most this share of samples has lists of wrong lengths, the tokens were probably encoded again from text
FEW = 0.5
STOPS = 0.1  # a token that ends this share of finished samples is an end token, or the end of a stop string
RUN = 8  # fewest consecutive labels without a log-prob that are reported


def lengths(dump: Dump) -> Iterator[Evidence]:
    """Find lists whose lengths do not fit the tokens. If only few samples have them, and the difference is small, the
    tokens were encoded again from text."""
    bad = [i for i, one in enumerate(dump.samples) if one.misfits]
    if not bad:
        return
    name, found, wanted = dump.samples[bad[0]].misfits[0]
    text = f"{name} has {found:,} values where {wanted:,} are expected"
    compared = sum(one.ids is not None for one in dump.samples)
    apart = [abs(one[1] - one[2]) / max(one[2], 1) for i in bad for one in dump.samples[i].misfits]
    again = all(
        one[0] in ("logprobs", "rollout_log_probs", "inference_logprobs")
        for i in bad
        for one in dump.samples[i].misfits
    )
    if again and len(bad) <= FEW * compared and float(np.median(apart)) < 0.25:
        text += f"; this is so in {len(bad):,} of {compared:,} samples, as if the text had been encoded again"
        yield Evidence(bad[0], text, len(bad), name="retokenised")
    else:
        yield Evidence(bad[0], text, len(bad))


def turns(dump: Dump) -> Iterator[Evidence]:
    """Compare each prompt of a conversation with the previous prompt and completion."""
    last: dict[str, tuple[int, Sample]] = {}
    found: dict[str, list[tuple[int, int | None, str]]] = {"retokenised": [], "template-rewrites": []}
    for index, one in enumerate(dump.samples):
        if one.conversation is None:
            continue
        before = last.get(one.conversation)
        last[one.conversation] = (index, one)
        if before is None:
            continue
        if one.ids is not None and before[1].ids is not None and one.mask is not None:
            first = int(one.mask.argmax())
            if (problem := _rewritten(before[1].ids, one.ids[:first])) is not None:
                name, position, text = problem
                found[name].append((index, position, text))
        elif one.lengths is not None and before[1].lengths is not None and one.lengths[0] < sum(before[1].lengths):
            text = f"the prompt of this turn has {one.lengths[0]:,} tokens, those before it {sum(before[1].lengths):,}"
            found["template-rewrites"].append((index, None, text))
    for name, places in found.items():
        if places:
            first_sample, at, text = places[0]
            yield Evidence(first_sample, text, len(places), at, name=name)


def _rewritten(past: np.ndarray, prompt: np.ndarray) -> tuple[str, int, str] | None:
    """Describe how a prompt differs from the tokens that it should begin with; None if it begins with them."""
    shared = min(len(past), len(prompt))
    differs = np.flatnonzero(past[:shared] != prompt[:shared])
    if not len(differs) and len(prompt) >= len(past):
        return None
    at = int(differs[0]) if len(differs) else shared
    # Look for the tokens after the difference in both: a few tokens may have changed, or a part of the past may be
    # missing.
    rest = past[at:]
    for lost in range(len(rest)):
        tail = rest[lost : lost + 8]
        for new in range(min(lost + 16, max(len(prompt) - at - len(tail) + 1, 0))):
            if len(tail) >= min(4, len(rest)) and np.array_equal(prompt[at + new : at + new + len(tail)], tail):
                if new and lost:
                    text = f"{lost} drawn tokens appear here as {new} other ones"
                    return "retokenised", at, text
                text = f"{lost} tokens of the turns before are gone" if lost else f"{new} tokens were inserted"
                return "template-rewrites", at, text
    return "template-rewrites", at, f"the last {len(rest)} tokens of the turns before are not in this prompt"


def mask_borders(dump: Dump) -> Iterator[Evidence]:
    """Compare the range of labels with the range of recorded log-probs, and with the prompt that a group's samples
    share."""
    recorded = np.isfinite(dump.logprobs) & (dump.logprobs != 0)
    first, last = dump.edges
    begins, ends = span(recorded, dump)
    both = np.flatnonzero((first >= 0) & (begins >= 0))
    if len(both) >= 4:
        moved = Counter(zip((begins - first)[both].tolist(), (ends - last)[both].tolist(), strict=True))
        (kind, count), names = moved.most_common(1)[0], {(1, 1): "mask-shifted", (-1, -1): "mask-shifted"}
        names |= {(-1, 0): "mask-shifted", (0, 1): "end-token-masked"}
        if kind in names and count >= 0.8 * len(both):
            index = int(both[0])
            text = (
                f"labels are tokens {first[index]} to {last[index]}, and log-probs were recorded for {begins[index]} "
                f"to {ends[index]}; this is so in {count:,} of {len(both):,} samples"
            )
            yield Evidence(index, text, count, int(first[index]), name=names[kind])
            return
    yield from _shared_prompts(dump, first)


def _shared_prompts(dump: Dump, first: np.ndarray) -> Iterator[Evidence]:
    """Find groups whose samples differ before their first label, although they have the same prompt."""
    places: list[tuple[int, int]] = []
    for members in members_of(dump.groups, dump.alone & (first > 0)):
        one = dump.samples[members[0]]
        for index in members[1:]:
            differ = first_difference(one.ids, dump.samples[index].ids)
            border = min(int(first[members[0]]), int(first[index]))
            if differ is not None and differ < border:
                places.append((int(index), differ - border))
                break
    if not places:
        return
    late = [index for index, by in places if by == -1]
    if len(late) == len(places) and len(late) >= 2:
        at = int(first[late[0]]) - 1
        text = f"samples of one group differ first at token {at}, and labels begin one later, in {len(late):,} groups"
        yield Evidence(late[0], text, len(late), at, name="mask-shifted")
    else:
        index, by = places[0]
        at = int(first[index]) + by
        yield Evidence(
            index, f"its prompt differs from that of its group at token {at}", len(places), at, name="groups-mixed"
        )


def first_difference(one: np.ndarray | None, other: np.ndarray | None) -> int | None:
    if one is None or other is None or one[0] < 0:
        return None
    shared = min(len(one), len(other))
    differs = np.flatnonzero(one[:shared] != other[:shared])
    return int(differs[0]) if len(differs) else None


def members_of(codes: np.ndarray, allowed: np.ndarray | None = None) -> list[np.ndarray]:
    """Return the indices of each group's samples, for groups with at least two."""
    chosen = np.flatnonzero(codes >= 0 if allowed is None else (codes >= 0) & allowed)
    order = chosen[np.argsort(codes[chosen], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1) if len(order) else []
    return [part for part in parts if len(part) > 1]


def not_drawn(dump: Dump) -> Iterator[Evidence]:
    """Find runs of labels without a log-prob, in samples where other labels have one."""
    if dump.coarse:
        return
    values = dump.logprobs[dump.labels]
    owner = dump.label_owner
    missing = ~np.isfinite(values) | (values == 0)
    has = np.bincount(owner[~missing], minlength=len(dump.samples)) > 0
    border = np.flatnonzero(np.diff(owner, prepend=-1) | np.diff(missing, prepend=not missing[:1].any()))
    sizes = np.diff(np.append(border, len(values)))
    long = border[(sizes >= RUN) & missing[border] & has[owner[border]]]
    if len(long):
        index, position = dump.place(int(dump.labels[long[0]]))
        size = int(sizes[border == long[0]][0])
        text = f"{size} labels in a row have no log-prob (none, or exactly 0), and others of the sample have one"
        yield Evidence(index, text, len(set(owner[long].tolist())), position)


def ends(dump: Dump) -> Iterator[Evidence]:
    """Check the last tokens of samples. They should be labels, and most finished samples should have the same ones."""
    _, last = dump.edges
    sizes = np.diff(dump.starts)
    usable = np.array([one.ids is not None and len(one.ids) > 0 and one.ids[0] >= 0 for one in dump.samples], np.bool_)
    usable &= (last >= 0) & (last >= sizes - 2)
    finals = np.full(len(dump.samples), -1)
    finals[usable] = dump.ids[dump.starts[1:][usable] - 1]
    counts = dump.label_counts
    longest = int(counts[usable].max()) if usable.any() else 0
    cut = np.array([one.truncated is True for one in dump.samples], np.bool_)
    unknown = np.array([one.truncated is None for one in dump.samples], np.bool_)
    done = np.flatnonzero(usable & ~cut & ~(unknown & (counts >= longest)))
    if len(done) < 8:
        return
    counted = Counter(finals[done].tolist()).most_common()
    common = dump.end_tokens or {
        token for place, (token, count) in enumerate(counted) if place < 2 or count >= max(4, STOPS * len(done))
    }
    whole = np.isin(finals[done], list(common))
    masked = done[whole & (last[done] == sizes[done] - 2)]
    if len(masked) >= 0.8 * len(done):
        index, token = int(masked[0]), int(finals[masked[0]])
        text = f"{len(masked):,} of {len(done):,} samples end with token {token}, which is no label"
        confidence = sure(bool(dump.end_tokens))
        yield Evidence(index, text, len(masked), int(sizes[index]) - 1, confidence, "end-token-masked")
        return
    known = done[~whole & ~unknown[done]]
    if whole.mean() < 0.6 and len(done) >= 16:
        index = int(done[~whole][0])
        text = f"{np.mean(~whole):.0%} of {len(done):,} finished samples end with another token than the common ones"
        known_end = bool(dump.end_tokens) or bool((~unknown[done]).all())
        yield Evidence(index, text, int((~whole).sum()), int(sizes[index]) - 1, sure(known_end))
    elif len(known) and (full := known[counts[known] >= longest]).size:
        index = int(full[0])
        text = f"{len(full):,} samples of the largest length, {longest:,} labels, lack an end token and are not marked"
        yield Evidence(index, text, len(full), int(sizes[index]) - 1, name="truncated-as-finished")
    elif len(known):
        index = int(known[0])
        text = f"{len(known):,} of {len(done):,} samples that are not truncated lack the end token of the others"
        yield Evidence(index, text, len(known), int(sizes[index]) - 1)


def begins_twice(dump: Dump) -> Iterator[Evidence]:
    """Find dumps whose sequences begin with the same token twice, and not three times, which would be padding."""
    known = [i for i, one in enumerate(dump.samples) if one.ids is not None and len(one.ids) > 2 and one.ids[0] >= 0]
    known = [i for i in known if dump.alone[i]]
    begins = np.array([dump.samples[i].ids[:3] for i in known]).reshape(-1, 3)  # type: ignore[index]
    if len(begins) < 8 or len(set(begins[:, 2].tolist())) < 4:
        return
    token = begins[0, 0]
    twice = (begins[:, 0] == token) & (begins[:, 1] == token) & (begins[:, 2] != token)
    if twice.mean() >= 0.95:
        text = f"{int(twice.sum()):,} of {len(begins):,} samples begin with token {token} twice"
        yield Evidence(known[int(twice.argmax())], text, int(twice.sum()), 1, "medium")


def vocabulary(dump: Dump) -> Iterator[Evidence]:
    if dump.vocabulary_size is None:
        return
    bad = np.flatnonzero((dump.ids >= dump.vocabulary_size) | (dump.ids < -1))
    if len(bad):
        index, position = dump.place(int(bad[0]))
        text = f"token {dump.ids[bad[0]]} is outside the model's vocabulary of {dump.vocabulary_size:,}"
        yield Evidence(index, text, len(set(dump.owner[bad].tolist())), position)


def routes_moved(dump: Dump) -> Iterator[Evidence]:
    """Compare the first token at which two samples of a prompt differ with the first token at which their routes
    differ."""
    offsets: list[tuple[int, int, int]] = []
    for members in members_of(dump.groups, np.array([one.routes is not None for one in dump.samples], np.bool_)):
        for index, other in pairwise(members):
            one, two = dump.samples[index], dump.samples[other]
            at = first_difference(one.ids, two.ids)
            if at is None or at < 2 or one.routes is None or two.routes is None:
                continue
            shared = min(len(one.routes), len(two.routes))
            differ = np.flatnonzero((one.routes[:shared] != two.routes[:shared]).any((1, 2)))
            if len(differ):
                offsets.append((int(differ[0]) - at, int(other), at))
    moved = Counter(by for by, _, _ in offsets)
    by, count = moved.most_common(1)[0] if moved else (0, 0)
    if by in (1, -1) and count >= 5 and count >= 3 * moved[0] and count >= 0.6 * len(offsets):
        _, index, at = next(one for one in offsets if one[0] == by)
        side = "late" if by > 0 else "early"
        text = f"tokens differ first at {at}, experts at {at + by}, in {count:,} of {len(offsets):,} pairs: one {side}"
        yield Evidence(index, text, count, at)


def routes_padded(dump: Dump) -> Iterator[Evidence]:
    """Find rows of routes with the same expert twice, which no router chooses."""
    places = []
    for index, one in enumerate(dump.samples):
        if one.routes is not None and one.ids is not None and one.routes.shape[-1] > 1:
            ordered = np.sort(one.routes[: len(one.ids) - 1], axis=-1)
            twice = np.flatnonzero((ordered[..., 1:] == ordered[..., :-1]).any((-1, -2)))
            if len(twice):
                places.append((index, int(twice[0])))
    if places:
        index, position = places[0]
        yield Evidence(index, "a row of routes names an expert twice", len(places), position)
