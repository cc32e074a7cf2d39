"""A user's recurrent layer, as it comes with a model's directory: each channel keeps a moving average of what it saw,
with a rate that depends on the token. The layer behind it attends. `register` tells truestep how the operation is
computed for packed documents and one token at a time.
"""

import torch
from torch import nn

from truestep.model.mixers import Call, LayerState, Recurrence, register

from .own_model import OwnForCausalLM, OwnModel


def moving_average(values, rates, **passed_on):  # [1, S, C], [1, S, C] -> [1, S, C]
    state, averages = torch.zeros_like(values[:, 0]), []
    for value, rate in zip(values.unbind(1), rates.unbind(1), strict=True):
        state = state + rate * (value - state)
        averages.append(state)
    return torch.stack(averages, dim=1)


class MovingAverage(Recurrence):
    def state(self, call: Call) -> LayerState:
        return LayerState((call.values.shape[-1],), torch.promote_types(call.values.dtype, torch.float32))

    def packed(self, call, segments, longest, spans, initial):
        outputs, final = [], []
        for document, (start, end) in enumerate(spans):
            states = call.values.new_zeros(call.values.shape[-1]) if initial is None else initial[document]
            for token in range(start, end):
                states = states + call.rates[0, token] * (call.values[0, token] - states)
                outputs.append(states)
            final.append(states)
        return torch.stack(outputs)[None].to(call.values.dtype), torch.stack(final)

    def step(self, call, states):
        states = states + call.rates[0] * (call.values[0] - states)
        return states[None].to(call.values.dtype), states


register("moving_average", MovingAverage())


class OwnRecurrentLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.values, self.rates, self.out = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))

    def forward(self, hidden_states, attention_mask=None, **passed_on):
        normed = self.norm(hidden_states)
        averages = moving_average(self.values(normed), self.rates(normed).sigmoid(), **passed_on)
        return hidden_states + self.out(averages)


class OwnRecurrentModel(OwnModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers[0] = OwnRecurrentLayer(config)
        self.post_init()


class OwnRecurrentForCausalLM(OwnForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnRecurrentModel(config)
        self.post_init()
