"""Axis ranges, ticks at round numbers, and numbers as people read them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SMALLEST, LARGEST = 1e-300, 1e300
# A series whose relative range is smaller than this is shown as constant: the labels' digits would be all noise.
SMALLEST_RELATIVE_RANGE = 2e-4
# A range wider than this factor is drawn on a logarithmic axis where the chart allows it.
LOGARITHMIC_FACTOR = 100.0


@dataclass(frozen=True)
class Scale:
    """The range of an axis with its ticks; `position` maps a value to 0..1 along it."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]

    def position(self, value: float) -> float:
        return (bounded(value) - self.low) / (self.high - self.low)


def bounded(value: float) -> float:
    """Keep a value off the ends of the range of doubles, where differences overflow and steps vanish."""
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def nice_step(span: float, count: int) -> float:
    """Find the smallest 1, 2 or 5 times a power of ten that covers `span` in at most `count` steps."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1.0, 2.0, 5.0) if factor * power >= rough * (1 - 1e-9)), 10.0 * power)


def linear_scale(values: Iterable[float], *, count: int = 5, snap: bool = True, whole: bool = False) -> Scale:
    """Make a linear axis over `values`. With `snap` it ends on ticks; with `whole` ticks are whole numbers."""
    finite = [bounded(value) for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    largest = max(abs(low), abs(high))
    # Counts have no noise: a run of a hundred steps after a million is a range.
    if high - low <= largest * (1e-12 if whole else SMALLEST_RELATIVE_RANGE):
        middle, half = (low + high) / 2, (max(0.5, 1e-6 * largest) if largest == 0 or whole else 0.1 * largest)
        low, high = middle - half, middle + half
    step = nice_step(high - low, count)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if snap:
        low, high = first * step, last * step
    ticks = [index * step for index in range(first, last + 1)]
    ticks = [tick for tick in ticks if low - 1e-9 * step <= tick <= high + 1e-9 * step]
    return Scale(low, high, tuple(ticks), tuple(format_ticks(ticks, step)))


def wants_logarithm(values: Sequence[float]) -> bool:
    """Tell whether `values` are positive numbers (or zero) that a linear axis would flatten."""
    positive = [value for value in values if math.isfinite(value) and value > 0]
    if len(positive) < 2 or any(value < 0 for value in values):
        return False
    return math.log10(max(positive)) - math.log10(min(positive)) > math.log10(LOGARITHMIC_FACTOR)


def format_ticks(ticks: Sequence[float], step: float) -> list[str]:
    """Write ticks with the decimals that the step needs, thousands as k, M or B, small numbers with an exponent."""
    largest = max((abs(tick) for tick in ticks), default=0.0)
    if largest == 0:
        return ["0" for _ in ticks]
    if largest >= 1e15:
        return ["0" if tick == 0 else short_exponent(f"{tick:.2g}") for tick in ticks]
    unit, suffix = 1.0, ""
    if largest >= 10_000:
        unit, suffix = next(pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if largest >= pair[0])
    elif largest < 1e-3:
        exponent = math.floor(math.log10(largest) + 1e-9)
        unit, suffix = 10.0**exponent, f"e{exponent}"
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    # Half a step around zero is rounding error, and must not read as "-0.00".
    return ["0" if abs(tick) < step / 2 else f"{tick / unit:,.{decimals}f}{suffix}" for tick in ticks]


def short_exponent(text: str) -> str:
    """Write `1e-06` as `1e-6`."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def format_number(value: float | None, significant: int = 4) -> str:
    """Write a number for a tile: thousands separators, about `significant` digits, a dash where there is none."""
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Inf" if value > 0 else "-Inf")
    size = abs(value)
    if size >= 1e15:
        return short_exponent(f"{value:.{significant}g}")
    if value == int(value):
        return f"{int(value):,}"
    if size < 1e-3:
        return short_exponent(f"{value:.{max(1, significant - 1)}g}")
    decimals = max(0, significant - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def format_compact(value: float | None) -> str:
    """Write a count with k, M or B: `18.2M`."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.1f}{suffix}"
    # A number of five digits stays exact.
    return f"{value / 1e3:.0f}k" if abs(value) >= 1e5 else f"{value:,.0f}"


def format_duration(seconds: float | None) -> str:
    """Write seconds in the two largest units that matter: `3 h 12 min`."""
    if seconds is None or not math.isfinite(seconds):
        return format_number(None)
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"
