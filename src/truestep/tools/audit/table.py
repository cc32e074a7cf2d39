"""The table of findings. docs/audit.md contains it too, and a test compares the two."""

from collections.abc import Iterable, Iterator

from truestep.tools.audit.checks import groups, logprobs, tokens, weights
from truestep.tools.audit.finding import Check, Evidence, Finding
from truestep.tools.audit.samples import Dump

TABLE: tuple[Check, ...] = (
    Check(
        "lengths", "Lists do not fit their tokens",
        "the length of each list of a sample with that of its tokens", "any difference",
        "write one value for each token (or for each token of the completion) before samples are cut or padded",
        tokens.lengths,
    ),
    Check(
        "retokenised", "Tokens were made from text again",
        "numbers of log-probs with numbers of tokens; a prompt's tokens with those of the turns before it",
        "other numbers of log-probs, by less than a quarter, in up to half of the samples; other tokens in a prompt",
        "keep the ids that the sampler drew, and put them into the next turn's prompt as they are",
        None, ("template-rewrites", "lengths", "logprob-weights"),
    ),
    Check(
        "template-rewrites", "A turn's prompt does not begin with the turns before it",
        "a turn's prompt with the prompt and completion before it", "any token that is gone or put in between",
        "train on each turn as a sequence of its own, or use a template that keeps the past (its reasoning too)",
        tokens.turns,
    ),
    Check(
        "vocabulary", "Token ids that the model does not have", "token ids with the model's vocabulary",
        "any beyond it",
        "audit with the model that sampled; look for ids of padding among the tokens", tokens.vocabulary,
    ),
    Check(
        "mask-shifted", "The mask of labels is off by a token",
        "the first and last label with the first and last log-prob; tokens before the labels within a group",
        "off by one in 80% of the samples; or all groups that differ in their prompts do so in its last token",
        "a log-prob, a label and a token with one index belong together: shift all three, or none",
        tokens.mask_borders,
        ("end-token-masked", "end-token-missing", "end-token-forced", "labels-not-drawn", "groups-mixed"),
    ),
    Check(
        "groups-mixed", "Samples of a group have different prompts", "prompts' tokens within a group", "any difference",
        "give each prompt a group id of its own; advantages compare answers to one prompt", None,
        ("advantages", "groups-incomplete", "advantages-other-group"),
    ),
    Check(
        "begins-twice", "Sequences begin with the same token twice", "the first three tokens of all samples",
        "the first two equal and the third another, in 95% of at least 8 samples",
        "a template that has the begin token is tokenised with add_special_tokens=False", tokens.begins_twice,
    ),
    Check(
        "labels-not-drawn", "Labels that the policy did not draw",
        "labels with log-probs", "8 labels in a row without a log-prob (or exactly 0), beside others that have one",
        "mask what tools, users and templates wrote", tokens.not_drawn,
    ),
    Check(
        "end-token-masked", "The end token is no label", "the last token of finished samples with the mask",
        "in 80% of at least 8 finished samples",
        "train on the end token: without it the policy never learns to stop", None,
    ),
    Check(
        "truncated-as-finished", "Truncated samples are marked as finished",
        "the last tokens of the longest samples with the end tokens of the others", "any that is not marked",
        "mark them as truncated, and mask or penalise them", None,
    ),
    Check(
        "end-token-missing", "Finished samples lack their end token",
        "the last tokens of finished samples with the two most frequent ones (or the model's end tokens)",
        "40% of at least 16 samples end otherwise; or any, where most do not and the dump says which are truncated",
        "keep the end token in the completion, with its log-prob", tokens.ends,
    ),
    Check(
        "end-token-forced", "End tokens that were not drawn",
        "the last labels' log-probs with the trainer's (or the model's); without these, with those of shorter samples",
        "exactly 0 where the policy's is below -0.5, together less than one in a million, and at few other labels "
        "(high: all of one largest length, of at least 8 labels, and shorter ones drew the token; medium, without the "
        "policy's: in 16 samples of the largest length, of over 8 labels, and in none of 16 shorter ones, most of "
        "which are below -1e-3, if log-probs near 0 are not rounded)",
        "mask end tokens that were not drawn; mark samples that a limit cut as truncated",
        logprobs.forced_ends,
    ),
    Check(
        "logprob-invalid", "Log-probs that no distribution gives", "log-probs at labels with 0",
        "any above 1e-3, infinite, or missing beside others; all whole numbers, of 200",
        "look at how they are gathered: logits, padding, dtype",
        logprobs.invalid,
    ),
    Check(
        "logprob-constant", "Log-probs that are all the same", "the log-probs of a sample with each other",
        "all equal, of at least 16 labels",
        "ask the sampler for log-probs; greedy sampling (temperature 0) has none to train with", logprobs.constant,
        ("logprob-weights", "logprob-truncated", "logprob-temperature", "duplicated-completions", "labels-not-drawn",
         "end-token-forced"),
    ),
    Check(
        "logprob-shifted", "Log-probs stand beside the next label",
        "the gap to the trainer's log-probs (or to the model's) with that of a shift by one label",
        "the shift leaves less than a fifth (with --model: less than 20%) of a gap above 0.02",
        "write each log-prob beside the token that it is the log-prob of", None,
        ("logprob-weights", "logprob-temperature", "sampling-mismatch", "end-token-forced"),
    ),
    Check(
        "logprob-truncated", "Log-probs of a truncated distribution (top-p or top-k)",
        "exact zeros with log-probs near 0; the signs of the gap to the trainer's; the model's after truncation",
        "50 zeros and at most a fiftieth of that between -1e-3 and -1e-6 (medium: at ends alone); or over 5% of gaps "
        "below -0.02 and under a hundredth of that above 0.02; or the truncation explains over half of the gap to the "
        "model",
        "sample with top-p 1 and top-k off, or report the log-probs of the whole distribution and correct for it",
        logprobs.truncated, ("logprob-weights", "logprob-temperature", "sampling-mismatch"),
    ),
    Check(
        "logprob-temperature", "Log-probs of another temperature",
        "the gap, and the sampler's log-prob, with a parabola in the trainer's; the model's at other temperatures",
        "as for logprob-weights, and the parabola explains over 60% of both; with --model: another temperature "
        "explains over half",
        "sample, report log-probs and train at one temperature (vLLM: --logprobs-mode processed_logprobs)",
        None, ("logprob-weights", "sampling-mismatch"),
    ),
    Check(
        "logprob-weights", "Log-probs of other weights",
        "the trainer's log-probs with the sampler's: mean ratio and divergence, and both over steps; the model's",
        "a mean ratio further from 1 than 0.05 and 6 standard errors, or a divergence above 0.02 (high: 0.1); a gap "
        "that grows (Mann and Kendall, 1 in 1,000) fivefold; with --model: a gap beyond rounding that nothing explains",
        "check that new weights (or the adapter) reach the sampler, whole, and that its caches are reset",
        weights.others, ("sampling-mismatch",),
    ),
    Check(
        "numerics", "Sampler and trainer compute differently", "the model's log-probs with the sampler's",
        "a dtype, a rounding of the head or rope settings explain over half of a gap beyond rounding",
        "run both in one type, with one config.json", None, ("logprob-weights",),
    ),
    Check(
        "sampling-mismatch", "Tokens were not drawn from the distribution of their log-probs",
        "the mean surprisal of drawn tokens with the mean entropy", "10% apart and 6 standard errors",
        "the temperature was never applied (or only to one of the two), or tokens were drawn with top-p or top-k",
        logprobs.surprise,
    ),
    Check(
        "temperature-unused", "All completions of a prompt are the same",
        "equal completions of a prompt with what their log-probs predict",
        "in 90% of at least 4 groups, and, by the log-probs, as for duplicated-completions",
        "the sampler draws greedily, or with one seed: a temperature was never applied", None,
        ("duplicated-completions", "duplicated-groups", "sampling-mismatch"),
    ),
    Check(
        "duplicated-groups", "Groups are copies of others", "all completions of each group with other groups'",
        "all equal, and less than one in a million by their log-probs (texts: three different ones, of 128 characters; "
        "medium: each completion twice for 80% of at least 4 prompts, with one of 64 characters)",
        "a batch was written, or trained on, twice", groups.copies_of_groups, ("duplicated-completions",),
    ),
    Check(
        "duplicated-completions", "Completions are copies of others in their group",
        "equal completions of a prompt with what their log-probs predict",
        "4 times as many as predicted, and less than one in a million (Poisson); texts: of 64 characters, in over half "
        "of the groups",
        "give each request a seed of its own; do not repeat samples to fill a group", groups.copies,
    ),
    Check(
        "groups-incomplete", "Groups lack members", "sizes of groups with the usual one",
        "5% of the groups, at least 3",
        "find what dropped them: where slow or failed ones are left out, short answers win", groups.incomplete,
    ),
    Check(
        "reward-invalid", "Rewards or advantages that are no numbers", "rewards and advantages with NaN and infinity",
        "any", "give a number, or leave the sample out: one NaN makes all advantages of its group NaN",
        groups.no_numbers, ("advantages",),
    ),
    Check(
        "rewards-mispaired", "Rewards or advantages are those of other samples",
        "advantages with the rules applied to rewards some places away; rewards with whether the completion has the "
        "answer, here, away, and as 2, 4 or 8 ranks in turns would give it; rewards of equal completions",
        "a rule fits 90% of advantages away and not here; a correlation above 0.8, 0.3 above that here, at 4.5 "
        "standard errors; 3 (and 30%) equal completions with different rewards",
        "join rewards to samples by an id, not by their order of arrival", groups.mispaired, ("advantages",),
    ),
    Check(
        "advantages-other-group", "Advantages were made over other groups",
        "advantages with the rules applied to blocks of samples in file order",
        "a rule fits 90% there and not in groups",
        "make groups by prompt, before samples are sorted, filtered or dealt to ranks", None, ("advantages",),
    ),
    Check(
        "advantages", "Advantages do not follow from rewards",
        "each advantage with what the rule that fits most makes of its group's rewards; the order of both",
        "a rule fits half, and this one is off by over 1% of it; where none does: over 10% of a group's pairs are the "
        "wrong way round (high: 25%)",
        "compare with the rule that is configured; look at signs, at groups and at who was filtered before",
        groups.advantages,
    ),
    Check(
        "reward-parts", "Rewards are not the sum of their parts", "rewards with the sums of their parts",
        "off by over 1e-4 in under 40% of the samples", "look at weights, clipping and rewards that failed",
        groups.reward_parts,
    ),
    Check(
        "weights-never-changed", "The weights never change",
        "log-probs of the same token after the same prompt at different steps, bit by bit; versions over steps",
        "all equal, of at least 4, 2 steps apart (the sampler's, without a version: 8); one version over 4 steps",
        "an adapter or weights that were never delivered, or a learning rate of 0", weights.never_changed,
        ("staleness-grows",),
    ),
    Check(
        "staleness-grows", "The sampler falls behind", "staleness over steps",
        "Mann and Kendall, 1 in 1,000, and the last third 1.5 times the middle one",
        "bound how far the sampler may be ahead; check that each new version arrives", weights.staleness,
    ),
    Check(
        "routes-shifted", "Routes of experts are shifted by a token",
        "where two samples of a prompt differ first in tokens, and where in experts",
        "one apart in 60% of at least 5 pairs, and three times as often as not apart",
        "row t of the routes belongs to the token at position t, as it was fed", tokens.routes_moved,
    ),
    Check(
        "routes-padded", "Rows of routes that no router chooses", "the experts of a token with each other",
        "one twice, before the last token", "leave out the rows of padding instead of replaying them",
        tokens.routes_padded,
    ),
)  # fmt: skip
BY_NAME = {check.name: check for check in TABLE}
_ORDER = {check.name: number for number, check in enumerate(TABLE)}


