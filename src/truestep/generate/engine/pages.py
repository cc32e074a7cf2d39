"""The pages of the KV cache: which are free, which are in use, and which hold tokens that later prompts may begin with.

A full page is registered under a digest of all tokens up to its end. When its last user gives it back, it keeps its
tokens until the page is needed. The page that was given back first is reused first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile


def digests_of(tokens: Sequence[int], page_size: int, before: bytes = b"") -> list[bytes]:
    """Return the digest of each full page of `tokens`. `before`: the digest of the page before them."""
    digests: list[bytes] = []
    for end in range(page_size, len(tokens) + 1, page_size):
        page = array("q", tokens[end - page_size : end])
        before = blake2b(before + page.tobytes(), digest_size=16).digest()
        digests.append(before)
    return digests


class PagePool:
    def __init__(self, pages: int):
        self.size = pages
        self._free = list(range(pages - 1, -1, -1))
        self._references = [0] * pages
        self._kept: OrderedDict[int, None] = OrderedDict()  # registered pages without references, the oldest first
        self._digests: dict[int, bytes] = {}  # digests of registered pages
        self._registered: dict[bytes, int] = {}  # the page of each digest

    @property
    def available(self) -> int:
        """The number of pages that can be taken."""
        return len(self._free) + len(self._kept)

    def take(self) -> int:
        """Take a page. Its former tokens can no longer be found."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._registered[self._digests.pop(page)]
        self._references[page] = 1
        return page

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._kept.pop(page, None)
            self._references[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a reference to each page. The pages are in the order of their tokens; the last one will be reused
        first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._digests:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def register(self, page: int, digest: bytes) -> None:
        """Let `find` return a page in use that is full. If another page with the same tokens is registered, that one
        stays."""
        if page not in self._digests and self._registered.setdefault(digest, page) == page:
            self._digests[page] = digest

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the pages registered under the first digests, up to the first that is not."""
        found = map(self._registered.get, digests)
        return [page for page in takewhile(lambda page: page is not None, found) if page is not None]
