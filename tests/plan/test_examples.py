"""The examples that name a card fit it, as their own first line has it planned."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner

from truestep.commands.cli import main
from truestep.config.load import load_config
from truestep.plan.advice import layout_of
from truestep.plan.memory import GIB, plan_memory
from truestep.plan.rates import CARDS
from truestep.plan.shape import read_shape

EXAMPLES = Path(__file__).parents[2] / "examples"
# Layers, hidden, intermediate, heads of queries, tied, weights.
SHAPES = {
    "1.7b": (28, 2048, 6144, 16, True, 1_720_574_976),
    "8b": (36, 4096, 12288, 32, False, 8_190_735_360),
    "32b": (64, 5120, 25600, 64, False, 32_762_123_264),
}


@pytest.mark.parametrize(
    ("name", "card", "peak"),
    [("full-1.7b", "4090", 20.5), ("full-8b", "H100", 68), ("lora-8b", "4090", 19), ("lora-32b", "H200", 82)],
)
def test_an_example_fits_the_card_that_it_names(name: str, card: str, peak: float, tmp_path: Path) -> None:
    layers, hidden, intermediate, heads, tied, weights = SHAPES[name.partition("-")[2]]
    transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, head_dim=128,
        tie_word_embeddings=tied,
    ).save_pretrained(tmp_path)  # fmt: skip
    file = EXAMPLES / f"{name}.yaml"
    command = re.search(r"`truestep (plan examples/\S+ --card (\S+))`", file.read_text(encoding="utf-8"))
    assert command and command[2] == card
    config = load_config(file, ["--model.path", str(tmp_path)])
    shape = read_shape(config)
    trained = shape.part(0, 1, 1, 1, trained=True).all
    assert shape.total == weights + (trained if config.adapter else 0)
    (rank,) = plan_memory(config, shape, layout_of(config, 1))
    assert rank.total / GIB < peak < 0.94 * CARDS[card]
    words = command[1].split()[2:]
    outcome = CliRunner().invoke(main, ["plan", str(file), *words, "--model.path", str(tmp_path)])
    assert outcome.exit_code == 0 and "It fits" in outcome.output, outcome.output
