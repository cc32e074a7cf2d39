"""Mutations of bytes and of JSON values, from a seed alone: the same ones on every machine, in every order of tests."""

from __future__ import annotations

import json
import random
import resource
from typing import Any

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 10**400, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, 3.5e38),
    *(float("nan"), float("inf"), -float("inf"), "", " ", "a", "0", "1", "nan", "\x00", "\x1b[2J", "\ud800", "é" * 50),
    *("x" * 5000, [], {}, [[]], [{}], [None], [0], [1.5], ["a"], {"": None}, {"a": {"b": [1]}}, "redis://:secret@h"),
)
PIECES = (
    *(b"", b"\x00", b"\xff", b"\n", b"\r", b'"', b"\\", b"{", b"}", b"[", b"]", b":", b",", b"-", b"9" * 30, b"e999"),
    *(b"null", b"\\ud800", b"\x1b[31m", b"[" * 300, b'{"a":' * 300, b"\xed\xa0\x80", b"true", b" " * 40, b"1e-400"),
    *(b"\xef\xbb\xbf", b"NaN"),
)


def mutated_bytes(random: random.Random, content: bytes) -> bytes:
    """Flip, cut, repeat, remove or insert a few times."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        place = random.randrange(len(data) + 1)
        kind = random.randrange(6)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + random.choice((1, 1, 2, 5, 20))]
        elif kind == 3:
            data[place:place] = data[place : place + random.choice((1, 3, 10))] * random.choice((1, 2, 30))
        elif kind == 4:
            data[place : place + random.choice((0, 1, 3))] = random.choice(PIECES)
        elif data:
            other = random.randrange(len(data))
            place %= len(data)
            data[place], data[other] = data[other], data[place]
    return bytes(data)


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All the places in a tree of lists and objects."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places_in(item, (*path, key))
    return found


def mutated_value(random: random.Random, value: Any) -> Any:
    """Replace, remove, rename or repeat a few places of a tree; the tree itself stays as it is."""
    value = json.loads(json.dumps(value))
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        path = random.choice(places_in(value))
        if not path:
            if random.random() < 0.1:
                value = random.choice(ODD_VALUES)
            continue
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        kind = random.randrange(5)
        if kind <= 2:
            odd = random.choice(ODD_VALUES)
            inside[path[-1]] = json.loads(json.dumps(odd)) if isinstance(odd, list | dict) else odd
        elif kind == 3:
            del inside[path[-1]]
        elif isinstance(inside, list):
            inside[path[-1] : path[-1] + 1] = [inside[path[-1]]] * random.choice((0, 2, 3))
        else:
            inside[random.choice(("", "a", "id", "step", "\x1b", path[-1] + "x"))] = inside.pop(path[-1])
    return value


def memory() -> float:
    """Megabytes that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def check_text(message: str, naming: str = "") -> None:
    """A message for people: it says something, names the file, and has no escapes and no megabytes in it."""
    assert message and message.isprintable() and len(message) < 20_000, message
    assert naming in message
