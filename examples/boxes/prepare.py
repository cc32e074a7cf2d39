"""Makes a tiny model that knows the words of the boxes, and demonstrations for its warm-up.

python -m examples.boxes.prepare [--output runs/boxes]
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from examples.boxes.boxes import COLOURS, Boxes, demonstrations
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

COUNT = 3200  # demonstrations
CALL = '{"name": "open", "arguments": {"box": '
WORDS = (": find ", "nothing", "error", "<tool_call>", CALL, "}}", "</tool_call>", *COLOURS, *map(str, range(10)))
ROLES = ("<user>", "<assistant>", "<tool>")
CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}"
)
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content or '' }}" + CALLS + "<end>{% endgeneration %}{% else %}{{ message.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ("<end>", "<unknown>", *ROLES, *WORDS)
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unknown>"))
    one_of = "|".join("".join(f"\\{letter}" if not letter.isalnum() else letter for letter in word) for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(one_of), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unknown>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, additional_special_tokens=list(ROLES))
    made.chat_template = TEMPLATE
    return made


def make_model(directory: Path) -> None:
    tokenizer = make_tokenizer()
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        **shape,
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.08,  # with the usual 0.02 so small a model learns to copy several times later
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write(file: Path, records: Iterable[Any]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/boxes"))
    given = parser.parse_args()
    make_model(given.output / "model")
    chats = enumerate(demonstrations("demonstrations", COUNT))
    write(given.output / "demonstrations.jsonl", ({"id": str(number), "messages": chat} for number, chat in chats))
    write(given.output / "prompts.jsonl", Boxes.rows({}, False))  # for programs, which make none
    write(given.output / "held-out.jsonl", Boxes.rows({}, True))
    print(f"{given.output} has the model and {COUNT} demonstrations")


if __name__ == "__main__":
    main()
