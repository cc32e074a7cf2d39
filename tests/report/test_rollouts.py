"""The rollouts of the page: all numbers, as many texts as there is room for, and nothing that runs."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from truestep.report import rollouts, write_report
from truestep.report.health import health
from truestep.report.rollouts import collect, spread
from truestep.report.runs import read_run
from truestep.rollouts.kept import files
from truestep.text import printable

HOSTILE = "</script><img src=x onerror=alert(1)> & 'quotes' \x1b[31m \N{PARTY POPPER}"


def make_run(path: Path, steps: int = 6, members: int = 4, length: int = 1) -> Path:
    for step in range(1, steps + 1):
        rows: list[dict[str, Any]] = [
            {
                "step": step, "id": f"{step}-{member}", "group_id": f"g{step}", "prompt": f"what is {step}? {HOSTILE}",
                "completion": f"{member} {HOSTILE}" * length, "reward": member / 4, "rewards": [("unit", 0.5)],
                "advantage": member - 1.5, "length": 2, "tokens": 20, "truncated": member == 0, "staleness": 3,
                "log_ratio": 0.01, "largest_log_ratio": 0.02, "entropy": 0.5,
            }
            for member in range(members)
        ]  # fmt: skip
        rows[0] |= {"token_texts": ["a", HOSTILE], "token_logprobs": [-1, -2], "token_log_ratios": [0.5, float("nan")]}
        rows[2] |= {"ended_by": HOSTILE if step == 2 else "max_turns", "turns": conversation(step)}
        rows[-1] |= {"rejected": "its reward raised", "reward": None}
        files.write_rows(path / "rollouts", rows)
    return path


def conversation(step: int) -> list[dict[str, Any]]:
    """Blocks of two sequences, as a file may have them, whoever wrote it: no name and no text is trusted."""
    tools = [{"name": HOSTILE, "calls": step, "seconds": 0.25}, {"name": "add", "calls": 1, "seconds": None}]
    said = {"sequence": 0, "turn": 1, "label": False, "tokens": 2, "role": "tool", "text": HOSTILE}
    facts = {"reward": 0.0, "drawing_seconds": 1.5, "environment_seconds": 0.0625, "tools": tools, "malformed": step}
    return [
        {"sequence": 0, "turn": None, "label": False, "tokens": 3, "text": "what"},
        {"sequence": 0, "turn": 0, "label": True, "tokens": 1, "role": HOSTILE, "text": HOSTILE, **facts},
        said,
        {"sequence": 1, "turn": None, "label": False, "tokens": 4, "text": f"again {HOSTILE}"},
        {"sequence": 1, "turn": 2, "label": True, "tokens": 1, "role": "assistant", "text": "end", "reward": None},
    ]


def payload(page: str, name: str) -> Any:
    (text,) = re.findall(rf'data-part="{name}">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(text, validate=True)))


def page_of(*runs: Path) -> str:
    return write_report(runs, runs[0].parent / "page.html").read_text()


def test_the_page_has_all_numbers_and_texts(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    index, texts = payload(page, "index"), payload(page, "texts")
    assert index["step"] == [step for step in range(1, 7) for _ in range(4)]
    assert index["reward"][:4] == [0, 0.25, 0.5, None] and index["advantage"][:4] == [-1.5, -0.5, 0.5, 1.5]
    assert index["truncated"][:4] == [1, 0, 0, 0]
    assert [index["reasons"][number] for number in index["rejected"][:4]] == [None, None, None, "its reward raised"]
    assert [index["groups"][number] for number in index["group"][3:5]] == ["g1", "g2"]
    assert [row[0] for row in texts["rows"]] == list(range(24)) and len(texts["prompts"]) == 6
    assert texts["rows"][5] == [5, "2-1", 1, f"1 {HOSTILE}", [["unit", 0.5]], None]
    assert texts["rows"][4][5] == [["a", HOSTILE], [-100, -200], [500, None], None]
    assert texts["prompts"][1] == f"what is 2? {HOSTILE}"
    assert "not in this page" not in page.split("<script>")[0]


def test_conversations_are_in_the_page(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    index, texts = payload(page, "index"), payload(page, "texts")
    known = printable(HOSTILE, 60)
    assert [index["ends"][number] for number in index["ended"][:8]] == [
        *[None] * 2,
        "max_turns",
        *[None] * 3,
        known,
        None,
    ]
    assert [len(row) for row in texts["rows"]] == [6, 6, 7, 6] * 6
    role = printable(HOSTILE, 64)
    assert texts["rows"][6][6] == [
        20 - 11,
        [
            [0, 0, 3, "what"],
            [0, 1, 1, HOSTILE, role, 0.0, 1.5, 0.0625, [[role, 2, 0.25], ["add", 1, None]], 2],
            [0, 0, 2, HOSTILE, "tool"],
            [1, 0, 4, f"again {HOSTILE}"],
            [1, 1, 1, "end", "assistant"],
        ],
    ]


def test_files_without_turns_are_shown_beside_those_with_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    first = files.list_files(run / "rollouts")[0]
    table = parquet.read_table(first)
    parquet.write_table(table.drop_columns(["turns", "ended_by"]), first)
    page = page_of(run)
    assert f"{first.name} cannot be read" not in page
    assert [len(row) for row in payload(page, "texts")["rows"]] == [6, 6, 6, 6, 6, 6, 7, 6]
    assert payload(page, "index")["ended"] == [0] * 6 + [1, 0]
    parquet.write_table(table.drop_columns(["reward"]), first)
    assert f"{first.name} cannot be read." in page_of(run)


def test_nothing_that_a_model_wrote_is_in_the_page_as_it_is(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    html, script = page.rsplit("<script>", 1)
    assert "onerror" not in page and "what is" not in html and "reward raised" not in page
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|href|src\b", script)


def test_what_has_no_room_is_left_out_evenly_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", steps=40, length=3)
    monkeypatch.setattr(rollouts, "ROOM", 4000)
    browser = collect([read_run(run)])
    assert browser is not None and 0 < browser.num_texts < 160 == browser.num_rows
    assert sum(map(len, browser.packed.values())) <= 4000
    texts = json.loads(zlib.decompress(base64.b64decode(browser.packed["texts"])))
    places = [row[0] for row in texts["rows"]]
    assert places[0] == 0 and places[-1] == 159 and any(60 < place < 100 for place in places)
    page = page_of(run)
    assert f"{browser.num_texts} of them with their text, from all over the run; all are in the run" in page
    monkeypatch.setattr(rollouts, "MOST_ROWS", 50)
    browser = collect([read_run(run)])
    assert browser is not None and len(browser.columns["step"]) == 40
    assert browser.note.startswith("40 of 160 rollouts are in this page")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 64, 100])
def test_places_are_spread_over_the_range(count: int) -> None:
    places = spread(count)
    assert sorted(places) == list(range(count)) and places[:2] == [0, count - 1][: min(count, 2)]
    for taken in range(2, count):
        gaps = [b - a for a, b in zip(sorted(places[:taken]), sorted(places[:taken])[1:], strict=False)]
        assert max(gaps) <= 4 * count / taken + 1


def test_damaged_files_are_named_and_the_others_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=3)
    first, second, third = files.list_files(run / "rollouts")
    second.write_bytes(second.read_bytes()[:300])
    third.write_bytes(b"")
    page = page_of(run)
    assert payload(page, "index")["step"] == [1] * 4
    assert f"{second.name} cannot be read." in page and f"{third.name} cannot be read." in page
    first.unlink()
    page = page_of(run)
    assert 'data-part="index"' not in page and f"{second.name} cannot be read." in page


def test_runs_are_told_apart(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "a", steps=1), make_run(tmp_path / "b", steps=2))
    index = payload(page, "index")
    assert index["runs"] == ["a", "b"] and index["run"] == [0] * 4 + [1] * 8


def test_a_run_that_kept_nothing_has_no_browser(tmp_path: Path) -> None:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    (tmp_path / "run" / "rollouts" / "of the user.parquet").write_bytes(b"x")
    assert 'id="rollouts"' not in page_of(tmp_path / "run")
    assert health(read_run(tmp_path / "run"))
