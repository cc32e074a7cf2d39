"""What a check finds, and what a check is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from truestep.text import printable
from truestep.tools.audit.samples import Dump

Confidence = Literal["high", "medium"]  # high: the exit code is 1


@dataclass(frozen=True)
class Evidence:
    """What a check found: the first place, what is there, and how many samples are concerned."""

    sample: int
    text: str
    count: int
    position: int | None = None
    confidence: Confidence = "high"
    name: str | None = None  # of another finding than the check's own, where one check tells several apart


def sure(certain: bool) -> Confidence:
    return "high" if certain else "medium"


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    compares: str  # what with what
    threshold: str
    advice: str
    run: Callable[[Dump], Iterator[Evidence]] | None  # None: other checks, or a model, give this finding
    explains: tuple[str, ...] = ()  # findings that follow from this one and are not shown beside it


@dataclass(frozen=True)
class Finding:
    name: str
    title: str
    confidence: Confidence
    file: str
    line: int
    sample: str
    position: int | None  # of the token in its sample
    token: int | None
    evidence: str
    advice: str
    count: int  # samples

    @property
    def where(self) -> str:
        token = "" if self.position is None else f", token {self.position}"
        number = "" if self.token is None or self.token < 0 else f" (id {self.token})"
        return f"{printable(self.file, 200)}:{self.line}{token}{number}"
