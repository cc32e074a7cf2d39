"""The engine: continuous batching in steps that the scheduler plans.

On a GPU the host launches up to `Device.lag` steps before it reads which tokens were drawn. The device does not wait:
the next input token of each row stays in device memory, where its draw wrote it. On a CPU the lag is 0.

A policy keeps its `Engine` for the whole run. A `Session` is one phase of sampling: it allocates the KV cache from free
memory and frees it at the end.

Dimensions: R rows of a step, H hidden, V vocabulary, P pages of a row.
"""

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from truestep.generate.engine.attend import (
    KeyPlaces,
    Past,
    PromptChunks,
    Rows,
    UnservedError,
    attend_rows,
    make_prefill,
    places_of,
)
from truestep.generate.engine.cache import (
    PagedCache,
    free_bytes,
    page_bytes,
    pages_that_fit,
    state_bytes,
    states_that_fit,
)
from truestep.generate.engine.device import Result, device_of
from truestep.generate.engine.draw import key_of
from truestep.generate.engine.exact import choose_exactly, chunks_pass, exact_device, make_exact, rows_pass
from truestep.generate.engine.forward import compiled_layers, paged, probe_plainly, run_model, shapes_of
from truestep.generate.engine.graphs import MOST_GRAPHED, FlatPrompts, Graphs, size_for
from truestep.generate.engine.recur import RowStates
from truestep.generate.engine.routes import RouteStage, as_experts
from truestep.generate.engine.rows import (
    KEY,
    LENGTH,
    OFFSET,
    PAGE,
    PAGES,
    POSITION,
    SLOT,
    STATE,
    RowTables,
    draw_fields,
    draw_rows,
)
from truestep.generate.engine.schedule import Scheduler
from truestep.generate.engine.steps import EngineStep, Row, Start
from truestep.generate.engine.stops import StopTexts
from truestep.generate.engine.team import Team, check
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.model.exact import exact_hidden, exactly
from truestep.model.mixers.attention import PackedLayout
from truestep.model.mixers.recurrence import recurrent_modules
from truestep.model.policy import Policy
from truestep.numerics.operations import InexactError
from truestep.process import progress

log = logging.getLogger(__name__)

_LOGITS_BYTES = 128 * 2**20  # most memory for raw logits


@dataclass(frozen=True)
class Limits:
    """Limits of one session."""

    rows: int  # completions in flight
    longest: int  # tokens of a prompt and its completion
    chunk_tokens: int | None = None  # prompt tokens of a step; None: the device's default
    cache_bytes: int | None = None  # size of the KV cache; None: as much as is useful and free


@dataclass
class Counts:
    """Counters of one session."""

    prompt_tokens: int = 0  # prompt tokens that were computed
    cached_tokens: int = 0  # tokens of prompts that were found in the cache
    drawn_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    pages: int = 0
    most_pages: int = 0  # peak number of pages in use


@dataclass
class _Open:
    """A completion in flight: its options, and its tokens so far."""

    options: DrawOptions
    seed: tuple[int, ...]
    stops: StopTexts | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    log_mass: list[float] = field(default_factory=list)
    prompt: int = 0  # tokens
    # Copies of its first tokens' routes, earlier copies first.
    routes: list[tuple[Result, slice]] = field(default_factory=list)

    def fields(self) -> np.ndarray:  # KEY to TOP_K
        how = self.options
        return draw_fields(key_of(self.seed), how.temperature, how.top_p, how.min_p, how.top_k)

    def completion(self, stopped: bool) -> Completion:
        cut = None
        if self.options.truncates:
            cut = [logprob - mass for logprob, mass in zip(self.logprobs, self.log_mass, strict=True)]
        return Completion(self.tokens, self.logprobs, stopped, cut, routes=self._fed())

    def _fed(self) -> np.ndarray | None:
        """Return the routes of all tokens that the model computed. For a token that was computed again, return its
        first routes."""
        if not self.routes:
            return None
        found = [as_experts(result.wait()[rows]) for result, rows in self.routes]
        whole = np.array(max(found, key=len)[: self.prompt + len(self.tokens) - 1])
        for part in reversed(found):
            whole[: len(part)] = part[: len(whole)]
        return whole


