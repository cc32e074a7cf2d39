"""A float64 forward pass of the supported architectures, one document at a time, straight from the files.

Reads `config.json` and `*.safetensors`; uses no model code of transformers. The parameters are float64 leaf tensors
under their Hugging Face names, so that autograd on this plain graph gives the reference gradients.

Shapes: T tokens of the document, H hidden size, V vocabulary, d head dimension.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "granite")


class Transformer:
    """`logits(input_ids)` is [T, V]; `parameters` are the leaves that autograd differentiates."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.kind: str = self.config["model_type"]
        if self.kind not in SUPPORTED:
            raise ValueError(f"the oracle does not know model_type {self.kind}")

        self.parameters: dict[str, Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                self.parameters[name] = tensor.to(torch.float64).requires_grad_(True)

        # A tied tensor is one tensor, under its input embedding's name.
        self.tied: bool = self.config.get("tie_word_embeddings", False)
        if self.tied and "lm_head.weight" in self.parameters:
            del self.parameters["lm_head.weight"]

        self.num_heads: int = self.config["num_attention_heads"]
        self.num_key_value_heads: int = self.config.get("num_key_value_heads") or self.num_heads
        self.head_dimension: int = self.config.get("head_dim") or self.config["hidden_size"] // self.num_heads

    def logits(self, input_ids: list[int], temperature: float = 1.0, routes: None = None) -> Tensor:
        """z = softcap(h W^T) * logits_scale / temperature of docs/contract.md, section 5, [T, V]."""
        head = self.parameters["model.embed_tokens.weight" if self.tied else "lm_head.weight"]
        z = self.hidden_states(input_ids) @ head.T
        cap = self.config.get("final_logit_softcapping")
        if cap is not None:
            z = cap * torch.tanh(z / cap)
        if self.kind == "granite":
            z = z / self.config["logits_scaling"]
        return z / temperature

    def hidden_states(self, input_ids: list[int]) -> Tensor:
        """What the head multiplies: after the final norm, [T, H]."""
        embedding = self.parameters["model.embed_tokens.weight"]
        x = torch.stack([embedding[token] for token in input_ids])
        if self.kind == "gemma2":
            x = x * math.sqrt(self.config["hidden_size"])
        if self.kind == "granite":
            x = x * self.config["embedding_multiplier"]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(x, layer)
        return self._norm(x, "model.norm")

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        name = f"model.layers.{layer}"
        if self.kind == "gemma2":  # a norm before and after each of the two blocks
            attention = self._attention(self._norm(x, f"{name}.input_layernorm"), layer)
            x = x + self._norm(attention, f"{name}.post_attention_layernorm")
            mlp = self._mlp(self._norm(x, f"{name}.pre_feedforward_layernorm"), name)
            return x + self._norm(mlp, f"{name}.post_feedforward_layernorm")
        multiplier = self.config["residual_multiplier"] if self.kind == "granite" else 1.0
        x = x + multiplier * self._attention(self._norm(x, f"{name}.input_layernorm"), layer)
        return x + multiplier * self._mlp(self._norm(x, f"{name}.post_attention_layernorm"), name)

    def _attention(self, x: Tensor, layer: int) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        d = self.head_dimension
        queries = self._linear(x, f"{name}.q_proj")  # [T, heads * d]
        keys = self._linear(x, f"{name}.k_proj")  # [T, key_value_heads * d]
        values = self._linear(x, f"{name}.v_proj")
        allowed = self._allowed(x.shape[0], layer)
        cap = self.config.get("attn_logit_softcapping")

        outputs = []
        for head in range(self.num_heads):
            # Consecutive query heads share one key/value head.
            shared = head // (self.num_heads // self.num_key_value_heads)
            query = queries[:, head * d : (head + 1) * d]
            key = keys[:, shared * d : (shared + 1) * d]
            value = values[:, shared * d : (shared + 1) * d]
            if self.kind == "qwen3":
                query = self._norm(query, f"{name}.q_norm")
                key = self._norm(key, f"{name}.k_norm")
            scores = self._rotate(query) @ self._rotate(key).T * self._attention_scale()  # [T, T]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(~allowed, -math.inf)
            outputs.append(torch.softmax(scores, dim=-1) @ value)
        return self._linear(torch.cat(outputs, dim=-1), f"{name}.o_proj")

    def _attention_scale(self) -> float:
        if self.kind == "gemma2":
            return self.config["query_pre_attn_scalar"] ** -0.5
        if self.kind == "granite":
            return self.config["attention_multiplier"]
        return self.head_dimension**-0.5

    def _allowed(self, length: int, layer: int) -> Tensor:
        """[T, T], true where the row's token may look at the column's."""
        window = self._window(layer)
        allowed = torch.zeros(length, length, dtype=torch.bool)
        for row in range(length):
            for column in range(row + 1):  # itself and what came before
                # A window of w tokens counts the token itself.
                allowed[row, column] = window is None or row - column < window
        return allowed

    def _window(self, layer: int) -> int | None:
        layer_types = self.config.get("layer_types")
        if layer_types is not None:
            return self.config["sliding_window"] if layer_types[layer] == "sliding_attention" else None
        if self.kind == "mistral":
            return self.config.get("sliding_window")
        return None

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of [T, d]: coordinate i turns with coordinate i + d/2."""
        length, d = x.shape
        angles = self._angles(length, d // 2)
        cosine, sine = torch.cos(angles), torch.sin(angles)
        first, second = x[:, : d // 2], x[:, d // 2 :]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    def _angles(self, length: int, half: int) -> Tensor:
        """[T, d/2], each angle in Python's own arithmetic."""
        base = self._rope_base()
        angles = [[position / base ** (i / half) for i in range(half)] for position in range(length)]
        return torch.tensor(angles, dtype=torch.float64)

    def _rope_base(self) -> float:
        # transformers 5 writes `rope_parameters`; older directories have `rope_theta` and `rope_scaling`.
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if parameters.get("rope_type", "default") != "default":
            raise ValueError(f"the oracle does not know rope_type {parameters['rope_type']}")
        return parameters.get("rope_theta", self.config.get("rope_theta", 10000.0))

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = self._linear(x, f"{name}.mlp.gate_proj")
        up = self._linear(x, f"{name}.mlp.up_proj")
        return self._linear(self._activation(gate) * up, f"{name}.mlp.down_proj")

    def _activation(self, x: Tensor) -> Tensor:
        # Gemma2 calls its activation hidden_activation, the others hidden_act.
        activation = self.config["hidden_activation" if self.kind == "gemma2" else "hidden_act"]
        if activation == "silu":
            return x * torch.sigmoid(x)
        if activation == "gelu_pytorch_tanh":
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
        raise ValueError(f"the oracle does not know the activation {activation}")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.parameters[f"{name}.weight"]
        if self.kind == "gemma2":
            weight = 1.0 + weight
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * weight

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.parameters[f"{name}.weight"].T
        bias = self.parameters.get(f"{name}.bias")
        return y if bias is None else y + bias
