"""The environment of an episode that is a program: the program requests completions from the endpoint, and gives its
own reward.

`start` gets {"row": the prompt's record, "url": the endpoint, "key": the document's key, "seconds": ...} and returns
RUNNING. Each `step` waits up to that many seconds for the program's end. It returns RUNNING, or after the end the
program's last line, which is JSON such as {"reward": ...}. Other environments that use the endpoint do the same.
Imports no torch, because environments run in processes without torch.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from truestep.environments.episodes import script
from truestep.environments.episodes.environment import Answer, Environment
from truestep.environments.episodes.script import Script

RUNNING = "running"  # what `step` returns while the program runs
NOTHING = "{}"  # what `step` returns for a program that printed nothing
# The beginning of the endpoint's message at a limit; the limit's name follows.
CUT = "the document has reached sampler."
CLASS = f"{__name__}:Program"
_LONGEST_LINE = 2**20
_LAST_OUTPUT_SECONDS = 2.0  # time to read what the program printed before its end


class ProgramError(RuntimeError):
    pass


class Program(Environment):
    """`start` begins the program, and each `step` waits a limited time for its end."""

    def __init__(self, run: Sequence[str], preload: Sequence[str] = ()):
        """`run`: the program and its arguments. In these, {name} stands for a field of the prompt's record. `preload`:
        modules that are imported once, before episodes begin; the program must be one of this Python."""
        super().__init__()
        self._run, self._forks = run, bool(preload)
        self._last = NOTHING

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        if options.get("preload"):
            script.preload(options["preload"], options["run"])
        return {}

    def start(self, row: Mapping[str, Any]) -> str:
        record, self._seconds = row["row"], row["seconds"]
        arguments = [_filled(argument, record) for argument in self._run]
        given = {"OPENAI_BASE_URL": row["url"], "OPENAI_API_KEY": row["key"]}
        try:
            self._process = self._begin(arguments, given)
        except OSError as error:
            raise ProgramError(f"{arguments[0]} cannot be started: {error.strerror}") from None
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        threading.Thread(target=self._write, args=[json.dumps(record)], daemon=True).start()
        return RUNNING

    def _begin(self, arguments: Sequence[str], given: Mapping[str, str]) -> "subprocess.Popen[bytes] | Script":
        if self._forks:
            return Script(arguments, given)
        environment = {**os.environ, **given}
        return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def _write(self, record: str) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(record.encode() + b"\n")
        except OSError:  # the program does not read its input
            pass

    def _read(self) -> None:
        """Pass on what the program prints, and keep its last line."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_LONGEST_LINE):
            shown = line.decode(errors="replace")
            sys.stdout.write(shown)
            sys.stdout.flush()
            if shown.strip():
                self._last = shown.strip()

    def step(self, answer: Answer) -> str:
        try:
            code = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            return RUNNING
        self._reading.join(_LAST_OUTPUT_SECONDS)
        if code:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise ProgramError(f"the program ended with {how}: what it printed is in rewards.log")
        return self._last


def _filled(argument: str, record: Mapping[str, Any]) -> str:
    """Replace each {name} in an argument by that field of the record."""
    for name, value in record.items():
        if (mark := "{" + name + "}") in argument:
            argument = argument.replace(mark, value if isinstance(value, str) else json.dumps(value))
    return argument
