"""How far log-probs of labels are from float64, and how much of it comes from the layers and how much from the head.

transformers' model in float64 is no oracle for this: it computes norms, rotary angles and softmax in float32. The
reference of `verify` computes them in float64 too.

Dimensions: N tokens of a datum, K targets of a token, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from truestep.config.schema import Config
from truestep.head.logits import row_statistics, scaled_logits
from truestep.model.policy import Policy
from truestep.rollouts.packing import pack_tokens
from truestep.run.assemble.policy import join_ranks, make_policy
from truestep.tools.verify.reference import Float64, Reference

# What is compared with float64.
OURS = "layers and head in float32"
LAYERS = "layers in float32, head in float64"
HEAD = "layers in float64, head in float32"
LOGITS = "logits of float64, rounded to float32, rest in float64"
SOFTMAX = "logits of float64, rounded to float32, log_softmax in float32"
THEIRS = "transformers in float32"
ROUNDED = "transformers in float64: norms and rotary angles in float32"


@dataclass
class Error:
    """The difference of log-probs to float64, gathered over documents."""

    differences: list[np.ndarray] = field(default_factory=list)
    exact: list[np.ndarray] = field(default_factory=list)

    def add(self, found: np.ndarray, exact: np.ndarray) -> None:
        self.differences.append((found.astype(np.float64) - exact).ravel())
        self.exact.append(exact.ravel())

    @property
    def most(self) -> float:
        return float(np.abs(np.concatenate(self.differences)).max())

    @property
    def most_relative(self) -> float:
        """The largest difference; of log-probs below -1, relative to the log-prob."""
        exact = np.concatenate(self.exact)
        return float((np.abs(np.concatenate(self.differences)) / np.maximum(np.abs(exact), 1.0)).max())

    @property
    def norm(self) -> float:
        """The norm of the differences, relative to that of the log-probs."""
        return float(np.linalg.norm(np.concatenate(self.differences)) / np.linalg.norm(np.concatenate(self.exact)))

    def __str__(self) -> str:
        labels = sum(map(len, self.exact))
        return f"{self.most:.1e} largest, {self.most_relative:.1e} relative, {self.norm:.1e} norm, {labels} labels"


class Exact:
    """The model of a directory in float64. What a document shares with the one before is not computed again.

    `float32_angles`: rotary angles as transformers' models define them, rounded to float32. At position 2,000 they are
    off by 1e-4.
    """

    def __init__(self, directory: Path, float32_angles: bool = False):
        self._model = Reference(directory)._model
        if float32_angles:
            rotary = self._model.base_model.rotary_emb
            rotary.forward = _rounded(type(rotary)(self._model.config))
        self._last: list[int] = []
        self._cache: Any = None
        self._hidden = torch.zeros(0)

    @property
    def head(self) -> torch.Tensor:
        return self._model.get_output_embeddings().weight  # [V, H]

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> torch.Tensor:  # [N, H]
        """Compute what the head multiplies."""
        pairs = list(zip(self._last, ids[:-1], strict=False))
        shared = next((at for at, (last, own) in enumerate(pairs) if last != own), len(pairs))
        if shared:
            self._cache.crop(shared - len(self._last))  # a negative number: how many tokens are dropped
        with Float64():
            given = {"past_key_values": self._cache if shared else None, "use_cache": True}
            output = self._model.base_model(input_ids=torch.tensor([ids[shared:]]), **given)
        self._cache = output.past_key_values
        self._last, self._hidden = ids, torch.cat([self._hidden[:shared], output.last_hidden_state[0]])
        return self._hidden

    @torch.no_grad()
    def logprobs(self, datum: Any) -> np.ndarray:
        hidden = self.hidden(datum.tokens.tolist())
        return of_targets(hidden @ self.head.T, datum)


def _rounded(rotary: Any) -> Any:
    """Compute rotary angles in float32, also where float32 is replaced by float64."""

    def turns(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C.DisableTorchFunction():
            cosine, sine = rotary(torch.zeros((), dtype=torch.float32), position_ids)
            return cosine.double(), sine.double()

    return turns


def of_targets(z: torch.Tensor, datum: Any) -> np.ndarray:  # [N, V] -> [N] or [N, K]
    targets = torch.from_numpy(datum.inputs["target_tokens"].copy())
    own = z.log_softmax(-1).gather(1, targets.reshape(len(targets), -1))
    return own.reshape(targets.shape).numpy()  # type: ignore[no-any-return]


@torch.no_grad()
def parts(directory: Path, documents: Iterable[list[int]]) -> dict[str, Error]:
    """The error of each part, over all tokens behind the first of each document."""
    exact, policy = Exact(directory), policy_of(directory)
    loader: Any = AutoModelForCausalLM
    types = {THEIRS: torch.float32, ROUNDED: torch.float64}
    plain = {name: loader.from_pretrained(directory, dtype=dtype).eval() for name, dtype in types.items()}
    found = {name: Error() for name in (OURS, LAYERS, HEAD, LOGITS, SOFTMAX, *plain)}
    for ids in documents:
        labels = torch.tensor(ids[1:])

        def of(z: torch.Tensor, labels: torch.Tensor = labels) -> np.ndarray:
            return z.log_softmax(-1).gather(1, labels[:, None])[:, 0].numpy()  # type: ignore[no-any-return]

        def head(rows: torch.Tensor, labels: torch.Tensor = labels) -> np.ndarray:
            z = scaled_logits(rows, policy.head_weight, torch.ones(len(rows)), policy.head)
            return row_statistics(z, labels).logprobs.numpy()

        right = exact.hidden(ids)[:-1]
        hidden = policy.hidden(pack_tokens([np.array(ids, np.int64)]))[: len(labels)]
        z = right @ exact.head.T
        own = of(z)
        found[OURS].add(head(hidden), own)
        found[LAYERS].add(of(hidden.double() @ exact.head.T), own)
        found[HEAD].add(head(right.float()), own)
        found[LOGITS].add(of(z.float().double()), own)
        found[SOFTMAX].add(of(z.float()), own)
        for name, model in plain.items():
            found[name].add(of(model(torch.tensor([ids])).logits[0, :-1]), own)
    return found


def policy_of(directory: Path) -> Policy:
    """The policy of a directory as a CPU computes it."""
    config = Config.model_validate(
        {
            "model": {"path": str(directory), "dtype": "float32", "device": "cpu"},
            "data": {"path": "none.jsonl", "tokens_per_microbatch": 4096},
            "schedule": {"docs_per_step": 4},
            "loss": {"type": "cross_entropy"},
        }
    )
    return make_policy(config, join_ranks(config), frozen=True)
