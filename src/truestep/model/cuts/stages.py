"""Pipeline stages of a model: contiguous decoder layers; the first also has the embedding, the last the norm and head.

A stage runs all of the model's own code. Modules of other stages are replaced by modules that return their input, so
names and indices stay the same. Every stage computes positions itself. Code between embedding and layers runs on zeros
whose result is not used; a stage's first layer gets the hidden states of the stage before.

Dimensions: S tokens of the micro-batch, H hidden.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from truestep.ranks.pipeline import Pipeline
from truestep.weights.errors import ModelError
from truestep.weights.layers import active_weights, layers_of
from truestep.weights.pieces import WeightSlice


def cut_by_cost(layers: Sequence[float], head: float, stages: int) -> tuple[range, ...]:
    """Divide layers into stages of at least one layer; the head's cost counts with the last stage. Minimise the most
    expensive stage, then the sum of squared costs."""

    def cost(start: int, stop: int) -> float:
        return sum(layers[start:stop]) + (head if stop == len(layers) else 0.0)

    most, _ = _best(len(layers), stages, cost, max)
    allowed = most * (1 + 1e-12)

    def squared(start: int, stop: int) -> float:
        return cost(start, stop) ** 2 if cost(start, stop) <= allowed else math.inf

    _, starts = _best(len(layers), stages, squared, lambda before, last: before + last)
    return tuple(range(start, stop) for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True))


def _best(
    layers: int, stages: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the least joint cost of the stages, and each stage's first layer (dynamic programming)."""
    # the best division of the first n layers, by n
    best: list[tuple[float, list[int]]] = [(0.0, []), *((math.inf, []) for _ in range(layers))]
    for _ in range(stages):
        best = [
            min(
                ((join(best[start][0], cost(start, stop)), [*best[start][1], start]) for start in range(stop)),
                default=(math.inf, []),
            )
            for stop in range(layers + 1)
        ]
    return best[layers]


class _Layers(torch.nn.ModuleList):
    """The model's list of layers. Iteration and indexing use `view` if it is set; parameter names do not change."""

    view: list[torch.nn.Module] | None = None

    def __init__(self, layers: Sequence[torch.nn.Module]):
        super().__init__(layers)
        self.closed = [_PassOn(layer) for layer in layers]  # each layer's replacement in other stages

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return super().__iter__() if self.view is None else iter(self.view)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if self.view is None else self.view[index]


@dataclass(frozen=True, eq=False)
class Stages:
    """A model's division into stages. `opened` selects the stage that the model's code runs."""

    pipeline: Pipeline
    cut: tuple[range, ...]  # the layers of each stage
    layers: _Layers
    behind: tuple[str, ...]  # modules with weights that run after the last layer and before the head, by name
    width: int  # H

    @contextmanager
    def opened(self, stage: int, received: torch.Tensor | None) -> "Iterator[_KeepsOutput | None]":
        """Make the model run one stage on `received`, [S, H], within the block. Yields a module that keeps the stage's
        output; None for the last stage, whose output is the model's last hidden state."""
        span = self.cut[stage]
        view: list[torch.nn.Module] = [*self.layers.closed]
        view[span.start : span.stop] = list(self.layers)[span.start : span.stop]
        if received is not None:
            view[span.start - 1] = _GivesReceived(view[span.start - 1], received[None])
        output = None
        if stage < self.pipeline.last:
            view[span.stop] = output = _KeepsOutput(view[span.stop])
        self.layers.view = view
        try:
            yield output
        finally:
            self.layers.view = None


class _PassOn(torch.nn.Module):
    """Replaces a module of another stage, and returns its input."""

    weight = None

    def __init__(self, absent: torch.nn.Module):
        super().__init__()
        # Copy plain attributes, such as the type of attention, which a model's code may read.
        for name, value in vars(absent).items():
            if not name.startswith("_") and isinstance(value, str | int | float):
                setattr(self, name, value)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if arguments else named["hidden_states"]


