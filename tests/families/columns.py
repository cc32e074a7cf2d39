"""What works for a family, each really tried with a tiny model: "yes", or the reason why not."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from completing import Asked, How, decode
from families.compare import TOLERANCE, Numbers, distance, of_policy, of_transformers, worst
from families.tiny_families import LARGE, VOCABULARY, tiny_family
from ranks.cases import on_ranks
from ranks.test_layouts import options
from scoring import write_records
from tiny import make_records
from truestep.config.schema import Config
from truestep.errors import TruestepError
from truestep.generate.engine.engine import Engine, engine_of
from truestep.model.adapter import AdapterSettings, AdapterSource, is_adapters
from truestep.model.loading.load import load_policy
from truestep.model.policy import Policy
from truestep.model.save import save_policy
from truestep.ranks.watch import Watch
from truestep.run.assemble.policy import join_ranks
from truestep.tools.score import _score, score
from truestep.types import Rollout

LAYOUTS = ("context", "tensor", "pipeline")
COLUMNS = ("trains", *LAYOUTS, "LoRA", "engine", "exact", "export")
YES = "yes"


class DiffersError(TruestepError):
    """Something gives other numbers: not a refusal, but a fault."""


def try_family(family: str, directory: Path, columns: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """Try a family in all columns, or in some."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = directory / "model"
    if family in LARGE:
        return {"trains": "no tiny model of it: ValueError: some of its sizes cannot be set"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tiny_family(model, family)
            theirs = of_transformers(model)
        except Exception as error:  # of transformers
            return {"trains": f"no tiny model of it: {_words(error)}"}
        found = {"trains": _tried(lambda: _trains(model, theirs))}
        if found["trains"] != YES:
            return found
        if set(columns) & set(LAYOUTS):
            found |= _layouts(model, directory)
        for name, try_it in (("LoRA", _adapts), ("engine", _draws), ("exact", _draws_exactly), ("export", _exports)):
            if name in columns:
                found[name] = _tried(lambda try_it=try_it, name=name: try_it(model, directory / name))  # type: ignore[misc]
    return found


def _tried(try_it: Callable[[], str | None]) -> str:
    logging.disable(logging.WARNING)
    try:
        return try_it() or YES
    except TruestepError as error:
        return _words(error)
    finally:
        logging.disable(logging.NOTSET)


def _words(error: Exception) -> str:
    """Say in one line what an error says, without the names of paths and of the model's class."""
    text = str(error) if isinstance(error, TruestepError) else f"{type(error).__name__}: {error}"
    return " ".join(re.sub(r"(/[\w.-]+)+/model\b", "the model", text).split())[:400]


def _trains(model: Path, theirs: Numbers) -> None:
    off = distance(of_policy(load_policy(model, device="cpu", longest_document=40)), theirs, model)
    if not off <= TOLERANCE:
        raise DiffersError(f"gradients or log-probs differ by {off:.0e}")


def _adapts(model: Path, directory: Path) -> str | None:
    """An adapter that is not zero computes what the merged model computes, and each of its matrices has a gradient."""
    plain = load_policy(model, device="cpu", longest_document=40).model
    layers = {
        name.rpartition(".")[2]
        for name, module in plain.named_modules()
        if type(module) is torch.nn.Linear and module is not plain.get_output_embeddings() and not name[-1].isdigit()
    }
    if not layers:
        return "it has no linear layers of torch's"
    source = AdapterSource(AdapterSettings(2, 4.0, tuple(sorted(layers)), 0))
    policy = load_policy(model, device="cpu", adapter=source, longest_document=40)
    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(policy.weights.master.items())):
            if is_adapters(name):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    ours = of_policy(policy)
    save_policy(policy, directory)
    _same(ours, of_transformers(directory), "the merged adapter")
    if not all(is_adapters(name) for name in ours.gradients):
        raise DiffersError("a weight beside the adapter has a gradient")
    return None


def _same(ours: Numbers, theirs: Numbers, what: str) -> None:
    off = float((ours.logprobs - theirs.logprobs).abs().max())
    if not off <= 2 * TOLERANCE:
        raise DiffersError(f"log-probs of {what} differ by {off:.0e}")


