"""The report: what it says, what it must survive, and that it leaves nothing behind."""

import base64
import hashlib
import json
import math
import os
import random
import re
import zlib
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from truestep.report import parts, write_report
from truestep.report.charts import wants_logarithm
from truestep.report.formats import format_duration, format_number
from truestep.report.health import health
from truestep.report.runs import read_run, run_names
from truestep.report.series import Series, bucket_means, downsample
from truestep.report.verdicts.evidence import Verdict
from truestep.report.verdicts.state import find_fall

VOID = {"meta", "br"}


class Page(HTMLParser):
    """The page as text by element, checked to be well nested on the way."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[tuple[str, dict]] = []
        self.texts: list[tuple[list[tuple[str, dict]], str]] = []
        self.elements: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert not self.stack, self.stack

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.stack.append((tag, dict(attributes)))

    def handle_startendtag(self, tag: str, attributes: list) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self.stack.pop()
        assert opened == tag, (opened, tag)

    def handle_data(self, data: str) -> None:
        self.texts.append((list(self.stack), data))

    def inside(self, tag: str, name: str = "") -> list[str]:
        """The texts within elements of a tag and a class."""
        return [
            text
            for stack, text in self.texts
            if text.strip()
            and any(tag == one and name in ["", *(attributes.get("class") or "").split()] for one, attributes in stack)
        ]

    @property
    def tiles(self) -> dict[str, str]:
        texts = self.inside("dl", "tiles")
        labels = [text for stack, text in self.texts if stack and stack[-1][0] == "dt" and text in texts]
        return {label: texts[texts.index(label) + 1] for label in labels}

    @property
    def notes(self) -> dict[str, str]:
        """The level of each note by its text."""
        found = {}
        for stack, text in self.texts:
            if len(stack) > 1 and stack[-1][0] == "p" and stack[-2][0] == "li":
                found[text] = stack[-2][1]["class"]
        return found

    @property
    def verdicts(self) -> dict[str, str]:
        """The level of each verdict by its title."""
        return {
            text: stack[-3][1]["class"]
            for stack, text in self.texts
            if stack and stack[-1] == ("p", {"class": "title"}) and stack[-3][0] == "li"
        }

    @property
    def payload(self) -> dict:
        """What the script draws the charts from."""
        (text,) = [text for stack, text in self.texts if stack and stack[-1][1].get("data-part") == "charts"]
        value: dict = json.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        return value

    @property
    def charts(self) -> dict[str, list[dict]]:
        """The lines of each chart by its title, each with its points as [step, documents, value]."""
        titles = [text for stack, text in self.texts if stack and stack[-1][0] == "h3" and stack[-2][0] == "figcaption"]
        data = self.payload
        places = [int(attributes["data-chart"]) for _, attributes in self.elements if "data-chart" in attributes]
        assert [data["charts"][place]["title"] for place in places] == titles
        assert sorted(places) == list(range(len(data["charts"])))
        return {
            title: [line | {"points": points_of(data, line)} for line in data["charts"][place]["lines"]]
            for title, place in zip(titles, places, strict=True)
        }

    @property
    def constant(self) -> str:
        """The charts that are a line of text."""
        return " ".join(self.inside("p", "constant"))


def points_of(data: dict, line: dict) -> list[list[float | None]]:
    """The points of a line, each with its step, documents and value, in the way in which the script finds them."""
    table, rows = data["places"][line["at"]]
    columns = data["tables"][table]
    documents = columns.get("documents") or [None] * len(columns["step"])
    rows = range(len(columns["step"])) if rows is None else rows
    assert len(line["values"]) == len(rows)
    return [[columns["step"][row], documents[row], value] for row, value in zip(rows, line["values"], strict=True)]


def write_lines(path: Path, records: Iterable[dict], end: str = "\n") -> None:
    path.write_text("\n".join(json.dumps(record) for record in records) + end)


def make_metrics(steps: int, documents: int = 8, **changes: object) -> list[dict]:
    return [
        {
            "step": step,
            "documents_seen": documents * step,
            "num_documents": documents,
            "num_tokens": 1000,
            "num_labels": 500,
            "step_time": 30.0,
            "tokens_per_second": 1234.5,
            "data_wait_time": 0.5,
            "loss": 0.1 / step,
            "reward": 0.2 + 0.5 * step / steps,
            "ratio_new_old": 1.0 if step == 1 else 1.00012,
            "ratio_new_old_sum": 500.0,
            "ratio_new_old_squared_sum": 500.0005,
            "clipped_ratio_fraction": 0.02,
            "kl_new_old": 1e-5,
            "entropy": 0.5,
            "new_logprobs": -0.4,
            "old_logprobs": -0.4,
            "grad_norm": 0.3 + 0.01 * (step % 3),
            "learning_rate": 1e-6,
            "time/sampling": 20.0 + step % 2,
            "time/forward": 9.0,
            "time/reference": 0.0,
            "time/evaluation": 4.0 * (step == 1),
            **changes,
        }
        for step in range(1, steps + 1)
    ]


def make_evaluations(steps: int, documents: int = 8) -> list[dict]:
    return [
        {
            "step": step,
            "documents_seen": documents * step,
            "num_prompts": 200,
            "greedy_reward": reward,
            "sampled_reward": reward - 0.05,
            "greedy_reward_std": 0.45,
            "sampled_reward_std": 0.45,
            "seconds": 2.0,
            "examples": [{"prompt": "2 + 2?", "completion": completion, "reward": reward}],
        }
        for step, reward, completion in ((0, 0.25, "perhaps 5"), (steps, 0.625, "surely 4"))
    ]


def make_run(path: Path, steps: int = 20, documents: int = 8, metrics: list[dict] | None = None) -> Path:
    path.mkdir(parents=True)
    write_lines(path / "metrics.jsonl", make_metrics(steps, documents) if metrics is None else metrics)
    write_lines(path / "evaluation.jsonl", make_evaluations(steps, documents))
    write_lines(
        path / "ledger.jsonl",
        (
            {
                "step": step,
                "documents": [documents * step + index for index in range(documents)],
                "num_documents": documents,
                "documents_seen": documents * step,
            }
            for step in range(1, steps + 1)
        ),
    )
    (path / "config.yaml").write_text("seed: 7\nversions:\n  torch: 2.9.0\n")
    return path


def page_of(*runs: Path, **options: str) -> Page:
    output = runs[0].parent / "report.html"
    assert write_report(runs, output, **options) == output
    return Page(output.read_text())


def test_page_of_a_healthy_run(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "first"))
    assert page.inside("h1") == ["first"]
    assert not page.inside("p", "subject"), "nothing is known of it"
    facts = page.inside("dl", "facts")
    assert dict(zip(facts[::2], facts[1::2], strict=True)) == {
        "Steps": "20",
        "Documents": "160",
        "Tokens": "20,000",
        "Time in steps": "10 min",
        "Time in evaluations": "4.0 s",
        "Median tokens/s": "1,234",
    }
    assert page.inside("p", "versions") == ["torch 2.9.0"]
    assert page.tiles == {
        "Held-out reward, greedy": "0.250 → 0.625",
        "Held-out reward, sampled": "0.200 → 0.575",
        "Final training reward": "0.7000",
        "|ratio \N{MINUS SIGN} 1| at step 1": "0",
        "Last ratio new/old": "1.00012",
        "Clipped fraction, last": "2.00%",
        "Gradient norm, median": "0.310",
        "Rejected records": "0",
    }
    assert set(page.notes.values()) == {"good"}
    assert page.verdicts == {"The policy learned": "good"}
    assert ("div", {"class": "notes card well"}) in page.elements
    assert any(note.startswith("The ratio at step 1 is 1.00000: sampler and trainer agree") for note in page.notes)
    assert page.charts["Training reward"][0]["points"][-1] == [20, 160, 0.7]
    assert [series["name"] for series in page.charts["Held-out reward"]] == ["greedy", "sampled"]
    assert "surely 4" in page.inside("div", "pair")
    assert "perhaps 5" in page.inside("div", "pair")
    assert any("seed: 7" in text for text in page.inside("pre"))


def test_links_stand_in_the_order_of_the_parts(tmp_path: Path) -> None:
    write_report([make_run(tmp_path / "first")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    links = re.findall(r'<a href="#([^"]+)">', page)
    assert {"evaluations", "numbers", "configuration"} < set(links)
    places = [page.index(f'id="{link}"') for link in links]
    assert places == sorted(places)


def test_axes_are_documents_steps_and_time(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "first"))
    assert [axis["name"] for axis in page.payload["axes"]] == ["documents", "step", "clock"]
    metrics, evaluations = page.payload["tables"]
    assert metrics["documents"] == [8 * step for step in range(1, 21)]
    # A step takes 30 s, and the evaluation before the first one took 4 s.
    assert metrics["clock"] == [30 * step + 4 for step in range(1, 21)]
    assert evaluations == {"documents": [0, 160], "step": [0, 20], "clock": [0, 604]}


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "first"))
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe"}
        assert not {"src", "onclick", "onload"} & set(attributes), (tag, attributes)
        assert attributes.get("href", "#").startswith("#")
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    links = [attributes["href"][1:] for tag, attributes in page.elements if tag == "a"]
    assert links and set(links) <= anchors
    assert {"reward", "loss-and-optimizer", "numbers", "evaluations", "configuration"} <= set(links)


def test_only_the_script_of_the_page_runs(tmp_path: Path) -> None:
    """The policy names the script by its hash, so that nothing else can run, whatever comes into the page."""
    page = page_of(make_run(tmp_path / "first"))
    (policy,) = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    script = "".join(text for stack, text in page.texts if stack and stack[-1] == ("script", {}))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy
    assert not re.search("</script|<!--|\r", script)


def test_the_library_is_whole_and_has_its_license() -> None:
    folder = Path(parts.__file__).parent / "static"
    digest = hashlib.sha256((folder / "uPlot.iife.min.js").read_bytes()).hexdigest()
    assert digest == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    assert "The MIT License" in (folder / "uPlot.LICENSE.txt").read_text()
    assert "1.6.32" in (folder / "NOTICE.txt").read_text()
    assert (folder / "uPlot.LICENSE.txt").read_text() in parts.script()


def test_numbers_stand_in_a_table_that_needs_no_script(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "first"), make_run(tmp_path / "second", 10)
    page = page_of(run)
    table = page.inside("details", "numbers")
    at = table.index("loss")
    assert table[at + 1 : at + 5] == ["0.1000", "5e-3", "5e-3", "0.1000"] or table[at + 2] == "0.005000"
    assert "evaluation: greedy_reward" in table
    assert any("need JavaScript" in text for text in page.inside("noscript"))
    table = page_of(run, other).inside("details", "numbers")
    at = table.index("documents_seen")
    assert table[at + 1 : at + 3] == ["160", "80"]


def test_data_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"quoted\" 'single' \ud800"
    run = make_run(tmp_path / "a<b>&c")
    evaluations = make_evaluations(20)
    for evaluation in evaluations:
        evaluation["examples"] = [{"prompt": evil, "completion": evil, "reward": 1.0}]
    write_lines(run / "evaluation.jsonl", evaluations)
    write_lines(run / "rejected.jsonl", [{"file": "x", "line": 1, "reason": evil}])
    (run / "config.yaml").write_text("key: '</pre><script>alert(3)</script>'\n")
    other = make_run(tmp_path / "</script><b>" / "second")
    for page in (page_of(run, title=evil), page_of(run, other)):
        scripts = [attributes for tag, attributes in page.elements if tag == "script"]
        # The numbers of the charts, and the page's own.
        assert scripts == [{"type": "text/plain", "data-part": "charts"}, {}]
        assert "img" not in {tag for tag, _ in page.elements}
        assert any("</script><script>alert(1)</script><img src=x" in text for text in page.inside("div", "text"))
        assert any("alert(3)" in text for text in page.inside("pre"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    page = page_of(empty)
    for file in ("metrics.jsonl", "evaluation.jsonl", "ledger.jsonl", "config.yaml"):
        assert any(f"{file} is missing" in note and level == "warning" for note, level in page.notes.items())
    assert page.charts == {}
    assert page.tiles["Final training reward"] == "\N{EN DASH}"
    assert "Nothing to draw" in page.inside("p", "empty")[0]
    assert any("does not exist" in note for note in page_of(tmp_path / "nowhere").notes)


def test_cut_and_broken_lines_are_left_out_and_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "cut")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[4] = "not json"
    (run / "metrics.jsonl").write_bytes("\n".join(lines).encode()[:-30] + "é".encode()[:1])
    page = page_of(run)
    assert "metrics.jsonl: the last line is cut off and was left out." in page.notes
    where = f"line 5, byte {len(chr(10).join(lines[:4])) + 1}: not JSON: Expecting value at its column 1"
    assert f"metrics.jsonl: 1 line is no JSON object and left out ({where})." in page.notes
    steps = [point[0] for point in page.charts["Loss"][0]["points"]]
    assert steps == [step for step in range(1, 20) if step != 5]


def test_not_a_number_is_a_gap_and_a_note(tmp_path: Path) -> None:
    metrics = make_metrics(20)
    metrics[6]["loss"] = math.nan
    metrics[7]["loss"] = None
    metrics[8]["grad_norm"] = math.inf
    metrics[9].pop("entropy")
    metrics[10]["entropy"] = 0.6
    page = page_of(make_run(tmp_path / "nan", metrics=metrics))
    assert page.notes["The loss is NaN, infinite or null at steps 7 and 8."] == "bad"
    assert page.notes["NaN, infinite or null: grad_norm at step 9."] == "warning"
    values = {point[0]: point[2] for point in page.charts["Loss"][0]["points"]}
    assert values[7] is None
    assert values[8] is None
    assert values[6] == pytest.approx(0.1 / 6, rel=1e-5)
    # A metric that is not on a line is no gap.
    assert len(page.charts["Entropy"][0]["points"]) == 19
    assert "2 values not finite: gaps in the line." in page.inside("p", "gaps")


def test_groups_that_teach_nothing_are_noted(tmp_path: Path) -> None:
    late = {"zero_advantage_groups": 0.85, "distinct_completions": 0.75, "group_reward_spread": 0.1}
    early = {"zero_advantage_groups": 0.1, "distinct_completions": 1.0, "group_reward_spread": 0.5}
    found = {}
    for name, ending in (("poor", late), ("good", early)):
        metrics = [line | {"reward": 0.5} | (ending if line["step"] > 6 else early) for line in make_metrics(16, 64)]
        run = make_run(tmp_path / name, 16, 64, metrics)
        (run / "evaluation.jsonl").unlink()
        page = page_of(run)
        assert name == "good" or {"Groups", "Spread of rewards"} <= set(page.charts)
        found[name] = {title for title, level in page.verdicts.items() if level == "warning"}
    assert found == {"poor": {"Most groups teach nothing"}, "good": set()}


def test_every_value_not_a_number(tmp_path: Path) -> None:
    metrics = [
        {key: value if key == "step" else math.nan for key, value in record.items()} for record in make_metrics(5)
    ]
    run = make_run(tmp_path / "nan", metrics=metrics)
    (run / "ledger.jsonl").unlink()
    page = page_of(run)
    assert set(page.charts) == {"Held-out reward"}
    assert page.tiles["Last ratio new/old"] == "NaN"
    assert any(level == "bad" and "not a finite number" in note for note, level in page.notes.items())


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-12, 1e300, -1e308, 5e-324, 10**400])
def test_constant_series_of_any_size(tmp_path: Path, value: float) -> None:
    run = make_run(tmp_path / "constant", metrics=make_metrics(5, loss=value, grad_norm=value))
    page = page_of(run)
    if abs(value) > 1e300:  # no number that can be drawn
        assert "Loss" not in page.charts and "Loss" not in page.constant
    else:
        assert not {"Loss", "Gradient norm"} & set(page.charts)
        assert "Loss " + format_number(value).replace("-", "\N{MINUS SIGN}") in page.constant
    assert "Entropy 0.5000" in page.constant and "Learning rate 1e\N{MINUS SIGN}6" in page.constant
    # A series that is constant but for one value is drawn.
    metrics = make_metrics(5)
    metrics[2]["learning_rate"] = 2e-6
    assert "Learning rate" in page_of(make_run(tmp_path / "almost", metrics=metrics)).charts


@pytest.mark.parametrize("values", [(1e300, -1e300), (5e-324, 1e-310), (1e29, 1e31)])
def test_numbers_stay_within_what_a_chart_can_draw(tmp_path: Path, values: tuple[float, float]) -> None:
    metrics = make_metrics(5)
    for line in metrics:
        line["loss"] = values[line["step"] % 2]
    (loss,) = page_of(make_run(tmp_path / "run", metrics=metrics)).charts["Loss"]
    assert all(value == 0 or 1e-30 <= abs(value) <= 1e30 for value in loss["values"])


def test_lines_that_coincide_are_told_apart(tmp_path: Path) -> None:
    """Old and new log-probs are the same here; the mean of a reward's part lies elsewhere."""
    metrics = [
        line | {"new_logprobs": -1 / line["step"], "old_logprobs": -1 / line["step"]} for line in make_metrics(9)
    ]
    metrics = [line | {"rewards/a": 0.1 * line["step"], "rewards/b": 0.2 * line["step"]} for line in metrics]
    charts = page_of(make_run(tmp_path / "run", metrics=metrics)).charts
    assert [line["below"] for line in charts["Log-probability"]] == ["old policy", None]
    assert [line["below"] for line in charts["Parts of the reward"]] == [None, None]
    assert [line["name"] for line in charts["Parts of the reward"]] == ["a", "b"]
    one, two = (make_run(tmp_path / name, metrics=metrics) for name in ("one", "two"))
    assert [line["below"] for line in page_of(one, two).charts["Training reward"]] == ["two", None]
    short = make_run(tmp_path / "short", metrics=metrics[:5])
    assert [line["below"] for line in page_of(short, one).charts["Training reward"]] == ["one", None]
    metrics[3] = metrics[3] | {"reward": 0.9}
    other = make_run(tmp_path / "other", metrics=metrics)
    assert [line["below"] for line in page_of(one, other).charts["Training reward"]] == [None, None]


