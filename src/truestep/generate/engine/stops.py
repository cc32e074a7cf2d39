"""Texts that end a completion, wherever its tokens cut them."""

from collections.abc import Sequence
from typing import Any

_MOST_TOKENS_A_LETTER = 4  # a tokenizer of bytes needs up to four tokens for one
_MORE = 8  # tokens without a text, and what a cut at the window's beginning spoils


class StopTexts:
    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self._window = max(map(len, texts)) * _MOST_TOKENS_A_LETTER + _MORE

    def reached(self, tokens: Sequence[int]) -> bool:
        """Tell whether the last token completed one of the texts."""
        end = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=True)
        return any(text in end for text in self._texts)
