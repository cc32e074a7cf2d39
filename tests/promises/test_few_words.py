"""Promises that a page makes in few words, and that no other test would break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from report.test_report import make_run
from rollouts.chat_models import make_tokenizer
from rollouts.test_chat import CHATML, chat
from scoring import run_score, write_records
from small_runs import (
    file_config,
    quiet_trainer,
    sampled_config,
    sort_prompts,
    write_lines,
    write_rollouts,
)
from tiny import make_model, make_records
from truestep.metrics.sinks import WandbSink
from truestep.numerics.operations import InexactError
from truestep.report.page import page_html
from truestep.step.update import optimizer
from truestep.tools.demo.model import make_tokenizer as word_tokenizer
from truestep.tools.verify.judge import verify
from truestep.tools.verify.report import complaints

CALLS = (
    "{% for tool in tools %}{{ '<|im_start|>tool ' + tool['function']['name'] + '<|im_end|>' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% for call in message['tool_calls'] %}{{ 'call ' + call['function']['name'] }}{% endfor %}"
    "{{ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_tools_and_calls_go_to_the_template() -> None:
    """docs/sft.md: what a template takes beside the text of messages, and the tools."""
    tokenizer = make_tokenizer(CALLS, CHATML)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2 + 2?", "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_calls": []},
        {"role": "assistant", "content": "It is 4.", "tool_calls": []},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    read = chat(tokenizer).read({"messages": messages, "tools": tools})
    labels = [token for token, label in zip(read["input_ids"], read["loss_mask"], strict=True) if label]
    assert tokenizer.decode(read["input_ids"]).startswith("<|im_start|>tool add<|im_end|><|im_start|>user\n2 + 2?")
    assert tokenizer.decode(labels) == "call add<|im_end|>It is 4.<|im_end|>"


def test_parts_of_a_reward_have_no_other_effect(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """docs/contract.md: `rewards` are logged and have no other effect, and `metadata` has none."""
    records, scored = make_records(3, advantages="rewards", group_size=4), []
    for number, parts in enumerate(
        ({}, {"rewards": {"right": 5.0, "form": -3.0}, "metadata": {"reward": 9.0, "advantage": [1]}})
    ):
        file = write_records(tmp_path / f"{number}.jsonl", [record | parts for record in records])
        config = {
            "model": {"path": str(tiny_model("llama")), "dtype": "float32"},
            "data": {"path": str(file), "group_size": 4, "advantages": "group_normalized"},
        }
        scored.append(run_score(config, tmp_path / "out"))
    plain, parted = scored
    assert parted.step["rewards/right"] == 5.0 and parted.step["rewards/form"] == -3.0
    assert {name: value for name, value in parted.step.items() if "rewards/" not in name} == plain.step
    assert all(torch.equal(gradient, parted.gradients[name]) for name, gradient in plain.gradients.items())


def test_experts_are_refused_where_sampling_is_exact(tmp_path: Path) -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_model(tmp_path / "model", "llama", **experts)
    word_tokenizer(model, tuple(f"w{number}" for number in range(59)))
    prompts = write_lines(tmp_path / "p.jsonl", sort_prompts(4))
    config = sampled_config(model, prompts, tmp_path / "run", sampler={"exact": True}, schedule={"steps": 1})
    with pytest.raises(InexactError, match=r"sampler\.exact: this model computes .*: leave out sampler\.exact"):
        quiet_trainer(config).run()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_kernel_of_adamw_serves_on_every_rank_or_on_none(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/optimizers.md: ranks that have the same weights must update them alike."""
    monkeypatch.setattr(optimizer.adamw, "kernel_serves", lambda *_: True)
    ranks = SimpleNamespace(gather=lambda here: [here, elsewhere])
    weights: Any = SimpleNamespace(master={"w": 1}, device="cuda", dtype=torch.bfloat16, ranks=ranks)
    assert optimizer.kernels_serve(weights) is elsewhere


@pytest.mark.long
def test_verify_computes_muon_in_float32(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Products in bfloat16 would be a thousand times beyond the bound of an update."""
    write_rollouts(tmp_path / "r.jsonl", 8)
    muon = {"type": "muon", "ns_dtype": "bfloat16", "learning_rate": 1e-2}
    config = file_config(tiny_model("llama"), tmp_path / "r.jsonl", tmp_path / "run", optimizer=muon)
    (verdict,) = verify(config, tmp_path / "out", only=lambda layout: layout.name == "one process")
    assert verdict.passed and "update" in verdict.worst, complaints(verdict)


# ---- the report and the trackers


def test_the_page_has_two_colour_schemes_and_fits_a_phone(tmp_path: Path) -> None:
    page = page_html([make_run(tmp_path / "run")])
    assert '<meta name="viewport" content="width=device-width' in page
    light, dark = page.split("@media (prefers-color-scheme:dark)", 1)
    names = {line.partition(":")[0] for line in dark.split("}")[0].partition("{")[2].partition("{")[2].split(";")}
    assert len(names) > 10 and all(f"{name}:" in light for name in names if name.startswith("--"))
    assert "@media (max-width:520px)" in page


def test_a_run_that_goes_on_is_the_same_run_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    begun: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return SimpleNamespace(define_metric=lambda *_, **__: None)

    monkeypatch.setattr(wandb, "init", init)
    for _ in range(2):
        WandbSink(tmp_path, {}, project="p", mode="offline")
    first, second = begun
    assert first["id"] == second["id"] == (tmp_path / "wandb_id").read_text() and second["resume"] == "allow"
    WandbSink(tmp_path / "another", {}, project="p", mode="offline")
    assert begun[2]["id"] != first["id"]
