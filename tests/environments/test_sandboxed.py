"""The recipe of SECURITY.md: code of a completion in a sandbox, which reaches nothing outside it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from truestep.environments.process import WorkerOptions
from truestep.environments.prompts import Prompt
from truestep.environments.rater import Rater

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"
sys.path.insert(0, str(FOLDER))
import sandboxed  # noqa: E402

sys.path.remove(str(FOLDER))


def has_sandboxes() -> bool:
    if shutil.which("bwrap") is None:
        return False
    return subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not has_sandboxes(), reason="bubblewrap is not here, or may not make sandboxes here")

RIGHT = "def add(a, b):\n    return a + b"
TESTS = "assert add(1, 2) == 3"


@pytest.mark.parametrize(
    ("completion", "given"),
    [
        (RIGHT, 1.0),
        (f"Here it is:\n```python\n{RIGHT}\n```\nDone.", 1.0),
        ("def add(a, b):\n    return a - b", 0.0),
        ("not python", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("print('1' * 10**7)\ndef add(a, b): return 3", 1.0),
    ],
)
def test_the_reward_is_whether_the_tests_pass(completion: str, given: float) -> None:
    assert sandboxed.reward("p", completion, tests=TESTS) == given


def test_it_rates_in_the_reward_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    rater = Rater(WorkerOptions("sandboxed:reward", 60.0, 2**30), 1)
    prompt = Prompt("p", "add", {"tests": TESTS}, (1,))
    assert [rater.submit(prompt, code, "0").result(240) for code in (RIGHT, "1 / 0")] == [1.0, 0.0]
    rater.close()


def seen(program: str) -> str:
    return str(sandboxed.run(program)).strip()


def test_inside_there_is_nobody_else_no_secret_no_file_and_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUESTEP_TEST_SECRET", "hunter2")
    file = tmp_path / "mine"
    file.write_text("mine")
    assert seen("import os; print('SECRET' in str(os.environ))") == "False"
    assert seen(f"import os; print(os.path.exists({str(file)!r}), os.path.exists({str(Path.home())!r}))") in (
        "False False",
        f"False {sys.base_prefix.startswith(str(Path.home()))}",  # where Python itself lives below it
    )
    processes = "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))"
    assert 0 < int(seen(processes)) <= 3
    killing = f"import os\ntry:\n    os.kill({os.getpid()}, 9)\nexcept OSError as error:\n    print('refused')"
    assert seen(killing) in ("refused", "")
    connecting = (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 9), 2)\nexcept OSError as error:\n"
        "    print(sorted(name for _, name in socket.if_nameindex()))"
    )
    assert seen(connecting) == "['lo']"
    assert seen("import os\ntry:\n    open('/usr/new', 'w')\nexcept OSError:\n    print('read-only')") == "read-only"


def test_a_sandbox_that_is_too_slow_ends_with_all_in_it() -> None:
    seconds = f"{1000 + os.getpid()}.25"  # by which the process is known outside
    start = f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{seconds}'])"
    assert sandboxed.run(f"import os, time\n{start}\ntime.sleep(99)", seconds=2) == ""
    for _ in range(600):
        if not sleeping(seconds):
            return
        time.sleep(0.1)
    pytest.fail("it outlived its sandbox")


def sleeping(seconds: str) -> bool:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                return True
    return False