def test_time_is_stacked_and_parts_that_take_none_are_left_out(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("one", "two")]
    page = page_of(runs[0])
    (times,) = [chart for chart in page.payload["charts"] if chart["stacked"]]
    assert [line["name"] for line in times["lines"]] == ["sampling", "forward", "evaluation"]
    assert len({line["colour"] for line in times["lines"]}) == 3
    stacked = [chart["title"] for chart in page_of(*runs).payload["charts"] if chart["stacked"]]
    assert stacked == ["Where the time goes, one", "Where the time goes, two"]


def test_pass_at_k_and_held_out_loss_are_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    evaluations = [line | {"pass@1": 0.1 + at, "pass@4": 0.4 + at} for at, line in enumerate(make_evaluations(20))]
    write_lines(run / "evaluation.jsonl", evaluations)
    assert [line["name"] for line in page_of(run).charts["pass@k"]] == ["pass@1", "pass@4"]
    write_lines(run / "evaluation.jsonl", ({"step": step, "loss": 2.0 - step} for step in range(3)))
    assert [point[2] for point in page_of(run).charts["Held-out loss"][0]["points"]] == [2, 1, 0]


def written(run: Path) -> str:
    return write_report([run], run / "report.html").read_text(encoding="utf-8")


def test_sources_of_prompts_have_charts_and_a_table(tmp_path: Path) -> None:
    lines = make_metrics(4)
    for number, line in enumerate(lines):
        line |= {
            "easy_prompts": 0.1 * number,
            "hopeless_prompts": 0.25,
            "source_groups/ma<b": 3,
            "source_groups/code": 1,
        }
        line |= {"easy_prompts/ma<b": 0.2 * number, "hopeless_prompts/ma<b": 0.0, "source_passes/ma<b": number + 1}
        line |= {"source_reward/ma<b": 0.5 + 0.125 * number} if number < 3 else {}
    run = make_run(tmp_path / "run", metrics=lines)
    evaluations = [line | {"greedy_reward/code": 0.1 * at} for at, line in enumerate(make_evaluations(4))]
    write_lines(run / "evaluation.jsonl", evaluations)
    page = page_of(run)
    assert [line["name"] for line in page.charts["Prompts that rest"]] == ["too easy", "hopeless"]
    assert [point[2] for point in page.charts["Training reward by source"][0]["points"]] == [0.5, 0.625, 0.75]
    assert [line["name"] for line in page.charts["Held-out reward by source, greedy"]] == ["code"]
    assert not any(title.startswith(("easy_prompts", "source_")) for title in page.charts)
    (table,) = re.findall(r'id="sources".*?<tbody>(.*?)</tbody>', written(run), re.DOTALL)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("</tr>") if row.strip()]
    assert rows == [
        ["ma&lt;b", "12", "75.0%", "4", "0.7500", "60.0%", "0.0%"],
        ["code", "4", "25.0%", "\N{EN DASH}", "\N{EN DASH}", "\N{EN DASH}", "\N{EN DASH}"],
        ["all prompts", "16", "100.0%", "\N{EN DASH}", rows[2][4], "30.0%", "25.0%"],
    ]
    assert "#sources" in written(run) and "#sources" not in written(make_run(tmp_path / "other"))


