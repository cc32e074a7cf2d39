"""Stop texts. One may begin and end in the middle of a token."""

from collections.abc import Sequence
from typing import Any

_MOST_TOKENS_A_LETTER = 4  # a byte-level tokenizer needs up to four tokens for a character
_MORE = 8  # extra tokens of the window: special tokens, and a character that the window's beginning cuts


class StopTexts:
    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        self._tokenizer, self._texts = tokenizer, tuple(texts)
        self._window = max(map(len, texts)) * _MOST_TOKENS_A_LETTER + _MORE

    def reached(self, tokens: Sequence[int]) -> bool:
        """Tell whether the tokens so far contain a stop text near their end. Called after each new token."""
        end = self._tokenizer.decode(list(tokens[-self._window :]), skip_special_tokens=True)
        return any(text in end for text in self._texts)
