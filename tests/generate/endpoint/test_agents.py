"""The program of docs/agents.md, with OpenAI's own package, is trained as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from environments.episodes.test_conversation import tokenizer_of
from pages import ROOT
from small_runs import read_lines, said, sampled_config, write_lines
from tiny import make_model


def chat_model(directory: Path) -> Path:
    """A tiny model that talks by Qwen's template."""
    tokenizer = tokenizer_of("qwen3 without reasoning")
    make_model(directory, "llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    tokenizer.save_pretrained(directory)
    return directory


def of_page(tmp_path: Path) -> Path:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n# agent\.py\n(.*?)```", page, re.DOTALL)
    program = tmp_path / "agent.py"
    program.write_text(code)
    return program


@pytest.mark.nightly
def test_a_script_with_openais_package_is_trained_as_it_is(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": f"Say {x}", "answer": x} for x in "abcd"])
    run = [sys.executable, str(of_page(tmp_path))]
    sampler: dict[str, Any] = {
        "reward": None,
        "environment": {"type": "command", "run": run},
        "max_episode_tokens": 256,
        "max_new_tokens": 24,
        "reward_isolation": "off",  # the program of this test is in /tmp, which isolated ones do not see
    }
    sections: dict[str, Any] = {
        "data": {"group_size": 4, "tokens_per_microbatch": 256},
        "schedule": {"docs_per_step": 8, "steps": 2},
    }
    said(sampled_config(chat_model(tmp_path / "model"), prompts, tmp_path / "run", sampler=sampler, **sections))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["num_documents"] for line in lines] == [8, 8]
    for line in lines:
        # A conversation is one sequence. This model draws special tokens too, which a template writes in another way.
        assert 8 <= line["num_sequences"] < 12
        assert line["ratio_new_old"] == pytest.approx(1, abs=1e-5)
    assert not (tmp_path / "run" / "rejected.jsonl").exists()
