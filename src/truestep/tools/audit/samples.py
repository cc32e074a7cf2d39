"""The contents of a dump of rollouts as columns: one record model for all formats.

Dimensions: N samples, T tokens of all samples, concatenated; L tokens of one sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

NONE = np.iinfo(np.int64).min  # marks a missing integer
# Tokens with a sampler's log-prob of 0 were not drawn if the trainer's is below -UNLIKELY at each of them, and the
# trainer's probability of all of them together is below CHANCE.
UNLIKELY, CHANCE = 0.5, 1e-6


@dataclass(frozen=True, eq=False)
class Sample:
    """One sequence of a dump. A field that the dump lacks is None. Values outside the mask are unchanged."""

    file: str
    line: int
    id: str = ""
    ids: np.ndarray | None = None  # [L] int64
    mask: np.ndarray | None = None  # [L] bool: the labels
    logprobs: np.ndarray | None = None  # [L] float64, the sampler's; NaN: not recorded
    trainer: np.ndarray | None = None  # [L] float64, the trainer's; NaN: not recorded
    entropy: np.ndarray | None = None  # [L] float64, entropy of the trainer's distribution
    advantages: np.ndarray | None = None  # [L] float64
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    group: str | None = None
    # document and group of a sequence that is not the document's only one: sequences of a document differ in prompts
    part_of: tuple[str, str] | None = None
    step: int | None = None
    version: int | None = None  # version of the weights that drew the sample
    staleness: float | None = None  # age of these weights, in steps or documents
    truncated: bool | None = None
    temperature: float | None = None
    routes: np.ndarray | None = None  # [rows, layers, k]
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None  # the expected answer, if the reward compares the completion with one
    mean_entropy: float | None = None  # mean over the labels, if there is no entropy per token
    document: str | None = None  # the document's id, in rollouts that a truestep run kept
    conversation: str | None = None  # the same for all turns of a conversation, which are in order
    lengths: tuple[int, int] | None = None  # lengths of prompt and completion, if there are no tokens
    # for each list of a wrong length: its name, its length, and the expected length
    misfits: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class Dump:
    """The samples of all files, and their columns."""

    samples: Sequence[Sample]
    end_tokens: frozenset[int] = frozenset()  # the model's, if a model is given
    vocabulary_size: int | None = None

    @cached_property
    def with_tokens(self) -> np.ndarray:  # indices of the samples with tokens
        return np.array([i for i, one in enumerate(self.samples) if one.ids is not None and len(one.ids)], np.int64)

    @cached_property
    def starts(self) -> np.ndarray:  # [N + 1]
        sizes = [0 if one.ids is None else len(one.ids) for one in self.samples]
        return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])

    @cached_property
    def owner(self) -> np.ndarray:  # [T] index of each token's sample
        return np.repeat(np.arange(len(self.samples)), np.diff(self.starts))

    @cached_property
    def ids(self) -> np.ndarray:
        return self._joined("ids", -1, np.int64)

    @cached_property
    def mask(self) -> np.ndarray:
        return self._joined("mask", False, np.bool_)

    @cached_property
    def logprobs(self) -> np.ndarray:
        return self._joined("logprobs", np.nan, np.float64)

    @cached_property
    def trainer(self) -> np.ndarray:
        return self._joined("trainer", np.nan, np.float64)

    @cached_property
    def entropy(self) -> np.ndarray:
        return self._joined("entropy", np.nan, np.float64)

    @cached_property
    def advantages(self) -> np.ndarray:
        return self._joined("advantages", np.nan, np.float64)

    def _joined(self, name: str, missing: Any, dtype: Any) -> np.ndarray:
        found = np.full(int(self.starts[-1]), missing, dtype)
        for index in self.with_tokens:
            values = getattr(self.samples[index], name)
            if values is not None:
                found[self.starts[index] : self.starts[index + 1]] = values
        return found

    @cached_property
    def labels(self) -> np.ndarray:  # indices of labels among all tokens
        return np.flatnonzero(self.mask)

    @cached_property
    def label_owner(self) -> np.ndarray:
        return self.owner[self.labels]

    @cached_property
    def label_counts(self) -> np.ndarray:  # [N]
        return np.bincount(self.label_owner, minlength=len(self.samples))

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of each sample's first and last label; -1: it has none."""
        return span(self.mask, self)

    @cached_property
    def last_labels(self) -> np.ndarray:  # [N] index of each sample's last label among all labels; -1: it has none
        return np.where(self.label_counts > 0, np.cumsum(self.label_counts) - 1, -1)

    @cached_property
    def zero_ends(self) -> np.ndarray:
        """Return for each label: True if the sampler's log-prob is exactly 0 from it to its sample's last label."""
        return at_ends(self.logprobs[self.labels] == 0, self.label_counts)

    @cached_property
    def unlikely(self) -> np.ndarray:
        """Return for each label: True if the sampler's log-prob is exactly 0 and the trainer's is low."""
        return (self.logprobs[self.labels] == 0) & (self.trainer[self.labels] < -UNLIKELY)

    @cached_property
    def forced_ends(self) -> np.ndarray:
        """Return for each label: True if it is one of the `zero_ends` of a sample with an unlikely label among them.
        All are False if chance explains the unlikely labels, or if other places have unlikely labels too."""
        none = np.zeros(len(self.labels), np.bool_)
        found = self.unlikely & self.zero_ends
        if not found.any() or self.unlikely.sum() > 1.1 * found.sum():
            return none
        if self.trainer[self.labels][found].sum() > np.log(CHANCE):
            return none
        return self.zero_ends & np.isin(self.label_owner, self.label_owner[found])

    @cached_property
    def gap(self) -> np.ndarray:
        """Return the log-ratio of each label, trainer minus sampler. NaN at forced ends, and where a log-prob is
        missing."""
        found = self.trainer[self.labels] - self.logprobs[self.labels]
        found[self.forced_ends] = np.nan
        return found

    @cached_property
    def coarse(self) -> bool:
        """True if log-probs were rounded so much that exact zeros and equal values mean nothing."""
        values = np.abs(self.logprobs[self.labels])
        values = values[(values > 0.01) & (values < 1)]
        return len(values) < 50 or len(np.unique(values)) < 0.5 * len(values)

    @cached_property
    def advantage(self) -> np.ndarray:  # [N] advantage at the first label; NaN: none
        first, _ = self.edges
        values = [
            None if one.advantages is None or not len(one.advantages) else one.advantages[max(0, int(first[i]))]
            for i, one in enumerate(self.samples)
        ]
        return np.array([np.nan if value is None else value for value in values], np.float64)

    @cached_property
    def alone(self) -> np.ndarray:  # [N] True for samples that are not turns of a longer conversation
        names = codes([one.conversation if one.conversation is not None else i for i, one in enumerate(self.samples)])
        return np.bincount(names, minlength=1)[names] == 1

    @cached_property
    def rewards(self) -> np.ndarray:
        return self.numbers(lambda one: one.reward)

    @cached_property
    def steps(self) -> np.ndarray:
        return np.array([NONE if one.step is None else one.step for one in self.samples], np.int64)

    def numbers(self, get: Callable[[Sample], float | None]) -> np.ndarray:  # [N], NaN if missing
        return np.array([np.nan if (value := get(one)) is None else value for one in self.samples], np.float64)

    @cached_property
    def prompts(self) -> np.ndarray:
        """Return each sample's prompt as a number; -1: unknown."""
        first, _ = self.edges
        return codes([self._prompt_key(one, int(first[i])) for i, one in enumerate(self.samples)])

    @staticmethod
    def _prompt_key(one: Sample, first: int) -> bytes | str | None:
        if one.ids is not None and first > 0 and one.ids[0] >= 0:
            return one.ids[:first].tobytes()
        return one.prompt or None

    @cached_property
    def completions(self) -> np.ndarray:
        """Return each sample's completion as a number; -1: unknown."""
        keys: list[bytes | str | None] = []
        for one in self.samples:
            known = one.ids is not None and one.mask is not None and one.mask.any() and one.ids[0] >= 0
            keys.append(one.ids[one.mask].tobytes() if known else one.completion or None)  # type: ignore[index]
        return codes(keys)

    @cached_property
    def asked(self) -> np.ndarray:
        """Return the same number for all samples with the same step and group id (or prompt, if there is no group id);
        -1 without both. Turns of a longer conversation are numbered by prompt, because their prompts differ."""
        prompts = self.prompts
        keys: list[Any] = []
        for i, one in enumerate(self.samples):
            name: int | str | None = one.group if self.alone[i] or prompts[i] < 0 else None
            name = int(prompts[i]) if name is None and prompts[i] >= 0 else name
            keys.append(None if name is None else (one.step, type(name).__name__, name))
        return codes(keys)

    @cached_property
    def groups(self) -> np.ndarray:
        """Return each sample's group as a number; -1: unknown. It is unknown if samples without group ids may be of
        several groups of the same prompt."""
        found = self.asked.copy()
        sizes = np.bincount(found[found >= 0])
        named = np.array([one.group is not None for one in self.samples], np.bool_)
        if len(sizes):
            found[~named & (found >= 0) & (sizes[np.maximum(found, 0)] > np.bincount(sizes[sizes > 0]).argmax())] = -1
        return found

    @cached_property
    def rated(self) -> np.ndarray:
        """Return a number for each group of documents that were rated together, for one sample of each document; -1 for
        the others."""
        keys: list[Any] = []
        seen: set[Any] = set()
        for one, alone, group in zip(self.samples, self.alone.tolist(), self.groups.tolist(), strict=True):
            key: Any = (one.step, one.group if alone and one.group is not None else group) if group >= 0 else None
            if one.part_of is not None and (document := (one.file, one.step, one.part_of[0])) not in seen:
                seen.add(document)
                key = (one.step, one.part_of[1])
            keys.append(key)
        return codes(keys)

    def place(self, token: int) -> tuple[int, int]:
        """Return a token's sample and position in the sample, given its index among all tokens."""
        owner = int(self.owner[token])
        return owner, int(token - self.starts[owner])


