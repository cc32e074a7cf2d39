"""What the scheduler plans: completions, prompts, and the work of one engine step."""

from collections import deque
from dataclasses import dataclass, field


@dataclass(eq=False)
class Job:
    """A completion that was submitted and has not ended."""

    number: int
    prompt: tuple[int, ...]
    most: int  # most new tokens
    tokens: list[int] = field(default_factory=list)  # drawn tokens that the host has read
    drawn: int = 0  # tokens drawn by the steps planned so far
    slot: int = -1  # -1: not running
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose keys and values are in its pages
    digests: list[bytes] = field(default_factory=list)  # one for each full page whose tokens the host knows
    state: int = 0  # the slot of its state; 0: it has none


@dataclass(eq=False)
class Prompt:
    """Tokens to prefill once for all jobs that begin with them."""

    tokens: tuple[int, ...]
    jobs: deque[Job]  # jobs that wait for this prompt
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens prefilled so far
    place: int = -1  # index of its last hidden state in the session's buffer; -1: none
    joinable: bool = False  # new jobs with the same prompt may share it
    digests: list[bytes] | None = None  # one for each full page; None: not computed yet
    state: int = 0  # the slot of the state after the tokens prefilled so far; 0: it has none

    @property
    def ready(self) -> bool:
        return self.done == len(self.tokens)


@dataclass(frozen=True)
class Resumed:
    """A prompt that starts from a kept state. Its step makes both copies first."""

    state: tuple[int, int]  # source and target
    page: tuple[int, int] | None  # source and target of the page that is partly filled; None: there is none


@dataclass(frozen=True)
class PromptChunk:
    """A prompt chunk: consecutive tokens of a prompt that one step prefills."""

    tokens: tuple[int, ...]
    start: int  # position of the first token in the prompt
    pages: tuple[int, ...]  # pages of the prompt up to the end of the chunk
    place: int | None  # where the last hidden state is kept; None: the prompt does not end with this chunk
    state: int  # the slot of the prompt's state


@dataclass(frozen=True)
class Start:
    """A completion whose first token the step draws, from the last hidden state of its prompt."""

    job: Job
    slot: int
    pages: list[int]  # the job's own list, as in `Row`
    place: int  # where the prompt's last hidden state is kept
    position: int  # index of the drawn token in the completion
    copy: tuple[int, int] | None  # source and target of the page to copy; None: no page is partly filled
    state: tuple[int, int] | None  # source and target of the state to copy; None: the job has the prompt's own


@dataclass(frozen=True)
class Row:
    """A running completion, and its place in a step that decodes its next token."""

    job: Job
    slot: int
    length: int  # tokens, including the one that is decoded
    position: int  # index of the drawn token in the completion
    pages: list[int]  # the job's own list: read it before the next call of `plan`
    state: int  # the slot of its state


@dataclass
class EngineStep:
    """The work of one engine step."""

    resumed: list[Resumed] = field(default_factory=list)
    chunks: list[PromptChunk] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.resumed or self.chunks or self.starts or self.rows)
