"""The tasks that `truestep init` writes: what each is about, its records, and the sizes of its configuration."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

PROMPTS, HELD_OUT = 512, 64
DIGITS = "0123456789"
Record = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The numbers of the configuration that depend on the model."""

    docs_per_step: int
    steps: int
    max_new_tokens: int
    learning_rate: str
    stop: str = "null"  # texts that end a turn; the tiny model ends none by itself


@dataclass(frozen=True)
class Asked:
    """How prompts are written for a model."""

    seed: int
    spaced: bool  # for the tiny model, which has a token for each digit and reads words between spaces
    chat: bool  # the model has a chat template

    def prompt(self, tiny: str, question: str) -> str | list[dict[str, str]]:
        if self.spaced and not self.chat:
            return tiny
        if self.chat:
            return [{"role": "user", "content": tiny if self.spaced else question}]
        return f"{question}\nAnswer:"


@dataclass(frozen=True)
class Task:
    words: tuple[str, ...]  # of the tiny model
    files: Callable[[Asked], Mapping[str, Iterable[Record]]]  # the records of each file
    tiny: Sizes
    real: Sizes
    converses: bool = False  # the model needs a chat template, and the tiny one gets one


_TINY = Sizes(docs_per_step=64, steps=30, max_new_tokens=6, learning_rate="2.0e-3")
_REAL = Sizes(docs_per_step=128, steps=40, max_new_tokens=32, learning_rate="5.0e-6")


def _split(records: Iterator[Record], trained: str = "prompts.jsonl") -> dict[str, list[Record]]:
    held_out = list(islice(records, HELD_OUT))
    return {"held_out.jsonl": held_out, trained: list(islice(records, PROMPTS))}


def _spaced(number: int) -> str:
    return " ".join(str(number))


def _pairs(seed: int, least: int, most: int) -> list[tuple[int, int]]:
    """Return all pairs of numbers from `least` to `most`, in a seeded order."""
    numbers = range(least, most + 1)
    pairs = [(first, second) for first in numbers for second in numbers]
    random.Random(seed).shuffle(pairs)
    return pairs


def _sums(asked: Asked) -> dict[str, list[Record]]:
    def records() -> Iterator[Record]:
        for first, second in _pairs(asked.seed, 10, 99):
            question = f"What is {first} + {second}? Answer with the number alone."
            prompt = asked.prompt(f"{_spaced(first)} + {_spaced(second)} =", question)
            yield {"prompt": prompt, "answer": first + second}

    return _split(records())


def _problem(asked: Asked, first: int, second: int, times: bool) -> Record:
    sign, answer = ("*", first * second) if times else ("+", first + second)
    question = f"What is {first} {sign} {second}? Give the answer as \\boxed{{...}}."
    return {"prompt": asked.prompt(f"{_spaced(first)} {sign} {_spaced(second)} =", question), "answer": answer}


def _problems(asked: Asked) -> dict[str, list[Record]]:
    small, large = _pairs(asked.seed, 1, 9), _pairs(asked.seed, 10, 99)
    easy = [_problem(asked, first, second, times) for first, second in small for times in (False, True)]
    hard = [_problem(asked, first, second, False) for first, second in large]
    order = random.Random(asked.seed)
    trained = [*easy[32:], *hard[HELD_OUT : HELD_OUT + PROMPTS - len(easy) + 32]]
    order.shuffle(trained)
    return {"easy.jsonl": easy[:32], "hard.jsonl": hard[:HELD_OUT], "prompts.jsonl": trained}


_NAMES, _CITIES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom", "Zoe", "Kim"), ("Oslo", "Rome", "Lima", "Cork")
_AGES = tuple(range(21, 61))


def _people(asked: Asked) -> dict[str, list[Record]]:
    people = [(name, age, city) for name in _NAMES for age in _AGES for city in _CITIES]
    random.Random(asked.seed).shuffle(people)

    def records() -> Iterator[Record]:
        for name, age, city in people:
            question = (
                f"{name} is {age} and lives in {city}. Write this as a JSON object with the keys name, age and city, "
                "and nothing else."
            )
            tiny = f"{name} {age} {city} :"
            yield {"prompt": asked.prompt(tiny, question), "wanted": {"name": name, "age": age, "city": city}}

    return _split(records())


_JSON_WORDS = (
    *(":", '{"name":', '"age":', '"city":'),
    *(word for name in _NAMES for word in (name, f'"{name}",')),
    *(word for age in _AGES for word in (str(age), f"{age},")),
    *(word for city in _CITIES for word in (city, f'"{city}"}}')),
)


