"""The policy: hidden states of packed documents, and the head's weight and settings.

Dimensions: S tokens of the micro-batch, H hidden, V vocabulary.
"""

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
from truestep.model.fast.activation_offload import ActivationOffload
from truestep.model.heads import HeadSizes
from truestep.model.mixers import attention
from truestep.model.mixers.context_parallel import Context
from truestep.ranks.exchange import TokenExchange, gather_same
from truestep.ranks.pipeline import Pipeline
from truestep.types import PackedTokens
from truestep.weights.layers import active_weights
from truestep.weights.pieces import slice_of
from truestep.weights.protocol import Weights

# Attention's operations take this many times as long on a GPU as those of products, where nothing was measured (H200,
# long documents: 300 against 744 TFLOP/s). It decides how evenly work is spread and no result.
ATTENTION_SLOWNESS = 2.5


@dataclass(frozen=True)
class ModelFacts:
    """Facts of the uncut model, of which a rank may have a part only."""

    vocabulary_size: int
    tied: bool  # the head is the input embedding
    even_length: float  # tokens of a document at which its attention costs as much as its matrix products
    device: torch.device
    weights: float = 0.0  # that a token is multiplied with, the head's not among them
    head_weights: int = 0
    attention: int = 0  # layers x heads x head size
    untrained: float = 0.0  # of `weights`: those that have no gradient
    head_trained: bool = True

    @staticmethod
    def of(model: Any, device: torch.device) -> "ModelFacts":
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights, untrained = active_weights(model, model), active_weights(model, model, trained=False)
        if head is not embedding:
            weights -= embedding.numel()  # a tied matrix multiplies, once, as the head
            untrained -= 0 if embedding.requires_grad else embedding.numel()
        untrained -= 0 if head.requires_grad else head.numel()
        # Causal, forward: 2 · L · heads · E a token and layer against 2 a weight.
        attention = model.config.get_text_config().num_hidden_layers * HeadSizes.of(model.config).width
        even_length = weights / (attention * (ATTENTION_SLOWNESS if device.type == "cuda" else 1.0))
        counts = (weights - head.numel(), head.numel(), attention, untrained, head.requires_grad)
        return ModelFacts(head.shape[0], head is embedding, even_length, device, *counts)

    def measured(self, attention_slowness: float) -> "ModelFacts":
        """Put what was measured on a GPU in the place of `ATTENTION_SLOWNESS`."""
        return replace(self, even_length=self.even_length * ATTENTION_SLOWNESS / attention_slowness)


