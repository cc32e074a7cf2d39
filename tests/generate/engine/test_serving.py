"""The sampler's kernels are chosen by checks, which run in threads while layers are compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from truestep.generate.engine import serving
from truestep.generate.engine.attend import attend_rows
from truestep.generate.engine.device import Device, device_of
from truestep.generate.engine.draw import draw
from truestep.generate.engine.forward import shapes_of
from truestep.gpu.self_test import ask_beside
from truestep.model.loading.load import load_policy

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="it stands for a GPU where there is none")

Model = Callable[[str], Path]
CHECKS = {"attention": "check_attention", "chunks": "check_past", "draw": "check_draw", "copying": "check_copies"}


def chosen(
    model: Path, monkeypatch: pytest.MonkeyPatch, wrong: str | None, compiled: dict[Any, Any] | None = None
) -> tuple[Device, dict[str, str]]:
    """Choose kernels where the check called `wrong` finds them wrong. Return also which thread made each check."""
    threads: dict[str, str] = {}

    def check(what: str) -> Callable[..., str | None]:
        def answer(*_: Any) -> str | None:
            assert not torch.is_grad_enabled()
            threads[what] = threading.current_thread().name
            if what == wrong == "draw":
                raise RuntimeError("its compiler fails")
            return "off by 1" if what == wrong else None

        return answer

    for what, name in CHECKS.items():
        monkeypatch.setattr(serving, name, check(what))
    monkeypatch.setattr(serving, "attention", SimpleNamespace(is_fused=lambda *_: True))
    policy = load_policy(model)
    with torch.no_grad():
        device = serving.serve_with_kernels(device_of(policy.device), policy, shapes_of(policy), compiled)
    return device, threads


@pytest.mark.parametrize("wrong", [None, *CHECKS])
def test_each_kernel_is_used_that_its_check_found_right(
    wrong: str | None, tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, threads = chosen(tiny_model("qwen3"), monkeypatch, wrong)
    plain = device_of(torch.device("cpu"))
    attends = device.attend is not attend_rows
    assert attends == (wrong != "attention") == device.graphs == device.fused
    assert (device.store is plain.store) == (wrong == "attention")
    assert device.past == (wrong not in ("attention", "chunks"))
    assert (device.draw is draw) == (wrong == "draw")
    assert (device.copy is plain.copy) == (wrong == "copying")
    assert set(threads) == set(CHECKS) and threading.main_thread().name not in threads.values()
    assert not device.compiles


def test_layers_are_compiled_while_the_checks_run(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truestep.model.fast.compiled.BACKEND", "eager")
    compiled: dict[Any, Any] = {}
    device, _ = chosen(tiny_model("qwen3"), monkeypatch, None, compiled)
    assert device.compiles and device.graphs and compiled


def test_layers_that_compute_something_else_are_not_compiled(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("the compiler fails")

    monkeypatch.setattr(serving, "_run_compiled", wrong)
    device, _ = chosen(tiny_model("qwen3"), monkeypatch, None, {})
    assert device.graphs and not device.compiles
    assert "the sampler's compiled layers does not work on this machine" in caplog.text


def test_questions_are_asked_beside() -> None:
    asked, go = [], threading.Event()

    def question(number: int) -> None:
        assert go.wait(30)
        asked.append((number, threading.current_thread().name))

    ask_beside(torch.device("cpu"), [lambda: question(1), lambda: question(2)])
    assert not asked
    threads = [thread for thread in threading.enumerate() if thread.name == "self-test"]
    go.set()
    for thread in threads:
        thread.join(30)
    assert sorted(asked) == [(1, "self-test"), (2, "self-test")]
