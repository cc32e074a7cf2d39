"""Runs on servers that lie: what they trained on, and how they ended."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from server.liars import Liar, Plan, Told, told
from server.models import make_model
from server.runs import server_config
from server.sglang_server import serving
from server.vllm_server import NAME
from small_runs import merged, quiet_trainer, read_lines
from truestep.errors import TruestepError

Weights = dict[str, torch.Tensor]


@dataclass
class Outcome:
    error: str | None
    ended: str | None  # why the run ended without an error
    trained: list[Told]  # all documents that steps were made of
    steps: int  # in the ledger
    kept: bool  # the weights are those that the last step in the ledger left
    liars: list[Liar]
    urls: list[str]

    @property
    def lies_trained_on(self) -> int:
        return len(set(self.trained) & {one for liar in self.liars for one in liar.lied})


def run(directory: Path, plans: Sequence[Plan], *, in_time: bool = False, **sections: Any) -> Outcome:
    """Train on the servers of `plans`. With `in_time`, each update waits for the completions that its weights draw, so
    that all of them can be scored: however slow the machine is, the run is the same."""
    served = make_model(directory / "served", seed=100)
    liars = [Liar(served, NAME, plan, seed) for seed, plan in enumerate(plans)]
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(serving(liar)) for liar in liars]
        config = server_config(directory, urls, **merged({"sampler": {"protocol": "sglang"}}, sections))
        trainer = quiet_trainer(config)
        if in_time:
            _wait_for_completions(trainer)
        trained: list[Told] = []
        left: list[Weights] = [_weights(trainer)]
        record_step = trainer.directory.record_step

        def recorded(number: int, plan: Any, *others: Any) -> None:
            trained.extend(
                told(document.input_ids.tolist(), document.logprobs[document.loss_mask].tolist())
                for document in plan.documents
            )
            left.append(_weights(trainer))
            record_step(number, plan, *others)

        trainer.directory.record_step = recorded  # type: ignore[method-assign]
        error, ended = None, None
        try:
            ended = trainer.run()
        except TruestepError as raised:
            error = str(raised)
        now = _weights(trainer)
        kept = all(torch.equal(now[name], value) for name, value in left[-1].items())
    ledger = directory / "run" / "ledger.jsonl"
    steps = len(read_lines(ledger)) if ledger.exists() else 0
    return Outcome(error, ended, trained, steps, kept, liars, urls)


def _wait_for_completions(trainer: Any, seconds: float = 120) -> None:
    check = trainer.check
    servers, arrived = check.arrived.__self__._of_first_rank, check.arrived

    def all_arrived() -> list[Any]:
        servers.wait_until_sent()
        until = time.monotonic() + seconds
        while servers.ahead._tasks:
            assert time.monotonic() < until, "completions are in flight for ever"
            time.sleep(0.002)
        return arrived()

    check.arrived = all_arrived


def _weights(trainer: Any) -> Weights:
    return copy.deepcopy(trainer.policy.model.state_dict())
