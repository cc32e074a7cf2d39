"""The engine's scheduler: whatever is submitted, cancelled and drawn, every completion gets its tokens, and no page is
read or written by two that should not share it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.generate.engine.schedule import CacheError, Scheduler
from truestep.generate.engine.steps import EngineStep

PAGE = 4


@dataclass
class Device:
    """Does what plans say on pages of tokens, in order; tells the host of draws `lag` steps late. What it computes
    depends on the weights, and its memory keeps what it computed with older ones."""

    scheduler: Scheduler
    lag: int
    pages: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # a token, and all before it
    places: dict[int, tuple[int, ...]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=dict)  # the weights, and the tokens behind which each is
    recurs: bool = False
    flying: deque[list[tuple[int, int]]] = field(default_factory=deque)
    drawn: dict[int, list[int]] = field(default_factory=dict)
    most_rows: int = 0
    ends_at: dict[int, int] = field(default_factory=dict)  # tokens after which a stop token comes
    weights: int = 0

    def renew(self, scheduler: Scheduler) -> None:
        """Go on with new weights in another phase. What is in flight is dropped."""
        self.scheduler, self.weights = scheduler, self.weights + 1
        self.flying.clear()
        self.drawn.clear()

    def read(self, pages: list[int] | tuple[int, ...], length: int) -> tuple[int, ...]:
        seen, before = [], self.weights
        for at in range(length):
            token, context = self.pages[pages[at // PAGE], at % PAGE]
            assert context == before, "keys and values depend on all tokens before, and on the weights"
            seen.append(token)
            before = hash((before, token))
        return tuple(seen)

    def write(self, pages: list[int] | tuple[int, ...], at: int, token: int) -> None:
        before = self.weights
        if at:
            before = hash(self.pages[pages[(at - 1) // PAGE], (at - 1) % PAGE][::-1])
        self.pages[pages[at // PAGE], at % PAGE] = token, before

    def copy(self, pair: tuple[int, int] | None) -> None:
        if pair is not None:
            for at in range(PAGE):
                if (pair[0], at) in self.pages:
                    self.pages[pair[1], at] = self.pages[pair[0], at]

    def copy_states(self, pairs: Sequence[tuple[int, int] | None]) -> None:
        """All are read before any is written."""
        there = [pair for pair in pairs if pair is not None]
        assert self.recurs or not there
        assert len({target for _, target in there}) == len(there) and 0 not in {slot for pair in there for slot in pair}
        self.states |= {target: self.states[source] for source, target in there}

    def advance(self, slot: int, start: int, tokens: tuple[int, ...]) -> None:
        """Let a state take in tokens. It must be the one behind the tokens before them."""
        assert (slot > 0) == self.recurs
        if self.recurs:
            before = self.states[slot] if start else (self.weights,)
            assert len(before) == start + 1 and before[0] == self.weights
            self.states[slot] = (*before, *tokens)

    def run(self, plan: EngineStep) -> None:
        draws = []
        for resumed in plan.resumed:
            self.copy(resumed.page)
        self.copy_states([resumed.state for resumed in plan.resumed])
        for chunk in plan.chunks:
            self.advance(chunk.state, chunk.start, chunk.tokens)
            for at, token in enumerate(chunk.tokens, chunk.start):
                self.write(chunk.pages, at, token)
            if chunk.place is not None:
                self.places[chunk.place] = self.read(chunk.pages, chunk.start + len(chunk.tokens))
        for start in plan.starts:
            self.copy(start.copy)
        self.copy_states([start.state for start in plan.starts])
        for start in plan.starts:
            draws.append((start.job, self.places[start.place], start.position))
        for row in plan.rows:
            self.write(row.pages, row.length - 1, self.slots[row.slot])
            self.advance(row.state, row.length - 1, (self.slots[row.slot],))
        assert len({row.state for row in plan.rows}) == len(plan.rows) or not self.recurs
        for row in plan.rows:
            draws.append((row.job, self.read(row.pages, row.length), row.position))
            assert not self.recurs or self.states[row.state] == (self.weights, *draws[-1][1])
        slots = [start.job.slot for start in plan.starts] + [row.slot for row in plan.rows]
        out = []
        for (job, seen, position), slot in zip(draws, slots, strict=True):
            assert seen[: len(job.prompt)] == job.prompt
            assert len(seen) == len(job.prompt) + position
            token = draw(job.number, seen, self.weights)
            self.slots[slot] = token
            out.append((job.number, token))
        self.flying.append(out)
        self.most_rows = max(self.most_rows, len(plan.rows))
        while len(self.flying) > self.lag:
            self.learn()

    def learn(self) -> None:
        for number, token in self.flying.popleft():
            if self.scheduler.learned(number, token):
                tokens = self.drawn.setdefault(number, [])
                tokens.append(token)
                if len(tokens) == self.ends_at.get(number):
                    self.scheduler.end(number)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        if plan:
            self.run(plan)
        elif self.flying:
            self.learn()
        else:
            return False
        return True


def draw(number: int, seen: tuple[int, ...], weights: int) -> int:
    """A token that tells who drew it, after what, and with which weights."""
    return hash((weights, number, *seen)) % 1000003


def expected(number: int, prompt: tuple[int, ...], most: int, weights: int = 0) -> list[int]:
    seen = prompt
    for _ in range(most):
        seen = (*seen, draw(number, seen, weights))
    return list(seen[len(prompt) :])


def all_states_are_back(scheduler: Scheduler) -> bool:
    """Take every slot of states, which no sequence may have any more."""
    slots = scheduler._states
    return all(slots.take() for _ in range(slots.size))


# How many states there are beyond one for each row; None: the model keeps none.
STATES = st.one_of(st.none(), st.integers(1, 8))


def count_of(states: int | None, slots: int) -> int:
    return 0 if states is None else slots + states


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
JOBS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 12), st.integers(1, 15), st.integers(0, 6), st.sampled_from([None, 1, 4, 9])),
    min_size=1,
    max_size=12,
)


@given(
    jobs=JOBS,
    pages=st.integers(7, 24),
    slots=st.integers(1, 6),
    chunk=st.integers(1, 20),
    lag=st.integers(0, 2),
    together=st.integers(1, 6),
    prompts_first=st.integers(0, 3),
    patience=st.integers(0, 3),
    states=STATES,
)
@settings(max_examples=300, deadline=None)
def test_every_completion_is_what_it_would_be_alone(
    jobs: list[tuple[tuple[int, ...], int, int, int, int | None]],
    pages: int,
    slots: int,
    chunk: int,
    lag: int,
    together: int,
    prompts_first: int,
    patience: int,
    states: int | None,
) -> None:
    """Each job: its prompt, its length, where a stop token comes, how many steps later it is submitted than the one
    before, and the steps after which it is cancelled."""
    how = {"chunk_tokens": chunk, "together": min(slots, together)}
    how |= {"prompts_first": prompts_first, "patience": patience}
    scheduler = Scheduler(pages=pages, page_size=PAGE, slots=slots, states=count_of(states, slots), **how)
    device = Device(scheduler, lag, recurs=states is not None)
    cancelled: dict[int, int] = {}
    clock = 0

    def tick() -> bool:
        nonlocal clock
        clock += 1
        for number in [number for number, at in cancelled.items() if at == clock]:
            scheduler.end(number)
        return device.step()

    for number, (prompt, most, ends, later, cancel) in enumerate(jobs):
        for _ in range(later):
            tick()
        scheduler.submit(number, prompt, most)
        device.ends_at[number] = ends
        if cancel is not None:
            cancelled[number] = clock + cancel
    for _ in range(5000):
        if scheduler.idle and not device.flying:
            break
        assert tick() or scheduler.idle, "the scheduler is stuck"
    assert scheduler.idle
    for number, (prompt, most, ends, _, _) in enumerate(jobs):
        wanted = expected(number, prompt, min(most, ends))
        drawn = device.drawn.get(number, [])
        assert drawn == wanted[: len(drawn)]
        if number not in cancelled:
            assert drawn == wanted
    assert not scheduler.plan()
    assert scheduler.used_pages == 0 and all_states_are_back(scheduler)
    assert device.most_rows <= slots


def run_all(scheduler: Scheduler, lag: int = 1) -> Device:
    device = Device(scheduler, lag)
    while device.step():
        pass
    return device


def test_a_groups_prompt_is_computed_once() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=8, chunk_tokens=64)
    prompt = tuple(range(10))
    for number in range(8):
        scheduler.submit(number, prompt, 5)
    device = run_all(scheduler)
    assert scheduler.prompt_tokens == len(prompt)
    assert device.drawn == {number: expected(number, prompt, 5) for number in range(8)}


def test_members_of_a_group_that_start_later_share_its_prompt_too() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=2, chunk_tokens=64)
    for number in range(8):
        scheduler.submit(number, tuple(range(10)), 5)
    assert len(run_all(scheduler).drawn) == 8
    assert scheduler.prompt_tokens == 10


def test_the_batch_stays_full_while_others_wait() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=4, chunk_tokens=64)
    lengths = [3, 9, 5, 7, 12, 4, 8, 6]
    for number, most in enumerate(lengths):
        scheduler.submit(number, (number,), most)
    rows = []
    device = Device(scheduler, 1)
    while plan := scheduler.plan():
        rows.append(len(plan.rows))
        device.run(plan)
    # All but the first token of each come from rows.
    assert sum(rows) == sum(lengths) - len(lengths)
    assert len(rows) <= -(-sum(lengths) // 4) + max(lengths)


def test_completions_join_together() -> None:
    """Sixteen that end one after another, and as many that wait: no step computes fewer than four prompts, and what
    is left at the end joins at once."""
    scheduler = Scheduler(pages=200, page_size=PAGE, slots=16, chunk_tokens=64, together=4)
    for number in range(33):
        scheduler.submit(number, (number,), 5 + number % 16)
    device = Device(scheduler, 1)
    joined = []
    while plan := scheduler.plan():
        joined.append(len(plan.starts))
        device.run(plan)
    first, *later = [count for count in joined if count]
    assert first == 16
    assert sum(later) == 17
    assert all(count >= 4 for count in later[:-1])
    assert later[-1] == 1


def test_what_runs_waits_for_some_steps_that_compute_prompts() -> None:
    """And no longer: after four prompts, one a step, a token of each that runs is decoded beside the fifth."""
    scheduler = Scheduler(pages=200, page_size=PAGE, slots=16, chunk_tokens=4, prompts_first=4)
    for number in range(9):
        scheduler.submit(number, (number, 1, 2, 3), 9)
    device = Device(scheduler, 1)
    seen = []
    for _ in range(12):
        plan = scheduler.plan()
        seen.append((len(plan.chunks), len(plan.rows)))
        device.run(plan)
    assert seen == [(1, 0)] * 4 + [(1, 4)] + [(1, 0)] * 4 + [(0, 9)] * 3


def test_one_that_comes_alone_joins_at_once() -> None:
    scheduler = Scheduler(pages=200, page_size=PAGE, slots=16, chunk_tokens=64, together=8)
    scheduler.submit(0, (1, 2), 9)
    device = Device(scheduler, 1)
    device.run(scheduler.plan())
    scheduler.submit(1, (3, 4), 9)
    assert [start.job.number for start in scheduler.plan().starts] == [1]


def test_a_full_cache_preempts_and_loses_nothing() -> None:
    scheduler = Scheduler(pages=9, page_size=PAGE, slots=6, chunk_tokens=64)
    for number in range(6):
        scheduler.submit(number, (number,) * 5, 20)
    device = run_all(scheduler)
    assert scheduler.preemptions > 0
    assert device.drawn == {number: expected(number, (number,) * 5, 20) for number in range(6)}


def test_a_prompt_longer_than_the_cache_is_refused_by_name() -> None:
    scheduler = Scheduler(pages=4, page_size=PAGE, slots=2, chunk_tokens=64)
    with pytest.raises(CacheError, match="prompt of 30 tokens with 2 new ones .* holds 16 tokens"):
        scheduler.submit(0, (1,) * 30, 2)
    with pytest.raises(CacheError, match="no tokens"):
        scheduler.submit(0, (), 2)
    scheduler.submit(1, (1,) * 10, 7)
    assert run_all(scheduler).drawn[1] == expected(1, (1,) * 10, 7)


def test_long_prompts_come_in_chunks_between_decoding_steps() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=4, chunk_tokens=8)
    scheduler.submit(0, (1, 2), 12)
    device = Device(scheduler, 1)
    device.run(scheduler.plan())
    scheduler.submit(1, tuple(range(30)), 2)
    mixed = 0
    while plan := scheduler.plan():
        mixed += bool(plan.chunks and plan.rows)
        assert sum(len(chunk.tokens) for chunk in plan.chunks) <= 8
        device.run(plan)
    assert mixed == 4


@dataclass
class Talk:
    """A conversation: each turn's prompt is all that was said, and some tokens of others."""

    prompt: tuple[int, ...]
    turns: list[tuple[int, tuple[int, ...], int]]  # most new tokens, what others say then, steps until the next turn
    cancelled: tuple[int, int] | None  # the turn that is cancelled, after so many steps; the conversation then ends


