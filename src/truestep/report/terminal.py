"""A line plot for the terminal, in braille or in plain characters."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from truestep.report.runs import is_finite
from truestep.report.scale import Scale, linear_scale

Pairs = Sequence[tuple[float, float]]

SYMBOLS = "\N{BULLET}\N{MULTIPLICATION SIGN}o+#@%&"
ASCII_SYMBOLS = "*xo+#@%&"
# The bits of a braille cell, by row and column of its dots.
BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
NARROWEST, LOWEST = 24, 3


def text_plot(
    series: Mapping[str, Pairs],
    *,
    width: int = 72,
    height: int = 12,
    x_label: str = "",
    y_label: str = "",
    ascii_only: bool = False,
) -> str:
    """Plot named series of (x, y): one series in braille, several with a character each.

    `width` is that of the whole text, `height` the number of rows of the plot itself. Points that are not finite are
    left out, and neighbours are averaged where there are many more points than columns.
    """
    width, height = max(width, NARROWEST), max(height, LOWEST)
    points = {}
    for name, pairs in series.items():
        if finite := sorted((float(x), float(y)) for x, y in pairs if is_finite(x) and is_finite(y)):
            points[name] = _thinned(finite, 2 * width)
    if not points:
        return "(nothing to plot)"
    vertical = linear_scale((y for pairs in points.values() for _, y in pairs), count=min(5, max(2, height // 2)))
    horizontal = linear_scale((x for pairs in points.values() for x, _ in pairs), snap=False)
    margin = max(len(label) for label in vertical.labels)
    columns = max(8, width - margin - 2)
    symbols = ASCII_SYMBOLS if ascii_only else SYMBOLS
    if len(points) == 1 and not ascii_only:
        rows = _braille(next(iter(points.values())), columns, height, horizontal, vertical)
    else:
        rows = _characters(list(points.values()), columns, height, horizontal, vertical, symbols)
    lines = _legend(list(points), y_label, symbols, width)
    lines += _with_vertical_axis(rows, vertical, margin, ascii_only)
    lines += _horizontal_axis(horizontal, columns, margin, x_label, ascii_only)
    text = "\n".join(line.rstrip() for line in lines)
    return text.encode("ascii", "replace").decode() if ascii_only else text


def _thinned(pairs: Pairs, count: int) -> Pairs:
    """Average neighbours: noise finer than a column would fill the plot."""
    if len(pairs) <= count:
        return pairs
    bounds = [index * len(pairs) // (count // 2) for index in range(count // 2 + 1)]
    groups = [pairs[start:end] for start, end in pairwise(bounds)]
    # Divided before they are added, so that huge values do not overflow.
    return [
        tuple(sum(value / len(group) for value in values) for values in zip(*group, strict=True)) for group in groups
    ]


def _grid(pairs: Pairs, columns: int, rows: int, horizontal: Scale, vertical: Scale) -> list[tuple[int, int]]:
    """List the cells that the line through the points passes, each as its column and its row from the top."""

    def share(scale: Scale, value: float) -> float:
        return min(1.0, max(0.0, scale.position(value)))

    places = [
        (round((columns - 1) * share(horizontal, x)), round((rows - 1) * (1 - share(vertical, y)))) for x, y in pairs
    ]
    cells = [places[0]]
    for (column, row), (next_column, next_row) in pairwise(places):
        count = max(abs(next_column - column), abs(next_row - row), 1)
        for index in range(1, count + 1):
            part = index / count
            cells.append((round(column + part * (next_column - column)), round(row + part * (next_row - row))))
    return cells


def _braille(pairs: Pairs, columns: int, height: int, horizontal: Scale, vertical: Scale) -> list[str]:
    bits = [[0] * columns for _ in range(height)]
    for column, row in _grid(pairs, 2 * columns, 4 * height, horizontal, vertical):
        bits[row // 4][column // 2] |= BRAILLE[row % 4][column % 2]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in row) for row in bits]


def _characters(
    lines: Sequence[Pairs], columns: int, height: int, horizontal: Scale, vertical: Scale, symbols: str
) -> list[str]:
    canvas = [[" "] * columns for _ in range(height)]
    # The first series is drawn last, so that it lies on top.
    for index, pairs in reversed(list(enumerate(lines))):
        for column, row in _grid(pairs, columns, height, horizontal, vertical):
            canvas[row][column] = symbols[index % len(symbols)]
    return ["".join(row) for row in canvas]


def _legend(names: Sequence[str], y_label: str, symbols: str, width: int) -> list[str]:
    # Names come from directories, and must not break the lines of the plot.
    names = [" ".join(name.split()) for name in names]
    if len(names) == 1:
        # A single series needs no symbol, and no name that repeats the label.
        return [": ".join(dict.fromkeys(part for part in (y_label, names[0]) if part))[:width]]
    lines = [y_label[:width]] if y_label else []
    line = ""
    for index, name in enumerate(names):
        item = f"{symbols[index % len(symbols)]} {name}"[:width]
        if line and len(line) + 3 + len(item) > width:
            lines.append(line)
            line = ""
        line = f"{line}   {item}" if line else item
    return [*lines, line]


def _with_vertical_axis(rows: Sequence[str], vertical: Scale, margin: int, ascii_only: bool) -> list[str]:
    labels: dict[int, str] = {}
    for tick, label in zip(vertical.ticks, vertical.labels, strict=True):
        labels.setdefault(round((len(rows) - 1) * (1 - vertical.position(tick))), label)
    bar, tick_bar = ("|", "+") if ascii_only else ("\u2502", "\u2524")
    return [
        f"{labels.get(index, ''):>{margin}} {tick_bar if index in labels else bar}{row}"
        for index, row in enumerate(rows)
    ]


def _horizontal_axis(horizontal: Scale, columns: int, margin: int, x_label: str, ascii_only: bool) -> list[str]:
    line, tick_line, corner = ("-", "+", "+") if ascii_only else ("\u2500", "\u252c", "\u2514")
    axis, text = [line] * columns, [" "] * (columns + margin + 2)
    free = 0
    for tick, label in zip(horizontal.ticks, horizontal.labels, strict=True):
        column = round((columns - 1) * horizontal.position(tick))
        axis[column] = tick_line
        start = min(max(0, margin + 2 + column - len(label) // 2), len(text) - len(label))
        # A label that would run into the one before it is left out.
        if start >= free:
            text[start : start + len(label)] = label
            free = start + len(label) + 1
    lines = [" " * (margin + 1) + corner + "".join(axis), "".join(text)]
    return [*lines, x_label[:columns].rjust(columns + margin + 2)] if x_label else lines
