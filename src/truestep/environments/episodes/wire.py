"""The bodies of frames between the run and the process that forks episodes: a kind, an episode's number, and the rest.

The forking process itself writes the episode's number before an answer, and never reads the rest. So an episode cannot
answer for another one.
"""

from truestep.environments import frames

# Kinds of frames from the run.
BEGIN, CALL, CLOSE = b"b", b"c", b"x"
# Kinds of frames from the forking process: the environment is imported, an episode's process is forked, its answer, its
# end.
IMPORTED, FORKED, ANSWER, GONE = b"i", b"f", b"a", b"g"

LARGEST_ANSWER = 2**24  # bytes of an episode's answer
_NUMBER = 8
_TAG = 1 + _NUMBER
LARGEST_BODY = LARGEST_ANSWER + _TAG


def tagged(kind: bytes, episode: int, rest: bytes = b"") -> bytes:
    """Return a frame."""
    return frames.framed(kind + episode.to_bytes(_NUMBER, "big") + rest)


def untagged(body: bytes) -> tuple[bytes, int, bytes]:
    """Return the kind, the episode's number and the rest of a frame's body."""
    if len(body) < _TAG:
        raise frames.FrameError("a frame without a kind")
    return body[:1], int.from_bytes(body[1:_TAG], "big"), body[_TAG:]
