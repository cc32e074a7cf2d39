"""Every sentence of README.md, SECURITY.md and docs that promises something is listed, with the tests that break it.

A file beside this one is a page's list: `README.yaml` is that of README.md, `adapters.yaml` that of docs/adapters.md.
An entry has a sentence as it stands on the page (`says`; code in backticks, without links and bold), or a table whose
rows a test reads from the page (`table`: the cells of its head, with ` | ` between them; all of the page's tables with
this head are meant, and their rows are not looked at), and one of

- `tests`: `file::function` below `tests`, or `file::function[text]` where the cases hold a text;
- `measured`: a script or a command (`by`), and a heading of benchmarks/RESULTS.md below which it is named (`results`);
- `no_promise`: why it promises nothing, one of `WHY`.

`only` says where the tests run if none of them is part of `make test` or `make test-long`, as far as their marks tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from pages import ROOT, plain_blocks

HERE = Path(__file__).parent
TESTS = ROOT / "tests"
# A sentence with one of these words may promise something. The two pages that everybody reads are held to more words.
ABSOLUTE = (
    r"never|always|exactly|bit for bit|bitwise|last bit|cannot|whatever|guarantee\w*|refused|at any|nothing|once|lost"
    r"|ends? the run|complete or absent|not depend|changes? no|no (number|result)\w*|loses|as it was|within 1e-\d"
    r"|no other|the same (numbers|draws)|is an error|harms? no|a test (holds|keeps)"
)
# And one with such a number says what somebody measured.
MEASURED = r"\d( times\b|%)|tokens/s"
READ_BY_ALL = rf"{ABSOLUTE}|every|each|no|none|must|any|all|only|without|killed|ends?|not"
WHY = {
    "definition": "it says what a word, a number or an option means",
    "instruction": "it says what the reader does",
    "limit": "it says what truestep does not do",
    "reason": "it says why something is so",
    "others": "it speaks of another program",
}
MARKS = ("gpu", "nightly", "release")


@dataclass(frozen=True)
class Entry:
    page: str
    says: str
    """The sentence, or the head of a table."""
    tests: tuple[str, ...] = ()
    measured: tuple[str, str] | None = None
    no_promise: str | None = None
    only: str | None = None
    table: bool = False


@cache
def listed() -> dict[str, list[Entry]]:
    found = {}
    for file in sorted(HERE.glob("*.yaml")):
        page = f"{file.stem}.md" if file.stem.isupper() else f"docs/{file.stem}.md"
        entries = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        found[page] = [entry(page, fields) for fields in entries]
    return found


def entry(page: str, fields: dict[str, Any]) -> Entry:
    table = "table" in fields
    says = " ".join(fields.pop("table" if table else "says").split())
    measured = fields.pop("measured", None)
    pair = (measured["by"], measured["results"]) if measured else None
    return Entry(page, says, tuple(fields.pop("tests", ())), pair, table=table, **fields)


def tables(text: str) -> Iterator[tuple[str, range]]:
    """Give the head of each table of a page, and its lines."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open" and token.map:
            lines = range(*token.map)
            yield " | ".join(plain_blocks("\n\n".join(text.splitlines()[lines[0]].strip("| ").split("|")))), lines


def without_tables(text: str, heads: set[str]) -> str:
    """Leave out the tables that have these heads."""
    away = {line for head, lines in tables(text) if head in heads for line in lines}
    return "\n".join("" if number in away else line for number, line in enumerate(text.splitlines()))


@cache
def blocks(page: str) -> tuple[str, ...]:
    read_by_tests = {entry.says for entry in listed().get(page, []) if entry.table}
    return tuple(plain_blocks(without_tables((ROOT / page).read_text(encoding="utf-8"), read_by_tests)))


def pages() -> list[str]:
    return ["README.md", "SECURITY.md", *sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))]


def places(says: str, block: str) -> Iterator[range]:
    """Give where a sentence stands in a block: whole, between the block's ends or the ends of other sentences."""
    if says not in block:
        return
    for match in re.finditer(re.escape(says), block):
        before, behind = block[: match.start()].rstrip(), block[match.end() :]
        if (not before or before[-1] in '.!?:;)"') and (not behind or says[-1] in ".!?:;"):
            yield range(match.start(), match.end())


