"""Creates a tiny random Qwen3 model with a word-level tokenizer, as a Hugging Face directory."""

from collections.abc import Sequence
from pathlib import Path

import torch

from truestep.files.disks import writing

END = "<end>"


def make_tokenizer(directory: Path, words: Sequence[str]) -> int:
    """Make a tokenizer with one token per word. Return the size of its vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate((END, "<unknown>", *words))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END, unk_token="<unknown>")
    with writing(directory):
        wrapped.save_pretrained(directory)
    return len(vocabulary)


def make_model(directory: Path, words: Sequence[str], seed: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=make_tokenizer(directory, words),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    with writing(directory):
        Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory
