"""tests/nightly.py: which groups of `make test-nightly` a change concerns."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from nightly import ALL, GROUPS, ROOT, VLLM, changed_files, groups_of, main
from pages import ROOT as PAGES_ROOT

EVERYTHING = " ".join(test for tests, _ in GROUPS.values() for test in tests)


@pytest.mark.parametrize(
    ("changed", "groups"),
    [
        (["docs/adapters.md"], ["documentation"]),
        (["examples/grpo.yaml"], ["examples"]),
        (["src/truestep/losses/label_losses.py"], ["examples", "peers"]),
        (["tests/peers/test_trl.py"], ["peers"]),
        (["src/truestep/run/trainer.py"], ["programs"]),
        (["src/truestep/model/loading/load.py"], ["families", "compiled layers"]),
        (["SECURITY.md"], ["escapes"]),
        (["src/truestep/environments/adapters/openenv.py"], ["escapes", "adapters"]),
        (["requirements-adapters.txt"], ["adapters"]),
        (["requirements-verifiers.txt"], ["adapters"]),
        (["src/truestep/config/schema.py"], ["documentation", "examples"]),
        (["src/truestep/stream/source.py", "CHANGELOG.md"], []),
        (["Makefile"], list(GROUPS)),
        ([], []),
    ],
)
def test_a_change_concerns_the_groups_that_test_it(changed: list[str], groups: list[str]) -> None:
    assert groups_of(changed) == groups


def test_what_the_groups_name_is_there() -> None:
    files = [str(file.relative_to(ROOT)) for file in ROOT.glob("src/**/*.py")]
    files += [
        str(file.relative_to(ROOT)) for name in ("docs", "examples", "benchmarks") for file in (ROOT / name).iterdir()
    ]
    for tests, about in GROUPS.values():
        assert all((PAGES_ROOT / test).exists() for test in tests)
        named = [pattern for pattern in about if not (ROOT / pattern).exists()]
        assert [pattern for pattern in named if not any(fnmatch(file, pattern) for file in files)] == []
    assert all((ROOT / file).exists() for file in ALL)
    files += [str(file.relative_to(ROOT)) for file in ROOT.glob("tests/server/*.py")]
    assert all((ROOT / pattern).exists() or any(fnmatch(file, pattern) for file in files) for pattern in VLLM)


def test_every_nightly_case_belongs_to_a_group() -> None:
    words = re.compile(r'mark\.nightly\b|nightly_except\(|"nightly"\)')
    files = (ROOT / "tests").rglob("test_*.py")
    marked = [file for file in files if words.search(file.read_text(encoding="utf-8"))]
    assert len(marked) >= 5
    listed = [ROOT / test for tests, _ in GROUPS.values() for test in tests]
    assert [file for file in marked if not any(file == own or own in file.parents for own in listed)] == []


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone in which a branch has a commit more than `main`."""

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init", "--quiet", "--initial-branch=main")
    git("config", "user.email", "a@example.org")
    git("config", "user.name", "A")
    (tmp_path / "docs").mkdir()
    for number, file in enumerate(["first.py", "docs/second.md"]):
        (tmp_path / file).write_text(str(number))
        git("add", ".")
        git("commit", "--quiet", "--message", file)
        git(*(["checkout", "--quiet", "-b", "branch"] if number == 0 else ["status"]))
    return tmp_path


def test_changes_are_those_since_the_branch_began(clone: Path) -> None:
    assert changed_files(clone, "main") == ["docs/second.md"]
    assert main(["main"], clone) == "tests/test_docs_run.py"
    (clone / "first.py").write_text("not committed")
    assert changed_files(clone, "main") == ["docs/second.md", "first.py"]
    assert main(["--vllm", "main"], clone) == ""
    (clone / "requirements-vllm.txt").write_text("another")
    subprocess.run(["git", "-C", str(clone), "add", "."], check=True)
    assert main(["--vllm", "main"], clone) == "requirements-vllm.txt"


def test_on_the_branch_itself_they_are_those_since_a_run_that_passed_or_of_the_last_commit(
    clone: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(clone), *words], check=True, capture_output=True, text=True).stdout

    passed = tmp_path_factory.mktemp("cache") / "passed"
    (clone / "third.py").write_text("3")
    git("add", ".")
    git("commit", "--quiet", "--message", "third.py")
    assert changed_files(clone, "branch", passed) == ["third.py"]
    passed.write_text(git("rev-parse", "main"))
    assert changed_files(clone, "branch", passed) == ["docs/second.md", "third.py"]
    for another in (git("rev-parse", "HEAD"), "0" * 40 + "\n", ""):
        passed.write_text(another)
        assert changed_files(clone, "branch", passed) == ["third.py"]


@pytest.mark.parametrize("ref", ["origin/main", "nowhere"])
def test_without_such_a_commit_all_has_changed(ref: str, clone: Path) -> None:
    assert changed_files(clone, ref) is None
    assert main([ref], clone) == EVERYTHING
    assert main([], clone) == EVERYTHING
    assert main(["--vllm", ref], clone) == "everything"


def test_the_first_commit_has_nothing_before_it(clone: Path) -> None:
    subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", "main"], check=True)
    assert main(["main"], clone) == EVERYTHING
