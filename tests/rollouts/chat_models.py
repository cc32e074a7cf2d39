"""Tiny tokenizers with chat templates of the shapes that model families have, and by hand what each makes of a chat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Segments = list[tuple[str, int]]  # text, and whether it is labels
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]  # the first is the beginning of text, the second the end
    by_hand: Callable[[Messages], Segments]


LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + '[/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GRANITE = (
    "{% for message in messages %}"
    "{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>' }}",
)
# As Qwen3 does: the last turn has an empty thought, and those before it have none.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _llama3(messages: Messages) -> Segments:
    segments: Segments = [("<|begin_of_text|>", 0)]
    for message in messages:
        label = int(message["role"] == "assistant")
        segments += [(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", 0)]
        segments += [(message["content"].strip() + "<|eot_id|>", label)]
    return segments


def _qwen(messages: Messages) -> Segments:
    segments: Segments = [("<|im_start|>system\nYou help.<|im_end|>\n", 0)] * (messages[0]["role"] != "system")
    return segments + _chatml(messages)


def _chatml(messages: Messages) -> Segments:
    segments: Segments = []
    for message in messages:
        label = int(message["role"] == "assistant")
        segments += [(f"<|im_start|>{message['role']}\n", 0), (f"{message['content']}<|im_end|>", label), ("\n", 0)]
    return segments


def _mistral(messages: Messages) -> Segments:
    segments: Segments = [("<s>", 0)]
    for message in messages:
        user = message["role"] == "user"
        segments += [(f"[INST] {message['content']}[/INST]", 0) if user else (f" {message['content']}</s>", 1)]
    return segments


def _gemma(messages: Messages) -> Segments:
    segments: Segments = [("<bos>", 0)]
    for message in messages:
        label = int(message["role"] == "assistant")
        role = "model" if label else message["role"]
        segments += [(f"<start_of_turn>{role}\n", 0), (message["content"].strip() + "<end_of_turn>", label), ("\n", 0)]
    return segments


def _granite(messages: Messages) -> Segments:
    segments: Segments = []
    for message in messages:
        label = int(message["role"] == "assistant")
        segments += [(f"<|start_of_role|>{message['role']}<|end_of_role|>", 0)]
        segments += [(f"{message['content']}<|end_of_text|>", label), ("\n", 0)]
    return segments


_CHATML = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
FAMILIES = {
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        _llama3,
    ),
    "qwen": Family(QWEN, _CHATML, _qwen),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), _mistral),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), _gemma),
    "granite": Family(
        GRANITE, ("<|end_of_text|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"), _granite
    ),
    "marked": Family(MARKED, _CHATML, _chatml),
    "marked without the end": Family(MARKED_WITHOUT_END, _CHATML, _chatml),
}


def make_tokenizer(template: str | None, special: tuple[str, ...], merges: list[tuple[str, str]] | None = None) -> Any:
    """A token for each byte, those of `merges`, and the special ones: any text, and no file of anybody's."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["".join(pair) for pair in merges or ()]
    vocabulary = {letter: number for number, letter in enumerate([*letters, *merged])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges or []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        additional_special_tokens=list(special[2:]),
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def make_chat_model(directory: Path, family: str) -> Path:
    """A random Llama with the family's tokenizer."""
    tokenizer = make_tokenizer(FAMILIES[family].template, FAMILIES[family].special)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory
