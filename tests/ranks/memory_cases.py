"""States in memory on two machines: the part of tests that ranks run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoints import read_states, read_weights
from documents import same_bits
from truestep.config.schema import Config
from truestep.ranks import keeper_client
from truestep.ranks.elastic import Agent
from truestep.ranks.group import Ranks
from truestep.run.assemble.policy import join_ranks
from truestep.run.checkpoint import memory as memories
from truestep.run.checkpoint.memory import Memory, MemoryStore
from truestep.run.checkpoint.saves import Saves
from truestep.run.checkpoint.staging import SharedStaging
from truestep.run.checkpoint.store import random_name
from truestep.run.train import make_trainer
from truestep.weights.remote_parts import remote_parts
from truestep.weights.tensor_parts import FOLDER


def on_machines(rank: int) -> None:
    """Let each rank be on a machine of its own."""
    name = f"machine {rank}"
    memories.machine_key = keeper_client.machine_key = lambda: name  # type: ignore[assignment]
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def opened(ranks: Ranks, run: Path, generation: int) -> Memory:
    made = Memory.open(ranks, run, Agent(os.getpid(), 1, 4), None, generation)
    made.begin(float(generation))
    return made


def keep_and_lose(config: dict[str, Any], lost: list[int], harmed: list[int], expected: list[str], part: str) -> None:
    """Make steps and keep each in memory. Then the keepers of some machines are lost, and bytes of a part flip in
    others; what is recalled is compared with the disk. `expected`: on which ranks parts are read from afar."""
    from rich.console import Console

    given = Config.model_validate(config)
    ranks, run = join_ranks(given), Path(config["checkpoint"]["directory"])
    on_machines(ranks.rank)
    trainer = make_trainer(given, Console(quiet=True), ranks=ranks)
    memory, staging = opened(ranks, run, 1), SharedStaging()
    try:
        trainer.memory = Saves(MemoryStore(memory, staging, lambda: None), ranks, staging)
        trainer.save_rule = replace(trainer.save_rule, in_memory_every=1)
        trainer.run()
        step = trainer.step - 1
        _harm(run, ranks, lost, harmed, step, part)
        again = Memory.open(ranks, run, Agent(os.getpid(), 1, 4), None, 2)
        found, notes = again.recall(lambda key: True, 1, run / "checkpoints")
        if not expected:
            assert len(notes) == bool(harmed) and all(f"{part} is damaged" in note for note in notes), notes
            assert (found.step if found is not None else 0) == (step - 1 if harmed else 0)
            return
        assert found is not None and found.step == step and notes == [], notes
        far = sorted(remote_parts(found.path))
        assert " ".join(far) == expected[ranks.rank], far
        copied = {file.name for file in (found.path / FOLDER).glob("random-*") if not file.is_symlink()}
        assert copied <= {random_name(0), random_name(ranks.rank)}, "what this rank reads, and no more"
        _compare(found.path, run / "checkpoints" / f"step-{step:08d}", (read_weights, read_states))
        ranks.gather(None)  # others may still read from here
        found.close()
    finally:
        memory.end()


def _harm(run: Path, ranks: Ranks, lost: list[int], harmed: list[int], step: int, part: str) -> None:
    here = keeper_client.LocalKeeper.of(run, 0)
    if ranks.rank in harmed:
        with here.connected() as connection:
            handle = connection.open((1, 1.0, step), f"{FOLDER}/{part}")
            byte = os.pread(handle, 1, 4000)
            os.pwrite(handle, bytes([byte[0] ^ 1]), 4000)
            os.close(handle)
    if ranks.rank in lost:
        with contextlib.suppress(keeper_client.KeeperError), here.connected() as connection:
            connection.ask("end", generation=99)
    ranks.gather(None)


def _compare(ours: Path, theirs: Path, reads: tuple[Callable[[Path], Any], ...]) -> None:
    for read in reads:
        mine, its = read(ours), read(theirs)
        assert mine.keys() == its.keys() and all(same_bits(mine[name], its[name]) for name in mine)