TALKS = st.lists(
    st.builds(
        Talk,
        PROMPTS,
        st.lists(
            st.tuples(st.integers(1, 9), st.lists(st.integers(0, 2), max_size=5).map(tuple), st.integers(0, 4)),
            min_size=1,
            max_size=4,
        ),
        st.one_of(st.none(), st.tuples(st.integers(0, 1), st.integers(0, 12))),
    ),
    min_size=1,
    max_size=6,
)


def check_talks(
    talks: list[Talk],
    pages: int,
    slots: int,
    chunk: int,
    lag: int,
    patience: int,
    states: int | None,
    changes: set[int],
) -> None:
    """Every turn draws what it draws alone, behind the tokens that the turns before have drawn, whatever the cache
    keeps, evicts or shares; a page is read by nobody whose tokens it does not hold, or after the weights that it was
    computed with; nothing is left over. `changes`: the steps before which new weights come. As in a phase that is
    stopped, what is in flight then is dropped. Here it is asked again."""
    how = {"chunk_tokens": chunk, "together": min(2, slots), "patience": patience}

    def scheduler() -> Scheduler:
        return Scheduler(pages=pages, page_size=PAGE, slots=slots, states=count_of(states, slots), **how)

    device = Device(scheduler(), lag, recurs=states is not None)
    course = Course(talks, device, pages)
    for clock in range(1, 5000):
        if clock in changes:
            device.renew(scheduler())
            course.flying.clear()
        course.ask(clock)
        device.step()
        course.look(clock)
        if not course.left:
            break
    assert not course.left, "the scheduler is stuck"
    while device.flying:
        device.learn()
    device.scheduler.plan()
    assert device.scheduler.idle
    assert device.scheduler.used_pages == 0 and all_states_are_back(device.scheduler)


