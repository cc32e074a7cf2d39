"""The environment of an episode that is a program: it asks for completions at the endpoint, and gives its own reward.

`start` gets {"row": the prompt's record, "url": the endpoint, "key": the document's, "seconds": ...} and says RUNNING.
Each `step` waits so many seconds for the end, and says RUNNING, or {"reward": ...} as JSON when it has come. Other
environments that ask at the endpoint do the same. Imports no torch, as all processes of episodes.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from truestep.environments.episodes.environment import Answer, Environment

RUNNING = "running"  # what is said while the program runs; then it is the last line that it printed
NOTHING = "{}"  # the last line of a program that printed nothing
CUT = "the document has reached sampler."  # begins what the endpoint says at a limit, before the limit's name
CLASS = f"{__name__}:Program"
_LONGEST_LINE = 2**20
_LAST_OUTPUT_SECONDS = 2.0  # for what it has printed before its end


class ProgramError(RuntimeError):
    pass


class Program(Environment):
    """`start` begins the program, and each `step` waits for its end, for a while."""

    def __init__(self, run: Sequence[str]):
        """`run`: the program and its arguments, in which {name} is a field of the prompt's record."""
        super().__init__()
        self._run = run
        self._last = NOTHING

    def start(self, row: Mapping[str, Any]) -> str:
        record, self._seconds = row["row"], row["seconds"]
        arguments = [_filled(argument, record) for argument in self._run]
        given = {"OPENAI_BASE_URL": row["url"], "OPENAI_API_KEY": row["key"]}
        try:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **given}
            )
        except OSError as error:
            raise ProgramError(f"{arguments[0]} cannot be started: {error.strerror}") from None
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        threading.Thread(target=self._write, args=[json.dumps(record)], daemon=True).start()
        return RUNNING

    def _write(self, record: str) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                stdin.write(record.encode() + b"\n")
        except OSError:  # it does not read it
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
    """Put the record's fields into an argument."""
    for name, value in record.items():
        if (mark := "{" + name + "}") in argument:
            argument = argument.replace(mark, value if isinstance(value, str) else json.dumps(value))
    return argument
