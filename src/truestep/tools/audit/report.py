"""Shows what an audit found, in a terminal and as a self-contained page."""

from html import escape

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from truestep.report.page import MARKS
from truestep.report.style import FONT, palette_css
from truestep.text import printable
from truestep.tools.audit.finding import Finding
from truestep.tools.audit.run import Audit
from truestep.tools.audit.table import BY_NAME

_LEVELS = {"high": "bad", "medium": "warning"}
_STYLES = {"high": "bold red", "medium": "yellow"}
_CSS = (
    f"body{{font:16px/1.5 {FONT};max-width:52rem;margin:2rem auto;padding:0 1rem;background:var(--page)}}"
    "body{color:var(--text)}section{background:var(--card);border:1px solid var(--border);border-radius:8px}"
    "section{padding:.2rem 1.2rem;margin:1rem 0}h2{font-size:1.1rem}code{overflow-wrap:anywhere}"
    ".bad h2{color:var(--bad)}.warning h2{color:var(--warning)}.good{color:var(--good)}"
    "dt{color:var(--muted);font-size:.85rem}dd{margin:0 0 .6rem}"
)


def render(result: Audit) -> RenderableType:
    parts: list[RenderableType] = []
    for one in result.findings:
        head = Text.assemble((one.confidence, _STYLES[one.confidence]), "  ", (one.name, "bold"), f"  {one.title}")
        parts += [head, *(Padding(Text(line), (0, 0, 0, 4)) for line in _lines(one)), Text()]
    lost = [Text(printable(line, 1000)) for line in result.lost]
    return Group(*parts, *lost, Text(summary(result), style="" if result.findings else "green"))


def _lines(one: Finding) -> list[str]:
    return [one.where, printable(one.evidence, 1000), f"do: {one.advice}"]


def summary(result: Audit) -> str:
    scored = f", {result.scored:,} of them scored by the model" if result.scored else ""
    what = f"{result.samples:,} samples, {result.tokens:,} tokens, {result.labels:,} labels{scored}"
    high = sum(one.confidence == "high" for one in result.findings)
    return f"{what}: {_count(len(result.findings), 'finding')}" + (f", {high} of high confidence" if high else "")


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def page(result: Audit, title: str = "Audit of rollouts") -> str:
    """Return the findings as HTML without scripts or external resources."""
    sections = "".join(map(_section, result.findings)) or '<p class="good">No finding.</p>\n'
    lost = "".join(f"<p>{escape(printable(line, 1000))}.</p>\n" for line in result.lost)
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{palette_css()}{_CSS}\n</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(summary(result))}. Made by <code>truestep audit</code>.</p>\n"
        f"{lost}{sections}</main>\n</body>\n</html>\n"
    )


def _section(one: Finding) -> str:
    check = BY_NAME[one.name]
    mark, _ = MARKS[_LEVELS[one.confidence]]
    rows = {
        "where": f"<code>{escape(one.where)}</code>"
        + (f" (sample {escape(printable(one.sample))})" if one.sample else ""),
        "evidence": escape(printable(one.evidence, 1000)),
        "test": f"It compares {escape(check.compares)}. Threshold: {escape(check.threshold)}.",
        "confidence": one.confidence,
        "what to do": escape(one.advice),
    }
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in rows.items())
    return (
        f'<section class="{_LEVELS[one.confidence]}">\n<h2>{mark} {escape(one.title)} <code>{one.name}</code></h2>\n'
        f"<dl>\n{listed}</dl>\n</section>\n"
    )
