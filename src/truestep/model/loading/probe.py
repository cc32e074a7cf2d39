"""Probes that refuse a model that would be trained wrongly. Every layer of the model runs (see `probe_weights`).

In float32, packed documents must give the hidden states that transformers' own attention gives for each document alone,
and our head must give the model's own logits. The documents include some that are longer than each threshold at which
the model's code changes its behaviour (sliding window, rotary embedding). In half precision, another attention kernel
may be used. The error of packed documents against float32 may then be at most `HALF_PRECISION_FACTOR` times the error
of single documents. All passes give a token the experts that it has in its single document (`same_experts`).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from truestep.errors import TruestepError
from truestep.head.logits import HeadSettings, scaled_logits
from truestep.model import handed
from truestep.model.cuts.stages import Stages, stages_of
from truestep.model.loading.same_experts import Routes, differences, routes_given, routes_kept
from truestep.model.mixers.context_parallel import Context
from truestep.model.policy import packed_hidden, plain_attention, stage_hidden
from truestep.ranks.exchange import gather_same
from truestep.ranks.group import ALONE, Ranks
from truestep.ranks.pipeline import Pipeline
from truestep.rollouts.packing import pack_tokens
from truestep.types import PackedTokens
from truestep.weights.errors import ModelError, RuinedError
from truestep.weights.finite import largest

FLOAT32_TOLERANCE = 1e-4
# Packed and single documents have different rounding errors of about the same size.
HALF_PRECISION_FACTOR = 1.5


@dataclasses.dataclass(frozen=True)
class Probe:
    documents: list[torch.Tensor]
    hidden: torch.Tensor  # hidden states of all documents, each computed alone in float32
    routes: Routes = dataclasses.field(default_factory=dict)  # of the same passes


def make_documents(model: Any, longest: int) -> list[torch.Tensor]:
    """Make random documents: a few short ones, and one just longer than each threshold below `longest`."""
    past = sorted({threshold + 9 for threshold in _thresholds(model.config) if threshold + 9 <= longest})
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    return [torch.randint(vocabulary, (length,), generator=generator) for length in (5, 2, 9, *past, 1)]


def _thresholds(config: Any) -> Iterator[int]:
    for name in ("sliding_window", "attention_chunk_size"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            yield value
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
    if any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds):
        for place in (*kinds, vars(config)):
            for name in ("original_max_position_embeddings", "max_position_embeddings"):
                if isinstance(place.get(name), int):
                    yield place[name]


@torch.no_grad()
def probe_float32(model: Any, head: HeadSettings, device: torch.device, longest: int) -> Probe:
    """Probe a float32 model, and return the hidden states that the other probes compare with."""
    documents = make_documents(model, longest)
    name = type(model).__name__
    with routes_kept(model) as routes:
        alone = _alone(model, documents, device)
    if not alone.isfinite().all():
        size, where = largest(dict(model.named_parameters()), ALONE)
        raise RuinedError(
            f"{name}: its hidden states are not finite, also with transformers' own attention: its weights are ruined. "
            f"The largest number among them is {size:.1e}, in {where}"
        )
    probe = Probe(documents, alone, routes)
    _compare_packed(model, probe, device)
    with _explained(f"{name} cannot be compared with its own logits"), plain_attention(model):
        # `output_hidden_states` is avoided: it leaves hooks in the layers, which break the graphs of compiled code.
        given = {"input_ids": documents[0][None].to(device), "use_cache": False}
        hidden, right = model.base_model(**given).last_hidden_state[0], model(**given).logits[0]
    ones = torch.ones(len(documents[0]), device=device)
    weight = model.get_output_embeddings().weight
    logits = scaled_logits(hidden, weight, ones, dataclasses.replace(head, fp32=True))
    _compare(f"{name}: the plain LM head gives other values", logits, right)
    return probe


def _compare_packed(model: Any, probe: Probe, device: torch.device) -> None:
    """Compare packed documents with each document alone. If they differ, give attention the keyword arguments that the
    model's code may have dropped, and compare again."""
    what = f"{type(model).__name__}: packed documents give other values"
    ways = handed.ways(model)
    while True:
        try:
            with routes_given(model, probe.routes) as apart:
                packed = _packed(model, probe.documents, device)
            return _compare(what, packed, probe.hidden, apart)
        except ModelError:
            way = next(ways, None)
            if way is None:
                raise
            way()


