"""Starts ranks on this machine without torchrun, for `verify` and tests."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from truestep.config import held
from truestep.config.custom import keep_path_clean
from truestep.ranks.axes import RankError
from truestep.ranks.forks import fork_context

_FOLDER = "truestep-ranks-"  # followed by the id of the process that started the ranks


def run_ranks(
    size: int,
    target: Callable[..., None],
    arguments: Sequence[Any] = (),
    *,
    timeout: float = 600.0,
    environment: dict[str, str] | None = None,
) -> None:
    """Run `target(*arguments)` in a process for each rank. Raise `RankError`, with the ranks' last output, if one fails
    or all take more than `timeout` seconds."""
    processes, folder, store = start_ranks(size, target, arguments, environment)
    deadline = time.monotonic() + timeout
    try:
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        for process in processes:  # if one has failed, the others have up to 20 s to end by themselves
            process.join(timeout=max(0.0, min(20.0, deadline - time.monotonic())))
    finally:
        stuck = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for rank in stuck:
            processes[rank].kill()
            processes[rank].join()
        del store
    failed = {rank: process.exitcode for rank, process in enumerate(processes) if process.exitcode}
    output = "\n".join(f"rank {rank}: {line}" for rank in range(size) for line in _last_lines(folder / str(rank)))
    shutil.rmtree(folder, ignore_errors=True)
    if failed or stuck:
        raise RankError(f"ranks that failed, with their exit codes: {failed}; ranks that were stuck: {stuck}\n{output}")


def _remove_leftovers() -> None:
    """Remove the folders of processes that were killed before they could remove them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*-*"):
        number = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(PermissionError):  # another user's process, which is alive
            try:
                os.kill(int(number) if number.isdigit() else os.getpid(), 0)
            except ProcessLookupError:
                shutil.rmtree(folder, ignore_errors=True)


def _last_lines(console: Path) -> list[str]:
    return console.read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if console.is_file() else []


def start_ranks(
    size: int, target: Callable[..., None], arguments: Sequence[Any] = (), environment: dict[str, str] | None = None
) -> tuple[list[BaseProcess], Path, dist.TCPStore]:
    """Start ranks. Return their processes, the folder of their output, and the store, which must outlive them."""
    context = fork_context()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    _remove_leftovers()
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    processes: list[BaseProcess] = []
    objects = held.packed_all()
    for rank in range(size):
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **(environment or {}),
        }
        given = target, tuple(arguments), variables, folder / str(rank), objects
        process = context.Process(target=_rank, args=given)
        with _main_hidden():
            process.start()
        processes.append(process)
    return processes, folder, store


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep new processes from running the main script again, which may lack the guard `if __name__ == "__main__"`."""
    main = vars(sys.modules["__main__"])
    hidden: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
    main.pop("__file__", None)
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


def _rank(
    target: Callable[..., None],
    arguments: tuple[Any, ...],
    variables: dict[str, str],
    console: Path,
    objects: dict[str, str],
) -> None:
    os.environ.update(variables)
    held.receive(objects)
    keep_path_clean()
    file = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    try:
        target(*arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)
