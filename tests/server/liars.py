"""Servers whose probes are right, and whose completions are not draws of the weights with the log-probs that they name.

`LIES` and `HONEST` are the catalogue, a line each; `Liar` speaks as `FakeSglang` does, around a real tiny model.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from server.sglang_server import FakeSglang

Pair = tuple[list[int], list[float]]  # the tokens of a completion, and their log-probs
Rows = torch.Tensor  # [n, V] log-probs
Told = tuple[tuple[int, ...], tuple[float, ...]]  # a text, and the log-probs of its completion


def told(text: Sequence[int], logprobs: Sequence[float]) -> Told:
    return tuple(text), tuple(round(min(value, 0.0), 3) for value in logprobs)


def _same(rows: Rows, bare: Rows) -> Rows:
    return rows


@dataclass(frozen=True)
class Way:
    """How a server makes completions. `rows` are the log-probs at the temperature asked for, `bare` those at 1."""

    name: str
    draw: Callable[[Rows, Rows], Rows] = _same  # the distribution that is drawn from
    report: Callable[[Rows, Rows], Rows] | None = None  # and the one that is named; None: that which is drawn from
    spoil: Callable[[Liar, list[int], list[Pair]], list[Pair]] = lambda server, prompt, pairs: pairs
    prompt: Callable[[Liar, list[int]], list[int]] = lambda server, prompt: prompt
    weights: str = "current"  # or those of the version before, of the start, ...


@dataclass
class Plan:
    """When a server lies."""

    way: Way
    after: int = 0  # completions
    only_longer_than: int = 0  # max_new_tokens: an evaluation may ask for more than training


class Liar(FakeSglang):
    def __init__(self, model: Path, name: str, plan: Plan, seed: int = 0):
        self.older: Any = None
        super().__init__(model, name)
        self.first, self.plan = copy.deepcopy(self._model), plan
        self.made = 0  # completions
        self.lied: list[Told] = []  # completions of a lying server
        self.counted = 0  # tokens, for `one_in_200`
        self.draws = torch.Generator().manual_seed(seed)
        self.dice = random.Random(seed)
        self.before: list[Pair] = []  # the last answer
        self.cached: dict[tuple[int, ...], Pair] = {}

    def _load(self, directory: Path) -> None:
        self.older = getattr(self, "_model", None)
        super()._load(directory)

    async def _reply(self, path: str, body: Any) -> Any:
        if path != "/generate" or body.get("top_logprobs_num") or max(body["input_ids"]) >= self._size:
            return await super()._reply(path, body)
        await asyncio.sleep(0)
        self._running += 1
        try:
            while self._paused:
                await asyncio.sleep(0.001)
            return self._answers(body)
        finally:
            self._running -= 1

    @property
    def _size(self) -> int:
        return int(self._model.config.vocab_size)

    def _answers(self, body: dict[str, Any]) -> Any:
        options, prompt = body["sampling_params"], list(body["input_ids"])
        n = options.get("n", 1)
        lies = self.made >= self.plan.after and options["max_new_tokens"] > self.plan.only_longer_than
        lies = lies and options["temperature"] > 0
        way = self.plan.way if lies else Way("honest")
        pairs = self._sample(way.prompt(self, prompt), n, options, way)
        self.made += n
        honest = [(list(tokens), list(values)) for tokens, values in pairs]
        pairs = way.spoil(self, prompt, pairs)
        if lies and way not in HONEST:
            self.lied += [told([*prompt, *tokens], values) for tokens, values in pairs]
        self.before = honest
        stops = set(options["stop_token_ids"])
        answers = [
            {
                "text": "",
                "output_ids": tokens,
                "meta_info": {
                    "id": "some",
                    "finish_reason": {"type": "stop" if tokens[-1] in stops else "length"},
                    "completion_tokens": len(tokens),
                    "output_token_logprobs": [
                        [min(float(value), 0.0), token, None] for token, value in zip(tokens, values, strict=True)
                    ],
                },
            }
            for tokens, values in pairs
        ]
        return answers if n > 1 else answers[0]

    def model_of(self, weights: str) -> Any:
        if weights == "older" and self.older is not None:
            return self.older
        if weights == "first":
            return self.first
        if weights == "coarse":  # quantised to few levels
            coarse = copy.deepcopy(self._model)
            with torch.no_grad():
                for parameter in coarse.parameters():
                    step = parameter.abs().max() / 8
                    parameter.copy_((parameter / step).round() * step)
            return coarse
        if weights == "bfloat16":
            return copy.deepcopy(self._model).bfloat16()
        return self._model

    @torch.no_grad()
    def logits(self, model: Any, ids: list[list[int]]) -> torch.Tensor:
        return model(torch.tensor(ids)).logits.float()

    def _sample(self, prompt: list[int], n: int, options: dict[str, Any], way: Way) -> list[Pair]:
        model, stops, heat = self.model_of(way.weights), set(options["stop_token_ids"]), options["temperature"]
        texts, values, ended = [list(prompt) for _ in range(n)], [[] for _ in range(n)], [False] * n
        for _ in range(options["max_new_tokens"]):
            logits = self.logits(model, texts)[:, -1]
            rows, bare = (logits / (heat or 1.0)).log_softmax(-1), logits.log_softmax(-1)
            drawn = way.draw(rows, bare)
            named = drawn if way.report is None else way.report(rows, bare)
            tokens = torch.multinomial(drawn.exp(), 1, generator=self.draws)[:, 0]
            tokens = tokens if heat else rows.argmax(-1)
            for place in range(n):
                if not ended[place]:
                    values[place].append(float(named[place, tokens[place]]))
                texts[place].append(int(tokens[place]))
                ended[place] = ended[place] or int(tokens[place]) in stops
            if all(ended):
                break
        return [
            (text[len(prompt) : len(prompt) + len(scores)], scores) for text, scores in zip(texts, values, strict=True)
        ]


# ---- log-probs that are named


def each(change: Callable[[list[float]], list[float]]) -> Callable[[Liar, list[int], list[Pair]], list[Pair]]:
    return lambda server, prompt, pairs: [(tokens, change(list(values))) for tokens, values in pairs]


def value(change: Callable[[float], float]) -> Callable[[Liar, list[int], list[Pair]], list[Pair]]:
    return each(lambda values: [change(one) for one in values])


def at(place: int, what: float) -> Callable[[list[float]], list[float]]:
    def changed(values: list[float]) -> list[float]:
        values[place] = what if abs(values[place] - what) > 0.1 else what - 1.0
        return values

    return changed


def one_in_200(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    """Each 200th token has the log-prob of another."""
    for _, values in pairs:
        for place in range(len(values)):
            server.counted += 1
            if server.counted % 200 == 100:
                values[place] = values[place] - 1.3
    return pairs


def of_the_next_completion(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    """Log-probs and tokens of an answer are paired in another order."""
    given = [values for _, values in pairs[1:] + pairs[:1]]
    return [(tokens, _fitted(values, len(tokens))) for (tokens, _), values in zip(pairs, given, strict=True)]


def of_another_prompt(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    others = server.before or [([0], [-0.7])]
    given = (others * len(pairs))[: len(pairs)]
    return [(tokens, _fitted(values, len(tokens))) for (tokens, _), (_, values) in zip(pairs, given, strict=True)]


def of_the_prompt(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    rows = server.logits(server.model_of("current"), [prompt])[0].log_softmax(-1)
    values = [float(rows[place, token]) for place, token in enumerate(prompt[1:])] or [-0.1]
    return [(tokens, _fitted(values, len(tokens))) for tokens, _ in pairs]


def shuffled(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    return [(tokens, server.dice.sample(values, len(values))) for tokens, values in pairs]


def noise(size: float) -> Callable[[Liar, list[int], list[Pair]], list[Pair]]:
    return lambda server, prompt, pairs: [
        (tokens, [one + server.dice.gauss(0, size) for one in values]) for tokens, values in pairs
    ]


def one_for_all(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    longest = max(pairs, key=lambda pair: len(pair[0]))
    return [longest] * len(pairs)


def from_a_cache(server: Liar, prompt: list[int], pairs: list[Pair]) -> list[Pair]:
    """The first completion of all is the answer to every prompt, with the log-probs that it has there."""
    tokens, _ = server.cached.setdefault((), max(pairs, key=lambda pair: len(pair[0])))
    rows = (server.logits(server.model_of("current"), [[*prompt, *tokens]])[0] / 0.8).log_softmax(-1)
    values = [float(rows[len(prompt) - 1 + place, token]) for place, token in enumerate(tokens)]
    return [(tokens, values), *pairs[1:]]


def _fitted(values: list[float], length: int) -> list[float]:
    return (values * length)[:length]


def _mean(values: list[float]) -> list[float]:
    return [sum(values) / len(values)] * len(values)


def _running(values: list[float]) -> list[float]:
    return [sum(values[: place + 1]) for place in range(len(values))]


# ---- distributions


def heated(by: float) -> Callable[[Rows, Rows], Rows]:
    return lambda rows, bare: (rows / by).log_softmax(-1)


def nucleus(mass: float) -> Callable[[Rows, Rows], Rows]:
    def cut(rows: Rows, bare: Rows) -> Rows:
        ordered, order = rows.exp().sort(-1, descending=True)
        gone = ordered.cumsum(-1) - ordered >= mass
        return rows.masked_fill(torch.zeros_like(gone).scatter(-1, order, gone), -torch.inf).log_softmax(-1)

    return cut


def likeliest(count: int) -> Callable[[Rows, Rows], Rows]:
    def cut(rows: Rows, bare: Rows) -> Rows:
        return rows.masked_fill(rows < rows.topk(count).values[:, -1:], -torch.inf).log_softmax(-1)

    return cut


def at_least(part: float) -> Callable[[Rows, Rows], Rows]:
    def cut(rows: Rows, bare: Rows) -> Rows:
        return rows.masked_fill(rows.exp() < part * rows.exp().max(-1, keepdim=True).values, -torch.inf).log_softmax(-1)

    return cut


def only_the_likeliest(rows: Rows, bare: Rows) -> Rows:
    return torch.full_like(rows, -1e9).scatter(-1, rows.argmax(-1, keepdim=True), 0.0)


def mixed_with_uniform(rows: Rows, bare: Rows) -> Rows:
    return (0.9 * rows.exp() + 0.1 / rows.shape[-1]).log()


def without_the_end(rows: Rows, bare: Rows) -> Rows:
    kept = rows.clone()
    kept[:, 0] = -torch.inf
    return kept.log_softmax(-1)


def biased(rows: Rows, bare: Rows) -> Rows:
    more = rows.clone()
    more[:, 3] += 1.0
    return more.log_softmax(-1)


def policy(rows: Rows, bare: Rows) -> Rows:
    return rows


LIES = (
    Way("those of the next token", spoil=each(lambda values: values[1:] + values[:1])),
    Way("those of the token before", spoil=each(lambda values: values[-1:] + values[:-1])),
    Way("those of two tokens on", spoil=each(lambda values: values[2:] + values[:2])),
    Way("halved", spoil=value(lambda one: one / 2)),
    Way("doubled", spoil=value(lambda one: one * 2)),
    Way("3% too large", spoil=value(lambda one: one * 1.03)),
    Way("0", spoil=value(lambda one: 0.0)),
    Way("-50", spoil=value(lambda one: -50.0)),
    Way("-1", spoil=value(lambda one: -1.0)),
    Way("one token in 200 off", spoil=one_in_200),
    Way("the first token's is 0", spoil=each(at(0, 0.0))),
    Way("the first token's is -9", spoil=each(at(0, -9.0))),
    Way("the last token's is 0", spoil=each(at(-1, 0.0))),
    Way("in the reverse order", spoil=each(lambda values: values[::-1])),
    Way("in a random order", spoil=shuffled),
    Way("of another completion of the answer", spoil=of_the_next_completion),
    Way("of another prompt's answer", spoil=of_another_prompt),
    Way("of the prompt", spoil=of_the_prompt),
    Way("to base 10", spoil=value(lambda one: one / 2.302585)),
    Way("to base 2", spoil=value(lambda one: one / 0.693147)),
    Way("probabilities, less 1", spoil=value(lambda one: 2.718281828**one - 1)),
    Way("each the mean", spoil=each(_mean)),
    Way("added up", spoil=each(_running)),
    Way("at least -1", spoil=value(lambda one: max(one, -1.0))),
    Way("at most -1", spoil=value(lambda one: min(one, -1.0))),
    Way("whole numbers", spoil=value(round)),
    Way("one decimal", spoil=value(lambda one: round(one, 1))),
    Way("0.3 too high", spoil=value(lambda one: min(one + 0.3, 0.0))),
    Way("0.3 too low", spoil=value(lambda one: one - 0.3)),
    Way("0.02 too low", spoil=value(lambda one: one - 0.02)),
    Way("noise of 0.3", spoil=noise(0.3)),
    Way("noise of 0.05", spoil=noise(0.05)),
    Way("before the temperature", report=lambda rows, bare: bare),
    Way("the temperature twice", report=heated(0.8)),
    Way("of temperature 0.99 for 1", report=heated(0.99)),
    Way("of the likeliest token", report=lambda rows, bare: rows.max(-1, keepdim=True).values.expand_as(rows)),
    Way("of the 5 likeliest tokens", report=lambda rows, bare: likeliest(5)(rows, bare).clamp(min=-20)),
    Way("smoothed", report=mixed_with_uniform),
    Way("top-p 0.9 kept on", draw=nucleus(0.9)),
    Way("top-p 0.99 kept on", draw=nucleus(0.99)),
    Way("top-k 3 kept on", draw=likeliest(3)),
    Way("min-p 0.2 kept on", draw=at_least(0.2)),
    Way("drawn at another temperature, lower", draw=heated(0.7)),
    Way("drawn at another temperature, higher", draw=heated(1.5)),
    Way("no end token", draw=without_the_end),
    Way("a bias on a token", draw=biased),
    Way("a mixture with chance", draw=mixed_with_uniform),
    Way("weights stale by one version", weights="older"),
    Way("weights of the start", weights="first"),
    Way("weights of 4 bits", weights="coarse"),
    Way("the prompt cut", prompt=lambda server, prompt: prompt[-2:]),
    Way("a token more before the prompt", prompt=lambda server, prompt: [1, *prompt]),
    Way("the prompt's last token twice", prompt=lambda server, prompt: [*prompt, prompt[-1]]),
    Way("the prompt reversed", prompt=lambda server, prompt: prompt[::-1]),
    Way("one completion n times", spoil=one_for_all),
    Way("one completion for all prompts", spoil=from_a_cache),
)
# Log-probs are the policy's, and the draws are not: found within so many tokens.
DRAWS = (
    Way("greedy", draw=only_the_likeliest, report=policy),
    Way("drawn at temperature 0.5 of it", draw=heated(0.5), report=policy),
    Way("top-k 2, and says nothing of it", draw=likeliest(2), report=policy),
)
HONEST = (
    Way("float32"),
    Way("rounded to bfloat16", spoil=value(lambda one: float(torch.tensor(one).bfloat16()))),
    Way("rounded to float16", spoil=value(lambda one: float(torch.tensor(one).half()))),
    Way("three decimals", spoil=value(lambda one: round(one, 3))),
    Way("four decimals", spoil=value(lambda one: round(one, 4))),
    Way("four significant digits", spoil=value(lambda one: float(f"{one:.4g}"))),
    Way("rounding of float32", spoil=noise(1e-5)),
    Way("noise of 0.0003", spoil=noise(3e-4)),
)
BY_NAME = {way.name: way for way in (*LIES, *DRAWS, *HONEST)}