@torch.no_grad()
def probe_context(model: Any, probe: Probe, device: torch.device, context: Context) -> None:
    """Probe a float32 model with its tokens divided over context ranks. If a layer mixes tokens outside attention, it
    sees only this rank's tokens, and the probe fails."""
    name = type(model).__name__
    tokens = _tokens(probe.documents, context.size)
    given = routes_given(model, probe.routes, context.rank)
    with _explained(f"{name} cannot run with its tokens over {context.size} ranks"), given as apart:
        hidden = packed_hidden(model, tokens, device, context).float()
    alone = probe.hidden[context.run(len(tokens))]
    what = f"{name}: tokens over {context.size} ranks (parallel.context) give other values"
    _compare(what, hidden[: len(alone)], alone, apart)  # padding comes last


@torch.no_grad()
def probe_cut(model: Any, probe: Probe, device: torch.device, ranks: Ranks) -> None:
    """Probe a float32 model whose layers are cut over tensor ranks (its plan may be incomplete) or whose experts are
    divided. All of these ranks call this."""
    group, tokens = ranks.group("tensor"), len(probe.hidden)
    padding = torch.zeros(-tokens % ranks.tensor, dtype=torch.int64)
    documents = [*probe.documents, padding] if len(padding) else probe.documents
    cuts = {"tensor": "cut by its own plan", "expert": "with its experts over ranks"}
    options = [name for name in cuts if ranks.size_of(name) > 1]
    asked = " and ".join(f"parallel.{name}: {ranks.size_of(name)}" for name in options)
    what = f"{asked}: the layers of {type(model).__name__}, {' and '.join(cuts[name] for name in options)},"
    with _explained(f"{what} do not run"), routes_given(model, probe.routes, ranks.place_on("tensor")) as apart:
        hidden = packed_hidden(model, _tokens(documents), device).float()
    if group is not None:
        hidden = gather_same(hidden, group)
    _compare(f"{what} give other values", hidden[:tokens], probe.hidden, apart)


@torch.no_grad()
def probe_stages(model: Any, pipeline: Pipeline, probe: Probe, device: torch.device) -> Stages:
    """Divide a whole float32 model into stages, and check that running them in turn gives the same values."""
    tokens, name = _tokens(probe.documents), type(model).__name__
    with _explained(f"{name} cannot be cut into stages"):
        stages = stages_of(model, pipeline, lambda: packed_hidden(model, tokens, device))
        hidden = None
        for stage in range(pipeline.stages):
            hidden = stage_hidden(model, stages, stage, tokens, device, hidden)
    assert hidden is not None
    _compare(f"{name}: its layers in stages give other values", hidden, packed_hidden(model, tokens, device))
    return stages


@torch.no_grad()
def probe_half_precision(model: Any, probe: Probe, device: torch.device, dtype: torch.dtype) -> None:
    """Probe a float32 model rounded to half precision, then restore its float32 weights."""
    exact = [(parameter, parameter.data) for parameter in model.parameters()]
    for parameter, data in exact:
        parameter.data = data.to(dtype)
    try:
        with routes_kept(model) as routes:
            alone = _alone(model, probe.documents, device)
        allowed = HALF_PRECISION_FACTOR * _distance(alone, probe.hidden) + 1e-3
        with routes_given(model, routes):
            packed = _packed(model, probe.documents, device)
    finally:
        for parameter, data in exact:
            parameter.data = data
    what = f"{type(model).__name__}: packed in half precision gives other values"
    _compare(what, packed, probe.hidden, allowed=allowed)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert exceptions of a model's code to `ModelError`."""
    try:
        yield
    except TruestepError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


def _packed(model: Any, documents: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    with _explained(f"{type(model).__name__} cannot run packed documents, which have no attention mask"):
        return packed_hidden(model, _tokens(documents), device).float()


def _alone(model: Any, documents: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    with _explained(f"{type(model).__name__} cannot be compared with plain attention"), plain_attention(model):
        hidden = [
            model.base_model(input_ids=document[None].to(device), use_cache=False).last_hidden_state[0]
            for document in documents
        ]
    return torch.cat(hidden).float()


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest relative difference among tokens. An average could hide one short wrong document."""
    return _worst(differences(ours, theirs))


def _worst(found: torch.Tensor) -> float:
    if not len(found):
        return 0.0
    return float(found.max()) if not found.isnan().any() else float("nan")


def _compare(
    what: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    apart: Iterable[torch.Tensor] = (),
    allowed: float = FLOAT32_TOLERANCE,
) -> None:
    """Raise if hidden states differ, or routers' logits, by their relative differences `apart`."""
    difference = _worst(torch.cat([differences(ours, theirs), *(each.to(ours.device) for each in apart)]))
    if not difference <= allowed:
        raise ModelError(
            f"{what} than transformers does on the same document (relative difference {difference:.1e}, at most "
            f"{allowed:.0e}): training it would be wrong, so it is refused"
        )


def _tokens(documents: list[torch.Tensor], multiple: int = 1) -> PackedTokens:
    return pack_tokens([document.numpy() for document in documents], multiple)
