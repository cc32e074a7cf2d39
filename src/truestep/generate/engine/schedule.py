"""Decides what each step of the engine computes: host logic that knows neither a model nor a tensor.

A step computes pieces of prompts, starts completions whose prompts are computed, and decodes one token of every
completion that runs. Equal prompts are computed once: their completions share the pages that the prompt fills, and each
has a copy of the page that it only begins. A completion that finds no free page takes those of the one that started
last, which is computed again later, with the tokens that it has.

The device works a step or two behind, in order. So pages and slots may be given on as soon as the last step that uses
them is planned, and no earlier.
"""

from collections import deque
from dataclasses import dataclass, field

from truestep.errors import TruestepError


class CacheError(TruestepError):
    pass


@dataclass(eq=False)
class Job:
    """A completion."""

    number: int
    prompt: tuple[int, ...]
    most: int  # tokens
    tokens: list[int] = field(default_factory=list)  # those that the host has learned
    drawn: int = 0  # tokens that steps up to now draw
    slot: int = -1  # while it runs
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose keys and values are in its pages


@dataclass(eq=False)
class Prompt:
    """Tokens that are computed once for all jobs that begin with them."""

    tokens: tuple[int, ...]
    jobs: deque[Job]  # that wait for it
    pages: list[int] = field(default_factory=list)
    done: int = 0  # tokens computed
    place: int = -1  # of its last hidden state
    joinable: bool = False  # new jobs may join it

    @property
    def ready(self) -> bool:
        return self.done == len(self.tokens)


@dataclass(frozen=True)
class Piece:
    tokens: tuple[int, ...]  # of the piece alone
    start: int
    pages: tuple[int, ...]  # of the prompt up to the end of the piece
    place: int | None  # where its last hidden state is kept; None: its prompt goes on


@dataclass(frozen=True)
class Start:
    job: Job
    slot: int
    pages: list[int]  # as of a row
    place: int
    position: int  # of the token that is drawn, in the completion
    copy: tuple[int, int] | None  # a page that is copied, and its copy


@dataclass(frozen=True)
class Row:
    job: Job
    slot: int
    length: int  # with the token that is decoded
    position: int  # of the token that is drawn, in the completion
    pages: list[int]  # the job's own list: read it before the next plan


@dataclass
class Plan:
    pieces: list[Piece] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.pieces or self.starts or self.rows)