def call_of(box: int) -> str:
    """Return a call of the tool, which is one word of the tiny model."""
    return (
        "<tool_call>" + json.dumps({"name": "open", "arguments": {"box": box}}, separators=(",", ":")) + "</tool_call>"
    )


def _boxes(asked: Asked) -> dict[str, list[Record]]:
    order = random.Random(asked.seed)

    def records() -> Iterator[Record]:
        while True:
            boxes, box = [order.randrange(10) for _ in range(3)], order.randrange(3)
            question = f"What is in box {box}? Open it with the tool, and answer with the number alone."
            prompt = asked.prompt(f"what is in box {box}", question)
            yield {"prompt": prompt, "boxes": boxes, "answer": boxes[box]}

    return _split(records())


def _chats(asked: Asked) -> dict[str, list[Record]]:
    def records() -> Iterator[Record]:
        for number, (prompt, total) in enumerate(_small_sums(asked)):
            yield {"id": f"chat-{number}", "messages": [*prompt, {"role": "assistant", "content": total}]}

    return _split(records(), "chats.jsonl")


def _preferences(asked: Asked) -> dict[str, list[Record]]:
    """Make pairs that prefer the number alone."""

    def records() -> Iterator[Record]:
        for prompt, total in _small_sums(asked):
            wordy = f"= {total}" if asked.spaced else f"That is a good question! The answer is {total}."
            yield {"prompt": prompt, "chosen": total, "rejected": wordy}

    return _split(records(), "pairs.jsonl")


def _small_sums(asked: Asked) -> Iterator[tuple[list[dict[str, str]], str]]:
    """Yield the questions for sums of two numbers up to 29, as chats, and the answers."""
    for first, second in _pairs(asked.seed, 1, 29):
        prompt = asked.prompt(f"{_spaced(first)} + {_spaced(second)} =", f"What is {first} + {second}?")
        assert isinstance(prompt, list)
        yield prompt, _spaced(first + second) if asked.spaced else str(first + second)


_SUPERVISED = Sizes(docs_per_step=32, steps=60, max_new_tokens=8, learning_rate="2.0e-3")
_ARITHMETIC = ("+", "=", *DIGITS)
_AGENT_WORDS = ("what", "is", "in", "box", "nothing", "error:", *DIGITS, *map(call_of, range(3)))

TASKS = {
    "reward": Task(_ARITHMETIC, _sums, _TINY, _REAL),
    "math": Task(
        ("*", *_ARITHMETIC),
        _problems,
        _TINY,
        Sizes(docs_per_step=128, steps=100, max_new_tokens=256, learning_rate="2.0e-6"),
    ),
    "json": Task(
        _JSON_WORDS,
        _people,
        Sizes(docs_per_step=128, steps=60, max_new_tokens=8, learning_rate="2.0e-3"),
        Sizes(docs_per_step=128, steps=60, max_new_tokens=64, learning_rate="5.0e-6"),
    ),
    "tool-agent": Task(
        _AGENT_WORDS,
        _boxes,
        Sizes(docs_per_step=128, steps=60, max_new_tokens=3, learning_rate="2.0e-3", stop='["</tool_call>"]'),
        Sizes(docs_per_step=64, steps=60, max_new_tokens=128, learning_rate="5.0e-6"),
        converses=True,
    ),
    "sft": Task(
        _ARITHMETIC,
        _chats,
        _SUPERVISED,
        Sizes(docs_per_step=32, steps=64, max_new_tokens=32, learning_rate="1.0e-5"),
        converses=True,
    ),
    "dpo-like": Task(
        _ARITHMETIC,
        _preferences,
        Sizes(docs_per_step=32, steps=60, max_new_tokens=8, learning_rate="1.0e-3"),
        Sizes(docs_per_step=32, steps=60, max_new_tokens=32, learning_rate="1.0e-6"),
        converses=True,
    ),
}


def words_of(task: Task) -> Sequence[str]:
    """Return the words of the task's tiny model."""
    roles = ("<start>", "system", "user", "assistant", "tool") if task.converses else ()
    return tuple(dict.fromkeys((*roles, *task.words)))


CHAT_TEMPLATE = (
    "{% for message in messages %}<start> {{ message.role }} {% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }} {% for call in message.tool_calls or [] %}<tool_call>"
    '{"name":"{{ call.function.name }}","arguments":{{ call.function.arguments | tojson(separators=(",", ":")) }}}'
    "</tool_call> {% endfor %}<end>{% endgeneration %} {% else %}{{ message.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
"""The chat template of a tiny model."""