class Course:
    """Conversations as they go on."""

    def __init__(self, talks: list[Talk], device: Device, pages: int):
        self._talks, self._device, self._pages = talks, device, pages
        self._said = [talk.prompt for talk in talks]
        self._turn, self._due = [0] * len(talks), [0] * len(talks)
        self.flying: dict[int, tuple[int, int]] = {}  # of each request: its conversation, the step that cancels it or 0
        self._number = 0
        self.left = set(range(len(talks)))

    def ask(self, clock: int) -> None:
        """Submit each conversation's next turn that is due, and cancel what is to be cancelled now."""
        talking = {at for at, _ in self.flying.values()}
        for at in sorted(self.left - talking):
            talk, turn = self._talks[at], self._turn[at]
            most = talk.turns[turn][0]
            if self._due[at] > clock:
                continue
            if -(-(len(self._said[at]) + most - 1) // PAGE) > self._pages:
                self.left.discard(at)  # it has become longer than the cache
                continue
            self._device.scheduler.submit(self._number, self._said[at], most)
            cancels = talk.cancelled is not None and talk.cancelled[0] == turn
            self.flying[self._number] = at, clock + talk.cancelled[1] if talk.cancelled and cancels else 0
            self._number += 1
        for number, (at, cancel) in list(self.flying.items()):
            if cancel and cancel <= clock:
                self._device.scheduler.end(number)
                self.left.discard(at)
                del self.flying[number]

    def look(self, clock: int) -> None:
        """Compare what was drawn, and go on with the conversations whose turn has ended."""
        for number, (at, _) in list(self.flying.items()):
            most, others, later = self._talks[at].turns[self._turn[at]]
            drawn = self._device.drawn.get(number, [])
            assert drawn == expected(number, self._said[at], most, self._device.weights)[: len(drawn)]
            if len(drawn) == most:
                self._said[at] = (*self._said[at], *drawn, *others)
                self._turn[at], self._due[at] = self._turn[at] + 1, clock + later
                if self._turn[at] == len(self._talks[at].turns):
                    self.left.discard(at)
                del self.flying[number]


TALKED = {
    "talks": TALKS,
    "pages": st.integers(7, 30),
    "slots": st.integers(1, 5),
    "chunk": st.integers(1, 20),
    "lag": st.integers(0, 2),
    "patience": st.integers(0, 3),
    "states": STATES,
    "changes": st.sets(st.integers(2, 40), max_size=3),
}


@given(**TALKED)
@settings(max_examples=150, deadline=None)
def test_every_turn_of_a_conversation_is_what_it_would_be_alone(**how: Any) -> None:
    check_talks(**how)


@pytest.mark.release
@given(**TALKED)
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_courses_of_conversations(**how: Any) -> None:
    check_talks(**how)


def test_the_next_turn_computes_only_what_is_new() -> None:
    """Up to a page: what was drawn last has no keys yet, and a page that is partly filled is not shared."""
    scheduler = Scheduler(pages=400, page_size=PAGE, slots=8, chunk_tokens=64)
    device = Device(scheduler, 1)
    ids = tuple(range(100))
    computed = []
    for turn in range(8):
        before = scheduler.prompt_tokens
        scheduler.submit(turn, ids, 20)
        while device.step():
            pass
        computed.append(scheduler.prompt_tokens - before)
        ids = (*ids, *device.drawn[turn], 1, 2, 3)
    assert computed[0] == 100
    assert all(3 < each <= 3 + 2 * PAGE for each in computed[1:])
    assert scheduler.cached_tokens > 7 * 96


def test_the_oldest_pages_are_evicted_first_and_the_end_before_the_beginning() -> None:
    scheduler = Scheduler(pages=12, page_size=PAGE, slots=1, chunk_tokens=64)
    device = Device(scheduler, 0)

    def computed(number: int, prompt: tuple[int, ...]) -> int:
        before = scheduler.prompt_tokens
        scheduler.submit(number, prompt, 1)
        while device.step():
            pass
        return scheduler.prompt_tokens - before

    first, second = tuple(range(20)), tuple(range(50, 70))
    assert [computed(0, first), computed(1, second), computed(2, first)] == [20, 20, 4]
    computed(3, tuple(range(80, 100)))  # takes the pages of the second, from its end
    assert computed(4, first) == 4
    assert 4 < computed(5, second) <= 20


def test_a_page_is_found_only_behind_the_same_tokens() -> None:
    """Its own tokens may be equal where others stand before them: its keys and values are not."""
    scheduler = Scheduler(pages=40, page_size=PAGE, slots=1, chunk_tokens=64)
    device = Device(scheduler, 0)
    for number, prompt in enumerate(((1, 1, 1, 1, 7, 7, 7, 7, 2), (3, 3, 3, 3, 7, 7, 7, 7, 2), (7, 7, 7, 7, 7))):
        scheduler.submit(number, prompt, 3)
        while device.step():
            pass
        assert device.drawn[number] == expected(number, prompt, 3)
    assert scheduler.cached_tokens == 0


def computed_of(device: Device, number: int, prompt: tuple[int, ...], most: int) -> int:
    """Complete a prompt and return how many of its tokens were computed."""
    before = device.scheduler.prompt_tokens
    device.scheduler.submit(number, prompt, most)
    while device.step():
        pass
    assert device.drawn[number] == expected(number, prompt, most)
    return device.scheduler.prompt_tokens - before


def test_the_next_turn_starts_from_the_state_behind_the_last_prompt() -> None:
    """What is computed again are the tokens drawn since, wherever in a page the prompts end."""
    device = Device(Scheduler(pages=400, page_size=PAGE, slots=2, chunk_tokens=64, states=4), 2, recurs=True)
    ids = tuple(range(100))
    for turn in range(9):
        assert computed_of(device, turn, ids, 5 + turn) == (100 if turn == 0 else 5 + turn - 1 + 3)
        ids = (*ids, *device.drawn[turn], 1, 2, 3)


def test_the_state_that_was_kept_first_is_dropped_first() -> None:
    device = Device(Scheduler(pages=400, page_size=PAGE, slots=1, chunk_tokens=64, states=4), 0, recurs=True)
    prompts = [(number,) * 10 for number in range(4)]
    for number, prompt in enumerate(prompts):
        assert computed_of(device, number, prompt, 3) == 10
    # A prompt that is computed needs a slot, and so does its completion: two of the last four are kept.
    assert computed_of(device, 4, (*prompts[3], 7), 3) == 1
    assert computed_of(device, 5, (*prompts[0], 7), 3) == 11


def test_a_state_without_its_pages_is_of_no_use() -> None:
    device = Device(Scheduler(pages=8, page_size=PAGE, slots=1, chunk_tokens=64, states=6), 0, recurs=True)
    first, second = tuple(range(15)), tuple(range(50, 79))
    assert [computed_of(device, 0, first, 1), computed_of(device, 1, second, 1)] == [15, 29]
    assert computed_of(device, 2, (*first, 3), 1) == 16
    assert computed_of(device, 3, (*first, 3, 4), 1) == 1, "the state of this one was kept with its pages"


def test_members_of_a_group_begin_with_copies_of_one_state() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=3, chunk_tokens=4, states=4)
    for number in range(8):
        scheduler.submit(number, tuple(range(10)), 5)
    device = Device(scheduler, 1, recurs=True)
    while device.step():
        pass
    assert all_states_are_back(scheduler)
    assert scheduler.prompt_tokens == 10
    assert device.drawn == {number: expected(number, tuple(range(10)), 5) for number in range(8)}


