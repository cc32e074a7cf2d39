"""The server from which ranks of this machine are forked. It has imported torch and transformers, so that a rank starts
in milliseconds instead of seconds. This module imports neither."""

import multiprocessing
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_IMPORTED_FIRST = ["truestep.ranks.preload", "truestep.run.train", "truestep.tools.score"]


def fork_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_FIRST)
    return context


def begin() -> None:
    """Start the server, so that it imports in parallel with this process."""
    fork_context()
    forkserver.ensure_running()
