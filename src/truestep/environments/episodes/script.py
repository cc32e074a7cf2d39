"""A Python program that begins as a fork of a process that has imported its modules, not as a new interpreter.

`Script` has what is used of `subprocess.Popen`. Imports no torch, because environments run in processes without torch.
"""

import atexit
import importlib
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from typing import BinaryIO, NoReturn

from truestep.config.custom import CustomError
from truestep.environments.forked import die_with_parent


def preload(modules: Sequence[str], run: Sequence[str]) -> None:
    """Import modules for a program that `Script` will run. Raises CustomError for another program, and for a module
    that cannot be imported."""
    name, *rest = run
    found = shutil.which(name)
    here, own = os.path.split(sys.executable)
    names = {own, "python", "python3", f"python3.{sys.version_info.minor}"}  # a directory may have other versions
    if found is None or os.path.dirname(os.path.abspath(found)) != here or os.path.basename(found) not in names:
        raise CustomError(
            f"sampler.environment.preload is for programs of the run's own Python, {sys.executable}; "
            f"sampler.environment.run begins with {name}, which is {found or 'not found'}"
        )
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        raise CustomError(
            "sampler.environment.preload needs sampler.environment.run: python FILE ... or python -m MODULE ..., "
            f"not {' '.join(run)}"
        )
    sys.path.insert(0, _first_of_path(rest))
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise CustomError(f"sampler.environment.preload: {module} cannot be imported: {problem}") from error


def _first_of_path(arguments: Sequence[str]) -> str:
    """Return the directory that Python puts first into sys.path."""
    return os.getcwd() if arguments[0] == "-m" else os.path.dirname(os.path.abspath(arguments[0]))


class Script:
    def __init__(self, run: Sequence[str], given: Mapping[str, str]):
        """`given`: environment variables beside those of this process."""
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        parent = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            for ours in (ours_in, ours_out):
                os.close(ours)
            _become(run[1:], given, theirs_in, theirs_out, parent)
        for theirs in (theirs_in, theirs_out):
            os.close(theirs)
        self.stdin: BinaryIO = open(ours_in, "wb")  # noqa: SIM115
        self.stdout: BinaryIO = open(ours_out, "rb")  # noqa: SIM115
        self._descriptor = os.pidfd_open(self._process)
        self._code: int | None = None

    def wait(self, seconds: float) -> int:
        """Return the exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        if self._code is None:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                raise subprocess.TimeoutExpired("the program", seconds)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1])
            os.close(self._descriptor)
        return self._code


def _become(arguments: Sequence[str], given: Mapping[str, str], stdin: int, stdout: int, parent: int) -> NoReturn:
    """Run the program as the interpreter would, and exit."""
    code = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        for descriptor in (stdin, stdout):
            os.close(descriptor)
        # Standard error is written line by line, so that it is complete when the program is killed.
        for number, (name, mode, buffering) in enumerate((("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1))):
            stream = open(number, mode, buffering, "utf-8", "backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
        os.environ.update(given)
        code = _run(arguments)
        # What the interpreter does at its end, and multiprocessing at the end of a fork.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _exit(code)


def _exit(code: int) -> NoReturn:
    """Exit whatever happens: this process must not go on as its parent."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    finally:
        os._exit(code)


def _run(arguments: Sequence[str]) -> int:
    """Run a script or a module. Return the exit code."""
    if (first := _first_of_path(arguments)) not in sys.path:
        sys.path.insert(0, first)
    try:
        if arguments[0] == "-m":
            sys.argv = list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(arguments)
            _run_file(arguments[0])
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _run_file(path: str) -> None:
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        runpy.run_path(path, run_name="__main__")
        return
    main = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(path)  # which `runpy.run_path` leaves relative
    sys.modules["__main__"] = main
    SourceFileLoader("__main__", main.__file__).exec_module(main)
