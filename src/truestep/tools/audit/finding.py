"""The types of checks and of their findings."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from truestep.text import printable
from truestep.tools.audit.samples import Dump

Confidence = Literal["high", "medium"]  # high: the exit code is 1


@dataclass(frozen=True)
class Evidence:
    """What a check found: the first place, a description, and the number of samples."""

    sample: int
    text: str
    count: int
    position: int | None = None
    confidence: Confidence = "high"
    # the name of the finding, if it is not the check's own; some checks distinguish several findings
    name: str | None = None


def sure(certain: bool) -> Confidence:
    return "high" if certain else "medium"


@dataclass(frozen=True)
class Check:
    name: str
    title: str
    compares: str  # which values are compared
    threshold: str
    advice: str
    run: Callable[[Dump], Iterator[Evidence]] | None  # None: the finding comes from other checks, or from a model
    explains: tuple[str, ...] = ()  # findings that are consequences of this one, and are not shown with it


@dataclass(frozen=True)
class Finding:
    name: str
    title: str
    confidence: Confidence
    file: str
    line: int
    sample: str
    position: int | None  # the token's index in its sample
    token: int | None
    evidence: str
    advice: str
    count: int  # number of samples

    @property
    def where(self) -> str:
        token = "" if self.position is None else f", token {self.position}"
        number = "" if self.token is None or self.token < 0 else f" (id {self.token})"
        return f"{printable(self.file, 200)}:{self.line}{token}{number}"
