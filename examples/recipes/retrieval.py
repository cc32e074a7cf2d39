"""Questions about the 40 articles of encyclopaedia.jsonl, a small encyclopaedia of things that do not exist."""

import json
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from truestep import Answer, Environment, tool

COMMON = frozenset({"the", "a", "is", "in", "of", "did", "do", "does", "on", "what", "which", "who", "where", "how"})


class Encyclopaedia(Environment):
    """The reward is 1 if the last turn is the answer, and else 0."""

    @tool
    def search(self, query: str) -> str:
        """Return the article that has the most words of the query."""
        wanted = words(str(query)) - COMMON
        found = max(articles(), key=lambda article: len(wanted & words(article["title"] + " " + article["text"])))
        return str(found["text"]) if wanted & words(found["title"] + " " + found["text"]) else "nothing found"

    def finish(self, answer: Answer) -> float:
        return float(answer.text.strip().rstrip(".").lower() == self.row["answer"].lower())

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[dict[str, Any]]:
        return questions(held_out)


@cache
def articles() -> tuple[dict[str, Any], ...]:
    lines = Path(__file__).with_name("encyclopaedia.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(map(json.loads, lines))


def words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text.lower()))


def questions(held_out: bool) -> Iterator[dict[str, Any]]:
    """Yield the questions about every fourth article, or about the others."""
    for number, article in enumerate(articles()):
        if (number % 4 == 0) == held_out:
            for place, (question, answer) in enumerate(article["questions"]):
                prompt = [{"role": "user", "content": question}]
                name = f"{article['title']}-{place}"
                yield {"id": name, "prompt": prompt, "answer": answer, "title": article["title"]}


def demonstrations(seed: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations in which the policy looks a title up and answers from its article."""
    text = {article["title"]: article["text"] for article in articles()}
    for row in random.Random(f"retrieval {seed}").sample(list(questions(held_out=False)), count):
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": row["title"]}}}
        yield [
            *row["prompt"],
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "search", "content": text[row["title"]]},
            {"role": "assistant", "content": row["answer"]},
        ]
