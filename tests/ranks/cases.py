"""Runs on several gloo ranks, each a forked process, for the tests of layouts."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ranks import pool
from scoring import loaded_once
from truestep.config.schema import Config
from truestep.model.fast import compiled
from truestep.ranks.launch import run_ranks
from truestep.ranks.watch import Watch
from truestep.run.assemble.policy import join_ranks
from truestep.run.train import make_trainer, train
from truestep.tools.score import score
from truestep.types import PackedBatch

TESTS = str(Path(__file__).parents[1])


def on_ranks(size: int, target: Callable[..., None], *arguments: Any, timeout: float = 280.0) -> None:
    """On ranks that run case after case (`pool`)."""
    pool.run_ranks(size, target, arguments, timeout=timeout)


def on_fresh_ranks(size: int, target: Callable[..., None], *arguments: Any, timeout: float = 280.0) -> None:
    """On ranks of the case's own: where it ends them, or measures what a process has when it begins."""
    run_ranks(size, target, arguments, timeout=timeout)


def score_all(runs: list[tuple[dict[str, Any], str]]) -> None:
    """One after another in the same processes: starting ranks and loading models is what takes the time."""
    with loaded_once():
        for config, output in runs:
            score(Config.model_validate(config), Path(output), gradients=True)


def score_compiled(runs: list[tuple[dict[str, Any], str]]) -> None:
    """By a backend of torch that takes seconds on a CPU; what is compiled is the same."""
    from torch._dynamo.utils import counters

    compiled.BACKEND = "aot_eager"
    for config, output in runs:
        torch._dynamo.reset()
        counters.clear()
        score(Config.model_validate(config), Path(output), gradients=True)
        assert counters["stats"]["unique_graphs"] > 0, "this rank's layers were compiled"


def train_all(configs: list[dict[str, Any]]) -> None:
    for config in configs:
        train(Config.model_validate(config), Console(file=io.StringIO()))


def train_and_keep(config: dict[str, Any], folder: str) -> None:
    """Each rank's own part of every weight as it is at the end, and what it knows of them, in a file of the rank's."""
    given = Config.model_validate(config)
    ranks = join_ranks(given)
    watch = Watch(ranks, given.schedule.stall_timeout)
    with watch.watching():
        trainer = make_trainer(given, Console(file=io.StringIO()), ranks=ranks, watch=watch)
        trainer.run()
    weights = trainer.policy.weights
    kept = {
        "master": {name: value.detach().clone() for name, value in weights.master.items()},
        "gradients": {name: value.clone() for name, value in weights.gradients.items()},
        "cut": {name: piece.cut for name, piece in weights.pieces.items()},
        "shard": ranks.shard,
    }
    torch.save(kept, Path(folder) / f"{ranks.rank}.pt")


def train_and_do(config: dict[str, Any], rank: int, phase: str, what: str) -> None:
    """As soon as this rank comes to that phase it is killed, raises, or stops where it is."""
    honest = Watch.phase

    def caught(self: Watch, name: str) -> None:
        honest(self, name)
        if name == phase and int(os.environ["RANK"]) == rank:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "raise":
                raise ZeroDivisionError("planted")
            elif what == "stall":
                time.sleep(1000)
            else:
                raise AssertionError(what)

    Watch.phase = caught  # type: ignore[method-assign]
    train(Config.model_validate(config), Console(file=io.StringIO()))


def score_padded(runs: list[tuple[dict[str, Any], str, int | None]]) -> None:
    """With that number for every token and position of the padding, which there is."""
    from truestep.step.compute import runner

    honest = runner.pack
    for config, output, poison in runs:

        def pack(*arguments: Any, poison: int | None = poison, **named: Any) -> PackedBatch:
            batch = honest(*arguments, **named)
            tokens = batch.tokens
            end = int(tokens.segments[tokens.num_segments])
            assert end < len(tokens)
            if poison is None:
                return batch
            padding = torch.arange(len(tokens)) >= end
            poisoned = dataclasses.replace(
                tokens,
                input_ids=tokens.input_ids.masked_fill(padding, poison),
                position_ids=tokens.position_ids.masked_fill(padding, poison),
            )
            return dataclasses.replace(batch, tokens=poisoned)

        runner.pack = pack
        score(Config.model_validate(config), Path(output), gradients=True)


def refuse_to_mix_tokens(config: dict[str, Any]) -> None:
    """Train a model whose layers add to each token the one before it in its document."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    honest = LlamaDecoderLayer.forward

    def mixing(self: Any, hidden_states: torch.Tensor, *arguments: Any, position_ids: torch.Tensor, **options: Any):
        first = (position_ids == 0)[..., None]
        before = hidden_states.roll(1, dims=1).masked_fill(first, 0.0)
        return honest(self, hidden_states + before, *arguments, position_ids=position_ids, **options)

    LlamaDecoderLayer.forward = mixing
    train_all([config])
