"""The page as a browser makes it, where there is one: its scripts run, and nothing that a model wrote does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from report.test_report import make_run
from report.test_rollouts import HOSTILE
from report.test_rollouts import make_run as make_rollouts
from truestep.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OFFLINE = "no-first-run disable-gpu disable-quic disable-background-networking disable-component-update disable-sync"


# Opens all rollouts and chooses another colour. The page's own policy would not let it run.
OPEN = """<script>setInterval(() => {
  const root = document.querySelector('.rollouts');
  if (!root || root.dataset.ready !== 'yes' || root.dataset.opened) return;
  root.dataset.opened = 'yes';
  document.querySelectorAll('.roll>button').forEach(button => button.click());
}, 20)</script></body>"""


def shown(page: Path, profile: Path) -> str:
    """The page's elements after its scripts have run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", *(f"--{option}" for option in OFFLINE.split())]
    command += [f"--user-data-dir={profile}", "--window-size=1400,5000"]
    command += ["--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=500).stdout.decode(errors="replace")


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    run = make_rollouts(make_run(tmp_path / f"a <b> {HOSTILE[:20].replace('/', '')}"))
    made = shown(write_report([run], tmp_path / "page.html"), tmp_path / "profile")
    assert 'data-charts="drawn"' in made and 'data-ready="yes"' in made
    assert made.count("<canvas") > 6
    body = made.split("<body>")[1].rsplit("<script>", 1)[0]
    assert "<img" not in body and "24 of 24 rollouts" in body


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_conversations_are_shown_and_nothing_in_them_is_an_element(tmp_path: Path) -> None:
    """Without the page's policy, so that nothing but its scripts keeps a model's words from being elements."""
    page = write_report([make_rollouts(tmp_path / "run", steps=2)], tmp_path / "page.html")
    text, found = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    assert found == 1
    page.write_text(text.replace("</body>", OPEN))
    body = shown(page, tmp_path / "profile").split("<body>")[1].split('<script type="text/plain" data-part="charts"')[0]
    assert body.count('class="conversation"') == 2 and body.count('class="turn') == 2 * 5
    assert body.count('class="turn policy"') == 2 * 2 and body.count('class="turn answer"') == 2
    assert body.count("Sequence 2: the past was rewritten") == 2 and body.count("9 further tokens were not kept.") == 2
    for text in ("reward 0<", "calls add<", "1 malformed call<", "2 malformed calls<", "drawn in 1.5 s", "62.5 ms"):
        assert text in body, text
    assert "ended by max_turns" in body and "1 label<" in body and "4 tokens, masked" in body
    assert "<img" not in body and "&lt;img src=x onerror=alert(1)&gt;" in body
