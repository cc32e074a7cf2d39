"""The global random state, from which a user's own loss or optimizer may draw. truestep's own draws depend only on
seeds and counters, and those of a reward on its completion's seed."""

import random
from typing import Any

import numpy as np
import torch


def seed_random(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def random_tensors() -> dict[str, torch.Tensor]:
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore_random(state: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def encode_random() -> dict[str, Any]:
    """Return the current random state as JSON values."""
    return random_state() | {name: tensor.numpy().tobytes().hex() for name, tensor in random_tensors().items()}


def restore_encoded(state: dict[str, Any]) -> None:
    """Restore a state that `encode_random` returned."""
    tensors = {name: _from_hex(value) for name, value in state.items() if name in ("cpu", "cuda")}
    restore_random(state, tensors)


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
