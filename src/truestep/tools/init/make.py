"""Creates a task in a new directory from a template: records, a reward or an environment with its test, a
configuration, and a tiny model if none is named."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from string import Template

from truestep.errors import TruestepError
from truestep.files.whole import write_json_lines, write_text_whole
from truestep.tools.init.tasks import CHAT_TEMPLATE, HELD_OUT, PROMPTS, TASKS, Asked, Task, words_of

__all__ = ["HELD_OUT", "PROMPTS", "TEMPLATES", "init"]

TEMPLATES = Path(__file__).parent / "templates"


def init(directory: Path, model: Path | None, seed: int = 0, *, template: str = "reward") -> list[Path]:
    """Create a task in `directory`, which must be new or empty, and return its files. `model` None: create a tiny one.
    `template`: reward, math, json, tool-agent, sft or dpo-like."""
    if template not in TASKS:
        raise TruestepError(f"there is no template {template}: there are {', '.join(TASKS)}")
    task, tiny = TASKS[template], model is None
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TruestepError(f"{directory} exists already and is not empty: name a directory that is new or empty")
    if model is not None:
        _check_model(model, task, template)
    directory.mkdir(parents=True, exist_ok=True)
    if tiny:
        _make_tiny_model(directory / "model", task, seed)
    chat = task.converses if model is None else _has_chat_template(model)
    for name, records in task.files(Asked(seed, spaced=tiny, chat=chat)).items():
        write_json_lines(directory / name, records)
    path = "model" if model is None else _from_directory(model, directory)
    for name, text in _texts(path, template, task, tiny):
        write_text_whole(directory / name, text)
    return sorted(path for path in directory.iterdir())


def _check_model(model: Path, task: Task, template: str) -> None:
    if not (model / "config.json").is_file():
        raise TruestepError(
            f"--model {model}: it is no Hugging Face directory, since it has no config.json. Download a model first, "
            "for example with `hf download ORGANISATION/NAME --local-dir models/NAME`"
        )
    if task.converses and not _has_chat_template(model):
        raise TruestepError(
            f"--template {template} needs a model with a chat template, and {model} has none: name one that was "
            "trained on chats, or leave out --model for a tiny one"
        )


def _from_directory(model: Path, directory: Path) -> str:
    """Return the model's path relative to the task's directory, in which runs are started; absolute if typed so."""
    if model.is_absolute():
        return str(model)
    path = os.path.relpath(model, directory)
    # With a link on the way, `..` may lead elsewhere.
    leads_there = (directory / path).exists() and (directory / path).samefile(model)
    return path if leads_there else str(model.absolute())


def _texts(model: str, template: str, task: Task, tiny: bool) -> Iterator[tuple[str, str]]:
    sizes = task.tiny if tiny else task.real
    words = {"model": json.dumps(model), "dtype": "float32" if tiny or not _has_gpu() else "bfloat16", **vars(sizes)}
    for file in sorted((TEMPLATES / template).iterdir()):
        if file.is_file():
            yield file.name, Template(file.read_text(encoding="utf-8")).safe_substitute(words)


def _has_gpu() -> bool:
    import torch  # imported late: it takes seconds

    return torch.cuda.is_available()


def _make_tiny_model(directory: Path, task: Task, seed: int) -> None:
    from truestep.tools.demo.model import make_model

    make_model(directory, words_of(task), seed)
    if task.converses:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(directory)
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(directory)


def _has_chat_template(model: Path) -> bool:
    if (model / "chat_template.jinja").is_file():
        return True
    try:
        settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))
