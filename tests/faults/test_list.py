"""The list of planted faults stays true while the code under it moves. `make faults` plants all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.listed import REPOSITORY, problems, read_faults

FAULTS = read_faults()
# A fault of each of these is in the list, in whichever file of it.
ROOMS = (
    *("types", "config", "rollouts", "bounded", "step", "optimizers", "losses", "head", "kernels", "policy", "sampler"),
    *("server", "transfer", "environments", "checkpoint", "stream", "ranks", "metrics", "report", "verify", "plan"),
    *("export", "kept", "run", "exact", "audit", "tinker", "replay"),
)

RIGHT = "def least(a, b):\n    return a if a < b else b\n"
TEST = "from toy import least\n\n\ndef test_least():\n    assert least(1, 2) == least(2, 1) == 1\n"
LIST = """
- {name: flipped, what: A flipped comparison., file: src/toy.py, old: a < b, new: a > b, tests: [tests/test_toy.py]}
- {name: harmless, what: The same result., file: src/toy.py, old: a < b, new: a <= b, tests: [tests/test_toy.py]}
- {name: gone, what: Code that is not there., file: src/toy.py, old: a - b, new: a + b, tests: [tests/test_toy.py]}
- {name: untested, what: No test is there., file: src/toy.py, old: a < b, new: a > b, tests: [tests/test_other.py]}
"""


def test_every_fault_can_be_planted_and_its_tests_are_there() -> None:
    wrong = [f"{fault.name}: {problem}" for fault in FAULTS for problem in problems(fault, REPOSITORY)]
    assert not wrong, "the code or a test of a fault has moved: mend tests/faults/planted\n" + "\n".join(wrong)


def test_a_hundred_faults_in_every_room() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 100
    assert sorted({fault.room for fault in FAULTS}) == sorted(ROOMS)


@pytest.mark.long
def test_faults_of_a_toy_are_caught_missed_and_not_planted(tmp_path: Path) -> None:
    toy = tmp_path / "toy"
    for name, content in (
        ("src/toy.py", RIGHT),
        ("tests/test_toy.py", TEST),
        ("pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["src"]\nmarkers = ["long", "vllm", "release"]\n'),
        ("list/toy.yaml", LIST),
    ):
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).write_text(content, encoding="utf-8")
    command = [sys.executable, "-m", "faults", "--bare", "--repository", str(toy), "--list", str(toy / "list")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "tests")}
    done = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True, env=environment, timeout=300)
    lines = done.stdout.splitlines()
    for result, name in (
        ("caught", "flipped"),
        ("missed", "harmless"),
        ("not planted", "gone"),
        ("broken", "untested"),
    ):
        assert any(line.startswith(result) and name in line for line in lines), done.stdout
    assert any("flipped" in line and line.endswith("test_toy.py::test_least") for line in lines), done.stdout
    assert "4 faults" in done.stdout and "1 caught, 1 missed, 1 not planted, 1 broken" in done.stdout
    assert done.returncode == 1
    assert (toy / "src/toy.py").read_text(encoding="utf-8") == RIGHT  # the working tree stays as it is
    shown = subprocess.run([*command, "--show"], capture_output=True, text=True, env=environment, timeout=300)
    assert shown.returncode == 0 and shown.stdout.count("\n") == 4
