"""Decides what each engine step computes: host code without tensors.

A step prefills prompt chunks, starts completions whose prompts are prefilled, and decodes one token of every running
completion. Equal prompts that wait together are prefilled once: their completions share the prompt's full pages, and
each has its own copy of the last, partly filled page. A prompt that begins with tokens of an earlier prompt or
completion, such as the next turn of a conversation, starts from their pages (`pages`). When no page is available, the
completion that started last is preempted: its pages are taken, and its prompt and tokens are prefilled again later.

If layers keep recurrent states, each prompt and each running completion has a slot for its state (`states`). The
completions of a prompt begin with copies of its state. A page of the cache is then useless without the state at its
end. So a prompt starts from earlier tokens only if such a state was kept: the state after the last prompt of a
conversation.

The device runs the steps in order, and is a step or two behind the host. So pages and slots may be reused as soon as
the last step that uses them is planned.
"""

from collections import deque

from truestep.errors import TruestepError
from truestep.generate.engine.pages import PagePool, digests_of
from truestep.generate.engine.states import KeptState, StateSlots
from truestep.generate.engine.steps import EngineStep, Job, Prompt, PromptChunk, Resumed, Row, Start

# A prompt starts from pages of the cache only if they hold at least a quarter of it, because its chunks then have to
# read the keys of these pages again.
_LEAST_SHARED = 4


class CacheError(TruestepError):
    pass


