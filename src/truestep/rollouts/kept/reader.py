"""Converts tokens to text of limited length: many tokens at once, or each token alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

# Converts token ids to text. True omits special tokens, as for rewards.
Decode = Callable[[Sequence[int], bool], str]

CUT = "\N{HORIZONTAL ELLIPSIS}"
_MOST_BYTES = 4  # per character in UTF-8
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from a token that has only some bytes of a character


@dataclass
class Reader:
    """A decoder of tokens to text of limited length."""

    decode: Decode
    longest: int  # characters
    _alone: dict[int, str] = field(default_factory=dict)  # cache of `_piece`

    def text(self, ids: np.ndarray, plain: bool, longest: int | None = None) -> str:
        longest = self.longest if longest is None else longest
        # A token may be a single byte, a quarter of a character.
        return cut(self.decode(ids[: _MOST_BYTES * longest].tolist(), plain), longest)

    def end_of_text(self, ids: np.ndarray, longest: int) -> str:
        """Return the last characters of a text, special tokens included."""
        text = self.decode(ids[-_MOST_BYTES * longest :].tolist(), False)
        safe = text.encode("utf-8", errors="replace").decode("utf-8")
        is_whole = len(safe) <= longest and len(ids) <= _MOST_BYTES * longest
        return safe if is_whole else CUT + safe[max(0, len(safe) - longest + 1) :]

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text of each token. The first of several tokens that form a character gets the character."""
        pieces: list[str] = []
        listed, room = ids.tolist(), self.longest
        while len(pieces) < len(listed) and room > 0:
            start = len(pieces)
            text, count = self._piece(listed[start]), 1
            while _UNFINISHED in text and count < min(_MOST_BYTES, len(listed) - start):
                count += 1
                text = self.decode(listed[start : start + count], False)
            if _UNFINISHED in text:
                text, count = self._piece(listed[start]), 1
            pieces += [text, *[""] * (count - 1)]
            room -= len(text)
        return pieces

    def _piece(self, token: int) -> str:
        """Return a token's text as it is in the middle of a text. At the start of a text, tokenizers drop a leading
        space."""
        if token not in self._alone:
            alone = self.decode([token], False)
            self._alone[token] = self.decode([token, token], False)[len(alone) :] if _UNFINISHED not in alone else alone
        return self._alone[token]


def cut(text: str, longest: int) -> str:
    # UTF-8 files cannot hold half of a surrogate pair.
    safe = text[: longest + 1].encode("utf-8", errors="replace").decode("utf-8")
    return safe if len(safe) <= longest else safe[: longest - 1] + CUT
