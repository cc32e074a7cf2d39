"""Formats of numbers and durations."""

import math


def _short_exponent(text: str) -> str:
    """Shorten `1e-06` to `1e-6`."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text


def format_number(value: float | None, significant: int = 4) -> str:
    """Format a number with thousands separators and about `significant` digits; None as a dash."""
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Inf" if value > 0 else "-Inf")
    size = abs(value)
    if size >= 1e15:
        return _short_exponent(f"{value:.{significant}g}")
    if value == int(value):
        return f"{int(value):,}"
    if size < 1e-3:
        return _short_exponent(f"{value:.{max(1, significant - 1)}g}")
    decimals = max(0, significant - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def format_compact(value: float | None) -> str:
    """Format a count with k, M, B or T: `18.2M`."""
    if value is None or not math.isfinite(value):
        return format_number(value)
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= unit:
            return f"{value / unit:.1f}{suffix}"
    # Numbers below 100,000 stay exact.
    return f"{value / 1e3:.0f}k" if abs(value) >= 1e5 else f"{value:,.0f}"


def format_duration(seconds: float | None) -> str:
    """Format seconds in at most two units: `3 h 12 min`."""
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
