"""A user's program in a run whose ranks come and go: it writes down how `train` ends for it."""

from __future__ import annotations

import os
from pathlib import Path

import truestep


def program(config: str) -> None:
    told = Path(config).with_name("told")

    def tell(what: str) -> None:
        with told.open("a", encoding="utf-8") as file:
            print(os.getpid(), what, file=file, flush=True)

    try:
        result = truestep.train(config)
        tell(f"finished {result.step}")
    except SystemExit as end:
        tell(f"exit {end.code}")
        raise
    except truestep.TruestepError as error:
        tell(f"error {type(error).__name__}")
        raise
    finally:
        tell("finally")
