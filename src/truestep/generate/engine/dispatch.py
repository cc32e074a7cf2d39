"""Decides which rank samples which request. Every rank knows all requests and comes to the same decisions.

A request is meant for one team of tensor ranks from the start, by the expected cost of all. It is handed over when the
team has room. A team that has nothing left takes what was meant for the one with most left, so all teams end together.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from truestep.generate.generator import Request
from truestep.generate.sticky import StickyPlaces
from truestep.ranks.group import divide

Key = int  # names a request; all ranks use the same names


@dataclass(frozen=True)
class _Waiting:
    key: Key
    request: Request

    @property
    def cost(self) -> float:
        return self.request.most_tokens


class Dispatch:
    def __init__(self, teams: int, room: int):
        """`room`: requests that a team may have: those in flight, and some that wait for the next free row."""
        self._room = room
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(teams)]  # by the team that they are meant for
        self._handed: list[dict[Key, float]] = [{} for _ in range(teams)]  # costs of what each team has
        self._sessions = StickyPlaces[int]()  # the team that has a conversation's past

    def add(self, requests: Sequence[tuple[Key, Request]]) -> None:
        """Add new requests. Those of a conversation go where its past is; equal prompts stay together."""
        new: list[_Waiting] = []
        for key, request in requests:
            one, team = _Waiting(key, request), 0 if len(self._waiting) == 1 else self._sessions.of(request.session)
            if team is None:
                new.append(one)
            else:
                self._waiting[team].append(one)
        if not new:
            return
        shares = divide([one.cost for one in new], len(self._waiting), [one.request.token_ids for one in new])
        costs = [sum(new[index].cost for index in share) for share in shares]
        left = [self._left(team) for team in range(len(shares))]
        # The largest share goes to the team that has least to do.
        by_cost = sorted(range(len(shares)), key=lambda share: (-costs[share], share))
        by_load = sorted(range(len(shares)), key=lambda team: (left[team], team))
        for share, team in zip(by_cost, by_load, strict=True):
            for index in shares[share]:
                self._waiting[team].append(new[index])
                self._sessions.remember(new[index].request.session, team)

    def _left(self, team: int) -> float:
        return sum(one.cost for one in self._waiting[team]) + sum(self._handed[team].values())

    def ended(self, key: Key) -> None:
        """Forget a request that ended or was cancelled."""
        if any(handed.pop(key, None) is not None for handed in self._handed):
            return
        for team, waiting in enumerate(self._waiting):
            if any(one.key == key for one in waiting):
                self._waiting[team] = deque(one for one in waiting if one.key != key)

    def hand_over(self) -> list[tuple[int, Key, Request]]:
        """Return the requests that teams get now, in order, each with its team: first those meant for them, then those
        for which another team has no room."""
        handed: list[tuple[int, Key, Request]] = []
        for steals in (False, True):
            for team in range(len(self._waiting)):
                while len(self._handed[team]) < self._room and (one := self._next(team, steals)) is not None:
                    self._handed[team][one.key] = one.cost
                    self._sessions.remember(one.request.session, team)
                    handed.append((team, one.key, one.request))
        return handed

    def _next(self, team: int, steals: bool) -> _Waiting | None:
        if self._waiting[team]:
            return self._waiting[team].popleft()
        most = max(self._waiting, key=len)
        return most.pop() if steals and most else None
