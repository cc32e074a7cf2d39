"""The documents that `bisect` found: as text, and as files that the report and `data check` read."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.cells import cell_len, chop_cells, set_cell_size

from truestep.config.schema import Config
from truestep.config.sections import files_of, place_of
from truestep.files.whole import write_json_lines
from truestep.losses.labels import Labels
from truestep.model.policy import Policy
from truestep.rollouts.documents import record_lines
from truestep.rollouts.files import DataError, expand_paths
from truestep.rollouts.kept import files as kept_files
from truestep.rollouts.kept.reader import Reader
from truestep.rollouts.kept.rows import row_of
from truestep.text import printable
from truestep.tools.replay.jumps import Jump, number
from truestep.tools.replay.parts import places_of
from truestep.types import DocumentScore, Rollout, StepPlan

FOUND = "found.jsonl"
_WIDTH = 80
_MOST_LABELS = 8  # labels of a document that are shown
_MOST_TEXT = 320  # characters of a prompt or a completion that are shown
_MOST_SHOWN = 5  # documents that are shown
_MOST_OF_IT = 0.5  # the share of a jump that documents must explain to be named as its cause
_LARGEST_FILE = 1 << 30  # bytes; a document's line is not looked for in larger files


@dataclass(frozen=True)
class FoundLabel:
    """A label of a found document."""

    place: int
    """Its index among the document's tokens."""
    token: int
    logprob: float
    old_logprob: float | None
    advantage: float | None
    share: float | None
    """Its share of the document's contribution; None: less than a tenth, or not known."""

    @property
    def log_ratio(self) -> float | None:
        return None if self.old_logprob is None else self.logprob - self.old_logprob


@dataclass(frozen=True)
class FoundDocument:
    """A document that caused a metric's jump or, if it did not jump, contributes much to its value."""

    document: Rollout
    part: float
    """Its contribution to the metric."""
    share: float
    """Its share of the jump; if there was no jump, its share of the metric."""
    labels: tuple[FoundLabel, ...]
    """The labels with a tenth or more of its contribution, and the one with the largest log-ratio, in token order."""
    spread: tuple[int, int, float] | None
    """If no single label stands out: the first and last index of the span that contributes most, and its share."""
    score: DocumentScore

    @property
    def id(self) -> str:
        return self.document.id

    @staticmethod
    def of(
        document: Rollout,
        part: float,
        share: float,
        labels: Sequence[Labels],
        shares: Mapping[int, float],
        spread: tuple[int, int, float] | None,
    ) -> "FoundDocument":
        """Describe a document by its labels. `shares`: each label's share of the contribution, by token index."""
        every = [label for sequence in labels for label in _labels(sequence, shares)]
        chosen = sorted(shares, key=lambda place: -shares[place])[:_MOST_LABELS]
        if far := [label for label in every if label.log_ratio is not None]:
            chosen.append(max(far, key=lambda label: abs(label.log_ratio or 0.0)).place)
        joined = [np.concatenate([getattr(one, name).float().numpy() for one in labels]) for name in _SCORES]
        score = DocumentScore(document.id, *joined)
        return FoundDocument(document, part, share, tuple(one for one in every if one.place in chosen), spread, score)


_SCORES = ("logprobs", "entropy")


def _labels(labels: Labels, shares: Mapping[int, float]) -> Iterator[FoundLabel]:
    old, advantages = (bool(labels.has[name].all()) for name in ("logprobs", "advantages"))
    for at, place in enumerate(places_of(labels).tolist()):
        yield FoundLabel(
            place,
            int(labels.ids[at]),
            float(labels.logprobs[at]),
            float(labels.old_logprobs[at]) if old else None,
            float(labels.advantages[at]) if advantages else None,
            shares.get(place),
        )


@dataclass(frozen=True)
class Found:
    """The result of a search for the cause of a jump."""

    jump: Jump
    value: float  # of the metric in the replay
    plan: StepPlan
    documents: Sequence[FoundDocument]
    together: Sequence[Rollout]
    without: float | None
    unsearched: Sequence[str]  # possible causes that were not searched

    @property
    def explains(self) -> bool:
        """True if the metric without the documents is within the usual range, or at most half as far from it."""
        if not self.jump.jumped or self.without is None:
            return True
        usual = min(self.jump.around) <= self.without <= max(self.jump.around)
        return usual or self.jump.unusual(self.without) <= _MOST_OF_IT


