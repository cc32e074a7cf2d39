"""The rollouts viewer of the page. It has the numbers of all kept rollouts, and as many of their texts as fit.

Texts are taken from the first and the last step, then from the middle of the run, then from its quarters and so on,
until `ROOM` is full. A model wrote the texts, so they are stored as compressed JSON, and the page's script shows them
as text, not as HTML.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from truestep.report.parts import packed
from truestep.report.runs import Run, is_finite
from truestep.rollouts.kept.files import FOLDER, list_files
from truestep.text import printable

MOST_ROWS = 100_000
ROOM = 4_600_000  # characters of packed data; so a page of one run has at most six million characters
LARGEST_RAW = 40_000_000  # characters of unpacked texts, which a browser parses all at once
LONGEST_TEXT = 20_000
NUMBERS = ("reward", "advantage", "log_ratio", "largest_log_ratio", "entropy")
COUNTS = ("length", "staleness")
_MAY_LACK = ("ended_by", "turns")  # columns that are missing from files of older versions
_NAMES = ("step", "ended_by", "group_id", "truncated", "rejected", *NUMBERS, *COUNTS)
_TEXTS = ("id", "prompt", "completion", "rejected", "rewards", "tokens", "turns")
MOST_BLOCKS = 600  # the largest number of blocks of a conversation that are shown
_TOKENS = ("token_texts", "token_logprobs", "token_log_ratios", "token_advantages")


@dataclass
class Browser:
    """The kept rollouts in the page."""

    columns: dict[str, list[Any]]
    packed: dict[str, str] = field(default_factory=dict)  # encoded data for the page's script, by name
    num_rows: int = 0  # the number of rollouts that the runs kept
    num_texts: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def note(self) -> str:
        """A sentence that says which rollouts are not in the page, followed by the problems."""
        shown = len(self.columns["step"])
        parts = []
        if shown < self.num_rows:
            parts.append(f"{shown:,} of {self.num_rows:,} rollouts are in this page")
        if self.num_texts < shown:
            parts.append(f"{self.num_texts:,} of them with their text, from all over the run")
        note = f"{', '.join(parts)}; all are in the run's directory, in {FOLDER}." if parts else ""
        return " ".join([note[:1].upper() + note[1:], *self.problems]).strip()


def rollouts_html(runs: Sequence[Run]) -> str:
    """Return the section with the kept rollouts; an empty string if there are none."""
    browser = collect(runs)
    if browser is None:
        return ""
    note = f'<p class="absent">{escape(browser.note)}</p>\n' if browser.note else ""
    if not browser.num_rows:
        return f'<h2 id="rollouts">Rollouts</h2>\n{note}'
    parts = "".join(
        f'<script type="text/plain" data-part="{name}">{text}</script>\n' for name, text in browser.packed.items()
    )
    return (
        '<h2 id="rollouts">Rollouts</h2>\n<div class="card rollouts">\n'
        f'<p class="empty">Reading the rollouts; this needs JavaScript.</p>\n{parts}</div>\n{note}'
    )


def collect(runs: Sequence[Run]) -> Browser | None:
    """Read the kept rollouts; None if there are none."""
    sources = [(number, file) for number, run in enumerate(runs) for file in list_files(run.path / FOLDER)]
    browser = Browser({name: [] for name in ("run", "file", "row", *_NAMES)})
    _add_numbers(sources, browser)
    if not browser.num_rows:
        return browser if browser.problems else None
    browser.packed["index"] = packed(_index(browser, [run.name for run in runs]))
    _add_texts(browser, [file for _, file in sources], ROOM - len(browser.packed["index"]))
    return browser


def _add_numbers(sources: Sequence[tuple[int, Path]], browser: Browser) -> None:
    """Read the numbers of all files. While there are more than `MOST_ROWS` rows, drop every second row."""
    stride, columns = 1, browser.columns
    for place, (run, file) in enumerate(sources):
        rows = read_rows(file, _NAMES)
        if rows is None:
            browser.problems.append(f"{printable(file.name)} cannot be read.")
        for row, values in enumerate(rows or ()):
            if browser.num_rows % stride == 0:
                values |= {"run": run, "file": place, "row": row}
                for name, column in columns.items():
                    column.append(values[name])
            browser.num_rows += 1
        while len(columns["step"]) > MOST_ROWS:
            columns = browser.columns = {name: column[::2] for name, column in columns.items()}
            stride *= 2
    del browser.problems[3:]


def read_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]] | None:
    """Read some columns of a file; None if the file is damaged or lacks a column."""
    from pyarrow import parquet

    try:
        # Without threads: for small files, this takes a third of the time that `read_table` takes.
        with parquet.ParquetFile(file) as opened:
            lacks = [name for name in names if name not in opened.schema_arrow.names]
            if not set(lacks) <= set(_MAY_LACK):
                return None
            there = [name for name in names if name not in lacks]
            found: list[dict[str, Any]] = opened.read(columns=there, use_threads=False).to_pylist()
        for row in found:
            row.update(dict.fromkeys(lacks))
        return found if all(isinstance(row.get("step", 0), int) for row in found) else None
    except Exception:  # pyarrow raises many kinds of errors for a damaged file or a file of another version
        return None


def spread(count: int) -> list[int]:
    """Return the indices below `count` in an order whose every prefix covers the whole range: both ends, the middle,
    the quarters, ..."""
    bits = max(1, (count - 1).bit_length())
    inner = sorted(range(1, count - 1), key=lambda place: int(f"{place:0{bits}b}"[::-1], 2))
    return [*range(min(1, count)), *([count - 1] if count > 1 else []), *inner]


def _add_texts(browser: Browser, files: Sequence[Path], room: int) -> None:
    """Add the texts of whole files as long as they fit in `room` characters."""
    by_file: dict[int, dict[int, int]] = {}
    for at, (file, row) in enumerate(zip(browser.columns["file"], browser.columns["row"], strict=True)):
        by_file.setdefault(file, {})[row] = at
    chosen: list[list[Any]] = []
    compressed = raw = of_tokens = 0
    places = list(by_file)
    for place in (places[index] for index in spread(len(places))):
        rows = read_rows(files[place], (*_TEXTS, *_TOKENS)) or []
        listed = []
        for row, values in enumerate(rows):
            if row not in by_file[place]:
                continue
            tokens = _tokens(values) if of_tokens <= raw / 4 else None
            texts = [_text(values[name]) for name in _TEXTS[:3]]
            conversation = [_conversation(values)] if values["turns"] else []
            listed.append([by_file[place][row], *texts, _parts(values), tokens, *conversation])
            of_tokens += 0 if tokens is None else len(_json(tokens))
        text = _json(listed)
        compressed, raw = compressed + len(zlib.compress(text.encode(), 1)), raw + len(text)
        if chosen and (compressed > room or raw > LARGEST_RAW):  # estimated size; `_fit` measures it
            break
        chosen.append(listed)
    _fit(browser, chosen, room)


def _fit(browser: Browser, chosen: list[list[Any]], room: int) -> None:
    """Pack the texts of the first files: as many files as fit in `room` characters."""
    while True:
        prompts: dict[str | None, int] = {}
        rows = sorted((list(row) for listed in chosen for row in listed), key=lambda row: row[0])
        for row in rows:
            row[2] = prompts.setdefault(row[2], len(prompts))
        browser.packed["texts"], browser.num_texts = packed({"prompts": list(prompts), "rows": rows}), len(rows)
        size = len(browser.packed["texts"])
        if size <= room or len(chosen) <= 1:
            return
        chosen = chosen[: max(1, min(len(chosen) - 1, int(len(chosen) * 0.97 * room / size)))]


def _text(text: str | None) -> str | None:
    return None if text is None else text[:LONGEST_TEXT]


def _parts(values: dict[str, Any]) -> list[list[Any]]:
    return [[printable(name, 60), _short(value)] for name, value in values["rewards"] or ()][:20]


def _tokens(values: dict[str, Any]) -> list[Any] | None:
    """Return the tokens' texts, log-probs in hundredths, log-ratios in thousandths, and advantages in hundredths."""
    pieces = values["token_texts"]
    if not pieces:
        return None
    scales = ((100, "token_logprobs"), (1000, "token_log_ratios"), (100, "token_advantages"))
    return [
        pieces,
        *(
            None
            if values[name] is None
            else [round(scale * value) if is_finite(value) else None for value in values[name]]
            for scale, name in scales
        ),
    ]


