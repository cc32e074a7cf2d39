"""Ten small runs, really made: nine go wrong as runs do, and one does not. Each is told for what it is, while it goes
on, at its end and in its report. `test_verdicts` has the numbers that they left once."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from truestep.report import write_report
from truestep.report.health import health
from truestep.report.runs import read_run
from verdicts.ill_runs import ALL_RIGHT, RUNS, VERDICTS, make_run, warm_model


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return warm_model(tmp_path_factory.mktemp("warm"))


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_told_for_what_it_is(name: str, warm: tuple[Path, Path], tmp_path: Path) -> None:
    said = io.StringIO()
    run = make_run(name, *warm, tmp_path / "run", Console(file=said, width=80))
    found = health(read_run(run))
    by_kind = {verdict.kind: verdict for verdict in found.verdicts}
    assert VERDICTS[name] in by_kind, list(by_kind)
    wrong = [verdict for verdict in found.verdicts if verdict.level in ("bad", "warning")]
    assert found.well == (name == ALL_RIGHT) == (not wrong)
    *_, ending = said.getvalue().splitlines()
    assert f"steps are done; the run is in {run}. {found.verdicts[0].sentence}" in ending
    warnings = [line for line in said.getvalue().splitlines() if line.startswith("warning:")]
    for verdict in wrong:
        assert sum(f": {verdict.title}. " in line for line in warnings) == 1, (verdict, warnings)
    page = write_report([run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f'<p class="title">{verdict.title}</p>' in page for verdict in wrong)
    if name == ALL_RIGHT:
        assert not warnings
