"""The user's architecture in float64: transformers' code with eager attention, one document at a time.

transformers computes norms, rotary embeddings and softmax in float32, whatever the model's dtype is. Here float32 is
replaced by float64 in all calls.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from truestep.tools.verify.oracle.routers import Routes


class Float64(TorchFunctionMode):
    """Replaces float32 by float64."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.Tensor.float:
            return torch.Tensor.double(*arguments)
        wider = [torch.float64 if value is torch.float32 else value for value in arguments]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (options or {}).items()}
        return function(*wider, **named)


def _read_adapter(directory: Path) -> dict[str, Tensor]:
    tensors = load_file(directory / "adapter_model.safetensors")
    return {
        name.removeprefix("base_model.model."): tensor.double().requires_grad_() for name, tensor in tensors.items()
    }


class Reference:
    """The float64 model of a Hugging Face directory. `weights` replace the directory's weights. With an adapter, layers
    use merged weights, and only the adapter has gradients."""

    def __init__(
        self,
        directory: Path,
        weights: Mapping[str, Tensor] | None = None,
        trust_remote_code: bool = False,
        adapter: Path | None = None,
    ):
        from transformers import AutoModelForCausalLM

        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(
            directory,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",  # grouped products have no float64
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        ).eval()
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.double()
        self._exact_rotary()
        self.buffers: dict[str, Tensor] = dict(self._model.named_buffers())
        self.parameters: dict[str, Tensor] = dict(self._model.named_parameters())  # a tied tensor occurs once
        ends = [self._model.get_input_embeddings().weight, self._model.get_output_embeddings().weight]
        self.ends = {name for name, value in self.parameters.items() if any(value is end for end in ends)}
        adapters = {} if adapter is None else _read_adapter(adapter)
        self.parameters |= adapters
        with torch.no_grad():
            for name in self.parameters.keys() & (weights or {}).keys():
                self.parameters[name].copy_((weights or {})[name])
            for name in self.buffers.keys() & (weights or {}).keys():
                self.buffers[name].copy_((weights or {})[name])
        # The padding token's row of the embedding is trained like any other, as in training.
        self._model.get_input_embeddings().padding_idx = None
        if adapter is not None:
            self._merge(adapter, adapters)
            self.parameters = adapters

    def _merge(self, adapter: Path, adapters: Mapping[str, Tensor]) -> None:
        """Replace W by W + (alpha / rank) · B A, with gradients for A and B."""
        settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        for name, down in adapters.items():
            if name.endswith("lora_A.weight"):
                layer = self._model.get_submodule(name.removesuffix(".lora_A.weight"))
                plain = layer.weight.detach()
                up = adapters[name.replace("lora_A", "lora_B")]
                del layer._parameters["weight"]
                layer.weight = plain + settings["lora_alpha"] / settings["r"] * up @ down

    def freeze(self, patterns: Sequence[str], *, routers: bool = False) -> None:
        """Remove the weights whose names match a pattern from `parameters`; with `routers`, also the weights of all
        routers. A tied weight has two names."""
        named = self._model.named_parameters(remove_duplicate=False)
        frozen = {id(weight) for name, weight in named for pattern in patterns if fnmatchcase(name, pattern)}
        if routers:
            frozen |= {id(weight) for _, router in self._routers for weight in router.parameters()}
        self.parameters = {name: weight for name, weight in self.parameters.items() if id(weight) not in frozen}

    def _exact_rotary(self) -> None:
        """Compute the frequencies of default RoPE in float64, since transformers computes them in float32."""
        config = self._model.config.get_text_config()
        parameters = getattr(config, "rope_parameters", None) or {}
        if parameters.get("rope_type", "default") != "default" or "rope_theta" not in parameters:
            return
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * parameters.get("partial_rotary_factor", 1.0))
        exact = 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
        for module in self._model.modules():
            rounded = getattr(module, "inv_freq", None)
            if isinstance(rounded, Tensor) and rounded.shape == exact.shape and rounded.allclose(exact, rtol=1e-5):
                module.inv_freq = exact

    def logits(
        self, input_ids: list[int], temperature: float = 1.0, routes: list[list[list[int]]] | None = None
    ) -> Tensor:  # [T, V]
        """Compute logits. `routes`: the experts of the first tokens, in each layer with a router; later tokens use the
        router's own choice."""
        return self._run(input_ids, routes)[0] / temperature

    def routes(self, input_ids: list[int], routes: list[list[list[int]]] | None = None) -> dict[str, Routes]:
        """Return the results of each router for the tokens of a document, by the router's name."""
        return self._run(input_ids, routes)[1] if self._routers else {}

    @property
    def _routers(self) -> list[tuple[str, Any]]:
        return [(n, module) for n, module in self._model.named_modules() if type(module).__name__.endswith("Router")]

    def _run(self, input_ids: list[int], routes: list[list[list[int]]] | None) -> tuple[Tensor, dict[str, Routes]]:
        found: dict[str, Routes] = {}

        def keep(name: str, layer: int) -> Callable[..., Any]:
            def hook(module: Any, given: Any, output: Any) -> Any:
                if not (isinstance(output, tuple) and len(output) == 3):
                    return None
                logits, scores, index = output
                sigmoid = _of_sigmoids(logits, scores, index)
                chosen = [row[layer] for row in routes or []] + index.tolist()[len(routes or []) :]
                found[name] = Routes(logits, chosen, index.tolist(), sigmoid)
                if routes is None:
                    return None
                return logits, _weighed(logits, scores, index, torch.tensor(chosen), sigmoid), torch.tensor(chosen)

            return hook

        hooks = [module.register_forward_hook(keep(name, layer)) for layer, (name, module) in enumerate(self._routers)]
        try:
            with Float64():
                output = self._model(input_ids=torch.tensor([input_ids]), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return output.logits[0], found


def _weighed(logits: Tensor, scores: Tensor, index: Tensor, chosen: Tensor, sigmoid: bool) -> Tensor:
    """Compute the weights of given experts as a router computes those of its own choice: sigmoids or softmax, then
    times a constant, or divided by their sum and times a constant."""
    values = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, -1)
    theirs, ours = values.gather(1, index), values.gather(1, chosen)
    constant = scores.detach() / theirs.detach()
    if bool(((constant - constant[0, 0]).abs() <= 1e-9 * constant[0, 0]).all()):
        return ours * constant[0, 0]
    # The divisor is the sum plus a small constant against division by zero. Two tokens with different sums determine
    # both constants.
    total = scores.detach().sum(-1)
    sums = theirs.detach().sum(-1)
    factor = float(total.mean()) if float(total.std()) < 1e-12 else float(_limit(sums, total))
    least = float((sums * (factor / total - 1)).mean())
    return factor * ours / (ours.sum(-1, keepdim=True) + least)


def _limit(sums: Tensor, total: Tensor) -> Tensor:
    """Return f in total = f · sums / (sums + least), from the smallest and the largest sum."""
    low, high = int(sums.argmin()), int(sums.argmax())
    inverse = (sums[high] / total[high] - sums[low] / total[low]) / (sums[high] - sums[low])
    return 1 / inverse


def _of_sigmoids(logits: Tensor, scores: Tensor, index: Tensor) -> bool:
    """Tell whether the scores of a token's experts are proportional to the sigmoids of their logits."""
    sigmoids = torch.sigmoid(logits).gather(1, index)
    ratios = scores / sigmoids
    return bool(((ratios - ratios[:, :1]).abs() <= 1e-4 * ratios.abs()).all())
