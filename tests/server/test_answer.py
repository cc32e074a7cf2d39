"""No answer becomes a document unless everything in it holds. Each case is a good answer with one thing wrong."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest

from truestep.generate.errors import BadAnswerError
from truestep.generate.generator import Completion, DrawOptions, Request
from truestep.generate.servers import vllm
from truestep.generate.servers.check_answer import check_choices

ASKED = Request((5, 6), DrawOptions(temperature=1.0, max_new_tokens=3, stop_ids=frozenset({0, 1})))
GOOD: dict[str, Any] = {
    "choices": [
        {
            "index": 1,
            "token_ids": [7, 8, 9],
            "logprobs": {"token_logprobs": [-0.5, -1.0, 0.0]},
            "finish_reason": "length",
            "prompt_token_ids": [5, 6],
        },
        {
            "index": 0,
            "token_ids": [7, 0],
            "logprobs": {"token_logprobs": [-0.5, -2]},
            "finish_reason": "stop",
            "prompt_token_ids": None,
        },
    ]
}


def read_choices(answer: Any, asked: Request, versions: dict[int, list[int]] | int) -> list[Completion]:
    return check_choices(vllm.read_choices(answer, asked, 2), asked, 2, 10, versions)


def test_a_good_answer_is_read_in_the_order_of_its_indices() -> None:
    first, second = read_choices(GOOD, ASKED, 32)
    assert (first.token_ids, first.logprobs, first.versions, first.stopped) == ([7, 0], [-0.5, -2.0], [32, 32], True)
    assert (second.token_ids, second.stopped, second.aborted) == ([7, 8, 9], False, False)


def test_each_token_keeps_its_version() -> None:
    first, second = read_choices(GOOD, ASKED, {0: [16, 32], 1: [16, 16, 32]})
    assert (first.versions, second.versions) == ([16, 32], [16, 16, 32])
    with pytest.raises(BadAnswerError, match="2 tokens, of which 1 came with a version"):
        read_choices(GOOD, ASKED, {0: [16], 1: [16, 16, 32]})


def test_an_aborted_completion_is_to_be_made_again() -> None:
    answer = copy.deepcopy(GOOD)
    answer["choices"][0] |= {"finish_reason": "abort", "token_ids": [7]}
    first, second = read_choices(answer, ASKED, 0)
    assert (first.aborted, second.aborted, second.token_ids) == (False, True, [])


def set_first(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["choices"][0].update(fields)


def set_second(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answer: answer["choices"][1].update(fields)


def logprobs(*values: Any) -> dict[str, Any]:
    return {"token_logprobs": list(values)}


CASES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda answer: answer.clear(), "no list of choices"),
    (lambda answer: answer.update(choices="two"), "no list of choices"),
    (lambda answer: answer.update(choices=[None, None]), "no list of choices"),
    (lambda answer: answer["choices"].pop(), r"asked for 2 completions, got those of index \[1\]"),
    (set_first(index=0), r"got those of index \[0, 0\]"),
    (set_first(index=2), r"got those of index \[0, 2\]"),
    (set_first(index="1"), "a completion's index is '1'"),
    (set_first(index=True), "a completion's index is True"),
    (set_first(prompt_token_ids=[5, 7]), "of another prompt"),
    (set_first(token_ids=None), "without token_ids"),
    (set_first(token_ids=[]), "without token_ids"),
    (set_first(token_ids=[7, 8, 10]), "token id 10 is not in the vocabulary of 10"),
    (set_first(token_ids=[7, 8, -1]), "token id -1"),
    (set_first(token_ids=[7, 8, 9.0]), "token id 9.0"),
    (set_first(token_ids=[7, 8, True]), "token id True"),
    (set_first(token_ids=[7, 0, 9]), "goes on after a stop token"),
    (set_first(token_ids=[7, 8]), "length after 2 tokens where 3 were asked for"),
    (set_first(token_ids=[7, 8, 9, 9]), "length after 4 tokens"),
    (set_first(finish_reason="stop"), "the last token, 9, is not a stop token"),
    (set_first(finish_reason=None), "None, neither stop nor length"),
    (set_first(finish_reason="content_filter"), "neither stop nor length"),
    (set_second(token_ids=[0, 0]), "goes on after a stop token"),
    (set_second(token_ids=[7, 8, 9, 0]), "4 tokens where 3 were asked for"),
    (set_first(logprobs=None), "3 tokens and no log-probs"),
    (set_first(logprobs=logprobs(-1.0, -1.0)), "3 tokens and 2 log-probs"),
    (set_first(logprobs=logprobs(-1.0, -1.0, None)), "a log-prob is None"),
    (set_first(logprobs=logprobs(-1.0, -1.0, math.nan)), "a log-prob is nan"),
    (set_first(logprobs=logprobs(-1.0, -1.0, -math.inf)), "a log-prob is -inf"),
    (set_first(logprobs=logprobs(-1.0, -1.0, 0.1)), "a log-prob is 0.1"),
    (set_first(logprobs=logprobs(-1.0, -1.0, "-1")), "a log-prob is '-1'"),
]


@pytest.mark.parametrize(("spoil", "reason"), CASES)
def test_one_thing_wrong_is_enough(spoil: Callable[[dict[str, Any]], Any], reason: str) -> None:
    answer = copy.deepcopy(GOOD)
    spoil(answer)
    with pytest.raises(BadAnswerError, match=reason):
        read_choices(answer, ASKED, 0)


@pytest.mark.parametrize("answer", [None, [], "text", 3])
def test_what_is_no_object_is_no_answer(answer: Any) -> None:
    with pytest.raises(BadAnswerError):
        read_choices(answer, ASKED, 0)
