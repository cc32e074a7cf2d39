"""The number of completions that a worker is sent at a time: many for fast rewards, one for slow rewards."""

MOST = 64  # largest batch
_AIM = 0.01  # target seconds per batch
_FIRST = 0.1  # initial estimate of the seconds per rating
_LONGEST = 1.0  # upper limit of a measurement, in seconds
_WEIGHT = 0.1  # weight of one rating in the moving average


class BatchSizer:
    """The batch size, from a moving average of the seconds per rating. Threads share it without a lock, since a lost
    update does not matter."""

    def __init__(self) -> None:
        self._usual = _FIRST

    def note(self, rated: int, seconds: float) -> None:
        """Add ratings that took `seconds` together."""
        each = min(seconds / rated, _LONGEST)
        self._usual += (1 - (1 - _WEIGHT) ** rated) * (each - self._usual)

    @property
    def batch(self) -> int:
        return max(1, min(MOST, int(_AIM / self._usual))) if self._usual > 0 else MOST
