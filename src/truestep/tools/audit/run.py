"""Audits dumps: reads them, runs the checks, and with a model scores some of the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from truestep.process import progress
from truestep.tools.audit.finding import Evidence, Finding
from truestep.tools.audit.formats.table import read_samples
from truestep.tools.audit.kept import find_lost, join
from truestep.tools.audit.opening import UnreadableError, find_files
from truestep.tools.audit.samples import Dump
from truestep.tools.audit.table import find


@dataclass(frozen=True)
class Audit:
    """What `audit` found, with findings of high confidence first."""

    findings: tuple[Finding, ...]
    files: int
    samples: int
    tokens: int
    labels: int
    scored: int
    """Labels that the model scored."""
    lost: tuple[str, ...] = ()
    """Records that should be there and are not, in words. They are no finding."""

    @property
    def clean(self) -> bool:
        """True if nothing was found with high confidence."""
        return all(one.confidence != "high" for one in self.findings)


def audit(files: Sequence[Path], *, model: Path | None = None, source: str = "auto") -> Audit:
    """Audit the dumps in files and directories. Raise `UnreadableError` for a file that is not a dump."""
    progress.phase("reading the dumps")
    found = find_files(files)
    dump = Dump(join(read_samples(found, source)))
    lost = find_lost(files, found)
    if not dump.samples:
        raise UnreadableError("; ".join(["there is no sample in these files", *lost]))
    more: list[Evidence] = []
    scored = 0
    if model is not None:
        from truestep.tools.audit.model import Scorer

        scorer = Scorer(model)
        dump, more, scored = scorer.score(scorer.known(dump))
    progress.phase("looking for faults")
    findings = tuple(find(dump, more))
    return Audit(findings, len(found), len(dump.samples), len(dump.ids), len(dump.labels), scored, lost)
