"""What a program writes by requests: each drawn token is a label once, behind the tokens that it was drawn behind.

The oracle is what the generator was asked: each request's prompt must read as the template renders the program's own
messages, and each completion must stand in one sequence behind that prompt.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from environments.episodes.test_conversation import MODELS, TOOLS, decoded, encoded, tokenizer_of
from truestep.generate.endpoint import requests
from truestep.generate.endpoint.document import Choice, Document
from truestep.generate.endpoint.errors import RequestError
from truestep.generate.generator import Completion, DrawOptions, OnTokens, Request
from truestep.generate.play import EpisodeLimits

FAMILIES = ("qwen3 without reasoning", "qwen_plain", "llama3", "mistral", "gemma")
WORDS = ["and", "land", "lala", "a{}", "{b}", "stand"]


@dataclass
class Scripted:
    """A generator that writes what a model would, with a log-prob of its own for every token."""

    name: str
    generator: random.Random
    drawn: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)
    num_tokens: int = 0
    with_tools: bool = False

    async def __call__(self, request: Request, on_tokens: OnTokens | None = None) -> Completion:
        tokenizer, model = tokenizer_of(self.name), MODELS[self.name]
        await asyncio.sleep(self.generator.random() * 1e-4)
        text = " ".join(self.generator.choices(WORDS, k=self.generator.randint(1, 4)))
        written = model.answer.format(thought="", text=text)
        if self.with_tools and model.call is not None and self.generator.random() < 0.5:
            calls = [{"name": "add", "arguments": {"a": self.generator.randint(0, 9), "b": 2}}]
            if self.name == "mistral":
                calls[0]["id"] = f"{self.num_tokens:09d}"
            form = model.text_and_calls if self.generator.random() < 0.3 else "{calls}"
            written = form.format(text=text, calls=model.call(calls))
        ids = encoded(tokenizer, written + model.end)
        logprobs = [-(self.num_tokens + number + 1) / 2**12 for number in range(len(ids))]
        self.num_tokens += len(ids)
        completion = Completion(ids, logprobs, True, versions=[7] * len(ids))
        self.drawn.append((request.token_ids, completion))
        return completion


def failed(error: Exception) -> None:
    raise AssertionError(error)


def document(name: str, generate: Any, turns: int = 1000, tokens: int = 20_000, **options: Any) -> Document:
    ends = frozenset(encoded(tokenizer_of(name), MODELS[name].end))
    draw = DrawOptions(1.0, 200, ends)
    return Document(tokenizer_of(name), generate, draw, EpisodeLimits(turns, tokens), failed, seed=(1, 2), **options)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def echoed(choice: Choice, generator: random.Random) -> dict[str, Any]:
    """The policy's message as clients send it back: with nulls, without reasoning, with content as parts, stripped."""
    message: dict[str, Any] = json.loads(json.dumps(choice.shown))
    message.pop("reasoning_content", None)
    if generator.random() < 0.3 and message["content"]:
        message["content"] = [{"type": "text", "text": message["content"].strip()}]
    if generator.random() < 0.5:
        message |= {"annotations": None, "audio": None, "function_call": None}
    for call in message.get("tool_calls") or ():
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    return message


async def converse(name: str, seed: int) -> tuple[Document, Scripted, list[tuple[Any, ...]]]:
    """Continue conversations, go back in them, begin others, and do several of that at once."""
    generator = random.Random(seed)
    scripted = Scripted(name, generator)
    written = document(name, scripted)
    tools = TOOLS if MODELS[name].call is not None and generator.random() < 0.7 else []
    scripted.with_tools = bool(tools)
    histories: list[list[dict[str, Any]]] = []
    asked: list[tuple[Any, ...]] = []  # messages and tools of each request, with what came back

    async def turn(history: list[dict[str, Any]]) -> None:
        count = generator.choice([1, 1, 1, 2])
        body = {"model": "m", "messages": history, "n": count, **({"tools": tools} if tools else {})}
        choices = await written.complete(requests.chat(json.loads(json.dumps(body))))
        for choice in choices:
            asked.append((history, tools, choice))
            answer = echoed(choice, generator)
            calls = answer.get("tool_calls")
            said = [{"role": "user", "content": generator.choice(WORDS)}]
            if calls:
                said = [{"role": "tool", "tool_call_id": call["id"], "name": "add", "content": "3"} for call in calls]
            histories.append([*history, answer, *said])

    for _ in range(generator.randint(2, 5)):
        begins = [{"role": "user", "content": generator.choice(WORDS)}]
        chosen = [begins if generator.random() < 0.3 or not histories else generator.choice(histories[-3:])]
        if histories and generator.random() < 0.5:
            chosen.append(generator.choice(histories))
        await asyncio.gather(*map(turn, chosen))
    return written, scripted, asked