def span(where: np.ndarray, dump: Dump) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last position in each sample at which `where` [T] is true, -1 if it never is."""
    first, last = np.full(len(dump.samples), -1), np.full(len(dump.samples), -1)
    places = np.flatnonzero(where)
    if not len(places):
        return first, last
    owners, at = np.unique(dump.owner[places], return_index=True)
    first[owners] = places[at] - dump.starts[owners]
    ends = np.append(at[1:], len(places)) - 1
    last[owners] = places[ends] - dump.starts[owners]
    return first, last


def at_ends(where: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return for each label: True if `where` [labels] is true from it to its sample's last label, but not at all of the
    sample's labels. `counts`: how many labels each sample has."""
    owner, place = np.repeat(np.arange(len(counts)), counts), np.arange(len(where))
    before = np.full(len(counts), len(where))  # each sample's last label at which `where` is false
    others, at = np.unique(owner[~where][::-1], return_index=True)
    before[others] = place[~where][::-1][at]
    found: np.ndarray = place > before[owner]
    return found


def codes(keys: Sequence[Any]) -> np.ndarray:
    """Return a number from 0 for each distinct key, in order of appearance; -1 for None."""
    known: dict[Any, int] = {}
    return np.array([-1 if key is None else known.setdefault(key, len(known)) for key in keys], np.int64)