def find(dump: Dump, more: Iterable[Evidence] = ()) -> list[Finding]:
    """Run all checks. Return the findings that are not consequences of other findings, those of high confidence first.
    `more`: the evidence from a model."""
    found: dict[str, Evidence] = {}
    for evidence in (*_all(dump), *more):
        name = evidence.name or ""
        if name not in found or (found[name].confidence, evidence.confidence) == ("medium", "high"):
            found[name] = evidence
    explained = {name for each in found for name in BY_NAME[each].explains}
    chosen = [(name, one) for name, one in found.items() if name not in explained]
    chosen.sort(key=lambda pair: (pair[1].confidence != "high", _ORDER[pair[0]]))
    return [_finding(name, one, dump) for name, one in chosen]


def _all(dump: Dump) -> Iterator[Evidence]:
    for check in TABLE:
        if check.run is not None:
            for one in check.run(dump):
                yield one if one.name else Evidence(**(vars(one) | {"name": check.name}))


def _finding(name: str, one: Evidence, dump: Dump) -> Finding:
    check, sample = BY_NAME[name], dump.samples[one.sample]
    known = sample.ids is not None and one.position is not None and one.position < len(sample.ids)
    token = int(sample.ids[one.position]) if known else None  # type: ignore[index]
    return Finding(
        name, check.title, one.confidence, sample.file, sample.line, sample.id, one.position, token, one.text,
        check.advice, one.count,
    )  # fmt: skip
