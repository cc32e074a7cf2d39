"""Attention that computes queries, keys and values as one product, and norm of heads and RoPE in one kernel.

Most model families have this form: projections `q_proj`, `k_proj` and `v_proj`, optional norms of queries and keys,
RoPE that rotates the first half of a head with the second half, the attention function, `o_proj`.

Dimensions: S tokens, H hidden, A heads of one kind, E head size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from truestep.model.fast import rms_norm
from truestep.model.fast.by_class import acts, is_product, put_in
from truestep.model.fast.fused_attention_gradient import heads_of
from truestep.model.fast.fused_products import products_of
from truestep.model.fast.gradient_accumulation import products
from truestep.model.fast.rope import rotated

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values, each [1, A, S, E]

RECORD = "truestep_record"
_TOKENS = 5  # in the comparison with a module's own forward pass


class FusedAttention(torch.nn.Module):
    q_proj: torch.nn.Linear
    k_proj: torch.nn.Linear
    v_proj: torch.nn.Linear
    o_proj: torch.nn.Linear
    config: Any
    head_dim: int
    constants: dict[str, Any]  # the options that the module passes to its attention function, such as the scale
    head_norms: list[Any]  # norms of queries and of keys; empty without norms
    norm_form: int | None  # the norms' index in `rms_norm.FORMS`; None: no norms, or no such form
    epsilons: list[float]
    joins: bool  # the three products have no bias and can be joined
    # keys of the weights in the table of gradient buffers: the three products', then the norms'; None: autograd
    # computes gradients
    numbers: torch.Tensor | None

    def forward(self, *given: Any, **named: Any) -> Any:
        ours = acts() and self.joins and not given and named.get("past_key_values") is None
        ours = ours and named.get("position_embeddings") is not None  # some modules have no RoPE
        if ours and not torch.is_grad_enabled():
            heads = self.sampled_heads(named["hidden_states"], *named["position_embeddings"])
            return self.attend(heads, **named)
        if ours and self.numbers is not None and named["hidden_states"].requires_grad:
            heads = self.trained_heads(self.numbers, named["hidden_states"], *named["position_embeddings"])
            return self.attend(heads, **named)
        return super().forward(*given, **named)

    def attend(
        self,
        heads: Heads,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: None = None,
        **named: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Attend with these queries, keys and values. The other arguments are the module's own."""
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, scores = function(self, *heads, attention_mask, **self.constants, **named)
        return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1).contiguous()), scores

    @property
    def inner(self) -> tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj

    def sampled_heads(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Heads:
        rows, parts = products_of(x, self.inner)
        if rows is None or (self.head_norms and self.norm_form is None):
            return self.plain_heads(parts, cosine, sine)
        counts = [part.shape[-1] // self.head_dim for part in parts[:2]]
        weights = [norm.weight for norm in self.head_norms]
        offset = float(self.norm_form == rms_norm.FROM_ONE)
        made = torch.ops.truestep.norm_rope(rows, counts, weights, self.epsilons, offset, cosine, sine)
        query, key = made[None].transpose(1, 2).split(counts, 1)
        return query, key, self.by_heads(parts[2]).transpose(1, 2)

    def trained_heads(self, numbers: torch.Tensor, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> Heads:
        weights = [module.weight.detach() for module in (*self.inner, *self.head_norms)]
        if self.head_norms and len(numbers) == len(weights):
            made: Heads = heads_of(x, cosine, sine, numbers, self.epsilons, self.norm_form, *weights)
            return made
        return self.plain_heads(products(x, numbers, *weights[:3])[:3], cosine, sine)

    def plain_heads(self, parts: Sequence[torch.Tensor], cosine: torch.Tensor, sine: torch.Tensor) -> Heads:
        """Make queries, keys and values from the three products as the model's own code does."""
        made = [self.by_heads(part) for part in parts]
        for place, norm in enumerate(self.head_norms):
            made[place] = norm(made[place])
        query, key, value = (part.transpose(1, 2) for part in made)
        cosine, sine = cosine[:, None], sine[:, None]
        return rotated(query, cosine, sine), rotated(key, cosine, sine), value

    def by_heads(self, part: torch.Tensor) -> torch.Tensor:
        return part.unflatten(-1, (-1, self.head_dim))


def fuse_attention(module: Any) -> None:
    """Replace a module's class if it is an attention that computes what `FusedAttention` computes: it must pass the
    same bits to its attention function, and give the same output. The model must use the attention `RECORD`."""
    inner: list[Any] = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    size = getattr(module, "head_dim", None)
    if not all(is_product(layer) for layer in inner) or not isinstance(size, int) or not hasattr(module, "o_proj"):
        return
    own = [norm for name in ("q_norm", "k_norm") if (norm := getattr(module, name, None)) is not None]
    found = [rms_norm.form_of(norm) for norm in own]
    known = [form for form in found if form is not None]
    same = len(own) == len(known) == 2 and known[0][1] == known[1][1]
    before = type(module)
    put_in(
        module,
        FusedAttention,
        head_norms=own,
        norm_form=known[0][1] if same else None,
        epsilons=[epsilon for epsilon, _ in known] if same else [],
        constants={},
        joins=all(layer.bias is None for layer in inner),
        numbers=None,
    )
    if len(own) not in (0, 2) or not _computes_the_same(module):
        module.__class__ = before


@torch.no_grad()
def _computes_the_same(module: Any) -> bool:
    """Compare a module's own forward pass with ours. The attention function `RECORD` records its arguments."""
    generator = torch.Generator().manual_seed(0)
    like = module.q_proj.weight
    x = torch.randn(1, _TOKENS, module.q_proj.in_features, generator=generator).to(like)
    turns = tuple(torch.randn(1, _TOKENS, module.head_dim, generator=generator).to(like) for _ in range(2))
    named = {"hidden_states": x, "position_embeddings": turns, "attention_mask": None}
    theirs: list[Any] = []
    ours: list[Any] = []
    try:
        expected = super(FusedAttention, module).forward(**named, record=theirs)
        *right, module.constants = theirs
        heads = module.plain_heads([layer(x) for layer in module.inner], *turns)
        found = module.attend(heads, **named, record=ours)
    except Exception:  # not an attention of this form, although it has these attributes
        return False
    known = all(value is None or isinstance(value, int | float | str) for value in module.constants.values())
    pairs = zip((*right, expected[0]), (*ours[:-1], found[0]), strict=True)
    return known and all(_same(*pair) for pair in pairs)


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return one is other
    return torch.equal(one, other) and bool(one.any())


def _record(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, record: list[Any], **named: Any
) -> tuple[torch.Tensor, None]:
    record.extend((query, key, value, mask, named))
    return query.transpose(1, 2), None


AttentionInterface.register(RECORD, _record)
