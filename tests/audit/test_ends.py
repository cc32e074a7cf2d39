"""End tokens that were not drawn: what forced them is told apart, as far as a dump shows it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from truestep.tools.audit.checks.logprobs import surprise, truncated
from truestep.tools.audit.finding import Finding
from truestep.tools.audit.samples import Dump, Sample
from truestep.tools.audit.table import find

END, NEWLINE, PROMPT = 1, 2, 5


def sample_of(number: int, values: list[float], forced: dict[int, float], end_drawn: bool = True) -> Sample:
    """A sample with these log-probs of drawn labels, and behind them tokens that were not drawn, each with the log-prob
    that the trainer gives it."""
    prompt = np.random.default_rng((2, number // 4)).integers(10, 60, PROMPT)
    ids = [*prompt.tolist(), *np.random.default_rng((3, number)).integers(10, 60, len(values)).tolist()]
    if end_drawn:
        ids[-1] = END
    ids, sampler = [*ids, *forced], [*values, *(0.0 for _ in forced)]
    return Sample(
        "dump.jsonl",
        number + 1,
        str(number),
        ids=np.array(ids),
        mask=np.arange(len(ids)) >= PROMPT,
        logprobs=np.array([0.0] * PROMPT + sampler),
        trainer=np.array([0.0] * PROMPT + [*values, *forced.values()]),
        step=0,
        group=str(number // 4),
    )


def drawn(number: int, count: int) -> list[float]:
    return np.log(np.random.default_rng((4, number)).uniform(0.05, 0.95, count)).tolist()


def cut_at(limit: int, forced: dict[int, float], count: int = 120) -> list[Sample]:
    """Every third sample has the largest length, without a drawn end."""
    lengths = np.random.default_rng(5).integers(2, limit, count)
    return [
        sample_of(n, drawn(n, limit), forced, end_drawn=False) if n % 3 == 0 else sample_of(n, drawn(n, lengths[n]), {})
        for n in range(count)
    ]


def yes_or_no() -> list[Sample]:
    """A grammar allows two answers of one token, and nothing behind them."""
    return [
        sample_of(n, drawn(n, 1), {END: -float(np.random.default_rng(n).uniform(0.6, 2))}, end_drawn=False)
        for n in range(200)
    ]


def behind_stop_strings() -> list[Sample]:
    lengths = np.random.default_rng(6).integers(3, 30, 60)
    return [sample_of(n, drawn(n, lengths[n]), {END: -1.5}, end_drawn=False) for n in range(60)]


def left_out() -> list[Sample]:
    """Ends were drawn, at any length, and recorded without their log-prob."""
    lengths = np.random.default_rng(7).integers(3, 30, 60)
    return [sample_of(n, drawn(n, lengths[n]), {END: -0.8}, end_drawn=False) for n in range(60)]


def numbers_of_three_digits() -> list[Sample]:
    """A grammar allows up to three digits: an end is drawn before, and forced behind the third."""
    return cut_at(3, {END: -1.0}, 300)


@pytest.mark.parametrize("make", [yes_or_no, behind_stop_strings, left_out, numbers_of_three_digits])
def test_ends_that_no_limit_forced_are_not_blamed_on_one(make: Callable[[], list[Sample]]) -> None:
    (found,) = forced_of(make())
    assert found.confidence == "medium"
    assert "a grammar, a stop string, or a log-prob that was not recorded" in found.evidence


def forced_of(samples: list[Sample]) -> list[Finding]:
    return [one for one in find(Dump(samples)) if one.name == "end-token-forced"]


@pytest.mark.parametrize("forced", [{END: -4.0}, {END: -4.0, NEWLINE: -2.0}, {END: -4.0, NEWLINE: -1e-4}])
def test_tokens_behind_samples_that_a_limit_cut_are_named_alone(forced: dict[int, float]) -> None:
    """One token, or a template's two: no other cause is blamed for the gap."""
    samples = cut_at(20, forced)
    (found,) = find(Dump(samples))
    assert (found.name, found.confidence, found.token, found.count) == ("end-token-forced", "high", END, 40)
    assert found.position == PROMPT + 20


def test_a_sample_without_any_log_prob_has_no_forced_end() -> None:
    """Its labels all have a log-prob of 0: that is another fault."""
    nothing = [sample_of(n, [0.0] * 6, {END: -4.0}, end_drawn=False) for n in range(100, 140)]
    dump = Dump([*(sample_of(n, drawn(n, 6), {}) for n in range(100)), *nothing])
    assert not dump.forced_ends.any() and not dump.zero_ends.any()


@pytest.mark.parametrize("trainer", [True, False])
def test_certain_ends_of_a_truncated_distribution_show_the_truncation(trainer: bool) -> None:
    """Answers of four labels whose only certain ones are their ends."""
    samples = [sample_of(n, [*drawn(n, 3), 0.0], {}) for n in range(100)]
    for one in samples:
        assert one.trainer is not None
        one.trainer[-1] = -0.03
    if not trainer:
        samples = [Sample(**(vars(one) | {"trainer": None})) for one in samples]
    (found,) = truncated(Dump(samples))
    assert "have a log-prob of exactly 0" in found.text
    assert found.confidence == "medium", "a grammar may be why"


@pytest.mark.parametrize("off", [0.0, 0.5])
def test_forced_ends_do_not_count_where_only_a_mean_of_entropies_is_known(off: float) -> None:
    """Each drawn label's surprisal is its entropy, with noise, except where it is `off`."""
    samples = []
    for one in cut_at(20, {END: -20.0}):
        assert one.trainer is not None and one.logprobs is not None and one.mask is not None
        surprisal = -one.logprobs[one.mask][one.logprobs[one.mask] < 0]
        noise = np.random.default_rng(one.line).normal(0, 0.1)
        samples.append(Sample(**(vars(one) | {"mean_entropy": float(surprisal.mean()) + noise + off})))
    assert bool(list(surprise(Dump(samples)))) == (off > 0)