def _draws(model: Path, directory: Path, exact: bool = False) -> str | None:
    """The log-probs of what the engine draws are those that training finds."""
    policy = load_policy(model, device="cpu", longest_document=40)
    engine = engine_of(policy, exact)
    if not isinstance(engine, Engine):
        return engine
    generator = np.random.default_rng(3)
    asked = [
        Asked(tuple(generator.integers(0, VOCABULARY, length).tolist()), (7, number))
        for number, length in enumerate((3, 21, 1, 9))
    ]
    how = How(1.0, 1.0, 12, None, frozenset(), exact=exact)
    for request, answer in zip(asked, decode(policy, asked, how), strict=True):
        ids = torch.tensor([*request.input_ids, *answer.token_ids])
        found = torch.tensor(answer.logprobs, dtype=torch.float64)
        off = float((found - _trained(policy, ids)[len(request.input_ids) - 1 :]).abs().max())
        if not off <= 3 * TOLERANCE:
            raise DiffersError(f"log-probs of drawn tokens differ by {off:.0e} from training's")
    return None


@torch.no_grad()
def _trained(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    document = Rollout("drawn", ids.numpy(), np.arange(len(ids)) > 0)
    return of_policy(policy, [document], gradients=False).logprobs.double()


def _draws_exactly(model: Path, directory: Path) -> str | None:
    return _draws(model, directory, exact=True)


def _exports(model: Path, directory: Path) -> None:
    """Trained weights leave under the names that they came with, and compute the same in transformers."""
    policy = load_policy(model, device="cpu", longest_document=40)
    with torch.no_grad():
        for number, weight in enumerate(policy.weights.master.values()):
            weight += 0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    save_policy(policy, directory)
    before, after = (
        {name for file in place.glob("*.safetensors") for name in load_file(file)} for place in (model, directory)
    )
    if before != after:
        raise DiffersError(f"{min(before ^ after)} is in one of the directories only")
    AutoModelForCausalLM.from_pretrained(directory)
    _same(of_policy(policy), of_transformers(directory), "the exported model")


def _layouts(model: Path, directory: Path) -> dict[str, str]:
    """Compare a whole step over two ranks with that of one process."""
    records = make_records(11, documents=6)
    rollouts = write_records(directory / "rollouts.jsonl", records)
    loss = {"type": "cross_entropy"}
    configs = {name: options(model, rollouts, loss, ({name: 2}, 1, 40)) for name in LAYOUTS}
    alone = directory / "alone"
    score(Config.model_validate(options(model, rollouts, loss, ({}, 1, 40))), alone, gradients=True)
    right, found = load_file(alone / "gradients.safetensors"), {}
    try:
        on_ranks(2, score_or_say_why, [(configs[name], str(directory / name)) for name in LAYOUTS], timeout=150.0)
    except TruestepError as error:
        logging.getLogger(__name__).warning("%s: %s", model, error)
    for name in LAYOUTS:
        reason, gradients = directory / name / "reason.txt", directory / name / "gradients.safetensors"
        if reason.is_file():
            found[name] = reason.read_text(encoding="utf-8")
        elif not gradients.is_file():
            found[name] = "the ranks did not end"
        else:
            nothing = torch.zeros(1)
            off, what = worst(Numbers(nothing, load_file(gradients)), Numbers(nothing, right))
            found[name] = YES if off <= 10 * TOLERANCE else f"the gradient of {what} differs by {off:.0e}"
    return found


def score_or_say_why(runs: list[tuple[dict[str, Any], str]]) -> None:
    """Score without the watch, which would end the ranks where a model is refused."""
    for given, output in runs:
        config = Config.model_validate(given)
        ranks = join_ranks(config)
        try:
            _score(config, Path(output), True, ranks, Watch(ranks, 60.0))
        except TruestepError as error:
            Path(output).mkdir(parents=True, exist_ok=True)
            (Path(output) / "reason.txt").write_text(_words(error), encoding="utf-8")