def describe(config: Config, policy: Policy, found: Found) -> list[str]:
    """Describe the documents and labels that caused a jump, in lines of a terminal's width."""
    jump, together, documents, without = found.jump, found.together, found.documents, found.without
    total, rest = len(found.plan.documents), ""
    if without is not None:
        rest = f"; without {'it' if len(documents) == 1 else 'them'} {jump.metric} is {number(without)}"
        rest += "" if found.explains else ", so this does not explain the jump"
    if together:
        ids = ", ".join(printable(one.id, 40) for one in together[:_MOST_SHOWN])
        more = f" and {len(together) - _MOST_SHOWN} more" if len(together) > _MOST_SHOWN else ""
        groups = {one.group_id for one in together}
        group = f", all of group {printable(together[0].group_id, 40)}" if groups != {None} and len(groups) == 1 else ""
        does = "do" if found.explains else "have more than half of it"
        return wrapped(
            f"no document alone makes it; {len(together)} of {total} together {does}{rest}{group}: {ids}{more}"
        )
    if not documents:
        if found.unsearched:
            return wrapped(
                f"none of the documents that were measured, of {total}, contributes much more than the others"
            )
        whole = (
            "the whole step does (all documents together, the weights, or an option)"
            if jump.jumped
            else "nothing stands out"
        )
        return wrapped(f"neither one nor a few of {total} documents contribute much more than the others: {whole}")
    share = sum(one.share for one in documents)
    makes = "makes" if len(documents) == 1 else "make"
    what = "it" if jump.jumped and share >= _MOST_OF_IT else f"{share:.0%} of it"
    if not found.explains:
        makes, what = ("has" if len(documents) == 1 else "have"), "a large part of it"
    lines = wrapped(f"{len(documents)} of {total} documents {makes} {what}{rest}")
    for one in documents[:_MOST_SHOWN]:
        lines += ["", *_document(config, policy, jump, found.value, one)]
    if len(documents) > _MOST_SHOWN:
        lines += ["", f"and {len(documents) - _MOST_SHOWN} more"]
    return lines


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return text in lines of a terminal's width, where some characters take two cells."""
    lines, line = [], indent
    for word in text.split():
        if line.strip() and cell_len(line) + 1 + cell_len(word) > _WIDTH:
            lines.append(line)
            line = indent + "  "
        line += f" {word}" if line.strip() else word
        if cell_len(line) > _WIDTH:  # a text without spaces
            *full, line = chop_cells(line, _WIDTH)
            lines += full
    return [*lines, line]


def _document(config: Config, policy: Policy, jump: Jump, value: float, one: FoundDocument) -> list[str]:
    document = one.document
    named = [f"document {printable(document.id, 60)}"]
    if document.group_id is not None:
        named.append(f"group {printable(document.group_id, 30)}")
    if (where := _where(config, document)) is not None:
        named.append(where)
    facts = [f"its part of {jump.metric} is {number(one.part)}, of {number(value)} in all"]
    if document.reward is not None:
        facts.append(f"reward {number(document.reward)}")
    if document.advantages is not None and document.num_labels:
        advantages = document.advantages[document.loss_mask]
        low, high = number(float(advantages.min())), number(float(advantages.max()))
        facts.append(f"advantage {low}" if low == high else f"advantages {low} to {high}")
    facts.append(f"{document.num_labels} labels of {document.num_tokens} tokens")
    lines = [*wrapped(", ".join(named)), *wrapped("; ".join(facts), "  ")]
    if (reader := _reader(policy)) is not None:
        row = row_of(document, None, reader, jump.step, 0, False)
        for name in ("prompt", "completion"):
            lines += wrapped(f"{name}: {printable(row[name], _MOST_TEXT)}", "  ")
    return lines + _of_labels(one, reader)


