"""The charts of the page, built from one run or from several, and each as HTML."""

import json
import re
from collections.abc import Sequence
from html import escape

from truestep.report.runs import Run
from truestep.report.scale import Scale
from truestep.report.series import Axis
from truestep.report.style import COLOURS
from truestep.report.svg import AXIS_LABELS, Chart, Line, Plan, plot_svg, vertical_scale
from truestep.text import printable

MINUS = "\N{MINUS SIGN}"

GROUPS: dict[str, tuple[Plan, ...]] = {
    "Reward": (
        Plan(
            "Held-out reward",
            {"greedy_reward": "greedy", "sampled_reward": "sampled"},
            unit="mean",
            from_evaluation=True,
            compare_each=True,
            from_zero=True,
            wide=True,
        ),
        Plan("Training reward", {"reward": "mean"}, unit="mean of the step", from_zero=True),
        Plan(
            "Advantage",
            {"advantage": "mean", "max_advantage": "largest", "min_advantage": "smallest"},
            unit="of the step",
            reference=0.0,
            least_range=1e-3,
        ),
    ),
    "New policy against old": (
        Plan("Ratio new/old", {"ratio_new_old": "ratio"}, unit="mean", reference=1.0, least_range=1e-3),
        Plan(
            "Clipped fraction",
            {f"clipped_ratio_fraction{side}": side[1:] or "all" for side in ("", "_low", "_high")},
            unit="share of tokens",
            from_zero=True,
            least_range=1e-3,
        ),
        Plan("KL new/old", {"kl_new_old": "KL"}, unit="nats", reference=0.0, least_range=1e-5),
        Plan("Effective sample size", {"effective_sample_size": "size"}),
    ),
    "Policy and loss": (
        Plan("Loss", {"loss": "loss"}, least_range=1e-6),
        Plan("Entropy", {"entropy": "entropy"}, unit="nats", from_zero=True),
        Plan(
            "Groups",
            {"zero_advantage_groups": "nothing to learn", "distinct_completions": "distinct completions"},
            unit="share",
            from_zero=True,
        ),
        Plan("Spread of rewards in a group", {"group_reward_spread": "spread"}, from_zero=True),
        Plan("Log-probability", {"new_logprobs": "new policy", "old_logprobs": "old policy"}, unit="nats"),
    ),
    "Optimizer": (
        Plan("Gradient norm", {"grad_norm": "norm"}, logarithmic_if_wide=True, from_zero=True),
        Plan("Learning rate", {"learning_rate": "rate"}, from_zero=True, smoothed=False),
    ),
    "Data and speed": (
        Plan("Staleness", {"staleness": "mean", "max_staleness": "largest"}, from_zero=True),
        Plan(
            "Throughput",
            {"tokens_per_second": "of the step", "sampled_tokens_per_second": "sampled"},
            unit="tokens/s",
            compare_each=True,
            from_zero=True,
        ),
        Plan(
            "Time of a step",
            {
                "step_time": "step",
                "data_wait_time": "waiting for data",
                "sampling_time": "sampling",
                "rating_time": "waiting for rewards",
            },
            unit="seconds",
            compare_each=True,
            from_zero=True,
        ),
    ),
}


# These are logged for other programs, or stand in a chart above as a part of another number.
_NOT_DRAWN = re.compile(
    r"step|documents_seen|num_\w+|ratio_new_old_\w+|log_ratio_p\d+|policy_loss|entropy_bonus|z_loss|kl_cov"
    r"|zero_advantage_fraction|(?:max|min)_(?:reward|staleness|ratio_new_old)"
)


def groups_for(runs: Sequence[Run]) -> dict[str, tuple[Plan, ...]]:
    """List our charts, and one for each metric that has none, such as a user's own."""
    drawn = {key for plans in GROUPS.values() for plan in plans for key in plan.metrics}
    logged = dict.fromkeys(key for run in runs for key in run.metrics.names)
    own = [key for key in logged if key not in drawn and not _NOT_DRAWN.fullmatch(key)]
    return GROUPS | {"More metrics": tuple(Plan(printable(key, 100), {key: printable(key, 100)}) for key in own)}


def charts_of(plan: Plan, runs: Sequence[Run]) -> list[Chart]:
    """Make the charts of a plan that have anything to show."""
    metrics = list(plan.metrics.items())
    if len(runs) == 1:
        lines = [_line(runs[0], plan, key, name, index) for index, (key, name) in enumerate(metrics)]
        candidates = [(plan.title, lines)]
    else:
        # Colours are for the runs here, so that a chart has one metric.
        candidates = [
            (
                f"{plan.title}, {name}" if plan.compare_each else plan.title,
                [_line(run, plan, key, run.name, index) for index, run in enumerate(runs)],
            )
            for key, name in (metrics if plan.compare_each else metrics[:1])
        ]
    charts = [
        Chart(plan, title, [line for line in lines if len(line.points)], wide=plan.wide and len(runs) == 1)
        for title, lines in candidates
    ]
    return [chart for chart in charts if chart.extremes]


