"""A user's architecture whose even layers keep a state: a running mean with a gate, h = f · h + (1 - f) · x, in a
function of this module that `RunningMean` computes for packed documents. Odd layers attend. The code comes with a
model's directory.
"""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from truestep.model.mixers import LayerState, Recurrence, register


class RecurrentConfig(PretrainedConfig):
    model_type = "own_recurrent"

    def __init__(
        self,
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        known=True,
        **options,
    ):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.known = known  # False: the layers call a function that is not registered
        options.setdefault("tie_word_embeddings", False)
        super().__init__(**options)


def running_mean(values, gates, **unused):  # [1, S, H], [1, S, H] -> [1, S, H]
    state, rows = torch.zeros_like(values[:, 0]), []
    for value, gate in zip(values.unbind(1), gates.unbind(1), strict=True):
        state = gate * state + (1 - gate) * value
        rows.append(state)
    return torch.stack(rows, dim=1)


def unknown_mean(values, gates, **unused):
    return running_mean(values, gates)


class RunningMean(Recurrence):
    def state(self, call):
        return LayerState((call.values.shape[-1],), call.values.dtype)

    def packed(self, call, segments, longest, spans, initial):
        outputs, states = [], []
        for document, (start, end) in enumerate(spans):
            state = torch.zeros_like(call.values[0, 0]) if initial is None else initial[document]
            for value, gate in zip(call.values[0, start:end], call.gates[0, start:end], strict=True):
                state = gate * state + (1 - gate) * value
                outputs.append(state)
            states.append(state)
        return torch.stack(outputs)[None], torch.stack(states)

    def step(self, call, states):
        states = call.gates[0] * states + (1 - call.gates[0]) * call.values[0]
        return states[None], states

    def exchanged(self, call, context):
        values, gates = context.tokens_for_shares(call.values[0], call.gates[0])
        call = call.replaced(values=values[None], gates=gates[None])
        return call, lambda output: context.heads_for_tokens(output[0])[None]


register("running_mean", RunningMean())


def eager(module, query, key, value, attention_mask, scaling, dropout=0.0, **unused):
    scores = (query @ key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, :, : key.shape[-2]]
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


class Attention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask=None, **passed_on):
        shape = (*hidden_states.shape[:-1], self.config.num_attention_heads, -1)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in self.qkv(hidden_states).chunk(3, dim=-1))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        attended, _ = attend(
            self, query, key, value, attention_mask, scaling=query.shape[-1] ** -0.5, dropout=0.0, **passed_on
        )
        return attended.reshape(hidden_states.shape)


class Mean(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.known = config.known
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states):  # what the layer is passed does not reach it
        values, gates = self.value(hidden_states), self.gate(hidden_states).sigmoid()
        return running_mean(values, gates) if self.known else unknown_mean(values, gates)


class RecurrentLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attends = layer_idx % 2 == 1
        self.mixer = Attention(config, layer_idx) if self.attends else Mean(config)
        self.out = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, attention_mask=None, **passed_on):
        normed = self.norm(hidden_states)
        mixed = self.mixer(normed, attention_mask, **passed_on) if self.attends else self.mixer(normed)
        return hidden_states + self.out(mixed)


class RecurrentPreTrainedModel(PreTrainedModel):
    config_class = RecurrentConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class RecurrentModel(RecurrentPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RecurrentLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, use_cache=None, **passed_on
    ):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, **passed_on)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class RecurrentForCausalLM(RecurrentPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, **passed_on):
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(input_ids=input_ids, **passed_on)[0]))
