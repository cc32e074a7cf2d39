"""The policy: hidden states of packed documents, and the head's weight and settings.

Dimensions: S tokens of the micro-batch, H hidden, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from truestep.head.logits import HeadSettings, raw_logits
from truestep.head.vocab_parallel import VocabularyShard
from truestep.model.adapter import Adapter
from truestep.model.cuts.stages import Stages
from truestep.model.experts.routing import OwnTokens, Routing
from truestep.model.fast.activation_offload import ActivationOffload
from truestep.model.heads import HeadSizes, attending_layers
from truestep.model.mixers import attention, linear_kernels
from truestep.model.mixers.context_parallel import Context
from truestep.ranks.exchange import TokenExchange, gather_same
from truestep.ranks.pipeline import Pipeline
from truestep.types import NO_ROUTES, ROUTES, PackedTokens, RouteShape
from truestep.weights.layers import active_weights
from truestep.weights.pieces import slice_of
from truestep.weights.protocol import Weights

# The assumed time per FLOP of attention on a GPU, as a multiple of that of matrix products, until it is measured (H200,
# long documents: 300 against 744 TFLOP/s). It only affects how evenly work is balanced.
ATTENTION_SLOWNESS = 2.5


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the uncut model; a rank may hold only a part of it."""

    vocabulary_size: int
    tied: bool  # whether the head and the input embedding share one weight
    even_length: float  # document length, in tokens, at which attention costs as much as the matrix products
    device: torch.device
    weights: float = 0.0  # number of weights that each token is multiplied with, without the head's
    head_weights: int = 0
    attention: int = 0  # sum over attention layers of heads x head size
    untrained: float = 0.0  # how many of `weights` are frozen
    head_trained: bool = True

    @staticmethod
    def of(model: Any, device: torch.device) -> "ModelFacts":
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights, untrained = active_weights(model, model), active_weights(model, model, trained=False)
        if head is not embedding:
            weights -= embedding.numel()  # a lookup, not a product; a tied matrix is multiplied once, as the head
            untrained -= 0 if embedding.requires_grad else embedding.numel()
        untrained -= 0 if head.requires_grad else head.numel()
        # FLOPs of a causal forward pass: 2 · length · heads · head size per token and layer, against 2 per weight. A
        # recurrent layer's own work grows linearly with the length, and is small compared with its products.
        widths = [sizes.width for sizes in HeadSizes.of_layers(model.config)]
        attention = attending_layers(model.config) * sum(widths) // len(widths)
        slowness = ATTENTION_SLOWNESS if device.type == "cuda" else 1.0
        even_length = weights / (attention * slowness) if attention else math.inf
        counts = (weights - head.numel(), head.numel(), attention, untrained, head.requires_grad)
        return ModelFacts(head.shape[0], head is embedding, even_length, device, *counts)

    def measured(self, attention_slowness: float) -> "ModelFacts":
        """Return the facts with a measured value in place of `ATTENTION_SLOWNESS`."""
        return replace(self, even_length=self.even_length * ATTENTION_SLOWNESS / attention_slowness)


