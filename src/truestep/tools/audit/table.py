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
        "the number of log-probs with the number of tokens; a prompt's tokens with those of the earlier turns",
        "the numbers differ by less than a quarter, in up to half of the samples; or a prompt has other tokens for "
        "an earlier turn",
        "keep the ids that the sampler drew, and put them into the next turn's prompt as they are",
        None, ("template-rewrites", "lengths", "logprob-weights"),
    ),
    Check(
        "template-rewrites", "A turn's prompt does not begin with the turns before it",
        "a turn's prompt with the prompt and completion of the turn before it",
        "any token that is missing or inserted",
        "train on each turn as a sequence of its own, or use a template that keeps the past (its reasoning too)",
        tokens.turns,
    ),
    Check(
        "vocabulary", "Token ids that the model does not have",
        "token ids with the model's vocabulary",
        "any id outside it",
        "audit with the model that sampled; look for ids of padding among the tokens",
        tokens.vocabulary,
    ),
    Check(
        "mask-shifted", "The mask of labels is off by a token",
        "the first and last label with the first and last log-prob; the tokens before the labels within a group",
        "off by one in 80% of the samples; or at least two groups have different prompts, all of them only in the "
        "last token",
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
        "begins-twice", "Sequences begin with the same token twice",
        "the first three tokens of all samples",
        "the first two are equal and the third is another, in 95% of at least 8 samples",
        "a template that has the begin token is tokenised with add_special_tokens=False",
        tokens.begins_twice,
    ),
    Check(
        "labels-not-drawn", "Labels that the policy did not draw",
        "which labels have a log-prob",
        "8 labels in a row without one (or with exactly 0), in a sample where others have one",
        "mask what tools, users and templates wrote",
        tokens.not_drawn,
    ),
    Check(
        "end-token-masked", "The end token is no label",
        "the last token of finished samples with the mask",
        "it is not in the mask, in 80% of at least 8 finished samples",
        "train on the end token: without it the policy never learns to stop",
        None,
    ),
    Check(
        "truncated-as-finished", "Truncated samples are marked as finished",
        "the last tokens of the longest samples with the end tokens of the others",
        "any sample that lacks an end token and is not marked as truncated",
        "mark them as truncated, and mask or penalise them",
        None,
    ),
    Check(
        "end-token-missing", "Finished samples lack their end token",
        "the last tokens of finished samples with the two most frequent ones (or the model's end tokens)",
        "40% of at least 16 samples end with other tokens; or any sample does, if most do not and the dump says "
        "which are truncated",
        "keep the end token in the completion, with its log-prob",
        tokens.ends,
    ),
    Check(
        "end-token-forced", "End tokens that were not drawn",
        "the last labels' log-probs with the trainer's (or the model's); without these, with those of shorter "
        "samples",
        "exactly 0 where the policy's is below -0.5, less likely than one in a million by the policy, and at few "
        "other labels (high: all of these samples have one largest length, of at least 8 labels, and shorter ones "
        "drew the token; medium, without the policy's log-probs: in 16 samples of the largest length, of over 8 "
        "labels, and in none of 16 shorter ones, most of which are below -1e-3, if log-probs near 0 are not "
        "rounded)",
        "mask end tokens that were not drawn; mark samples that a limit cut as truncated",
        logprobs.forced_ends,
    ),
    Check(
        "logprob-invalid", "Log-probs that no distribution gives",
        "log-probs at labels",
        "any above 1e-3, infinite, or missing in a sample that has others; or 200 that are all whole numbers",
        "look at how they are gathered: logits, padding, dtype",
        logprobs.invalid,
    ),
    Check(
        "logprob-constant", "Log-probs that are all the same",
        "the log-probs within a sample",
        "all of at least 16 labels are equal",
        "ask the sampler for log-probs; greedy sampling (temperature 0) has none to train with",
        logprobs.constant,
        ("logprob-weights", "logprob-truncated", "logprob-temperature", "duplicated-completions", "labels-not-drawn",
         "end-token-forced"),
    ),
    Check(
        "logprob-shifted", "Log-probs stand beside the next label",
        "the gap to the trainer's log-probs (or to the model's), as it is and after a shift by one label",
        "the shift leaves less than a fifth of a gap above 0.02",
        "write each log-prob beside the token that it is the log-prob of",
        None, ("logprob-weights", "logprob-temperature", "sampling-mismatch", "end-token-forced"),
    ),
    Check(
        "logprob-truncated", "Log-probs of a truncated distribution (top-p or top-k)",
        "how many log-probs are exactly 0 and how many near 0; how often the trainer's are below and above the "
        "sampler's; the model's after truncation",
        "50 zeros, and at most a fiftieth as many between -1e-3 and -1e-6 (medium: only at the ends of samples); or "
        "over 5% of gaps below -0.02, and under a hundredth as many above 0.02; or the truncation explains over "
        "half of the gap to the model",
        "sample with top-p 1 and top-k off, or report the log-probs of the whole distribution and correct for it",
        logprobs.truncated, ("logprob-weights", "logprob-temperature", "sampling-mismatch"),
    ),
    Check(
        "logprob-temperature", "Log-probs of another temperature",
        "how much of the gap, and of the sampler's log-probs, a parabola in the trainer's explains; the model's at "
        "other temperatures",
        "as for logprob-weights, and the parabola explains over 60% of the variance of both; with --model: another "
        "temperature explains over half of the gap",
        "sample, report log-probs and train at one temperature (vLLM: --logprobs-mode processed_logprobs)",
        None, ("logprob-weights", "sampling-mismatch"),
    ),
    Check(
        "logprob-weights", "Log-probs of other weights",
        "the trainer's log-probs with the sampler's: mean ratio, divergence, and the gap over steps; the model's "
        "log-probs",
        "a mean ratio that is off 1 by more than 0.05 and 6 standard errors; or a divergence above 0.02 (high: "
        "0.1); or a gap that grows fivefold, with a trend that chance makes in 1 of 1,000 runs (Mann-Kendall); with "
        "--model: a gap beyond rounding that nothing else explains",
        "check that new weights (or the adapter) reach the sampler, whole, and that its caches are reset",
        weights.others, ("sampling-mismatch",),
    ),
    Check(
        "numerics", "Sampler and trainer compute differently",
        "the model's log-probs with the sampler's",
        "another dtype, another rounding in the head or other rope settings explain over half of a gap beyond "
        "rounding",
        "run both in one type, with one config.json",
        None, ("logprob-weights",),
    ),
    Check(
        "sampling-mismatch", "Tokens were not drawn from the distribution of their log-probs",
        "the mean surprisal of drawn tokens with the mean entropy",
        "they differ by 10% and by 6 standard errors",
        "the temperature was never applied (or only to one of the two), or tokens were drawn with top-p or top-k",
        logprobs.surprise,
    ),
    Check(
        "temperature-unused", "All completions of a prompt are the same",
        "the number of equal completions of a prompt with the number that their log-probs predict",
        "in 90% of the groups, at least 4, all are equal, and their log-probs make this as unlikely as for "
        "duplicated-completions",
        "the sampler draws greedily, or with one seed: a temperature was never applied",
        None, ("duplicated-completions", "duplicated-groups", "sampling-mismatch"),
    ),
    Check(
        "duplicated-groups", "Groups are copies of others",
        "all completions of a group with those of earlier groups",
        "all are equal, which is less likely than one in a million by their log-probs (texts: three different ones, "
        "of 128 characters together; medium: for 80% of the prompts, at least 4, each completion is there twice, "
        "one of them with 64 characters)",
        "a batch was written, or trained on, twice",
        groups.copies_of_groups, ("duplicated-completions",),
    ),
    Check(
        "duplicated-completions", "Completions are copies of others in their group",
        "the number of equal completions of a prompt with the number that their log-probs predict",
        "4 times as many as predicted, which is less likely than one in a million (Poisson); texts: copies of 64 "
        "characters, in over half of the groups",
        "give each request a seed of its own; do not repeat samples to fill a group",
        groups.copies,
    ),
    Check(
        "groups-incomplete", "Groups lack members",
        "the sizes of groups with the most frequent size",
        "5% of the groups are smaller, and at least 3 groups",
        "find what dropped them: if slow or failed samples are left out, short answers win",
        groups.incomplete,
    ),
    Check(
        "reward-invalid", "Rewards or advantages that are no numbers",
        "rewards and advantages",
        "any that is NaN or infinite",
        "give a number, or leave the sample out: one NaN makes all advantages of its group NaN",
        groups.no_numbers, ("advantages",),
    ),
    Check(
        "rewards-mispaired", "Rewards or advantages are those of other samples",
        "advantages with what known rules compute from rewards some places away; rewards with whether the "
        "completion has the answer: the same sample's, one some places away, or the one that belongs to it if 2, 4 "
        "or 8 ranks gave rewards in turns; rewards of equal completions",
        "a rule explains 90% of the advantages from rewards some places away, and not from their own; or a "
        "correlation above 0.8 with completions elsewhere, at 4.5 standard errors, and 0.3 above that with the "
        "samples' own; or at least 3 equal completions, and 30% of them, have different rewards",
        "join rewards to samples by an id, not by their order of arrival",
        groups.mispaired, ("advantages",),
    ),
    Check(
        "advantages-other-group", "Advantages were made over other groups",
        "advantages with what known rules compute from blocks of samples in file order",
        "a rule explains 90% from blocks, and not from groups",
        "make groups by prompt, before samples are sorted, filtered or dealt to ranks",
        None, ("advantages",),
    ),
    Check(
        "advantages", "Advantages do not follow from rewards",
        "each advantage with the value of the rule that explains most of them; the order of advantages with that of "
        "rewards",
        "a rule explains half, and this advantage differs from it by over 1%; if no rule does: in over 10% of the "
        "pairs within groups, the smaller reward has the larger advantage (high: 25%)",
        "compare with the rule that is configured; look at signs, at groups and at who was filtered before",
        groups.advantages,
    ),
    Check(
        "reward-parts", "Rewards are not the sum of their parts",
        "rewards with the sums of their parts",
        "they differ by over 1e-4, in under 40% of the samples",
        "look at weights, clipping and rewards that failed",
        groups.reward_parts,
    ),
    Check(
        "weights-never-changed", "The weights never change",
        "log-probs of the same token after the same prompt at different steps, bit by bit; versions over steps",
        "all of at least 4 pairs are equal, over at least 2 steps (8 for the sampler's log-probs without versions); "
        "or one version in at least 4 steps",
        "an adapter or weights that were never delivered, or a learning rate of 0",
        weights.never_changed, ("staleness-grows",),
    ),
    Check(
        "staleness-grows", "The sampler falls behind",
        "staleness over steps",
        "a trend that chance makes in 1 of 1,000 runs (Mann-Kendall), and the last third of the steps has 1.5 times "
        "the staleness of the middle third",
        "bound how far the sampler may be ahead; check that each new version arrives",
        weights.staleness,
    ),
    Check(
        "routes-shifted", "Routes of experts are shifted by a token",
        "the first token at which two samples of a prompt differ with the first token at which their experts do",
        "one apart in 60% of at least 5 pairs, and three times as often as at the same token",
        "row t of the routes belongs to the token at position t, as it was fed",
        tokens.routes_moved,
    ),
    Check(
        "routes-padded", "Rows of routes that no router chooses",
        "the experts of each token",
        "an expert that is named twice, before the last token",
        "leave out the rows of padding instead of replaying them",
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
