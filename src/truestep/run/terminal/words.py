"""Formats of progress, byte counts and durations."""

from collections.abc import Sequence

from truestep.process.progress import Work

_UNITS = ("B", "kB", "MB", "GB", "TB")


def duration(seconds: float) -> str:
    """Format a duration: 0:07, 12:40, 3:12:40, 2 d 03:12."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        days, hours = divmod(hours, 24)
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(count: float) -> str:
    """Format a number of bytes: 740 B, 3.2 MB, 1.4 GB."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 or count >= 99.5 else f"{count:.1f} {_UNITS[unit]}"


def work_in_words(work: Work, tokens_per_second: float = 0.0) -> str:
    """Format the progress of a piece of work: sampling 112/256 completions, 20,000 tokens, 900 tok/s."""
    done, total = work.done, work.total
    if work.kind.startswith("bytes"):
        amount = size(done) if total is None else f"{size(min(done, total))} of {size(total)}"
        text = f"{work.name} {amount}" if done or total else work.name
    elif work.kind == "micro-batches" and total is not None:  # few and long: name the current one
        text = f"{work.name} micro-batch {min(done + 1, total):,.0f}/{total:,.0f}"
    elif total is None:
        text = f"{work.name} {done:,.0f} {_one_or_more(work.kind, done)}" if done else work.name
    else:
        text = f"{work.name} {min(done, total):,.0f}/{total:,.0f} {work.kind}"
    if work.kind != "completions":
        return text
    tokens = f", {work.tokens:,.0f} {_one_or_more('tokens', work.tokens)}" if work.tokens else ""
    return text + tokens + (f", {tokens_per_second:,.0f} tok/s" if tokens_per_second else "")


def _one_or_more(kind: str, count: float) -> str:
    if count != 1:
        return kind
    return kind.removesuffix("es") if kind.endswith("ches") else kind.removesuffix("s")


def doing_in_words(
    phase: str, works: Sequence[Work], waits: Sequence[str], seconds: float, tokens_per_second: float, width: int
) -> str:
    """Describe the phase and the current work in at most `width` columns. If both do not fit, show the work only."""
    work = work_in_words(works[-1], tokens_per_second) if works else ""
    waits_for = f"waiting for {waits[-1]}" if waits and not work else ""
    time = f"  {duration(seconds)}" if seconds >= 1 else ""
    inner = work or waits_for
    for text in (": ".join(filter(None, (phase, inner))) + time, (inner or phase) + time, inner or phase):
        if len(text) <= width:
            return text
    return text[: max(0, width - 1)] + "…"
