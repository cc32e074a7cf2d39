"""The formats that can be read, one entry each, and where their fields are described."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.text import printable
from truestep.tools.audit.formats import ours, prime_rl, slime, texts, turns
from truestep.tools.audit.opening import UnreadableError, read_records
from truestep.tools.audit.samples import Sample


@dataclass(frozen=True)
class Format:
    name: str  # the value of --from
    what: str
    source: str  # where the format is described
    fits: Callable[[Mapping[str, Any]], bool]
    samples: Callable[[Mapping[str, Any], str, int], Iterator[Sample]]


TABLE: tuple[Format, ...] = (
    Format("truestep", "records: JSON lines, Parquet, a run's `records/*.records`", "docs/rollouts.md",
           ours.fits_record, ours.samples_of_record),
    Format("truestep", "a run's `rollouts/*.parquet`", "docs/metrics.md", ours.fits_kept, ours.samples_of_kept),
    Format("trl", "`completions/*.parquet` of `log_completions`", "TRL's own code (1.16.0), run by tests",
           texts.fits_trl, texts.samples_of_trl),
    Format("verl", "JSON lines of `trainer.rollout_data_dir`", "`_dump_generations` of verl's trainer",
           texts.fits_verl, texts.samples_of_verl),
    Format("prime-rl", "`token_exports/step_*/rank_*.jsonl`", "the class `TokenExporter` of prime-rl, schema 1",
           prime_rl.fits, prime_rl.samples),
    Format("slime", "`--save-debug-train-data`", "`save_debug_train_data` and `RolloutManager` of slime",
           slime.fits, slime.samples),
    Format("miles", "`--save-debug-train-data`", "`save_debug_train_data` of miles, which is slime's",
           slime.fits, slime.samples),
    Format("tinker", "`*_rollout_summaries.jsonl`", "`serialize_rollout_summaries` of tinker-cookbook, schema 1",
           turns.fits_tinker, turns.samples_of_tinker),
    Format("openai", "answers of OpenAI's API, as JSON lines", "OpenAI's API with vLLM's `token_ids`",
           turns.fits_openai, turns.samples_of_openai),
)  # fmt: skip
NAMES = tuple(dict.fromkeys(one.name for one in TABLE))


def read_samples(files: Sequence[Path], source: str = "auto") -> Iterator[Sample]:
    """Yield the samples of all files. `source`: a name in `NAMES`, or `auto`, which recognises each file's format by
    its fields.

    TRL writes the same rows again between two generations. A file with the same rows as the file before it is skipped.
    """
    allowed = [one for one in TABLE if source in ("auto", one.name)]
    before: list[Any] = []
    for path in files:
        chosen: Format | None = None
        rows: list[Any] = []
        found: list[Sample] = []
        for line, record in read_records(path):
            if not isinstance(record, Mapping):
                raise UnreadableError(f"{path}:{line}: a record is no object")
            chosen = chosen or _format_of(record, allowed, f"{path}:{line}", source)
            try:
                samples = list(chosen.samples(record, str(path), line))
            except (UnreadableError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
                raise UnreadableError(f"{path}:{line}: the record cannot be read: {printable(error)}") from None
            if chosen.name != "trl":
                yield from samples
                continue
            rows.append([record["prompt"], record["completion"], repr(record["advantage"])])
            found += samples
        if rows != before:
            yield from found
        before = rows or before


def _format_of(record: Mapping[str, Any], allowed: Iterable[Format], where: str, source: str) -> Format:
    for one in allowed:
        try:
            if one.fits(record):
                return one
        except TypeError:
            continue
    fields = printable(", ".join(map(str, list(record)[:12])), 200)
    wanted = f"{source}'s" if source != "auto" else f"those of {', '.join(NAMES)}"
    raise UnreadableError(
        f"{where}: its fields are not {wanted}: it has {fields}. Name dumps, or directories of dumps alone"
    )