def test_a_state_is_read_after_the_step_that_computes_it_and_not_in_it() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=4, chunk_tokens=64, states=6)
    for number in range(2):
        scheduler.submit(number, (1, 2, 3, 4, 5)[: 4 + number], 3)
    plan = scheduler.plan()
    assert len(plan.chunks) == 2 and not plan.resumed
    device = Device(scheduler, 1, recurs=True)
    device.run(plan)
    scheduler.submit(2, (1, 2, 3, 4, 5, 6), 3)
    plan = scheduler.plan()
    assert len(plan.resumed) == 1
    device.run(plan)
    while device.step():
        pass
    assert device.drawn[2] == expected(2, (1, 2, 3, 4, 5, 6), 3)


def test_a_state_is_free_after_the_last_step_that_reads_it() -> None:
    scheduler = Scheduler(pages=100, page_size=PAGE, slots=2, chunk_tokens=64, states=3)
    scheduler.submit(0, (1, 2), 2)
    device = Device(scheduler, 1, recurs=True)
    device.run(scheduler.plan())
    scheduler.submit(1, (5, 6), 2)
    plan = scheduler.plan()
    assert len(plan.rows) == len(plan.chunks) == 1
    assert plan.rows[0].state not in (plan.chunks[0].state, plan.starts[0].job.state)
