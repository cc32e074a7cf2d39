"""A task for a tiny mixture of experts: say a digit four times. Makes the model and the prompts.

python -m examples.experts.echo [--output runs/experts]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

DIGITS = "0123456789"
WORDS = ("say", *DIGITS)
TIMES = 4


def reward(prompt: str, completion: str, *, digit: str, **_: object) -> float:
    """Return the share of the words that are the prompt's digit."""
    return sum(word == digit for word in completion.split()) / TIMES


def make_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    numbers = {word: number for number, word in enumerate(("<end>", "<unknown>", *words))}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )


def make_model(directory: Path, words: Sequence[str] = WORDS, seed: int = 0) -> None:
    tokenizer = make_tokenizer(words)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        mlp_only_layers=[0],  # this layer does not route
        decoder_sparse_step=1,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/experts"))
    given = parser.parse_args()
    make_model(given.output / "model")
    rows = [{"prompt": f"say {digit}", "digit": digit} for digit in DIGITS]
    (given.output / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{given.output} has the model and {len(rows)} prompts")


if __name__ == "__main__":
    main()