class Scheduler:
    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        slots: int,
        chunk_tokens: int,
        together: int = 1,
        prompts_first: int = 0,
        patience: int = 0,
        states: int = 0,
    ):
        """`together`: prefill starts when this many slots are free, or enough for all waiting completions, or when
        nothing runs. It does not start earlier, because a prefill step has a fixed cost. `prompts_first`: up to this
        many prefill steps in a row run without decoding, because decoding few rows takes nearly as long as decoding
        many. `patience`: if fewer than `together` completions wait and at least `together` run, prefill is put off for
        up to this many steps. `states`: the number of slots for states, which must be more than `slots`; 0: the model
        has no recurrent states."""
        self.page_size, self.slots = page_size, slots
        self._chunk_tokens, self._together, self._prompts_first = chunk_tokens, together, prompts_first
        self._patience = patience
        self._waited = 0  # prefill steps in a row without decoding
        self._delayed = 0  # steps for which waiting prompts have waited for more prompts
        self._joining = False  # True while prefill goes on: until no prompt waits or no slot is free
        self._pool, self._states = PagePool(pages), StateSlots(states)
        self._free_slots = list(range(slots - 1, -1, -1))
        self._free_places = list(range(slots - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # jobs that have not ended
        self._running: list[Job] = []  # in the order in which they started
        self._queue: deque[Prompt] = deque()
        self._waiting: dict[tuple[int, ...], Prompt] = {}  # prompts of the queue that new jobs may share
        self._unlearned: list[Job] = []  # preempted jobs whose last tokens the host has not read yet
        self._released: list[int] = []  # pages that the last planned step still reads
        self._released_slots: list[int] = []
        self._released_places: list[int] = []
        self._released_states: list[int] = []
        self._kept: list[KeptState] = []  # states that the last planned step computes
        self._lost: list[tuple[int, list[int], int]] = []  # see `take_lost`
        self.prompt_tokens = 0  # prompt tokens computed so far
        self.cached_tokens = 0  # tokens of prompts whose keys and values were found in the cache
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def used_pages(self) -> int:
        return self._pool.size - self._pool.available

    def submit(self, number: int, prompt: tuple[int, ...], most: int) -> None:
        if not prompt:
            raise CacheError("a prompt has no tokens: at least one is needed to predict the completion's first token")
        length = len(prompt) + most - 1  # nothing reads the last token's keys and values
        if self._pages_for(length) > self._pool.size:
            raise CacheError(
                f"a prompt of {len(prompt)} tokens with {most} new ones is longer than the sampler's cache, which "
                f"holds {self._pool.size * self.page_size} tokens: lower max_new_tokens, leave out long prompts or "
                "free memory"
            )
        job = self._jobs[number] = Job(number, prompt, most)
        # `setdefault` hashes the prompt once; for a long prompt the hash is the most expensive part.
        new = Prompt(prompt, deque(), joinable=True)
        found = self._waiting.setdefault(prompt, new)
        if found is new:
            self._queue.append(new)
        found.jobs.append(job)

    def learned(self, number: int, token: int) -> bool:
        """Record a drawn token. Return False if its completion had ended before, so that the token is discarded."""
        job = self._jobs.get(number)
        if job is None:
            return False
        job.tokens.append(token)
        self._register(job)
        if len(job.tokens) == job.most:
            self.end(number)
        elif job in self._unlearned and len(job.tokens) == job.drawn:
            self._unlearned.remove(job)
            self._queue.appendleft(Prompt((*job.prompt, *job.tokens), deque([job])))
        return True

    def take_lost(self) -> list[tuple[int, list[int], int]]:
        """Return the numbers of the jobs that were preempted since the last call, with their pages and the number of
        tokens in these pages. The next step may overwrite the pages."""
        lost, self._lost = self._lost, []
        return lost

    def pages_of(self, number: int) -> list[int]:
        """Return the pages of a running completion; an empty list if it has none any more."""
        job = self._jobs.get(number)
        return [] if job is None else list(job.pages)

    def end(self, number: int) -> None:
        """Remove a completion that is finished or cancelled."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if job.slot >= 0:
            self._running.remove(job)
            self._retire(job)
        elif job in self._unlearned:
            self._unlearned.remove(job)
        elif job.drawn < job.most:  # the job waits in the queue
            for prompt in self._queue:
                if job in prompt.jobs:
                    prompt.jobs.remove(job)
                    if not prompt.jobs:
                        self._release(prompt)
                        self._forget(prompt)
                    break

    def plan(self) -> EngineStep:
        """Plan the next step. If it is empty, nothing can be computed until more drawn tokens are read."""
        plan = EngineStep()
        self._free_slots += self._released_slots
        self._free_places += self._released_places
        self._released_slots, self._released_places = [], []
        self._pool.give_back(self._released)
        for state in self._released_states:
            self._states.give_back(state)
        for kept in self._kept:
            self._states.keep(kept)
        self._released, self._released_states, self._kept = [], [], []
        if self._waited < self._prompts_first:
            self._plan_prompts(plan)
            if plan:
                self._waited += 1
                return plan
        self._waited = 0
        self._delayed = self._delayed + 1 if self._queue and not self._joining else 0
        self._plan_rows(plan)
        self._plan_prompts(plan)
        while not plan and self._queue and not self._running and not self._unlearned:
            # Partly prefilled prompts hold all pages: give them to the first prompt.
            first = self._queue[0]
            others = [prompt for prompt in self._queue if prompt is not first and prompt.pages]
            for prompt in others:
                self._reset(prompt)
            if not others:
                self._start(plan, first, take_over=True)
                break
            self._plan_prompts(plan)
        return plan

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _plan_rows(self, plan: EngineStep) -> None:
        for job in list(self._running):
            if job.slot < 0:
                continue  # a job that started earlier has preempted it
            if len(job.pages) * self.page_size == job.length:
                page = self._take_page_for(job)
                if page is None:
                    continue
                job.pages.append(page)
            job.length += 1
            plan.rows.append(Row(job, job.slot, job.length, job.drawn, job.pages, job.state))
            job.drawn += 1
        for row in plan.rows:
            if row.job.drawn == row.job.most:
                self._running.remove(row.job)
                self._retire(row.job)

    def _take_page_for(self, job: Job) -> int | None:
        """Take a free page. If there is none, take the pages of a waiting prompt, or preempt the completion that
        started last. Return None if that was `job` itself."""
        while not self._pool.available:
            holder = next((prompt for prompt in reversed(self._queue) if prompt.pages), None)
            if holder is not None:
                self._reset(holder)
                continue
            last = self._running[-1]
            self._preempt(last)
            if last is job:
                return None
        return self._pool.take()

    def _register(self, job: Job) -> None:
        """Register the page that a running completion has filled. This is done when the last token that the host read
        begins a new page, because the keys and values of all earlier tokens are then in the cache."""
        before, rest = divmod(len(job.prompt) + len(job.tokens) - 1, self.page_size)
        if self._states.size or rest or len(job.digests) >= before or len(job.pages) < before:
            return
        first = len(job.digests) * self.page_size
        last = job.digests[-1] if job.digests else b""
        tokens = (*job.prompt[first:], *job.tokens[max(0, first - len(job.prompt)) : -1])
        for page, digest in zip(job.pages[len(job.digests) :], digests_of(tokens, self.page_size, last), strict=False):
            self._pool.register(page, digest)
            job.digests.append(digest)

    def _retire(self, job: Job) -> None:
        """Release a job's slot, pages and state, for use from the next plan on."""
        self._released += job.pages
        self._released_slots.append(job.slot)
        self._released_states.append(job.state)
        job.pages, job.slot, job.state = [], -1, 0

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self._lost.append((job.number, job.pages, job.length))
        self._running.remove(job)
        self._pool.give_back(job.pages)
        self._free_slots.append(job.slot)
        self._states.give_back(job.state)
        job.pages, job.slot, job.length, job.digests, job.state = [], -1, 0, [], 0
        if len(job.tokens) == job.drawn:
            self._queue.appendleft(Prompt((*job.prompt, *job.tokens), deque([job])))
        else:
            self._unlearned.append(job)

    def _may_join(self) -> bool:
        if self._joining or not self._running:
            return True
        waiting = 0
        for prompt in self._queue:
            waiting += len(prompt.jobs)
            if waiting >= self._together:
                break
        if waiting < self._together <= len(self._running) and waiting > 0 and self._delayed < self._patience:
            return False
        return len(self._free_slots) >= min(waiting, self._together)

    def _plan_prompts(self, plan: EngineStep) -> None:
        if self._may_join():
            self._plan_joins(plan)
            self._joining = bool(self._queue and self._free_slots)

    def _plan_joins(self, plan: EngineStep) -> None:
        budget = self._chunk_tokens
        room = len(self._free_slots)
        for prompt in list(self._queue):
            if room <= 0:
                return
            if not prompt.ready:
                budget = self._plan_chunk(plan, prompt, budget)
            if not prompt.ready:
                return  # first come, first served
            waiting = len(prompt.jobs)
            if not self._start(plan, prompt):
                return
            room -= waiting

    def _plan_chunk(self, plan: EngineStep, prompt: Prompt, budget: int) -> int:
        """Plan the largest chunk of a prompt for which the step and the cache have room. Return the step's remaining
        token budget; 0 ends the step's prefill."""
        if not prompt.done:
            self._find(plan, prompt)
        left = len(prompt.tokens) - prompt.done
        count = min(left, budget)
        if count < left <= self._chunk_tokens and budget < self._chunk_tokens:
            return 0  # the next step has room for the whole rest
        end = prompt.done + count
        needed = self._pages_for(end) - len(prompt.pages)
        # Running completions will need pages soon; without a reserve the new prompt would be preempted.
        reserve = min(len(self._running), self._pool.size // 16)
        if count == 0 or self._pool.available < needed + reserve:
            return 0
        if end == len(prompt.tokens) and not self._free_places:
            return 0
        if not prompt.state:
            state = self._states.take()
            if state is None:
                return 0
            prompt.state = state
        if end == len(prompt.tokens):
            prompt.place = self._free_places.pop()
        prompt.pages += [self._pool.take() for _ in range(needed)]
        assert prompt.digests is not None
        full = slice(prompt.done // self.page_size, end // self.page_size)
        for page, digest in zip(prompt.pages[full], prompt.digests[full], strict=True):
            self._pool.register(page, digest)
        place = prompt.place if prompt.place >= 0 else None
        tokens = prompt.tokens[prompt.done : end]
        plan.chunks.append(PromptChunk(tokens, prompt.done, tuple(prompt.pages), place, prompt.state))
        prompt.done = end
        self.prompt_tokens += count
        return budget - count

    def _find(self, plan: EngineStep, prompt: Prompt) -> None:
        """Let a prompt start from pages of the cache, if they hold enough of it. At least one token is computed,
        because its hidden state predicts the first new token."""
        if prompt.digests is None:
            prompt.digests = digests_of(prompt.tokens, self.page_size)
        if self._states.size:
            self._resume(plan, prompt)
            return
        found = self._pool.find(prompt.digests[: (len(prompt.tokens) - 1) // self.page_size])
        shared = len(found) * self.page_size
        if shared * _LEAST_SHARED >= len(prompt.tokens):
            self._pool.hold(found)
            prompt.pages, prompt.done = found, shared
            self.cached_tokens += shared

    def _resume(self, plan: EngineStep, prompt: Prompt) -> None:
        """Let a prompt start from a kept state, if one was kept after enough of its tokens. The pages of these tokens
        are shared. If the last one is only partly filled, the prompt gets a copy of it."""
        assert prompt.digests is not None
        found = self._states.find(prompt.tokens, prompt.digests, self.page_size)
        if found is None:
            return
        kept, shared = found
        pages = self._pool.find(kept.digests)
        if len(pages) < len(kept.digests):
            self._states.drop(kept)
            return
        if shared * _LEAST_SHARED < len(prompt.tokens):
            return
        self._pool.hold(pages)
        state = self._states.take() if self._pool.available or not kept.rest else None
        if state is None:
            self._pool.give_back(pages)
            return
        copy = None
        if kept.rest:
            copy = (pages.pop(), self._pool.take())
            self._released.append(copy[0])
            pages.append(copy[1])
        plan.resumed.append(Resumed((kept.slot, state), copy))
        prompt.pages, prompt.done, prompt.state = pages, shared, state
        self.cached_tokens += shared

    def _start(self, plan: EngineStep, prompt: Prompt, take_over: bool = False) -> bool:
        """Start the jobs of a prefilled prompt. Return False if some of them have no slot or page yet. `take_over`: one
        job takes the prompt's pages, and the other jobs' prompt is prefilled again."""
        while prompt.jobs:
            if not prompt.ready or not self._free_slots:
                return False
            last = len(prompt.jobs) == 1
            state = None if take_over and not last else self._states.take()
            if last or take_over:
                pages, copy = prompt.pages, None
            else:
                full = len(prompt.tokens) // self.page_size
                copies = full < len(prompt.pages)
                if state is None or (copies and not self._pool.available):
                    self._states.give_back(state or 0)
                    return False
                pages, copy = prompt.pages[:full], (prompt.pages[full], self._pool.take()) if copies else None
                self._pool.hold(pages)
                if copy is not None:
                    pages = [*pages, copy[1]]
            job = prompt.jobs.popleft()
            assert prompt.digests is not None
            job.pages, job.slot, job.length = pages, self._free_slots.pop(), len(prompt.tokens)
            job.digests, job.state = list(prompt.digests), prompt.state if state is None else state
            source = None if state is None or not self._states.size else (prompt.state, state)
            plan.starts.append(Start(job, job.slot, job.pages, prompt.place, job.drawn, copy, source))
            job.drawn += 1
            if last and source is not None:
                self._keep(prompt)
            if job.drawn == job.most:
                self._retire(job)
            else:
                self._running.append(job)
            if last or take_over:
                prompt.pages, prompt.state = [], 0
                self._release(prompt)
                if not last:
                    return False  # the other jobs' prompt is prefilled again
                self._forget(prompt)
        return True

    def _keep(self, prompt: Prompt) -> None:
        """Keep the state at the end of a prompt, from the next plan on. The completion that has the prompt's pages
        writes to them only after the prompt's tokens."""
        assert prompt.digests is not None
        kept = KeptState.of(prompt.tokens, prompt.digests, self.page_size, prompt.state)
        if kept.rest:
            self._pool.register(prompt.pages[-1], kept.digests[-1])
        self._kept.append(kept)

    def _reset(self, prompt: Prompt) -> None:
        """Discard a prompt's pages, state and hidden state, for use in the current plan."""
        self._pool.give_back(prompt.pages)
        self._states.give_back(prompt.state)
        if prompt.place >= 0:
            self._free_places.append(prompt.place)
        prompt.pages, prompt.done, prompt.place, prompt.state = [], 0, -1, 0

    def _release(self, prompt: Prompt) -> None:
        """Discard a prompt's pages, state and hidden state, for use from the next plan on."""
        self._released += prompt.pages
        self._released_states.append(prompt.state)
        if prompt.place >= 0:
            self._released_places.append(prompt.place)
        prompt.pages, prompt.done, prompt.place, prompt.state = [], 0, -1, 0

    def _forget(self, prompt: Prompt) -> None:
        self._queue.remove(prompt)
        if prompt.joinable:
            del self._waiting[prompt.tokens]
