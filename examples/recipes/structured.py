"""Facts of a text as JSON, by a schema that the prompt shows. The reward is found by parsing."""

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from truestep import Answer, Environment

TYPES = {"string": str, "integer": int, "boolean": bool}
SCHEMA = {"name": "string", "age": "integer", "city": "string", "job": "string", "member": "boolean"}
FIRST = ["Ada", "Bela", "Cleo", "Dario", "Elin", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leo", "Mara"]
LAST = ["Albers", "Brandt", "Costa", "Dahl", "Egede", "Fuchs", "Grant", "Holm", "Ibsen", "Jansen", "Kovac", "Lind"]
CITIES = ["Bergen", "Cadiz", "Dublin", "Ghent", "Graz", "Lyon", "Malmo", "Oslo", "Porto", "Riga", "Tartu", "Turin"]
JOBS = ["baker", "carpenter", "dentist", "farmer", "gardener", "nurse", "painter", "pilot", "plumber", "teacher"]
TEXTS = (
    "{name}, {age}, works as a {job} in {city} and is {member} of the club.",
    "The {job} {name} lives in {city}. At {age} years of age, {she} is {member} of the club.",
    "{name} is {member} of the club. {she} is {age} years old, lives in {city} and is a {job}.",
    "In {city} you can meet {name}, a {job} of {age} years, who is {member} of the club.",
)
EXAMPLE = {"name": "Ida Berg", "age": 52, "city": "Nantes", "job": "tailor", "member": False}


class Structured(Environment):
    """The parts of the reward add up to 1: the answer parses, its fields and types are the schema's, its values are
    right."""

    def finish(self, answer: Answer) -> dict[str, float]:
        return score(answer.text, self.row["schema"], self.row["values"])

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[dict[str, Any]]:
        return questions("held out" if held_out else "train", 128 if held_out else 2000)


def score(text: str, schema: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts `parses` (0.2), `fields` (0.3) and `values` (0.5, by the share of right ones)."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return {"parses": 0.0, "fields": 0.0, "values": 0.0}
    fits = found.keys() == schema.keys() and all(type(found[name]) is TYPES[kind] for name, kind in schema.items())
    right = sum(type(found.get(name)) is type(value) and found[name] == value for name, value in values.items())
    return {"parses": 0.2, "fields": 0.3 * fits, "values": 0.5 * right / len(values)}


def questions(seed: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield prompts with one solved example, each with its schema and its values."""
    source = random.Random(f"structured {seed}")
    for number in range(count):
        person = {
            "name": f"{source.choice(FIRST)} {source.choice(LAST)}",
            "age": source.randint(18, 80),
            "city": source.choice(CITIES),
            "job": source.choice(JOBS),
            "member": source.random() < 0.5,
        }
        names = source.sample(sorted(SCHEMA), 3)
        solved = source.sample(sorted(SCHEMA), 3)
        messages = [
            {"role": "user", "content": asked(EXAMPLE, solved, TEXTS[0])},
            {"role": "assistant", "content": json.dumps({name: EXAMPLE[name] for name in solved})},
            {"role": "user", "content": asked(person, names, source.choice(TEXTS))},
        ]
        schema, values = ({name: table[name] for name in names} for table in (SCHEMA, person))
        yield {"id": f"{seed}-{number}", "prompt": messages, "schema": schema, "values": values}


def asked(person: Mapping[str, Any], names: list[str], text: str) -> str:
    member = "a member" if person["member"] else "not a member"
    described = text.format_map({**person, "member": member, "she": person["name"].split()[0]})
    return f"{described}\nAnswer with JSON of this schema: {json.dumps({name: SCHEMA[name] for name in names})}"


def demonstrations(seed: str, count: int) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations that end with the right answer."""
    for row in questions(seed, count):
        yield [*row["prompt"], {"role": "assistant", "content": json.dumps(row["values"])}]
