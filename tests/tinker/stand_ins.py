"""A folder in which recipes of the cookbook run without the network: a tiny model and a few rows under the names that
they ask for. Both libraries look for a directory of a name before they look on a hub."""

from __future__ import annotations

import json
import random
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
SMOLLM2 = Path.home() / ".cache" / "truestep" / "smollm2-0.1.2"  # as `make small-model` leaves it
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")


def make_folder(folder: Path, examples: bool = False) -> Path:
    """A folder that lacks only the model of `NAME`. `examples`: questions of gsm8k begin with solved ones."""
    said = [
        {
            "prompt": f"say {n}",
            "messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": n}],
        }
        for n in (str(number % 7) for number in range(256))
    ]
    write_rows(folder / "HuggingFaceH4/no_robots", {"train": said, "test": said[:8]})
    answers = [1 + number % 2 for number in range(256)]
    sums = [{"question": f"What is {n - 1} + 1?", "answer": f"It is {n}.\n#### {n}"} for n in answers]
    asked = sums_behind_examples(256) if examples else sums
    write_rows(folder / "openai/gsm8k", {"train": asked, "test": asked[:8]}, config="main")
    pairs = [
        {
            "chosen": f"\n\nHuman: say {n % 7}\n\nAssistant: {n % 7}",
            "rejected": f"\n\nHuman: say {n % 7}\n\nAssistant: no",
        }
        for n in range(64)
    ]
    write_rows(folder / "Anthropic/hh-rlhf", {"train": pairs, "test": pairs[:8]})
    write_rows(folder / "zwhe99/DeepMath-103K", {"train": sums})
    (folder / "late_letters.py").write_text(ENVIRONMENT)
    sections = {
        "model": {"path": NAME, "dtype": "float32", "device": "cpu"},
        "data": {"path": "none.jsonl", "tokens_per_microbatch": 4096},
        "schedule": {"docs_per_step": 4},
        "loss": {"type": "cross_entropy"},
    }
    (folder / "serve.yaml").write_text(json.dumps(sections))  # JSON is YAML
    return folder


def sums_behind_examples(count: int) -> list[dict[str, str]]:
    """The four sums of 1 and 2 in turn, each behind four that are solved in the form which is rewarded: SmolLM2 writes
    that form now and then where it sees it."""
    draw = random.Random(0)
    rows = []
    for number in range(count):
        pairs = [(draw.randint(1, 2), draw.randint(1, 2)) for _ in range(4)]
        solved = [f"{a} + {b} = \\boxed{{{a + b}}}" for a, b in pairs]
        a, b = 1 + number % 2, 1 + number // 2 % 2
        question = "\n".join([*solved, f"{a} + {b} ="])
        rows.append({"question": question, "answer": f"It is {a + b}.\n#### {a + b}"})
    return rows


# What a model of answers says, whatever it is asked: a third each.
ANSWERS = ("Guess: {}", "\\boxed{{{}}}", "{}")


def warm_up(folder: Path, steps: int = 400) -> None:
    """Teach the model to answer in one of these ways with a digit, in chats of many lengths. So it solves tasks of
    recipes now and then, and learns which way is rewarded."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005)
    draw = random.Random(0)
    header = tokenizer.encode("assistant\n")
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.005 * (1 - step / steps)
        long = step % 3 == 0
        batch = tokenizer([_chat(draw, long) for _ in range(3 if long else 16)], padding=True, return_tensors="pt")
        labels = torch.full_like(batch["input_ids"], -100)
        for row, ids in enumerate(batch["input_ids"].tolist()):
            for at in range(len(header), len(ids)):
                if ids[at - len(header) : at] == header:
                    end = at + ids[at:].index(tokenizer.eos_token_id) + 1
                    labels[row, at:end] = batch["input_ids"][row, at:end]
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)


def _chat(draw: random.Random, long: bool) -> str:
    thought = draw.choice(["", "<think>\n\n</think>\n\n"])
    said = []
    for turn in range(draw.randrange(1, 12) if long else 1):
        size = draw.randrange(5, (90 if turn or not long else 800) + 40 * long)
        asked = "".join(chr(draw.randrange(32, 127)) for _ in range(size))
        answer = draw.choice(ANSWERS).format(draw.randrange(1, 3))
        said.append(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n{thought}{answer}<|im_end|>\n")
    return "".join(said)


def write_rows(folder: Path, splits: dict[str, Sequence[Any]], config: str = "default") -> None:
    folder.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def make_chat_model(folder: Path, norm: float = 16.0) -> None:
    """A tiny Llama over bytes, with the special tokens of Qwen's chats.

    The unembedding gets no adapter, and with a norm of 1 no hidden state leads far from equal probabilities of all
    tokens: the mean share of letters before N is 0.30, and 0.32 at most, so nothing is learnt. With 16 it is 0.98.
    """
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
    model.model.norm.weight.data.fill_(norm)
    model.save_pretrained(folder)
