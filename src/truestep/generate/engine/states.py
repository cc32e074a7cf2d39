"""The slots of states: what recurrent layers keep of a sequence, beside its pages.

A running completion has a slot, and a prompt has one from its first chunk on. Of slots that are left, some keep the
state behind a prompt. A later prompt that begins with exactly these tokens, such as the next turn of a conversation,
starts from there if the cache still has the pages of these tokens. What was kept or found first is dropped first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from truestep.generate.engine.pages import digests_of


@dataclass(frozen=True, eq=False)
class KeptState:
    """The state behind some tokens."""

    digests: tuple[bytes, ...]  # of the full pages of these tokens, and of `rest` if there is any
    rest: tuple[int, ...]  # the tokens behind the last full page
    slot: int

    @staticmethod
    def of(tokens: tuple[int, ...], digests: Sequence[bytes], page_size: int, slot: int) -> "KeptState":
        """`digests`: of the full pages of `tokens`."""
        rest = tokens[len(digests) * page_size :]
        last = digests_of(rest, len(rest), _last(digests)) if rest else []
        return KeptState((*digests, *last), rest, slot)

    @property
    def before(self) -> bytes:
        """The digest of the last full page."""
        return _last(self.digests[:-1] if self.rest else self.digests)


class StateSlots:
    def __init__(self, slots: int):
        """`slots`: how many there are beside slot 0, which no sequence uses. 0: the model keeps no states, and every
        sequence has slot 0."""
        self.size = slots
        self._free = list(range(slots, 0, -1))
        self._kept: OrderedDict[bytes, KeptState] = OrderedDict()  # by the digest of all tokens, the oldest first
        self._behind: dict[bytes, list[KeptState]] = {}  # by the digest of the last full page

    def take(self) -> int | None:
        """Take a slot. If none is free, drop the state that was kept first. None: there is none."""
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
        """Return the state behind most of the first tokens, but not behind all, and their number. `digests`: of the
        full pages of `tokens`."""
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
