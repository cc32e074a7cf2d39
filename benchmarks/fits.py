"""What fits one GPU: whole runs of three steps at Qwen3-8B's and Qwen3-32B's shape, with the plan beside each.

    python benchmarks/fits.py [--cases full-offload full-8bit lora-8b lora-32b] [--limit 200] [--tiny]

Each case is a process of its own with a time limit, and its line is printed when it ends. Weights are random and made
on the device: no file has them, and no checkpoint is written. Documents have 1,024 tokens, half of them labels; a step
has four micro-batches of 16k tokens (the 32B model: two). `--tiny` runs the same cases on a toy, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

GIB = 2**30
BIG, BIGGER, HALF = (36, 4096, 12288, 32), (64, 5120, 25600, 64), (18, 4096, 12288, 32)
LORA = {"adapter": {"rank": 32, "alpha": 32}}
ROOMY = {"type": "adamw_8bit", "offload": "all", "offload_room": 16}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]  # layers, hidden, intermediate, heads of queries
    micro_batches: int  # of a step
    goal: float  # GiB
    limit: float  # seconds
    options: dict[str, Any]  # what the configuration has besides


CASES = {
    "lora-8b": Case(BIG, 4, 40, 100, LORA),
    "full-8bit": Case(BIG, 4, 125, 120, {"optimizer": {"type": "adamw_8bit"}}),
    "full-offload": Case(BIG, 4, 75, 190, {"optimizer": {"offload": "all"}}),
    "full-8bit-offload": Case(BIG, 4, 75, 120, {"optimizer": ROOMY}),
    "lora-32b": Case(BIGGER, 2, 120, 160, LORA),
}
# Half of the 8B model's layers fit without offload: what offload costs.
PAIR = {
    "half-plain": Case(HALF, 4, 125, 100, {}),
    "half-states": Case(HALF, 4, 75, 130, {"optimizer": {"offload": "states"}}),
}
# Runs that must fail, on a card that lends them little: each says what outgrew its plan.
SMALL = (28, 2048, 6144, 16)
FULL = {
    "no-room-to-load": Case(SMALL, 2, 5, 60, {}),
    "no-room-for-states": Case(SMALL, 2, 22, 60, {}),
    "no-room-for-activations": Case(SMALL, 2, 45, 60, {"model": {"activation_checkpointing": False}}),
}
ALL = CASES | PAIR | FULL
STEPS, LENGTH = 3, 1024
MARK = "RESULT "


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=ALL, default=list(CASES))
    parser.add_argument("--limit", type=float, help="seconds of a case; without it, each has its own")
    parser.add_argument("--tiny", action="store_true", help="a toy's shape and short documents")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--card", help="a file of rates to plan times with; without it, this card's")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="options of every case")
    parser.add_argument("--one", choices=ALL, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = options()
    if given.one:
        run(given.one, given)
        return
    began, results = time.monotonic(), []
    for name in given.cases:
        result = in_process(name, given)
        results.append(result)
        print(f"{name}: {json.dumps(result)}", flush=True)
    print(f"\n{time.monotonic() - began:.0f} s in all\n")
    print("| case | step, s | tokens/s | planned, s | peak, GiB | planned | goal | host, GiB |\n" + "| --- " * 8 + "|")
    for name, result in zip(given.cases, results, strict=True):
        print(row(name, result))


def row(name: str, result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"| {name} | {result['failed']} | | | | | | |"
    return (
        f"| {name} | {result['step']:.3f} | {result['tokens_per_second']:,.0f} | {result['planned_step']:.3f} | "
        f"{result['peak']:.1f} | {result['planned_peak']:.1f} | {result['goal']} | {result['host']:.1f} |"
    )


def in_process(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run a case in a process of its own; whatever becomes of it, the next one has its turn."""
    limit = given.limit or ALL[name].limit
    command = [sys.executable, __file__, *sys.argv[1:], "--one", name]
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            child.wait(limit)
            failed = f"exit code {child.returncode}"
        except subprocess.TimeoutExpired:
            failed = f"not done within {limit:g} s"
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0)
        lines = output.read().splitlines()
    found = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    print("\n".join(line for line in lines if not line.startswith(MARK)), flush=True)
    result: dict[str, Any] = json.loads(found[-1]) if found else {"failed": failed}
    return result


