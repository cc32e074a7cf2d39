"""The page as a browser makes it, where there is one: its scripts run, and nothing that a model wrote does."""

from __future__ import annotations

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


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_the_scripts_of_the_page_run(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    run = make_rollouts(make_run(tmp_path / f"a <b> {HOSTILE[:20].replace('/', '')}"))
    page = write_report([run], tmp_path / "page.html")
    command = [CHROMIUM, "--headless", "--no-sandbox", *(f"--{option}" for option in OFFLINE.split())]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,5000"]
    command += ["--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    made = subprocess.run(command, capture_output=True, timeout=500).stdout.decode(errors="replace")
    assert 'data-charts="drawn"' in made and 'data-ready="yes"' in made
    assert made.count("<canvas") > 6
    body = made.split("<body>")[1].rsplit("<script>", 1)[0]
    assert "<img" not in body and "24 of 24 rollouts" in body
