"""A folder in which recipes of the cookbook run without the network: a tiny model and a few rows under the names that
they ask for. Both libraries look for a directory of a name before they look on a hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# An environment of the package verifiers, which rates how many letters are in the second half of the alphabet.
ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


def load_environment():
    rows = [{"prompt": [{"role": "user", "content": f"say {n}"}], "answer": str(n)} for n in range(96)]

    def late(completion, **_):
        text = completion[-1]["content"]
        return sum(letter >= "N" for letter in text) / max(len(text), 1)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[late]))
"""
NAME = "Qwen/Qwen3-8B"  # whose chat format the cookbook knows
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def make_folder(folder: Path) -> Path:
    make_chat_model(folder / NAME)
    said = [
        {
            "prompt": f"say {n}",
            "messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": n}],
        }
        for n in (str(number % 7) for number in range(256))
    ]
    write_rows(folder / "HuggingFaceH4/no_robots", {"train": said, "test": said[:8]})
    sums = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(256)]
    write_rows(folder / "openai/gsm8k", {"train": sums, "test": sums[:8]}, config="main")
    pairs = [
        {
            "chosen": f"\n\nHuman: say {n % 7}\n\nAssistant: {n % 7}",
            "rejected": f"\n\nHuman: say {n % 7}\n\nAssistant: no",
        }
        for n in range(64)
    ]
    write_rows(folder / "Anthropic/hh-rlhf", {"train": pairs, "test": pairs[:8]})
    write_rows(folder / "zwhe99/DeepMath-103K", {"train": sums[:32]})
    (folder / "late_letters.py").write_text(ENVIRONMENT)
    sections = {
        "model": {"path": NAME, "dtype": "float32", "device": "cpu"},
        "data": {"path": "none.jsonl", "tokens_per_microbatch": 4096},
        "schedule": {"docs_per_step": 4},
        "loss": {"type": "cross_entropy"},
    }
    (folder / "serve.yaml").write_text(json.dumps(sections))  # JSON is YAML
    return folder


def write_rows(folder: Path, splits: dict[str, Sequence[Any]], config: str = "default") -> None:
    folder.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def make_chat_model(folder: Path) -> None:
    """A tiny Llama over bytes, with the special tokens of Qwen's chats."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    fast.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    folder.mkdir(parents=True)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    # The unembedding gets no adapter, and with a norm of 1 no hidden state leads far from equal probabilities of all
    # tokens: the mean share of letters before N is 0.30, and 0.32 at most. So nothing could be learnt. Now it is 0.98.
    model.model.norm.weight.data.fill_(16.0)
    model.save_pretrained(folder)
