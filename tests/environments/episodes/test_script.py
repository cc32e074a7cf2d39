"""A Python program that begins as a fork does what it does as a new interpreter, and its modules are imported once."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from truestep.config.custom import CustomError
from truestep.environments.episodes.script import preload

PROGRAMS = {
    "arguments, input and environment": """
import os, sys
print(sys.argv, __name__, sys.stdin.readline().strip(), os.environ["OPENAI_API_KEY"], sys.path[0])
""",
    "a module beside it": "import beside\nprint(beside.NAME)",
    "an exit code": "import sys\nprint('before')\nsys.exit(3)",
    "an exit code beyond a byte": "import sys\nsys.exit(259)",
    "an exit with a text": "import sys\nsys.exit('it is over')",
    "an error": "print('before')\n{}['key']",
    "an event loop": """
import asyncio
async def main():
    await asyncio.sleep(0.01)
    return 7
print(asyncio.run(main()))
""",
    "a thread that outlives the main one": """
import threading, time
def late():
    time.sleep(0.2)
    print("late")
threading.Thread(target=late).start()
print("early")
""",
    "an executor that nobody shuts down": "import beside\nprint(beside.POOL.submit(lambda: 5).result())",
    "what is done at its end": "import atexit\natexit.register(print, 'at its end')\nprint('before')",
    "an output that it closed": "import sys\nprint('before')\nsys.stdout.close()",
    "what it said before it was killed": """
import os, signal, sys
print("said", file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "a process of its own": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True).stdout)
""",
    "workers, which find its functions": """
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2, 3]))
""",
    "a signal": "import os, signal\nprint('before', flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\nprint('after')",
    "bytes": "import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nsys.stdout.flush()",
}
# Runs a program as `Program` does; a process of its own, since tests have threads, which a fork does not keep.
DRIVER = """
import contextlib, json, subprocess, sys
from truestep.environments.episodes.script import Script, preload
how, modules, *run = json.loads(sys.argv[1])
given = {"OPENAI_API_KEY": "key"}
if how == "fork":
    preload(modules, run)
    started = Script(run, given)
else:
    import os
    started = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | given)
with contextlib.suppress(BrokenPipeError), started.stdin as stdin:  # a program may end before it is written to
    stdin.write(b"record\\n")
out = started.stdout.read()
print(json.dumps({"out": out.decode(errors="backslashreplace"), "code": started.wait(30), "again": started.wait(0)}))
"""


def ran(folder: Path, how: str, modules: list[str], *run: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps([how, modules, sys.executable, *run])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("what", PROGRAMS)
def test_a_fork_does_what_a_new_interpreter_does(what: str, tmp_path: Path) -> None:
    beside = "from concurrent.futures import ThreadPoolExecutor\nNAME, POOL = 'beside', ThreadPoolExecutor()\n"
    (tmp_path / "beside.py").write_text(beside)
    script = tmp_path / "agent.py"
    script.write_text(PROGRAMS[what])
    (forked, said), (new, right) = (
        ran(tmp_path, how, ["json", "asyncio"], str(script), "first", "{x}") for how in ("fork", "new")
    )
    assert forked == new
    assert said.splitlines()[-1:] == right.splitlines()[-1:]  # a traceback has frames of runpy before


def test_a_module_is_run_as_one(tmp_path: Path) -> None:
    package = tmp_path / "agent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys\nprint(__package__, sys.argv[1:])")
    (forked, _), (new, _) = (ran(tmp_path, how, ["json"], "-m", "agent", "x") for how in ("fork", "new"))
    assert forked == new and "agent ['x']" in new["out"]


@pytest.mark.parametrize("where", ["agent.py", "agent/__main__.py"])
def test_it_knows_its_own_file(where: str, tmp_path: Path) -> None:
    script = tmp_path / where
    script.parent.mkdir(exist_ok=True)
    script.write_text("import os, sys\nos.chdir('/')\nprint(__file__, sys.argv, sys.modules['__main__'].__file__)")
    run = where.removesuffix("/__main__.py")
    (forked, _), (new, _) = (ran(tmp_path, how, ["json"], run, "x") for how in ("fork", "new"))
    assert forked == new and forked["code"] == 0


def test_an_archive_is_run(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "agent.zip", "w") as archive:
        archive.writestr("__main__.py", "import sys\nprint(sys.argv)")
    assert ran(tmp_path, "fork", ["json"], "agent.zip", "x")[0]["out"] == "['agent.zip', 'x']\n"


def test_directories_that_a_module_adds_stay(tmp_path: Path) -> None:
    (tmp_path / "its").mkdir()
    (tmp_path / "its" / "own.py").write_text("NAME = 'found'\n")
    (tmp_path / "adds.py").write_text(f"import sys\nsys.path.insert(0, {str(tmp_path / 'its')!r})\n")
    script = tmp_path / "agent.py"
    script.write_text("import adds\nimport own\nprint(own.NAME)")
    assert ran(tmp_path, "fork", ["adds"], str(script))[0]["out"] == "found\n"


def test_what_is_preloaded_is_not_imported_again(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import os\nopen('imports', 'a').write(f'{os.getpid()} ')\n")
    script = tmp_path / "agent.py"
    script.write_text("import heavy, os\nprint(open('imports').read().split() == [str(os.getppid())])")
    assert ran(tmp_path, "fork", ["heavy"], str(script))[0]["out"] == "True\n"


@pytest.mark.parametrize(
    ("run", "modules", "problem"),
    [
        (["/bin/sh", "agent.sh"], ["json"], "begins with /bin/sh, which is /bin/sh"),
        (["no-such-program"], ["json"], "which is not found"),
        ([sys.executable, "-c", "print(1)"], ["json"], "python FILE ... or python -m MODULE"),
        ([sys.executable, "-u", "agent.py"], ["json"], "python FILE ... or python -m MODULE"),
        ([sys.executable], ["json"], "python FILE ... or python -m MODULE"),
        ([sys.executable, "agent.py"], ["no_such_module"], "no_such_module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_forked_is_refused(
    run: list[str], modules: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(CustomError, match="sampler.environment.preload") as refused:
        preload(modules, run)
    assert problem in str(refused.value)


def test_another_version_in_the_same_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("python", "python3.2"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    preload(["json"], [str(tmp_path / "python"), "agent.py"])
    with pytest.raises(CustomError, match=r"begins with .*python3\.2"):
        preload(["json"], [str(tmp_path / "python3.2"), "agent.py"])
