"""Say which groups of `make test-nightly` test what has changed. `.ci/run` runs these; every night runs all.

    python tests/nightly.py [REF]
    python tests/nightly.py --vllm [REF]

prints the files of tests of those groups, for `make test-nightly FILES="..."`; with `--vllm` the files that a real vLLM
is concerned by, and nothing where it is not. What has changed is what differs from
the last commit that this branch has in common with REF (`origin/main`, if none is given), or, on that branch itself,
from the last commit that `.ci/run` passed with on this machine, or else from the commit before. In a clone that has no
such commit, everything has changed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = Path.home() / ".cache" / "truestep" / "passed"  # has the commit that `.ci/run` passed with last
# What runs them all, and what all of them are made from.
ALL = ("Makefile", "constraints.txt", "pyproject.toml", "tests/nightly.py", "tests/conftest.py", "tests/small_runs.py")
# The files of tests of a group, and what they are about. A `*` stands for any part of a path.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "documentation": (
        ("tests/test_docs_run.py",),
        ("README.md", "docs/*", "src/truestep/config/*", "src/truestep/commands/cli.py", "src/truestep/__init__.py"),
    ),
    "examples": (
        ("tests/test_examples_train.py",),
        ("examples/*", "src/truestep/config/*", "src/truestep/losses/*", "src/truestep/run/assemble/*"),
    ),
    "programs": (
        (
            "tests/api/test_examples.py",
            "tests/api/test_notebook.py",
            "tests/generate/endpoint/test_agents.py",
            "tests/test_boxes.py",
        ),
        (
            "examples/boxes*",
            *("examples/python*", "docs/agents.md", "src/truestep/__init__.py", "src/truestep/run/*"),
            *("src/truestep/generate/endpoint/*", "src/truestep/generate/command.py"),
        ),
    ),
    "elastic": (
        ("tests/test_elastic.py", "tests/test_state_in_memory.py"),
        (
            *("src/truestep/run/elastic.py", "src/truestep/tools/elastic_command.py", "src/truestep/run/checkpoint/*"),
            *("src/truestep/ranks/elastic.py", "src/truestep/ranks/watch.py"),
        ),
    ),
    "families": (
        ("tests/families/test_families.py",),
        ("docs/families.md", "src/truestep/model/*", "src/truestep/generate/engine/*"),
    ),
    "compiled layers": (
        (
            *("tests/model/test_compiled.py", "tests/model/test_experts.py", "tests/model/test_flash.py"),
            *("tests/model/test_fused_layers.py", "tests/model/test_norms.py", "tests/ranks/test_layouts.py"),
            *("tests/ranks/test_sampling.py", "tests/generate/engine/test_states_gpu_path.py"),
        ),
        (
            *(
                "src/truestep/model/*",
                "src/truestep/generate/engine/*",
                "src/truestep/head/*",
                "src/truestep/weights/*",
            ),
            *("src/truestep/numerics/*", "src/truestep/ranks/*", "src/truestep/step/compute/*", "tests/tiny.py"),
        ),
    ),
    "escapes": (
        ("tests/environments/test_escapes.py",),
        ("SECURITY.md", "tests/escapes.py", "src/truestep/environments/*", "src/truestep/run/assemble/rewards.py"),
    ),
    "recipes": (
        ("tests/test_recipes.py",),
        ("examples/recipes*", "benchmarks/recipe*"),
    ),
    "adapters": (
        ("tests/environments/adapters/test_real.py", "tests/environments/adapters/test_verifiers.py"),
        (
            *("requirements-adapters.txt", "requirements-verifiers.txt", "src/truestep/generate/command.py"),
            *("src/truestep/environments/adapters/*", "src/truestep/environments/episodes/*"),
        ),
    ),
    "tinker": (
        ("tests/tinker/test_client.py", "tests/tinker/test_kills.py"),
        (
            *("requirements-tinker.txt", "docs/tinker.md", "src/truestep/commands/tinker/*"),
            *("src/truestep/commands/session/*", "src/truestep/tools/serve.py", "src/truestep/generate/endpoint/*"),
        ),
    ),
    "peers": (
        ("tests/peers",),
        (
            *("benchmarks/step.py", "src/truestep/losses/*", "src/truestep/head/*", "src/truestep/step/*"),
            "src/truestep/tools/audit/*",
        ),
    ),
}


# What the tests with a real vLLM are about: how runs sample by servers, and how weights come to these.
VLLM = (
    *("requirements-vllm.txt", "tests/server/*", "src/truestep/generate/*", "src/truestep/weight_transfer/*"),
    *("src/truestep/model/*", "src/truestep/weights/*", "src/truestep/ranks/*", "src/truestep/run/*"),
    *("src/truestep/step/*", "src/truestep/environments/*", "src/truestep/tools/demo/*", "src/truestep/tools/parity/*"),
)


def concern(changed: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the files that one of the patterns stands for."""
    patterns = list(patterns)
    return [file for file in changed if any(fnmatch(file, pattern) for pattern in patterns)]


def groups_of(changed: Iterable[str]) -> list[str]:
    """Name the groups that test one of these files, or are one of them."""
    files = list(changed)

    def concerned(tests: tuple[str, ...], about: tuple[str, ...]) -> bool:
        return bool(concern(files, (*tests, *(f"{test}/*" for test in tests), *about, *ALL)))

    return [name for name, (tests, about) in GROUPS.items() if concerned(tests, about)]


def changed_files(root: Path, ref: str, passed: Path = PASSED) -> list[str] | None:
    """List what differs from the commit that the branch began at; None if there is no such commit."""
    base, head = _git(root, "merge-base", "HEAD", ref), _git(root, "rev-parse", "HEAD")
    if base is not None and base == head:
        base = _passed_before(root, passed) or _git(root, "rev-parse", "--verify", "--quiet", "HEAD^")
    listed = None if base is None else _git(root, "diff", "--name-only", base)
    return None if listed is None else listed.splitlines()


def _passed_before(root: Path, passed: Path) -> str | None:
    """The commit in that file, if HEAD came from it."""
    commit = passed.read_text(encoding="ascii").strip() if passed.is_file() else ""
    is_before = bool(commit) and _git(root, "merge-base", "--is-ancestor", commit, "HEAD^") is not None
    return commit if is_before else None


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: list[str], root: Path = ROOT) -> str:
    vllm, arguments = "--vllm" in arguments, [each for each in arguments if each != "--vllm"]
    changed = changed_files(root, arguments[0] if arguments else "origin/main")
    if vllm:
        return " ".join(["everything"] if changed is None else concern(changed, (*VLLM, *ALL)))
    names = list(GROUPS) if changed is None else groups_of(changed)
    return " ".join(test for name in names for test in GROUPS[name][0])


if __name__ == "__main__":
    print(main(sys.argv[1:]))
