"""What a trainer imports once rewards have begun: nothing that was written into a directory which others may write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from truestep.config import custom
from truestep.config.custom import keep_path_clean, load_custom

LATE = """
import importlib.util, sys
def finds(name):
    return importlib.util.find_spec(name) is not None
"""
SCRIPT = f"""
{LATE}
from truestep.config.custom import keep_path_clean
put_back = keep_path_clean()
import pathlib
for name in ("pandas", "late_optional", "colorsys"):
    pathlib.Path(sys.argv[1], name + ".py").write_text("written = True")
import pandas, colorsys, mine, mine_too
assert not hasattr(pandas, "written") and not hasattr(colorsys, "written"), "installed ones come first"
assert not finds("late_optional"), "what was written later"
put_back()
assert finds("late_optional"), "the program is as it was"
"""


@pytest.mark.parametrize("way", ["-c", "script", "-m"])
def test_what_is_written_after_the_start_is_not_imported(way: str, tmp_path: Path) -> None:
    for name in ("mine.py", "pandas_is_mine.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "mine_too").mkdir()
    (tmp_path / "program.py").write_text(SCRIPT)
    words = {"-c": ["-c", SCRIPT], "script": [str(tmp_path / "program.py")], "-m": ["-m", "program"]}[way]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(custom, "_users_modules", custom._UsersModules())
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


def test_a_module_of_the_working_directory_is_found_and_replaces_no_other(place: Path) -> None:
    (place / "own_task_of_test.py").write_text("def score(): return 1")
    (place / "wave.py").write_text("def score(): return 1")
    assert load_custom("reward", "own_task_of_test:score")() == 1
    with pytest.raises(custom.CustomError, match="wave has no function score"):
        load_custom("reward", "wave:score")
    assert str(place) not in sys.path


def test_a_module_that_is_written_before_the_next_start_is_found(place: Path) -> None:
    (place / "first_task_of_test.py").write_text("def score(): return 1")
    assert load_custom("reward", "first_task_of_test:score")() == 1
    (place / "second_task_of_test.py").write_text("def score(): return 2")
    assert load_custom("reward", "second_task_of_test:score")() == 2


def test_an_import_of_another_thread_misses_no_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the path while entries leave it, and while they are put back."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before, importing = list(sys.path), iter(sys.path)
    assert next(importing) == ""
    put_back = keep_path_clean()
    assert list(importing) == before[1:]
    without, importing = list(sys.path), iter(sys.path)
    assert next(importing) == without[0]
    put_back()
    assert list(importing) == without[1:] and sys.path == before


def test_directories_of_installed_packages_stay(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import yaml

    packages = Path(yaml.__file__).parents[1]
    monkeypatch.chdir(packages)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = list(sys.path)
    put_back = keep_path_clean()
    assert "" not in sys.path and str(packages) in sys.path
    put_back()
    assert sys.path == before