class Engine:
    def __init__(self, policy: Policy, exact: bool = False):
        """Prepare sampling with a policy whose weights are gathered. Raise `UnservedError` if the engine cannot serve
        the model. `exact`: log-probs equal training's bit by bit; raise `InexactError` if they cannot."""
        self.device = device_of(policy.device)
        self.exact = exact
        self.team = Team.of(policy)
        self._compiled: dict[Any, Any] = {}
        with torch.no_grad():
            self.layers = shapes_of(policy)
            if exact and any(layer.states for layer in self.layers):
                kinds = sorted({type(module).__name__ for module in recurrent_modules(policy.model)})
                raise InexactError(
                    f"sampler.exact: layers that keep a state add up in another order when they decode than when they "
                    f"read a whole document: {', '.join(kinds)}"
                )
            probe_plainly(policy, self.layers, self.device.page_size)
            if self.device.place.type == "cuda":
                from truestep.generate.engine.serving import serve_with_kernels

                compiled = None if exact else self._compiled  # `make_exact` compiles layers in another way
                self.device = serve_with_kernels(self.device, policy, self.layers, compiled)
            if exact:
                self.device = exact_device(self.device)
                make_exact(policy, self.layers, self.device)
        self.graphs = self._graphs() if self.device.graphs else None
        self.stage = None
        if policy.routing is not None and policy.routing.shape is not None and not exact:
            self.stage = RouteStage(policy.routing.shape, policy.device)

    def _graphs(self) -> Graphs:
        operations = sum(len(layer.states) for layer in self.layers)
        return Graphs(self.device.place, len(self.layers), self.team, operations, self.device.addressed)

    @contextmanager
    def session(self, policy: Policy, limits: Limits) -> Iterator["Session"]:
        """Open a session. Inside, the policy's weights are gathered and must not change."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(exactly(policy.model) if self.exact else paged(policy))
            if self.device.compiles:
                stack.enter_context(compiled_layers(policy.model, self._compiled))
            if self.stage is not None and policy.routing is not None:
                stack.enter_context(policy.routing.recording(self.stage.record))
            session = Session(policy, self, limits)
            try:
                yield session
            finally:
                session.close()


class Session:
    def __init__(self, policy: Policy, engine: Engine, limits: Limits):
        self._policy, self._device, self._graphs, self._exact = policy, engine.device, engine.graphs, engine.exact
        self._team, self._slice = engine.team, engine.team.slice(policy.vocabulary_size)
        self._longest = limits.longest
        place, page_size = self._device.place, self._device.page_size
        width = -(-limits.longest // page_size)
        each = page_bytes(engine.layers, page_size, policy.weights.dtype)
        useful = limits.rows * width
        useful += useful // 15  # the scheduler keeps up to 1/16 of the pages free when it starts prompts
        room = free_bytes(place) if limits.cache_bytes is None else limits.cache_bytes
        state = state_bytes(engine.layers)
        states = self._team.least(states_that_fit(limits.rows, state, useful * each, room))
        pages = self._team.least(pages_that_fit(useful, each, room - state * (states + 1)))
        shape = engine.layers, pages, page_size, policy.weights.dtype, place
        zeros = engine.exact or engine.device.attend is attend_rows
        self.cache: PagedCache | None = PagedCache.make(*shape, zeros=zeros, states=states)
        slots = min(limits.rows, pages, states - 1 if states else pages)
        self._scheduler = Scheduler(
            pages=pages,
            page_size=page_size,
            slots=slots,
            chunk_tokens=limits.chunk_tokens or self._device.chunk_tokens,
            together=max(1, slots // self._device.joins),
            prompts_first=self._device.prompts_first,
            patience=self._device.patience,
            states=states,
        )
        self._stage = engine.stage
        if self._stage is not None:
            chunk = limits.chunk_tokens or self._device.chunk_tokens
            self._stage.begin(max(chunk, MOST_GRAPHED, size_for(slots)), self.cache)
        if self._graphs is not None:
            staged = 0 if self._stage is None else self._stage.address
            self._graphs.begin(self.cache, slots, width, policy.model, staged)
            self._last = self._graphs.last
        else:
            self.cache.locate()
            self._last = torch.zeros(slots + 1, dtype=torch.int64, device=place)
        self._hidden: torch.Tensor | None = None  # [slots, H] last hidden states of prompts whose prefill is done
        self._rows = RowTables(slots, width, page_size, self.cache.spare)
        self._open: dict[int, _Open] = {}
        self._truncates = False
        self._flying: deque[tuple[list[int], Result]] = deque()  # steps in flight: request numbers, drawn tokens
        self._ended: list[tuple[int, _Open, bool]] = []  # completions whose routes are being copied to the host
        self.counts = Counts(pages=pages)

    @property
    def busy(self) -> bool:
        return not self._scheduler.idle or bool(self._ended)

    def takes(self, request: Request) -> bool:
        """Tell whether the tables of pages have room for a request. If not, it needs another session."""
        return request.most_tokens <= self._longest

    def submit(self, number: int, request: Request) -> None:
        """Submit a request, at any time. `step` returns its completion under this number."""
        options = request.options
        self._scheduler.submit(number, request.token_ids, options.max_new_tokens)
        stops = StopTexts(self._policy.tokenizer, options.stop) if options.stop else None
        self._open[number] = _Open(options, request.seed, stops, prompt=len(request.token_ids))
        self._truncates = self._truncates or options.truncates

    def cancel(self, number: int) -> None:
        """Stop a completion; `step` will not return it."""
        self._scheduler.end(number)
        self._open.pop(number, None)

    def step(self) -> list[tuple[int, Completion]]:
        """Launch a step. Return the completions that are now known to have ended, with their numbers."""
        plan = self._scheduler.plan()
        ended, self._ended = self._ended, []  # completions of the previous step; their routes are copied by now
        if plan:
            self._flying.append(self._launch(plan))
            self.counts.steps += 1
            self.counts.most_pages = max(self.counts.most_pages, self._scheduler.used_pages)
        elif not self._flying and not ended:
            raise RuntimeError("the sampler's scheduler is stuck")  # a bug of the scheduler
        while len(self._flying) > (self._device.lag if plan else 0):
            self._ended += self._collect(*self._flying.popleft())
        if self._stage is None or not self._device.lag:
            ended, self._ended = [*ended, *self._ended], []
        done = [(number, state.completion(stopped)) for number, state, stopped in ended]
        self.counts.prompt_tokens = self._scheduler.prompt_tokens
        self.counts.cached_tokens = self._scheduler.cached_tokens
        self.counts.preemptions = self._scheduler.preemptions
        return done

    def drawn(self, number: int) -> Sequence[int]:
        """Return the tokens drawn so far of a completion that has not ended."""
        return self._open[number].tokens if number in self._open else ()

    def close(self) -> None:
        """Free the KV cache."""
        routes = [result for state in self._open.values() for result, _ in state.routes]
        for result in (*(result for _, result in self._flying), *routes):  # copies may still be in flight
            result.wait()
        self._flying.clear()
        self.cache = self._hidden = None
        if self._device.place.type == "cuda":
            torch.cuda.empty_cache()

    def _launch(self, plan: EngineStep) -> tuple[list[int], Result]:
        assert self.cache is not None
        lost = self._scheduler.take_lost()
        self._fetch_routes([(self._open.get(number), pages, length) for number, pages, length in lost])
        self._copy([one.page for one in plan.resumed], [one.state for one in plan.resumed])
        if plan.chunks:
            self._compute_chunks(plan)
        self._copy([start.copy for start in plan.starts], [start.state for start in plan.starts])
        drawn = []
        if plan.starts:
            drawn.append(self._begin(plan.starts))
        if plan.rows:
            drawn.append(self._decode_rows(plan.rows))
        drawing: list[Start | Row] = [*plan.starts, *plan.rows]
        # This step draws their last token. The next step may reuse their pages.
        last = [one for one in drawing if one.job.drawn == one.job.most]
        self._fetch_routes([(self._open.get(one.job.number), one.pages, one.job.length) for one in last])
        numbers = [start.job.number for start in plan.starts] + [row.job.number for row in plan.rows]
        if not drawn:
            drawn.append(torch.zeros(3, 0, dtype=torch.int64))
        joined = drawn[0] if len(drawn) == 1 else torch.cat(drawn, dim=1)
        return numbers, self._device.fetch(joined)

    def _fetch_routes(self, wanted: Sequence[tuple[_Open | None, Sequence[int], int]]) -> None:
        """Start to copy the routes of completions to the host, given their pages and tokens."""
        there = [(state, pages, length) for state, pages, length in wanted if state is not None and pages]
        if self._stage is None or not there:
            return
        assert self.cache is not None and self.cache.routes is not None
        pages = np.concatenate([np.array(own) for _, own, _ in there])
        result = self._device.fetch(self.cache.routes.index_select(0, self._device.send(pages)).flatten(0, 1))
        start = 0
        for state, own, length in there:
            state.routes.append((result, slice(start, start + length)))
            start += len(own) * self._device.page_size

    def _keep_routes(self, pages: torch.Tensor, offsets: torch.Tensor) -> None:
        assert self.cache is not None
        if self._stage is not None:
            self._stage.keep(self.cache, pages, offsets)

    def _copy(self, pages: Sequence[tuple[int, int] | None], states: Sequence[tuple[int, int] | None]) -> None:
        assert self.cache is not None
        for copy, pairs in ((self.cache.copy_pages, pages), (self.cache.copy_states, states)):
            there = [pair for pair in pairs if pair is not None]
            if there:
                source, target = self._device.send(np.array(there).T.copy())
                copy(source, target)

    def _compute_chunks(self, plan: EngineStep) -> None:
        assert self.cache is not None
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.start > 0)
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1
        ids = np.fromiter(itertools.chain.from_iterable(chunk.tokens for chunk in chunks), np.int64, ends[-1] + 1)
        spans = [(chunk.start, len(chunk.tokens), chunk.pages) for chunk in chunks]
        hidden = None
        goes_on = chunks[-1].start > 0  # some chunk follows earlier tokens of its prompt
        if self._graphs is not None and self._device.fused and (self._device.past or not goes_on):
            positions, pages, offsets = places_of(spans, self._device.page_size)
            bounds = np.concatenate([[0], ends + 1]).astype(np.int32)
            longest = max(len(chunk.tokens) for chunk in chunks)
            keys = KeyPlaces.of(spans, self._device.page_size) if goes_on else None
            prompts = FlatPrompts(ids, positions, pages, offsets, bounds, longest, self.cache.spare, keys)
            hidden = self._graphs.run_prompts(prompts, self._device.send, self._compute_prompts)
        if self._exact:
            there, exact = chunks_pass(self.cache, spans, self._device.send, self._device.store)
            hidden = exact_hidden(self._policy.model, self._device.send(ids), there, exact)
        if hidden is None:
            how = self._device.send, self._device.store, self._device.past
            step = make_prefill(self.cache, spans, *how, slots=[chunk.state for chunk in chunks])
            hidden = run_model(self._policy, self._device.send(ids), step.positions, step)
        if self._stage is not None:
            _, pages, offsets = places_of(spans, self._device.page_size)
            self._keep_routes(*self._device.send(np.stack([pages, offsets])))
        last = [(end, chunk.place) for end, chunk in zip(ends, chunks, strict=True) if chunk.place is not None]
        if last:
            if self._hidden is None:
                self._hidden = hidden.new_zeros(self._scheduler.slots, hidden.shape[1])
            rows, places = self._device.send(np.array(last).T.copy())
            self._hidden.index_copy_(0, places, hidden.index_select(0, rows))

    def _compute_prompts(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pages: torch.Tensor,
        offsets: torch.Tensor,
        layout: PackedLayout | None,
        past: Past | None,
    ) -> torch.Tensor:
        """Prefill prompts or chunks of them. This is captured in a CUDA graph, so it must not read host memory."""
        assert self.cache is not None
        step = PromptChunks(
            self.cache, positions, pages, offsets, [], [], layout, self._device.store, past, self._device.gather
        )
        return run_model(self._policy, ids, positions, step)

    def _begin(self, starts: Sequence[Start]) -> torch.Tensor:
        """Draw the first token of each completion that starts."""
        assert self._hidden is not None
        lines = np.zeros((len(starts), PAGES + 1), dtype=np.int64)
        for line, start in zip(lines, starts, strict=True):
            line[SLOT], line[POSITION], line[PAGES] = start.slot, start.position, start.place
            line[KEY:PAGES] = self._rows.begin(start.slot, self._open[start.job.number].fields())
        sent = self._device.send(lines)
        return self._choose(self._hidden.index_select(0, sent[:, PAGES]), sent)

    def _decode_rows(self, rows: Sequence[Row]) -> torch.Tensor:  # [3, R]
        assert self.cache is not None
        longest, nobody = max(row.length for row in rows), len(self._last) - 1
        if self._graphs is None:
            width = -(-longest // self._device.page_size)
            sent = self._device.send(self._rows.lines(rows, len(rows), width, nobody))
            found = self._decode(sent, longest)
            self._keep_routes(sent[:, PAGE], sent[:, OFFSET])
            return found
        lines = self._device.ready(self._rows.lines(rows, size_for(len(rows)), self._graphs.width, nobody))
        truncates, spare, refill = self._truncates, self.cache.spare, self._device.refill
        found = self._graphs.run(lines, longest, truncates, spare, refill, self._decode)[:, : len(rows)]
        sent = self._graphs.sent(len(rows))
        self._keep_routes(sent[:, PAGE], sent[:, OFFSET])
        return found

    def _decode(self, lines: torch.Tensor, longest: int) -> torch.Tensor:  # [R, PAGES + P] -> [3, R]
        """Decode one token of each row, and draw the next. This is captured in a CUDA graph: it reads no host
        memory."""
        assert self.cache is not None
        ids = self._last.index_select(0, lines[:, SLOT])
        if self._exact:
            before = lines[:, LENGTH] - 1
            where = lines[:, PAGE], lines[:, OFFSET], before, lines[:, PAGES:]
            exact = rows_pass(self.cache, *where, self._device.send, self._device.store)
            return self._choose(exact_hidden(self._policy.model, ids, before, exact), lines)
        rows = Rows(
            self.cache,
            pages=lines[:, PAGE],
            offsets=lines[:, OFFSET],
            lengths=lines[:, LENGTH],
            table=lines[:, PAGES:],
            longest=longest,
            attend=self._device.attend,
            states=RowStates(self.cache, lines[:, STATE], advance=self._device.advance),
        )
        return self._choose(run_model(self._policy, ids, lines[:, LENGTH] - 1, rows), lines)

    def _choose(self, hidden: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:  # [R, H], [R, ≥ PAGES] -> [3, R]
        """Draw each row's next token and store it as the next step's input. Return tokens, log-probs and log-masses."""
        policy, head = self._policy, self._policy.head
        own = self._slice if self._slice is not None and self._slice.suffices(self._truncates) else None
        vocabulary = policy.vocabulary_size if own is None else own.most
        each = max(1, _LOGITS_BYTES // (vocabulary * (4 if head.fp32 else hidden.element_size())))
        drawn = []
        for first in range(0, len(hidden), each):
            part = slice(first, first + each)
            rows = draw_rows(lines[part], self._truncates)
            if self._exact:
                found = choose_exactly(hidden[part], policy, rows, self._device.draw)
            else:
                found = self._device.draw(policy.own_logits(hidden[part]), rows, head, self._slice)
            self._team.agree_(found.tokens)
            drawn.append(found.packed)
        joined = drawn[0] if len(drawn) == 1 else torch.cat(drawn, dim=1)
        self._last.index_copy_(0, lines[:, SLOT], joined[0])
        return joined

    def _collect(self, numbers: Sequence[int], result: Result) -> list[tuple[int, _Open, bool]]:
        """Wait for a step's tokens and record them. Return the completions that end with them, and whether a stop token
        or a stop text ended each."""
        drawn, *floats = result.wait()
        tokens = drawn.tolist()
        check(tokens)
        done: list[tuple[int, _Open, bool]] = []
        left: list[tuple[_Open | None, Sequence[int], int]] = []
        made = 0
        values = (values.view(np.float64).tolist() for values in floats)
        for number, token, logprob, mass in zip(numbers, tokens, *values, strict=True):
            if not self._scheduler.learned(number, token):
                continue  # the completion had ended, but the host did not know it when it launched this step
            made += 1
            state = self._open[number]
            state.tokens.append(token)
            state.logprobs.append(logprob)
            state.log_mass.append(mass)
            stopped = token in state.options.stop_ids or (state.stops is not None and state.stops.reached(state.tokens))
            if stopped:
                left.append((state, self._scheduler.pages_of(number), state.prompt + len(state.tokens) - 1))
                self._scheduler.end(number)
            if stopped or len(state.tokens) == state.options.max_new_tokens:
                done.append((number, state, stopped))
                del self._open[number]
        self._fetch_routes(left)
        self.counts.drawn_tokens += made
        progress.made("tokens", made)
        return done


_ENGINES: WeakKeyDictionary[Policy, dict[bool, Engine | str]] = WeakKeyDictionary()


def engine_of(policy: Policy, exact: bool = False) -> Engine | str:
    """Return the policy's engine, or the reason why it has none. The policy's weights must be gathered."""
    engines = _ENGINES.setdefault(policy, {})
    found = engines.get(exact)
    if found is None:
        try:
            found = Engine(policy, exact)
        except (torch.OutOfMemoryError, InexactError):
            raise
        except (UnservedError, RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A model's own code may raise any of these if it does not support this KV cache.
            found = str(error) or type(error).__name__
            if exact:
                raise InexactError(
                    f"sampler.exact needs the engine, which does not serve this model: {found}"
                ) from error
            log.warning("this model is sampled without the engine, which is slower: %s", found)
        if not Team.of(policy).all(isinstance(found, Engine)) and isinstance(found, Engine):
            found = "another tensor rank has no engine"
        engines[exact] = found
    return found