def _conversation(values: dict[str, Any]) -> list[Any]:
    """Return the number of tokens that the kept blocks do not contain, and the blocks."""
    blocks = [block for block in values["turns"] if isinstance(block, dict)][:MOST_BLOCKS]
    left_out = (values["tokens"] or 0) - sum(block.get("tokens") or 0 for block in blocks)
    return [max(0, left_out), [_block(block) for block in blocks]]


def _block(block: dict[str, Any]) -> list[Any]:
    """Return the values of a block. Missing values at the end are left out."""
    role, tools = block.get("role"), block.get("tools") or ()
    listed = [
        block.get("sequence") or 0,
        int(bool(block.get("label"))),
        block.get("tokens") or 0,
        _text(block.get("text")),
        None if role is None else printable(role, 64),
        _short(block.get("reward")),
        *(_short(block.get(name), 3) for name in ("drawing_seconds", "environment_seconds")),
        [[printable(use["name"], 64), use["calls"], _short(use["seconds"], 3)] for use in tools] or None,
        block.get("malformed") or None,
    ]
    while listed[-1] is None:
        listed.pop()
    return listed


def _short(value: float | None, digits: int = 4) -> float | None:
    return float(f"{value:.{digits}g}") if is_finite(value) else None


def _index(browser: Browser, names: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of all rollouts, a list per column."""
    columns = browser.columns
    groups: dict[str | None, int] = {}
    reasons: dict[str | None, int] = {None: 0}
    index = {
        "runs": list(names),
        "run": columns["run"],
        "step": columns["step"],
        "group": [groups.setdefault(group, len(groups)) for group in columns["group_id"]],
        "truncated": [-1 if value is None else int(value) for value in columns["truncated"]],
        "rejected": [reasons.setdefault(reason, len(reasons)) for reason in columns["rejected"]],
        **{name: [_short(value, 4 if name == "reward" else 3) for value in columns[name]] for name in NUMBERS},
        **{name: columns[name] for name in COUNTS},
    }
    if any(end is not None for end in columns["ended_by"]):
        ends: dict[str | None, int] = {}
        index["ended"] = [ends.setdefault(end, len(ends)) for end in columns["ended_by"]]
        index["ends"] = [None if end is None else printable(end, 60) for end in ends]
    index["groups"] = [None if group is None else printable(group, 100) for group in groups]
    index["reasons"] = [None if reason is None else printable(reason, 500) for reason in reasons]
    return index


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
