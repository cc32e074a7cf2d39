"""Where the error of SmolLM2's log-probs comes from. `pytest -s` prints each part."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from tinker.precision import HEAD, LAYERS, LOGITS, OURS, THEIRS, parts
from tinker.stand_ins import SMOLLM2, sums_behind_examples


@pytest.mark.release
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="`make small-model` gets SmolLM2")
def test_parts_of_the_error() -> None:
    """With the head in float64, single log-probs are within 1e-5. The head's product in float32 adds more than that."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    chats = [
        [{"role": "user", "content": one["question"]}, {"role": "assistant", "content": one["answer"]}]
        for one in sums_behind_examples(4)
    ]
    documents = [tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
    found = parts(SMOLLM2, documents)
    for name, error in found.items():
        print(f"{name}: {error}")
    assert all(found[name].most_relative <= 1e-5 for name in (LAYERS, LOGITS)), found
    assert found[HEAD].most_relative > found[LAYERS].most_relative, "the head's product has the larger part"
    assert found[OURS].norm <= 1e-5 and found[OURS].most_relative <= found[THEIRS].most_relative, found