def unlisted(page: str, text: tuple[str, ...], entries: list[Entry]) -> Iterator[str]:
    """Give each sentence that has a word of a promise and is no part of what is listed."""
    absolute = ABSOLUTE if page.startswith("docs/") else READ_BY_ALL
    words = re.compile(rf"\b({absolute})\b|{MEASURED}", re.IGNORECASE)
    for block in (block for block in text if re.search("[a-z]{2}", block)):
        covered = [place for entry in entries for place in places(entry.says, block)]
        missing = [word for word in words.finditer(block) if not any(word.start() in place for place in covered)]
        for sentence in re.finditer(r".+?(?:[.!?:;](?=\s|$)|$)", block):
            if any(sentence.start() <= word.start() < sentence.end() for word in missing):
                yield sentence[0].strip()


@cache
def source(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


@cache
def code_of(file: str, function: str) -> tuple[str, str] | None:
    """Find a function of a file of tests: what marks it, its own decorators and the file's, and its body."""
    text = source(file)
    found = re.search(rf"^(?:async )?def {function}\(", text, re.MULTILINE)
    if found is None:
        return None
    above, below = text[: found.start()], text[found.end() :]
    decorators = above.rpartition("\n\n")[2]
    marks = " ".join(re.findall(r"^pytestmark = .*(?:\n[ \])].*)*", text, re.MULTILINE))
    return f"{decorators} {marks}", re.split(r"^\S", below.partition(":\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def parts_of(name: str) -> tuple[str, str, str]:
    """Take a test's name apart: its file, its function, and a text that stands in its cases."""
    file, _, rest = name.partition("::")
    function, _, case = rest.partition("[")
    return file, function, case.removesuffix("]")


def wrong_with(name: str) -> str | None:
    """Say why a name is of no test that runs; None where it is of one."""
    file, function, case = parts_of(name)
    if not (TESTS / file).is_file():
        return f"there is no tests/{file}"
    code = code_of(file, function) if re.fullmatch(r"test_\w+", function) else None
    if code is None:
        return f"tests/{file} has no {function}"
    if case not in source(file):
        return f"tests/{file} has no case of {case}"
    marks, body = code
    skipped = re.search(r"mark\.(skip|xfail)\b", marks) or re.search(r"^    pytest\.(skip|xfail)\(", body, re.MULTILINE)
    return f"{function} is skipped" if skipped else None


def where_it_runs(tests: tuple[str, ...]) -> str | None:
    """Say which mark all of the tests have; None where one is run by CI."""
    there = [code for name in tests if (code := code_of(*parts_of(name)[:2])) is not None]
    marks = [{mark for mark in MARKS if f"mark.{mark}" in decorators} for decorators, _ in there]
    return min(set.union(*marks), default=None) if marks and all(marks) else None


def everything() -> list[Entry]:
    return [entry for entries in listed().values() for entry in entries]


def test_each_sentence_stands_on_its_page() -> None:
    wrong = [
        f"{entry.page}: {entry.says}"
        for entry in everything()
        if not entry.table and not any(list(places(entry.says, block)) for block in blocks(entry.page))
    ]
    assert not wrong, "No longer on their pages: change them in tests/promises, with their tests, or remove them.\n" + (
        "\n".join(wrong)
    )


def test_each_table_is_on_its_page_and_read_by_its_tests() -> None:
    for entry in (entry for entry in everything() if entry.table):
        text = (ROOT / entry.page).read_text(encoding="utf-8")
        assert entry.says in {head for head, _ in tables(text)}, (
            f"{entry.page} has no table with the head {entry.says!r}"
        )
        files = {parts_of(name)[0] for name in entry.tests}
        assert any(Path(entry.page).name in source(file) for file in files), f"no test of {entry} reads the page"


def test_each_sentence_is_listed_once() -> None:
    names = [(entry.page, entry.says) for entry in everything()]
    assert not {name for name in names if names.count(name) > 1}


def test_each_test_is_there() -> None:
    assert not {name: wrong for entry in everything() for name in entry.tests if (wrong := wrong_with(name))}


def test_each_entry_is_of_one_kind() -> None:
    wrong = [
        entry.says
        for entry in everything()
        if (bool(entry.tests) + (entry.measured is not None) + (entry.no_promise in WHY)) != 1
    ]
    assert not wrong


def test_what_ci_does_not_run_is_marked_so() -> None:
    wrong = {
        entry.says: where_it_runs(entry.tests) for entry in everything() if where_it_runs(entry.tests) != entry.only
    }
    assert not wrong, "`only` is where the tests run, if CI runs none of them"


def sections(text: str) -> dict[str, str]:
    """Give what stands below each heading, with the headings below it."""
    headings = [(len(match[1]), match[2], match.end()) for match in re.finditer(r"^(#+) (.*)$", text, re.MULTILINE)]
    ends = [
        next((end for lower, _, end in headings if end > at and lower <= level), len(text)) for level, _, at in headings
    ]
    return {name: text[at:end] for (_, name, at), end in zip(headings, ends, strict=True)}


def test_what_is_measured_has_a_script_and_a_result() -> None:
    results = sections((ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8"))
    for entry in everything():
        if entry.measured:
            by, heading = entry.measured
            assert not by.endswith(".py") or (ROOT / by).is_file(), entry
            assert by.rpartition("/")[2] in results.get(heading, ""), entry


@pytest.mark.parametrize("page", pages())
def test_each_sentence_that_promises_is_listed(page: str) -> None:
    """A word such as `never` makes a sentence one that is listed: with a test, a measurement or a reason."""
    missing = list(unlisted(page, blocks(page), listed().get(page, [])))
    assert not missing, (
        f"{page} has sentences with a word of a promise that tests/promises/{Path(page).stem}.yaml does not list. "
        "Name the tests that would fail if it were false; write one, or reword the sentence, where there is none; "
        "or say with `no_promise` why it promises nothing.\n" + "\n".join(f"- says: {text!r}" for text in missing)
    )


def test_no_list_is_of_a_page_that_is_gone() -> None:
    assert set(listed()) <= set(pages())


def test_faults_are_found() -> None:
    page = "docs/planted.md"
    entries = [Entry(page, "It never fails.")]
    text = "It never fails. It is [always](x.md)\nright. So it is.\n\n- `nothing` is **lost**\n\n```\nnever\n```\n"
    found = list(unlisted(page, tuple(plain_blocks(text)), entries))
    assert found == ["It is always right.", "`nothing` is lost"]
    held, other = "| a | `b` |\n| --- | --- |\n| never | lost |\n", "| a | c |\n| --- | --- |\n| always | - |\n"
    text = f"{held}\nNothing.\n\n{other}"
    assert [head for head, _ in tables(text)] == ["a | `b`", "a | c"]
    assert list(unlisted(page, tuple(plain_blocks(without_tables(text, {"a | `b`"}))), [])) == ["Nothing.", "always"]
    assert not list(places("never fails.", "It never fails."))


PLANTED = """
pytestmark = [
    pytest.mark.gpu,
]


@pytest.mark.parametrize("case", ["a", "b"])
def test_good(case: str) -> None:
    assert case


@pytest.mark.skip(reason="never")
@pytest.mark.parametrize(
    "case",
    ["c"],
)
def test_skipped(case: str) -> None:
    assert case


def test_given_up() -> None:
    pytest.skip("not today")


def helper() -> None:
    pytest.skip("by those who call it")
"""


def test_a_test_that_does_not_run_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(PLANTED, encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.TESTS", tmp_path)
    for good in ("test_good", 'test_good["a"]'):
        assert wrong_with(f"planted.py::{good}") is None
    for bad in ("test_skipped", "test_given_up", "test_no_such", "helper", "test_good[no such case]"):
        assert wrong_with(f"planted.py::{bad}"), bad
    assert wrong_with("nowhere.py::test_good")
    assert where_it_runs(("planted.py::test_good",)) == "gpu"
