"""The page of a long run in a browser: its size, how soon it is drawn, how soon each filter of its rollouts answers.

    pip install playwright
    python benchmarks/page.py [--browser chromium] [--text sums]

The run has 10,000 steps and keeps 10 rollouts of each, 4 of them with their tokens. Prompts and completions are pieces
of the pages of docs, or, with `--text sums`, sums, which take less room, so that the page has more of them. Times are
wall times, the medians of five. A page is opened from the start of the navigation until the charts in sight and the
browser of rollouts are there and painted; the browser program runs already, and each opening is in a context of its
own. A filter answers from the input until the list is painted; the page's own wait for more letters (60 ms) is in it.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from truestep.files.whole import json_line
from truestep.report import write_report
from truestep.rollouts.kept import files

STEPS, KEPT, GROUP, WITH_TOKENS, FILE = 10_000, 10, 5, 4, 50
OPENED = 5
DOCS = Path(__file__).parents[1] / "docs"
NAMES = """
loss new_logprobs old_logprobs ratio_new_old kl_new_old effective_sample_share clipped_ratio_fraction
clipped_ratio_fraction_low clipped_ratio_fraction_high log_ratio_p1 log_ratio_p5 log_ratio_p50 log_ratio_p95
log_ratio_p99 advantage max_advantage min_advantage reward reward_std group_reward_spread
zero_advantage_groups distinct_completions response_length max_response_length response_length_rewarded
response_length_unrewarded truncated_fraction entropy staleness max_staleness grad_norm learning_rate
tokens_per_second sampled_tokens_per_second step_time mfu gpu_memory time/sampling time/rating time/waiting
time/forward time/head time/backward time/optimizer time/sync time/other rewards/format rewards/answer
own_metric
"""
# Each is what a reader types or chooses: the name of the field, and its value.
FILTERS: dict[str, dict[str, str]] = {
    "step": {"step from": "2500", "step to": "7500"},
    "reward": {"reward from": "0.5"},
    "length": {"length to": "60"},
    "largest log-ratio": {"largest log ratio from": "0.1"},
    "truncation": {"Which": "truncated"},
    "group": {"group": "g7"},
    "search": {"search": "policy"},
    "search, found nowhere": {"search": "found nowhere"},
    "order by reward": {"Order": "highest reward"},
}
# Marks when the charts in sight and the browser of rollouts are there, and two frames later, when they are painted.
WATCH = """
const look = () => {
  if (document.documentElement.dataset.charts !== 'drawn' || !document.querySelector('.rollouts[data-ready=yes]'))
    return requestAnimationFrame(look);
  requestAnimationFrame(() => requestAnimationFrame(() => { window.painted = performance.now(); }));
};
requestAnimationFrame(look);
"""
# Sets fields as a reader does, and gives the milliseconds until the list that answers is painted.
ANSWER = """
fields => new Promise(done => {
  const root = document.querySelector('.rollouts'), start = performance.now();
  new MutationObserver((changes, observer) => {
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done([performance.now() - start, Number(root.dataset.matches)])));
  }).observe(root, {attributeFilter: ['data-milliseconds']});
  for (const [name, value] of Object.entries(fields)) {
    const input = root.querySelector('input[aria-label="' + name + '"]');
    const label = [...root.querySelectorAll('label')].find(one => one.textContent.startsWith(name));
    const field = input || label.querySelector('select');
    field.value = input ? value : [...field.options].find(option => option.text === value || value === '').value;
    field.dispatchEvent(new Event(input ? 'input' : 'change'));
  }
})
"""


def prose() -> Callable[[random.Random], tuple[str, list[str]]]:
    words = " ".join(page.read_text() for page in sorted(DOCS.glob("*.md"))).split()

    def draw(chance: random.Random) -> tuple[str, list[str]]:
        start, length = chance.randrange(len(words) - 300), chance.randrange(20, 120)
        return " ".join(words[start : start + 20]), [f" {word}" for word in words[start + 20 : start + 20 + length]]

    return draw


def sums() -> Callable[[random.Random], tuple[str, list[str]]]:
    def draw(chance: random.Random) -> tuple[str, list[str]]:
        numbers = [chance.randrange(100) for _ in range(chance.randrange(5, 30))]
        return f"the sum of {numbers[0]} and others:", [f" {number} + policy" for number in numbers]

    return draw


def write_run(run: Path, draw: Callable[[random.Random], tuple[str, list[str]]]) -> None:
    """Write the files of a run as the trainer does."""
    chance = random.Random(0)
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as metrics, (run / "ledger.jsonl").open("w") as ledger:
        for step in range(1, STEPS + 1):
            counts = {"num_documents": 256, "documents_seen": 256 * step, "num_tokens": 70_000, "num_labels": 60_000}
            values = {name: 1 + step / STEPS + chance.gauss(0, 0.1) for name in NAMES.split()}
            metrics.write(json_line({"step": step, **values, **counts}))
            ids = [f"{step}-{number}" for number in range(256)]
            seen = {"num_documents": 256, "documents_seen": 256 * step}
            ledger.write(json_line({"step": step, "documents": ids, **seen}))
    with (run / "evaluation.jsonl").open("w") as evaluations:
        for step in range(0, STEPS + 1, 10):
            examples = [{"prompt": "p" * 200, "completion": "c" * 1000, "reward": 1.0}] * 8
            rewards = {"greedy_reward": step / STEPS, "sampled_reward": step / STEPS, "num_prompts": 200}
            evaluations.write(json_line({"step": step, "documents_seen": 256 * step, "examples": examples} | rewards))
    (run / "config.yaml").write_text(json.dumps({"schedule": {"docs_per_step": 256}}))
    for first in range(1, STEPS + 1, FILE):
        steps = range(first, first + FILE)
        files.write_rows(run / files.FOLDER, [row(step, kept, draw, chance) for step in steps for kept in range(KEPT)])


def row(
    step: int, kept: int, draw: Callable[[random.Random], tuple[str, list[str]]], chance: random.Random
) -> dict[str, Any]:
    prompt, pieces = draw(chance)
    found = {
        "step": step, "id": f"{step}-{kept}", "group_id": f"g{step}-{kept // GROUP}", "prompt": prompt,
        "completion": "".join(pieces), "reward": chance.random(),
        "rewards": [("format", 1.0), ("answer", chance.random())],
        "advantage": chance.gauss(0, 1), "length": len(pieces), "tokens": len(pieces) + 20,
        "truncated": chance.random() < 0.1, "model_version": 256 * (step - 1), "staleness": 0,
        "log_ratio": chance.gauss(0, 0.01), "largest_log_ratio": abs(chance.gauss(0, 0.1)), "entropy": chance.random(),
    }  # fmt: skip
    if kept < WITH_TOKENS:
        found |= {"token_texts": pieces, "token_logprobs": [-chance.random() for _ in pieces]}
        found["token_log_ratios"] = [chance.gauss(0, 0.03) for _ in pieces]
    return found


def opened(browser: Any, page: Path) -> tuple[Any, float, float]:
    """Open a page; give it, and the milliseconds by its own clock and by ours."""
    # The page lets no script run but its own; what measures it is another one.
    context = browser.new_context(viewport={"width": 1400, "height": 900}, bypass_csp=True)
    sheet = context.new_page()
    problems: list[str] = []
    sheet.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    sheet.on("pageerror", lambda error: problems.append(str(error)))
    sheet.add_init_script(WATCH)
    start = time.perf_counter()
    sheet.goto(page.as_uri(), wait_until="commit")
    sheet.wait_for_function("window.painted")
    ours = 1000 * (time.perf_counter() - start)
    if problems:
        raise SystemExit(f"the page has errors: {problems}")
    return sheet, sheet.evaluate("window.painted"), ours


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--text", choices=["docs", "sums"], default="docs")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run, page = Path(folder) / "run", Path(folder) / "page.html"
        write_run(run, prose() if chosen.text == "docs" else sums())
        start = time.perf_counter()
        write_report([run], page)
        print(f"made in {time.perf_counter() - start:.1f} s: {page.stat().st_size / 1e6:.2f} MB (goal 6 MB)")
        options = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"]
        options += ["disable-component-update", "disable-sync"]
        browser = playwright.chromium.launch(executable_path=chosen.browser, args=[f"--{name}" for name in options])
        times = []
        for _ in range(OPENED):
            sheet, own, ours = opened(browser, page)
            times.append((own, ours))
            note = sheet.locator(".rollouts + .absent").all_inner_texts()
            sheet.context.close()
        print(*note)
        report("opening", [own for own, _ in times], 2000)
        report("opening, by a clock outside", [ours for _, ours in times], 2000)
        for name, fields in FILTERS.items():
            answers = []
            for _ in range(OPENED):  # each in a page that has answered nothing before
                sheet, _, _ = opened(browser, page)
                answers.append([sheet.evaluate(ANSWER, fields)])
                answers[-1].append(sheet.evaluate(ANSWER, dict.fromkeys(fields, "")))
                answers[-1].append(sheet.evaluate(ANSWER, fields))
                sheet.context.close()
            for what, place in (("", 0), (", taken back", 1), (", again", 2)):
                found = f"{int(answers[0][place][1]):,} found"
                report(f"{name}{what}: {found}", [answer[place][0] for answer in answers], 200)
        browser.close()


def report(name: str, milliseconds: list[float], goal: float) -> None:
    middle, largest = statistics.median(milliseconds), max(milliseconds)
    mark = "ok" if middle < goal else "MISSED"
    print(f"{name:<50} {middle:6.0f} ms, at most {largest:6.0f} ms (goal {goal:.0f} ms) {mark}", flush=True)


if __name__ == "__main__":
    main()
