"""New weights: into a directory that never was, and from there into a server that is made to stand still meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from truestep.policy.policy import Policy
from truestep.policy.save import save_policy
from truestep.sampler.server.client import Client
from truestep.sampler.server.errors import ServerError, UnreachableError

_PREFIX = "truestep-weights-"
_KEPT = 2  # the newest is being read, and a server that was away may still ask for the one before


class WeightsDirectory:
    """A disk that the servers see too. One run writes it."""

    def __init__(self, path: Path):
        self.path = path.absolute()  # a server stands in another working directory

    def write(self, policy: Policy, version: int, dtype: torch.dtype) -> Path:
        """A name that no server has read before: an engine may know a file by its name."""
        name = f"{_PREFIX}{version:012d}-{secrets.token_hex(4)}"
        beside = self.path / f".{name}.partial"
        self.path.mkdir(parents=True, exist_ok=True)
        save_policy(policy, beside, dtype)
        if policy.facts.tied:
            _write_head(policy, beside, dtype)
        os.replace(beside, self.path / name)
        self._remove_old(self.path / name)
        return self.path / name

    def _remove_old(self, newest: Path) -> None:
        """Those of an earlier start go too, whatever their version: their documents were rolled back."""
        for leftover in self.path.glob(f".{_PREFIX}*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        others = sorted(
            (path for path in self.path.glob(f"{_PREFIX}*") if path != newest), key=lambda path: path.stat().st_mtime
        )
        for old in others[: len(others) - (_KEPT - 1)]:
            shutil.rmtree(old, ignore_errors=True)

    def clear(self) -> None:
        """The run's checkpoints have its weights."""
        for path in self.path.glob(f"{_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # what others put there stays
            self.path.rmdir()


def _write_head(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    """A tied tensor is saved once, under its input's name. vLLM on a CPU keeps a copy of the head, packed for its
    products, and packs it anew only where the head has an entry of its own."""
    name = "lm_head.weight"
    file = "model-lm-head.safetensors"
    head = policy.head_weight.detach().to(dtype).cpu().contiguous()
    save_file({name: head}, directory / file, metadata={"format": "pt"})
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text(encoding="utf-8"))
        listed["weight_map"][name] = file
        index.write_text(json.dumps(listed), encoding="utf-8")


async def pause(client: Client, mode: str, timeout: float) -> None:
    await client.post(f"/pause?mode={mode}", timeout=timeout)


async def load(client: Client, weights: Path, timeout: float) -> None:
    """Into a server that stands still. A cache of what the old weights computed must not outlive them."""
    try:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        await client.post("/collective_rpc", body, timeout)
    except UnreachableError as error:
        await _blame(client, weights, error)
    # Also what running completions have computed so far: they go on with the new weights' own view of their beginning.
    answer = await client.post("/reset_prefix_cache?reset_running_requests=true", timeout=timeout)
    if isinstance(answer, dict) and answer.get("success") is False:
        raise UnreachableError(
            "/reset_prefix_cache did not succeed: something still holds the cache of the old weights"
        )


async def resume(client: Client, timeout: float) -> None:
    await client.post("/resume", timeout=timeout)


async def _blame(client: Client, weights: Path, error: UnreachableError) -> None:
    """A server that lives on after it refused weights will refuse them again; one that is gone is another matter."""
    try:
        await client.get("/health", timeout=5)
    except (UnreachableError, ServerError):
        raise error from None
    if "answered 500" not in str(error):
        raise error
    raise ServerError(
        f"sampler.urls: {client.url} could not load the weights in {weights}: {error}. Is that directory on a disk "
        "that the server sees (sampler.weights_directory), and is the served model of the trainer's architecture?"
    ) from error