def test_one_point_is_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "one", steps=1)
    write_lines(run / "evaluation.jsonl", make_evaluations(1)[:1])
    page = page_of(run)
    assert page.charts["Loss"][0]["points"] == [[1, 8, 0.1]]
    assert page.tiles["Held-out reward, greedy"] == "0.250"
    assert page.verdicts == {"Too early for a verdict": "note"}


def test_two_runs_are_compared_over_documents(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first", 20, 8), make_run(tmp_path / "second", 10, 32)
    page = page_of(first, second)
    assert page.inside("h1") == ["first against second"]
    assert [series["name"] for series in page.charts["Training reward"]] == ["first", "second"]
    assert [series["colour"] for series in page.charts["Training reward"]] == [0, 1]
    assert {"Held-out reward, greedy", "Held-out reward, sampled"} <= set(page.charts)
    assert page.inside("ul", "legend") == ["first", "second"]
    table = page.inside("table")
    at = table.index("Documents")
    assert table[at + 1 : at + 3] == ["160", "320"]
    tables = page.payload["tables"]
    assert [table["documents"][-1] for table in tables] == [160, 160, 320, 320]


def test_nine_runs_stay_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed-{index}", 3) for index in range(9)]
    lines = page_of(*runs).charts["Training reward"]
    assert len({(line["colour"], line["dashed"]) for line in lines}) == 9


def test_runs_of_the_same_name(tmp_path: Path) -> None:
    assert run_names([Path("/a/run"), Path("/b/run"), Path("/c/other")]) == ["a/run", "b/run", "other"]
    assert run_names([Path("/a/run"), Path("/a/run")]) == ["a/run (1)", "a/run (2)"]


def test_ratio_off_at_the_first_step(tmp_path: Path) -> None:
    metrics = make_metrics(5)
    metrics[0]["ratio_new_old"] = 1.02
    page = page_of(make_run(tmp_path / "off", metrics=metrics))
    assert page.tiles["|ratio \N{MINUS SIGN} 1| at step 1"] == "0.020"
    assert [level for note, level in page.notes.items() if note.startswith("The ratio at step 1 is 1.02000")] == ["bad"]


def test_mean_ratio_that_hides_a_spread(tmp_path: Path) -> None:
    # Half of the tokens at a ratio of 0.5, half at 1.5: the mean is 1, the root mean square deviation one half.
    metrics = make_metrics(5, ratio_new_old_sum=500.0, ratio_new_old_squared_sum=625.0)
    notes = health(read_run(make_run(tmp_path / "spread", metrics=metrics))).notes
    assert any(note.level == "warning" and "strays from 1 by 0.50 RMS" in note.text for note in notes)
    assert not any("sampler and trainer agree" in note.text for note in notes)


def test_spikes_batch_sizes_and_ledger(tmp_path: Path) -> None:
    metrics = make_metrics(20)
    metrics[11]["grad_norm"] = 40.0
    metrics[3]["num_documents"] = 7
    run = make_run(tmp_path / "odd", metrics=metrics)
    with (run / "ledger.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 21, "documents": [8, 9], "num_documents": 2, "documents_seen": 162}) + "\n")
    write_lines(run / "rejected.jsonl", [{"file": "x", "line": index, "reason": "too long"} for index in range(3)])
    page = page_of(run)
    assert page.tiles["Rejected records"] == "3"
    notes = page.notes
    spike = next(note for note in notes if note.startswith("The gradient norm exceeds 10 times its median"))
    assert "at step 12; the largest is 40" in spike
    assert notes["Not every step trained on 8 documents: 7 at step 4."] == "warning"
    assert notes["The ledger has 2 of 160 documents more than once (up to 2 times): 8, 9."] == "warning"
    assert notes["Ledger and metrics disagree on the number of documents at step 4."] == "warning"
    assert notes["3 records were rejected: 3 \N{MULTIPLICATION SIGN} too long."] == "note"


def test_gradient_norm_over_orders_of_magnitude_is_logarithmic(tmp_path: Path) -> None:
    metrics = make_metrics(20)
    page = page_of(make_run(tmp_path / "narrow", metrics=metrics))
    assert not any(chart["log"] for chart in page.payload["charts"])
    metrics[5]["grad_norm"] = 900.0
    metrics[6]["grad_norm"] = 0.0
    page = page_of(make_run(tmp_path / "wide", metrics=metrics))
    assert [chart["title"] for chart in page.payload["charts"] if chart["log"]] == ["Gradient norm"]
    assert "1 value of 0 at the lower edge." in page.inside("p", "gaps")


def test_resumed_run_shows_the_later_line(tmp_path: Path) -> None:
    metrics = make_metrics(10)
    run = make_run(tmp_path / "resumed", metrics=[*metrics[:7], *({**one, "loss": 5.0} for one in metrics[4:])])
    page = page_of(run)
    assert [point[2] for point in page.charts["Loss"][0]["points"]][4:] == [5] * 6
    assert any("3 lines repeat a step" in note for note in page.notes)


def test_documents_are_counted_where_none_are_logged(tmp_path: Path) -> None:
    metrics = [{"step": step, "loss": 1.0 / step, "num_documents": 4} for step in (1, 2, 3)]
    run = tmp_path / "old"
    run.mkdir()
    write_lines(run / "metrics.jsonl", metrics)
    assert [point[1] for point in page_of(run).charts["Loss"][0]["points"]] == [4, 8, 12]
    write_lines(run / "metrics.jsonl", ({"step": step, "loss": 1.0 / step} for step in (1, 2, 3)))
    page = page_of(run)
    assert [axis["name"] for axis in page.payload["axes"]] == ["step"]


def test_long_run_is_thinned_without_losing_its_extremes(tmp_path: Path) -> None:
    steps = np.arange(5000.0)
    values = np.sin(steps)
    values[1234], values[4321] = 99.0, math.nan
    thin = downsample(Series(steps, 2 * steps, values))
    assert len(thin) <= 1000
    assert {0, 1234, 4321, 4999} <= set(thin.steps.tolist())
    assert thin.steps.tolist() == sorted(set(thin.steps.tolist()))
    assert (thin.documents == 2 * thin.steps).all()
    np.testing.assert_array_equal(thin.values, values[thin.steps.astype(int)])
    page = page_of(make_run(tmp_path / "long", steps=3000))
    (loss,) = page.charts["Loss"]
    assert len(loss["points"]) <= 1000 and loss["count"] == 3000
    assert [step for step, _, _ in loss["points"]][::599] == [1, 2999] or loss["points"][-1][0] == 3000
    assert len(loss["means"]) == 300
    assert os.path.getsize(tmp_path / "report.html") < 1_000_000


def test_one_bad_step_of_many_stays_in_sight(tmp_path: Path) -> None:
    """A single spike, and a single value that is none, among lines that are thinned."""
    path = tmp_path / "metrics.jsonl"
    values: dict[int, float | None] = {1717: 1e6, 3131: None}
    lines = [{"step": step, "documents_seen": step, "loss": values.get(step, 0.5)} for step in range(5000)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    points = read_run(tmp_path).points("loss")
    drawn = dict(zip(points.thinned.steps.tolist(), points.thinned.values.tolist(), strict=True))
    assert len(drawn) < 1000
    assert drawn[1717] == 1e6
    assert math.isnan(drawn[3131])
    assert points.gaps.tolist() == [3131]


def test_means_of_a_long_line_are_those_of_its_stretches() -> None:
    values = [math.nan if 60 <= step < 80 else 1e300 if step == 3 else float(step % 7) for step in range(3000)]
    series = Series(np.arange(3000.0), np.full(3000, math.nan), np.array(values))
    means = bucket_means(series)
    assert len(means) == 300
    for bucket, mean in enumerate(means.values.tolist()):
        there = [value for value in values[10 * bucket : 10 * bucket + 10] if not math.isnan(value)]
        assert math.isnan(mean) if not there else mean == pytest.approx(sum(value / len(there) for value in there))
    assert means.steps.tolist() == [10 * bucket + 5 for bucket in range(300)]
    assert bucket_means(series.chosen(range(500))).values.tolist() == pytest.approx(values[:500], nan_ok=True)


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs" / "first")
    output = tmp_path / "reports" / "page.html"
    write_report([run], output)
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    before = output.read_text()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report([run], output, title="another")
    assert output.read_text() == before
    assert [path.name for path in output.parent.iterdir()] == ["page.html"]
    with pytest.raises(ValueError, match="at least one run"):
        write_report([], output)


def test_values_over_more_than_two_orders_of_magnitude_want_a_logarithm() -> None:
    assert wants_logarithm([0.0, 0.1, 11.0])
    assert not wants_logarithm([0.1, 9.0])
    assert not wants_logarithm([-1, 0.1, 11])


def test_numbers_as_people_read_them() -> None:
    assert [format_number(value) for value in (None, math.nan, -math.inf)] == ["\N{EN DASH}", "NaN", "-Inf"]
    assert [format_number(value) for value in (0, 1234567, 1234.5678, 0.61234, 1.5e-6)] == [
        "0",
        "1,234,567",
        "1,235",
        "0.6123",
        "1.5e-6",
    ]
    assert [format_duration(value) for value in (4.25, 59, 61, 3600, 11520, 200_000)] == [
        "4.2 s",
        "59 s",
        "1 min 1 s",
        "1 h",
        "3 h 12 min",
        "2 d 7 h",
    ]


def test_what_the_configuration_asks_for_is_no_fault(tmp_path: Path) -> None:
    """Two epochs are no documents trained twice by mistake, and a run without evaluation lacks none."""
    run = tmp_path / "run"
    run.mkdir()
    lines = [{"step": step, "documents": ["a", "b"], "num_documents": 2, "documents_seen": 2 * step} for step in (1, 2)]
    for name in ("ledger.jsonl", "metrics.jsonl"):
        (run / name).write_text("".join(json.dumps({"loss": 1.0} | line) + "\n" for line in lines))
    config = "data: {epochs: 2}\nschedule: {docs_per_step: %d, updates_per_batch: 1}\nevaluation: null\n"
    (run / "config.yaml").write_text(config % 2)
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "none of its 2 documents more than 2 times" in text
    assert "Every step trained on 2 documents" in text
    assert "evaluation.jsonl is missing" not in text
    (run / "config.yaml").write_text((config % 3).replace("epochs: 2", "epochs: 1"))
    text = write_report([run], tmp_path / "page.html").read_text()
    assert "2 of 2 documents more than once" in text
    assert "Not every step trained on 3 documents: 2 at" in text


def judged(
    tmp_path: Path, name: str, rewards: Iterable[float], entropies: Iterable[float] | None = None
) -> dict[str, Verdict]:
    metrics = make_metrics(len(rewards := list(rewards)))
    for line, reward, entropy in zip(metrics, rewards, entropies or [0.5] * len(rewards), strict=True):
        line |= {"reward": reward, "entropy": entropy, "min_reward": 0.0, "max_reward": 1.0}
    run = make_run(tmp_path / name, metrics=metrics)
    (run / "evaluation.jsonl").unlink()
    return {verdict.kind: verdict for verdict in health(read_run(run)).verdicts}


def test_entropy_is_judged_beside_the_reward(tmp_path: Path) -> None:
    falling = [1.0 / step**2 for step in range(1, 41)]
    found = {}
    for end in (0.97, 0.6, 0.2):
        rewards = [0.2 + (end - 0.2) * min(1.0, step / 30) for step in range(40)]
        found[end] = judged(tmp_path, str(end), rewards, falling)
    assert [list(verdicts) for verdicts in found.values()] == [
        ["learned"],
        ["learned"],
        ["unchanged", "no exploration"],
    ]
    assert found[0.97]["learned"].level == "good" and "from 0.251" in found[0.97]["learned"].evidence
    assert found[0.2]["no exploration"].level == "warning"
    # A reward that rises first and is lost again is no success.
    lost = [0.2 + 0.6 * min(1.0, step / 10) - 0.5 * max(0.0, (step - 20) / 20) for step in range(40)]
    assert list(judged(tmp_path, "lost", lost, falling)) == ["worse", "no exploration"]


def test_a_fall_of_the_training_reward_is_mentioned(tmp_path: Path) -> None:
    generator = random.Random(0)
    rising = [0.1 + 0.008 * step + generator.gauss(0, 0.05) for step in range(100)]
    falling = [*rising[:60], *(0.3 + generator.gauss(0, 0.05) for _ in range(40))]
    told = judged(tmp_path, "falling", falling)["worse"]
    assert told.level == "bad"
    assert "the training reward was 0.5" in told.evidence and "over the 10 steps up to step 5" in told.evidence
    assert "and is 0.3" in told.evidence
    assert list(judged(tmp_path, "rising", rising)) == ["learned"]
    # Noise alone is no fall: none of a hundred runs of it is told to have one.
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0.5, 0.1, 200)
        assert find_fall(noise) is None


def test_a_fall_of_the_held_out_rewards_is_mentioned(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    # The training reward stays as it is, so that the held-out rewards alone are judged.
    write_lines(run / "metrics.jsonl", make_metrics(20, reward=0.5, min_reward=0.0, max_reward=1.0))

    def told(greedy: list[float], sampled: list[float], spread: float | None = 0.5) -> dict[str, Verdict]:
        lines = [
            {"step": step, "num_prompts": 200, "greedy_reward": one, "sampled_reward": two}
            | ({} if spread is None else {"greedy_reward_std": spread, "sampled_reward_std": spread})
            for step, (one, two) in enumerate(zip(greedy, sampled, strict=True))
        ]
        write_lines(run / "evaluation.jsonl", lines)
        return {verdict.kind: verdict for verdict in health(read_run(run)).verdicts}

    found = told([0.2, 0.5, 0.6], [0.2, 0.4, 0.5])
    assert list(found) == ["learned"] and found["learned"].level == "good" and "greedy" in found["learned"].evidence
    found = told([0.2, 0.5, 0.6], [0.5, 0.4, 0.2])
    assert list(found) == ["worse"] and "sampled reward went from 0.500 to 0.200" in found["worse"].evidence
    found = told([0.2, 0.9, 0.5], [0.2, 0.2, 0.2])
    assert list(found) == ["learned", "best is past"] and found["best is past"].level == "warning"
    assert "it was 0.900 after step 1, and is 0.500" in found["best is past"].evidence
    # A wide spread explains the same change; where none is logged, that of rewards from 0 to 1 is at most this wide.
    assert list(told([0.2, 0.5, 0.6], [0.2, 0.4, 0.5], spread=3.0)) == ["unchanged"]
    assert list(told([0.2, 0.5, 0.6], [0.2, 0.4, 0.5], spread=None)) == ["learned"]
    assert list(told([0.2, 0.2, 0.25], [0.2, 0.2, 0.2], spread=None)) == ["unchanged"]


@pytest.mark.parametrize(
    ("more", "rest"),
    [
        ({"sampler": {"prompts": "sums.jsonl", "reward": "r:score"}}, "on sums.jsonl, reward r:score"),
        ({"sampler": {"prompts": {"dataset": "openai/gsm8k", "split": "train"}}}, "on openai/gsm8k"),
        ({"sampler": {"prompts": {"a": "a.jsonl", "b": {"dataset": "b/b"}}}}, "on a.jsonl, b/b"),
        ({"data": {"path": ["1.jsonl", "2.jsonl", "3.jsonl"]}}, "on 1.jsonl, 2.jsonl, 3.jsonl"),
        ({"data": {"path": [f"{n}.jsonl" for n in range(9)]}}, "on 0.jsonl, 1.jsonl, 7 more"),
        ({"sampler": {"environment": {"class": "games:Chess"}}}, ", environment games:Chess"),
        ({"sampler": {"environment": {"type": "command", "run": ["play", "it"]}}}, ", environment play it"),
        ({"sampler": {"environment": {"type": "reasoning_gym", "class": None}}}, ", environment reasoning_gym"),
    ],
)
def test_the_page_says_what_is_trained_by_what_on_what(more: dict[str, object], rest: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "first")
    options = {"model": {"path": "models/smollm2"}, "loss": {"type": "gspo"}, **more}
    (run / "config.yaml").write_text(json.dumps(options))
    page = page_of(run)
    subject = "smollm2 by gspo" + (rest if rest.startswith(",") else f" {rest}")
    assert page.inside("p", "subject") == [subject]
    assert page.inside("title") == [f"first: {subject}"]