class Schedule:
    def __init__(
        self, *, pages: int, page_size: int, slots: int, piece_tokens: int, together: int = 1, prompts_first: int = 0
    ):
        """Prompts join what runs as soon as `together` completions can, all that wait can, or nothing runs: a step
        that computes prompts has a cost of its own, whatever their number. For the same reason what runs waits for up
        to `prompts_first` such steps, one after another: a token of a few rows takes nearly as long as one of many."""
        self.page_size, self.pages, self.slots = page_size, pages, slots
        self._piece_tokens, self._together, self._prompts_first = piece_tokens, together, prompts_first
        self._waited = 0  # steps, one after another, that decoded no row
        self._joining = False  # from when they can join until nobody waits or no slot is free
        self._free_pages = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._free_slots = list(range(slots - 1, -1, -1))
        self._free_places = list(range(slots - 1, -1, -1))
        self._jobs: dict[int, Job] = {}  # not ended
        self._running: list[Job] = []  # in the order in which they started
        self._queue: deque[Prompt] = deque()
        self._waiting: dict[tuple[int, ...], Prompt] = {}  # those of the queue that new jobs may join
        self._unlearned: list[Job] = []  # pre-empted, the last of their tokens still on the device
        self._released: list[int] = []  # pages that the last plan still reads
        self._released_slots: list[int] = []
        self._released_places: list[int] = []
        self.prompt_tokens = 0  # computed so far
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not self._jobs

    @property
    def used_pages(self) -> int:
        return self.pages - len(self._free_pages)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, number: int, prompt: tuple[int, ...], most: int) -> None:
        if not prompt:
            raise CacheError("a prompt has no tokens: nothing predicts its first one")
        length = len(prompt) + most - 1  # nothing reads the last token's keys and values
        if self._pages_for(length) > self.pages:
            raise CacheError(
                f"a prompt of {len(prompt)} tokens with {most} new ones is longer than the sampler's cache, which "
                f"holds {self.pages * self.page_size} tokens: lower max_new_tokens, leave out long prompts or free "
                "memory"
            )
        job = self._jobs[number] = Job(number, prompt, most)
        # One look: to hash a long prompt takes longer than all else here.
        new = Prompt(prompt, deque(), joinable=True)
        found = self._waiting.setdefault(prompt, new)
        if found is new:
            self._queue.append(new)
        found.jobs.append(job)

    def learned(self, number: int, token: int) -> bool:
        """Take a token that was drawn. Return False where its completion had ended before: it is no part of it."""
        job = self._jobs.get(number)
        if job is None:
            return False
        job.tokens.append(token)
        if len(job.tokens) == job.most:
            self.end(number)
        elif job in self._unlearned and len(job.tokens) == job.drawn:
            self._unlearned.remove(job)
            self._queue.appendleft(Prompt((*job.prompt, *job.tokens), deque([job])))
        return True

    def end(self, number: int) -> None:
        """Forget a completion: it is complete or nobody wants it."""
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if job.slot >= 0:
            self._running.remove(job)
            self._retire(job)
        elif job in self._unlearned:
            self._unlearned.remove(job)
        elif job.drawn < job.most:  # it waits: what has been planned to its end does not
            for prompt in self._queue:
                if job in prompt.jobs:
                    prompt.jobs.remove(job)
                    if not prompt.jobs:
                        self._release(prompt)
                        self._forget(prompt)
                    break

    def plan(self) -> Plan:
        """Plan the next step. An empty plan: nothing can be done until more tokens are learned."""
        plan = Plan()
        self._free_slots += self._released_slots
        self._free_places += self._released_places
        self._released_slots, self._released_places = [], []
        self._give_back(self._released)
        self._released = []
        if self._waited < self._prompts_first:
            self._plan_prompts(plan)
            if plan:
                self._waited += 1
                return plan
        self._waited = 0
        self._plan_rows(plan)
        self._plan_prompts(plan)
        while not plan and self._queue and not self._running and not self._unlearned:
            # Prompts that wait have all of the memory: the first one gets it.
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

    def _plan_rows(self, plan: Plan) -> None:
        for job in list(self._running):
            if job.slot < 0:
                continue  # it was pre-empted for one that started earlier
            if len(job.pages) * self.page_size == job.length:
                page = self._take_page_for(job)
                if page is None:
                    continue
                job.pages.append(page)
            job.length += 1
            plan.rows.append(Row(job, job.slot, job.length, job.drawn, job.pages))
            job.drawn += 1
        for row in plan.rows:
            if row.job.drawn == row.job.most:
                self._running.remove(row.job)
                self._retire(row.job)

    def _take_page_for(self, job: Job) -> int | None:
        """Take a page, if need be from a prompt that waits or the completion that started last; None: it was that."""
        while not self._free_pages:
            holder = next((prompt for prompt in reversed(self._queue) if prompt.pages), None)
            if holder is not None:
                self._reset(holder)
                continue
            last = self._running[-1]
            self._preempt(last)
            if last is job:
                return None
        return self._take_page()

    def _take_page(self) -> int:
        page = self._free_pages.pop()
        self._references[page] = 1
        return page

    def _give_back(self, pages: list[int]) -> None:
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free_pages.append(page)

    def _retire(self, job: Job) -> None:
        """Take a job's slot and pages, for plans after the one that is being made."""
        self._released += job.pages
        self._released_slots.append(job.slot)
        job.pages, job.slot = [], -1

    def _preempt(self, job: Job) -> None:
        self.preemptions += 1
        self._running.remove(job)
        self._give_back(job.pages)
        self._free_slots.append(job.slot)
        job.pages, job.slot, job.length = [], -1, 0
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
        return len(self._free_slots) >= min(waiting, self._together)

    def _plan_prompts(self, plan: Plan) -> None:
        if self._may_join():
            self._plan_joins(plan)
            self._joining = bool(self._queue and self._free_slots)

    def _plan_joins(self, plan: Plan) -> None:
        budget = self._piece_tokens
        room = len(self._free_slots)
        for prompt in list(self._queue):
            if room <= 0:
                return
            if not prompt.ready:
                budget = self._plan_piece(plan, prompt, budget)
            if not prompt.ready:
                return  # in order: those behind wait
            waiting = len(prompt.jobs)
            if not self._start(plan, prompt):
                return
            room -= waiting

    def _plan_piece(self, plan: Plan, prompt: Prompt, budget: int) -> int:
        """Plan as much of a prompt as memory and the step have room for; give what is left of the step's tokens."""
        left = len(prompt.tokens) - prompt.done
        count = min(left, budget)
        if count < left <= self._piece_tokens and budget < self._piece_tokens:
            return 0  # it fits the next step whole
        end = prompt.done + count
        needed = self._pages_for(end) - len(prompt.pages)
        # What runs will need pages soon: to take them away again would be work for nothing.
        reserve = min(len(self._running), self.pages // 16)
        if count == 0 or len(self._free_pages) < needed + reserve:
            return 0
        if end == len(prompt.tokens):
            if not self._free_places:
                return 0
            prompt.place = self._free_places.pop()
        prompt.pages += [self._take_page() for _ in range(needed)]
        place = prompt.place if prompt.place >= 0 else None
        plan.pieces.append(Piece(prompt.tokens[prompt.done : end], prompt.done, tuple(prompt.pages), place))
        prompt.done = end
        self.prompt_tokens += count
        return budget - count

    def _start(self, plan: Plan, prompt: Prompt, take_over: bool = False) -> bool:
        """Start the jobs of a computed prompt; return False where some have no slot or page yet."""
        while prompt.jobs:
            if not prompt.ready or not self._free_slots:
                return False
            last = len(prompt.jobs) == 1
            if last or take_over:
                pages, copy = prompt.pages, None
            else:
                full = len(prompt.tokens) // self.page_size
                pages = prompt.pages[:full]
                copy = None
                if full < len(prompt.pages):
                    if not self._free_pages:
                        return False
                    copy = (prompt.pages[full], self._take_page())
                for page in pages:
                    self._references[page] += 1
                if copy is not None:
                    pages = [*pages, copy[1]]
            job = prompt.jobs.popleft()
            job.pages, job.slot, job.length = pages, self._free_slots.pop(), len(prompt.tokens)
            plan.starts.append(Start(job, job.slot, job.pages, prompt.place, job.drawn, copy))
            job.drawn += 1
            if job.drawn == job.most:
                self._retire(job)
            else:
                self._running.append(job)
            if last or take_over:
                prompt.pages = []
                self._release(prompt)
                if not last:
                    return False  # the others begin anew
                self._forget(prompt)
        return True

    def _reset(self, prompt: Prompt) -> None:
        """Take away what was computed of a prompt, for use in this plan."""
        self._give_back(prompt.pages)
        if prompt.place >= 0:
            self._free_places.append(prompt.place)
        prompt.pages, prompt.done, prompt.place = [], 0, -1

    def _release(self, prompt: Prompt) -> None:
        """Take away what was computed of a prompt, for plans after the one that is being made."""
        self._released += prompt.pages
        if prompt.place >= 0:
            self._released_places.append(prompt.place)
        prompt.pages, prompt.done, prompt.place = [], 0, -1

    def _forget(self, prompt: Prompt) -> None:
        self._queue.remove(prompt)
        if prompt.joinable:
            del self._waiting[prompt.tokens]
