"""Converts a document of several turns to blocks. A block is a span of tokens within one sequence and one turn; either
all of them are labels, or none."""

from itertools import pairwise
from typing import Any

import numpy as np

from truestep.rollouts.episodes import TurnFacts, facts_of
from truestep.rollouts.kept.reader import CUT, Reader
from truestep.types import Rollout

MOST_BLOCKS = 512
_SHARE_OF_PAST = 8  # a later sequence begins with the past; only the last `longest` / 8 characters of it are kept


def blocks_of(document: Rollout, reader: Reader) -> list[dict[str, Any]]:
    """Return the blocks as rows. All texts together have at most twice the reader's length; longer texts are
    cut off."""
    blocks: list[dict[str, Any]] = []
    facts, room, seen = _facts(document), 2 * reader.longest, -1
    for start, end, turn, sequence in _spans(document)[:MOST_BLOCKS]:
        label = bool(document.loss_mask[start])
        past = sequence > 0 and turn is None and not label
        text = _text(reader, document.input_ids[start:end], min(room, reader.longest), past)
        room -= len(text)
        block: dict[str, Any] = {
            "sequence": sequence,
            "turn": turn,
            "label": label,
            "tokens": end - start,
            "text": text,
        }
        if turn is not None and turn != seen:  # the first block of a turn
            seen = turn
            block |= {"role": document.turns[turn].role, "reward": document.turns[turn].reward}
            block |= _known(facts.get(turn))
        blocks.append(block)
    return blocks


def _spans(document: Rollout) -> list[tuple[int, int, int | None, int]]:
    """List start, end, index of the turn and index of the sequence of each block."""
    mask, starts = document.loss_mask, document.starts or (0,)
    changes = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
    ends = [place for turn in document.turns for place in (turn.start, turn.end)]
    bounds = sorted({0, document.num_tokens, *starts, *changes, *ends})
    spans: list[tuple[int, int, int | None, int]] = []
    turn = sequence = 0
    for start, end in pairwise(bounds):
        while turn < len(document.turns) and document.turns[turn].end <= start:
            turn += 1
        while sequence + 1 < len(starts) and starts[sequence + 1] <= start:
            sequence += 1
        inside = turn < len(document.turns) and document.turns[turn].start <= start
        spans.append((start, end, turn if inside else None, sequence))
    return spans


def _facts(document: Rollout) -> dict[int, TurnFacts]:
    """Return the metadata's facts about the policy's turns, by the turn's index."""
    found = facts_of(document.metadata).turns
    own = [index for index, turn in enumerate(document.turns) if document.loss_mask[turn.start : turn.end].any()]
    return dict(zip(own, found, strict=True)) if len(own) == len(found) else {}


def _known(facts: TurnFacts | None) -> dict[str, Any]:
    if facts is None:
        return {}
    tools = [{"name": name, "calls": use.calls, "seconds": use.seconds} for name, use in facts.tools.items()]
    return {
        "drawing_seconds": facts.drawing,
        "environment_seconds": facts.environment,
        "malformed": facts.malformed,
        "tools": tools,
    }


def _text(reader: Reader, ids: np.ndarray, most: int, past: bool) -> str:
    """Return the text of a block with its special tokens, in at most `most` characters. For the past, return the end of
    the text."""
    if most < 1:
        return CUT
    if past:
        return reader.end_of_text(ids, min(most, max(1, reader.longest // _SHARE_OF_PAST)))
    return reader.text(ids, False, most)