@dataclass(eq=False)
class Policy:
    model: Any  # a transformers causal LM; its own classes carry no useful types
    path: Path  # the Hugging Face directory that it was read from
    head: HeadSettings
    weights: Weights
    facts: "ModelFacts"
    tokenizer: Any = None
    companions: Mapping[str, bytes] = field(default_factory=dict)  # the directory's other files, by name
    stages: Stages | None = None  # how it is cut; None: all of it is here
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of all its layers, where some are elsewhere
    attends: attention.Choice = attention.BY_TORCH
    adapter: Adapter | None = None  # then it alone is trained
    adapts: bool = True  # False: it computes without its adapter
    activations_on_host: ActivationOffload | None = None
    exchange: TokenExchange | None = None  # of the tensor ranks that it is cut over

    @property
    def device(self) -> torch.device:
        return self.facts.device

    @property
    def vocabulary_size(self) -> int:
        return self.facts.vocabulary_size

    @property
    def head_weight(self) -> torch.nn.Parameter:  # [V, H]
        """The head's weight. Where weights are sharded, it has its values inside `Weights.head` and `gathered` only."""
        module = self.model.get_input_embeddings() if self.facts.tied else self.model.get_output_embeddings()
        return module.weight

    @property
    def context(self) -> Context | None:
        """The ranks that share a micro-batch's tokens; None: all of them are here."""
        return Context.of(self.weights.ranks)

    @property
    def vocabulary_shard(self) -> VocabularyShard | None:
        """The slice of the head's weight that this tensor rank has; None: all of it."""
        ranks = self.weights.ranks
        group = ranks.group("tensor")
        return None if group is None else VocabularyShard(group, *slice_of(self.vocabulary_size, ranks, "tensor"))

    def hidden(self, tokens: PackedTokens) -> torch.Tensor:  # [S, H], or of this context rank's tokens
        """Compute the last hidden state of every token of a packed micro-batch, with its graph."""
        return self.through(0, tokens, None)

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline() if self.stages is None else self.stages.pipeline

    def through(self, stage: int, tokens: PackedTokens, received: torch.Tensor | None) -> torch.Tensor:  # [S, H]
        """Run a stage that is here on a packed micro-batch and on the hidden states that the stage before gave.

        Between stages, each rank has its own tokens. The last stage gathers them, so that tensor ranks all have their
        context rank's; each of them must be given the full gradient."""
        with nullcontext() if self.adapter is None or self.adapts else self.adapter.off(), self._keeping():
            if self.stages is None:
                hidden = packed_hidden(self.model, tokens, self.device, self.context)
            else:
                hidden = stage_hidden(self.model, self.stages, stage, tokens, self.device, received, self.context)
        return hidden if stage < self.pipeline.last else self._all_tokens(hidden)

    def hidden_alone(self, tokens: PackedTokens) -> torch.Tensor:  # [S, H]
        """Compute what `hidden` does where context ranks may have other tokens, or none: all of these are here."""
        return self._all_tokens(packed_hidden(self.model, tokens, self.device))

    def _all_tokens(self, own: torch.Tensor) -> torch.Tensor:
        return own if self.exchange is None else gather_same(own, self.exchange.group)

    def _keeping(self) -> AbstractContextManager[None]:
        """Have what is saved for a backward pass kept where it is to lie."""
        if self.activations_on_host is None or not torch.is_grad_enabled():
            return nullcontext()
        return self.activations_on_host.keeping(self.model.config.get_text_config().hidden_size)

    def without_adapter(self) -> "Policy":
        """Give the model that the adapter was put on, on the very same weights."""
        return replace(self, adapts=False)

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [C, H] -> [C, V]
        """Compute a few rows of the logits of the whole vocabulary, on every tensor rank; nothing has a gradient."""
        own, shard = self.own_logits(hidden), self.vocabulary_shard
        return own if shard is None else shard.whole(own, self.vocabulary_size)

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:  # [C, H] -> [C, tokens of `vocabulary_shard`]
        """Compute a few rows of the logits of this tensor rank's slice of the vocabulary."""
        return raw_logits(hidden, self.head_weight, self.head.fp32)

    def tokens_everywhere(self) -> AbstractContextManager[None]:
        """Have tensor ranks compute all tokens together, inside, as they do while they sample."""
        return nullcontext() if self.exchange is None else self.exchange.everywhere()

    def plain_attention(self) -> AbstractContextManager[None]:
        return plain_attention(self.model)


def packed_hidden(
    model: Any,
    tokens: PackedTokens,
    device: torch.device,
    context: Context | None = None,
    embedded: torch.Tensor | None = None,
) -> torch.Tensor:  # [S, H], or of the tokens that are here
    """Run the model's body. `embedded`, like the result, takes the place of an embedding that is elsewhere."""
    layout = attention.make_layout(tokens.segments, device, context)
    end = int(tokens.segments[tokens.num_documents])
    # Whatever stands in the padding is replaced here: an id outside the vocabulary must not reach the embedding.
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
) -> torch.Tensor:  # [S, H], or of the tokens that are here
    nothing = None if received is None else received.detach().new_zeros(1, 1).expand_as(received)
    with stages.opened(stage, received) as output:
        hidden = packed_hidden(model, tokens, device, context, nothing)
    return hidden if output is None else output.hidden[0]


@contextmanager
def plain_attention(model: Any) -> Iterator[None]:
    """Use transformers' own attention, which knows caches and batches of rows: for decoding and for the probe."""
    # sdpa has no softcap.
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    with attention.using(model, "eager" if capped else "sdpa"):
        yield
