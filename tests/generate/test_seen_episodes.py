"""What a run shows of episodes with tools: metrics and the report's page, against a count from the kept rollouts."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from small_runs import kept_rows, read_lines, said, sampled_config, word_model, write_lines
from tool_models import BROKEN, CALL, LOOK, STOPS, STRANGE, tool_model
from truestep.report import write_report
from truestep.rollouts.episodes import ENDS

WORDS = {"calculate": CALL, "look": LOOK, "(other)": STRANGE}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose template leaves out the past, so that documents have several sequences."""
    folder = tmp_path_factory.mktemp("seen")
    prompts = write_lines(folder / "p.jsonl", [{"id": f"p{number}", "prompt": "what is 1+2"} for number in range(4)])
    sampler = {"reward": None, "environment": {"class": "turn_environments:Tooled"}, "stop": list(STOPS)}
    sampler |= {"max_episode_tokens": 64, "max_turns": 3, "max_new_tokens": 12}
    sections = {"schedule": {"steps": 2, "docs_per_step": 16}, "logging": {"rollouts": {"documents": 100}}}
    model = tool_model(folder / "model", shown="[-3:]")
    text = said(sampled_config(model, prompts, folder / "run", sampler=sampler, **sections))
    assert "2 steps are done" in text and "rejected" not in text, "what is malformed is answered"
    return folder / "run"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_metrics_are_those_of_the_kept_rollouts(run: Path) -> None:
    rows, lines = kept_rows(run), read_lines(run / "metrics.jsonl")
    assert len(rows) == 32 and len({row["ended_by"] for row in rows}) > 1
    for line in lines:
        of_step = [row for row in rows if row["step"] == line["step"]]
        written = [[block for block in row["turns"] if block["label"]] for row in of_step]
        drawn = [block for blocks in written for block in blocks]
        counts = [float(len(blocks)) for blocks in written]
        assert line["policy_turns"] == pytest.approx(mean(counts)) and line["max_policy_turns"] == max(counts)
        for end in ENDS:
            assert line[f"ended_by/{end}"] == pytest.approx(mean([float(row["ended_by"] == end) for row in of_step]))
        told = {name: sum(block["text"].count(word) for block in drawn) for name, word in WORDS.items()}
        broken = sum(block["text"].count(BROKEN) for block in drawn)
        calls = broken + sum(told.values())
        assert calls > broken > 0
        assert line["tool_calls"] == pytest.approx(calls / 16)
        assert line["malformed_tool_calls"] == pytest.approx(broken / calls)
        for name, count in told.items():
            assert line.get(f"tool_calls/{name}", 0) == pytest.approx(count / 16)
        assert {name for name in line if name.startswith("tool_calls/")} <= {f"tool_calls/{name}" for name in WORDS}
        seconds = [(use["calls"], use["seconds"]) for block in drawn for use in block["tools"] if use["seconds"]]
        assert seconds and all(spent > 0 for _, spent in seconds)
        of_calls = {
            name: [
                use for block in drawn for use in block["tools"] if use["name"] == name and use["seconds"] is not None
            ]
            for name in ("calculate", "look")
        }
        for name, uses in of_calls.items():
            expected = sum(use["seconds"] for use in uses) / sum(use["calls"] for use in uses) if uses else None
            assert line.get(f"tool_time/{name}") == (None if expected is None else pytest.approx(expected))
        assert "tool_time/(other)" not in line, "what is no tool takes no time"
        assert line["turn_time/drawing"] == pytest.approx(mean([block["drawing_seconds"] for block in drawn]))
        answered = [block["environment_seconds"] for block in drawn if block["environment_seconds"] is not None]
        assert line["turn_time/environment"] == pytest.approx(mean(answered))
        assert all(
            use["seconds"] <= block["environment_seconds"]
            for block in drawn
            for use in block["tools"]
            if use["seconds"]
        )