@pytest.mark.parametrize("name", FAMILIES)
def test_every_drawn_token_is_a_label_once_behind_its_prompt(name: str) -> None:
    branches = 0
    for seed in range(25):
        written, scripted, asked = run(converse(name, seed))
        labels = [
            (token, logprob)
            for sequence in written.sequences
            for token, logprob, own in zip(sequence.input_ids, sequence.logprobs, sequence.loss_mask, strict=True)
            if own
        ]
        drawn = [pair for _, each in scripted.drawn for pair in zip(each.token_ids, each.logprobs, strict=True)]
        assert sorted(labels, key=lambda pair: pair[1]) == sorted(drawn, key=lambda pair: pair[1])
        for prompt, completion in scripted.drawn:
            within = [one for one in written.sequences if stands_in(one, prompt, completion)]
            assert len(within) == 1, "in one sequence, behind what it was drawn behind"
        for sequence in written.sequences:
            assert len(sequence.versions) == len(sequence.input_ids)
        branches += len(written.sequences) > 1
        for history, tools, choice in asked:
            cleaned = requests.chat({"messages": history}).said
            expected = tokenizer_of(name).apply_chat_template(
                cleaned, tools=tools or None, add_generation_prompt=True, tokenize=False
            )
            assert decoded(tokenizer_of(name), choice.prompt) == expected
    assert branches > 10


def stands_in(sequence: Any, prompt: tuple[int, ...], completion: Completion) -> bool:
    begin, end = len(prompt), len(prompt) + len(completion.token_ids)
    whole = [*prompt, *completion.token_ids]
    return (
        sequence.input_ids[:end] == whole
        and all(sequence.loss_mask[begin:end])
        and sequence.logprobs[begin:end] == completion.logprobs
    )


def test_a_conversation_is_one_sequence_and_a_second_continuation_branches() -> None:
    name = "qwen3 without reasoning"

    async def work() -> None:
        scripted = Scripted(name, random.Random(1))
        written = document(name, scripted)
        history: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        for _ in range(4):
            (choice,) = await written.complete(requests.chat({"messages": history}))
            before, history = history, [*history, choice.shown, {"role": "user", "content": "and"}]  # type: ignore[list-item]
        assert len(written.sequences) == 1 and sum(written.sequences[0].loss_mask) == scripted.num_tokens
        await written.complete(requests.chat({"messages": before}))
        first, second = written.sequences
        shared = len(scripted.drawn[-1][0])
        assert second.input_ids[:shared] == first.input_ids[:shared]
        assert not any(second.loss_mask[:shared]) and all(second.loss_mask[shared:])

    run(work())


def test_text_and_token_ids_go_on_by_their_tokens() -> None:
    name = "gemma"

    async def work() -> None:
        scripted = Scripted(name, random.Random(1))
        written = document(name, scripted)
        (first,) = await written.complete(requests.text({"prompt": "a land"}))
        assert isinstance(first.shown, str)
        (second,) = await written.complete(requests.text({"prompt": "a land" + first.shown + " stand"}))
        before = [*first.prompt, *first.completion.token_ids]
        assert list(second.prompt[: len(before)]) == before
        assert decoded(tokenizer_of(name), second.prompt[len(before) :]) == " stand"
        (third,) = await written.complete(
            requests.token_ids({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 3}})
        )
        await written.complete(requests.token_ids({"token_ids": [5, 6, 7, *third.completion.token_ids, 9]}))
        assert [sum(one.loss_mask) for one in written.sequences] == [
            len(first.completion.token_ids) + len(second.completion.token_ids),
            sum(len(each.token_ids) for _, each in scripted.drawn[2:]),
        ]

    run(work())


def test_limits_cut_the_document_and_say_so() -> None:
    name = "gemma"

    async def work() -> None:
        written = document(name, Scripted(name, random.Random(1)), turns=2)
        ask = requests.chat({"messages": [{"role": "user", "content": "a"}]})
        for _ in range(2):
            await written.complete(ask)
        with pytest.raises(RequestError, match=r"sampler\.max_turns: 2 turns") as refused:
            await written.complete(ask)
        assert refused.value.code == "max_turns" and written.cut_by == "max_turns" and len(written.completions) == 2
        for body in ({"prompt": "lala " * 10}, {"prompt": "lala " * 10_000}, {"prompt": list(range(1, 40))}):
            small = document(name, Scripted(name, random.Random(1)), tokens=30)
            with pytest.raises(RequestError, match=r"sampler\.max_episode_tokens: 30 tokens") as refused:
                await small.complete(requests.text(body))
            assert refused.value.code == "context_length_exceeded" and small.cut_by == "max_episode_tokens"

    run(work())


def test_a_request_that_is_cancelled_leaves_nothing() -> None:
    name = "gemma"

    async def work() -> None:
        scripted = Scripted(name, random.Random(1))

        async def hangs(request: Request, on_tokens: OnTokens | None = None) -> Completion:
            await asyncio.sleep(60)
            raise AssertionError

        written = document(name, scripted)
        history: list[Any] = [{"role": "user", "content": "a"}]
        (choice,) = await written.complete(requests.chat({"messages": history}))
        history += [choice.shown, {"role": "user", "content": "and"}]
        written._generate = hangs
        for _ in range(3):
            task = asyncio.create_task(written.complete(requests.chat({"messages": history})))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        written._generate = scripted
        await written.complete(requests.chat({"messages": history}))
        assert len(written.sequences) == 1, "the turn was still to be continued"
        hanging = asyncio.create_task(written.complete(requests.chat({"messages": history})))
        written._generate = hangs
        await asyncio.sleep(0.01)
        written.close()
        assert hanging.cancelled() or hanging.done() or hanging.cancelling()
        with pytest.raises(RequestError, match="has ended"):
            await written.complete(requests.chat({"messages": history}))

    run(work())
