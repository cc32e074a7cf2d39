"""`verify` takes presets as it takes the options that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from truestep.config.load import load_config
from truestep.tools.verify.judge import verify

SAMPLED = """\
data: {group_size: 4}
schedule: {docs_per_step: 8, steps: 3}
sampler: {prompts: p.jsonl, reward: "a:b"}
"""


@pytest.mark.parametrize(
    "preset", ["[dapo, tis]", "luspo", pytest.param("on_policy_distillation", marks=pytest.mark.long)]
)
def test_a_preset_is_proved(
    preset: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, teacher = tiny_model("llama"), tiny_model("qwen3")
    loss = f"loss: {{kl_reference: {{path: {teacher}}}}}\n" if preset == "on_policy_distillation" else ""
    text = f"preset: {preset}\nmodel: {{path: {model}, dtype: float32, device: cpu}}\n{loss}{SAMPLED}"
    Path("run.yaml").write_text(text, encoding="utf-8")
    names = ("one process", "head: 1 row a chunk")
    verdicts = verify(load_config(Path("run.yaml")), Path("out"), only=lambda layout: layout.name in names)
    assert len(verdicts) == 2
    assert all(verdict.passed for verdict in verdicts), verdicts