def write_case(folder: Path, name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Write a model's configuration and rollouts, and give the run's options."""
    import numpy as np
    from transformers import Qwen3Config

    case = ALL[name]
    layers, hidden, intermediate, heads = case.shape
    vocabulary, length, tokens = (256, 32, 128) if given.tiny else (151_936, LENGTH, 16 * LENGTH)
    if given.tiny:
        layers, hidden, intermediate, heads = 2, 64, 128, 16
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=16 if given.tiny else 128,
        max_position_embeddings=32_768, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder / "model")
    draw, documents = np.random.default_rng(0), case.micro_batches * tokens // length
    with (folder / "rollouts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(STEPS * documents):
            record = {
                "id": str(number),
                "input_ids": draw.integers(0, vocabulary, length).tolist(),
                "prompt_length": length // 2,
                "logprobs": np.minimum(-np.log(vocabulary) + 0.3 * draw.normal(size=length // 2), 0).tolist(),
                "advantage": round(float(draw.normal()), 4),
            }
            file.write(json.dumps(record) + "\n")
    base: dict[str, Any] = {
        "model": {
            "path": str(folder / "model"),
            "dtype": "bfloat16",
            "device": given.device,
            "activation_checkpointing": True,
            "compile": not given.no_compile,
            "head": {"fp32_lm_head": True},
        },
        "loss": {"type": "grpo"},
        "data": {"path": str(folder / "rollouts.jsonl"), "advantages": "none", "tokens_per_microbatch": tokens},
        "schedule": {"docs_per_step": documents, "steps": STEPS},
        "checkpoint": {"directory": str(folder / "run"), "every": 0},
        "logging": {"rollouts": None},
    }
    return {**base, **{name: {**base.get(name, {}), **values} for name, values in case.options.items()}}


def drawn(name: str, shape: Sequence[int], device: Any) -> Any:
    """Draw a weight, the same for each name on a kind of device."""
    import torch

    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)


def made_up(device: str, directory: Path, *_: Any) -> tuple[Any, None]:
    """Make a model whose weights are drawn where others are read: on the device, the same for each name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from truestep.model.mixers import attention
    from truestep.weights.lazy import Unread, replace_parameters, weights_without_values

    with weights_without_values():
        config = AutoConfig.from_pretrained(directory)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    names = {parameter: name for name, parameter in model.named_parameters()}

    def unread(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        values = partial(drawn, names[parameter], parameter.shape, device)
        return torch.nn.Parameter(Unread.of(parameter.detach(), values))

    replace_parameters(model, unread)
    return model.eval(), None


class Lines:
    """Keeps the metrics of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def step(self, line: dict[str, Any]) -> None:
        self.steps.append(dict(line))
        parts = {name[5:]: round(value, 3) for name, value in line.items() if name.startswith("time/")}
        print(f"step {line['step']}: {line['step_time']:.3f} s, loss {line['loss']:.3e}; {parts}", flush=True)

    def evaluation(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def run(name: str, given: argparse.Namespace) -> None:
    import torch
    import yaml
    from rich.console import Console

    from truestep.config.schema import Config
    from truestep.model.loading import load
    from truestep.plan.advice import layout_of, most_of
    from truestep.plan.shape import read_shape
    from truestep.run.checkpoint.saves import SaveRule
    from truestep.run.train import make_trainer

    began = time.monotonic()
    gpu = torch.cuda.is_available() and given.device != "cpu"
    load.read_directory = partial(made_up, "cuda" if gpu else "cpu")  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        sections = write_case(Path(folder), name, given)
        pairs = (pair.split("=", 1) for pair in given.set)
        config = Config.model_validate(sections).changed({name: yaml.safe_load(value) for name, value in pairs})
        shape = read_shape(config)
        layout = layout_of(config, 1)
        planned = most_of(config, shape, layout)
        if name in FULL:
            show_exhausted(config, ALL[name].goal)
            return
        print(f"== {name}: {shape.total / 1e9:.2f}B weights, planned {planned / GIB:.1f} GiB", flush=True)
        trainer = make_trainer(config, Console(width=110))
        print(f"loaded after {time.monotonic() - began:.0f} s", flush=True)
        trainer.save_rule = SaveRule(never=True)
        lines = Lines()
        trainer.sinks.append(lines)
        trainer.run()
    after = lines.steps[1:]
    step = sum(line["step_time"] for line in after) / len(after)
    result = {
        "weights": shape.total,
        "step": step,
        "tokens_per_second": after[-1]["num_tokens"] / step,
        "planned_step": planned_seconds(config, shape, layout, given, gpu),
        "optimizer": sum(line.get("time/optimizer", 0.0) for line in after) / len(after),  # reported a step late
        "peak": torch.cuda.max_memory_allocated() / GIB if gpu else 0.0,
        "reserved": torch.cuda.max_memory_reserved() / GIB if gpu else 0.0,
        "planned_peak": planned / GIB,
        "goal": ALL[name].goal,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": [line["loss"] for line in lines.steps],
        "seconds": time.monotonic() - began,
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "torch": torch.__version__,
    }
    print(MARK + json.dumps(result), flush=True)


def show_exhausted(config: Any, room: float) -> None:
    """Run on so many GiB of the card, and print the error that must come."""
    import torch
    from rich.console import Console

    from truestep.plan.exhausted import MemoryExhaustedError
    from truestep.run.train import train

    torch.cuda.set_per_process_memory_fraction(room * GIB / torch.cuda.mem_get_info()[1])
    try:
        train(config, Console(width=110))
        raise SystemExit("it ran, and was not to")
    except MemoryExhaustedError as error:
        print(MARK + json.dumps({"failed": str(error).replace("\n", " ")}), flush=True)


def planned_seconds(config: Any, shape: Any, layout: Any, given: argparse.Namespace, gpu: bool) -> float:
    from truestep.plan.cost import Work, plan_time
    from truestep.plan.rates import kept_here, measure_here, named_rates

    rates = named_rates(given.card)[1] if given.card else kept_here(1)
    rates = rates or measure_here("cuda" if gpu else "cpu")
    tokens = config.schedule.docs_per_step * config.data.tokens_per_microbatch / (128 / 32 if given.tiny else 16)
    length = 32 if given.tiny else LENGTH
    return plan_time(config, shape, layout, rates, Work(tokens, tokens / 2, length)).total


if __name__ == "__main__":
    main()
