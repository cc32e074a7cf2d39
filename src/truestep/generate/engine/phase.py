"""A phase of sampling on one rank, together with its tensor ranks. It opens a session when the first requests have
come, and keeps the session and its cache until the phase ends."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from truestep.generate.engine.engine import Engine, Limits, Session, engine_of
from truestep.generate.engine.plain import PlainSession
from truestep.generate.generator import Completion, Request
from truestep.model.policy import Policy
from truestep.process import progress

_ROWS = {"cuda": 1024, "cpu": 256}  # completions in flight if `rows` is None


@dataclass(frozen=True)
class EngineSettings:
    rows: int | None = None  # most completions in flight; None: as many as free memory and the device allow
    longest: int = 0  # tokens of the longest conversation; 0: of the longest request that waits when a session opens
    engine: bool = True  # False: static batches with transformers' own attention and cache
    exact: bool = False  # log-probs equal those of training bit by bit
    at_once: int = 0  # a new session has room for at least this many completions in flight
    # Requests begin in waves, so that what is computed together does not depend on when rewards arrive.
    waves: bool = False

    def most_rows(self, policy: Policy) -> int:
        return self.rows or _ROWS.get(policy.device.type, 256)


class Phase:
    """Samples the requests that this rank has been given. Tensor ranks make all calls in the same order."""

    def __init__(self, policy: Policy, settings: EngineSettings):
        self._policy, self._settings = policy, settings
        self._waiting: dict[int, Request] = {}  # requests that are not yet in a session
        self._session: Session | PlainSession | None = None
        self._opened = ExitStack()
        self.cache_use = 0.0  # peak fraction of the KV cache in use
        # Prompt tokens of closed sessions: computed, and found in the cache.
        self.prompt_tokens = self.cached_tokens = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or (self._session is not None and self._session.busy)

    def submit(self, number: int, request: Request) -> None:
        self._waiting[number] = request

    def cancel(self, number: int) -> None:
        if self._waiting.pop(number, None) is None and self._session is not None:
            self._session.cancel(number)

    def drawn(self, number: int) -> Sequence[int]:
        """Return the tokens drawn so far of a completion that has not ended."""
        return () if self._session is None else self._session.drawn(number)

    def step(self, at_once: int = 0, longest: int = 0) -> list[tuple[int, Completion]]:
        """Run a step of the engine. Return the completions that ended, with their requests' numbers. A new session has
        room for at least `at_once` completions in flight, and for requests of at least `longest` tokens."""
        if (
            self._session is not None
            and not self._session.busy
            and not all(map(self._session.takes, self._waiting.values()))
        ):
            self._close_session()
        if self._session is None:
            self._session = self._open(at_once, longest)
        for number in [number for number, request in self._waiting.items() if self._session.takes(request)]:
            self._session.submit(number, self._waiting.pop(number))
        done = self._session.step() if self._session.busy else []
        progress.made("completions", len(done))
        return done

    def close(self) -> None:
        self._close_session()
        self._waiting.clear()

    def _open(self, at_once: int, longest: int) -> Session | PlainSession:
        settings, waiting = self._settings, self._waiting.values()
        engine: Engine | str = ""
        if settings.engine:
            with progress.working("preparing the sampler", "kernels"):
                engine = engine_of(self._policy, settings.exact)
        if not isinstance(engine, Engine):
            return PlainSession(self._policy, settings.rows)
        rows = min(max(len(waiting), at_once, settings.at_once), settings.most_rows(self._policy))
        longest = max(longest, settings.longest, *(request.most_tokens for request in waiting))
        return self._opened.enter_context(engine.session(self._policy, Limits(rows, longest)))

    def _close_session(self) -> None:
        if self._session is None:
            return
        counts, self._session = self._session.counts, None
        if counts.pages:
            self.cache_use = max(self.cache_use, counts.most_pages / counts.pages)
        self.prompt_tokens += counts.prompt_tokens
        self.cached_tokens += counts.cached_tokens
        self._opened.close()
