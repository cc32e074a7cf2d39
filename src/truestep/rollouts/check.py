"""The command `truestep data check`: a summary of rollout files, so that errors are found before a run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from truestep.process import progress
from truestep.rollouts.advantages import check_group_sizes
from truestep.rollouts.chat import ChatTemplate
from truestep.rollouts.fields import Field, declare, from_records, optional
from truestep.rollouts.files import expand_paths, load_documents
from truestep.rollouts.record import Checks, Needs
from truestep.rollouts.rejects import reason_kind
from truestep.types import Rejected, Rollout

EXAMPLES = 3  # shown per kind of rejection
_SHOWN = ("logprobs", "advantages", "model_version")  # fields with dedicated lines in the summary
HISTOGRAM_ROWS = 8
HISTOGRAM_WIDTH = 40


@dataclass(frozen=True)
class Spread:
    """The distribution of a count over documents."""

    minimum: float
    median: float
    percentile_95: float
    maximum: float


@dataclass(frozen=True)
class Rewards:
    count: int
    mean: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class Rejection:
    """Rejected records whose reasons differ only in numbers and quoted values."""

    kind: str
    count: int
    examples: tuple[str, ...]  # "file:line reason"


@dataclass(frozen=True)
class DataSummary:
    records: int
    documents: int
    sequences: int  # larger than `documents` if some documents have several sequences
    tokens: int
    labels: int
    documents_without_labels: int
    lengths: Spread | None  # tokens per document; None if there are no documents
    label_counts: Spread | None  # labels per document; None if there are no documents
    groups: int
    group_sizes: tuple[tuple[int, int], ...]  # (members, number of groups), counting rejected members
    groups_of_equal_reward: int  # groups of at least two rewards, all equal: their advantages are 0
    documents_without_group: int
    rewards: Rewards | None
    own_advantages: int
    without_logprobs: int  # documents with labels that lack logprobs
    without_advantages: int  # documents with labels that have neither an advantage nor a reward with a group
    temperatures: tuple[tuple[float, int], ...]  # (temperature, number of documents)
    model_versions: tuple[int, int] | None  # lowest and highest
    # (field, number of documents with labels that lack it), for other fields that at least one document has.
    fields: tuple[tuple[str, int], ...]
    rejected: int
    rejections: tuple[Rejection, ...]  # most frequent first


def check_files(
    paths: str | Sequence[str],
    vocabulary_size: int | None = None,
    default_temperature: float = 1.0,
    max_tokens: int | None = None,
    chat: ChatTemplate | None = None,
    group_size: int | None = None,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
) -> DataSummary:
    """Summarise the files. The run's loss is unknown, so missing fields are counted and not rejected.

    `fields` is the run's `data.fields`.
    """
    declared = optional(declare(fields))
    nothing = Needs(logprobs=False, advantages=False, advantage_rule="none")
    checks = Checks(nothing, vocabulary_size, default_temperature, max_tokens, chat=chat, fields=declared)
    progress.phase("reading the records")
    documents = load_documents(expand_paths(paths if isinstance(paths, str) else list(paths)), checks)
    rollouts, rejected = documents.rollouts, documents.rejected
    sequences = sum(len(rollout.sequences) for rollout in rollouts)
    lengths = [rollout.num_tokens for rollout in rollouts]
    label_counts = [rollout.num_labels for rollout in rollouts]
    labelled = [rollout for rollout, count in zip(rollouts, label_counts, strict=True) if count]
    items: tuple[Rollout | Rejected, ...] = (*rollouts, *rejected)
    members = Counter(item.group_id for item in items if item.group_id is not None)
    check_group_sizes(list(members.values()), group_size)
    return DataSummary(
        records=sequences + len(rejected),
        documents=len(rollouts),
        sequences=sequences,
        tokens=sum(lengths),
        labels=sum(label_counts),
        documents_without_labels=len(rollouts) - len(labelled),
        lengths=_spread(lengths),
        label_counts=_spread(label_counts),
        groups=len(members),
        group_sizes=tuple(sorted(Counter(members.values()).items())),
        groups_of_equal_reward=_groups_of_equal_reward(rollouts),
        documents_without_group=sum(rollout.group_id is None for rollout in rollouts),
        rewards=_rewards([rollout.reward for rollout in rollouts if rollout.reward is not None]),
        own_advantages=sum(rollout.advantages is not None for rollout in rollouts),
        without_logprobs=sum(rollout.logprobs is None for rollout in labelled),
        without_advantages=sum(not _has_advantage(rollout) for rollout in labelled),
        temperatures=tuple(sorted(Counter(rollout.temperature for rollout in rollouts).items())),
        model_versions=_model_versions(rollouts),
        fields=_other_fields(labelled, declared),
        rejected=len(rejected),
        rejections=_rejections(rejected),
    )


def _spread(counts: list[int]) -> Spread | None:
    if not counts:
        return None
    return Spread(min(counts), float(np.median(counts)), float(np.percentile(counts, 95)), max(counts))


def _rewards(rewards: list[float]) -> Rewards | None:
    return Rewards(len(rewards), float(np.mean(rewards)), min(rewards), max(rewards)) if rewards else None


def _has_advantage(rollout: Rollout) -> bool:
    return rollout.advantages is not None or (rollout.reward is not None and rollout.group_id is not None)


def _groups_of_equal_reward(rollouts: Iterable[Rollout]) -> int:
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.group_id is not None and rollout.reward is not None and rollout.advantages is None:
            rewards.setdefault(rollout.group_id, []).append(rollout.reward)
    return sum(len(group) > 1 and len(set(group)) == 1 for group in rewards.values())


def _model_versions(rollouts: Iterable[Rollout]) -> tuple[int, int] | None:
    labels = [item.model_version[item.loss_mask] for item in rollouts if item.model_version is not None]
    versions = np.concatenate([*labels, np.zeros(0, np.int64)])
    return (int(versions.min()), int(versions.max())) if len(versions) else None


def _other_fields(labelled: Sequence[Rollout], declared: Sequence[Field]) -> tuple[tuple[str, int], ...]:
    """Return (field, number of documents that lack it) for the fields without a dedicated line in the summary."""
    others = [field for field in from_records() if field.level != "document" and field.name not in _SHOWN]
    counts = [(field.name, sum(item.value(field.name) is None for item in labelled)) for field in (*others, *declared)]
    return tuple((name, count) for name, count in counts if count < len(labelled))


def _rejections(rejected: Iterable[Rejected]) -> tuple[Rejection, ...]:
    kinds: dict[str, list[Rejected]] = {}
    for record in rejected:
        kinds.setdefault(reason_kind(record.reason), []).append(record)
    found = [
        Rejection(kind, len(records), tuple(f"{r.file}:{r.line} {r.reason}" for r in records[:EXAMPLES]))
        for kind, records in kinds.items()
    ]
    return tuple(sorted(found, key=lambda rejection: -rejection.count))


# ---- rendering. Names and reasons come from the files, so they are `Text` and never markup.


def render(summary: DataSummary) -> RenderableType:
    parts: list[RenderableType] = [_facts(summary)]
    if summary.lengths is not None and summary.label_counts is not None:
        parts += [Text(), _spreads(summary.lengths, summary.label_counts)]
    if summary.group_sizes:
        parts += [Text(), _histogram(summary)]
    if summary.rejections:
        parts += [Text(), *_rejected(summary)]
    return Group(*parts)


def _facts(summary: DataSummary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    rejected = Text(f"{summary.rejected:,} rejected", style="red" if summary.rejected else "green")
    table.add_row("records", Text.assemble(f"{summary.records:,}: {summary.documents:,} documents, ", rejected))
    if summary.sequences > summary.documents:
        table.add_row("sequences", f"{summary.sequences:,}: some documents have several")
    table.add_row("tokens", f"{summary.tokens:,}, of which {summary.labels:,} labels")
    if summary.documents_without_labels:
        table.add_row("without labels", _count(summary.documents_without_labels, "document"))
    labelled = summary.documents - summary.documents_without_labels
    table.add_row("log-probs", _presence(summary.without_logprobs, labelled))
    table.add_row("advantages", _presence(summary.without_advantages, labelled, "own or from rewards"))
    if (rewards := summary.rewards) is not None:
        bounds = f"from {rewards.minimum:.4g} to {rewards.maximum:.4g}"
        table.add_row("rewards", f"mean {rewards.mean:.4g}, {bounds} ({_count(rewards.count, 'document')})")
    if summary.temperatures:
        table.add_row("temperatures", _temperatures(summary.temperatures))
    if summary.model_versions is not None:
        lowest, highest = summary.model_versions
        table.add_row("model versions", f"{lowest:,}" if lowest == highest else f"{lowest:,} to {highest:,}")
    for name, missing in summary.fields:
        table.add_row(name, _presence(missing, labelled))
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _presence(missing: int, labelled: int, note: str = "") -> Text:
    if not labelled:
        return Text("no document has labels", style="yellow")
    if not missing:
        return Text("in every document with labels" + (f" ({note})" if note else ""), style="green")
    return Text(f"missing in {missing:,} of {_count(labelled, 'document')} with labels", style="yellow")


def _temperatures(temperatures: Sequence[tuple[float, int]]) -> str:
    if len(temperatures) > 4:
        return f"{len(temperatures)} values, from {temperatures[0][0]:g} to {temperatures[-1][0]:g}"
    return ", ".join(f"{value:g} ({_count(count, 'document')})" for value, count in temperatures)


def _spreads(lengths: Spread, label_counts: Spread) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("per document")
    for heading in ("min", "median", "95%", "max"):
        table.add_column(heading, justify="right")
    for name, spread in (("tokens", lengths), ("labels", label_counts)):
        ordered = (spread.minimum, spread.median, spread.percentile_95, spread.maximum)
        table.add_row(name, *(f"{value:,.0f}" for value in ordered))
    return table


def _histogram(summary: DataSummary) -> Group:
    """Draw the most frequent group sizes. Normally all groups of a run have the same size."""
    notes = [_count(summary.groups, "group")]
    if summary.groups_of_equal_reward:
        notes.append(f"{summary.groups_of_equal_reward:,} of equal reward (advantage 0)")
    if summary.documents_without_group:
        notes.append(f"{_count(summary.documents_without_group, 'document')} in none")
    shown = sorted(sorted(summary.group_sizes, key=lambda item: -item[1])[:HISTOGRAM_ROWS])
    most = max(count for _, count in shown)
    table = Table.grid(padding=(0, 2))
    for members, count in shown:
        bar = "█" * max(1, round(HISTOGRAM_WIDTH * count / most))
        table.add_row(f"of {members:,}", Text(bar, style="cyan"), f"{count:,}")
    parts: list[RenderableType] = [Text(", ".join(notes), style="bold"), table]
    if len(summary.group_sizes) > len(shown):
        parts.append(Text(f"and {len(summary.group_sizes) - len(shown)} more sizes"))
    return Group(*parts)


def _rejected(summary: DataSummary) -> list[RenderableType]:
    lines: list[RenderableType] = [Text(f"{_count(summary.rejected, 'record')} rejected", style="bold red")]
    for rejection in summary.rejections:
        lines.append(Text(f"{rejection.count:,}x {rejection.kind}", style="red"))
        lines.extend(Padding(Text(_printable(example)), (0, 0, 0, 4)) for example in rejection.examples)
    return lines


def _printable(text: str) -> str:
    """Replace control characters: a file's name may contain them, and a terminal would act on them."""
    return "".join(character if character.isprintable() else "?" for character in text)
