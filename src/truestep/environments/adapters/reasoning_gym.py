"""Tasks of the package reasoning-gym, with its own prompts, difficulty and scores.

    sampler:
      environment:
        type: reasoning_gym
        options: {tasks: {leg_counting: {weight: 2, config: {max_animals: 4}}, spell_backward: {level: 1}}, size: 1000}

The package makes an item from a seed and the item's number. So a row has the number, and the episode's process makes
the item again. The package's score needs the original item, with tuples and other objects that JSON cannot hold.
"""

import dataclasses
import random
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from truestep.config.custom import CustomError
from truestep.environments.adapters import missing
from truestep.environments.episodes.environment import Answer, Environment

try:
    import reasoning_gym  # noqa: F401 - registers the tasks
    from reasoning_gym.composite import CompositeConfig, CompositeDataset, DatasetSpec
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum
    from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
except ImportError as error:
    raise missing("sampler.environment.type: reasoning_gym", "reasoning-gym", error) from error

_TASK_OPTIONS = ("weight", "config", "level")


class ReasoningGym(Environment):
    """Asks a question of one of the tasks, and rewards the answer with the task's own score, between 0 and 1."""

    _shared: CompositeDataset | None = None  # the items, set by `prepare` and shared by episodes

    def __init__(
        self,
        *,
        tasks: Sequence[str] | Mapping[str, Mapping[str, Any] | None],
        size: int = 1000,
        held_out: int = 100,
        seed: int = 0,
        system: str | None = "default",
        tag: str | None = "answer",
        chat: bool = True,
    ):
        """`tasks`: a list of names, or a mapping from each name to its `weight` (how often the task is drawn; default
        1), `config` (the task's own options) and `level` (of the task's curriculum: one number for all attributes, or a
        number for each attribute by name). `size`: the number of prompts for training; `held_out`: the number for
        evaluation. `system`: a system prompt, or the name of one of the package's system prompts; null: none. `tag`:
        the tag around the answer; null: the whole text is the answer. `chat`: whether prompts are chat messages; false:
        text, for a model without a chat template."""
        super().__init__()
        self.size, self.held_out, self.seed, self.tag, self.chat = size, held_out, seed, tag, chat
        self.system = SYSTEM_PROMPTS.get(system, system)
        self.items = self._shared or _made(tasks, size + held_out, seed)

    @classmethod
    def prepare(cls, options: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Load the tasks, which episodes then share. There are no tools."""
        cls._shared = cls(**options).items
        return {}

    @classmethod
    def rows(cls, options: Mapping[str, Any], held_out: bool) -> Iterator[Mapping[str, Any]]:
        """Return the prompts. The numbers of the prompts for evaluation follow those of the prompts for training."""
        made = cls(**options)
        first, count = (made.size, made.held_out) if held_out else (0, made.size)
        return map(made._row, range(first, first + count))

    def _row(self, number: int) -> Mapping[str, Any]:
        item = self._item(number)
        question, task = item["question"], item["metadata"]["source_dataset"]
        prompt: Any = "\n".join(filter(None, (self.system, question)))
        if self.chat:
            before = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = [*before, {"role": "user", "content": question}]
        return {"id": f"{task}-{number}", "prompt": prompt, "task": task, "number": number, "question": question}

    def _item(self, number: int) -> Mapping[str, Any]:
        random.seed(f"{self.seed} {number}")  # some tasks draw from the global generator as well
        return self.items[number]

    def finish(self, answer: Answer) -> dict[str, float | None]:
        """Return the task's score as the reward, and again as a part named after the task."""
        item = self._item(self.row["number"])
        if item["question"] != self.row["question"]:
            raise ValueError(f"reasoning-gym made another question of {self.row['id']} than before")
        given = answer.text.strip() if self.tag is None else extract_answer(answer.text, tag_name=self.tag)
        failed = 0.0
        try:
            score = float(self.items.score_answer(given, item))
        except Exception:  # the score function cannot read the policy's answer
            traceback.print_exc()
            score, failed = 0.0, 1.0
        return {"reward": score, self.row["task"]: score, "answered": float(given is not None), "score_failed": failed}

    def step(self, answer: Answer) -> Any:
        return self.finish(answer)


def _named(tasks: Any) -> Mapping[str, Any]:
    named = tasks if isinstance(tasks, Mapping) else dict.fromkeys(tasks)
    for name, given in named.items():
        if name not in DATASETS:
            raise CustomError(f"sampler.environment.options.tasks: reasoning-gym has no task {name!r}")
        for option in given or {}:
            if option not in _TASK_OPTIONS:
                known = ", ".join(_TASK_OPTIONS)
                raise CustomError(f"sampler.environment.options.tasks.{name}: {option!r} is none of {known}")
    return named


def _weight_and_config(name: str, given: Mapping[str, Any] | None) -> tuple[float, dict[str, Any]]:
    given = given or {}
    config = dict(given.get("config") or {})
    if (level := given.get("level")) is not None:
        config = _of_level(name, level) | config
    return float(given.get("weight", 1.0)), config


def _of_level(name: str, level: Any) -> dict[str, Any]:
    """Return the task's options at a level of its curriculum."""
    if name not in CURRICULA:
        raise CustomError(f"sampler.environment.options.tasks.{name}.level: the task has no curriculum")
    curriculum = create_curriculum(name)
    levels = level if isinstance(level, Mapping) else dict.fromkeys(curriculum.attributes, level)
    for attribute, wanted in levels.items():
        if attribute not in curriculum.attributes:
            known = ", ".join(curriculum.attributes)
            raise CustomError(f"sampler.environment.options.tasks.{name}.level: {attribute!r} is none of {known}")
        highest = len(curriculum.get_attribute(attribute).levels) - 1
        curriculum.set_attr_level(attribute, min(int(wanted), highest))
    config = curriculum.generate_configuration()
    names = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
    return {name: getattr(config, name) for name in names}


def _made(tasks: Any, size: int, seed: int) -> CompositeDataset:
    specs = [DatasetSpec(name, *_weight_and_config(name, given)) for name, given in _named(tasks).items()]
    try:
        return CompositeDataset(CompositeConfig(size, seed, specs))
    except (AssertionError, TypeError, ValueError) as error:
        raise CustomError(f"sampler.environment.options: reasoning-gym refuses them: {error}") from error
