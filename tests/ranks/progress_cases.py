"""Runs that are slow, and runs that stand still, for the tests of the watch. Each is on ranks of its own."""

from __future__ import annotations

import io
import itertools
import json
import os
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from truestep.config.schema import Config
from truestep.files import tensors as tensor_files
from truestep.ranks.watch import Watch
from truestep.rollouts import files
from truestep.run.train import train
from truestep.weights import lazy as unread


def _run(config: dict[str, Any]) -> None:
    train(Config.model_validate(config), Console(file=io.StringIO()))


def _on_phase(act: Callable[[str], None]) -> None:
    honest = Watch.phase

    def phase(self: Watch, name: str) -> None:
        honest(self, name)
        act(name)

    Watch.phase = phase  # type: ignore[method-assign]


def _slowed(call: Callable[..., Any], seconds: float, only: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Sleep before each call, as a device or a disk takes its time. It neither computes nor reads meanwhile."""

    def slow(*arguments: Any, **named: Any) -> Any:
        if only():
            time.sleep(seconds)
        return call(*arguments, **named)

    return slow


def train_slowly(config: dict[str, Any], what: str, seconds: float, folder: str) -> None:
    """Train with one part slowed, each piece of it by so many seconds; write down when each phase began."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    began: list[tuple[float, str]] = []
    _on_phase(lambda name: began.append((time.monotonic(), name)))
    if what == "step":
        training = torch.is_grad_enabled
        LlamaDecoderLayer.forward = _slowed(LlamaDecoderLayer.forward, seconds, training)
    elif what == "evaluation":
        Qwen3DecoderLayer.forward = _slowed(
            Qwen3DecoderLayer.forward, seconds, lambda: bool(began) and began[-1][1] == "evaluating after step 0"
        )
    elif what == "save":
        tensor_files._PIECE = tensor_files._PAGE
        tensor_files._Written._write = _slowed(tensor_files._Written._write, seconds)  # type: ignore[method-assign]
    elif what == "load":
        unread.read_into = _slowed(unread.read_into, seconds)
    else:
        raise AssertionError(what)
    _run(config)
    began.append((time.monotonic(), "end"))
    if os.environ["RANK"] == "0":
        spans = [(name, end - start) for (start, name), (end, _) in itertools.pairwise(began)]
        Path(folder, f"{what}.json").write_text(json.dumps(spans), encoding="utf-8")


def stand_still(config: dict[str, Any], what: str, rank: int, phase: str) -> None:
    """Train, and have a rank stand still from a phase on."""

    def act(name: str) -> None:
        if name != phase or int(os.environ["RANK"]) != rank:
            return
        if what == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "asleep":
            time.sleep(1000)
        elif what == "disk":  # a pipe that nobody reads takes no more than it has room for
            tensor_files.open = lambda *_, **__: os.fdopen(os.pipe()[1], "wb", buffering=0)  # type: ignore[attr-defined]
        elif what == "sync":
            os.fdatasync = lambda handle: time.sleep(1000)
        else:
            assert what == "source"
            files.read_lines = queue.SimpleQueue().get  # type: ignore[assignment]  # of what nobody ever puts in

    _on_phase(act)
    _run(config)