def _line(run: Run, plan: Plan, key: str, name: str, index: int) -> Line:
    points = run.evaluation_points(key) if plan.from_evaluation else run.points(key)
    return Line(name, index % COLOURS, points, dashed=index >= COLOURS)


def group_html(title: str, charts: Sequence[Chart], scales: dict[Axis, Scale], *, legend: bool) -> str:
    """Write the charts of a group in a grid, without holes where their number allows one."""
    if not charts:
        return ""
    cells = sum(2 if chart.wide else 1 for chart in charts)
    figures = "\n".join(_figure_html(chart, scales, legend=legend) for chart in charts)
    return (
        f'<h2>{escape(title)}</h2>\n<div class="charts {"even" if cells in (1, 2, 4) else "odd"}">\n{figures}\n</div>\n'
    )


def _figure_html(chart: Chart, scales: dict[Axis, Scale], *, legend: bool) -> str:
    """Write a chart with its title, the plot over each of the axes, and the data of its read-out."""
    vertical = vertical_scale(chart)
    unit = ", ".join(part for part in (chart.plan.unit, "logarithmic" if vertical.logarithmic else "") if part)
    parts = [
        f'<figure class="chart{" wide" if chart.wide else ""}"><figcaption><h3>{escape(chart.title)}</h3>',
        f'<span class="unit">{escape(unit)}</span>' if unit else "",
        legend_html(chart.lines) if legend and len(chart.lines) > 1 else "",
        "</figcaption>",
        *(_variant_html(chart, axis, horizontal, vertical) for axis, horizontal in scales.items()),
        f'<script type="application/json">{_json(_readings(chart))}</script></figure>',
    ]
    return "".join(parts)


def legend_html(lines: Sequence[Line]) -> str:
    items = "".join(
        f'<li><i class="swatch colour-{line.colour}{" dashed" if line.dashed else ""}"></i>{escape(line.name)}</li>'
        for line in lines
    )
    return f'<ul class="legend">{items}</ul>'


def _variant_html(chart: Chart, axis: Axis, horizontal: Scale, vertical: Scale) -> str:
    label = escape(f"{chart.title} over {AXIS_LABELS[axis]}", quote=True)
    parts = [
        f'<div class="variant" data-axis="{axis}" data-x0="{horizontal.low!r}" data-x1="{horizontal.high!r}" '
        f'data-y0="{vertical.low!r}" data-y1="{vertical.high!r}"{" data-log" if vertical.logarithmic else ""}>'
        '<div class="plot">',
        plot_svg(chart, axis, horizontal, vertical, label),
    ]
    for tick, text in zip(vertical.ticks, vertical.labels, strict=True):
        parts.append(f'<span class="y" style="top:{100 - 100 * vertical.position(tick):.2f}%">{_tick(text)}</span>')
    for index, (tick, text) in enumerate(zip(horizontal.ticks, horizontal.labels, strict=True)):
        # On a narrow page every other of many labels gives way.
        minor = " minor" if index % 2 and len(horizontal.ticks) > 5 else ""
        parts.append(f'<span class="x{minor}" style="left:{100 * horizontal.position(tick):.2f}%">{_tick(text)}</span>')
    parts.append(f'</div><div class="axis"><span>{_gap_note(chart, vertical)}</span>{AXIS_LABELS[axis]}</div></div>')
    return "".join(parts)


def _tick(text: str) -> str:
    return escape(text.replace("-", MINUS))


def _gap_note(chart: Chart, vertical: Scale) -> str:
    """Say what the lines cannot show."""
    gaps = sum(len(line.points.gaps) for line in chart.lines)
    notes = [f"{gaps:,} {'value' if gaps == 1 else 'values'} not finite: gaps in the line."] if gaps else []
    if vertical.logarithmic and (zeros := sum(int((line.points.values == 0).sum()) for line in chart.lines)):
        notes.append(f"{zeros:,} {'value' if zeros == 1 else 'values'} of 0 at the lower edge.")
    return " ".join(notes)


def _readings(chart: Chart) -> list[dict]:
    """List the points that the read-out can name, each as [step, documents, value]."""
    readings = []
    for line in chart.lines:
        points = [[_short(p.step), _short(p.documents), _short(p.value)] for p in line.points.thinned.points()]
        readings.append({"name": line.name, "colour": line.colour, "points": points})
    return readings


def _short(value: float | None) -> float | int | None:
    """Cut a number to the digits that anyone reads, which halves the page."""
    if value is None:
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.7g}")


def _json(value: object) -> str:
    """Write JSON that may stand in a script element whatever it holds."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
