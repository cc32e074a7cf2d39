"""Starts vLLM servers for tests, by the Python of the vLLM: a line of JSON in, a process id out.

    {"log": FILE, "arguments": ["--model", ...]}

A server is two processes, and in each vLLM's imports take longer than all else at its start. Here they are forked from
this one, which has only imported. vLLM itself forks on GPUs; on CPUs it spawns, so that libraries see the threads and
cores that it gives them in the environment, which tests have set before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback

import vllm.entrypoints.openai.api_server
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401

_context = multiprocessing.get_context


def _serve(log: str, arguments: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(written, 1)
    os.dup2(written, 2)
    multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a server that was killed
    for line in sys.stdin:
        asked = json.loads(line)
        server = os.fork()
        if server == 0:
            try:
                _serve(asked["log"], asked["arguments"])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        print(server, flush=True)