def test_kept_turns_have_their_calls_and_rewards(run: Path) -> None:
    rows = kept_rows(run)
    assert any(row["turns"][-1]["sequence"] > 0 for row in rows), "the template rewrote the past"
    for row in rows:
        assert sum(block["tokens"] for block in row["turns"]) == row["tokens"]
        assert sum(block["tokens"] for block in row["turns"] if block["label"]) == row["length"]
        for block in (block for block in row["turns"] if block["label"]):
            assert block["role"] == "assistant"
            assert {use["name"]: use["calls"] for use in block["tools"]} == {
                name: block["text"].count(word) for name, word in WORDS.items() if word in block["text"]
            }
            assert block["malformed"] == block["text"].count(BROKEN)
            if row["ended_by"] == "environment":  # the environment rewards a turn by its calls
                calls = block["malformed"] + sum(use["calls"] for use in block["tools"])
                assert block["reward"] == (0.25 * calls or None)
        said_by_others = [block for block in row["turns"] if block["role"] and not block["label"]]
        assert all(block["role"] == "tool" and not block["tools"] for block in said_by_others)


def test_the_page_has_the_charts_and_the_conversations(run: Path) -> None:
    page = write_report([run], run.parent / "page.html").read_text()

    def payload(name: str) -> Any:
        (text,) = re.findall(rf'data-part="{name}">([^<]*)</script>', page)
        return json.loads(zlib.decompress(base64.b64decode(text)))

    rows, lines = kept_rows(run), read_lines(run / "metrics.jsonl")
    charts = {chart["title"]: chart for chart in payload("charts")["charts"]}
    ends = {line["name"]: line["values"] for line in charts["How episodes end"]["lines"]}
    assert charts["How episodes end"]["stacked"]
    for end, values in ends.items():
        assert values == pytest.approx([line[f"ended_by/{end}"] for line in lines], rel=1e-5)
    assert set(ends) == {row["ended_by"] for row in rows}
    assert "Time of a turn" in charts and "Time of a tool call" in charts and "Tool calls" in charts
    assert 'id="episodes"' in page
    assert not [title for title in charts if re.search("ended_by|_turns|turn_|tool_|_tool", title)], (
        "each has its place"
    )
    index, texts = payload("index"), payload("texts")
    assert [index["ends"][number] for number in index["ended"]] == [row["ended_by"] for row in rows]
    for row, (left_out, blocks) in zip(rows, (row[6] for row in texts["rows"]), strict=True):
        assert left_out == 0
        assert [block[:4] for block in blocks] == [
            [block["sequence"], int(block["label"]), block["tokens"], block["text"]] for block in row["turns"]
        ]
        for shown, block in zip(blocks, row["turns"], strict=True):
            assert [use[:2] for use in (shown + [None] * 10)[8] or []] == [
                [use["name"], use["calls"]] for use in block["tools"] or []
            ]
    assert STRANGE not in page and "<img/src" not in page


def test_what_episodes_print_has_their_names(run: Path) -> None:
    asked = {row["id"] for row in kept_rows(run) if any(block["environment_seconds"] for block in row["turns"])}
    lines = (run / "rewards.log").read_text().splitlines()
    named = [re.fullmatch(r"episodes-\d+: (\d+-\d+): turn \d", line) for line in lines]
    assert all(named), lines[:3]
    assert len(asked) > 16 and asked <= {found[1] for found in named if found}


def test_a_run_of_single_turns_has_none_of_this(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", [{"id": "p", "prompt": "sort 3 1 ="}])
    said(sampled_config(word_model(tmp_path / "m"), prompts, tmp_path / "run", schedule={"steps": 1}))
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert not [name for name in line if re.search("turn|tool|ended", name)]
    assert all(row["turns"] is None and row["ended_by"] is None for row in kept_rows(tmp_path / "run"))
    page = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert 'id="episodes"' not in page and "how episodes end" not in page.lower()
