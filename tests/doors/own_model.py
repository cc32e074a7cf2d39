"""A user's architecture, as it comes with a model's directory: attention and MLP side by side behind one norm, a
squared ReLU, and waves for positions. It calls the attention that transformers names, with all that it is passed.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(
        self,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        shift=0.0,
        **options,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.shift = shift  # how much of the token before is mixed into each: outside attention
        options.setdefault("tie_word_embeddings", False)
        super().__init__(**options)


def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **unused):
    scores = (query @ key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, :, : key.shape[-2]]
    return (scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value).transpose(1, 2).contiguous(), None


class OwnLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        hidden, inner = config.hidden_size, config.intermediate_size
        self.norm = nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, hidden_states, attention_mask=None, **passed_on):
        normed = self.norm(hidden_states)
        if self.config.shift:
            normed = normed + self.config.shift * nn.functional.pad(normed, (0, 0, 1, 0))[:, :-1]
        shape = (*normed.shape[:-1], self.config.num_attention_heads, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.qkv(normed).chunk(3, dim=-1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        scaling = query.shape[-1] ** -0.5
        attended, _ = attend(self, query, key, value, attention_mask, scaling=scaling, **passed_on)
        wide = self.up(normed).relu().square()
        return hidden_states + self.out(attended.reshape(normed.shape)) + self.down(wide)


class OwnPreTrainedModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": OwnLayer}  # noqa: RUF012


class OwnModel(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OwnLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None, **passed_on
    ):
        output_hidden_states = passed_on.pop("output_hidden_states", False)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        waves = torch.arange(hidden.shape[-1], device=hidden.device).to(hidden.dtype) + 1
        hidden = hidden + 0.3 * torch.sin(position_ids[..., None].to(hidden.dtype) / waves)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        states = [hidden]
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, **passed_on)
            states.append(hidden)
        hidden = states[-1] = self.norm(hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, hidden_states=tuple(states) if output_hidden_states else None
        )


class OwnForCausalLM(OwnPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **passed_on):
        output = self.model(input_ids=input_ids, **passed_on)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state), hidden_states=output.hidden_states)
