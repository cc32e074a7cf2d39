"""Writes out a configuration's objective: every term, denominator, clip, mask and correction that is on.

The symbols are those of docs/contract.md, section 6. Imports no torch.
"""

from collections.abc import Iterator
from typing import Any

from truestep.config import presets
from truestep.config.losses import Line, short
from truestep.config.schema import Config

_DENOMINATORS = {
    "labels": ("Σ over all labels of the step, / N", "N: the labels of the step"),
    "documents": ("Σ over all labels of the step, / D", "D: the documents of the step"),
    "document_means": (
        "1/D · Σ over documents of 1/N_d · Σ over the document's labels",
        "D: the documents of the step; N_d: the labels of document d",
    ),
    "constant": ("Σ over all labels of the step, / (D · {max_labels})", "D: the documents of the step"),
}
_LEVELS = {
    "label": ("c = {ratio}", "of the label"),
    "document": ("c = exp(Σ of log {ratio} over the document's labels)", "of the document"),
    "document_mean": ("c = exp(mean of log {ratio} over the document's labels)", "of the document"),
}
_ESTIMATORS = {
    "k1": "r",
    "k2": "r² / 2",
    "k3": "exp(-r) - 1 + r",
    "unbiased": "exp(logπ - logπ_old) · (exp(-r) - 1 + r)",
}
_COVARIANCE = "covariance: (logπ_sampler - its mean) · (A - its mean), with means over the step's labels"
_BASELINES = {
    "group_mean": "reward - mean reward of the group",
    "leave_one_out": "reward - mean reward of the other members of the group",
    "length_weighted": "reward - Σ N_d · reward / Σ N_d over the group",
}


def explain(config: Config) -> str:
    """Write the objective of a configuration as formulas and words."""
    parts = {
        "presets": list(_presets(config)),
        "minimised in each step": list(_terms(config)),
        "each label's loss": list(config.loss.formulas()),
        "its constant weight w": list(_weights(config)),
        "log-probabilities": list(_logprobs(config)),
        "advantages": list(_advantages(config)),
        "the documents of a step": list(_documents(config)),
        "the update": list(_update(config)),
    }
    text = []
    for title, lines in parts.items():
        if lines:
            text += [title, *(f"  {left}{'  -- ' if left and right else ''}{right}" for left, right in lines), ""]
    return "\n".join(text).rstrip()


def _presets(config: Config) -> Iterator[Line]:
    options = config.model_dump()
    for name in presets.names_of(config.preset):
        yield name, presets.PRESETS[name].meaning
        for option, (value, of_preset) in presets.overridden(options, name).items():
            yield "", f"  but {option}: {value}, in place of {of_preset}"


def _terms(config: Config) -> Iterator[Line]:
    loss = config.loss
    summed, meaning = _DENOMINATORS[loss.normalize_by]
    kl = _kl(config)
    terms = ["w · l" if _corrected(config) else "l"]
    if kl is not None and kl["in"] == "loss":
        terms.append(f"+ {short(kl['weight'])} · KL")
    if kl_cov := getattr(loss, "kl_cov", None):
        terms.append(f"+ {short(kl_cov.weight)} · K")
    if loss.entropy_target is not None:
        terms.append("- w_H · H")
    elif loss.entropy_bonus:
        terms.append(f"- {short(loss.entropy_bonus)} · H")
    if loss.z_loss:
        terms.append(f"+ {short(loss.z_loss)} · logsumexp(z)²")
    inner = " ".join(terms)
    yield f"{summed.format(max_labels=loss.max_labels)}, of {inner}", meaning
    if kl_cov:
        yield (
            f"K = ρ - log ρ - 1 at the {short(kl_cov.share)} N labels of the highest covariance, else 0",
            f"ρ = exp(logπ - logπ_old); {_COVARIANCE}",
        )
    if loss.entropy_bonus or loss.entropy_target is not None:
        yield "H", "the entropy of the policy at the label"
        if loss.entropy_normalize_by is not None:
            summed, meaning = _DENOMINATORS[loss.entropy_normalize_by]
            yield f"the term of H alone: {summed}", meaning
    yield from _entropy_target(config)
    if loss.z_loss:
        yield "z", "the logits at the label"
    if kl is not None and kl["in"] == "loss":
        yield f"KL = {_ESTIMATORS[kl['estimator'] or 'k3']}", f"r = logπ - logπ_ref; {_reference(kl)}"
    if loss.gradient_divisor != "none":
        divisor = "D" if loss.gradient_divisor == "deepspeed" else short(loss.gradient_divisor)
        yield "", f"the gradient, but not the reported loss, is also divided by {divisor}"


def _entropy_target(config: Config) -> Iterator[Line]:
    target = config.loss.entropy_target
    if target is not None:
        yield (
            f"w_H starts at {short(config.loss.entropy_bonus)}; after each step it grows by {short(target.rate)} · "
            f"({short(target.entropy)} - the step's entropy)",
            f"clamped to between 0 and {short(target.largest_weight)}",
        )


def _kl(config: Config) -> dict[str, Any] | None:
    options = getattr(config.loss, "kl_reference", None)
    return None if options is None else options.model_dump()


