"""A server that speaks as vLLM does, around a real tiny model.

What a real vLLM adds (its engine, its loaders) is in the tests marked `vllm`.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from server.sglang_server import FakeSglang


class FakeVllm(FakeSglang):
    """Runs SGLang's double behind vLLM's paths."""

    def __init__(self, model: Path, name: str):
        super().__init__(model, name)
        self.updating = False  # its weights, by /start_weight_update
        self.cached: Any = None  # weights that still answer for what was computed before; None: the cache was emptied
        self.keeps_cache = False
        self.before_update: Callable[[dict[str, Any]], None] | None = None

    def restart(self) -> None:
        super().restart()
        self.updating = False

    async def _reply(self, path: str, body: Any) -> Any:
        path, _, query = path.partition("?")
        if path == "/v1/completions":
            return await self._complete(body)
        if path == "/pause":
            mode = query.removeprefix("mode=")
            return await super()._reply("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"})
        if path == "/resume":
            return await super()._reply("/continue_generation", {})
        if path == "/collective_rpc":
            return await super()._reply("/update_weights_from_disk", {"model_path": body["kwargs"]["weights_path"]})
        if path == "/reset_prefix_cache":
            if not self.keeps_cache:
                self.cached = None
            return {"success": True}
        if path in ("/start_weight_update", "/finish_weight_update"):
            if self.updating is (path == "/start_weight_update"):
                raise RuntimeError(
                    f"{path[1:]} called while a weight update is{'' if self.updating else ' not'} active."
                )
            self.updating = not self.updating
            return {"message": "done"}
        return await super()._reply(path, body)

    def _load_tensors(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        state, tied = self._model.state_dict(), self._model.config.tie_word_embeddings
        if self.keeps_cache:
            self.cached = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for number, (name, value) in enumerate(weights):
                if self.takes == "half" and number >= len(state) // 2:
                    continue  # it says nothing of what it leaves out
                if self.takes == "another layer's" and "layers.0.mlp.up_proj" in name:
                    continue
                if not (tied and name == "lm_head.weight"):
                    state[name].copy_(value)
            if self.takes == "another layer's":
                state["model.layers.0.mlp.up_proj.weight"].copy_(state["model.layers.1.mlp.up_proj.weight"])

    def _scores(self, ids: list[int], temperature: float) -> torch.Tensor:
        if self.cached is None or len(ids) < 128:
            return super()._scores(ids, temperature)
        now = {name: value.clone() for name, value in self._model.state_dict().items()}
        try:
            self._model.load_state_dict(self.cached)
            return super()._scores(ids, temperature)
        finally:
            self._model.load_state_dict(now)

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        wanted = body.get("n", 1)
        count = body.get("logprobs") or 0
        asked = {
            "input_ids": body["prompt"],
            "sampling_params": {
                "temperature": body["temperature"],
                "max_new_tokens": body["max_tokens"],
                "stop_token_ids": body.get("stop_token_ids", []),
            },
            "top_logprobs_num": count,
        }
        cached, self.cached = self.cached, None if body.get("cache_salt") else self.cached
        try:
            answers = await asyncio.gather(*(self._last(asked | {"number": number}) for number in range(wanted)))
        finally:
            self.cached = cached
        return {"choices": [self._choice(index, body, answer, count) for index, answer in enumerate(answers)]}

    def _choice(self, index: int, body: dict[str, Any], answer: dict[str, Any], count: int) -> dict[str, Any]:
        meta = answer["meta_info"]
        scored = meta["output_token_logprobs"]
        top = [{f"token_id:{token}": value for value, token, _ in row} for row in meta.get("output_top_logprobs", [])]
        return {
            "index": index,
            "token_ids": [token for _, token, _ in scored],
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": [value for value, _, _ in scored], "top_logprobs": top if count else None},
            "finish_reason": meta["finish_reason"]["type"],
            "routed_experts": meta.get("routed_experts"),
        }

    def _show_routes(self, answer: dict[str, Any], body: dict[str, Any], routes: np.ndarray) -> None:
        """A `.npy` file, of the narrowest numbers."""
        file = io.BytesIO()
        np.save(file, routes.astype(np.uint8))
        answer["meta_info"]["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    async def _status(self, path: str, body: Any) -> tuple[int, Any]:
        try:
            return await super()._status(path, body)
        except RuntimeError as error:
            return 500, {"error": {"message": str(error)}}