@dataclass(eq=False)
class Policy:
    model: Any  # a transformers causal LM; transformers' classes have no useful type annotations
    path: Path  # the Hugging Face directory that the model was read from
    head: HeadSettings
    weights: Weights
    facts: "ModelFacts"
    tokenizer: Any = None
    companions: Mapping[str, bytes] = field(default_factory=dict)  # the directory's other files, by name
    stages: Stages | None = None  # the pipeline stages; None: this rank has all layers
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # all layers' buffers; empty without a pipeline
    attends: attention.AttentionKernel = attention.BY_TORCH
    recurs: linear_kernels.Kernels = linear_kernels.BY_TORCH
    adapter: Adapter | None = None  # if set, only the adapter is trained
    adapts: bool = True  # False: the adapter is off
    activations_on_host: ActivationOffload | None = None
    routing: Routing | None = None  # routers' counts and loss terms; None: no counted router
    route_shape: RouteShape = NO_ROUTES  # the layers and number of experts per token that records may set
    exchange: TokenExchange | None = None  # communication between tensor ranks; None without tensor parallelism

    @property
    def device(self) -> torch.device:
        return self.facts.device

    @property
    def vocabulary_size(self) -> int:
        return self.facts.vocabulary_size

    @property
    def head_weight(self) -> torch.nn.Parameter:  # [V, H]
        """The head's weight. If weights are sharded, its values exist only inside `Weights.head` and `gathered`."""
        module = self.model.get_input_embeddings() if self.facts.tied else self.model.get_output_embeddings()
        return module.weight

    @property
    def context(self) -> Context | None:
        """The ranks that share a micro-batch's tokens; None: this rank has all tokens."""
        return Context.of(self.weights.ranks)

    @property
    def vocabulary_shard(self) -> VocabularyShard | None:
        """This tensor rank's slice of the head's weight; None: the rank has the whole weight."""
        ranks = self.weights.ranks
        group = ranks.group("tensor")
        return None if group is None else VocabularyShard(group, *slice_of(self.vocabulary_size, ranks, "tensor"))

    def own_tokens(self, tokens: PackedTokens) -> OwnTokens:
        """Describe this rank's tokens of a micro-batch, which must be on the device."""
        end, here = tokens.num_tokens, slice(0, len(tokens))
        if self.context is not None:
            here = self.context.run(len(tokens))
        start, size = slice_of(here.stop - here.start, self.weights.ranks, "tensor")
        here = slice(here.start + start, here.start + start + size)
        count = min(max(end - here.start, 0), here.stop - here.start)
        sequences, routes = tokens.sequences, tokens.fields_of(here).get(ROUTES)
        return OwnTokens(count, None if sequences is None else sequences[here][:count], routes)

    def replaying(self, tokens: PackedTokens, run: slice | None = None) -> AbstractContextManager[None]:
        """Return a context in which tokens use the experts in their records, and nothing is counted. `run`: the part of
        the tokens that is computed; None: all."""
        if self.routing is None:
            return nullcontext()
        own = self.own_tokens(tokens)
        if run is not None:
            own = OwnTokens(run.stop - run.start, routes=None if own.routes is None else own.routes[run])
        return self.routing.passing(own, counts=False)

    @property
    def token_fields(self) -> tuple[str, ...]:
        """The names of the per-token fields that the model reads."""
        return (ROUTES,) if self.routing is not None and self.routing.replays else ()

    def hidden(self, tokens: PackedTokens) -> torch.Tensor:  # [S, H], or this context rank's tokens
        """Compute the last hidden states of a packed micro-batch, with the autograd graph."""
        return self.through(0, tokens, None)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline() if self.stages is None else self.stages.pipeline

    def through(self, stage: int, tokens: PackedTokens, received: torch.Tensor | None) -> torch.Tensor:  # [S, H]
        """Run one of this rank's stages on a packed micro-batch and the hidden states received from the stage before.

        Between stages, each tensor rank has a contiguous part of the tokens. The last stage gathers the tokens, so that
        every tensor rank has all tokens of its context rank; the caller must give each tensor rank the full gradient.
        """
        with nullcontext() if self.adapter is None or self.adapts else self.adapter.off(), self._keeping():
            if self.stages is None:
                hidden = packed_hidden(self.model, tokens, self.device, self.context)
            else:
                hidden = stage_hidden(self.model, self.stages, stage, tokens, self.device, received, self.context)
        return hidden if stage < self.pipeline.last else self._all_tokens(hidden)

    def hidden_alone(self, tokens: PackedTokens, routes: torch.Tensor | None = None) -> torch.Tensor:  # [S, H]
        """Compute the last hidden states of all tokens on this rank, without the other context ranks. `routes`: the
        experts of the tokens [T, L, k]; None: the routers' own choice."""
        replaying: AbstractContextManager[None] = nullcontext()
        if routes is not None and self.routing is not None:
            start, size = slice_of(len(tokens), self.weights.ranks, "tensor")
            own = routes[start : start + size]
            replaying = self.routing.passing(OwnTokens(len(own), routes=own), counts=False)
        with replaying:
            return self._all_tokens(packed_hidden(self.model, tokens, self.device))

    def _all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        return own if self.exchange is None else gather_same(own, self.exchange.group)

    def _keeping(self) -> AbstractContextManager[None]:
        """Return a context in which activations saved for the backward pass go to the host, if that is configured."""
        if self.activations_on_host is None or not torch.is_grad_enabled():
            return nullcontext()
        return self.activations_on_host.keeping(self.model.config.get_text_config().hidden_size)

    def without_adapter(self) -> "Policy":
        """Return the policy with its adapter off, sharing the same weights. It uses its routers' own choices, not those
        in records."""
        return replace(self, adapts=False, routing=None)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [C, H] -> [C, V]
        """Compute logits over the whole vocabulary on every tensor rank, without gradients."""
        own, shard = self.own_logits(hidden), self.vocabulary_shard
        return own if shard is None else shard.whole(own, self.vocabulary_size)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [C, H] -> [C, tokens of `vocabulary_shard`]
        """Compute logits over this tensor rank's slice of the vocabulary."""
        return raw_logits(hidden, self.head_weight, self.head.fp32)

    def tokens_everywhere(self) -> AbstractContextManager[None]:
        """Return a context in which every tensor rank keeps all tokens between layers, as in sampling."""
        return nullcontext() if self.exchange is None else self.exchange.everywhere()

    def plain_attention(self) -> AbstractContextManager[None]:
        return plain_attention(self.model)


