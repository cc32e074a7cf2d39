"""Decides which rank samples which request. Every rank knows all requests and comes to the same decisions.

Each new request is assigned to a team of tensor ranks, so that all teams have about the same expected cost. It is
handed over when the team has room. A team without waiting requests takes one from the team with the most, so all teams
end at about the same time.
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
        """`room` is the number of requests that a team may have: those in flight, and some that wait for the next free
        row."""
        self._room = room
        self._waiting: list[deque[_Waiting]] = [deque() for _ in range(teams)]  # by the team to which they are assigned
        # The costs of the requests that each team has.
        self._handed: list[dict[Key, float]] = [{} for _ in range(teams)]
        self._sessions = StickyPlaces[int]()  # the team that has a conversation's past in its cache

    def add(self, requests: Sequence[tuple[Key, Request]]) -> None:
        """Add new requests. A request of a conversation goes to the team that has the conversation's past in its cache.
        Equal prompts stay together."""
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
        """Return the requests that teams get now, in order, each with its team: first those assigned to the team, then
        those that another team has no room for."""
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
