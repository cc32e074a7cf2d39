"""Creates a task in a new directory: prompts, a reward, a configuration, a test, and a tiny model if none is named."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

from truestep.errors import TruestepError
from truestep.files.whole import write_json_lines, write_text_whole

TEMPLATES = Path(__file__).parent / "templates"
PROMPTS, HELD_OUT = 512, 64
DIGITS = "0123456789"


@dataclass(frozen=True)
class Sizes:
    """The numbers of the configuration that depend on the model."""

    docs_per_step: int
    steps: int
    max_new_tokens: int
    learning_rate: str


TINY = Sizes(docs_per_step=64, steps=30, max_new_tokens=6, learning_rate="2.0e-3")
REAL = Sizes(docs_per_step=128, steps=40, max_new_tokens=32, learning_rate="5.0e-6")


def init(directory: Path, model: Path | None, seed: int = 0) -> list[Path]:
    """Create a task in `directory`, which must be new or empty, and return its files. `model` None: create a tiny
    one."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TruestepError(f"{directory} exists already and is not empty: name a directory that is new or empty")
    if model is not None and not (model / "config.json").is_file():
        raise TruestepError(
            f"--model {model}: it is no Hugging Face directory, since it has no config.json. Download a model first, "
            "for example with `hf download ORGANISATION/NAME --local-dir models/NAME`"
        )
    directory.mkdir(parents=True, exist_ok=True)
    tiny = model is None
    if tiny:
        _make_tiny_model(directory / "model", seed)
    chat = not tiny and _has_chat_template(model or directory)
    stream = _problems(seed, spaced=tiny, chat=chat)
    write_json_lines(directory / "held_out.jsonl", islice(stream, HELD_OUT))
    write_json_lines(directory / "prompts.jsonl", islice(stream, PROMPTS))
    path = "model" if model is None else _from_directory(model, directory)
    for name, text in _texts(path, tiny):
        write_text_whole(directory / name, text)
    return sorted(path for path in directory.iterdir())


def _from_directory(model: Path, directory: Path) -> str:
    """Return the model's path as it was typed, but from the task's directory, in which runs are started."""
    if model.is_absolute():
        return str(model)
    path = os.path.relpath(model, directory)
    leads_there = (directory / path).exists() and (directory / path).samefile(model)  # a link on the way may not
    return path if leads_there else str(model.absolute())


def _texts(model: str, tiny: bool) -> Iterator[tuple[str, str]]:
    sizes = TINY if tiny else REAL
    words = {"model": json.dumps(model), "dtype": "float32" if tiny or not _has_gpu() else "bfloat16", **vars(sizes)}
    for template in sorted(TEMPLATES.iterdir()):
        if template.is_file():
            yield template.name, Template(template.read_text(encoding="utf-8")).safe_substitute(words)


def _has_gpu() -> bool:
    import torch  # imported late: it takes seconds

    return torch.cuda.is_available()


def _make_tiny_model(directory: Path, seed: int) -> None:
    from truestep.tools.demo.model import make_model

    make_model(directory, ("+", "=", *DIGITS), seed)


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


def _problems(seed: int, *, spaced: bool, chat: bool) -> Iterator[dict[str, Any]]:
    """Yield all sums of two numbers from 10 to 99 as prompt records, in a seeded order."""
    pairs = [(first, second) for first in range(10, 100) for second in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    for first, second in pairs:
        yield {"prompt": _prompt(first, second, spaced=spaced, chat=chat), "answer": first + second}


def _prompt(first: int, second: int, *, spaced: bool, chat: bool) -> str | Sequence[dict[str, str]]:
    if spaced:  # the tiny model has a token for each digit, and reads words between spaces
        return f"{' '.join(str(first))} + {' '.join(str(second))} ="
    question = f"What is {first} + {second}? Answer with the number alone."
    return [{"role": "user", "content": question}] if chat else f"{question}\nAnswer:"
