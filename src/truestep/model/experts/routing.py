"""Counts the experts that routers choose in a step, and adds the gradients of router loss terms.

A router is the model's own code. Our wrapper returns its results, counts the choices of the micro-batches' tokens
(without padding), and adds the gradient of the terms to its logits. The step's expert frequencies are counted first. A
term's gradient at a token then depends only on that token's logits, so it is computed inside the router, and the layout
of the step does not change it:

    balance = weight · (1/L) Σ_l E Σ_e f[l, e] · P[l, e]
    z loss  = weight · (1/L) Σ_l (1/T) Σ_t logsumexp(logits[l, t])²

f is each expert's share of a layer's choices, counted over the whole step and held constant. P is the mean of the
router's probabilities over the step's tokens. Probabilities are the softmax of the logits, or their sigmoids divided by
their sum.

A token's experts are those in its record if it has any (routing replay), else the router's own choice. Loads count the
experts that are computed. Biases move by the experts that the router itself would have chosen.

Dimensions: L layers with routers, T tokens of the step, S tokens of this rank's micro-batch, k experts of a token, E
experts.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from truestep.gpu.operators import operator
from truestep.model.experts.operators import ends_of
from truestep.types import RouteShape


@dataclass(frozen=True)
class ExpertSettings:
    """The options of `model.experts`."""

    replay: str = "auto"  # auto, off or require
    router: str = "trained"  # trained or frozen
    balance: str = "none"  # none, loss or bias
    strength: float = 0.001
    z_loss: float = 0.0

    @property
    def has_terms(self) -> bool:
        """Tell whether the loss has router terms."""
        return self.balance == "loss" or self.z_loss > 0

    @property
    def counted(self) -> list[tuple[str, object]]:
        """The names and values of options that need routers with counted choices."""
        balance = [("balance", self.balance)] if self.balance != "none" else []
        return balance + ([("z_loss", self.z_loss)] if self.z_loss else [])


@dataclass(frozen=True)
class RouterTerms:
    """The weights of the router terms, and the facts of the step that their gradients need."""

    balance: float
    z_loss: float
    tokens: int  # T
    divisor: float = 1.0  # the gradient is divided by this
    shares: Mapping[str, torch.Tensor] = field(default_factory=dict)  # f by layer, [E] float64; empty: no balance term


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of this rank's part of a micro-batch, without padding. They come first."""

    count: int
    sequences: torch.Tensor | None = None  # number of sequences that share each token; None: one each
    routes: torch.Tensor | None = None  # [S, L, k] experts from records, -1 without; None: no record has any


@dataclass(frozen=True)
class _Pass:
    tokens: OwnTokens
    counts: bool  # False: the pass is a recomputation for gradients, so choices are not counted again


