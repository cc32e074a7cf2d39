"""The browser of kept rollouts: its place on the page, its script and its style.

Whatever a rollout holds was written by a model. The script puts every text on the page as text, and never as HTML.
"""

from collections.abc import Sequence
from html import escape

from truestep.report.rollouts import collect
from truestep.report.runs import Run


def rollouts_html(runs: Sequence[Run]) -> str:
    """Write the section with the rollouts that the runs kept; nothing where they kept none."""
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
