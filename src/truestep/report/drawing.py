"""A drawing as an SVG file with a title, a legend, and light and dark colours. It is as wide as a phone's screen."""

from collections.abc import Sequence
from html import escape

from truestep.report.style import COLOURS, FONT, palette_css

WIDTH = 440
MARGIN = 16
LEGEND_LINE = 20
# The assumed mean width of a character at a font size of 13 pixels, because text cannot be measured here.
CHARACTER = 7.0

CSS = """
.card{fill:var(--card)}
text{font:13px FONT;fill:var(--muted);font-variant-numeric:tabular-nums;
paint-order:stroke;stroke:var(--card);stroke-width:3}
.title{font-size:16px;font-weight:600;fill:var(--text)}
.strong{fill:var(--text)}
.wrong{fill:var(--bad);font-weight:600}
.grid{stroke:var(--grid);stroke-width:1}
.bound{stroke:var(--text);stroke-width:1;stroke-dasharray:4 3}
.dot,.box{fill:var(--c)}
""".replace("FONT", FONT)


class Drawing:
    """Collects the parts of a drawing."""

    def __init__(self, title: str, unit: str) -> None:
        self.title, self.height = title, 0.0  # who draws sets the height
        self._parts: list[str] = []
        self.text(MARGIN, 28, title, kind="title")
        self.text(MARGIN, 47, unit)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> None:
        style = f' class="{kind}"' if kind else ""
        shown = escape(text.replace("-", "\N{MINUS SIGN}", 1) if text[:1] == "-" else text)
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{shown}</text>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "grid") -> None:
        self._parts.append(f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>')

    def dot(self, x: float, y: float, colour: int, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        place = f'cx="{x:.1f}" cy="{y:.1f}" r="4.5"'
        self._parts.append(f'<circle class="dot colour-{colour % COLOURS}" {place}>{inside}</circle>')

    def box(self, x: float, y: float, width: float, height: float, shade: float, title: str) -> None:
        """Draw a cell of a heat map; `shade` is its opacity, from 0 to 1."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill-opacity="{shade:.2f}"'
        self._parts.append(f'<rect class="box colour-0" {place}><title>{escape(title)}</title></rect>')

    def legend(self, names: Sequence[tuple[str, int]], y: float) -> int:
        """Draw the names with their colours, the first row at `y`. Return the number of rows."""
        x, row = float(MARGIN), 0
        longest = int((WIDTH - 2 * MARGIN - 28) / CHARACTER)
        for name, colour in names:
            shown = name if len(name) <= longest else name[: longest - 3] + "..."
            needed = 14 + CHARACTER * len(shown) + 14
            if x > MARGIN and x + needed > WIDTH:
                x, row = float(MARGIN), row + 1
            base = y + LEGEND_LINE * row
            self.dot(x + 5, base - 4.5, colour)
            self.text(x + 14, base, shown, kind="strong")
            x += needed
        return row + 1 if names else 0

    def svg(self) -> str:
        """Return the drawing as SVG. It fills a narrow screen, and grows to at most 1.6 times its own width."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {self.height:g}" width="100%" '
                f'preserveAspectRatio="xMidYMin meet" style="max-width:{1.6 * WIDTH:.0f}px" '
                f'role="img" aria-label="{escape(self.title, quote=True)}">',
                f"<style>{palette_css('svg')}{CSS}</style>",
                '<rect class="card" width="100%" height="100%"/>',
                *self._parts,
                "</svg>",
                "",
            ]
        )