class Routing:
    """The routers of a policy on this rank, and their sums over the step's micro-batches."""

    def __init__(
        self,
        layers: Mapping[str, int],
        settings: ExpertSettings = ExpertSettings(),
        biases: Mapping[str, tuple[str, torch.Tensor]] | None = None,
        shape: RouteShape | None = None,
    ):
        """`layers`: the number of experts of each layer with a router, on any rank, by the name of its experts' module.
        `biases`: for `balance: bias`, the name and values of each layer's bias. `shape`: the layers and experts that
        records must match; None: records' experts are ignored."""
        self.experts, self.settings, self.shape = dict(layers), settings, shape
        self._biases = dict(biases or {})
        self.terms: RouterTerms | None = None
        self.layers: dict[str, RoutedLayer] = {}  # the layers on this rank
        self._current: _Pass | None = None
        self._recorder: Recorder | None = None

    @property
    def replays(self) -> bool:
        """Tell whether tokens use the experts in their records."""
        return self.shape is not None

    def add(self, name: str, normalised: bool, device: torch.device) -> torch.Tensor:
        """Add a layer of this rank. Return its key, by which the operators find it."""
        layer = self.layers[name] = RoutedLayer(self, name, normalised, device)
        number = next(_numbers)
        _layers[number] = layer
        return torch.tensor(number)

    def begin(self, terms: RouterTerms | None) -> None:
        """Forget the sums of the last step, and set the terms of this one."""
        self.terms = terms
        for layer in self.layers.values():
            layer.begin()

    @contextmanager
    def passing(self, tokens: OwnTokens, counts: bool) -> Iterator[None]:
        """Count choices and add gradients within the block, which is a forward or backward pass of a micro-batch. A
        token that several sequences share counts once for each."""
        self._current = _Pass(tokens, counts)
        try:
            yield
        finally:
            self._current = None

    @contextmanager
    def recording(self, recorder: "Recorder") -> Iterator[None]:
        """Pass routers' choices to `recorder` within the block, with the layer's index among layers with routers."""
        before, self._recorder = self._recorder, recorder
        try:
            yield
        finally:
            self._recorder = before

    @property
    def biases(self) -> dict[str, torch.Tensor]:
        """The biases that `balance: bias` moves, by their names in the model."""
        return dict(self._biases.values())

    @torch.no_grad()
    def move_biases(self, counts: Mapping[str, torch.Tensor]) -> None:
        """Raise the bias of each expert that was chosen less often in the step than the layer's mean, and lower it
        where it was chosen more often."""
        for name, (_, bias) in self._biases.items():
            own = counts[name].to(bias.device)
            # Integers are compared, so that no layout can change the rounding of a mean.
            bias += self.settings.strength * (own.sum() - len(own) * own).sign().to(bias.dtype)

    @property
    def current(self) -> _Pass | None:
        return self._current

    @property
    def recorder(self) -> "Recorder | None":
        return self._recorder

    @property
    def counts(self) -> dict[str, torch.Tensor]:
        """How often each expert was computed, [E] int64 on the host, by layer of this rank."""
        return {name: layer.counts.cpu() for name, layer in self.layers.items()}

    @property
    def own_counts(self) -> dict[str, torch.Tensor]:
        """How often the routers themselves chose each expert, also for tokens whose records have other experts."""
        return {name: (layer.counts + layer.instead).cpu() for name, layer in self.layers.items()}

    def values(self) -> tuple[float, float]:
        """This rank's part of the balance term and of the z loss."""
        terms, layers = self.terms, self.layers.values()
        if terms is None:
            return 0.0, 0.0
        each = 1.0 / (len(self.experts) * max(terms.tokens, 1))
        balance = sum(
            float((layer.shares * layer.probabilities).sum()) * layer.experts
            for layer in layers
            if layer.shares is not None
        )
        return terms.balance * each * balance, terms.z_loss * each * sum(float(layer.squares) for layer in layers)


