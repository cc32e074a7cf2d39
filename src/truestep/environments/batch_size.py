"""How many completions a worker is given in one go: those that take no time many, all others one by one."""

MOST = 64  # in one go
_AIM = 0.01  # seconds that they may take together
_FIRST = 0.1  # a rating is thought to take, until some were seen
_LONGEST = 1.0  # what took longer counts as much
_WEIGHT = 0.1  # of one rating


class Pace:
    """How long ratings take. Threads share it: what one of them misses does not matter."""

    def __init__(self) -> None:
        self._usual = _FIRST

    def note(self, rated: int, seconds: float) -> None:
        """Take note of ratings, and of the seconds that they took together."""
        each = min(seconds / rated, _LONGEST)
        self._usual += (1 - (1 - _WEIGHT) ** rated) * (each - self._usual)

    @property
    def batch(self) -> int:
        return max(1, min(MOST, int(_AIM / self._usual))) if self._usual > 0 else MOST