class _GivesReceived(_PassOn):
    """Returns the hidden states received from the stage before, and ignores its input."""

    def __init__(self, absent: torch.nn.Module, hidden: torch.Tensor):
        super().__init__(absent)
        self.hidden = hidden

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.hidden


class _KeepsOutput(_PassOn):
    """Keeps its input, the output of the stage's last layer."""

    hidden: torch.Tensor

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.hidden = super().forward(*arguments, **named)
        return self.hidden


def check_layers(layers: int, pipeline: Pipeline) -> None:
    if layers < pipeline.stages:
        per_rank = f" x parallel.stages_per_rank: {pipeline.per_rank}" if pipeline.per_rank > 1 else ""
        raise ModelError(
            f"parallel.pipeline: {pipeline.ranks}{per_rank} makes {pipeline.stages} stages of at least one layer each, "
            f"and the model has {layers} layers"
        )


def stages_of(model: Any, pipeline: Pipeline, run: Callable[[], object]) -> Stages:
    """Prepare a model to run one stage at a time, without removing layers. `run` runs the model's body."""
    name, layers = layers_of(model)
    if not name:
        count = model.config.get_text_config().num_hidden_layers
        raise ModelError(
            f"{type(model).__name__} has no list of its {count} layers: it cannot be cut into stages. Leave out "
            "parallel.pipeline"
        )
    check_layers(len(layers), pipeline)
    behind = _behind_the_layers(model, layers, run)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    cut = cut_by_cost([active_weights(model, layer) for layer in layers], head.weight.numel(), pipeline.stages)
    staged = _Layers(layers)
    _put(model, name, staged)
    return Stages(pipeline, cut, staged, behind, embedding.weight.shape[1])


def keep_own(model: Any, stages: Stages, rank: int, pieces: Mapping[str, WeightSlice]) -> dict[str, WeightSlice]:
    """Remove from the model the modules that no stage of this rank needs. Return `pieces` with the pipeline ranks that
    hold each weight."""
    pipeline, first, last = stages.pipeline, (0,), (stages.pipeline.ranks - 1,)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    homes: dict[torch.nn.Module, tuple[int, ...]] = {embedding: first + last if tied else first, head: last}
    homes |= {model.get_submodule(name): last for name in stages.behind}
    for stage, numbers in enumerate(stages.cut):
        homes |= {stages.layers[number]: (pipeline.rank_of(stage),) for number in numbers}
    holders: dict[torch.nn.Parameter, tuple[int, ...]] = {}
    for module, ranks in homes.items():
        for parameter in module.parameters():
            if holders.setdefault(parameter, ranks) != ranks and not (tied and module is head):
                raise ModelError(
                    f"{type(model).__name__} shares a weight between layers: it cannot be cut into stages. Leave out "
                    "parallel.pipeline"
                )
    placed = {name: replace(pieces[name], stages=holders[weight]) for name, weight in model.named_parameters()}
    names = {module: name for name, module in model.named_modules()}
    for module, ranks in homes.items():
        if rank not in ranks:
            _put(model, names[module], _PassOn(module))
    return placed


def _behind_the_layers(model: Any, layers: Sequence[torch.nn.Module], run: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of modules with weights that run after the last layer, such as the final norm. Refuse a model
    that runs others, outside embedding and layers, before the last layer."""
    ends = {model.get_input_embeddings(), model.get_output_embeddings()}
    inside = {inner for layer in layers for inner in layer.modules()} | ends
    others = {
        module: name
        for name, module in model.named_modules()
        if module not in inside and list(module.parameters(recurse=False))
    }
    called: list[torch.nn.Module] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, _: called.append(module)) for module in (layers[-1], *others)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    behind = called[called.index(layers[-1]) + 1 :]
    elsewhere = [name for module, name in others.items() if module not in behind or called.count(module) > 1]
    if elsewhere:
        raise ModelError(
            f"{type(model).__name__} uses {', '.join(elsewhere)} elsewhere than behind its layers: it cannot be cut "
            "into stages. Leave out parallel.pipeline"
        )
    return tuple(others[module] for module in behind if module in others)


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