def _of_labels(one: FoundDocument, reader: Reader | None) -> list[str]:
    lines = []
    if one.spread is not None and not any(label.share for label in one.labels):
        first, last, share = one.spread
        lines += wrapped(f"no single label stands out; tokens {first} to {last} have {share:.0%} of its part", "  ")
    if not one.labels:
        return lines
    pieces = {}
    if reader is not None:
        pieces = {label.place: printable(reader.pieces(np.array([label.token]))[0], 14) for label in one.labels}
    lines.append("  token  id      log-prob       old  log-ratio  advantage   part  text")
    for label in one.labels:
        values = [label.logprob, label.old_logprob, label.log_ratio, label.advantage]
        shown = [
            f"{'' if value is None else number(value):>{width}}"
            for value, width in zip(values, (9, 9, 10, 10), strict=True)
        ]
        part = "" if label.share is None else f"{min(label.share, 1.0):.0%}"
        line = f"  {label.place:>5}  {label.token:<6} {' '.join(shown)} {part:>6}"
        if piece := pieces.get(label.place):
            quoted = f"'{piece}'"
            line += f"  {quoted if cell_len(quoted) <= _WIDTH - cell_len(line) - 2 else set_cell_size(quoted, 14)}"
        lines.append(line.rstrip())
    return lines


def _reader(policy: Policy) -> Reader | None:
    tokenizer = policy.tokenizer
    if tokenizer is None:
        return None

    def decode(ids: Sequence[int], plain: bool) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=plain))

    return Reader(decode, 20_000)


def _where(config: Config, document: Rollout) -> str | None:
    """Return the file and the line of a document's prompt, or of its record."""
    asked = document.metadata.get("prompt_id")
    wanted = (str(asked),) if asked is not None else (document.id, *document.record_ids)
    for file in _files(config, prompts=asked is not None):
        if f"{file.name}:" in wanted[0] and wanted[0].rpartition(":")[2].isdigit():
            return f"{file}:{wanted[0].rpartition(':')[2]}"  # a prompt without an id has FILE:LINE as its id
        if (line := _line_of(file, wanted)) is not None:
            return f"{file}:{line}"
    return None if asked is None else f"prompt {printable(asked, 60)}"


def _files(config: Config, prompts: bool) -> list[Path]:
    """Return the JSONL files of the run's prompts, or of its records, that exist."""
    try:
        if prompts:
            sources = files_of(None if config.sampler is None else config.sampler.prompts).values()
            found = [Path(place_of(source)) for source in sources]
        else:
            found = [] if config.data.path is None else expand_paths(config.data.path)
        return [
            file
            for file in found
            if file.suffix == ".jsonl" and file.is_file() and file.stat().st_size <= _LARGEST_FILE
        ]
    except (OSError, ValueError, DataError):
        return []


def _line_of(file: Path, wanted: Sequence[str]) -> int | None:
    """Return the number of the line whose record has one of these ids. Only lines with an id in quotes are parsed,
    because many lines contain a short id somewhere."""
    forms = {json.dumps(name, ensure_ascii=ascii) for name in wanted for ascii in (True, False)}
    quoted = tuple(form.encode() for form in (*forms, *(f": {name}" for name in wanted if name.isdigit())))
    try:
        with file.open("rb") as lines:
            for place, line in enumerate(lines, 1):
                if any(name in line for name in quoted):
                    try:
                        record = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(record, dict) and str(record.get("id")) in wanted:
                        return place
    except OSError:
        return None
    return None


def write_found(policy: Policy, output: Path, jump: Jump, plan: StepPlan, found: Sequence[FoundDocument]) -> str:
    """Write the found documents as a rollout file, and as kept rollouts, which the report shows."""
    lines = []
    for one in found:
        shares = {label.place: label.share for label in one.labels if label.share is not None}
        said = {"metric": jump.metric, "step": jump.step, "part": one.part, "label_shares": shares}
        for line in record_lines(one.document, one.score):
            line["metadata"] = {**line.get("metadata", {}), "bisect": said}
            lines.append(line)
    write_json_lines(output / FOUND, lines)
    reader = _reader(policy)
    rows = [row_of(one.document, one.score, reader, jump.step, plan.documents_seen, True) for one in found]
    kept_files.write_rows(output / kept_files.FOLDER, rows)
    return f"written to {output / FOUND}; truestep report {output} shows them"
