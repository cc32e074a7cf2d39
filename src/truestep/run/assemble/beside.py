"""Begins early, in other threads and processes, what a run on a GPU would else wait for later."""

import contextlib
import importlib
from collections.abc import Callable

import torch

from truestep.config.schema import Config
from truestep.config.sections import InProcessSampler
from truestep.gpu.self_test import ask_beside


def on_gpu(config: Config) -> bool:
    return config.model.device != "cpu" and torch.cuda.is_available()


def import_compiler(config: Config) -> None:
    """Import torch's compiler if layers are compiled, and start its processes, which import torch themselves."""
    if not on_gpu(config) or not (config.model.compile or isinstance(config.sampler, InProcessSampler)):
        return
    importlib.import_module("truestep.model.fast.compiler_backends")
    with contextlib.suppress(Exception):  # it is private to torch, which starts them with the first compilation
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()


def check_kernels(config: Config) -> None:
    """Begin to check the kernels that almost every model uses on a GPU. What needs an answer waits for it."""
    if not on_gpu(config) or config.model.dtype == "float32":
        return
    from truestep.head.passes import product_serves
    from truestep.model.fast import rms_norm, rope
    from truestep.step.update.optimizers import adamw

    place, dtype = torch.empty(0, device="cuda").device, getattr(torch, config.model.dtype)
    questions: list[Callable[[], object]] = [lambda: rms_norm.kernel_serves(place, dtype)]
    if config.optimizer.type != "custom":
        questions.append(lambda: adamw.kernel_serves(place, dtype))
    if isinstance(config.sampler, InProcessSampler):
        questions.append(lambda: rope.kernel_serves(place, dtype))
    if dtype == torch.bfloat16 and config.model.head.fp32_lm_head:
        questions.append(lambda: product_serves(place))
    ask_beside(place, questions)
