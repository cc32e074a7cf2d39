"""The sizes of a model's weights, from its configuration."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from truestep.config.schema import Config
from truestep.model.adapter import DOWN, UP, Adapter
from truestep.model.cuts.stages import cut_by_cost
from truestep.model.cuts.tensor import tensor_plan
from truestep.model.freezing import freeze_weights
from truestep.model.loading.adapter_source import adapter_source, attach_adapter
from truestep.model.towers import text_config
from truestep.text import printable
from truestep.weights.errors import ModelError, no_model
from truestep.weights.layers import active_weights, is_of_experts, layers_of


@dataclass(frozen=True)
class WeightGroup:
    """The number of weights on one rank, by part of the model."""

    layers: tuple[int, ...]  # weights of each layer of this rank
    embedding: int
    head: int  # 0 if tied to the embedding, or on another rank
    others: int  # final norms and similar weights

    @property
    def all(self) -> int:
        return sum(self.layers) + self.embedding + self.head + self.others


@dataclass(frozen=True)
class ModelShape:
    config: Any  # transformers' configuration
    weights: Mapping[str, tuple[int, ...]]
    layer_names: tuple[str, ...]
    layer_costs: tuple[float, ...]
    embedding: str
    head: str  # the embedding's name if tied
    frozen: frozenset[str] = frozenset()  # the names of weights that are not trained
    adapter: Adapter | None = None
    _parts: dict[tuple[int, int, int, int, int, bool], WeightGroup] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def vocabulary(self) -> int:
        return self.weights[self.embedding][0]

    @property
    def hidden(self) -> int:
        return self.weights[self.embedding][1]

    @property
    def total(self) -> int:
        return sum(map(math.prod, self.weights.values()))

    def part(
        self, stage: int, stages: int, per_rank: int, tensor: int, expert: int = 1, *, trained: bool = False
    ) -> WeightGroup:
        """Return the number of weights on a rank before sharding: those of its pipeline stages, divided among tensor
        ranks, with experts divided among expert ranks. `trained`: count only trained weights."""
        place = (stage, stages, per_rank, tensor, expert, trained)
        if place not in self._parts:  # cached, as a search asks for the same parts often
            self._parts[place] = self._part(*place)
        return self._parts[place]

    def _part(self, stage: int, stages: int, per_rank: int, tensor: int, expert: int, trained: bool) -> WeightGroup:
        left_out = self.frozen if trained else frozenset()
        cut = cut_by_cost(self.layer_costs, math.prod(self.weights[self.head]), stages * per_rank)
        mine = [index for number, layers in enumerate(cut) if number % stages == stage for index in layers]
        pattern = _cut_names(self.config, tensor, divided=expert > 1)

        def share(name: str) -> int:
            return expert if is_of_experts(name) else tensor if pattern and pattern.search(name) else 1

        sizes = [self._size(self.layer_names[index], share, left_out) for index in mine]
        first, last = stage == 0, stage == stages - 1
        ends = -(-self.vocabulary // tensor) * self.hidden
        tied = self.head == self.embedding
        layered = tuple(f"{name}." for name in self.layer_names)
        others = sum(
            math.prod(shape)
            for name, shape in self.weights.items()
            if not name.startswith(layered) and name not in (self.embedding, self.head, *left_out)
        )
        embeds = ends if (first or (tied and last)) and self.embedding not in left_out else 0
        heads = 0 if tied or not last or self.head in left_out else ends
        return WeightGroup(tuple(sizes), embeds, heads, others if last else 0)

    def _size(self, layer: str, share: Callable[[str], int], left_out: frozenset[str]) -> int:
        own = (item for item in self.weights.items() if item[0].startswith(f"{layer}.") and item[0] not in left_out)
        return sum(math.prod(shape) // share(name) for name, shape in own)


def _cut_names(config: Any, tensor: int, *, divided: bool) -> re.Pattern[str] | None:
    if tensor == 1:
        return None
    plan = tensor_plan(config, tensor, divided=divided)

    def any_of(names: Sequence[str]) -> str:
        return "|".join(re.escape(name).replace(r"\*", r"\d+") for name in names)

    # Column-parallel: an adapter's B is cut, and every rank has the whole A. Row-parallel: A is cut, and B is whole.
    return re.compile(rf"({any_of(plan.columns)})\.(weight|bias|{UP})|({any_of(plan.rows)})\.(weight|{DOWN})")


def read_shape(config: Config) -> ModelShape:
    """Read a model's shape from config.json: build the model on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, trust = Path(config.model.path), config.model.trust_remote_code
    if not (directory / "config.json").is_file():
        raise ModelError(no_model(directory))
    try:
        settings = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(text_config(settings), trust_remote_code=trust)
    except Exception as error:  # transformers raises many kinds of errors for an unusual config.json
        raise ModelError(
            f"model.path: {directory} could not be made: {type(error).__name__}: {printable(error, 2000)}"
        ) from error
    if config.model.freeze:
        freeze_weights(model, config.model.freeze)
    source = adapter_source(config.adapter, config.seed)
    return shape_of(model, None if source is None else attach_adapter(model, source))


def shape_of(model: Any, adapter: Adapter | None = None) -> ModelShape:
    name, layers = layers_of(model)
    if not layers:
        raise ModelError(f"{type(model).__name__} has no list of its layers: its memory cannot be planned")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = names[id(model.get_input_embeddings().weight)]
    return ModelShape(
        config=model.config,
        weights={name: tuple(parameter.shape) for name, parameter in model.named_parameters()},
        layer_names=tuple(f"{name}.{index}" for index in range(len(layers))),
        layer_costs=tuple(active_weights(model, layer) for layer in layers),
        embedding=embedding,
        head=names[id(model.get_output_embeddings().weight)],
        frozen=frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
        adapter=adapter,
    )
