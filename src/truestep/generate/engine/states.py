"""The slots for states: what recurrent layers store of a sequence, besides its pages.

A running completion has a slot, and a prompt has one from its first chunk on. Some of the other slots keep the state at
the end of a prompt. A later prompt that begins with exactly the tokens of that prompt, such as the next turn of a
conversation, starts from this state if the cache still has the pages of these tokens. The kept state that has not been
used for the longest time is dropped first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from truestep.generate.engine.pages import digests_of


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state after some tokens."""

    digests: tuple[bytes, ...]  # digests of the full pages of these tokens, and of `rest` if not empty
    rest: tuple[int, ...]  # the tokens after the last full page
    slot: int

    @staticmethod
    def of(tokens: tuple[int, ...], digests: Sequence[bytes], page_size: int, slot: int) -> "KeptState":
        """`digests` are those of the full pages of `tokens`."""
        rest = tokens[len(digests) * page_size :]
        last = digests_of(rest, len(rest), _last(digests)) if rest else []
        return KeptState((*digests, *last), rest, slot)

    @property
    def before(self) -> bytes:
        """The digest of the last full page."""
        return _last(self.digests[:-1] if self.rest else self.digests)


class StateSlots:
    def __init__(self, slots: int):
        """`slots`: the number of slots besides slot 0, which no sequence uses. 0: the model has no states, and every
        sequence has slot 0."""
        self.size = slots
        self._free = list(range(slots, 0, -1))
        # By the digest of all tokens, the least recently used first.
        self._kept: OrderedDict[bytes, KeptState] = OrderedDict()
        self._behind: dict[bytes, list[KeptState]] = {}  # by the digest of the last full page

    def take(self) -> int | None:
        """Take a slot. If none is free, drop the oldest kept state. None: there is no slot."""
        if not self.size:
            return 0
        if not self._free and self._kept:
            self.drop(next(iter(self._kept.values())))
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        if slot:
            self._free.append(slot)

    def keep(self, kept: KeptState) -> None:
        """Keep a state that `find` may return, until its slot is needed."""
        if kept.digests[-1] in self._kept:
            self._kept.move_to_end(kept.digests[-1])
            self._free.append(kept.slot)
        else:
            self._kept[kept.digests[-1]] = kept
            self._behind.setdefault(kept.before, []).append(kept)

    def drop(self, kept: KeptState) -> None:
        del self._kept[kept.digests[-1]]
        others = self._behind[kept.before]
        others.remove(kept)
        if not others:
            del self._behind[kept.before]
        self._free.append(kept.slot)

    def find(self, tokens: tuple[int, ...], digests: Sequence[bytes], page_size: int) -> tuple[KeptState, int] | None:
        """Return the kept state after the longest prefix of `tokens`, but not after all of them, and the length of that
        prefix. `digests`: of the full pages of `tokens`."""
        for full in range(len(digests), -1, -1):
            start = full * page_size
            ends = [
                (start + len(kept.rest), kept)
                for kept in self._behind.get(_last(digests[:full]), ())
                if start + len(kept.rest) < len(tokens) and tokens[start : start + len(kept.rest)] == kept.rest
            ]
            if ends:
                end, kept = max(ends, key=lambda found: found[0])
                self._kept.move_to_end(kept.digests[-1])
                return kept, end
        return None


def _last(digests: Sequence[bytes]) -> bytes:
    return digests[-1] if digests else b""
