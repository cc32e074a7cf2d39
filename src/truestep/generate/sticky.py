"""Remembers which place has a conversation's past in its cache: a team of ranks, or a server."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

_MOST = 65_536  # conversations that are remembered


class StickyPlaces(Generic[T]):
    """Remembers the place of each conversation. If there are too many, the least recently used one is forgotten."""

    def __init__(self) -> None:
        self._places: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, session: str) -> bool:
        return session in self._places

    def of(self, session: str | None) -> T | None:
        return None if session is None else self._places.get(session)

    def remember(self, session: str | None, place: T) -> None:
        if session is None:
            return
        self._places[session] = place
        self._places.move_to_end(session)
        if len(self._places) > _MOST:
            self._places.popitem(last=False)