def packed_hidden(
    model: Any,
    tokens: PackedTokens,
    device: torch.device,
    context: Context | None = None,
    embedded: torch.Tensor | None = None,
) -> torch.Tensor:  # [S, H], or this rank's tokens
    """Run the model's body. `embedded`, in the shape of the result, replaces the input embedding; for stages without
    the embedding."""
    layout = attention.make_layout(tokens.segments, device, context, parents=tokens.parents)
    end = tokens.num_tokens
    # Set padding to 0: an id outside the vocabulary must not reach the embedding.
    inside = torch.arange(len(tokens), device=device) < end
    input_ids = torch.where(inside, tokens.input_ids.to(device), 0)
    position_ids = torch.where(inside, tokens.position_ids.to(device), 0)
    if context is not None:
        here = context.run(len(input_ids))
        input_ids, position_ids = input_ids[here], position_ids[here]
    output = model.base_model(
        input_ids=input_ids[None] if embedded is None else None,
        inputs_embeds=None if embedded is None else embedded[None],
        position_ids=position_ids[None],
        attention_mask=None,
        use_cache=False,
        packed_layout=layout,
    )
    return output.last_hidden_state[0]


def stage_hidden(
    model: Any,
    stages: Stages,
    stage: int,
    tokens: PackedTokens,
    device: torch.device,
    received: torch.Tensor | None,
    context: Context | None = None,
) -> torch.Tensor:  # [S, H], or this rank's tokens
    """Run one pipeline stage of the model's body. `received`: the hidden states from the stage before; None: the first
    stage."""
    nothing = None if received is None else received.detach().new_zeros(1, 1).expand_as(received)
    with stages.opened(stage, received) as output:
        hidden = packed_hidden(model, tokens, device, context, nothing)
    return hidden if output is None else output.hidden[0]


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Use transformers' own attention within the block; decoding and the probes need its KV cache and batches."""
    # transformers' sdpa supports neither softcap nor sinks.
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    with attention.using(model, "sdpa" if model._supports_sdpa and not capped else "eager"):
        yield