class RoutedLayer:
    """The sums of one layer's router."""

    def __init__(self, routing: Routing, name: str, normalised: bool, device: torch.device):
        """`normalised`: probabilities are sigmoids divided by their sum."""
        self._routing = weakref.ref(routing)
        self.name, self.experts, self._normalised = name, routing.experts[name], normalised
        self._place = list(routing.experts).index(name)  # index among all layers of the model with routers
        self.counts = torch.zeros(self.experts, dtype=torch.int64, device=device)
        self.probabilities = torch.zeros(self.experts, dtype=torch.float64, device=device)
        self.squares = torch.zeros((), dtype=torch.float64, device=device)
        # counts of the router's own choices minus those of replayed choices
        self.instead = torch.zeros_like(self.counts)
        # The numbers of replayed tokens, of replayed tokens whose router chose otherwise, and of replayed choices that
        # the router did not make.
        self.replayed = torch.zeros(3, dtype=torch.int64, device=device)
        self.shares: torch.Tensor | None = None

    def begin(self) -> None:
        for total in (self.counts, self.probabilities, self.squares, self.instead, self.replayed):
            total.zero_()
        terms = self.routing.terms
        shares = None if terms is None else terms.shares.get(self.name)
        self.shares = None if shares is None else shares.to(self.counts.device)

    @property
    def routing(self) -> Routing:
        routing = self._routing()
        assert routing is not None, "the routing of this model is gone"
        return routing

    def choose(self, own: torch.Tensor) -> torch.Tensor:  # [S, k]
        """Return the experts to compute, given the router's own choice."""
        recorder, now = self.routing.recorder, self.routing.current
        if recorder is not None:
            recorder(self._place, own)
        if now is None or now.tokens.routes is None:
            return own.clone()
        count, result = now.tokens.count, own.clone()
        named = now.tokens.routes[:count, self._place].to(own.dtype)
        known = named[:, 0] >= 0
        result[:count] = torch.where(known[:, None], named, own[:count])
        if now.counts:
            self._compare(own[:count], result[:count], known, now.tokens.sequences)
        return result

    def _compare(
        self, own: torch.Tensor, named: torch.Tensor, known: torch.Tensor, sequences: torch.Tensor | None
    ) -> None:
        """Count where the record's experts and the router's own choice differ."""
        times = known.long() if sequences is None else known * sequences
        # replayed experts that are not in the own choice
        others = (named[:, :, None] != own[:, None, :]).all(-1).sum(-1)
        self.replayed += torch.stack([times, times * (others > 0), times * others]).sum(1)
        if self.routing.settings.balance == "bias":
            for index, sign in ((own, 1), (named, -1)):
                each = (sign * times).repeat_interleave(index.shape[1])
                self.instead.index_add_(0, index.flatten().long(), each)

    def see(self, logits: torch.Tensor, index: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """Add to the sums, and write the gradient of the router terms."""
        now, terms = self.routing.current, self.routing.terms
        if now is None:
            return
        count, sequences = now.tokens.count, now.tokens.sequences
        if now.counts:
            chosen = index[:count]
            if sequences is None:
                ends = ends_of(chosen.flatten().int().sort()[0], self.experts)
                self.counts += ends.diff(prepend=ends.new_zeros(1))
            else:
                self.counts.index_add_(0, chosen.flatten().long(), sequences.repeat_interleave(chosen.shape[1]))
        if terms is None or gradient is None:
            return
        z = logits[:count]
        z = z if z.dtype == torch.float64 else z.float()
        sums = z.logsumexp(-1, keepdim=True)
        softmax = (z - sums).exp()
        scores = z.sigmoid()
        p = scores / scores.sum(-1, keepdim=True) if self._normalised else softmax
        times = z.new_ones(1) if sequences is None else sequences.to(z.dtype)[:, None]
        if now.counts:
            self.probabilities += (p * times).sum(0, dtype=torch.float64)
            self.squares += (sums.square() * times).sum(dtype=torch.float64)
        each = 1.0 / (len(self.routing.experts) * max(terms.tokens, 1) * terms.divisor)
        found = 2 * terms.z_loss * each * sums * softmax
        if self.shares is not None:
            slopes = (terms.balance * each * self.experts * self.shares).to(z.dtype)
            inner = p * (slopes - (p * slopes).sum(-1, keepdim=True))
            # d(s_e / Σ s)/dz_j = (δ_ej p_e - p_e p_j) (1 - s_j): the softmax's derivative times one minus the sigmoid.
            found = found + (inner * (1 - scores) if self._normalised else inner)
        gradient[:count] = found * times


# Takes a layer's index among layers with routers, and its choices [T, k].
Recorder = Callable[[int, torch.Tensor], None]

_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, RoutedLayer] = weakref.WeakValueDictionary()


@operator("experts_chosen(Tensor index, Tensor number) -> Tensor", lambda index, number: torch.empty_like(index))
@torch.no_grad()
def experts_chosen(index: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the experts to compute, given a router's own choice. It is an operator, so that compiled code calls it
    each time."""
    layer = _layers.get(int(number))
    return index.clone() if layer is None else layer.choose(index)


def _shapes(
    scores: torch.Tensor, logits: torch.Tensor, index: torch.Tensor, number: torch.Tensor, terms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(scores), torch.empty_like(logits) if terms else logits.new_empty(0)


@operator(
    "routes_seen(Tensor scores, Tensor logits, Tensor index, Tensor number, bool terms) -> (Tensor, Tensor)", _shapes
)
@torch.no_grad()
def routes_seen(
    scores: torch.Tensor, logits: torch.Tensor, index: torch.Tensor, number: torch.Tensor, terms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count a router's choices. Return its scores, so that the compiler does not remove the call, and the gradient of
    the router terms with respect to its logits (empty without `terms`)."""
    layer = _layers.get(int(number))
    gradient = torch.zeros_like(logits) if terms else logits.new_empty(0)
    if layer is not None:
        layer.see(logits, index, gradient if terms else None)
    return scores.clone(), gradient


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(saved: Any, scores: Any, logits: Any, index: Any, number: Any, terms: bool) -> torch.Tensor:
        found, gradient = torch.ops.truestep.routes_seen(scores, logits, index, number, terms)
        saved.terms = terms
        saved.save_for_backward(gradient)
        result: torch.Tensor = found
        return result

    @staticmethod
    def backward(saved: Any, gradient: torch.Tensor) -> Any:
        (of_terms,) = saved.saved_tensors
        return gradient, of_terms if saved.terms else None, None, None, None


@torch.compiler.allow_in_graph
def seen(scores: Any, logits: Any, index: Any, number: Any, terms: bool) -> Any:
    """Return a router's scores unchanged, count its choices, and add the gradient of the router terms to its logits."""
    return _Seen.apply(scores, logits, index, number, terms)
