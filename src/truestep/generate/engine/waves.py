"""Lets requests begin in waves, if the run is `deterministic`.

Which requests are computed together changes how sums are rounded. So the requests of one wave must not depend on when a
reward or a tool answered: a wave begins when nothing is in flight and all parts of the work of all ranks (`parts`) wait
for a completion or are done. Every rank makes the same waves from the same rounds.
"""

from truestep.generate.engine.dispatch import Key
from truestep.generate.generator import Request


class Waves:
    def __init__(self, ranks: int) -> None:
        # Requests that wait for the next wave, each with the place of its part.
        self._held: list[tuple[tuple[int, ...], Key, Request]] = []
        self._in_flight: set[Key] = set()
        self.num_ended = 0  # requests that ended or were cancelled
        self._settled = [-1] * ranks

    def ask(self, place: tuple[int, ...], key: Key, request: Request) -> None:
        self._held.append((place, key, request))

    def ended(self, key: Key) -> None:
        self._in_flight.discard(key)
        self._held = [held for held in self._held if held[1] != key]
        self.num_ended += 1

    def settled(self, rank: int, num_ended: int) -> None:
        """Note that all work of a rank was waiting or done when the rank knew of `num_ended` ended requests. -1: some
        work was still running."""
        self._settled[rank] = num_ended

    def next(self) -> list[tuple[Key, Request]]:
        """Return the requests of the next wave if it begins now, in an order that does not depend on timing."""
        if self._in_flight or any(num_ended != self.num_ended for num_ended in self._settled):
            return []
        wave = [(key, request) for _, key, request in sorted(self._held, key=lambda held: held[:2])]
        self._held = []
        self._in_flight = {key for key, _ in wave}
        return wave