def _reference(options: dict[str, Any]) -> str:
    path = options["path"]
    of = {None: "the run's first weights", "records": "the records' reference_logprobs"}.get(path, str(path))
    return f"logπ_ref: {'' if path == 'records' else 'of '}{of}"


def _corrected(config: Config) -> bool:
    return any(getattr(config.loss, name, None) is not None for name in ("correction", "off_policy_mask", "clip_cov"))


def _recomputed(config: Config) -> bool:
    return getattr(config.loss, "old_logprobs", "sampler") == "recompute"


def _weights(config: Config) -> Iterator[Line]:
    if not _corrected(config):
        return
    loss: Any = config.loss
    correction, threshold = loss.correction, loss.off_policy_mask
    if correction is not None:
        inside = f"{short(correction.low)} ≤ c ≤ {short(correction.high)}"
        weight = {
            "truncate": f"w = min(c, {short(correction.high)})"
            + (f", at least {short(correction.low)}" if correction.low else ""),
            "mask": f"w = c where {inside}, else 0",
            "reject": f"w = 1 where {inside}, else 0",
        }[correction.type]
        yield weight, ""
        formula, of = _LEVELS[correction.level]
        yield (
            formula.format(ratio="exp(logπ_old - logπ_sampler)" if _recomputed(config) else "exp(logπ - logπ_old)"),
            of,
        )
    if threshold is not None:
        yield f"w = 0 where A < 0 and the document's mean of logπ_sampler - logπ is above {short(threshold)}", ""
    if (clip := loss.clip_cov) is not None:
        yield (
            f"w = 0 at {short(clip.share)} N labels, at random among those with {short(clip.low)} < covariance < "
            f"{short(clip.high)}",
            _COVARIANCE,
        )
    if correction is None:
        yield "w = 1 elsewhere", ""
    yield "", "a label of weight 0 still counts in the denominator"


def _logprobs(config: Config) -> Iterator[Line]:
    yield "logπ", "the policy's log-prob of the label, at its sampling temperature"
    if config.loss.supervised:
        return
    if _recomputed(config):
        yield "logπ_old", "the trainer's own, before the first update on the documents"
        yield "logπ_sampler", "the record's"
    else:
        yield "logπ_old", "the sampler's, from the record"
    if config.schedule.updates_per_batch > 1:
        yield "", f"the same documents are trained on {config.schedule.updates_per_batch} times, with the same logπ_old"


def _advantages(config: Config) -> Iterator[Line]:
    if config.loss.supervised:
        return
    data, kl = config.data, _kl(config)
    baseline = "group_mean" if data.advantages in ("group_normalized", "batch_normalized") else data.advantages
    scale = {"group_normalized": "group", "batch_normalized": "step"}.get(data.advantages, data.advantage_scale)
    if baseline == "none":
        formula = "A of the record"
    else:
        formula = _BASELINES.get(baseline, f"{baseline} of the group")
        spread = {"group": "the group's rewards", "step": "these differences over the whole step"}.get(scale or "none")
        if spread is not None:
            formula = f"({formula}) / (sample standard deviation of {spread} + {short(data.advantage_std_floor)})"
    own = "" if baseline == "none" else "a record's own advantage takes precedence"
    if kl is not None and kl["in"] == "reward":
        yield f"A = {formula} - {short(kl['weight'])} · (logπ_old - logπ_ref),", _reference(kl)
        if own:
            yield "", own
    else:
        yield f"A = {formula}", own
    if data.overlong_penalty is not None:
        penalty = data.overlong_penalty.model_dump()
        yield (
            "",
            (
                f"reward: after subtracting {short(penalty['weight'])} · (N_d - {penalty['from']}) / "
                f"({penalty['to']} - {penalty['from']}), clamped to between 0 and {short(penalty['weight'])}"
            ),
        )


def _documents(config: Config) -> Iterator[Line]:
    data, schedule = config.data, config.schedule
    if schedule.docs_per_step:
        rest = ", and the rest of the micro-batch that crosses this number" if schedule.overshoot == "keep" else ""
        yield "", f"{schedule.docs_per_step} documents in each step{rest}"
    else:
        number = schedule.depth_first_micro_batches * schedule.breadth_first_micro_batches
        yield "", f"{number} micro-batches of up to {data.tokens_per_microbatch} tokens on each rank"
    if data.group_size is not None and not config.loss.supervised:
        yield "", f"groups of {data.group_size} rollouts of one prompt"
    if data.zero_advantage != "keep":
        yield (
            "",
            {
                "skip": "documents whose advantages are all 0 count, but have no backward pass",
                "replace": f"groups whose advantages are all 0 are sampled anew, up to {data.replace_limit} a step",
            }[data.zero_advantage],
        )
    if data.truncated != "keep":
        yield (
            "",
            {
                "mask": "truncated documents have no labels, but count as documents",
                "drop": "truncated documents are left out",
            }[data.truncated],
        )


def _update(config: Config) -> Iterator[Line]:
    clip = config.optimizer.gradient_clip
    yield (
        "",
        "the gradient's norm is not clipped" if clip is None else f"the gradient's norm is clipped at {short(clip)}",
    )
