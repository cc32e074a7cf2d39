"""Texts that end a completion, and how requests are divided over ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from completing import Asked, How, decode, decode_plainly
from small_runs import tokenised_model
from truestep.generate.engine.stops import StopTexts
from truestep.model.loading.load import load_policy
from truestep.ranks.group import divide


def test_a_text_ends_a_completion_across_tokens(tmp_path: Path) -> None:
    policy = load_policy(tokenised_model(tmp_path / "model", "llama"))
    asked = [Asked((5, 9, 14), (1, 2))]
    how = How(1.0, 1.0, 20, None, frozenset())
    whole = decode(policy, asked, how)[0].token_ids
    text = policy.tokenizer.decode(whole[5:7])
    cut = text[1:]  # begins within one token and ends within the next
    assert " " in cut
    ends = next(at for at in range(1, 21) if cut in policy.tokenizer.decode(whole[:at], skip_special_tokens=True))
    for one in (decode, decode_plainly):
        stopped = one(policy, asked, dataclasses.replace(how, stop=(cut, "never seen")))[0]
        assert stopped.token_ids == whole[:ends], "the ids as they were drawn"
        assert stopped.stopped
        assert len(stopped.logprobs) == ends


class Bytes:
    """A tokenizer each of whose tokens is a byte."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["end", "größe", "終わり", "🙂!"])
def test_a_text_is_found_where_letters_are_cut_into_bytes(text: str) -> None:
    ids = list(("äöü" * 40 + text).encode())
    for stops in (StopTexts(Bytes(), [text]), StopTexts(Bytes(), [text, "nothing of the kind"])):
        found = [at for at in range(1, len(ids) + 1) if stops.reached(ids[:at])]
        assert found == [len(ids)]


def test_requests_are_divided_by_cost_and_kinds_stay_together() -> None:
    costs = [5.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    shares = divide(costs, 2, ["a", "b", "b", "b", "c", "d", "d", "d"])
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert [sum(costs[index] for index in share) for share in shares] == [8.0, 8.0]
    assert any({1, 2, 3} <= set(share) for share in shares)
    # A kind that is more than a fair share is divided, and ranks may have nothing to do.
    assert sorted(map(len, divide([1.0] * 8, 4, ["one"] * 8))) == [2, 2, 2, 2]
    assert sorted(map(len, divide([1.0], 3))) == [0, 0, 1]
    assert divide([], 2) == [[], []]
