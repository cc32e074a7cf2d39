"""Which rank samples what: every request once, equal shares, conversations where their past is, no rank idle."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from truestep.generate.engine.dispatch import Dispatch
from truestep.generate.generator import DrawOptions, Request


def request(length: int, new: int = 10, session: str | None = None, first: int = 0) -> Request:
    return Request(tuple(range(first, first + length)), DrawOptions(1.0, new, frozenset()), session=session)


@given(
    teams=st.integers(1, 4),
    room=st.integers(1, 5),
    seed=st.integers(0, 10**6),
    count=st.integers(1, 40),
    sessions=st.integers(0, 4),
)
@settings(max_examples=300, deadline=None)
def test_every_request_is_handed_over_once_and_no_team_waits_beside_waiting_requests(
    teams: int, room: int, seed: int, count: int, sessions: int
) -> None:
    draw = random.Random(seed)
    dispatch, twin = Dispatch(teams, room), Dispatch(teams, room)
    waiting, has, seen, cancelled = set(), [set() for _ in range(teams)], set(), set()
    key = 0
    while key < count or waiting or any(has):
        new = []
        for _ in range(draw.randint(0, 6) if key < count else 0):
            session = f"s{draw.randrange(sessions)}" if sessions and draw.random() < 0.5 else None
            new.append((key, request(draw.randint(1, 9), draw.randint(1, 20), session, draw.randint(0, 2))))
            waiting.add(key)
            key += 1
        for each in (dispatch, twin):
            each.add(new)
        handed = dispatch.hand_over()
        assert handed == twin.hand_over(), "all ranks decide alike"
        for team, name, _ in handed:
            assert name in waiting and name not in seen
            waiting.remove(name)
            seen.add(name)
            has[team].add(name)
        assert all(len(each) <= room for each in has)
        assert not waiting or all(len(each) == room for each in has)
        ended = [name for each in has for name in sorted(each) if draw.random() < 0.4]
        ended += [name for name in sorted(waiting) if draw.random() < 0.1]
        for name in ended:
            dispatch.ended(name)
            twin.ended(name)
            cancelled |= {name} & waiting
            waiting.discard(name)
            for each in has:
                each.discard(name)
    assert seen | cancelled == set(range(key)) and not seen & cancelled


def test_a_conversation_stays_with_its_team_and_equal_prompts_stay_together() -> None:
    dispatch = Dispatch(2, 64)
    dispatch.add([(number, request(20, session=f"c{number}", first=number)) for number in range(6)])
    first = {name: team for team, name, _ in dispatch.hand_over()}
    assert sorted(first.values()) == [0, 0, 0, 1, 1, 1]
    for number in range(6):
        dispatch.ended(number)
    dispatch.add([(10 + number, request(40, session=f"c{number}", first=number)) for number in reversed(range(6))])
    assert {name - 10: team for team, name, _ in dispatch.hand_over()} == first
    dispatch.add([(100 + number, request(20, first=100 * (number // 4))) for number in range(16)])
    groups = {}
    for team, name, _ in dispatch.hand_over():
        groups.setdefault((name - 100) // 4, set()).add(team)
    assert all(len(teams) == 1 for teams in groups.values())


def test_shares_are_equal_by_cost() -> None:
    dispatch = Dispatch(2, 1000)
    lengths = [500, 10, 10, 10, 470, 10, 10, 10]
    dispatch.add([(number, request(length, 1, first=number)) for number, length in enumerate(lengths)])
    costs = [0, 0]
    for team, _, each in dispatch.hand_over():
        costs[team] += len(each.token_ids)
    assert abs(costs[0] - costs[1]) <= 40
